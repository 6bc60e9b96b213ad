"""Start the processes of a run, watch them, and stop them all: whatever ends first, nothing is left behind."""

import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from urllib.parse import urlsplit

from prime_rl.config import RLConfig, child_env
from prime_rl.launcher.plan import Process, Server
from prime_rl.launcher.procs import children_of, descendants, identify, send
from prime_rl.lifeline import Lifeline
from prime_rl.monitor import read_status

POLL_SECONDS = 0.1
HEALTH_SECONDS = 0.5
DRAIN_SECONDS = 300.0
STOP_SECONDS = 15.0
AFTER_SECONDS = 30.0
LOG_TAIL_LINES = 20
LOG_TAIL_BYTES = 1 << 16
_ERROR_LINE = re.compile(r"(\w+: )?error: ")  # `error: …`, or `trainer: error: …` of a bad configuration


class Outcome(Enum):
    """How a run ended; the value is the exit status of `rl`."""

    SUCCESS = 0
    FAILURE = 1
    INTERRUPTED = 130


@dataclass
class _Child:
    spec: Process
    popen: subprocess.Popen[bytes]
    log_start: int  # bytes that earlier lives had written

    def exited(self) -> bool:
        """Whether it has ended. It stays a zombie until `reap`, so that its group's number cannot be reused."""
        if self.popen.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill_group(self) -> None:
        """What is left of its group goes as well: environment workers, engine cores."""
        if self.popen.returncode is None:
            os.killpg(self.popen.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Exit status once `exited`; negative for a signal."""
        self.kill_group()
        return self.popen.wait()


class Supervisor:
    """Runs processes to the end of the run. `say` shows a line to the user, `tick` is called at every look."""

    def __init__(
        self,
        processes: Sequence[Process],
        server: Server | None,
        output_dir: Path,
        say: Callable[[str], None],
        tick: Callable[[], None],
        drain_seconds: float = DRAIN_SECONDS,
        stop_seconds: float = STOP_SECONDS,
    ) -> None:
        self._waiting = list(processes)
        self._server = server
        self._output_dir = output_dir
        self._say, self._tick = say, tick
        self._drain_seconds = drain_seconds
        self._stop_seconds = stop_seconds
        self._children: dict[str, _Child] = {}
        self._jobs_left = {process.name for process in processes if not process.service}
        self._began = time.monotonic()
        self._next_health = 0.0
        self._interrupts = 0
        self._drain_deadline: float | None = None
        self.ready_seconds: float | None = None  # from start to the server's first healthy answer

    def run(self) -> Outcome:
        """Blocks until the run is over. Afterwards no process of it is alive."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup: the terminal may go
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._interrupt) for number in numbers}
        try:
            with Lifeline() as lifeline:
                try:
                    return self._watch(lifeline)
                finally:
                    self._stop_all()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _interrupt(self, number: int, frame: object) -> None:
        self._interrupts += 1

    def _watch(self, lifeline: Lifeline) -> Outcome:
        while True:
            self._start_due(lifeline)
            if (outcome := self._look()) is not None:
                return outcome
            self._tick()
            time.sleep(POLL_SECONDS)

    def _look(self) -> Outcome | None:
        """One look at everything: the outcome once there is one."""
        if self._interrupts > 1:
            self._say("stopping now")
            return Outcome.INTERRUPTED
        if self._interrupts == 1 and self._drain_deadline is None:
            self._drain()
        failed = self._collect()
        self._report(failed)
        if failed and self._drain_deadline is None:
            return Outcome.FAILURE
        if not self._jobs_left:
            return Outcome.SUCCESS if self._drain_deadline is None else Outcome.INTERRUPTED
        if self._drain_deadline is not None:
            return self._drained()
        return self._check_server()

    def _start_due(self, lifeline: Lifeline) -> None:
        if self._drain_deadline is not None:
            return
        for process in self._waiting[:]:
            if process.after is None or self._has_reported(process.after):
                self._waiting.remove(process)
                self._spawn(process, lifeline)

    def _has_reported(self, name: str) -> bool:
        waited_enough = time.monotonic() - self._began > AFTER_SECONDS
        return waited_enough or name in read_status(self._output_dir)

    def _spawn(self, process: Process, lifeline: Lifeline) -> None:
        process.log.parent.mkdir(parents=True, exist_ok=True)
        with process.log.open("ab") as log:
            log_start = log.tell()
            popen = subprocess.Popen(
                process.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Children read complete files: a setting meant for `rl` may name nothing in theirs.
                env={**child_env(os.environ, RLConfig), **process.env, **lifeline.env},
                pass_fds=lifeline.pass_fds,
                start_new_session=True,  # Ctrl-C reaches only us: we decide who is told, and how
            )
        self._children[process.name] = _Child(process, popen, log_start)

    def _collect(self) -> list[_Child]:
        """Reap what has ended; returns those that must not have: a job that failed, a service that stopped."""
        failed = []
        for child in self._children.values():
            if child.popen.returncode is None and child.exited():
                status = child.reap()
                self._jobs_left.discard(child.spec.name)
                interrupted = self._drain_deadline is not None and status in (-signal.SIGINT, 128 + signal.SIGINT)
                if child.spec.service or (status != 0 and not interrupted):
                    failed.append(child)
        return failed

    def _report(self, failed: list[_Child]) -> None:
        for child in failed:
            self._say(f"error: {child.spec.name} {ending(child.popen.returncode)}; the end of {child.spec.log}:")
            for line in last_words(child.spec.log, child.log_start):
                self._say(f"  {line}")

    def _check_server(self) -> Outcome | None:
        server, now = self._server, time.monotonic()
        if server is None or self.ready_seconds is not None or now < self._next_health:
            return None
        if healthy(server.health):
            self.ready_seconds = time.monotonic() - self._began
            self._say(f"inference ready in {self.ready_seconds:.1f} s ({server.url})")
        elif now - self._began > server.ready_timeout:
            hint = "see its log" if server.port else "start one (`inference @ …`) or give [inference]"
            self._say(f"error: no inference server at {server.url} after {server.ready_timeout:.0f} s: {hint}")
            return Outcome.FAILURE
        self._next_health = time.monotonic() + HEALTH_SECONDS
        return None

    def _drain(self) -> None:
        self._drain_deadline = time.monotonic() + self._drain_seconds
        self._say("draining: the current step is finished and saved; interrupt again to stop now")
        self._jobs_left -= {process.name for process in self._waiting}
        self._waiting.clear()
        for child in self._running(service=False):
            ranks = children_of(child.popen.pid) if child.spec.drain_children else []
            itself = identify(child.popen.pid)
            for process in ranks or ([] if itself is None else [itself]):
                send(process, signal.SIGINT)

    def _drained(self) -> Outcome | None:
        assert self._drain_deadline is not None
        if time.monotonic() < self._drain_deadline:
            return None
        late = ", ".join(child.spec.name for child in self._running(service=False))
        self._say(f"{late} did not finish within {self._drain_seconds:.0f} s: stopping")
        return Outcome.INTERRUPTED

    def _running(self, service: bool | None = None) -> list[_Child]:
        children = [child for child in self._children.values() if child.popen.returncode is None]
        return [child for child in children if service is None or child.spec.service == service]

    def _stop_all(self) -> None:
        """SIGTERM, a bounded wait (cut short by a second Ctrl-C), then SIGKILL to every group and to what left its group."""
        running = self._running()
        strays = [process for child in running for process in descendants(child.popen.pid)]
        if running:
            self._say(f"stopping {', '.join(child.spec.name for child in running)}")
        loading = self._server is not None and self.ready_seconds is None and self._drain_deadline is None
        for child in running:
            if not child.exited():
                # A server that is still loading hears no SIGTERM and has nothing to lose.
                os.kill(child.popen.pid, signal.SIGKILL if loading and child.spec.service else signal.SIGTERM)
        deadline = time.monotonic() + self._stop_seconds
        while self._interrupts < 2 and time.monotonic() < deadline and not all(child.exited() for child in running):
            time.sleep(POLL_SECONDS)
        strays += [process for child in running for process in descendants(child.popen.pid)]
        for child in running:
            child.reap()
        for process in strays:
            send(process, signal.SIGKILL)


def healthy(url: str) -> bool:
    """Whether the server answers 200 within two seconds. A proxy is never asked for this host's own servers."""
    local = urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
    opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))
    try:
        with opener.open(url, timeout=2.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def ending(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return "ended too early" if status == 0 else f"failed with exit status {status}"
    return f"was killed by {signal.Signals(-status).name}"


def last_words(log: Path, start: int = 0) -> list[str]:
    """The `error:` line a process ended with, else its last lines. `start`: bytes that belong to earlier lives."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - LOG_TAIL_BYTES))
        lines = [line.rstrip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR_LINE.match(line)]
    return errors[-1:] or lines[-LOG_TAIL_LINES:]
