"""`rl doctor RUN`: what a run is doing, who waits for whom, what keeps it from going on. Reads files and /proc only.

`collect` gathers facts, `diagnose` is a pure function of them: the statuses form a graph of who waits for whom, which is
followed from the trainer on to the first process with a fault that can be seen.
"""

import json
import re
import shutil
import socket
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from prime_rl.config.inference import SERVER
from prime_rl.config.loader import say
from prime_rl.errors import UserError
from prime_rl.launcher import rundir
from prime_rl.launcher.console import limit_line, minutes
from prime_rl.launcher.supervise import Restart, RestartPolicy, log_tail, stall_reason
from prime_rl.monitor import read_status
from prime_rl.monitor.status import ProcessStatus, parse_record
from prime_rl.processes import ProcessId, identify, is_stopped
from prime_rl.transport import checkpoints
from prime_rl.transport.commit import list_steps

_JOBS = ("trainer", "orchestrator", "sft", "eval")
_ENVIRONMENTS = "environments"
_ADDRESS = re.compile(r"https?://\S+")
_MIN_FREE_BYTES = 64 * 2**20
_LONG_WAIT_SECONDS = 60.0
_RECENT_SECONDS = 600.0  # an earlier restart explains nothing that is seen now
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
    RESTARTS = "restarts"  # the launcher restarts the process that the run waits for
    STUCK = "stuck"

    @property
    def fine(self) -> bool:
        return self in (RunState.FINISHED, RunState.MOVES, RunState.NEVER)


@dataclass(frozen=True)
class ProcessFacts:
    """One process. `restart`: the last one, where it is recent."""

    state: ProcessState
    status: ProcessStatus | None = None
    restart: Restart | None = None

    @property
    def may_run(self) -> bool:
        """Whether it has reported no end, and is not known to be dead."""
        return self.status is not None and self.status.outcome is None and self.state is not ProcessState.DEAD


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


@dataclass(frozen=True)
class Diagnosis:
    """`attribution`: which process or resource keeps the run from going on, if any does."""

    state: RunState
    sentence: str
    attribution: str | None = None


def examine(run: Path) -> int:
    """Print the examination of a run; return 0 when nothing is wrong with it, else 1.

    Raises:
        UserError: no such directory.
    """
    if not run.is_dir():
        raise UserError(f"{run} is no directory: give the run's output directory")
    facts = collect(run)
    diagnosis = diagnose(facts)
    say("\n".join(examination(run, facts, diagnosis)))
    return 0 if diagnosis.state.fine else 1


def report(run: Path) -> str:
    """Return the diagnosis in a line, for the launcher's console."""
    return f"doctor: {diagnose(collect(run)).sentence}"


def is_server(name: str) -> bool:
    """Whether a process of this name serves: "inference", "inference-1", …"""
    return name.partition("-")[0] == SERVER


# -- facts -------------------------------------------------------------------------------------------------------------


def collect(run: Path) -> Facts:
    """Gather everything that is known about a run."""
    statuses, restarts = read_status(run), _restarts(run)
    known = {path.stem for path in (run / "configs").glob("*.toml")} | statuses.keys()
    names = [name for job in _JOBS for name in sorted(known) if name.partition(".")[0] == job]
    names += sorted(filter(is_server, known))
    states = {name: _state(status.host, status.id) for name, status in statuses.items()}
    claim, launcher = rundir.read_claim(run), ProcessState.ABSENT
    if claim is not None:
        held = rundir.is_held(claim)
        launcher = _state(claim.host, ProcessId(claim.pid, claim.started)) if held else ProcessState.DEAD
    try:  # the timeouts that the run was started with
        settings = tomllib.loads((run / "configs" / "rl.toml").read_text())
    except (OSError, ValueError):  # of TOML or of UTF-8
        settings = {}
    return Facts(
        now=time.time(),
        launcher=launcher,
        processes={
            name: ProcessFacts(states.get(name, ProcessState.ABSENT), statuses.get(name), restarts.get(name))
            for name in names
        },
        free=shutil.disk_usage(run).free,
        recoverable=bool(rundir.results(run)),
        policy=parse_record(RestartPolicy, json.dumps(settings, default=str)) or RestartPolicy(),
    )


def _state(host: str, process: ProcessId) -> ProcessState:
    if not process.started or host != socket.gethostname():
        return ProcessState.UNKNOWN
    if identify(process.pid) != process:
        return ProcessState.DEAD
    return ProcessState.STOPPED if is_stopped(process) else ProcessState.ALIVE


def _restarts(run: Path) -> dict[str, Restart]:
    """Return the last restart of each process, where it explains what is seen now."""
    restarts = {}
    for line in log_tail(run / "logs" / "restarts.jsonl"):
        restart = parse_record(Restart, line)
        if restart is not None and time.time() - restart.time < _RECENT_SECONDS:
            restarts[restart.process] = restart
    return restarts


def _errors(run: Path, name: str) -> list[str]:
    """Return error lines near the end of a process's log."""
    lines = log_tail(run / "logs" / f"{name}.log")
    return [line.strip() for line in lines if _ERROR.match(line)][-_ERRORS_SHOWN:]


