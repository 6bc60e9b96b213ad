"""Start the processes of a run, watch them, start again alone what fails, and stop them all: nothing is left behind."""

import json
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from prime_rl.config.shared import how_to_start
from prime_rl.errors import FOR_GOOD
from prime_rl.launcher.child import Child, await_death, ending, interrupted, last_words, spawn, user_error
from prime_rl.launcher.clock import Budget, Grant, LoopClock, Policy
from prime_rl.launcher.health import Health, ServerWatch
from prime_rl.launcher.plan import RECOVER, Process, Server
from prime_rl.launcher.procs import ProcessId, adopting, by_parent, descendants, orphans, send
from prime_rl.launcher.rundir import forget_status_of, marks
from prime_rl.launcher.vigil import Vigil
from prime_rl.lifeline import Lifeline
from prime_rl.monitor import read_status
from prime_rl.monitor.status import say_for, unless_full
from prime_rl.wait import WaitTimeout, wait

POLL_SECONDS = 0.1
JUDGE_SECONDS = 1.0
TABLE_SECONDS = 5.0
DRAIN_SECONDS = 300.0
STOP_SECONDS = 15.0
AFTER_SECONDS = 30.0
_ECHO_SECONDS = 0.5


class Outcome(Enum):
    """How a run ended; the value is the exit status of `rl`."""

    SUCCESS = 0
    FAILURE = 1
    INTERRUPTED = 130


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


@dataclass(frozen=True)
class _Due:
    """A pending start: not before `at` (launcher's clock), not before `spec.after` has reported or `AFTER_SECONDS` have passed, and not before the
    services of `spec.after_ready` are ready."""

    spec: Process
    at: float
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Fall:
    """A process that must not have ended, or had to be ended, and why."""

    child: Child
    why: str
    for_user: str | None = None  # the line that tells the user what to mend, if it ended with one
    for_good: bool = False  # it said that it is not to be started again


