"""`rl doctor RUN`: what a run is doing, who waits for whom, what keeps it from going on. Reads files and /proc only.

`collect` gathers facts, `diagnose` is a pure function of them: it names the processes with a fault that can be seen,
else the long waits.
"""

import json
import re
import shutil
import socket
import time
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from prime_rl.config.inference import SERVER
from prime_rl.config.loader import say
from prime_rl.errors import UserError
from prime_rl.launcher import rundir
from prime_rl.launcher.console import minutes
from prime_rl.launcher.supervise import RESTARTS, RestartPolicy, log_tail, stall_reason
from prime_rl.monitor import read_status
from prime_rl.monitor.limits import LimitWatch
from prime_rl.monitor.status import ProcessStatus, parse_record
from prime_rl.processes import ProcessId, is_alive, is_stopped
from prime_rl.transport import checkpoints

_JOBS = ("trainer", "orchestrator", "sft", "eval")
_MIN_FREE_BYTES = 64 * 2**20
_LONG_WAIT_SECONDS = 60.0
_ERRORS_SHOWN = 2
_ERROR = re.compile(r"(\w+: )?error: |.*\bERROR\b|[\w.]*(Error|Exception)\b.*: \S")


class ProcessState(Enum):
    """State of a process, by the process table. UNKNOWN: it runs, or ran, on another host."""

    ALIVE = "alive"
    STOPPED = "STOPPED"
    DEAD = "dead"
    UNKNOWN = "on another host"
    ABSENT = "no report"


class RunState(Enum):
    """State of a run."""

    NEVER = "never started"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    MOVES = "moves"
    WAITS = "waits"  # for unusually long, and no fault is seen
    STUCK = "stuck"


FINE = (RunState.FINISHED, RunState.MOVES, RunState.NEVER)


@dataclass(frozen=True)
class ProcessFacts:
    """One process. `restart`: what the launcher reported of its last restart, where it has not reported since."""

    state: ProcessState
    status: ProcessStatus | None = None
    restart: str = ""


@dataclass(frozen=True)
class Facts:
    """Everything that is known about a run. Times are unix seconds, sizes bytes.

    `processes`: by name; `trainer.1` is the trainer's rank 1. `recoverable`: it has committed something. `free`: of the
    file system of the run directory.
    """

    now: float
    launcher: ProcessState
    processes: Mapping[str, ProcessFacts]
    free: int = 1 << 40
    recoverable: bool = False
    policy: RestartPolicy = field(default_factory=RestartPolicy)

    @property
    def launched(self) -> bool:
        """Whether a launcher is alive."""
        return self.launcher not in (ProcessState.ABSENT, ProcessState.DEAD)


def examine(run: Path) -> int:
    """Print the examination of a run; return 0 when nothing is wrong with it, else 1.

    Raises:
        UserError: no such directory.
    """
    if not run.is_dir():
        raise UserError(f"{run} is no directory: give the run's output directory")
    facts = collect(run)
    state, sentence = diagnose(facts)
    say("\n".join(examination(run, facts, state, sentence)))
    return 0 if state in FINE else 1


def collect(run: Path) -> Facts:
    """Gather everything that is known about a run."""
    statuses, claim, launcher, now = read_status(run), rundir.read_claim(run), ProcessState.ABSENT, time.time()
    if claim is not None:
        launcher = _state(claim.host, claim.id) if rundir.is_held(claim) else ProcessState.DEAD
    restarts = {}
    for line in log_tail(run / "logs" / RESTARTS):
        with suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            restarts[row["process"]] = f"{row['reason']} {minutes(now - row['time'])} ago, is being started again"
    try:  # the timeouts that the run was started with
        settings = tomllib.loads((run / "configs" / "rl.toml").read_text())
    except (OSError, ValueError):  # of TOML or of UTF-8
        settings = {}
    known = {path.stem for path in (run / "configs").glob("*.toml")} | statuses.keys()
    names = [name for job in _JOBS for name in sorted(known) if name.partition(".")[0] == job]
    processes = {}
    for name in [*names, *sorted(filter(_is_server, known))]:
        if (status := statuses.get(name)) is not None:
            processes[name] = ProcessFacts(_state(status.host, status.id), status)
        else:
            alive = launcher not in (ProcessState.ABSENT, ProcessState.DEAD)
            processes[name] = ProcessFacts(ProcessState.ABSENT, restart=restarts.get(name, "") if alive else "")
    policy = parse_record(RestartPolicy, json.dumps(settings, default=str)) or RestartPolicy()
    return Facts(now, launcher, processes, shutil.disk_usage(run).free, bool(rundir.results(run)), policy)