# -- diagnosis ---------------------------------------------------------------------------------------------------------


def diagnose(facts: Facts) -> Diagnosis:
    """Return the state of the run, what it is attributed to, and why."""
    processes = {name: process for name, process in facts.processes.items() if "." not in name}
    statuses = {name: process.status for name, process in processes.items() if process.status is not None}
    launched = facts.launcher not in (ProcessState.ABSENT, ProcessState.DEAD)
    if not statuses and not launched:
        return Diagnosis(RunState.NEVER, "no process of a run has reported here")
    jobs = {name: status for name, status in statuses.items() if not is_server(name)}
    finished = bool(jobs) and all(status.outcome == "finished" for status in jobs.values())
    if facts.free < _MIN_FREE_BYTES and not finished:
        sentence = f"the disk is full ({facts.free // 2**20} MiB free): make room; what is committed is safe"
        return Diagnosis(RunState.STUCK, sentence, "disk")
    if launched or any(process.may_run for process in processes.values()):
        return _diagnose_running(facts, statuses)
    advice = " (`rl … --recover` goes on from what is committed)" if facts.recoverable else ""
    for name, status in statuses.items():
        if (status.outcome or "").startswith("failed"):
            return Diagnosis(RunState.FAILED, f"{name} {status.outcome}{advice}", name)
    if facts.launcher is ProcessState.DEAD:
        sentence = f"rl ended without a last word (killed, or the host went down), and everything with it{advice}"
        return Diagnosis(RunState.INTERRUPTED, sentence, "launcher")
    for name, status in jobs.items():
        if status.outcome is None:
            ago = f"{facts.now - status.heartbeat:.0f} s ago"
            return Diagnosis(RunState.FAILED, f"{name} ended without a last word {ago}{advice}", name)
    if finished:
        return Diagnosis(RunState.FINISHED, "the run has finished")
    return Diagnosis(RunState.INTERRUPTED, f"the run was stopped{advice}")


def _diagnose_running(facts: Facts, statuses: Mapping[str, ProcessStatus]) -> Diagnosis:
    chains = _chains(facts, [*(name for name in _JOBS if name in facts.processes), *filter(is_server, facts.processes)])
    halted = facts.launcher is ProcessState.STOPPED
    for chain in chains:
        if chain.fault is not None:
            state = RunState.RESTARTS if chain.restarts and not halted else RunState.STUCK
            return Diagnosis(state, f"{' ← '.join(chain.path)}, {chain.fault}", chain.path[-1])
    if halted:
        sentence = "rl itself is stopped (SIGSTOP): nobody is watched until it goes on"
        return Diagnosis(RunState.STUCK, sentence, "launcher")
    longest = max(chains, key=lambda chain: chain.waited, default=_Chain(()))
    if longest.waited > _LONG_WAIT_SECONDS:
        sentence = f"{' ← '.join(longest.path)}: for {longest.waited:.0f} s now, and none of them shows a fault"
        if longest.path[-1] == _ENVIRONMENTS:
            sentence += "; environment code may be slow or stuck: see logs/envs"
        return Diagnosis(RunState.WAITS, sentence, longest.path[-1])
    doing = [
        f"{name} waits for {status.waiting.subject}" if status.waiting else f"{name}: {status.outcome or status.phase}"
        for name, status in statuses.items()
    ]
    return Diagnosis(RunState.MOVES, f"nothing is wrong: {', '.join(doing)}")


@dataclass(frozen=True)
class _Chain:
    """A process and its waits, `trainer ← rollouts/step_3 ← orchestrator`, and the fault of the last one as a clause.

    `waited`: seconds of the first wait. `restarts`: the launcher is mending the fault.
    """

    path: tuple[str, ...]
    fault: str | None = None
    waited: float = 0.0
    restarts: bool = False


def _chains(facts: Facts, names: Sequence[str], path: tuple[str, ...] = ()) -> list[_Chain]:
    """Follow each of them. A faulty server is left out while another one is well, which takes over its requests."""
    chains = [(name, _follow(facts, name, path)) for name in names]
    well = any(is_server(name) and chain.fault is None for name, chain in chains)
    return [chain for name, chain in chains if not (well and is_server(name) and chain.fault is not None)]


def _follow(facts: Facts, name: str, before: tuple[str, ...]) -> _Chain:
    path = (*before, name)
    if name in before:
        return _Chain(path, "which waits for it in turn: they wait for each other")
    if name == _ENVIRONMENTS:  # the orchestrator restarts its workers
        return _Chain(path)
    process = facts.processes.get(name, ProcessFacts(ProcessState.ABSENT))
    if (fault := _fault(facts, name, process, waited_for=bool(before))) is not None:
        return _Chain(path, fault, restarts=process.status is None and process.restart is not None)
    if process.status is None or (wait := process.status.waiting) is None:
        return _Chain(path)
    owner = _ADDRESS.sub("", wait.owner)  # a host may be called anything
    servers = [*filter(is_server, facts.processes)] or [SERVER]
    owners = [*(servers if SERVER in owner else []), *(job for job in _JOBS if job in owner)]
    owners += [_ENVIRONMENTS] if "environment" in owner else []
    chains = _chains(facts, owners, (*path, wait.subject)) or [_Chain((*path, wait.subject, wait.owner))]
    faulty = [chain for chain in chains if chain.fault is not None]
    overdue = stall_reason(name, process.status, facts.policy, facts.now, 0.0, is_server(name))
    if not faulty and overdue is not None:
        return _Chain(path, f"which {overdue}")
    # Where several owe it, the server is named first: it is well, so look at the others.
    return replace(faulty[0] if faulty else chains[-1], waited=facts.now - wait.since)


