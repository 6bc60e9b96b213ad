"""Atomic publication of directories, and bounded waits for them.

A directory is built under a dot-name beside its final place, its files are fsynced, `manifest.json` is written last, and one rename puts it
under its final name. The rename is the commit: what stands under a final name is complete, what does not is ignored and cleaned.
"""

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import xxhash
from loguru import logger

from prime_rl import faults
from prime_rl.errors import UserError
from prime_rl.wait import wait

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_BYTES = 64 << 20  # at most; 100,000 tensors take half of it
_CHUNK = 1 << 22
_REMOVERS = 4  # threads; more would take time from those that write
_STEP = re.compile(r"step_(0|[1-9][0-9]*)", re.ASCII)  # as we write it: `step_007` is not ours
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_IN_THE_WAY = (errno.EEXIST, errno.ENOTDIR, errno.ENOTEMPTY, errno.EISDIR)
_FAILED = (
    errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.EREMOTEIO, errno.EBADMSG, errno.EUCLEAN, errno.ENOTCONN, errno.EFBIG,
)  # fmt: skip

_NOTHING = "nothing was committed"
_STAYS = "it stays as it is"
_NOT_DURABLE = "it is committed, but a power cut may undo that"


class CommitError(Exception):
    """A committed directory is missing, incomplete, or not what its manifest says."""


class FormatError(CommitError):
    """A newer version of this program committed the directory."""


@dataclass(frozen=True)
class Manifest:
    """What a committed directory holds. `files` maps a relative path to `{"size": bytes, "xxh3": hex}`."""

    step: int
    producer: str
    nonce: str
    files: dict[str, dict[str, Any]]
    extra: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT


class Stage:
    """A directory being written for `final`. Several processes may write into `path`; one of them commits.

    Args:
        final: The directory's final place. Its parent is made if needed.
        nonce: Identifies this attempt; give the same one to every writer of a shared stage.
    """

    def __init__(self, final: Path, nonce: str | None = None) -> None:
        self.final = final
        self.nonce = nonce or secrets.token_hex(8)
        self.path = final.parent / f".{final.name}.tmp-{self.nonce}"
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)

    def commit(
        self,
        *,
        step: int,
        producer: str,
        extra: dict[str, Any] | None = None,
        hashes: dict[str, str] | None = None,
    ) -> Manifest:
        """Make everything durable and rename it to its final name.

        Args:
            hashes: Hashes the caller already knows, by relative file name; the others are computed here from the file's bytes.

        Raises:
            CommitError: something stands under `final` already.
            UserError: the disk is full, fails, or may not be written to.
        """
        known = hashes or {}
        files = {}
        subject = subject_of(self.final)
        with disk_errors(self.path):
            written = sorted(p for p in self.path.rglob("*") if p.is_file())
            faults.point(f"write:{subject}", max(written, key=lambda path: path.stat().st_size, default=None))
            for path in written:
                name = path.relative_to(self.path).as_posix()
                sync(path)
                files[name] = {"size": path.stat().st_size, "xxh3": known.get(name) or hash_file(path)}
            faults.point(f"fsync:{subject}")
            manifest = Manifest(step, producer, self.nonce, files, extra or {})
            _write_durably(self.path / MANIFEST, json.dumps(vars(manifest), indent=1).encode())
            faults.point(f"manifest:{subject}", self.path / MANIFEST)
            for folder in {p.parent for p in self.path.rglob("*")} | {self.path}:
                sync(folder)
            faults.point(f"rename:{subject}")
            self._rename()
        with disk_errors(self.final, _NOT_DURABLE):
            faults.point(f"renamed:{subject}")
            sync(self.final.parent)
        return manifest

    def abort(self) -> None:
        """Drop what was written. Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _rename(self) -> None:
        try:
            os.rename(self.path, self.final)
        except OSError as error:
            # A network file system may retransmit a rename that succeeded and report the second attempt's failure.
            if _nonce_at(self.final) == self.nonce:
                return
            if error.errno not in _IN_THE_WAY:
                raise
            if _nonce_at(self.final) is not None:
                raise CommitError(f"{self.final} is committed already, by another writer") from error
            raise CommitError(f"{self.final} is in the way, and nothing of ours: move it elsewhere") from error


@contextmanager
def stage(final: Path, *, step: int, producer: str, extra: dict[str, Any] | None = None) -> Iterator[Path]:
    """Write files into the yielded directory; a clean exit commits it as `final`, an exception leaves nothing behind."""
    staged = Stage(final)
    try:
        with disk_errors(staged.path):
            yield staged.path
        staged.commit(step=step, producer=producer, extra=extra)
    except BaseException:
        staged.abort()
        raise


@contextmanager
def disk_errors(path: Path, outcome: str = _NOTHING) -> Iterator[None]:
    """Turn what `disk_error` explains into a `UserError`. Everything else, such as FileNotFoundError, stays what it is.

    Args:
        outcome: What the error leaves.
    """
    try:
        yield
    except OSError as error:
        if (explained := disk_error(error, path, outcome)) is not None:
            raise explained from error
        raise


def disk_error(error: OSError, path: Path, outcome: str = _NOTHING) -> UserError | None:
    """A full disk, a file system that fails, one that may not be written to, or something in the way, in words that name the place.

    None where it is something else: a missing file, or anything about networks and processes.
    """
    number, why = error.errno, error.strerror
    place = path if error.filename is None or isinstance(error.filename, int) else error.filename
    if number in _FULL:
        return UserError(f"disk full while writing {place}: {outcome}; free space and start again")
    if number in _FORBIDDEN:
        return UserError(f"{place} may not be written ({why}): {outcome}")
    if number in _IN_THE_WAY:
        return UserError(f"{path} cannot be written, {place} is in the way ({why}): move it")
    if number in _FAILED:
        return UserError(
            f"the file system fails at {place} ({why}): {outcome}, and what was committed before is untouched; mend it and start again"
        )
    return None


def read_manifest(directory: Path) -> Manifest:
    """Read a committed directory's manifest.

    Raises:
        CommitError: there is none, it cannot be read, or it is of another step than its directory's name says.
        FormatError: a newer format wrote it.
    """
    path = directory / MANIFEST
    try:
        data = json.loads(read_file(path, MANIFEST_BYTES))
        if (written := data.get("format", FORMAT)) != FORMAT:
            raise FormatError(f"{path} has format {written}; this version reads format {FORMAT}")
        manifest = _checked(Manifest(**data))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CommitError(f"{directory} is not a committed directory: it has no {MANIFEST}") from error
    except (TypeError, AttributeError) as error:  # whose text may quote somebody else's file
        raise CommitError(f"{path} cannot be read: it is no manifest of a committed directory") from error
    except (ValueError, RecursionError, OSError) as error:
        raise CommitError(f"{path} cannot be read: {error}") from error
    for name in (directory.name, directory.parent.name):
        if (named := step_number(name)) is not None:
            if named != manifest.step:
                raise CommitError(f"{directory} was committed as step {manifest.step}: put it back under its own name")
            break
    return manifest


def verify(directory: Path, *, hashes: bool = True, manifest: Manifest | None = None) -> Manifest:
    """Check that every file of the manifest, read already or not, is there with its size and, unless `hashes` is off, its hash.

    Raises:
        CommitError: naming the file that differs.
    """
    manifest = manifest or read_manifest(directory)
    for name, expected in manifest.files.items():
        path = directory / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CommitError(f"{directory / MANIFEST} lists {name!r}, which is outside of the directory")
        try:
            size = path.stat().st_size
            if size != expected["size"]:
                raise CommitError(f"{path} has {size} bytes, the manifest says {expected['size']}")
            if hashes and hash_file(path) != expected["xxh3"]:
                raise CommitError(f"{path} has other bytes than the manifest's hash says")
        except FileNotFoundError as error:
            raise CommitError(f"{path} is missing, though the manifest lists it") from error
        except OSError as error:
            raise CommitError(f"{path} cannot be read: {error.strerror}") from error
    return manifest


def hash_file(path: Path) -> str:
    """xxh3-128 of a file's bytes, as hex."""
    digest = xxhash.xxh3_128()
    with open_file(path) as file:
        while block := file.read(_CHUNK):
            digest.update(block)
    return digest.hexdigest()


