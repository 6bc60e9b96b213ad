"""Start the processes of a run, watch them, restart what fails, and stop them all together with everything below them.

`Supervisor.run` is one loop over `SupervisedChild`, a process through all its incarnations. `stall_reason` decides from
status files whether an incarnation has stalled.
"""

import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from prime_rl.config import RLConfig, child_env
from prime_rl.errors import NEVER_WORKED
from prime_rl.launcher.plan import RECOVER, ProcessSpec
from prime_rl.launcher.rundir import forget_status, newest_step
from prime_rl.monitor import read_status
from prime_rl.monitor.status import ProcessStatus, say_for
from prime_rl.processes import Child, backoff_seconds, describe_exit, send, table
from prime_rl.wait import WaitTimeout, wait

_POLL_SECONDS = 0.2
_DRAIN_SECONDS = 300.0
_STOP_SECONDS = 15.0
_ECHO_SECONDS = 0.5
_MAX_LOOK_SECONDS = 2.5  # a longer gap was the launcher's own: a SIGSTOP, a laptop that slept, a clock that was set
_MAX_BACKOFF_SECONDS = 60.0
_BEATS_TO_EXIT = 5  # heartbeat timeouts; uploads to W&B may take a while
_LOG_TAIL_LINES = 20
_LOG_TAIL_BYTES = 1 << 16
_ERROR_LINE = re.compile(r"(\w+: )?error: ")  # `error: …`, or `trainer: error: …` of a bad configuration
# That, or a traceback's end, perhaps of one of vLLM's processes, but not what says only where the reason stands.
_CAUSE = re.compile(r"(?!.*(EngineDeadError|stack trace|root cause))(\(\w[^)]*\) )?[\w.]*([Ee]rror|Exception): ")
# What no restart makes possible; other errors of a start may pass: memory that a process before still holds, the hub.
_HOPELESS = re.compile(rf"{NEVER_WORKED}|(NotImplemented|Import|ModuleNotFound)Error: |[Uu]nsupported|not support")


class RunOutcome(Enum):
    """How a run ended; the value is the exit status of `rl`."""

    SUCCESS = 0
    FAILURE = 1
    INTERRUPTED = 130


class ChildState(Enum):
    PENDING = auto()  # is started once it is due
    RUNNING = auto()  # not reaped yet
    ENDED = auto()


@dataclass(frozen=True)
class RestartPolicy:
    """When a process counts as stalled, and how often it is restarted. Times in seconds."""

    max_restarts: int = 0  # of one process while the run gets no further. 0: any failure ends the run
    backoff: float = 1.0  # before the first restart; doubled with each further one, up to a minute
    heartbeat_timeout: float = 60.0  # without a heartbeat
    stall_timeout: float = 1800.0  # without progress, while it waits for nobody


def stall_reason(
    key: str, status: ProcessStatus, policy: RestartPolicy, now: float, since: float, service: bool
) -> str | None:
    """Return why a process or rank counts as stalled, in words that follow its name; None where it does not.

    Args:
        key: Its name; `trainer.1` is rank 1 of the trainer.
        now: Unix seconds.
        since: What lies before counts for nothing: its start, or when the host woke up or its clock was set.
        service: It makes no progress without requests.
    """
    silent, rank, wait = now - max(status.heartbeat, since), key.partition(".")[2], status.waiting
    if status.outcome is not None:  # the heartbeat ends with the last status; what is left to do is to exit
        late = not rank and silent > _BEATS_TO_EXIT * policy.heartbeat_timeout
        return f"said `{status.outcome}` {silent:.0f} s ago and has not ended" if late else None
    if service and status.ready is None:  # `ready_timeout` bounds its start
        return None
    if silent > policy.heartbeat_timeout:
        return f"{f'rank {rank} ' if rank else ''}has given no sign of life for {silent:.0f} s"
    if rank:  # rank 0 reports progress for all ranks
        return None
    unchanged = now - max(status.progress if wait is None else wait.since, since)
    where, limit = status.doing, policy.heartbeat_timeout if service else policy.stall_timeout
    if wait is not None:
        where = f"it waits for {wait.subject} from {wait.owner}"
        limit = wait.deadline - wait.since + policy.heartbeat_timeout
    elif service and status.progress <= (status.ready or 0.0):  # idle: its engine's answers are its progress
        return None
    return f"has stalled for {unchanged:.0f} s ({where})" if unchanged > limit else None


