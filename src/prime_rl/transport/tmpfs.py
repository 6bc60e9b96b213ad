"""Files of versions in the memory of the trainer's host: in a directory of the run under a tmpfs, beside `weights/step_v`.

Each is a committed directory of its own there. The manifest of `weights/step_v` names it, its host, and the boot of that
host: memory does not outlive the machine. A version whose tensors are gone counts as not there.
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
    step_dir,
    write_atomically,
)

_NOTE = "memory.json"  # in `weights/`: the run's directories under tmpfs, each noted before any version names it


@dataclass(frozen=True)
class InTmpfs:
    """The place of a version's tensors: a committed directory with this nonce, on a host, during one boot of it."""

    directory: str
    nonce: str
    host: str
    boot: str

    @property
    def gone(self) -> bool:
        """Whether the tensors are known to be lost. Those on another host cannot be seen from here: they count as there."""
        if self.host != socket.gethostname():
            return False
        return self.boot != boot_id() or not Path(self.directory).is_dir()


def in_tmpfs(directory: Path, nonce: str) -> InTmpfs:
    """Describe the files that this host has committed as `directory`."""
    return InTmpfs(str(directory), nonce, socket.gethostname(), boot_id())


def read_in_tmpfs(extra: dict[str, Any]) -> InTmpfs | None:
    """Return the place that a version's manifest names; None if its tensors lie elsewhere. TypeError if malformed."""
    entry = extra.get("tmpfs", extra.get("memory"))  # the latter: its name until November 2026
    return None if entry is None else InTmpfs(**entry)


def tmpfs_of(version: Path) -> InTmpfs | None:
    """Return the place of a version's tensors; None if it is no tmpfs, or the version is damaged or gone."""
    with suppress(CommitError, TypeError):
        return read_in_tmpfs(read_manifest(version).extra)
    return None


def check_tmpfs(version: Path, tmpfs: InTmpfs) -> None:
    """Raise CommitError unless the directory that the version's manifest names is there and holds that version."""
    directory = Path(tmpfs.directory)
    if not directory.is_dir():
        why = "they are gone" if tmpfs.gone else "weights.tmpfs is for servers on that host"
        raise CommitError(f"{version}: its tensors lie in memory of {tmpfs.host}, and {directory} is not there: {why}")
    if read_manifest(directory).nonce != tmpfs.nonce:
        raise CommitError(f"{version}: {directory} holds the tensors of another version")


def tmpfs_dir(tmpfs: Path, output_dir: Path, run: str) -> Path:
    """Return the directory of a run under `tmpfs`, which no other run has, nor a copy of this one.

    Args:
        run: `incarnations.run_id`.
    """
    return tmpfs.expanduser().resolve() / _name(output_dir, run)


def _name(output_dir: Path, run: str | None) -> str:
    return f"prime-rl-{xxhash.xxh3_64(os.fsencode(output_dir.resolve())).hexdigest()}-{run}"


def check_place(tmpfs: Path) -> None:
    """Raise UserError unless it is a directory that can be written to."""
    if not (tmpfs.is_dir() and os.access(tmpfs, os.W_OK | os.X_OK)):
        raise UserError(f"weights.tmpfs: {tmpfs} is no directory that can be written to")


def check_room(root: Path, versions: int, version_bytes: int, arithmetic: str, available: int) -> None:
    """Raise UserError unless there is room for `versions` of so many bytes at `root`, which may hold some already.

    Args:
        arithmetic: How the number of versions adds up.
        available: Bytes of memory that the host has left.
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
    """Make the run's directory, and remove what a dead trainer left: versions that are half-written, or not in `used`.

    Raises:
        UserError: it cannot be made, or is another user's.
    """
    with disk_errors(output_dir):
        roots = sorted({*_noted(output_dir), str(root)})  # `weights.tmpfs` may have changed
        write_atomically(output_dir / "weights" / _NOTE, json.dumps({"roots": roots}).encode())
    with disk_errors(root):
        root.mkdir(mode=0o755, exist_ok=True)
    if root.is_symlink() or root.stat().st_uid != os.geteuid():
        raise UserError(f"{root} belongs to another user: choose another weights.tmpfs")
    for other in root.parent.glob(f"{root.name.rpartition('-')[0]}-*"):
        if other != root:
            logger.warning(
                "{} holds weights of an earlier run in {}: remove it unless that is running", other, output_dir
            )
    clean_stages(root)
    for step in list_steps(root):
        if str(step_dir(root, step)) not in used:
            prune(step_dir(root, step))


def remove_in_tmpfs(tmpfs: InTmpfs | None, output_dir: Path, run: str | None) -> None:
    """Remove a version's tensors from memory. Those of a run that this one is a copy of are left alone."""
    if tmpfs is not None and Path(tmpfs.directory).parent.name == _name(output_dir, run):
        prune(Path(tmpfs.directory))


def remove_tmpfs(output_dir: Path, run: str | None) -> None:
    """Remove all that a run whose processes have ended holds in memory."""
    for root in map(Path, _noted(output_dir)):
        if root.name == _name(output_dir, run):
            shutil.rmtree(root, ignore_errors=True)


def _noted(output_dir: Path) -> list[str]:
    """Return the run's directories under tmpfs; none where there is no note, or a damaged one."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        note = json.loads((output_dir / "weights" / _NOTE).read_bytes())
        return [str(root) for root in note["roots"]]
    return []