def _fault(facts: Facts, name: str, process: ProcessFacts, waited_for: bool) -> str | None:
    """Return what is wrong with a process itself, as a clause; None where nothing is."""
    status = process.status
    if status is None:
        if process.restart is not None:
            return f"which {process.restart.reason} and is being started again"
        if waited_for:
            return "which has not reported" + (": somebody else runs it" if is_server(name) else " yet")
        return None
    if status.outcome is not None:
        return f"which has ended: {status.outcome}" if waited_for or status.outcome.startswith("failed") else None
    if (fault := _lifeless(facts, process)) is not None:
        return f"which {fault}"
    for key, rank in facts.processes.items():
        if key.startswith(f"{name}.") and (fault := _lifeless(facts, rank)) is not None:
            return f"whose rank {key.partition('.')[2]} {fault}"
    stall = stall_reason(name, status, facts.policy, facts.now, 0.0, is_server(name))
    return f"which {stall}" if status.waiting is None and stall is not None else None


def _lifeless(facts: Facts, process: ProcessFacts) -> str | None:
    if process.status is None or process.status.outcome is not None:
        return None
    silent = facts.now - process.status.heartbeat
    if process.state is ProcessState.DEAD:
        return f"died without a last word {silent:.0f} s ago"
    if process.state is ProcessState.STOPPED:
        return f"has been stopped (SIGSTOP) for {silent:.0f} s"
    return f"has given no sign of life for {silent:.0f} s" if silent > facts.policy.heartbeat_timeout else None


# -- text --------------------------------------------------------------------------------------------------------------


def examination(run: Path, facts: Facts, diagnosis: Diagnosis) -> list[str]:
    """Describe everything, for people; the diagnosis is last."""
    # The launcher removes its claim when it ends.
    launcher = "not running" if facts.launcher is ProcessState.ABSENT else facts.launcher.value
    rows = [("run", str(run)), ("launcher", launcher)]
    for name, process in facts.processes.items():
        rows += _describe(facts, name.replace(".", " "), process)
    newest = {
        "batch": _newest(list_steps, run / "rollouts"),
        "version": _newest(list_steps, run / "weights"),
        "checkpoint": _newest(checkpoints.complete_steps, run / "checkpoints"),
        "recovery checkpoint": _newest(list_steps, run / "recovery"),
    }
    rows.append(("committed", ", ".join(f"{what} {step}" for what, step in newest.items())))
    rows.append(("disk", f"{facts.free / 2**30:,.1f} GiB free"))
    if (limit := limit_line(run)) is not None:
        rows.append(("speed", limit))
    for name, process in facts.processes.items():
        # One that ended well may have been noisy: vLLM's engine prints a traceback when it is asked to stop.
        ended_well = process.status is not None and process.status.outcome in ("finished", "stopped")
        if not diagnosis.state.fine and not ended_well:
            rows += [("error", f"{name}.log: {line}") for line in _errors(run, name)]
    rows.append((diagnosis.state.value, diagnosis.sentence))
    return [f"{name:<15}{text}".rstrip() for name, text in rows]


def _describe(facts: Facts, name: str, process: ProcessFacts) -> list[tuple[str, str]]:
    def ago(then: float) -> str:
        return f"{minutes(max(0.0, facts.now - then))} ago" if then else "unknown"

    status, state = process.status, f"{process.state.value:<11}"
    if status is None:
        return [(name, state + (f"restart: {process.restart.reason}" if process.restart else ""))]
    if status.outcome is not None:
        return [(name, f"{'ended':<11}{status.outcome}, {ago(status.since)}")]
    doing = status.phase if status.step is None else f"{status.phase}, step {status.step}"
    silent = "" if process.state is ProcessState.ALIVE else f"; last sign of life {ago(status.heartbeat)}"
    rows = [(name, f"{state}{doing}; pid {status.pid}; last progress {ago(status.progress)}{silent}")]
    if (wait := status.waiting) is not None:
        left = wait.deadline - facts.now
        until = f"gives up in {minutes(left)}" if left >= 0 else f"should have given up {minutes(-left)} ago"
        waited = minutes(facts.now - wait.since)
        rows.append(("", f"{'':<11}waits for {wait.subject} from {wait.owner} for {waited} ({until})"))
    return rows


def _newest(steps_of: Callable[[Path], Sequence[int]], parent: Path) -> str:
    try:
        return str(max(steps_of(parent), default="-"))
    except UserError:
        return "? (cannot be listed)"
