"""Tensors of versions that lie in the memory of the trainer's host: in a directory of the run under a tmpfs root, beside `weights/step_v`.

Each is a committed directory of its own there. `weights/step_v` says in its manifest where it is, on which host, and since which boot: memory does
not outlive the machine. A version whose tensors are gone counts as not there.
"""

import json
import os
import shutil
import socket
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from loguru import logger

from prime_rl.errors import UserError
from prime_rl.processes import boot_id
from prime_rl.transport.commit import (
    CommitError,
    clean_stages,
    disk_errors,
    list_steps,
    prune,
    read_manifest,
    write_atomically,
)

NOTE = "memory.json"  # beside the versions: where in memory the run has its place
_PREFIX = "prime-rl-"


@dataclass(frozen=True)
class InTmpfs:
    """Where a version's tensors lie: a committed directory with this nonce, on a host, in the time of one boot of it."""

    directory: str
    nonce: str
    host: str
    boot: str

    @property
    def gone(self) -> bool:
        """Whether the tensors are known to be lost. What lies on another host cannot be seen from here, and counts as there."""
        if self.boot == boot_id():
            return self.host == socket.gethostname() and not Path(self.directory).is_dir()
        return self.host == socket.gethostname()


def in_tmpfs(directory: Path, nonce: str) -> InTmpfs:
    """What a writer on this host says of what it has committed as `directory`."""
    return InTmpfs(str(directory), nonce, socket.gethostname(), boot_id())


def read_in_tmpfs(extra: dict[str, Any]) -> InTmpfs | None:
    """What a version's manifest says; None where its tensors lie elsewhere.

    Raises:
        TypeError: it is not what a manifest has there.
    """
    entry = extra.get("tmpfs", extra.get("memory"))  # the latter: its name until November 2026
    return None if entry is None else InTmpfs(**entry)


def tmpfs_dir(tmpfs: Path, output_dir: Path, run: str) -> Path:
    """The place of a run's versions under `tmpfs`. Neither another run in the same directory, nor a copy of this one, has the same.

    Args:
        run: What tells the run from others (`incarnations.run_id`).
    """
    return tmpfs.expanduser().resolve() / _name(output_dir, run)


def _name(output_dir: Path, run: str) -> str:
    return f"{_path_part(output_dir)}{run}"


def _path_part(output_dir: Path) -> str:
    return f"{_PREFIX}{xxhash.xxh3_64(os.fsencode(output_dir.resolve())).hexdigest()}-"


def check_place(tmpfs: Path) -> None:
    """Raises UserError where it is no directory that can be written to."""
    if not (tmpfs.is_dir() and os.access(tmpfs, os.W_OK | os.X_OK)):
        raise UserError(f"weights.tmpfs: {tmpfs} is no directory that can be written to")


def check_room(root: Path, versions: int, version_bytes: int, arithmetic: str, available: int) -> None:
    """Room for `versions` of so many bytes at `root`, which may hold some already; nothing is written.

    Args:
        arithmetic: What makes so many versions.
        available: Bytes of memory that the host has left.

    Raises:
        UserError: there is less; or `root` is no directory that can be written to.
    """
    tmpfs = root.parent
    check_place(tmpfs)
    held = sum(path.stat().st_size for path in root.glob("*/*"))
    free = held + min(shutil.disk_usage(tmpfs).free, available)
    if (needed := versions * version_bytes) > free:
        raise UserError(
            f"weights.tmpfs: {tmpfs} has room for {free / 2**30:.2f} GiB, and {needed / 2**30:.2f} may be needed: {versions} versions "
            f"({arithmetic}) of {version_bytes / 2**30:.2f} GiB"
        )


def open_tmpfs(root: Path, output_dir: Path, used: Collection[str]) -> None:
    """Make the run's directory if it is not there, and remove what a dead trainer left: versions that are half-written, or not in `used`.

    Raises:
        UserError: it cannot be made, or is another user's.
    """
    note_tmpfs(root, output_dir)
    with disk_errors(root):
        root.mkdir(mode=0o755, exist_ok=True)
    if root.is_symlink() or root.stat().st_uid != os.geteuid():
        raise UserError(f"{root} belongs to another user: choose another weights.tmpfs")
    for other in sorted(root.parent.glob(f"{_path_part(output_dir)}*")):
        if other != root:
            logger.warning(
                "{} holds weights of an earlier run in {}: remove it unless that is at work", other, output_dir
            )
    clean_stages(root)
    for step in list_steps(root):
        directory = root / f"step_{step}"
        if str(directory) not in used:
            prune(directory)


def note_tmpfs(root: Path, output_dir: Path) -> None:
    """Leave word in the run directory of where in memory it has its place: before there is a version that says so."""
    with disk_errors(output_dir):
        write_atomically(output_dir / "weights" / NOTE, json.dumps({"root": str(root)}).encode())


def remove_in_tmpfs(memory: InTmpfs | None, output_dir: Path, run: str | None) -> None:
    """Remove a version's tensors from memory. Those of a run that this one is a copy of are left alone."""
    if memory is not None and _is_own(memory, output_dir, run):
        prune(Path(memory.directory))


def remove_tmpfs(output_dir: Path, run: str | None) -> None:
    """Remove all that a run whose processes have ended holds in memory: what its versions name, and what lies beside it."""
    weights = output_dir / "weights"
    named = [tmpfs_of(weights / f"step_{step}") for step in list_steps(weights)]
    roots = {Path(memory.directory).parent for memory in named if memory is not None}
    with suppress(OSError, ValueError, KeyError, TypeError):  # none, or none of ours: a run that had no place in memory
        roots.add(Path(json.loads((weights / NOTE).read_bytes())["root"]))
    for root in roots:
        if run is not None and root.name == _name(output_dir, run):
            shutil.rmtree(root, ignore_errors=True)


def _is_own(memory: InTmpfs, output_dir: Path, run: str | None) -> bool:
    return run is not None and Path(memory.directory).parent.name == _name(output_dir, run)


def tmpfs_of(version: Path) -> InTmpfs | None:
    """Where the tensors of a version lie in memory; None where they do not, or the version is damaged or gone."""
    try:
        return read_in_tmpfs(read_manifest(version).extra)
    except (CommitError, TypeError):
        return None


def check_tmpfs(version: Path, memory: InTmpfs) -> None:
    """The directory in memory is the one that the version's manifest names.

    Raises:
        CommitError: it is not, or cannot be seen from here.
    """
    directory = Path(memory.directory)
    if not directory.is_dir():
        why = "they are gone" if memory.gone else "weights.tmpfs is for servers on that host"
        raise CommitError(f"{version}: its tensors lie in memory of {memory.host}, and {directory} is not there: {why}")
    if read_manifest(directory).nonce != memory.nonce:
        raise CommitError(f"{version}: {directory} holds the tensors of another version")
