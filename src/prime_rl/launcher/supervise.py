"""Start the processes of a run, watch them, restart alone what fails, and stop them all: nothing is left behind.

`SupervisedChild` is one life of one process, `Watchdog` judges from status files who has stalled, `RestartBudget` limits restarts, `Supervisor` is
the loop over all of them.
"""

import json
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

from prime_rl.config import RLConfig, child_env
from prime_rl.launcher.plan import RECOVER, ProcessSpec, ServerSpec
from prime_rl.launcher.rundir import forget_status_of, newest_steps
from prime_rl.lifeline import Child, Lifeline
from prime_rl.monitor import read_status
from prime_rl.monitor.status import ProcessStatus, Waiting, say_for, unless_full
from prime_rl.processes import ProcessId, backoff_seconds, descendants, describe_exit, send, table
from prime_rl.wait import WaitTimeout, wait

POLL_SECONDS = 0.1
JUDGE_SECONDS = 0.5
TABLE_SECONDS = 5.0
DRAIN_SECONDS = 300.0
STOP_SECONDS = 15.0
AFTER_SECONDS = 30.0
_ECHO_SECONDS = 0.5
_MAX_LOOK_SECONDS = 2.5  # a longer gap was the launcher's own: a laptop that slept, a SIGSTOP, a starved machine
_BUDGET_WINDOW_SECONDS = 3600.0
_MAX_BACKOFF_SECONDS = 60.0
_BEATS_TO_EXIT = 5  # heartbeat timeouts; uploads to W&B may take a while
LOG_TAIL_LINES = 20
LOG_TAIL_BYTES = 1 << 16
_RANK = re.compile(r"\s*rank\s*: (\d+)")
_KILLED = re.compile(r"\s*exitcode\s*: -(\d+)")
_ERROR_LINE = re.compile(r"(\w+: )?error: ")  # `error: …`, or `trainer: error: …` of a bad configuration


class RunOutcome(Enum):
    """How a run ended; the value is the exit status of `rl`."""

    SUCCESS = 0
    FAILURE = 1
    INTERRUPTED = 130


@dataclass(frozen=True)
class RestartPolicy:
    """When a process counts as stalled, and how often it is restarted. Times in seconds.

    Args:
        max_restarts: Of one process within an hour, and of one process while the run gets no further; 0: the first failure ends the run.
        backoff: Before the first of them; doubled with each further one, up to a minute.
        heartbeat_timeout: Without a heartbeat.
        stall_timeout: Without progress, while it waits for nobody.
    """

    max_restarts: int = 0
    backoff: float = 1.0
    heartbeat_timeout: float = 60.0
    stall_timeout: float = 1800.0


@dataclass(frozen=True)
class Restart:
    """One line of `logs/restarts.jsonl`. `time` is unix seconds; `lived` and `after` are durations in seconds."""

    time: float
    process: str
    reason: str
    number: int
    after: float
    lived: float
    recover: bool


# -- one incarnation of one process ----------------------------------------------------------------------------------------