class SupervisedChild:
    """A process through all its incarnations, whose output is appended to one log."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec, self.server = spec, spec.server
        self.name, self.is_job = spec.name, spec.server is None
        self.restarts, self.furthest = 0, -1  # restarts since the run was this far: batches and versions
        self.state, self.due, self.was_ready = ChildState.PENDING, 0.0, False
        self.options: tuple[str, ...] = ()  # that follow its arguments in the next incarnation
        self.cause = ""  # of its last failure: one line of its log

    def start(self, environ: Mapping[str, str]) -> None:
        # Children read complete files: a setting meant for `rl` may name nothing in theirs.
        env = {**child_env(environ, RLConfig), **self.spec.env}
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
        with self.spec.log.open("ab") as log:
            self._log_start = log.tell()  # bytes that earlier incarnations wrote
            self.process = Child([*self.spec.argv, *self.options], env, log)
        self.state, self.ready = ChildState.RUNNING, False
        self.began, self.watched_since = time.monotonic(), time.time()

    def interrupt(self) -> None:
        """Ask it to finish: SIGINT to itself, or to torchrun's ranks, whose agent would kill them soon after."""
        ranks = [each for each in table().values() if self.spec.drain_children and each.parent == self.process.pid]
        for rank in ranks:
            send(rank.id, signal.SIGINT)
        if not ranks:
            self.process.signal(signal.SIGINT)

    def last_words(self, reason: str = "") -> list[str]:
        """Return the last `error:` line at the end of its log, or exception of a server that failed, else the last
        lines."""
        lines = [line for line in log_tail(self.spec.log, self._log_start) if line.strip(" =-")]  # no rulers
        pattern = _CAUSE if self.server is not None and reason.startswith("failed") else _ERROR_LINE
        errors = [line for line in lines if pattern.match(line)]
        return errors[-1:] or lines[-_LOG_TAIL_LINES:]


