"""The run directory belongs to one launcher at a time, and earlier results are never overwritten unasked."""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from prime_rl.config.base import BaseConfig
from prime_rl.errors import UserError, user_errors
from prime_rl.monitor.status import ProcessStatus, new_status, read_record, read_status, status_path, write_record
from prime_rl.transport.commit import list_steps
from prime_rl.transport.settings import LEDGER, other_directory, running_processes, suggestions
from prime_rl.wait import wait

HEARTBEAT_SECONDS = 10.0
LAUNCHER = "rl"  # its status is its claim on the run directory
_BENCH = "bench"
_LOCK_SECONDS = 60.0  # long enough for another process to remove a large run

# What a run writes, by directory. `--clean` removes these and nothing else: an output_dir may hold other things, and
# somebody will say `--output-dir .` in a repository that has a configs/ of its own.
_PROCESSES = ("rl", "rl-*", "trainer", "trainer-*", "sft", "orchestrator", "eval", "inference", "inference-*")
_OF_ONE_RUN = {"trainer", "sft", "orchestrator"}  # servers outlive runs
_BY_PROCESS = ("settings", "metrics", "status", "logs", "configs", "evals")
# Commits, what a new incarnation of the trainer has superseded, and small files; of each what a dead writer left.
_COMMITTED = ("step_*", ".step_*", "given_up_*", ".given_up_*", "*.json", ".*.json.tmp-*")
_NAMED = tuple(f"{name}{end}" for name in _PROCESSES for end in (".jsonl", ".log", ".*.log", ".toml"))
_WRITTEN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("rollouts", "token_stats", "weights", "checkpoints", "recovery"), _COMMITTED),
    **dict.fromkeys(("incarnations", "leases", "settings", "status"), _COMMITTED),
    **dict.fromkeys(("metrics", "configs"), _NAMED),
    **dict.fromkeys(("evals", "mlruns"), ("*",)),
    "logs": (*_NAMED, "envs", "wandb"),
    "tensorboard": ("trainer", "sft", "orchestrator", "eval"),
    ".": (f"{LEDGER}*",),
}

Config = TypeVar("Config", bound=BaseConfig)


