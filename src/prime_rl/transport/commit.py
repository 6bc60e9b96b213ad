"""Atomic publication of directories.

A directory is built as a hidden sibling directory of its final place, its files are fsynced, `manifest.json` is written
last, and one rename puts it under its final name. The rename is the commit: what stands under a final name is complete,
what does not is ignored and cleaned.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import xxhash
from loguru import logger
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from prime_rl import faults
from prime_rl.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
UNSYNCED_BYTES = 64 << 20  # of a large file, in the page cache at most: any other fsync on ext4 waits for them
_STEP = re.compile(r"step_(0|[1-9][0-9]*)", re.ASCII)  # as we write it: `step_007` is not ours
_IN_THE_WAY = (errno.EEXIST, errno.ENOTDIR, errno.ENOTEMPTY, errno.EISDIR)
_FAILED = (
    errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, *_IN_THE_WAY, errno.EFBIG,
    errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.EREMOTEIO, errno.EBADMSG, errno.EUCLEAN, errno.ENOTCONN,
)  # fmt: skip
_NOT_DURABLE = "it is committed, but a power cut may undo that"


class CommitError(UserError):
    """A committed directory is missing, incomplete, or not what its manifest says."""


class FormatError(CommitError):
    """A newer version of this program committed the directory."""


class FileEntry(TypedDict):
    """Bytes of a file, and their hash in hex (of tensors: that of the tensors)."""

    size: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """The content of a committed directory; `files` by their relative paths."""

    step: int
    producer: str
    nonce: str
    files: dict[str, FileEntry]
    extra: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT


_MANIFEST = TypeAdapter(Manifest)


class Stage:
    """A directory being written for `final`. Several processes may write into `path`; one of them commits.

    As a context manager it removes what was written if an exception leaves the block. `nonce` identifies this attempt:
    every writer of a shared stage passes the same one.
    """

    def __init__(self, final: Path, nonce: str | None = None) -> None:
        self.final = final
        self.nonce = nonce or secrets.token_hex(8)
        self.path = final.parent / f".{final.name}.tmp-{self.nonce}"
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)

    def commit(
        self, *, step: int, producer: str, extra: dict[str, Any] | None = None, hashes: dict[str, str] | None = None
    ) -> None:
        """Make everything durable and rename it to its final name.

        `hashes` are those known, by relative file name; the others are computed from the files' bytes.
        Raises CommitError if something stands under `final` already, UserError if the disk fails, is full or read-only.
        """
        subject = subject_of(self.final)
        with disk_errors(self.path):
            files = self.sync_files(hashes or {})
            faults.point(f"fsync:{subject}")
            manifest = Manifest(step, producer, self.nonce, files, extra or {})
            (self.path / MANIFEST).write_bytes(json.dumps(vars(manifest)).encode())
            sync(self.path / MANIFEST)
            faults.point(f"manifest:{subject}", self.path / MANIFEST)
            for folder in {path.parent for path in self.path.rglob("*")}:
                sync(folder)
            faults.point(f"rename:{subject}")
            self._rename()
        with disk_errors(self.final, _NOT_DURABLE):
            faults.point(f"renamed:{subject}")
            sync(self.final.parent)

    def sync_files(self, hashes: dict[str, str]) -> dict[str, FileEntry]:
        """Make what was written durable; return the entry of each file. `hashes` as in `commit`."""
        written = sorted(path for path in self.path.rglob("*") if path.is_file())
        largest = max(written, key=lambda path: path.stat().st_size, default=None)
        faults.point(f"write:{subject_of(self.final)}", largest)
        files: dict[str, FileEntry] = {}
        for path in written:
            sync(path)
            name = path.relative_to(self.path).as_posix()
            files[name] = {"size": path.stat().st_size, "xxh3": hashes.get(name) or hash_file(path)}
        return files

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            remove(self.path)

    def _rename(self) -> None:
        try:
            os.rename(self.path, self.final)
        except OSError as error:
            nonce = None
            with suppress(CommitError):
                nonce = read_manifest(self.final).nonce
            # A network file system may retransmit a rename that succeeded and report the second attempt's failure.
            if nonce == self.nonce:
                return
            if error.errno not in _IN_THE_WAY:
                raise
            why = "is in the way, and was not created by this program: move it elsewhere"
            if nonce is not None:
                why = "is committed already, by another writer"
            raise CommitError(f"{self.final} {why}") from error


@contextmanager
def stage(final: Path, *, step: int, producer: str, extra: dict[str, Any] | None = None) -> Iterator[Path]:
    """Yield a directory to write files into; a clean exit commits it as `final`, an exception leaves nothing behind."""
    with Stage(final) as staged:
        with disk_errors(staged.path):
            yield staged.path
        staged.commit(step=step, producer=producer, extra=extra)


@contextmanager
def disk_errors(path: Path, outcome: str = "nothing was committed") -> Iterator[None]:
    """Raise a full, failing or read-only file system, or something in the way, as a `UserError` that names the place.

    Every other error passes unchanged: a missing file, or an error of networks or processes. The `UserError` says by
    `outcome` what is left.
    """
    try:
        yield
    except OSError as error:
        place = path if error.filename is None or isinstance(error.filename, int) else error.filename
        if error.errno in _FAILED:
            raise UserError(
                f"{place} cannot be written ({error.strerror}): {outcome}, and what was committed before is untouched"
            ) from error
        raise


def read_manifest(directory: Path) -> Manifest:
    """Read a committed directory's manifest. Raises CommitError if there is none, it cannot be read, or it is of
    another step than its directory's name says; its subclass FormatError if a newer format wrote it."""
    path = directory / MANIFEST
    try:
        data = json.loads(path.read_bytes())
        if isinstance(data, dict) and (written := data.get("format", FORMAT)) != FORMAT:
            raise FormatError(f"{path} has format {written}; this version reads format {FORMAT}")
        manifest = _MANIFEST.validate_python(data)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CommitError(f"{directory} is not a committed directory: it has no {MANIFEST}") from error
    except (ValueError, RecursionError, OSError) as error:
        why = "it is not a manifest of a committed directory" if isinstance(error, ValidationError) else error
        raise CommitError(f"{path} cannot be read: {why}") from error
    named = step_number(directory.name)
    if named is None:  # a part of a checkpoint
        named = step_number(directory.parent.name)
    if named not in (None, manifest.step):
        raise CommitError(f"{directory} was committed as step {manifest.step}: put it back under its own name")
    return manifest


