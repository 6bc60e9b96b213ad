"""The run directory belongs to one launcher at a time, and earlier results are never overwritten unasked."""

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from prime_rl.config import OrchestratorConfig, RLConfig, SFTConfig, TrainerConfig
from prime_rl.errors import UserError
from prime_rl.monitor.status import read_record, write_record
from prime_rl.processes import ProcessId, boot_id, is_alive, me
from prime_rl.transport.commit import list_steps
from prime_rl.transport.settings import LEDGER, running_processes, suggestions
from prime_rl.wait import wait

HEARTBEAT_SECONDS = 10.0
_MISSED_BEATS = 3
_OWNER = "launcher.json"
_BENCH = "bench"
_LOCK_SECONDS = 60.0  # long enough for another process to remove a large run

# What a run writes, by directory. `--clean` removes these and nothing else: an output_dir may hold other things, and
# somebody will say `--output-dir .` in a repository that has a configs/ of its own.
_PROCESSES = ("rl", "trainer", "sft", "orchestrator", "eval", "inference", "inference-*")
_OF_ONE_RUN = {"trainer", "sft", "orchestrator"}  # servers outlive runs
_BY_PROCESS = ("settings", "metrics", "status", "logs", "configs", "evals")
# Commits, what a new incarnation of the trainer has superseded, and small files; of each what a dead writer left.
_COMMITTED = ("step_*", ".step_*", "given_up_*", ".given_up_*", "*.json", ".*.json.tmp-*")
_NAMED = tuple(f"{name}{end}" for name in _PROCESSES for end in (".jsonl", ".log", ".*.log", ".toml"))
_WRITTEN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("rollouts", "weights", "checkpoints", "recovery", "incarnations", "leases"), _COMMITTED),
    **dict.fromkeys(("settings", "status"), ("*.json", ".*.json.tmp-*")),
    **dict.fromkeys(("metrics", "configs"), _NAMED),
    "logs": (*_NAMED, "restarts.jsonl", "envs", "wandb"),
    "evals": ("*",),
    ".": (f"{LEDGER}*",),
}

Config = TypeVar("Config", RLConfig, TrainerConfig, SFTConfig, OrchestratorConfig)


@dataclass(frozen=True)
class Claim:
    """Who holds a run directory: a process of one boot of one host, by its last heartbeat in unix seconds."""

    pid: int
    started: int
    host: str
    boot: str
    heartbeat: float

    @property
    def id(self) -> ProcessId:
        """Meaningful on `host` alone."""
        return ProcessId(self.pid, self.started)

    def is_of(self, other: "Claim") -> bool:
        """Whether the same process made both."""
        return replace(self, heartbeat=other.heartbeat) == other


class Owner:
    """Claim the run directory for this process; leaving the `with` block releases it. Call `beat()` now and then."""

    def __init__(self, output_dir: Path) -> None:
        """Raises UserError when another living launcher holds it. A dead one's claim is taken over."""
        self._made, self._output_dir, itself = not output_dir.exists(), output_dir, me()
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the output directory {output_dir}: {error.strerror}") from error
        self._claim = Claim(itself.pid, itself.started, socket.gethostname(), boot_id(), time.time())
        with _locked(output_dir):
            other = read_claim(output_dir)
            if other is not None and is_held(other):
                raise UserError(
                    f"{output_dir} is in use by another rl (pid {other.pid} on {other.host}): "
                    "stop that one, or choose another --output-dir"
                )
            write_record(output_dir / _OWNER, self._claim)

    def beat(self) -> None:
        """Refresh the claim for launchers on other hosts. Raises UserError when one of them has taken over."""
        if time.time() - self._claim.heartbeat < HEARTBEAT_SECONDS:
            return
        current = read_claim(self._output_dir)
        if current is not None and not current.is_of(self._claim):
            raise UserError(f"{self._output_dir} was taken over by pid {current.pid} on {current.host}")
        self._claim = replace(self._claim, heartbeat=time.time())
        with suppress(OSError):
            write_record(self._output_dir / _OWNER, self._claim)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        current = read_claim(self._output_dir)
        if current is not None and current.is_of(self._claim):
            (self._output_dir / _OWNER).unlink()
        if self._made and not any(self._output_dir.iterdir()):  # bad input leaves nothing behind
            self._output_dir.rmdir()


def results(output_dir: Path) -> list[str]:
    """Name an earlier run's results that took work. A run that failed before its first batch left none."""
    names = []
    for name in ("rollouts", "weights", "checkpoints", "recovery"):
        steps = {path.name for path in (output_dir / name).glob("step_*")}
        if steps - ({"step_0"} if name == "weights" else set()):  # no more than the base model's name
            names.append(name)
    metrics = [path for name in _OF_ONE_RUN for path in (output_dir / "metrics").glob(f"{name}.jsonl")]
    if any(path.stat().st_size for path in metrics):
        names.append("metrics")
    return names


