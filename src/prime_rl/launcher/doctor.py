"""`rl doctor RUN`: what a run is doing, who waits for whom, and which process keeps it from going on. Reads files and /proc, touches nothing.

`collect` gathers facts, `diagnose` is a pure function of them: the statuses form a graph of who waits for whom, which is followed from the
trainer on to the first process with a fault that can be seen.
"""

import json
import os
import re
import shutil
import socket
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from prime_rl.config.inference import SERVER
from prime_rl.errors import UserError
from prime_rl.launcher import rundir
from prime_rl.launcher.console import limit_line, minutes
from prime_rl.launcher.supervise import Restart, RestartPolicy, killed_rank, stall_reason
from prime_rl.monitor import read_status
from prime_rl.monitor.record import as_table, build
from prime_rl.monitor.status import ProcessStatus
from prime_rl.processes import ProcessId, Table, descendants, identify, is_stopped, table
from prime_rl.transport import checkpoints
from prime_rl.transport.commit import list_steps

JOBS = ("trainer", "orchestrator", "sft", "eval")
ENVIRONMENTS = "environments"
_ADDRESS = re.compile(r"https?://\S+")
_MIN_FREE_BYTES = 64 * 2**20
_LONG_WAIT_SECONDS = 60.0
_RECENT_SECONDS = 600.0  # a restart before that belongs to another story
_TAIL_BYTES = 1 << 16
_ERRORS_SHOWN = 2
_ERROR = re.compile(r"(\w+: )?error: |.*\bERROR\b|[\w.]*(Error|Exception)\b.*: \S")
_WORKER = "prime_rl.envs.worker"


class ProcessState(Enum):
    """What the process table says. UNKNOWN: it runs, or ran, on another host."""

    ALIVE = "alive"
    STOPPED = "stopped"
    DEAD = "dead"
    UNKNOWN = "on another host"
    ABSENT = "no report"


class RunState(Enum):
    """The state of a run."""

    NEVER = "never started"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    MOVES = "moves"
    WAITS = "waits"  # for unusually long, and nobody shows a fault
    RESTARTS = "restarts"  # the launcher restarts the process that the run waits for
    STUCK = "stuck"

    @property
    def fine(self) -> bool:
        return self in (RunState.FINISHED, RunState.MOVES, RunState.NEVER)


@dataclass(frozen=True)
class ProcessFacts:
    """One process. `stopped`: pids of processes below it that a signal has stopped. `last_error`: of its log. `restart`: the last one."""

    state: ProcessState
    status: ProcessStatus | None = None
    stopped: tuple[int, ...] = ()
    last_error: str | None = None
    ranks: Mapping[str, "ProcessFacts"] = field(default_factory=dict)
    restart: Restart | None = None


@dataclass(frozen=True)
class WorkerFacts:
    """One environment worker."""

    name: str
    pid: int
    stopped: bool


@dataclass(frozen=True)
class Facts:
    """Times are unix seconds, sizes bytes. `processes`: those that the run has, by name.

    `recoverable`: the run has committed something. `free`: of the file system of the run directory.
    """

    now: float
    launcher: ProcessFacts
    processes: Mapping[str, ProcessFacts]
    workers: Sequence[WorkerFacts] = ()
    free: int = 1 << 40
    recoverable: bool = False
    policy: RestartPolicy = field(default_factory=RestartPolicy)


@dataclass(frozen=True)
class Diagnosis:
    """`attribution`: which process, worker or resource keeps the run from going on, if any does."""

    state: RunState
    sentence: str
    attribution: str | None = None


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
    return 0 if diagnosis.state.fine else 1


def report(run: Path, full: bool) -> list[str]:
    """For the launcher: the whole examination, or its result in a line."""
    facts = collect(run)
    diagnosis = diagnose(facts)
    return examination(run, facts, diagnosis) if full else [f"doctor: {diagnosis.sentence}"]


def is_server(name: str) -> bool:
    """Whether a process of this name serves: "inference", "inference-1", …"""
    return name.partition("-")[0] == SERVER


# -- facts -----------------------------------------------------------------------------------------------------------------