class SupervisedChild(Child):
    """One incarnation of a process, its output appended to its log."""

    def __init__(
        self,
        spec: ProcessSpec,
        lifeline: Lifeline,
        environ: Mapping[str, str],
        options: Sequence[str] = (),
        began: float = 0.0,
    ) -> None:
        """Start it. `options` follow its arguments; `began` is the launcher's clock."""
        self.spec, self.began, self.name = spec, began, spec.name
        # Children read complete files: a setting meant for `rl` may name nothing in theirs.
        env = {**child_env(environ, RLConfig), **spec.env}
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        with spec.log.open("ab") as log:
            self._log_start = log.tell()  # bytes that earlier incarnations wrote
            super().__init__([*spec.argv, *options], env, lifeline, log)

    def interrupt(self) -> None:
        """Ask it to finish: SIGINT to itself, or to torchrun's ranks, whose agent would kill them soon after."""
        ranks = [each for each in table().values() if self.spec.drain_children and each.parent == self.pid]
        for rank in ranks:
            send(rank.id, signal.SIGINT)
        if not ranks:
            self.signal(signal.SIGINT)

    def last_words(self) -> list[str]:
        """The last `error:` line at the end of its log, or which of its ranks was killed, else the last lines."""
        lines = self._log_tail()
        return _error_lines(lines)[-1:] or killed_rank(lines) or lines[-LOG_TAIL_LINES:]

    def user_error(self) -> str | None:
        """The last `error:` line at the end of its log: what the user has to correct."""
        return next(iter(_error_lines(self._log_tail())[-1:]), None)

    def interrupted(self, status: int) -> bool:
        """Whether this status is that of one that was asked to stop, also by a rank that could not hear that yet: it was importing."""
        if status in (0, -signal.SIGINT, 128 + signal.SIGINT):
            return True
        return any(line.endswith("SIGINT") for line in killed_rank(self._log_tail()))

    def _log_tail(self) -> list[str]:
        with self.spec.log.open("rb") as file:
            file.seek(max(self._log_start, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            lines = [line.rstrip() for line in file.read().decode(errors="replace").splitlines()]
        return [line for line in lines if line.strip(" =-")]  # no rulers


def killed_rank(lines: Sequence[str]) -> list[str]:
    """One line that names the first rank that a signal killed, by torchrun's last report in a log; empty where there is none."""
    cause = max((number for number, line in enumerate(lines) if line.startswith("Root Cause")), default=len(lines))
    rank = next(filter(None, map(_RANK.match, lines[cause:])), None)
    code = next(filter(None, map(_KILLED.match, lines[cause:])), None)
    if rank is None or code is None:
        return []
    return [f"rank {rank[1]} was killed by {signal.Signals(int(code[1])).name}"]


def _error_lines(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if _ERROR_LINE.match(line)]


# -- how often a process is restarted --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grant:
    """Permission for the `number`-th restart within the hour, in `seconds`."""

    number: int
    seconds: float


class RestartBudget:
    """What is left of `max_restarts`, for each process by itself.

    It limits the restarts of an hour and, however far apart they are, those since the run last got beyond its furthest point: a fault that
    comes back at the same place is not mended by going there again.

    Args:
        furthest: The newest steps of the run, in independent counts.
    """

    def __init__(self, policy: RestartPolicy, furthest: Sequence[int] = ()) -> None:
        self._policy = policy
        self._furthest = tuple(furthest)
        self._times: dict[str, list[float]] = {}
        self._without_progress: dict[str, int] = {}

    def ask(self, process: str, now: float, newest: Sequence[int] = ()) -> Grant | str:
        """Grant one more restart, which then counts, or return the limit in words that follow `was restarted 3 times`.

        Args:
            now: Seconds of the launcher's clock.
            newest: The newest steps of the run, in the same counts as `furthest`. A step that is repeated is no progress.
        """
        furthest = self._furthest or tuple(newest)
        if any(step > before for step, before in zip(newest, furthest, strict=bool(newest))):
            self._without_progress.clear()
        self._furthest = tuple(map(max, newest, furthest)) if newest else furthest
        recent = [then for then in self._times.get(process, []) if now - then < _BUDGET_WINDOW_SECONDS]
        self._times[process] = recent
        if len(recent) >= self._policy.max_restarts:
            return "within an hour"
        if self._without_progress.get(process, 0) >= self._policy.max_restarts:
            return "without the run getting any further"
        self._without_progress[process] = self._without_progress.get(process, 0) + 1
        recent.append(now)
        return Grant(len(recent), backoff_seconds(len(recent), self._policy.backoff, _MAX_BACKOFF_SECONDS))


# -- who has stalled -------------------------------------------------------------------------------------------------------


class LoopClock:
    """Seconds in which the launcher was looking. While it did not look nobody counts as silent."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._last = monotonic()
        self.now = 0.0

    def tick(self) -> bool:
        """Call it at every look. Returns whether the launcher had been away for longer than a look takes."""
        last, self._last = self._last, self._monotonic()
        self.now += min(self._last - last, _MAX_LOOK_SECONDS)
        return self._last - last > _MAX_LOOK_SECONDS


@dataclass
class _Signs:
    """What one status file said last, and since when (launcher's clock)."""

    heartbeat: float
    heartbeat_at: float
    progress: tuple[float, Waiting | None]
    progress_at: float
    pulses: bool = False  # a server that reports each answer of its engine as progress


@dataclass
class _Watched:
    """One incarnation of a process, since `began`."""

    began: float
    signs: dict[str, _Signs] = field(default_factory=dict)
    stopped: dict[ProcessId, float] = field(default_factory=dict)


class Watchdog:
    """Judges who has stalled: by what the status files say, and by how long they have said the same on the launcher's own clock.

    Clocks of other processes, and of other hosts' file systems, are never compared with ours, so neither a laptop that slept nor a clock that was
    set makes anybody look dead. A status named `trainer.1` is rank 1's and belongs to the trainer.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._watched: dict[str, _Watched] = {}

    def begin(self, process: str, now: float) -> None:
        """Watch a new incarnation: what was seen of the one before no longer counts."""
        self._watched[process] = _Watched(now)

    def end(self, process: str) -> None:
        self._watched.pop(process, None)

    def reset(self, now: float) -> None:
        """The launcher was away, and perhaps they all were: everybody's time begins anew."""
        for process in self._watched:
            self.begin(process, now)

    def stalled(
        self,
        now: float,
        statuses: Mapping[str, ProcessStatus],
        stopped: Mapping[str, Iterable[ProcessId]],
        services: Iterable[str] = (),
    ) -> dict[str, str]:
        """Why each stalled process counts as such, by name.

        Args:
            now: Of the launcher's clock, in seconds.
            statuses: Last statuses, by name.
            stopped: Processes that a signal has stopped, by the name of the process they belong to.
            services: Without requests these make no progress. One that reports its engine's answers as progress must go on doing so.
        """
        faults = {}
        for name, watched in self._watched.items():
            own = {key: status for key, status in statuses.items() if key.partition(".")[0] == name}
            reasons = [self._stopped(now, watched, stopped.get(name, ()))]
            reasons += [self._silent(now, watched, key, status, name in services) for key, status in own.items()]
            if name not in own and name not in services and now - watched.began > self._policy.stall_timeout:
                reasons.append(f"has not reported within {self._policy.stall_timeout:.0f} s")
            if reason := next(filter(None, reasons), None):
                faults[name] = reason
        return faults

    def _stopped(self, now: float, watched: _Watched, stopped: Iterable[ProcessId]) -> str | None:
        watched.stopped = {process: watched.stopped.get(process, now) for process in stopped}
        longest = max((now - since for since in watched.stopped.values()), default=0.0)
        return f"has been stopped (SIGSTOP) for {longest:.0f} s" if longest > self._policy.heartbeat_timeout else None

    def _silent(self, now: float, watched: _Watched, key: str, status: ProcessStatus, service: bool) -> str | None:
        rank, progress = key.partition(".")[2], (status.progress, status.waiting)
        signs = watched.signs.setdefault(key, _Signs(status.heartbeat, now, progress, now))
        if signs.heartbeat != status.heartbeat or (service and status.ready is None):  # ready_timeout bounds its start
            signs.heartbeat, signs.heartbeat_at = status.heartbeat, now
        if signs.progress != progress:
            signs.pulses = status.ready is not None
            signs.progress, signs.progress_at = progress, now
        silent = now - signs.heartbeat_at
        if status.outcome is not None:  # the heartbeat ends with the last status; what is left to do is to exit
            late = not rank and silent > _BEATS_TO_EXIT * self._policy.heartbeat_timeout
            return f"said `{status.outcome}` {silent:.0f} s ago and has not ended" if late else None
        if rank:  # rank 0 reports progress for all ranks
            signs.progress_at = now
        reason = stall_reason(status, self._policy, silent, now - signs.progress_at, service, signs.pulses)
        return f"rank {rank} {reason}" if rank and reason else reason


def stall_reason(
    status: ProcessStatus, policy: RestartPolicy, silent: float, unchanged: float, service: bool, pulses: bool
) -> str | None:
    """Why a living process counts as stalled, as words that follow its name; None where it does not.

    Args:
        silent: Seconds since its last heartbeat.
        unchanged: Seconds since its last progress, or since its wait began.
        service: It makes no progress without requests.
        pulses: A service that reports its engine's answers as progress.
    """
    if silent > policy.heartbeat_timeout:
        return f"has given no sign of life for {silent:.0f} s"
    wait = status.waiting
    if service:
        mute = pulses and wait is None and unchanged > policy.heartbeat_timeout
        return f"has had no answer from its engine for {unchanged:.0f} s" if mute else None
    if wait is None:
        where = status.phase if status.step is None else f"{status.phase}, step {status.step}"
        return f"has stalled for {unchanged:.0f} s ({where})" if unchanged > policy.stall_timeout else None
    overdue = unchanged - (wait.deadline - wait.since)
    if overdue <= policy.heartbeat_timeout:
        return None
    return f"still waits for {wait.subject} from {wait.owner}, {overdue:.0f} s after its own deadline"


# -- the loop --------------------------------------------------------------------------------------------------------------


@dataclass
class _Managed:
    """A process through all its incarnations. Times by the launcher's clock, in seconds."""

    spec: ProcessSpec
    server: ServerSpec | None
    due: float | None = 0.0  # when to start it; None: it runs, or is over
    options: tuple[str, ...] = ()
    child: SupervisedChild | None = None  # the last one
    over: bool = False  # it ended well, or the run goes on without it
    ready: bool = False  # in this incarnation
    was_ready: bool = False  # in any incarnation

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_job(self) -> bool:
        return not self.spec.service


@dataclass(frozen=True)
class _Failure:
    """A process that must not have ended, or had to be killed, and why."""

    managed: _Managed
    child: SupervisedChild
    reason: str
    user_error: str | None = None  # its last line, where that says what the user has to correct
    never_ready: bool = False  # it was given all the time it may take to start

    def __str__(self) -> str:
        last = self.child.last_words()[-1:] if self.reason.startswith("failed") else []
        cause = self.user_error or (last[0].strip() if last else None)
        return self.reason if cause is None else f"{self.reason} ({cause})"


class Supervisor:
    """Runs processes to the end of the run.

    Args:
        say: Shows a line to the user.
        tick: Called at every look.
        doctor: Says which process keeps the run from going on, in one line, or in full when the run ends by it.
        drained: Says what the jobs still do when they are asked to stop.

    Attributes:
        failures: How the processes ended that made the run fail, and the ends of their logs.
        to_correct: Whether a process ended by an error that only the user can correct.
    """

    def __init__(
        self,
        processes: Sequence[ProcessSpec],
        servers: Sequence[ServerSpec],
        output_dir: Path,
        say: Callable[[str], None],
        tick: Callable[[], None] = lambda: None,
        policy: RestartPolicy | None = None,
        doctor: Callable[[bool], Sequence[str]] = lambda full: (),
        drain_seconds: float = DRAIN_SECONDS,
        stop_seconds: float = STOP_SECONDS,
        drained: Callable[[], str] = lambda: "the current step will be finished",
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._policy = policy or RestartPolicy()
        self._output_dir, self._environ = output_dir, environ
        self._say, self._tick, self._doctor, self._drained = say, tick, doctor, drained
        self._drain_seconds, self._stop_seconds = drain_seconds, stop_seconds
        by_name = {server.name: server for server in servers}
        self._managed = {spec.name: _Managed(spec, by_name.get(spec.name)) for spec in processes}
        self._clock = LoopClock()
        self._budget = RestartBudget(self._policy, newest_steps(output_dir))
        self._watchdog = Watchdog(self._policy)
        self._next_judgement = self._next_table = 0.0
        self._stopped: Mapping[str, Sequence[ProcessId]] = {}
        self._interrupts = 0
        self._interrupted_at = -math.inf
        self._drain_deadline: float | None = None
        self.restarts: list[Restart] = []
        self.failures: list[str] = []
        self.to_correct = False

    def run(self, signals: bool = True) -> RunOutcome:
        """Block until the run is over and its processes are stopped. `signals`: handle Ctrl-C and its like, in the main thread alone."""
        numbers = [signal.SIGINT, signal.SIGTERM] if signals else []
        if signals and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup: the terminal may go
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._interrupt) for number in numbers}
        try:
            with Lifeline() as lifeline:
                try:
                    return self._loop(lifeline)
                finally:
                    self._stop_all()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop(self) -> None:
        """End the run now, from any thread; what is lost is lost."""
        self._interrupts = 2

    def _interrupt(self, number: int, frame: object) -> None:
        """What wraps us (`uv run`, `timeout`) hands on a signal that our group got as well: one request may come twice."""
        now = time.monotonic()
        if now - self._interrupted_at > _ECHO_SECONDS:
            self._interrupts += 1
        self._interrupted_at = now

    def _loop(self, lifeline: Lifeline) -> RunOutcome:
        while True:  # bounded: as long as the run; every process is watched for stalls
            if self._clock.tick():
                self._watchdog.reset(self._clock.now)
            for managed in self._managed.values():
                if managed.due is not None and self._clock.now >= managed.due and self._may_start(managed.spec):
                    self._start(managed, lifeline)
            if (outcome := self._look()) is not None:
                return outcome
            self._tick()
            time.sleep(POLL_SECONDS)

    def _look(self) -> RunOutcome | None:
        """One look at everything: the outcome once there is one."""
        if self._interrupts > 1:
            self._say("stopping now")
            return RunOutcome.INTERRUPTED
        if self._interrupts == 1 and self._drain_deadline is None:
            self._drain()
        if self._drain_deadline is not None:
            return self._look_while_draining(self._drain_deadline)
        failures = [*self._ended(), *self._kill_stalled()]
        if not self._jobs_left():
            return RunOutcome.SUCCESS
        answers = [self._restart(failure) for failure in failures]  # each is reported
        return None if all(answers) else RunOutcome.FAILURE

    def _jobs_left(self) -> bool:
        return any(managed.is_job and not managed.over for managed in self._managed.values())

    def _running(self) -> list[tuple[_Managed, SupervisedChild]]:
        managed = self._managed.values()
        return [(each, each.child) for each in managed if each.child is not None and each.child.running]

    def _may_start(self, spec: ProcessSpec) -> bool:
        reported = spec.after is None or self._clock.now > AFTER_SECONDS or spec.after in read_status(self._output_dir)
        # A server that never serves ends the run, or leaves it.
        return reported and all(self._managed[name].was_ready or self._managed[name].over for name in spec.after_ready)

    def _start(self, managed: _Managed, lifeline: Lifeline) -> None:
        now, managed.due, managed.ready = self._clock.now, None, False
        managed.child = SupervisedChild(managed.spec, lifeline, self._environ, managed.options, now)
        self._watchdog.begin(managed.name, now)

    # -- failures ----------------------------------------------------------------------------------------------------------

    def _ended(self) -> list[_Failure]:
        """Reap what has ended; return those that must not have: a job that failed, a service that stopped."""
        failures = []
        for managed, child in self._running():
            if (status := child.status) is None:
                continue
            self._reap(managed, child)
            # A job that ended well by its exit status alone was stopped by somebody, apart from the run.
            last = read_status(self._output_dir).get(child.name)
            finished = managed.is_job and (last is None or last.outcome == "finished")
            if status == 0 and finished:
                managed.over = True
                continue
            reason = describe_exit(status)
            if status == 0 and managed.is_job and last is not None:
                reason = f"ended too early ({last.outcome or 'without a last word'})"
            user_error = child.user_error() if status > 0 else None
            failures.append(_Failure(managed, child, reason, user_error))
        return failures

    def _kill_stalled(self) -> list[_Failure]:
        if self._clock.now < self._next_judgement:
            return []
        self._next_judgement = self._clock.now + JUDGE_SECONDS
        statuses, running = read_status(self._output_dir), self._running()
        for managed, child in running:
            self._note_ready(managed, child, statuses.get(managed.name))
        if self._clock.now >= self._next_table:  # long on a big machine: not looked at more often than needed
            self._next_table = self._clock.now + min(TABLE_SECONDS, self._policy.heartbeat_timeout / 6)
            self._stopped = _stopped_processes([child for _, child in running])
        services = [managed.name for managed, _ in running if not managed.is_job]
        faults = self._watchdog.stalled(self._clock.now, statuses, self._stopped, services)
        failures = []
        for managed, child in running:
            server = managed.server
            late = server is not None and not managed.ready and self._clock.now - child.began > server.ready_timeout
            if server is not None and late:
                failures.append(self._kill(managed, child, f"is not ready after {server.ready_timeout:.0f} s"))
            elif managed.name in faults:
                failures.append(self._kill(managed, child, faults[managed.name]))
        return failures

    def _note_ready(self, managed: _Managed, child: SupervisedChild, status: ProcessStatus | None) -> None:
        """Record that this incarnation is ready, by its own status (that of the one before was removed)."""
        if managed.ready or status is None or status.ready is None:
            return
        managed.ready = managed.was_ready = True
        if managed.server is not None:
            self._say(f"{managed.name} ready in {self._clock.now - child.began:.1f} s ({managed.server.url})")

    def _kill(self, managed: _Managed, child: SupervisedChild, reason: str) -> _Failure:
        """Diagnose while it can still be seen, then kill it."""
        self._consult_doctor(full=False)
        self._reap(managed, child)
        return _Failure(managed, child, reason, never_ready=managed.server is not None and not managed.was_ready)

    def _reap(self, managed: _Managed, child: SupervisedChild) -> None:
        child.reap()
        for process in child.survivors:
            self._say(f"warning: pid {process.pid} of {child.name} does not die of SIGKILL: it hangs in the kernel")
        self._watchdog.end(child.name)
        self._note_ready(managed, child, read_status(self._output_dir).get(child.name))

    def _restart(self, failure: _Failure) -> bool:
        """Schedule a restart where it may help; return whether the run goes on."""
        managed, name, now, most = failure.managed, failure.managed.name, self._clock.now, self._policy.max_restarts
        # Before it was ready a second try would end with the same line.
        to_correct = failure.user_error is not None and not managed.was_ready
        self.to_correct |= to_correct
        grant = (
            None if to_correct or failure.never_ready else self._budget.ask(name, now, newest_steps(self._output_dir))
        )
        if not isinstance(grant, Grant):
            self._report(failure)
            if grant is not None and most:
                self._say(f"error: {name} was started again {most} times {grant}: giving up")
                self._consult_doctor()
            return self._does_without(managed)
        recover = managed.was_ready and managed.is_job
        managed.due, managed.options = now + grant.seconds, ()
        if recover and RECOVER not in failure.child.spec.argv:
            managed.options = (RECOVER,)
        forget_status_of(self._output_dir, name)
        lived = now - failure.child.began
        restart = Restart(time.time(), name, str(failure), grant.number, grant.seconds, lived, recover)
        self.restarts.append(restart)
        self._say(
            f"{name} {restart.reason}: starting it again in {grant.seconds:g} s "
            f"(restart {grant.number} of at most {most} an hour{', recovering' if recover else ''})"
        )
        path = self._output_dir / "logs" / "restarts.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with unless_full(), path.open("a") as file:
            file.write(json.dumps(asdict(restart)) + "\n")
        return True

    def _does_without(self, managed: _Managed) -> bool:
        """Whether the run goes on without this process: one server of several is given up alone."""
        others = [each.name for each in self._managed.values() if each.server and not each.over and each is not managed]
        if managed.server is None or not others or not self._policy.max_restarts:
            return False
        managed.over = True
        self._say(f"the run goes on without {managed.name}, on {', '.join(others)}")
        return True

    def _report(self, failure: _Failure) -> None:
        child, last_words = failure.child, failure.child.last_words()
        self._say(f"error: {child.name} {failure.reason}; the end of {child.spec.log}:")
        for line in last_words:
            self._say(f"  {line}")
        self.failures += [f"{child.name} {failure.reason}", *last_words]

    def _consult_doctor(self, full: bool = True) -> None:
        for line in self._doctor(full):
            self._say(line)

    # -- stopping ----------------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        self._drain_deadline = self._clock.now + self._drain_seconds
        self._say(f"draining: {self._drained()}; interrupt again to stop now")
        for managed in self._managed.values():
            if managed.due is not None:
                managed.due, managed.over = None, True
                say_for(self._output_dir, managed.name, "stopped")
        for managed, child in self._running():
            if managed.is_job:
                child.interrupt()

    def _look_while_draining(self, deadline: float) -> RunOutcome | None:
        for managed, child in self._running():
            if (status := child.status) is None:
                continue
            self._reap(managed, child)
            managed.over = True
            stopped, reason = child.interrupted(status), describe_exit(status)
            if managed.is_job:
                say_for(self._output_dir, child.name, "stopped" if stopped else f"failed: it {reason}")
            if not managed.is_job or not stopped:
                self._report(_Failure(managed, child, reason))
        if not self._jobs_left():
            return RunOutcome.INTERRUPTED
        if self._clock.now < deadline:
            return None
        late = ", ".join(managed.name for managed, _ in self._running() if managed.is_job)
        self._say(f"{late} did not finish within {self._drain_seconds:.0f} s: stopping")
        self._consult_doctor()
        return RunOutcome.INTERRUPTED

    def _stop_all(self) -> None:
        """SIGTERM, a bounded wait (cut short by a second Ctrl-C), then SIGKILL to each process and all that it has started."""
        running = self._running()
        if running:
            self._say(f"stopping {', '.join(managed.name for managed, _ in running)}")
        for managed, child in running:
            # A server that is still loading hears no SIGTERM and has nothing to lose.
            loading = managed.server is not None and not managed.ready and self._drain_deadline is None
            child.signal(signal.SIGKILL if loading else signal.SIGTERM)
        with suppress(WaitTimeout):
            wait(
                lambda: all(child.status is not None for _, child in running),
                subject="end of the processes", owner="themselves", seconds=self._stop_seconds, poll=POLL_SECONDS,
                stop=lambda: self._interrupts > 1,
            )  # fmt: skip
        for _, child in running:
            child.reap()


def _stopped_processes(children: Sequence[SupervisedChild]) -> dict[str, list[ProcessId]]:
    """Which of their processes a signal has stopped, by name. Of a job that watches its own workers, itself alone."""
    processes, stopped = table(), {}
    for child in children:
        itself = [processes[child.pid]] if child.pid in processes else []
        below = descendants(child.pid, processes) if child.spec.service or child.spec.drain_children else []
        stopped[child.name] = [process.id for process in (*itself, *below) if process.stopped]
    return stopped