class Supervisor:
    """Runs processes to the end of the run.

    Args:
        say: Shows a line to the user.
        tick: Called at every look.
        doctor: Says who keeps the run from going on, in one line, or in full when the run ends by it.
        drained: Says what the jobs still do when they are asked to stop.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        servers: Sequence[Server],
        output_dir: Path,
        say: Callable[[str], None],
        tick: Callable[[], None],
        policy: Policy | None = None,
        doctor: Callable[[bool], Sequence[str]] = lambda full: (),
        drain_seconds: float = DRAIN_SECONDS,
        stop_seconds: float = STOP_SECONDS,
        drained: Callable[[], str] = lambda: "the current step will be finished",
    ) -> None:
        self._policy = policy or Policy()
        self._due = [_Due(process, 0.0) for process in processes]
        self._servers = {server.name: ServerWatch(server, self._policy) for server in servers}
        self._output_dir = output_dir
        self._say, self._tick, self._doctor, self._drained = say, tick, doctor, drained
        self._drain_seconds = drain_seconds
        self._stop_seconds = stop_seconds
        self._clock = LoopClock()
        self._budget = Budget(self._policy, marks(output_dir))
        self._vigil = Vigil(self._policy)
        self._children: dict[str, Child] = {}
        self._jobs_left = {process.name for process in processes if not process.service}
        self._was_ready: set[str] = set()
        self._next_judgement = 0.0
        self._next_table = 0.0
        self._now_halted: Mapping[str, Sequence[ProcessId]] = {}
        self._interrupts = 0
        self._interrupted_at = -math.inf
        self._drain_deadline: float | None = None
        self.restarts: list[Restart] = []
        self.to_correct = False  # a process ended by an error that only the user can correct

    def run(self) -> Outcome:
        """Block until the run is over and its processes are stopped."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup: the terminal may go
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._interrupt) for number in numbers}
        try:
            with adopting(), Lifeline() as lifeline:
                try:
                    return self._watch(lifeline)
                finally:
                    self._stop_all()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _interrupt(self, number: int, frame: object) -> None:
        """What wraps us (`uv run`, `timeout`) hands on a signal that our group got as well: one request may come twice."""
        now = time.monotonic()
        if now - self._interrupted_at > _ECHO_SECONDS:
            self._interrupts += 1
        self._interrupted_at = now

    def _watch(self, lifeline: Lifeline) -> Outcome:
        while True:  # bounded: as long as the run; every process is watched for stalls
            if self._clock.tick():
                self._forgive()
            self._start_due(lifeline)
            if (outcome := self._look()) is not None:
                return outcome
            self._tick()
            time.sleep(POLL_SECONDS)

    def _forgive(self) -> None:
        self._vigil.forgive(self._clock.now)
        for watch in self._servers.values():
            watch.forgive(self._clock.now)

    def _look(self) -> Outcome | None:
        """One look at everything: the outcome once there is one."""
        if self._interrupts > 1:
            self._say("stopping now")
            return Outcome.INTERRUPTED
        if self._interrupts == 1 and not self._draining:
            self._drain()
        if self._draining:
            return self._look_while_draining()
        if not self._all_go_on([*self._ended(), *self._stalled()]):
            return Outcome.FAILURE
        if not self._jobs_left:
            return Outcome.SUCCESS
        return self._look_at_next_server()

    # -- starting ------------------------------------------------------------------------------------------------------------

    def _start_due(self, lifeline: Lifeline) -> None:
        for due in self._due[:]:
            if self._clock.now >= due.at and self._may_start(due.spec):
                self._due.remove(due)
                self._spawn(due, lifeline)

    def _may_start(self, spec: Process) -> bool:
        reported = spec.after is None or self._clock.now > AFTER_SECONDS or spec.after in read_status(self._output_dir)
        # A server that never serves ends the run, or leaves it.
        return reported and all(name in self._was_ready or name not in self._servers for name in spec.after_ready)

    def _spawn(self, due: _Due, lifeline: Lifeline) -> None:
        name, now = due.spec.name, self._clock.now
        self._children[name] = spawn(due.spec, due.options, lifeline, os.environ, now)
        self._vigil.begin(name, now)
        if name in self._servers:
            self._servers[name].begin(now)

    # -- who has fallen ------------------------------------------------------------------------------------------------------

    def _ended(self) -> list[_Fall]:
        """Reap what has ended; returns those that must not have: a job that failed, a service that stopped."""
        fallen = []
        for child in self._running():
            if not child.exited():
                continue
            status = self._reap(child)
            gave_up = self._gave_up(child) if status == 0 else None
            if status == 0 and gave_up is None and not child.spec.service:
                self._jobs_left.discard(child.name)
                continue
            told = user_error(child.spec.log, child.log_start) if status > 0 else None
            fallen.append(_Fall(child, gave_up or ending(status), told, status == FOR_GOOD))
        return fallen

    def _gave_up(self, child: Child) -> str | None:
        """A job that ended well by its exit status alone: somebody stopped it, and it, apart from the run."""
        last = read_status(self._output_dir).get(child.name)
        if child.spec.service or last is None or last.outcome == "finished":
            return None
        return f"ended too early ({last.outcome or 'without a last word'})"

    def _stalled(self) -> list[_Fall]:
        """Put an end to those that live and get nowhere."""
        if self._clock.now < self._next_judgement:
            return []
        self._next_judgement = self._clock.now + JUDGE_SECONDS
        statuses = read_status(self._output_dir)
        self._was_ready.update(name for name, status in statuses.items() if status.ready is not None)
        running = self._running()
        halted = self._halted(running)
        services = [child.name for child in running if child.spec.service]
        faults = self._vigil.look(self._clock.now, statuses, halted, services)
        return [self._end(self._children[name], why) for name, why in faults.items()]

    def _halted(self, running: Sequence[Child]) -> Mapping[str, Sequence[ProcessId]]:
        """By the process table, which is long on a big machine: not looked at more often than needed."""
        if self._clock.now >= self._next_table:
            self._next_table = self._clock.now + min(TABLE_SECONDS, self._policy.heartbeat_timeout / 6)
            tree = by_parent()
            self._now_halted = {child.name: child.halted(tree) for child in running}
            orphans(self._known())  # reaps what was adopted and has ended
        return self._now_halted

    def _known(self) -> list[int]:
        return [child.popen.pid for child in self._children.values()]

    def _end(self, child: Child, why: str) -> _Fall:
        """Diagnose while it can still be seen, then kill it."""
        self._tell_doctor(full=False)
        self._reap(child)
        return _Fall(child, why)

    def _reap(self, child: Child) -> int:
        known = self._known()
        doomed = child.kill(known)
        status = child.reap(known)
        for process in await_death(doomed):
            self._say(f"warning: pid {process.pid} of {child.name} does not die of SIGKILL: it hangs in the kernel")
        self._vigil.end(child.name)
        last = read_status(self._output_dir).get(child.name)
        if last is not None and last.ready is not None:
            self._was_ready.add(child.name)
        return status

    # -- and what follows ----------------------------------------------------------------------------------------------------

    def _all_go_on(self, fallen: Sequence[_Fall]) -> bool:
        """Restart every failed process; return False if the run must end."""
        if not self._jobs_left:
            return True
        answers = [self._goes_on(fall) for fall in fallen]  # each is reported
        return all(answers)

    def _goes_on(self, fall: _Fall) -> bool:
        name, now = fall.child.name, self._clock.now
        beyond_mending = fall.for_good or (fall.for_user is not None and name not in self._was_ready)
        self.to_correct |= beyond_mending
        grant = None if beyond_mending else self._budget.ask(name, now, marks(self._output_dir))
        if not isinstance(grant, Grant):
            self._report(fall)
            if grant is not None and self._policy.max_restarts:
                self._say(f"error: {name} was started again {self._policy.max_restarts} times {grant.value}: giving up")
                self._tell_doctor()
            return self._does_without(name)
        recover = not fall.child.spec.service and name in self._was_ready
        options = (RECOVER,) if recover and RECOVER not in fall.child.spec.argv else ()
        forget_status_of(self._output_dir, name)
        self._due.append(_Due(fall.child.spec, now + grant.seconds, options))
        self._note(
            Restart(time.time(), name, _reason(fall), grant.number, grant.seconds, now - fall.child.began, recover)
        )
        return True

    def _does_without(self, name: str) -> bool:
        """Whether the run goes on without this process: one server of several is given up alone."""
        if name not in self._servers or len(self._servers) == 1 or not self._policy.max_restarts:
            return False
        del self._servers[name]
        self._say(f"the run goes on without {name}, on {', '.join(self._servers)}")
        return True

    def _note(self, restart: Restart) -> None:
        self.restarts.append(restart)
        self._say(
            f"{restart.process} {restart.reason}: starting it again in {restart.after:g} s "
            f"(restart {restart.number} of at most {self._policy.max_restarts} an hour{', recovering' if restart.recover else ''})"
        )
        path = self._output_dir / "logs" / "restarts.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with unless_full(), path.open("a") as file:
            file.write(json.dumps(asdict(restart)) + "\n")

    def _report(self, fall: _Fall) -> None:
        child = fall.child
        self._say(f"error: {child.name} {fall.why}; the end of {child.spec.log}:")
        for line in last_words(child.spec.log, child.log_start):
            self._say(f"  {line}")

    def _tell_doctor(self, full: bool = True) -> None:
        for line in self._doctor(full):
            self._say(line)

    def _look_at_next_server(self) -> Outcome | None:
        """One that is due, by turns: each that hangs takes its time to be found out, and a look must be short (`LoopClock`)."""
        for name in [*self._servers]:
            watch = self._servers.pop(name)
            self._servers[name] = watch  # the last of the next turn
            if watch.is_due(self._clock.now):
                return self._look_at_server(watch)
        return None

    def _look_at_server(self, watch: ServerWatch) -> Outcome | None:
        server = watch.server
        child = self._children.get(server.name)
        if watch.own and (child is None or not child.running):
            return None
        health = watch.look(self._clock.now)
        if health is Health.READY:
            self._was_ready.add(server.name)
            self._say(f"{server.name} ready in {self._clock.now - watch.began:.1f} s ({server.url})")
        elif health is Health.NEVER and server.name not in self._was_ready:
            hint = "see its log" if watch.own else f"{how_to_start(server.url)}, or give [inference]"
            self._say(f"error: no inference server at {server.url} after {server.ready_timeout:.0f} s: {hint}")
            self._tell_doctor()
            if child is not None:
                self._reap(child)
            return None if self._does_without(server.name) else Outcome.FAILURE
        elif health is not None and child is not None:
            late = f"is not ready after {server.ready_timeout:.0f} s"
            silent = f"has not answered {server.health} for {self._clock.now - watch.answered:.0f} s"
            return (
                None if self._goes_on(self._end(child, late if health is Health.NEVER else silent)) else Outcome.FAILURE
            )
        return None

    # -- stopping ------------------------------------------------------------------------------------------------------------

    @property
    def _draining(self) -> bool:
        return self._drain_deadline is not None

    def _drain(self) -> None:
        self._drain_deadline = self._clock.now + self._drain_seconds
        self._say(f"draining: {self._drained()}; interrupt again to stop now")
        for due in self._due:
            self._jobs_left.discard(due.spec.name)
            say_for(self._output_dir, due.spec.name, "stopped")
        self._due.clear()
        for child in self._running(service=False):
            child.interrupt()

    def _look_while_draining(self) -> Outcome | None:
        assert self._drain_deadline is not None
        for child in self._running():
            if child.exited():
                status = self._reap(child)
                self._jobs_left.discard(child.name)
                stopped = status in (0, -signal.SIGINT, 128 + signal.SIGINT) or interrupted(child)
                if not child.spec.service:
                    say_for(self._output_dir, child.name, "stopped" if stopped else f"failed: it {ending(status)}")
                if child.spec.service or not stopped:
                    self._report(_Fall(child, ending(status)))
        if not self._jobs_left:
            return Outcome.INTERRUPTED
        if self._clock.now < self._drain_deadline:
            return None
        late = ", ".join(child.name for child in self._running(service=False))
        self._say(f"{late} did not finish within {self._drain_seconds:.0f} s: stopping")
        self._tell_doctor()
        return Outcome.INTERRUPTED

    def _running(self, service: bool | None = None) -> list[Child]:
        children = [child for child in self._children.values() if child.running]
        return [child for child in children if service is None or child.spec.service == service]

    def _stop_all(self) -> None:
        """SIGTERM, a bounded wait (cut short by a second Ctrl-C), then SIGKILL to every group and to what left its group."""
        running = self._running()
        strays = [process for child in running for process in child.look_below()]
        if running:
            self._say(f"stopping {', '.join(child.name for child in running)}")
        for child in running:
            watch = self._servers.get(child.name)
            loading = watch is not None and not watch.ready and not self._draining
            if not child.exited():
                # A server that is still loading hears no SIGTERM and has nothing to lose.
                os.kill(child.popen.pid, signal.SIGKILL if loading else signal.SIGTERM)
        self._await_exits(running)
        known = self._known()
        for child in running:
            child.reap(known)
        for process in [*strays, *descendants(os.getpid()), *orphans(known)]:
            send(process, signal.SIGKILL)

    def _await_exits(self, children: Sequence[Child]) -> None:
        """Until all have ended, `stop_seconds` have passed, or a second Ctrl-C."""
        with suppress(WaitTimeout):
            wait(
                lambda: all(child.exited() for child in children),
                subject="end of the processes", owner="themselves", seconds=self._stop_seconds, poll=POLL_SECONDS,
                stop=lambda: self._interrupts > 1,
            )  # fmt: skip


def _reason(fall: _Fall) -> str:
    """Why, in one line."""
    if fall.for_user is not None:
        return f"{fall.why} ({fall.for_user})"
    last = last_words(fall.child.spec.log, fall.child.log_start)[-1:] if fall.why.startswith("failed") else []
    return f"{fall.why} ({last[0].strip()})" if last else fall.why
