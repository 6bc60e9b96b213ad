"""`rl doctor RUN`: what a run is doing, who waits for whom, what keeps it from going on. Reads files and /proc only.

One pass over the status files makes a row a process, and notes faults and waits; the diagnosis follows from these.
"""

import re
import shutil
import socket
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from prime_rl.config.inference import SERVER
from prime_rl.config.loader import say
from prime_rl.errors import UserError
from prime_rl.launcher import rundir
from prime_rl.launcher.console import minutes
from prime_rl.launcher.supervise import RestartPolicy, log_tail, stall_reason
from prime_rl.monitor import read_status
from prime_rl.monitor.limits import LimitWatch
from prime_rl.monitor.status import ProcessStatus
from prime_rl.processes import ProcessId, read
from prime_rl.transport import checkpoints

_JOBS = ("trainer", "orchestrator", "sft", "eval")
_MIN_FREE_BYTES = 64 * 2**20
_LONG_WAIT_SECONDS = 60.0
_ERRORS_SHOWN = 2
_ERROR = re.compile(r"(\w+: )?error: |.*\bERROR\b|[\w.]*(Error|Exception)\b.*: \S")


class RunState(StrEnum):
    """State of a run."""

    NEVER = "never started"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    MOVES = "moves"
    WAITS = "waits"  # for unusually long, and no fault is seen
    STUCK = "stuck"


_FINE = (RunState.FINISHED, RunState.MOVES, RunState.NEVER)
_ALIVE, _DEAD, _STOPPED, _ELSEWHERE = "alive", "dead", "STOPPED", "on another host"


def examine(run: Path) -> int:
    """Print the examination of a run; return 0 when nothing is wrong with it, else 1.

    Raises:
        UserError: no such directory.
    """
    if not run.is_dir():
        raise UserError(f"{run} is no directory: give the run's output directory")
    examination = _Examination(run)
    state, sentence = examination.diagnosis()
    rows = [*examination.rows, *_progress(run)]
    if state not in _FINE:
        rows += examination.errors()
    say("\n".join(f"{name:<15}{text}".rstrip() for name, text in [*rows, (state.value, sentence)]))
    return 0 if state in _FINE else 1