def collect(run: Path) -> Facts:
    """Gather everything that is known about a run."""
    processes, statuses, restarts = table(), read_status(run), _restarts(run)
    mains = {name: status for name, status in statuses.items() if "." not in name}
    planned = {path.stem for path in (run / "configs").glob("*.toml")}
    servers = sorted(filter(is_server, planned | mains.keys()))
    names = [*(name for name in JOBS if name in planned or name in mains), *servers]
    orchestrator = mains.get("orchestrator")
    return Facts(
        now=time.time(),
        launcher=_launcher(run),
        processes={name: _process(run, name, statuses, processes, restarts.get(name)) for name in names},
        workers=[] if orchestrator is None or not _here(orchestrator) else _workers(orchestrator.pid, processes),
        free=shutil.disk_usage(run).free,
        recoverable=bool(rundir.results(run)),
        policy=_policy(run),
    )


def _process(
    run: Path, name: str, statuses: Mapping[str, ProcessStatus], processes: Table, restart: Restart | None
) -> ProcessFacts:
    status = statuses.get(name)
    ranks = {
        key.partition(".")[2]: ProcessFacts(_state(rank), rank)
        for key, rank in statuses.items()
        if key.startswith(f"{name}.")
    }
    state = ProcessState.ABSENT if status is None else _state(status)
    stopped: tuple[int, ...] = ()
    # The orchestrator's own workers are examined by name; the trainer's ranks report by themselves.
    if status is not None and state is ProcessState.ALIVE and is_server(name):
        stopped = tuple(process.id.pid for process in descendants(status.pid, processes) if process.stopped)
    errors = _errors(run / "logs" / f"{name}.log")
    return ProcessFacts(state, status, stopped, errors[-1] if errors else None, ranks, restart)


def _policy(run: Path) -> RestartPolicy:
    """The timeouts that the run was started with."""
    try:
        settings = tomllib.loads((run / "configs" / "rl.toml").read_text())
    except (OSError, ValueError):  # of TOML or of UTF-8
        settings = {}
    return build(RestartPolicy, settings) or RestartPolicy()


def _state(status: ProcessStatus) -> ProcessState:
    if not status.started or not _here(status):
        return ProcessState.UNKNOWN
    return _local_state(status.id)


def _local_state(process: ProcessId) -> ProcessState:
    if identify(process.pid) != process:
        return ProcessState.DEAD
    return ProcessState.STOPPED if is_stopped(process) else ProcessState.ALIVE


def _here(status: ProcessStatus) -> bool:
    return status.host == socket.gethostname()


def _launcher(run: Path) -> ProcessFacts:
    claim = rundir.read_claim(run)
    if claim is None:
        state = ProcessState.ABSENT
    elif not rundir.is_held(claim):
        state = ProcessState.DEAD
    elif claim.host != socket.gethostname():
        state = ProcessState.UNKNOWN
    else:
        state = _local_state(ProcessId(claim.pid, claim.started))
    return ProcessFacts(state)


