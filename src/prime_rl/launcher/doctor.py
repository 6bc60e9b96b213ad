"""`rl doctor RUN`: what a run is doing, who waits for whom, and who keeps it from going on. Reads files and /proc, touches nothing."""

import json
import os
import re
import shutil
import socket
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.errors import UserError
from prime_rl.launcher import rundir
from prime_rl.launcher.diagnosis import (
    JOBS,
    Diagnosis,
    Facts,
    ProcessFacts,
    RestartFacts,
    State,
    WorkerFacts,
    diagnose,
    is_server,
)
from prime_rl.launcher.progress import limit_line, minutes
from prime_rl.launcher.supervise import killed_rank
from prime_rl.monitor import read_status
from prime_rl.monitor.record import as_table, build
from prime_rl.monitor.status import ProcessStatus
from prime_rl.processes import ProcessId, Table, boot_id, descendants, identify, is_stopped, table
from prime_rl.transport import checkpoints
from prime_rl.transport.commit import list_steps

_FRESH_SECONDS = 30.0  # of a heartbeat on another host
_RECENT_SECONDS = 600.0  # a restart before that belongs to another story
_TAIL_BYTES = 1 << 16
_ERRORS_SHOWN = 2
_ERROR = re.compile(r"(\w+: )?error: |.*\bERROR\b|[\w.]*(Error|Exception)\b.*: \S")
_WORKER = "prime_rl.envs.worker"


def main(arguments: Sequence[str]) -> int:
    """Print the examination; returns 0 when nothing is wrong with the run, else 1.

    Raises:
        UserError: no such directory, or anything but one is given.
    """
    if list(arguments) in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UserError("usage: rl doctor RUN (the run's output directory)")
    run = Path(arguments[0])
    if not run.is_dir():
        raise UserError(f"{run} is no directory: give the run's output directory")
    facts = collect(run)
    diagnosis = diagnose(facts)
    sys.stdout.write("\n".join(examination(run, facts, diagnosis)) + "\n")
    return 0 if diagnosis.verdict.fine else 1


def report(run: Path, full: bool) -> list[str]:
    """For the launcher: the whole examination, or what it comes to in a line."""
    facts = collect(run)
    diagnosis = diagnose(facts)
    return examination(run, facts, diagnosis) if full else [f"doctor: {diagnosis.sentence}"]


# -- facts ---------------------------------------------------------------------------------------------------------------------


def collect(run: Path) -> Facts:
    """What there is to know."""
    tree, statuses, settings = table(), read_status(run), _settings(run)
    mains = {name: status for name, status in statuses.items() if "." not in name}
    planned = {path.stem for path in (run / "configs").glob("*.toml")}
    servers = sorted(filter(is_server, planned | mains.keys()))
    names = [*(name for name in JOBS if name in planned or name in mains), *servers]
    restarts = _restarts(run)
    processes = {name: _process(run, name, statuses, tree, restarts.get(name)) for name in names}
    orchestrator = mains.get("orchestrator")
    return Facts(
        now=time.time(),
        launcher=_launcher(run),
        processes=processes,
        workers=() if orchestrator is None or not _here(orchestrator) else _workers(orchestrator.pid, tree),
        free=shutil.disk_usage(run).free,
        recoverable=bool(rundir.results(run)),
        heartbeat_timeout=_seconds(settings.get("heartbeat_timeout"), Facts.heartbeat_timeout),
        stall_timeout=_seconds(settings.get("stall_timeout"), Facts.stall_timeout),
    )


def _process(
    run: Path, name: str, statuses: Mapping[str, ProcessStatus], tree: Table, restart: RestartFacts | None
) -> ProcessFacts:
    status = statuses.get(name)
    ranks = {
        key.partition(".")[2]: ProcessFacts(_state(rank), rank)
        for key, rank in statuses.items()
        if key.startswith(f"{name}.")
    }
    state = State.ABSENT if status is None else _state(status)
    below = descendants(status.pid, tree) if status is not None and state is State.ALIVE and _here(status) else []
    # The orchestrator's own workers are told apart, by name; the trainer's ranks report by themselves.
    halted = tuple(process.id.pid for process in below if is_server(name) and process.stopped)
    errors = _errors(run / "logs" / f"{name}.log")
    return ProcessFacts(state, status, halted, errors[-1] if errors else None, ranks, restart)


def _state(status: ProcessStatus) -> State:
    if not status.started or not _here(status):
        return State.UNKNOWN
    if identify(status.pid) != status.id:
        return State.DEAD
    return State.STOPPED if is_stopped(status.id) else State.ALIVE


def _here(status: ProcessStatus) -> bool:
    return status.host == socket.gethostname()


def _launcher(run: Path) -> ProcessFacts:
    claim = rundir.read_claim(run)
    if claim is None:
        return ProcessFacts(State.ABSENT)
    if claim.host != socket.gethostname():
        return ProcessFacts(State.UNKNOWN if time.time() - claim.heartbeat < _FRESH_SECONDS else State.DEAD)
    process = ProcessId(claim.pid, claim.started)
    if claim.boot != boot_id() or identify(claim.pid) != process:
        return ProcessFacts(State.DEAD)
    return ProcessFacts(State.STOPPED if is_stopped(process) else State.ALIVE)


