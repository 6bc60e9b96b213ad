"""What keeps a run from going on: a pure function of what its directory and this host's process table say.

The statuses form a graph of who waits for whom. It is followed from the trainer on, to the first process with a fault that can be seen.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from prime_rl.config.inference import SERVER
from prime_rl.monitor.status import ProcessStatus

JOBS = ("trainer", "orchestrator", "sft", "eval")
ENVIRONMENTS = "environments"
_ADDRESS = re.compile(r"https?://\S+")
LEAST_FREE_BYTES = 64 * 2**20
LONG_WAIT_SECONDS = 60.0


def is_server(name: str) -> bool:
    """Whether a process of this name serves: "inference", "inference-1", …"""
    return name.partition("-")[0] == SERVER


class State(Enum):
    """What the process table says. UNKNOWN: it runs, or ran, on another host."""

    ALIVE = "alive"
    STOPPED = "stopped"
    DEAD = "dead"
    UNKNOWN = "on another host"
    ABSENT = "no report"


class Verdict(Enum):
    """The state of a run."""

    NEVER = "never started"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    MOVES = "moves"
    WAITS = "waits"  # for unusually long, and nobody shows a fault
    STUCK = "stuck"

    @property
    def fine(self) -> bool:
        return self in (Verdict.FINISHED, Verdict.MOVES, Verdict.NEVER)


@dataclass(frozen=True)
class ProcessFacts:
    """One process. `halted`: pids of processes below it that a signal has stopped. `last_error`: of its log."""

    state: State
    status: ProcessStatus | None = None
    halted: tuple[int, ...] = ()
    last_error: str | None = None
    ranks: Mapping[str, "ProcessFacts"] = field(default_factory=dict)
    restart: "RestartFacts | None" = None  # the last one


@dataclass(frozen=True)
class RestartFacts:
    """The launcher starts a process again, or has: at (unix seconds), and why."""

    at: float
    reason: str


@dataclass(frozen=True)
class WorkerFacts:
    """One environment worker."""

    name: str
    pid: int
    stopped: bool


@dataclass(frozen=True)
class Facts:
    """Times are unix seconds, timeouts seconds, sizes bytes. `processes`: those that the run has, by name.

    `recoverable`: the run has committed something. `free`: of the file system of the run directory.
    """

    now: float
    launcher: ProcessFacts
    processes: Mapping[str, ProcessFacts]
    workers: Sequence[WorkerFacts] = ()
    free: int = 1 << 40
    recoverable: bool = False
    heartbeat_timeout: float = 60.0
    stall_timeout: float = 1800.0


@dataclass(frozen=True)
class Diagnosis:
    """`sentence` says it all; `culprit` is who keeps the run from going on, if anybody does."""

    verdict: Verdict
    sentence: str
    culprit: str | None = None


def diagnose(facts: Facts) -> Diagnosis:
    """The state of the run, the probable culprit, and why."""
    spoke = [name for name, process in facts.processes.items() if process.status is not None]
    launched = facts.launcher.state in (State.ALIVE, State.STOPPED, State.UNKNOWN)
    if not spoke and not launched:
        return Diagnosis(Verdict.NEVER, "no process of a run has reported here")
    if facts.free < LEAST_FREE_BYTES and not _all_finished(facts):
        sentence = f"the disk is full ({facts.free // 2**20} MiB free): make room; what is committed is safe"
        return Diagnosis(Verdict.STUCK, sentence, "disk")
    if not launched and not any(_lives(facts.processes[name]) for name in facts.processes):
        return _over(facts)
    return _live(facts)


def _over(facts: Facts) -> Diagnosis:
    """Nobody is alive."""
    jobs = {name: process for name, process in facts.processes.items() if process.status and not is_server(name)}
    for name, process in facts.processes.items():
        if process.status is not None and (process.status.outcome or "").startswith("failed"):
            return Diagnosis(Verdict.FAILED, f"{name} {process.status.outcome}{_go_on(facts)}", name)
    if facts.launcher.state is State.DEAD:
        killed = "rl ended without a last word (killed, or the host went down), and everything with it"
        return Diagnosis(Verdict.INTERRUPTED, f"{killed}{_go_on(facts)}", "launcher")
    for name, process in jobs.items():
        assert process.status is not None
        if process.status.outcome is None:
            last = f"; the last error in its log: {process.last_error}" if process.last_error else ""
            ago = f"{facts.now - process.status.heartbeat:.0f} s ago"
            return Diagnosis(Verdict.FAILED, f"{name} ended without a last word {ago}{last}{_go_on(facts)}", name)
    if jobs and _all_finished(facts):
        return Diagnosis(Verdict.FINISHED, "the run has finished")
    return Diagnosis(Verdict.INTERRUPTED, f"the run was stopped{_go_on(facts)}")


def _go_on(facts: Facts) -> str:
    return " (`rl … --recover` goes on from what is committed)" if facts.recoverable else ""


def _live(facts: Facts) -> Diagnosis:
    """Somebody is alive."""
    chains = _chains(facts, [*(name for name in JOBS if name in facts.processes), *filter(is_server, facts.processes)])
    for chain in chains:
        if chain.fault is not None:
            return Diagnosis(Verdict.STUCK, f"{' ← '.join(chain.path)}, {chain.fault}", chain.culprit)
    if facts.launcher.state is State.STOPPED:
        return Diagnosis(
            Verdict.STUCK, "rl itself is stopped (SIGSTOP): nobody is watched until it goes on", "launcher"
        )
    longest = max(chains, key=lambda chain: chain.waited, default=None)
    if longest is not None and longest.waited > LONG_WAIT_SECONDS:
        sentence = (
            f"{' ← '.join(longest.path)}: for {longest.waited:.0f} s now, and none of them shows a fault{longest.hint}"
        )
        return Diagnosis(Verdict.WAITS, sentence, longest.culprit)
    doing = [_doing(name, facts.processes[name]) for name in facts.processes]
    return Diagnosis(Verdict.MOVES, "nothing is wrong: " + ", ".join(text for text in doing if text))


@dataclass(frozen=True)
class _Chain:
    """From a process along its waits: `trainer ← rollouts/step_3 ← orchestrator`, and what is wrong with the last one."""

    path: tuple[str, ...]
    fault: str | None = None
    waited: float = 0.0  # seconds, of the first wait
    hint: str = ""

    @property
    def culprit(self) -> str:
        return self.path[-1]


def _follow(facts: Facts, name: str, path: tuple[str, ...]) -> _Chain:
    waited_for = bool(path)
    if name in path:
        return _Chain((*path, name), "which waits for it in turn: they wait for each other")
    path = (*path, name)
    if name == ENVIRONMENTS:
        return _environments(facts, path)
    process = facts.processes.get(name, ProcessFacts(State.ABSENT))
    if (fault := _fault(facts, name, process, waited_for)) is not None:
        return _Chain(path, fault)
    wait = None if process.status is None else process.status.waiting
    if wait is None:
        return _Chain(path)
    path, waited = (*path, wait.subject), facts.now - wait.since
    chains = _chains(facts, _owners(facts, wait.owner), path) or [_Chain((*path, wait.owner))]
    for chain in chains:
        if chain.fault is not None:
            return _Chain(chain.path, chain.fault, waited)
    late = facts.now - wait.deadline
    if late > facts.heartbeat_timeout:
        return _Chain(
            (*path[:-1],), f"which still waits for {wait.subject} {late:.0f} s after its own deadline", waited
        )
    last = chains[-1]  # where several owe it, the server is named first: it is well, so look at the others
    return _Chain(last.path, None, waited, last.hint)


def _chains(facts: Facts, names: Sequence[str], path: tuple[str, ...] = ()) -> "list[_Chain]":
    """From each of them. A server that has a fault is left out while another one is well, which takes over what it had."""
    found = [(name, _follow(facts, name, path)) for name in names]
    well = any(is_server(name) and chain.fault is None for name, chain in found)
    return [chain for name, chain in found if not (well and is_server(name) and chain.fault is not None)]


def _owners(facts: Facts, owner: str) -> list[str]:
    """Names of processes in the words of a wait: `inference at http://…`, `inference and environments`, `environment rt`."""
    owner = _ADDRESS.sub("", owner)  # a host may be called anything
    servers = [*filter(is_server, facts.processes)] or [SERVER]
    named = [*(servers if SERVER in owner else []), *(name for name in JOBS if name in owner)]
    return [*named, *([ENVIRONMENTS] if "environment" in owner else [])]


def _environments(facts: Facts, path: tuple[str, ...]) -> _Chain:
    for worker in facts.workers:
        if worker.stopped:
            return _Chain(
                (*path[:-1], f"environment worker {worker.name}"), f"which is stopped (SIGSTOP, pid {worker.pid})"
            )
    return _Chain(path, hint="; environment code may be slow or stuck: see logs/envs")


def _fault(facts: Facts, name: str, process: ProcessFacts, waited_for: bool) -> str | None:
    """What is wrong with a process itself, as a clause."""
    status = process.status
    again = process.restart
    if again is not None and again.at > facts.now:
        return f"which {again.reason} and is started again in {again.at - facts.now:.0f} s"
    if status is None:
        if not waited_for:
            return None
        if again is not None:
            return f"which {again.reason}, was started again {facts.now - again.at:.0f} s ago and has not reported yet"
        return "which has not reported: somebody else runs it" if is_server(name) else "which has not reported yet"
    if status.outcome is not None:
        failed = status.outcome.startswith("failed")
        return f"which has ended: {status.outcome}" if failed or waited_for else None
    silent = facts.now - status.heartbeat
    if process.state is State.DEAD:
        last = f"; the last error in its log: {process.last_error}" if process.last_error else ""
        return f"which died without a last word {silent:.0f} s ago{last}"
    if process.state is State.STOPPED:
        return f"which has been stopped (SIGSTOP) for {silent:.0f} s"
    if process.halted:
        return f"whose process {process.halted[0]} is stopped (SIGSTOP)"
    for rank, facts_of_rank in process.ranks.items():
        if (fault := _fault_of_rank(facts, facts_of_rank)) is not None:
            return f"whose rank {rank} {fault}"
    if silent > facts.heartbeat_timeout:
        return f"which has given no sign of life for {silent:.0f} s"
    return _no_progress(facts, name, status)


def _fault_of_rank(facts: Facts, rank: ProcessFacts) -> str | None:
    if rank.status is None or rank.status.outcome is not None:
        return None
    silent = facts.now - rank.status.heartbeat
    if rank.state is State.DEAD:
        return f"died {silent:.0f} s ago"
    if rank.state is State.STOPPED:
        return f"has been stopped (SIGSTOP) for {silent:.0f} s"
    return f"has given no sign of life for {silent:.0f} s" if silent > facts.heartbeat_timeout else None


def _no_progress(facts: Facts, name: str, status: ProcessStatus) -> str | None:
    if status.waiting is not None or not status.progress:
        return None
    same_for = facts.now - status.progress
    if not is_server(name):
        return f"which has stalled for {same_for:.0f} s ({status.phase})" if same_for > facts.stall_timeout else None
    pulses = status.ready is not None and status.progress > status.ready
    if pulses and same_for > facts.heartbeat_timeout:
        return f"whose engine has not answered for {same_for:.0f} s"
    return None


def _doing(name: str, process: ProcessFacts) -> str:
    status = process.status
    if status is None:
        return ""
    if status.outcome is not None:
        return f"{name}: {status.outcome}"
    return f"{name}: {status.phase}" if status.waiting is None else f"{name} waits for {status.waiting.subject}"


def _lives(process: ProcessFacts) -> bool:
    ended = process.status is None or process.status.outcome is not None
    return not ended and process.state in (State.ALIVE, State.STOPPED, State.UNKNOWN)


def _all_finished(facts: Facts) -> bool:
    outcomes = [
        process.status.outcome for name, process in facts.processes.items() if process.status and not is_server(name)
    ]
    return bool(outcomes) and all(outcome == "finished" for outcome in outcomes)