def newest_step(parent: Path, steps_of: Callable[[Path], Sequence[int]] = list_steps) -> int:
    """Return the newest step in a directory of them; -1 where there is none, or none can be seen."""
    try:
        return max(steps_of(parent), default=-1)
    except UserError:  # a file system that is away for a moment
        return -1


def refuse_results(output_dir: Path) -> None:
    """Raises UserError when the directory holds an earlier run's results."""
    if names := results(output_dir):
        ways = suggestions(output_dir, saved=newest_step(output_dir / "checkpoints") >= 0)
        raise UserError(f"{output_dir} holds an earlier run ({', '.join(names)}): {ways}")


@contextmanager
def cleaned(output_dir: Path, process: str, keep_evals: bool = False) -> Iterator[None]:
    """Apply `--clean` for `process`, then hold the directory's lock during the `with` block.

    So, of several processes that are started with `--clean`, only the first removes anything.

    Raises:
        UserError: a live `rl`, the same process, or a run that has come further than its start is running here.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    elsewhere = "or choose another --output-dir"
    with _locked(output_dir):
        owner, others = read_claim(output_dir), sorted(running_processes(output_dir) & _OF_ONE_RUN)
        if owner is not None and owner.pid != os.getpid() and is_held(owner):
            raise UserError(f"`rl` (pid {owner.pid} on {owner.host}) runs in {output_dir}: stop it, {elsewhere}")
        if process in others:
            raise UserError(f"another {process} is running in {output_dir}: stop that one, {elsewhere}")
        if not others:
            clean(output_dir, process, keep_evals)
        elif names := results(output_dir):
            raise UserError(
                f"--clean would remove files of the running {' and '.join(others)} in {output_dir} ({', '.join(names)}): "
                f"stop that first, {elsewhere}"
            )
        yield


def clean(output_dir: Path, writer: str | None = None, keep_evals: bool = False) -> None:
    """Remove what a run wrote; keep the files of running processes, the open log of `writer` and, if asked, evaluations.

    Raises:
        UserError: a directory is a link: what it leads to is not ours to empty.
    """
    if linked := [name for name in _WRITTEN if (output_dir / name).is_symlink()]:
        raise UserError(f"{output_dir / linked[0]} is a link: empty it yourself, --clean stays inside {output_dir}")
    alive = running_processes(output_dir)
    for name, patterns in _WRITTEN.items():
        directory = output_dir / name
        # The status of an `eval` that was killed would be shown as waiting.
        kept = alive | ({"eval"} if keep_evals and name != "status" else set())
        for path in [path for pattern in patterns for path in directory.glob(pattern)]:
            owner = "eval" if name == "evals" else path.name.lstrip(".").partition(".")[0]
            if (name in _BY_PROCESS and owner in kept) or path.name == f"{writer}.log":
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        if name != "." and directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()


def forget_status(output_dir: Path, process: str = "*") -> None:
    """Remove the status files of a process and its ranks, or all: a restarted one begins without the earlier ones."""
    for pattern in (f"{process}.json", f"{process}.*.json", f".{process}.*"):
        for path in (output_dir / "status").glob(pattern):
            with suppress(OSError):
                path.unlink(missing_ok=True)


def read_claim(output_dir: Path) -> Claim | None:
    """Return the present holder of a run directory, dead or alive; None where there is none, or a damaged one."""
    return read_record(Claim, output_dir / _OWNER)


def is_held(claim: Claim) -> bool:
    """Whether the launcher that made the claim lives."""
    if (claim.host, claim.boot) == (socket.gethostname(), boot_id()):
        return is_alive(claim.id)
    return time.time() - claim.heartbeat < _MISSED_BEATS * HEARTBEAT_SECONDS


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Two launchers of one host must not both find the claim dead. (Across hosts the heartbeat has to do.)"""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)

    def lock() -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    try:
        wait(lock, subject=f"lock on {directory}", owner="another rl", seconds=_LOCK_SECONDS)
        yield
    finally:
        os.close(fd)


def as_benchmark(config: Config) -> Config:
    """Return the config of a benchmark: an ordinary run in `bench/` of the run directory, which replaces the one before.

    Nothing is evaluated (no trainer commits what the server could be verified against); a whole run saves nothing and
    resumes from nothing.

    Raises:
        UserError: `bench/` holds a run that is none.
    """
    directory = config.output_dir if config.output_dir.name == _BENCH else config.output_dir / _BENCH
    if set(results(directory)) - {"metrics"}:  # benchmarks write these, too
        raise UserError(f"{directory} holds a run, not a benchmark: rename it, or choose another --output-dir")
    update: dict[str, Any] = {"output_dir": directory}
    if isinstance(config, OrchestratorConfig):
        update["eval"] = None
    elif isinstance(config, RLConfig):
        sections = {"trainer": {"ckpt": None}, "orchestrator": {"ckpt": None, "eval": None}, "inference": {}}
        for name, more in sections.items():
            if (section := getattr(config, name)) is not None:
                update[name] = section.model_copy(update={"output_dir": directory, **more})
        update |= {"ckpt": None, "recover": False}
    return config.model_copy(update=update)