def log_tail(path: Path, start: int = 0) -> list[str]:
    """Return the last lines of a log, of those from byte `start` on; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            return [line.rstrip() for line in file.read().decode(errors="replace").splitlines()]
    except OSError:
        return []


class Supervisor:
    """Run processes to the end of the run. `tick` is called at every look; `drained` says what the jobs still do when
    they are asked to stop; once no job is left, the run goes on until it is `over`."""

    def __init__(
        self,
        processes: Sequence[ProcessSpec],
        output_dir: Path,
        say: Callable[[str], None],
        tick: Callable[[], None] = lambda: None,
        policy: RestartPolicy | None = None,
        drained: Callable[[], str] = lambda: "the current step will be finished",
        environ: Mapping[str, str] = os.environ,
        over: Callable[[], bool] = lambda: True,
        writes_status: bool = True,
    ) -> None:
        self._policy = policy or RestartPolicy()
        self._output_dir, self._environ = output_dir, environ
        self._say, self._tick, self._drained, self._over = say, tick, drained, over
        self._writes_status = writes_status  # else another node's launcher says how the jobs ended
        self._children = {spec.name: SupervisedChild(spec) for spec in processes}
        self._interrupts = 0
        self._interrupted_at = -math.inf
        self._drain_deadline: float | None = None
        self.failures: list[str] = []  # how the processes ended that made the run fail, and the ends of their logs
        self.restarts: dict[str, int] = {}  # how often each process was started again

    def run(self) -> RunOutcome:
        """Block until the run is over and its processes are stopped. In the main thread signals are handled."""
        signals = threading.current_thread() is threading.main_thread()
        numbers = [signal.SIGINT, signal.SIGTERM] if signals else []
        if signals and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup: the terminal may go
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._interrupt) for number in numbers}
        try:
            return self._loop()
        finally:
            self._stop_all()
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop(self) -> None:
        """End the run now, from any thread, without draining."""
        self._interrupts = 2

    def drain(self) -> None:
        """Ask the jobs to finish, as the first interrupt does."""
        self._interrupts = max(self._interrupts, 1)

    @property
    def is_draining(self) -> bool:
        return self._drain_deadline is not None

    def _interrupt(self, number: int, frame: object) -> None:
        """Count a request to stop once: wrappers (`uv run`, `timeout`) pass on a signal that the group got as well."""
        now = time.monotonic()
        if now - self._interrupted_at > _ECHO_SECONDS:
            self._interrupts += 1
        self._interrupted_at = now

    def _loop(self) -> RunOutcome:
        last = time.time()
        while True:  # bounded: as long as the run; every process is watched for stalls
            gap, last = time.time() - last, time.time()
            for child in self._children.values():
                if child.state is ChildState.RUNNING and abs(gap) > _MAX_LOOK_SECONDS:
                    child.watched_since = last  # perhaps it was suspended together with us
                awaited = [self._children[name] for name in child.spec.after_ready]
                # A server that never serves ends the run, or the run goes on without it.
                may_start = all(other.was_ready or other.state is ChildState.ENDED for other in awaited)
                if child.state is ChildState.PENDING and time.monotonic() >= child.due and may_start:
                    if awaited:
                        self._say(f"starting {child.name}")
                    child.start(self._environ)
            if (outcome := self._look()) is not None:
                return outcome
            self._tick()
            time.sleep(_POLL_SECONDS)

    def _look(self) -> RunOutcome | None:
        """Look at every process once; return the outcome once there is one."""
        if self._interrupts > 1:
            self._say("stopping now")
            return RunOutcome.INTERRUPTED
        if self._interrupts == 1:
            return self._drain()
        failures = list(self._failures())
        if not self._jobs_left() and not any(child.is_job for child, *_ in failures) and self._over():
            return RunOutcome.SUCCESS
        # Each is reported. Those that may help first: the run goes on without a server where another is started again.
        answers = [self._restart(*failure) for failure in sorted(failures, key=lambda failure: failure[2])]
        return None if all(answers) else RunOutcome.FAILURE

    def _jobs_left(self) -> bool:
        return any(child.is_job and child.state is not ChildState.ENDED for child in self._children.values())

    def _running(self) -> list[SupervisedChild]:
        return [child for child in self._children.values() if child.state is ChildState.RUNNING]

    def _reap_ended(self) -> Iterator[tuple[SupervisedChild, int]]:
        """Yield what has ended since the last look, and its exit status."""
        for child in self._running():
            if (status := child.process.status) is not None:
                self._reap(child)
                yield child, status

    def _reap(self, child: SupervisedChild) -> None:
        child.process.reap()
        self._note_ready(child, read_status(self._output_dir))
        child.state = ChildState.ENDED

    def _note_ready(self, child: SupervisedChild, statuses: Mapping[str, ProcessStatus]) -> None:
        """Record that this incarnation is ready, by its own status (that of the one before was removed)."""
        status = statuses.get(child.name)
        if not child.ready and status is not None and status.ready is not None:
            child.ready = child.was_ready = True
            if child.server is not None:
                self._say(f"{child.name} ready in {time.monotonic() - child.began:.1f} s ({child.server.url})")

    # -- failures ------------------------------------------------------------------------------------------------------

    def _failures(self) -> Iterator[tuple[SupervisedChild, str, bool]]:
        """Yield each child that died or stalled, the reason (to follow its name), and whether it would happen again."""
        for child, status in self._reap_ended():
            reason, last = describe_exit(status), read_status(self._output_dir).get(child.name)
            if status == 0 and child.is_job:
                if last is None or last.outcome == "finished":
                    continue
                # Its exit status says that it ended well, but somebody stopped it apart from the run.
                reason = f"ended too early ({last.outcome or 'without a last word'})"
            # Before it was ready a restart would end with the same line.
            to_correct = status > 0 and not child.was_ready and any(map(_ERROR_LINE.match, child.last_words()))
            yield child, reason, to_correct
        now, statuses = time.time(), read_status(self._output_dir)  # a slow file system makes nobody late
        for child in self._running():
            self._note_ready(child, statuses)
            if (stall := self._stall_reason(child, statuses, now)) is not None:
                self._reap(child)
                # A server that was never ready, in all the time it may take, will not be.
                yield child, stall, not child.is_job and not child.was_ready

    def _stall_reason(self, child: SupervisedChild, statuses: Mapping[str, ProcessStatus], now: float) -> str | None:
        timeout = self._policy.stall_timeout if child.server is None else child.server.ready_timeout
        waited_for = child.name not in statuses if child.is_job else not child.ready
        if waited_for and now - child.watched_since > timeout:
            return f"is not ready after {timeout:.0f} s"
        reasons = (
            stall_reason(key, status, self._policy, now, child.watched_since, not child.is_job)
            for key, status in statuses.items()
            if key.partition(".")[0] == child.name
        )
        return next(filter(None, reasons), None)

    def _restart(self, child: SupervisedChild, reason: str, final: bool) -> bool:
        """Schedule a restart where it may help; return whether the run goes on.

        A fault that comes back at the same place is not mended by restarting: `max_restarts` counts those since the run
        last got further, by its newest batch and version.
        """
        name, most, words = child.name, self._policy.max_restarts, child.last_words(reason)
        runs = [self._output_dir, *self._output_dir.glob("tenants/*")]
        reached = sum(newest_step(run / room) + 1 for run in runs for room in ("rollouts", "weights"))
        child.restarts = 1 if reached > child.furthest else child.restarts + 1
        child.furthest = max(reached, child.furthest)
        before, child.cause = child.cause, words[0] if len(words) == 1 else ""
        alike = child.server is not None and child.cause == before != "" and child.restarts > 1
        final = final or (reached <= len(runs) and _HOPELESS.search(child.cause) is not None)  # it has no batch
        if final or alike or child.restarts > most:
            self._report(child, reason)
            if most and not final:
                times = f"{child.restarts - 1} times without the run getting any further"
                self._say(f"error: {name} was started again {times}: giving up")
            others = [one.name for one in self._children.values() if one.server and one.state is not ChildState.ENDED]
            if child.server is None or not others or not most:
                return False
            self._say(f"the run goes on without {name}, on {', '.join(others)}")
            return True
        seconds = backoff_seconds(child.restarts, self._policy.backoff, _MAX_BACKOFF_SECONDS)
        recover = child.was_ready and child.is_job
        child.state, child.due = ChildState.PENDING, time.monotonic() + seconds
        self.restarts[name] = self.restarts.get(name, 0) + 1
        child.options = (RECOVER,) if recover and RECOVER not in child.spec.argv else ()
        if self._writes_status:
            forget_status(self._output_dir, name)
        if reason.startswith("failed") and words:
            reason += f" ({words[-1].strip()})"
        row = f"{most} in a row, recovering" if recover else f"{most} in a row"
        self._say(f"{name} {reason}: starting it again in {seconds:g} s (restart {child.restarts} of at most {row})")
        return True

    def _report(self, child: SupervisedChild, reason: str) -> None:
        text, words = f"{child.name} {reason}", child.last_words(reason)
        self._say(f"error: {text}; the end of {child.spec.log}:")
        for line in words:
            self._say(f"  {line}")
        self.failures += [text, *words]

    # -- stopping ------------------------------------------------------------------------------------------------------

    def _say_for(self, child: SupervisedChild, outcome: str) -> None:
        if self._writes_status:
            say_for(self._output_dir, child.name, outcome)

    def _drain(self) -> RunOutcome | None:
        """Ask the jobs to stop, once, and wait for them within bounds."""
        if self._drain_deadline is None:
            self._drain_deadline = time.monotonic() + _DRAIN_SECONDS
            self._say(f"draining: {self._drained()}; interrupt again to stop now")
            for child in self._children.values():
                if child.state is ChildState.PENDING:
                    child.state = ChildState.ENDED
                    self._say_for(child, "stopped")
                elif child.state is ChildState.RUNNING and child.is_job:
                    child.interrupt()
        for child, status in self._reap_ended():
            reason = describe_exit(status)
            # What was still importing dies of the signal that asks it to stop, torchrun with a status of its own.
            stopped = status in (0, -signal.SIGINT, 128 + signal.SIGINT) or not child.was_ready
            if child.is_job:
                self._say_for(child, "stopped" if stopped else f"failed: it {reason}")
            if not child.is_job or not stopped:
                self._report(child, reason)
        if self._jobs_left() and time.monotonic() < self._drain_deadline:
            return None
        if late := ", ".join(child.name for child in self._running() if child.is_job):
            self._say(f"{late} did not finish within {_DRAIN_SECONDS:.0f} s: stopping")
        return RunOutcome.INTERRUPTED

    def _stop_all(self) -> None:
        """SIGTERM, a bounded wait (cut short by a second Ctrl-C), then SIGKILL to each process and its descendants."""
        running = self._running()
        if running:
            self._say(f"stopping {', '.join(child.name for child in running)}")
        for child in running:
            # A server that is still loading hears no SIGTERM and has nothing to lose.
            loading = child.server is not None and not child.ready and self._drain_deadline is None
            child.process.signal(signal.SIGKILL if loading else signal.SIGTERM)
        with suppress(WaitTimeout):
            wait(
                lambda: self._interrupts > 1 or all(child.process.status is not None for child in running),
                subject="end of the processes", owner="themselves", seconds=_STOP_SECONDS, poll=_POLL_SECONDS,
            )  # fmt: skip
        for child in running:
            self._reap(child)
            self._say_for(child, "stopped")
