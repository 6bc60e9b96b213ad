"""`rl doctor RUN`: what a run is doing, who waits for whom, what keeps it from going on. Reads files and /proc only."""

import re
import shutil
import time
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path

from prime_rl.config.inference import SERVER
from prime_rl.errors import say
from prime_rl.launcher import rundir
from prime_rl.launcher.supervise import RestartPolicy, log_tail, stall_reason
from prime_rl.monitor.limits import limit_of
from prime_rl.monitor.run_directory import SIDES, RunDirectory, open_run
from prime_rl.monitor.status import GONE_SECONDS, ProcessStatus
from prime_rl.monitor.terminal import minutes
from prime_rl.processes import read, this_host
from prime_rl.transport import checkpoints
from prime_rl.transport.tenants import has_joined, joins

_JOBS = ("trainer", "orchestrator", "sft", "eval")
_TENANT_METRICS = {
    "tenant/trainer_share": "{:.0%} of the trainer's time",
    "tenant/queued": "{:.1f} s queued for it at the last step",
    "tenant/engine_share": "{:.0%} of the engines' time",
    "tenant/waiting": "{:.0f} requests wait for them",
}
_MIN_FREE_BYTES = 64 * 2**20
_ERROR = re.compile(r"((\w+: )?error: |.*?\bERROR\b|[\w.]*(Error|Exception)\b.*?: )\s*(?P<message>\S.*)")


class RunState(StrEnum):
    NEVER = "never started"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    RUNS = "runs"
    STUCK = "stuck"


_FINE = (RunState.FINISHED, RunState.RUNS, RunState.NEVER)
_DEAD, _STOPPED = "dead", "STOPPED"


def examine(run: Path) -> int:
    """Print the examination of a run; return 0 when nothing is wrong with it, else 1.
    Raises UserError: there is none."""
    state, _, text = report(RunDirectory(run) if run.is_dir() else open_run(run))
    say(text)
    return 0 if state in _FINE else 1


def report(run_directory: RunDirectory) -> tuple[RunState, str, str]:
    """Return the state of a run, a sentence on it, and its examination, a line for each fact."""
    run, statuses = run_directory.directory, run_directory.statuses
    claim = statuses.pop(rundir.LAUNCHER, None)  # it is removed when the launcher ends
    launcher = "not running" if claim is None else _process_state(claim)
    known = {path.stem for path in (run / "configs").glob("*.toml")} | statuses.keys()
    names = [name for job in (*_JOBS, SERVER) for name in sorted(known) if re.split("[.-]", name)[0] == job]
    is_tenant = run.resolve().parent.name == "tenants"
    rows = [("run", str(run)), ("deployment", str(run.resolve().parents[1])) if is_tenant else ("launcher", launcher)]
    state, sentence = _diagnose(run, launcher, {name: statuses[name] for name in names if name in statuses})
    for name in names:
        texts = _describe(statuses[name], sentence) if name in statuses else ["no report"]
        rows += [(name.replace(".", " "), texts[0]), *(("", text) for text in texts[1:])]
    rows += [] if (run / "tenants").is_dir() else _progress(run_directory)
    for path in sorted((run / "tenants").glob("*/tenant.json")):
        trained = (path.parent / "weights").is_dir()  # else it was refused
        rows += _tenant(RunDirectory(path.parent)) if trained or has_joined(path.parent) else ()
    # vLLM is noisy when it is asked to stop.
    well = {name for name, status in statuses.items() if status.outcome in ("finished", "stopped")}
    for name in names if state not in _FINE else ():
        lines = log_tail(run / "logs" / f"{name}.log") if name not in well else []
        errors = [error for error in map(_ERROR.match, lines) if error is not None][-1:]
        rows += [("error", f"{name}.log: {one.string.strip()}") for one in errors if one["message"] not in sentence]
    rows.append((state.value, sentence))
    return state, sentence, "\n".join(f"{name:<15}{text}".rstrip() for name, text in rows)


def _describe(status: ProcessStatus, sentence: str) -> list[str]:
    """Describe a process in a line, and its wait in another, without the error that is in the `sentence` on the run."""
    if (outcome := status.outcome) is not None:
        outcome = outcome.partition(":")[0] if outcome in sentence else outcome
        return [f"{'ended':<11}{outcome}, {_ago(status.since)}"]
    line, wait = f"{status.doing}; pid {status.pid}; last progress {_ago(status.progress)}", status.waiting
    waits = [] if wait is None else [f"waits for {wait} (gives up in {minutes(max(0.0, wait.deadline - time.time()))})"]
    return [f"{_process_state(status):<11}{line}", *(f"{'':<11}{text}" for text in waits)]