def verify(directory: Path, *, unhashed: Collection[str] = (), manifest: Manifest | None = None) -> Manifest:
    """Raise CommitError, naming the file, unless every file of the manifest is there with its size and, but for those
    that `unhashed` names, its hash."""
    manifest = manifest or read_manifest(directory)
    for name, expected in manifest.files.items():
        path = directory / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CommitError(f"{directory / MANIFEST} lists {name!r}, which is outside of the directory")
        try:
            size = path.stat().st_size
            if size != expected["size"]:
                raise CommitError(f"{path} has {size} bytes, the manifest says {expected['size']}")
            if name not in unhashed and hash_file(path) != expected["xxh3"]:
                raise CommitError(f"{path} does not match the manifest's hash")
        except FileNotFoundError as error:
            raise CommitError(f"{path} is missing, though the manifest lists it") from error
        except OSError as error:
            raise CommitError(f"{path} cannot be read: {error.strerror}") from error
    return manifest


def write_atomically(path: Path, data: bytes) -> None:
    """Replace one small file durably."""
    temporary = path.parent / f".{path.name}.tmp-{secrets.token_hex(8)}"
    with disk_errors(path):
        try:
            temporary.write_bytes(data)
            sync(temporary)
            faults.point(f"rename:{subject_of(path)}", temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    with disk_errors(path, _NOT_DURABLE):
        faults.point(f"renamed:{subject_of(path)}")
        sync(path.parent)


def hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def list_steps(parent: Path) -> list[int]:
    """Return the numbers of the committed `step_N` directories under `parent`, ascending. A missing parent has none. To
    wait for a step, poll this, not its path: NFS caches failed lookups. Raises UserError if it cannot be listed."""
    try:
        with os.scandir(parent) as entries:
            return sorted(n for entry in entries if (n := step_number(entry.name)) is not None and entry.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{parent} cannot be listed ({error.strerror}): it must be a readable directory") from error


def step_dir(root: Path, step: int) -> Path:
    return root / f"step_{step}"


def step_number(name: str) -> int | None:
    """Return N of `step_N`, written as we write it; None for every other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def subject_of(path: Path) -> str:
    """Return the end of a path, for messages: `weights/step_3`, `checkpoints/step_3/trainer`."""
    return "/".join(path.parts[-3:] if path.parent.name.startswith("step_") else path.parts[-2:])


def prune(directory: Path) -> None:
    """Remove a committed directory: renamed first, so that no reader ever sees half of it under its final name."""
    faults.point(f"prune:{subject_of(directory)}")
    with disk_errors(directory, "it stays as it is"), suppress(FileNotFoundError):
        renamed = directory.rename(directory.parent / f".{directory.name}.old-{secrets.token_hex(8)}")
        faults.point(f"pruned:{subject_of(directory)}")
        remove(renamed)


def clean_stages(parent: Path, name: str = "") -> None:
    """Remove what dead writers and prunes left under `parent`, of `name` alone if it is given. Only for the producer of
    what is cleaned, while no other writer of it is alive."""
    for mark in (".tmp-", ".old-"):
        for path in parent.glob(f".{name}*{mark}*"):
            remove(path)


def remove(path: Path) -> None:
    """Remove a file, a link, or a directory. Failures are logged."""
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("{} cannot be removed: {}", path, error)


def sync(path: Path) -> None:
    """fsync a file or a directory's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