def _workers(orchestrator: int, processes: Table) -> list[WorkerFacts]:
    workers = []
    for process in descendants(orchestrator, processes):
        try:
            words = Path(f"/proc/{process.id.pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # ended since, or not ours to read
            continue
        if _WORKER in words and "--identity" in words:
            name = words[words.index("--identity") + 1].rpartition("/")[0]  # without the number of its incarnation
            workers.append(WorkerFacts(name, process.id.pid, process.stopped))
    return workers


def _restarts(run: Path) -> dict[str, Restart]:
    """The last restart of each process, where it explains what is seen now."""
    restarts = {}
    for line in _lines(run / "logs" / "restarts.jsonl"):
        try:
            restart = build(Restart, as_table(json.loads(line)))
        except (ValueError, RecursionError):  # cut short
            continue
        if restart is not None and time.time() - restart.time < _RECENT_SECONDS:
            restarts[restart.process] = restart
    return restarts


def _errors(log: Path) -> list[str]:
    """Error lines near the end of a log."""
    lines = _lines(log)
    return killed_rank(lines) or [line.strip() for line in lines if _ERROR.match(line)][-_ERRORS_SHOWN:]


def _lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


# -- diagnosis -------------------------------------------------------------------------------------------------------------


def diagnose(facts: Facts) -> Diagnosis:
    """The state of the run, what it is attributed to, and why."""
    reported = any(process.status is not None for process in facts.processes.values())
    launched = facts.launcher.state in (ProcessState.ALIVE, ProcessState.STOPPED, ProcessState.UNKNOWN)
    if not reported and not launched:
        return Diagnosis(RunState.NEVER, "no process of a run has reported here")
    if facts.free < _MIN_FREE_BYTES and not _all_finished(facts):
        sentence = f"the disk is full ({facts.free // 2**20} MiB free): make room; what is committed is safe"
        return Diagnosis(RunState.STUCK, sentence, "disk")
    if launched or any(_may_live(process) for process in facts.processes.values()):
        return _diagnose_running(facts)
    return _diagnose_ended(facts)


def _may_live(process: ProcessFacts) -> bool:
    ended = process.status is None or process.status.outcome is not None
    return not ended and process.state in (ProcessState.ALIVE, ProcessState.STOPPED, ProcessState.UNKNOWN)


def _all_finished(facts: Facts) -> bool:
    jobs = [process.status for name, process in facts.processes.items() if process.status and not is_server(name)]
    return bool(jobs) and all(status.outcome == "finished" for status in jobs)


def _diagnose_ended(facts: Facts) -> Diagnosis:
    go_on = " (`rl … --recover` goes on from what is committed)" if facts.recoverable else ""
    statuses = {name: process.status for name, process in facts.processes.items() if process.status is not None}
    for name, status in statuses.items():
        if (status.outcome or "").startswith("failed"):
            return Diagnosis(RunState.FAILED, f"{name} {status.outcome}{go_on}", name)
    if facts.launcher.state is ProcessState.DEAD:
        killed = "rl ended without a last word (killed, or the host went down), and everything with it"
        return Diagnosis(RunState.INTERRUPTED, f"{killed}{go_on}", "launcher")
    for name, status in statuses.items():
        if status.outcome is None and not is_server(name):
            ago = f"{facts.now - status.heartbeat:.0f} s ago"
            last = _last_error(facts.processes[name])
            return Diagnosis(RunState.FAILED, f"{name} ended without a last word {ago}{last}{go_on}", name)
    if _all_finished(facts):
        return Diagnosis(RunState.FINISHED, "the run has finished")
    return Diagnosis(RunState.INTERRUPTED, f"the run was stopped{go_on}")


def _last_error(process: ProcessFacts) -> str:
    return f"; the last error in its log: {process.last_error}" if process.last_error else ""


def _diagnose_running(facts: Facts) -> Diagnosis:
    chains = _chains(facts, [*(name for name in JOBS if name in facts.processes), *filter(is_server, facts.processes)])
    halted = facts.launcher.state is ProcessState.STOPPED
    for chain in chains:
        if chain.fault is not None:
            state = RunState.RESTARTS if chain.restarts and not halted else RunState.STUCK
            return Diagnosis(state, f"{' ← '.join(chain.path)}, {chain.fault}", chain.path[-1])
    if halted:
        sentence = "rl itself is stopped (SIGSTOP): nobody is watched until it goes on"
        return Diagnosis(RunState.STUCK, sentence, "launcher")
    longest = max(chains, key=lambda chain: chain.waited, default=None)
    if longest is not None and longest.waited > _LONG_WAIT_SECONDS:
        waited = f"for {longest.waited:.0f} s now, and none of them shows a fault{longest.hint}"
        return Diagnosis(RunState.WAITS, f"{' ← '.join(longest.path)}: {waited}", longest.path[-1])
    doing = []
    for name, process in facts.processes.items():
        if (status := process.status) is None:
            continue
        if status.waiting is not None and status.outcome is None:
            doing.append(f"{name} waits for {status.waiting.subject}")
        else:
            doing.append(f"{name}: {status.outcome or status.phase}")
    return Diagnosis(RunState.MOVES, "nothing is wrong: " + ", ".join(doing))


@dataclass(frozen=True)
class _Chain:
    """A process and its waits, `trainer ← rollouts/step_3 ← orchestrator`, and the fault of the last one as a clause.

    `waited`: seconds of the first wait. `restarts`: the fault is one that the launcher is mending.
    """

    path: tuple[str, ...]
    fault: str | None = None
    waited: float = 0.0
    hint: str = ""
    restarts: bool = False


def _chains(facts: Facts, names: Sequence[str], path: tuple[str, ...] = ()) -> list[_Chain]:
    """From each of them. A server that has a fault is left out while another one is well, which takes over what it had."""
    chains = [(name, _follow(facts, name, path)) for name in names]
    well = any(is_server(name) and chain.fault is None for name, chain in chains)
    return [chain for name, chain in chains if not (well and is_server(name) and chain.fault is not None)]


def _follow(facts: Facts, name: str, path: tuple[str, ...]) -> _Chain:
    waited_for = bool(path)
    if name in path:
        return _Chain((*path, name), "which waits for it in turn: they wait for each other")
    if name == ENVIRONMENTS:
        for worker in facts.workers:
            if worker.stopped:
                fault = f"which is stopped (SIGSTOP, pid {worker.pid})"
                return _Chain((*path, f"environment worker {worker.name}"), fault)
        return _Chain((*path, name), hint="; environment code may be slow or stuck: see logs/envs")
    path = (*path, name)
    process = facts.processes.get(name, ProcessFacts(ProcessState.ABSENT))
    if (restart := _restarting(facts, process, waited_for)) is not None:
        return _Chain(path, restart, restarts=True)
    if (own_fault := _fault(facts, name, process, waited_for)) is not None:
        return _Chain(path, own_fault)
    status = process.status
    if status is None or (wait := status.waiting) is None:
        return _Chain(path)
    chains = _chains(facts, _owners(facts, wait.owner), (*path, wait.subject))
    chains = chains or [_Chain((*path, wait.subject, wait.owner))]
    faulty = [chain for chain in chains if chain.fault is not None]
    if not faulty and (overdue := _stall(facts, name, status)) is not None:
        return _Chain(path, f"which {overdue}")
    # Where several owe it, the server is named first: it is well, so look at the others.
    return replace(faulty[0] if faulty else chains[-1], waited=facts.now - wait.since)


def _owners(facts: Facts, owner: str) -> list[str]:
    """Names of processes in the words of a wait: `inference at http://…`, `inference and environments`, `environment rt`."""
    owner = _ADDRESS.sub("", owner)  # a host may be called anything
    servers = [*filter(is_server, facts.processes)] or [SERVER]
    named = [*(servers if SERVER in owner else []), *(name for name in JOBS if name in owner)]
    return [*named, *([ENVIRONMENTS] if "environment" in owner else [])]


def _restarting(facts: Facts, process: ProcessFacts, waited_for: bool) -> str | None:
    restart = process.restart
    if restart is None:
        return None
    due = restart.time + restart.after
    if due > facts.now:
        return f"which {restart.reason} and is started again in {due - facts.now:.0f} s"
    if process.status is None and waited_for:
        return f"which {restart.reason}, was started again {facts.now - due:.0f} s ago and has not reported yet"
    return None


def _fault(facts: Facts, name: str, process: ProcessFacts, waited_for: bool) -> str | None:
    """What is wrong with a process itself, as a clause."""
    status = process.status
    if status is None:
        unknown = "which has not reported: somebody else runs it" if is_server(name) else "which has not reported yet"
        return unknown if waited_for else None
    if status.outcome is not None:
        failed = status.outcome.startswith("failed")
        return f"which has ended: {status.outcome}" if failed or waited_for else None
    if (lifeless := _lifeless(facts, process)) is not None:
        return f"which {lifeless}"
    if process.stopped:
        return f"whose process {process.stopped[0]} is stopped (SIGSTOP)"
    for rank, rank_facts in process.ranks.items():
        if (lifeless := _lifeless(facts, rank_facts)) is not None:
            return f"whose rank {rank} {lifeless}"
    stalled = None if status.waiting is not None else _stall(facts, name, status)
    return None if stalled is None else f"which {stalled}"


def _stall(facts: Facts, name: str, status: ProcessStatus) -> str | None:
    """By the launcher's rules, and the process's own clock."""
    since = status.progress if status.waiting is None else status.waiting.since
    unchanged = facts.now - since if since else 0.0
    pulses = status.ready is not None and status.progress > status.ready
    return stall_reason(status, facts.policy, facts.now - status.heartbeat, unchanged, is_server(name), pulses)


def _lifeless(facts: Facts, process: ProcessFacts) -> str | None:
    if process.status is None or process.status.outcome is not None:
        return None
    silent = facts.now - process.status.heartbeat
    if process.state is ProcessState.DEAD:
        return f"died without a last word {silent:.0f} s ago{_last_error(process)}"
    if process.state is ProcessState.STOPPED:
        return f"has been stopped (SIGSTOP) for {silent:.0f} s"
    return f"has given no sign of life for {silent:.0f} s" if silent > facts.policy.heartbeat_timeout else None


# -- text ------------------------------------------------------------------------------------------------------------------


def examination(run: Path, facts: Facts, diagnosis: Diagnosis) -> list[str]:
    """Everything, for people; the diagnosis is last."""
    launcher = facts.launcher.state
    # It removes its claim when it ends.
    lines = [
        _line("run", run),
        _line("launcher", "not running" if launcher is ProcessState.ABSENT else _shown(launcher)),
    ]
    for name, process in facts.processes.items():
        lines += _process_lines(facts, name, process)
        for rank, rank_facts in process.ranks.items():
            lines += _process_lines(facts, f"{name} {rank}", rank_facts)
    for worker in facts.workers:
        lines.append(
            _line("environment", f"{'STOPPED' if worker.stopped else 'alive':<11}{worker.name}, pid {worker.pid}")
        )
    committed = {
        "batch": _newest(list_steps, run / "rollouts"),
        "version": _newest(list_steps, run / "weights"),
        "checkpoint": _newest(checkpoints.complete_steps, run / "checkpoints"),
        "recovery checkpoint": _newest(list_steps, run / "recovery"),
    }
    lines.append(_line("committed", ", ".join(f"{what} {step}" for what, step in committed.items())))
    lines.append(_line("disk", f"{facts.free / 2**30:,.1f} GiB free"))
    if (limit := limit_line(run)) is not None:
        lines.append(_line("speed", limit))
    for name, process in facts.processes.items():
        # One that ended well may have been noisy on its way out: vLLM's engine prints a traceback when it is told to stop.
        ended_well = process.status is not None and process.status.outcome in ("finished", "stopped")
        if not diagnosis.state.fine and not ended_well:
            lines += [_line("error", f"{name}.log: {line}") for line in _errors(run / "logs" / f"{name}.log")]
    return [*lines, _line(diagnosis.state.value, diagnosis.sentence)]


def _line(name: str, text: object) -> str:
    return f"{name:<15}{text}"


def _shown(state: ProcessState) -> str:
    return state.value.upper() if state is ProcessState.STOPPED else state.value


def _process_lines(facts: Facts, name: str, process: ProcessFacts) -> list[str]:
    status, state = process.status, _shown(process.state)
    if status is None:
        restart = "" if process.restart is None else f"restart: {process.restart.reason}"
        return [_line(name, f"{state:<11}{restart}").rstrip()]
    if status.outcome is not None:
        return [_line(name, f"{'ended':<11}{status.outcome}, {_ago(facts, status.since)}")]
    doing = status.phase if status.step is None else f"{status.phase}, step {status.step}"
    lines = [_line(name, f"{state:<11}{doing}; pid {status.pid}; last progress {_ago(facts, status.progress)}")]
    if process.state is not ProcessState.ALIVE:
        lines[0] += f"; last sign of life {_ago(facts, status.heartbeat)}"
    if (wait := status.waiting) is not None:
        left = wait.deadline - facts.now
        until = f"gives up in {minutes(left)}" if left >= 0 else f"should have given up {minutes(-left)} ago"
        waited = minutes(facts.now - wait.since)
        lines.append(f"{'':<26}waits for {wait.subject} from {wait.owner} for {waited} ({until})")
    return lines


def _newest(steps_of: Callable[[Path], Sequence[int]], parent: Path) -> str:
    try:
        return str(max(steps_of(parent), default="-"))
    except UserError:
        return "? (cannot be listed)"


def _ago(facts: Facts, then: float) -> str:
    return f"{minutes(max(0.0, facts.now - then))} ago" if then else "unknown"