def _tenant(run: RunDirectory) -> Iterator[tuple[str, str]]:
    """Yield what a tenant is doing, which share it has of trainer and engines, and what it waits for."""
    directory, numbers = run.directory, dict[str, float]()
    name, joined = directory.name, directory.name in joins(directory.parents[1])
    for job in _JOBS[:2] if joined else ():
        numbers |= next(reversed(run.rows(job).values()), {})
    texts = [form.format(numbers[key]) for key, form in _TENANT_METRICS.items() if key in numbers]
    yield f"tenant {name}", ", ".join([f"version {rundir.newest_step(directory / 'weights')}", *texts])
    yield "", ": ".join(report(run)[:2])
    orchestrator = run.statuses.get("orchestrator")
    if joined and (orchestrator is None or orchestrator.outcome or _process_state(orchestrator) == _DEAD):
        yield "", f"holds a slot without an orchestrator: start that again, or remove {directory / 'join.json'}"


def _fault(name: str, status: ProcessStatus) -> str | None:
    """Return what is wrong with a process, in words that follow its name."""
    if status.outcome is not None:
        return f"has ended: {status.outcome}" if status.outcome.startswith("failed") else None
    state, silent, rank = _process_state(status), time.time() - status.heartbeat, name.partition(".")[2]
    who = f"rank {rank} " if rank else ""
    if state == _DEAD:
        return f"{who}died without a last word {silent:.0f} s ago"
    if state == _STOPPED:
        return f"{who}has been stopped (SIGSTOP) for {silent:.0f} s"
    return stall_reason(name, status, RestartPolicy(), time.time(), 0.0, name.startswith(SERVER))


def _diagnose(run: Path, launcher: str, statuses: Mapping[str, ProcessStatus]) -> tuple[RunState, str]:
    """Return the state of the run, and what keeps it from going on, or what it does, in a sentence."""
    if not statuses and launcher in ("not running", _DEAD):
        return RunState.NEVER, "no process of a run has reported here"
    ranks = {name: status for name, status in statuses.items() if "." not in name}
    jobs = [status.outcome for name, status in ranks.items() if not name.startswith(SERVER)]
    if jobs and all(outcome == "finished" for outcome in jobs):
        return RunState.FINISHED, "the run has finished"
    if (free := shutil.disk_usage(run).free) < _MIN_FREE_BYTES:
        return RunState.STUCK, f"the disk is full ({free // 2**20} MiB free): make room; what is committed is safe"
    faults = [f"{name.partition('.')[0]} {fault}" for name, one in statuses.items() if (fault := _fault(name, one))]
    faults = list(dict.fromkeys(faults))  # ranks fail alike
    if launcher == _STOPPED:
        faults.append("rl itself is stopped (SIGSTOP): nobody is watched until it goes on")
    alive = [status for status in ranks.values() if status.outcome is None and _process_state(status) != _DEAD]
    if alive or launcher not in ("not running", _DEAD):
        if faults:
            return RunState.STUCK, "; ".join(faults)
        doing = [f"waits for {one.waiting}" if one.waiting else one.outcome or one.phase for one in ranks.values()]
        return RunState.RUNS, "; ".join(f"{name}: {text}" for name, text in zip(ranks, doing, strict=True))
    state, sentence = RunState.FAILED if faults else RunState.INTERRUPTED, "; ".join(faults) or "the run was stopped"
    if launcher == _DEAD and not any((status.outcome or "").startswith("failed") for status in ranks.values()):
        state = RunState.INTERRUPTED
        sentence = "rl ended without a last word (killed, or the host went down), and everything with it"
    if option := rundir.option_to_go_on(run, failed=state is RunState.FAILED):
        command = f"`{'sft' if 'sft' in statuses else 'rl'} … {option}`"
        command = "the same command" if run.resolve().parent.name == "tenants" else command
        sentence += f" ({command} {'begins again' if option == '--clean' else 'goes on from what is committed'})"
    return state, sentence


def _progress(run_directory: RunDirectory) -> Iterator[tuple[str, str]]:
    """Yield what is committed, how much room there is, where the time goes, and what limits the run."""
    run = run_directory.directory
    newest = {
        "batch": rundir.newest_step(run / "rollouts"),
        "version": rundir.newest_step(run / "weights"),
        "checkpoint": rundir.newest_step(run / "checkpoints", checkpoints.complete_steps),
        "recovery checkpoint": rundir.newest_step(run / "recovery"),
    }
    yield "committed", ", ".join(f"{what} {step if step >= 0 else '-'}" for what, step in newest.items())
    yield "disk", f"{shutil.disk_usage(run).free / 2**30:,.1f} GiB free"
    run_directory.read(*SIDES)
    if (shares := run_directory.shares()) is not None:
        yield from (("time", str(shares)), ("speed", str(limit_of(shares))))


def _process_state(status: ProcessStatus) -> str:
    if status.host != this_host():
        return "on another host" if time.time() - status.heartbeat < GONE_SECONDS else _DEAD
    info = read(status.pid)
    if info is None or info.id != status.id:
        return _DEAD
    return _STOPPED if info.stopped else "alive"


def _ago(then: float) -> str:
    return f"{minutes(max(0.0, time.time() - then))} ago" if then else "unknown"