def _workers(orchestrator: int, tree: Table) -> list[WorkerFacts]:
    found = []
    for process in descendants(orchestrator, tree):
        try:
            words = Path(f"/proc/{process.id.pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # ended since, or not ours to read
            continue
        if _WORKER in words and "--identity" in words:
            name = words[words.index("--identity") + 1].rpartition("/")[0]  # without the number of its life
            found.append(WorkerFacts(name, process.id.pid, process.stopped))
    return found


def _settings(run: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((run / "configs" / "rl.toml").read_text())
    except (OSError, ValueError):  # of TOML or of UTF-8
        return {}


def _seconds(value: object, otherwise: float) -> float:
    """Somebody may have edited the file."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else otherwise


def _restarts(run: Path) -> dict[str, RestartFacts]:
    """The last restart of each process, where it explains what is seen now."""
    rows = [restart for line in _lines(run / "logs" / "restarts.jsonl") if (restart := _restart(line)) is not None]
    recent = [row for row in rows if time.time() - row.time < _RECENT_SECONDS]
    return {row.process: RestartFacts(row.time + row.after, row.reason) for row in recent}


@dataclass(frozen=True)
class _Row:
    """What is used of a line of `logs/restarts.jsonl`. Times in (unix) seconds."""

    time: float
    process: str
    reason: str
    after: float


def _restart(line: str) -> _Row | None:
    try:
        return build(_Row, as_table(json.loads(line)))
    except (ValueError, RecursionError):  # cut short
        return None


def _errors(log: Path) -> list[str]:
    """Lines that tell of errors near the end of a log."""
    lines = _lines(log)
    return killed_rank(lines) or [line.strip() for line in lines if _ERROR.match(line)][-_ERRORS_SHOWN:]


def _lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


# -- text ----------------------------------------------------------------------------------------------------------------------


def examination(run: Path, facts: Facts, diagnosis: Diagnosis) -> list[str]:
    """Everything, for people; what it comes to is last."""
    lines = [f"run            {run}"]
    lines.append(f"{'launcher':<15}{_launcher_state(facts.launcher.state)}")
    for name, process in facts.processes.items():
        lines += _process_lines(facts, name, process)
        for rank, of_rank in process.ranks.items():
            lines += _process_lines(facts, f"{name} {rank}", of_rank)
    for worker in facts.workers:
        lines.append(
            f"{'environment':<15}{'STOPPED' if worker.stopped else 'alive':<11}{worker.name}, pid {worker.pid}"
        )
    lines.append(f"{'committed':<15}{_committed(run)}")
    lines.append(f"{'disk':<15}{facts.free / 2**30:,.1f} GiB free")
    if (limit := limit_line(run)) is not None:
        lines.append(f"{'speed':<15}{limit}")
    for name, process in facts.processes.items():
        if diagnosis.verdict.fine or _ended_well(process):
            continue
        log = run / "logs" / f"{name}.log"
        lines += [f"{'error':<15}{log.name}: {line}" for line in _errors(log)]
    return [*lines, f"{diagnosis.verdict.value:<15}{diagnosis.sentence}"]


def _ended_well(process: ProcessFacts) -> bool:
    """Then it may have been noisy on its way out all the same: vLLM's engine prints a traceback when it is told to stop."""
    return process.status is not None and process.status.outcome in ("finished", "stopped")


def _launcher_state(state: State) -> str:
    if state is State.ABSENT:  # it takes its claim along when it ends
        return "not running"
    return "STOPPED" if state is State.STOPPED else state.value


def _process_lines(facts: Facts, name: str, process: ProcessFacts) -> list[str]:
    status = process.status
    state = process.state.value.upper() if process.state is State.STOPPED else process.state.value
    if status is None:
        again = "" if process.restart is None else f"restart: {process.restart.reason}"
        return [f"{name:<15}{state:<11}{again}".rstrip()]
    if status.outcome is not None:
        return [f"{name:<15}{'ended':<11}{status.outcome}, {_ago(facts, status.since)}"]
    doing = status.phase if status.step is None else f"{status.phase}, step {status.step}"
    lines = [f"{name:<15}{state:<11}{doing}; pid {status.pid}; last progress {_ago(facts, status.progress)}"]
    if process.state is not State.ALIVE:
        lines[0] += f"; last sign of life {_ago(facts, status.heartbeat)}"
    if (wait := status.waiting) is not None:
        left = wait.deadline - facts.now
        until = f"gives up in {minutes(left)}" if left >= 0 else f"should have given up {minutes(-left)} ago"
        waited = minutes(facts.now - wait.since)
        lines.append(f"{'':<26}waits for {wait.subject} from {wait.owner} for {waited} ({until})")
    return lines


def _committed(run: Path) -> str:
    newest = {
        "batch": _newest(list_steps, run / "rollouts"),
        "version": _newest(list_steps, run / "weights"),
        "checkpoint": _newest(checkpoints.complete_steps, run / "checkpoints"),
        "recovery checkpoint": _newest(list_steps, run / "recovery"),
    }
    return ", ".join(f"{what} {step}" for what, step in newest.items())


def _newest(steps_of: Callable[[Path], Sequence[int]], parent: Path) -> str:
    try:
        return str(max(steps_of(parent), default="-"))
    except UserError:
        return "? (cannot be listed)"


def _ago(facts: Facts, then: float) -> str:
    return f"{minutes(max(0.0, facts.now - then))} ago" if then else "unknown"