def open_file(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading. A FIFO or a device is rejected: reading it might never end.

    Raises:
        CommitError: it is something else.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CommitError(f"{path} cannot be read: it is not a regular file")
    return open(descriptor, "rb")


def read_file(path: Path, most: int) -> bytes:
    """All of a regular file of at most `most` bytes.

    Raises:
        CommitError: it is longer, or no regular file.
        OSError: it cannot be read.
    """
    with open_file(path) as file:
        data = file.read(most + 1) if os.fstat(file.fileno()).st_size <= most else None
    if data is None or len(data) > most:
        raise CommitError(f"{path} cannot be read: it is longer than {most >> 20} MiB")
    return data


def list_steps(parent: Path) -> list[int]:
    """Numbers of the committed `step_N` directories under `parent`, ascending. A missing parent has none.

    Raises:
        UserError: `parent` cannot be listed.
    """
    with _listing(parent) as entries:
        return sorted(n for entry in entries if (n := step_number(entry.name)) is not None and entry.is_dir())


def step_number(name: str) -> int | None:
    """N of a directory's name `step_N`, written as we write it; None for every other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def wait_for(
    path: Path,
    *,
    owner: str,
    timeout: float,
    poll: float = 0.1,
    on_wait: Callable[[float], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Path | None:
    """Wait until `path` is committed under its final name.

    The parent is listed instead of asking for the name itself: a network file system may cache that a name does not exist.

    Args:
        owner: Who owes `path`; named in the error.
        timeout: Seconds.
        poll: Seconds between two looks; at least 0.05.
        on_wait: Called before each pause with the seconds waited so far.
        stop: Asked before each pause; when it returns true the wait ends with None.

    Returns:
        `path`, or None when `stop` asked to end.

    Raises:
        WaitTimeout: after `timeout` seconds.
    """
    committed = wait(
        lambda: is_listed(path),
        subject=subject_of(path), owner=owner, seconds=timeout, poll=poll, on_wait=on_wait, stop=stop,
    )  # fmt: skip
    return path if committed else None


def prune(directory: Path) -> None:
    """Remove a committed directory: renamed aside first, so that no reader ever sees half of it under its final name."""
    renamed = directory.parent / f".{directory.name}.old-{secrets.token_hex(8)}"
    faults.point(f"prune:{subject_of(directory)}")
    try:
        with disk_errors(directory, _STAYS):
            os.rename(directory, renamed)
    except FileNotFoundError:
        return
    faults.point(f"pruned:{subject_of(directory)}")
    _remove(renamed)


def give_up(directory: Path, incarnation: int) -> Path | None:
    """Rename a committed directory to `given_up_<incarnation>_<its name>`: nobody counts it any more, and it can be put back by hand.

    Returns:
        Where it lies now, under a name that was free; None where it was gone already.
    """
    name, count = f"given_up_{incarnation}_{directory.name}", 1
    renamed = directory.parent / name
    while renamed.exists():  # an earlier history had an incarnation of this number, too
        count += 1
        renamed = directory.parent / f"{name}.{count}"
    faults.point(f"set-aside:{subject_of(directory)}")
    try:
        with disk_errors(directory, _STAYS):
            os.rename(directory, renamed)
    except FileNotFoundError:
        return None
    return renamed


def clean_stages(parent: Path, name: str = "") -> None:
    """Remove what dead writers and prunes left under `parent`, of `name` alone where it is given. Only for the producer of what is cleaned, while no
    other writer of it is alive."""
    if not parent.is_dir():
        return
    for path in parent.iterdir():
        if path.name.startswith(f".{name}") and (".tmp-" in path.name or ".old-" in path.name):
            _remove(path)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace one small file durably."""
    temporary = path.parent / f".{path.name}.tmp-{secrets.token_hex(8)}"
    with disk_errors(path):
        try:
            _write_durably(temporary, data)
            faults.point(f"rename:{subject_of(path)}", temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    with disk_errors(path, _NOT_DURABLE):
        faults.point(f"renamed:{subject_of(path)}")
        sync(path.parent)


def replace_manifest(directory: Path, files: dict[str, dict[str, Any]], extra: dict[str, Any]) -> None:
    """Let a committed directory, whose files have become others, say so. Only its producer does that; what it held before must still be there."""
    manifest = read_manifest(directory)
    write_atomically(
        directory / MANIFEST, json.dumps({**vars(manifest), "files": files, "extra": extra}, indent=1).encode()
    )


def subject_of(path: Path) -> str:
    """A path as people know it: `weights/step_3`, `checkpoints/step_3/trainer`."""
    parts = path.parts[-3:] if path.parent.name.startswith("step_") else path.parts[-2:]
    return "/".join(parts)


def is_listed(path: Path) -> bool:
    """Whether `path` is there, by its parent's list: a network file system may cache that a name does not exist."""
    with _listing(path.parent) as entries:
        return any(entry.name == path.name for entry in entries)


@contextmanager
def _listing(parent: Path) -> Iterator[Iterable[os.DirEntry[str]]]:
    """The entries of `parent`; none where it does not exist."""
    try:
        entries = os.scandir(parent)
    except FileNotFoundError:
        yield ()
        return
    except OSError as error:
        raise UserError(f"{parent} cannot be listed ({error.strerror}): it must be a readable directory") from error
    with entries:
        yield entries


def _remove(path: Path) -> None:
    """Remove a directory, a file, or a link but not what it leads to. What cannot be removed is said: it takes room, but is in nobody's way."""
    try:
        if path.is_dir() and not path.is_symlink():
            _remove_files(path)
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("{} cannot be removed: {}", path, error)


def _checked(manifest: Manifest) -> Manifest:
    """Raises ValueError unless the fields have their types."""
    wrong = [
        name
        for name, kind in (("step", int), ("producer", str), ("nonce", str), ("files", dict), ("extra", dict))
        if not isinstance(getattr(manifest, name), kind)
    ]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} is not what a manifest has there")
    for name, entry in manifest.files.items():
        if not (isinstance(entry, dict) and isinstance(entry.get("size"), int) and isinstance(entry.get("xxh3"), str)):
            raise ValueError(f"the entry of {name!r} tells no size and hash")
    return manifest


def _nonce_at(directory: Path) -> str | None:
    try:
        return read_manifest(directory).nonce
    except CommitError:
        return None


def _write_durably(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Have a file, or the names in a directory, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_files(directory: Path) -> None:
    """The files of a directory of many, side by side: one thread frees the memory that holds a file at no more than about 15 GB/s. What cannot be
    removed is left."""
    files = [path for path in directory.iterdir() if not path.is_dir() or path.is_symlink()]
    if len(files) > _REMOVERS:
        with ThreadPoolExecutor(_REMOVERS, thread_name_prefix="remove") as threads:  # bounded: as rmtree would be
            list(threads.map(_unlink, files))


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