def _state(host: str, process: ProcessId) -> ProcessState:
    if not process.started or host != socket.gethostname():
        return ProcessState.UNKNOWN
    if not is_alive(process):
        return ProcessState.DEAD
    return ProcessState.STOPPED if is_stopped(process) else ProcessState.ALIVE


def _is_server(name: str) -> bool:
    """Whether a process of this name serves: "inference", "inference-1", …"""
    return name.partition("-")[0] == SERVER


# -- diagnosis ---------------------------------------------------------------------------------------------------------


def diagnose(facts: Facts) -> tuple[RunState, str]:
    """Return the state of the run, and what keeps it from going on, or what it does, in a sentence."""
    processes = {name: process for name, process in facts.processes.items() if "." not in name}
    statuses = {name: process.status for name, process in processes.items() if process.status is not None}
    jobs = {name: status for name, status in statuses.items() if not _is_server(name)}
    finished = bool(jobs) and all(status.outcome == "finished" for status in jobs.values())
    running = {name for name, status in statuses.items() if status.outcome is None}
    if not statuses and not facts.launched:
        return RunState.NEVER, "no process of a run has reported here"
    if facts.free < _MIN_FREE_BYTES and not finished:
        sentence = f"the disk is full ({facts.free // 2**20} MiB free): make room; what is committed is safe"
        return RunState.STUCK, sentence
    if facts.launched or any(processes[name].state is not ProcessState.DEAD for name in running):
        return _diagnose_running(facts, statuses)
    failed = [
        f"{name} {status.outcome}" for name, status in statuses.items() if (status.outcome or "").startswith("failed")
    ]
    silent = [
        f"{name} ended without a last word {facts.now - jobs[name].heartbeat:.0f} s ago"
        for name in jobs
        if name in running
    ]
    killed = "rl ended without a last word (killed, or the host went down), and everything with it"
    answers = (
        (RunState.FAILED, failed),
        (RunState.INTERRUPTED, [killed] if facts.launcher is ProcessState.DEAD else []),
        (RunState.FAILED, silent),
        (RunState.FINISHED, ["the run has finished"] if finished else []),
        (RunState.INTERRUPTED, ["the run was stopped"]),
    )
    state, sentences = next(answer for answer in answers if answer[1])
    goes_on = facts.recoverable and state is not RunState.FINISHED
    return state, sentences[0] + " (`rl … --recover` goes on from what is committed)" * goes_on


def _diagnose_running(facts: Facts, statuses: Mapping[str, ProcessStatus]) -> tuple[RunState, str]:
    faults = {name: fault for name in facts.processes if (fault := _fault(facts, name)) is not None}
    if any(_is_server(name) and name not in faults for name in statuses):  # it takes over the others' requests
        faults = {name: fault for name, fault in faults.items() if not _is_server(name)}
    if facts.launcher is ProcessState.STOPPED:
        faults["rl"] = "itself is stopped (SIGSTOP): nobody is watched until it goes on"
    if faults:
        return RunState.STUCK, "; ".join(f"{name.partition('.')[0]} {fault}" for name, fault in faults.items())
    waits = {name: status.waiting for name, status in statuses.items() if status.waiting is not None}
    long = [
        f"{name} waits for {wait.subject} from {wait.owner} for {facts.now - wait.since:.0f} s"
        for name, wait in waits.items()
        if facts.now - wait.since > _LONG_WAIT_SECONDS
    ]
    if long:
        return RunState.WAITS, f"{', '.join(long)}; no process shows a fault, for environments see logs/envs"
    doing = [
        f"{name} waits for {waits[name].subject}" if name in waits else f"{name}: {status.outcome or status.phase}"
        for name, status in statuses.items()
    ]
    doing += [f"{name} {process.restart}" for name, process in facts.processes.items() if process.restart]
    return RunState.MOVES, f"nothing to do: {', '.join(doing)}"