class _Examination:
    """Everything that status files and the process table say about a run, as rows of text and lists of findings."""

    def __init__(self, run: Path) -> None:
        self.run, self.now, self.statuses = run, time.time(), read_status(run)
        claim = rundir.read_claim(run)
        self.launched = claim is not None and rundir.is_held(claim)
        self.launcher = "not running"  # it removes its claim when it ends
        if claim is not None:
            self.launcher = _process_state(claim.host, claim.id) if self.launched else _DEAD
        jobs = [status for name, status in self.statuses.items() if "." not in name and not _is_server(name)]
        self.finished = bool(jobs) and all(status.outcome == "finished" for status in jobs)
        self.rows = [("run", str(run)), ("launcher", self.launcher)]
        self.faults: dict[str, str] = {}
        self.waits: list[str] = []
        self.doing: list[str] = []
        self.running = self.launched
        known = {path.stem for path in (run / "configs").glob("*.toml")} | self.statuses.keys()
        self.names = [name for job in _JOBS for name in sorted(known) if name.partition(".")[0] == job]
        self.names += sorted(filter(_is_server, known))
        for name in self.names:
            self._look_at(name, self.statuses.get(name))

    def _look_at(self, name: str, status: ProcessStatus | None) -> None:
        label = name.replace(".", " ")
        if status is None:
            self.rows.append((label, "no report"))
            return
        if status.outcome is not None:
            self.rows.append((label, f"{'ended':<11}{status.outcome}, {self._ago(status.since)}"))
            self.doing.append(f"{name}: {status.outcome}")
            if status.outcome.startswith("failed"):
                self.faults[name] = f"has ended: {status.outcome}"
            return
        state, rank, wait = _process_state(status.host, status.id), name.partition(".")[2], status.waiting
        silent, who = self.now - status.heartbeat, f"rank {rank} " if rank else ""
        doing = status.phase if status.step is None else f"{status.phase}, step {status.step}"
        seen = "" if state == _ALIVE else f"; last sign of life {self._ago(status.heartbeat)}"
        progress = f"last progress {self._ago(status.progress)}"
        self.rows.append((label, f"{state:<11}{doing}; pid {status.pid}; {progress}{seen}"))
        if state == _DEAD:
            self.faults[name] = f"{who}died without a last word {silent:.0f} s ago"
        elif state == _STOPPED:
            self.faults[name] = f"{who}has been stopped (SIGSTOP) for {silent:.0f} s"
        elif reason := stall_reason(name, status, RestartPolicy(), self.now, 0.0, _is_server(name)):
            self.faults[name] = reason
        if not rank:
            self.running |= state != _DEAD
            self.doing.append(f"{name} waits for {wait.subject}" if wait else f"{name}: {status.phase}")
        if wait is None:
            return
        left, waited = wait.deadline - self.now, self.now - wait.since
        until = f"gives up in {minutes(left)}" if left >= 0 else f"should have given up {minutes(-left)} ago"
        awaited = f"{wait.subject} from {wait.owner}"
        self.rows.append(("", f"{'':<11}waits for {awaited} for {minutes(waited)} ({until})"))
        if waited > _LONG_WAIT_SECONDS and not rank:
            self.waits.append(f"{name} waits for {awaited} for {waited:.0f} s")

    def _ago(self, then: float) -> str:
        return f"{minutes(max(0.0, self.now - then))} ago" if then else "unknown"

    def diagnosis(self) -> tuple[RunState, str]:
        """Return the state of the run, and what keeps it from going on, or what it does, in a sentence."""
        if not self.statuses and not self.launched:
            return RunState.NEVER, "no process of a run has reported here"
        free = shutil.disk_usage(self.run).free
        if free < _MIN_FREE_BYTES and not self.finished:
            sentence = f"the disk is full ({free // 2**20} MiB free): make room; what is committed is safe"
            return RunState.STUCK, sentence
        faults = {name: fault for name, fault in self.faults.items() if not _is_server(name)}
        if self.running:
            if not any(_is_server(name) and name not in self.faults for name in self.statuses):
                faults = self.faults  # else another server takes over their requests
            if self.launcher == _STOPPED:
                faults["rl"] = "itself is stopped (SIGSTOP): nobody is watched until it goes on"
        words = "; ".join(f"{name.partition('.')[0]} {fault}" for name, fault in faults.items())
        if self.running and words:
            return RunState.STUCK, words
        if self.running and self.waits:
            return RunState.WAITS, f"{', '.join(self.waits)}; no process shows a fault, for environments see logs/envs"
        if self.running:
            return RunState.MOVES, f"nothing to do: {', '.join(self.doing)}"
        goes_on = " (`rl … --recover` goes on from what is committed)" if rundir.results(self.run) else ""
        if self.launcher == _DEAD and "has ended" not in words:
            killed = "rl ended without a last word (killed, or the host went down), and everything with it"
            return RunState.INTERRUPTED, killed + goes_on
        if words:
            return RunState.FAILED, words + goes_on
        if self.finished:
            return RunState.FINISHED, "the run has finished"
        return RunState.INTERRUPTED, "the run was stopped" + goes_on

    def errors(self) -> Iterator[tuple[str, str]]:
        """Yield the last errors in the logs of processes that did not end well."""
        for name in self.names:
            # One that ended well may have been noisy: vLLM's engine prints a traceback when it is asked to stop.
            status = self.statuses.get(name)
            if status is None or status.outcome not in ("finished", "stopped"):
                lines = [line for line in log_tail(self.run / "logs" / f"{name}.log") if _ERROR.match(line)]
                yield from (("error", f"{name}.log: {line.strip()}") for line in lines[-_ERRORS_SHOWN:])


def _progress(run: Path) -> Iterator[tuple[str, str]]:
    """Yield what is committed, how much room there is, and what limits the run."""
    newest = {
        "batch": rundir.newest_step(run / "rollouts"),
        "version": rundir.newest_step(run / "weights"),
        "checkpoint": rundir.newest_step(run / "checkpoints", checkpoints.complete_steps),
        "recovery checkpoint": rundir.newest_step(run / "recovery"),
    }
    yield "committed", ", ".join(f"{what} {step if step >= 0 else '-'}" for what, step in newest.items())
    yield "disk", f"{shutil.disk_usage(run).free / 2**30:,.1f} GiB free"
    if (limit := LimitWatch(run).look()) is not None:
        yield "speed", str(limit)


def _process_state(host: str, process: ProcessId) -> str:
    if not process.started or host != socket.gethostname():
        return _ELSEWHERE
    info = read(process.pid)
    if info is None or info.id != process:
        return _DEAD
    return _STOPPED if info.stopped else _ALIVE


def _is_server(name: str) -> bool:
    """Whether a process of this name serves: "inference", "inference-1", …"""
    return name.partition("-")[0] == SERVER