class Owner:
    """Claim the run directory as `status/rl.json`; leaving the `with` block releases it. Call `beat()` now and then."""

    def __init__(self, output_dir: Path) -> None:
        """Raises UserError when another living launcher holds it. A dead one's claim is taken over."""
        self._made, self._output_dir = not output_dir.exists(), output_dir
        self._path, self._claim = status_path(output_dir, LAUNCHER), new_status(LAUNCHER)
        with user_errors(f"cannot write in {output_dir}", OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(output_dir), user_errors(f"cannot write in {output_dir}", OSError):
            refuse_running(output_dir, {LAUNCHER})
            if (current := read_record(ProcessStatus, self._path)) is not None and self._is_own(current):
                other = other_directory(output_dir)
                raise UserError(
                    f"this process makes a run in {output_dir} already: wait for it, or give output_dir={other}"
                )
            write_record(self._path, self._claim)

    def beat(self) -> None:
        """Refresh the claim for launchers on other hosts. Raises UserError when one of them has taken over."""
        if time.time() - self._claim.heartbeat < HEARTBEAT_SECONDS:
            return
        if (other := self._other()) is not None:
            raise UserError(f"{self._output_dir} was taken over by pid {other.pid} on {other.host}")
        self._claim = replace(self._claim, heartbeat=time.time())
        with suppress(OSError):
            write_record(self._path, self._claim)

    def _other(self) -> ProcessStatus | None:
        current = read_record(ProcessStatus, self._path)
        return None if current is None or self._is_own(current) else current

    def _is_own(self, claim: ProcessStatus) -> bool:
        return (claim.id, claim.host) == (self._claim.id, self._claim.host)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._other() is None:
            self._path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty. Bad input leaves nothing behind
            self._path.parent.rmdir()
            if self._made:
                self._output_dir.rmdir()


def refuse_running(output_dir: Path, names: Collection[str]) -> None:
    """Raise UserError when a process of one of these names is running in the directory."""
    statuses = read_status(output_dir)
    for name in sorted(running_processes(output_dir) & set(names)):
        where = f" (pid {statuses[name].pid} on {statuses[name].host})" if name in statuses else ""
        other = other_directory(output_dir)
        raise UserError(f"`{name}`{where} is running in {output_dir}: stop it, or give --output-dir {other}")


def results(output_dir: Path) -> list[str]:
    """Name an earlier run's results that took work. A run that failed before its first batch left none."""
    names = []
    for name in ("rollouts", "weights", "checkpoints", "recovery"):
        steps = {path.name for path in (output_dir / name).glob("step_*")}
        if steps - ({"step_0"} if name == "weights" else set()):  # no more than the base model's name
            names.append(name)
    if any(path.stat().st_size for name in _OF_ONE_RUN for path in output_dir.glob(f"metrics/{name}.jsonl")):
        names.append("metrics")
    return names


def option_to_go_on(output_dir: Path, failed: bool) -> str:
    """Return the option with which the same command goes on from an earlier run; `--clean` where there is nothing to go
    on from, as after a failed first evaluation; "" where it begins again by itself."""
    if not (names := results(output_dir)):
        return ""
    if "sft" in read_status(output_dir):
        return "--ckpt.resume-step -1" if "checkpoints" in names else "--clean"
    return "--clean" if failed and names == ["metrics"] else "--recover"


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
    Raises UserError: a live `rl`, the same process, or a run that has come further than its start is running here.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    with _locked(output_dir):
        refuse_running(output_dir, {LAUNCHER, process})
        others = sorted(running_processes(output_dir) & _OF_ONE_RUN)
        if not others:
            clean(output_dir, process, keep_evals)
        elif names := results(output_dir):
            raise UserError(
                f"--clean would remove files of the running {' and '.join(others)} in {output_dir} "
                f"({', '.join(names)}): stop that first, or give --output-dir {other_directory(output_dir)}"
            )
        yield


def clean(output_dir: Path, writer: str | None = None, keep_evals: bool = False) -> None:
    """Remove what a run wrote; keep files of running processes, the open log of `writer` and, if asked, evaluations.
    Raises UserError: a directory is a link: what it leads to is not ours to empty."""
    if linked := [name for name in _WRITTEN if (output_dir / name).is_symlink()]:
        raise UserError(f"{output_dir / linked[0]} is a link: empty it yourself, --clean stays inside {output_dir}")
    alive = running_processes(output_dir) | ({LAUNCHER} if writer == LAUNCHER else set())
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


def forget_status(output_dir: Path, process: str) -> None:
    """Remove the status files of a process and its ranks: a restarted one begins without the earlier ones."""
    for pattern in (f"{process}.json", f"{process}.*.json", f".{process}.*"):
        for path in (output_dir / "status").glob(pattern):
            with suppress(OSError):
                path.unlink(missing_ok=True)


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
    """Return the config of a benchmark: an ordinary run in `bench/` of the run directory, replacing the last one.

    Nothing is evaluated or saved, and it resumes from nothing. Raises UserError: `bench/` holds a run that is none.
    """
    directory = config.output_dir if config.output_dir.name == _BENCH else config.output_dir / _BENCH
    if set(results(directory)) - {"metrics"}:  # benchmarks write these, too
        raise UserError(f"{directory} holds a run, not a benchmark: rename it, or choose another --output-dir")
    update: dict[str, Any] = {"output_dir": directory, "ckpt": None, "eval": None, "recover": False}
    for name in ("trainer", "orchestrator", "inference"):
        if isinstance(section := getattr(config, name, None), BaseConfig):
            update[name] = as_benchmark(section.model_copy(update={"output_dir": directory}))
    return config.model_copy(update={name: update[name] for name in update.keys() & type(config).model_fields.keys()})