def _fault(facts: Facts, name: str) -> str | None:
    """Return what is wrong with a process or rank itself, in words that follow its name; None where nothing is."""
    process = facts.processes[name]
    if (status := process.status) is None:
        return None
    if status.outcome is not None:
        return f"has ended: {status.outcome}" if status.outcome.startswith("failed") else None
    rank, silent = name.partition(".")[2], facts.now - status.heartbeat
    who = f"rank {rank} " if rank else ""
    if process.state is ProcessState.DEAD:
        return f"{who}died without a last word {silent:.0f} s ago"
    if process.state is ProcessState.STOPPED:
        return f"{who}has been stopped (SIGSTOP) for {silent:.0f} s"
    return stall_reason(name, status, facts.policy, facts.now, 0.0, _is_server(name))


# -- text --------------------------------------------------------------------------------------------------------------


def examination(run: Path, facts: Facts, state: RunState, sentence: str) -> list[str]:
    """Describe everything, for people; the diagnosis is last."""
    # The launcher removes its claim when it ends.
    launcher = "not running" if facts.launcher is ProcessState.ABSENT else facts.launcher.value
    rows = [("run", str(run)), ("launcher", launcher)]
    for name, process in facts.processes.items():
        rows += _describe(facts, state, name.replace(".", " "), process)
    newest = {
        "batch": rundir.newest_step(run / "rollouts"),
        "version": rundir.newest_step(run / "weights"),
        "checkpoint": rundir.newest_step(run / "checkpoints", checkpoints.complete_steps),
        "recovery checkpoint": rundir.newest_step(run / "recovery"),
    }
    committed = ", ".join(f"{what} {step if step >= 0 else '-'}" for what, step in newest.items())
    rows += [("committed", committed), ("disk", f"{facts.free / 2**30:,.1f} GiB free")]
    if (limit := LimitWatch(run).look()) is not None:
        rows.append(("speed", str(limit)))
    for name, process in facts.processes.items():
        # One that ended well may have been noisy: vLLM's engine prints a traceback when it is asked to stop.
        if state not in FINE and (process.status is None or process.status.outcome not in ("finished", "stopped")):
            errors = [line.strip() for line in log_tail(run / "logs" / f"{name}.log") if _ERROR.match(line)]
            rows += [("error", f"{name}.log: {line}") for line in errors[-_ERRORS_SHOWN:]]
    rows.append((state.value, sentence))
    return [f"{name:<15}{text}".rstrip() for name, text in rows]


def _describe(facts: Facts, run: RunState, name: str, process: ProcessFacts) -> list[tuple[str, str]]:
    def ago(then: float) -> str:
        return f"{minutes(max(0.0, facts.now - then))} ago" if then else "unknown"

    status, state = process.status, f"{process.state.value:<11}"
    if status is None:
        return [(name, process.restart or state)]
    if status.outcome is not None:
        return [(name, f"{'ended':<11}{status.outcome}, {ago(status.since)}")]
    if run is RunState.FINISHED and process.state is ProcessState.DEAD:
        # The launcher stopped it: vLLM's engine may be too slow to let its server say so.
        return [(name, f"{'ended':<11}stopped, {ago(status.heartbeat)}")]
    doing = status.phase if status.step is None else f"{status.phase}, step {status.step}"
    silent = "" if process.state is ProcessState.ALIVE else f"; last sign of life {ago(status.heartbeat)}"
    rows = [(name, f"{state}{doing}; pid {status.pid}; last progress {ago(status.progress)}{silent}")]
    if (wait := status.waiting) is not None:
        left = wait.deadline - facts.now
        until = f"gives up in {minutes(left)}" if left >= 0 else f"should have given up {minutes(-left)} ago"
        waited = minutes(facts.now - wait.since)
        rows.append(("", f"{'':<11}waits for {wait.subject} from {wait.owner} for {waited} ({until})"))
    return rows
