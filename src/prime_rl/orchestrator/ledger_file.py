"""`ledger.sqlite` as a file: its tables, how it is made, opened, checked and copied, and how an episode's result is packed into it.

Nothing in it depends on a clock, so two equal runs have equal ledgers. The rollback journal (`journal_mode=DELETE`) and one writer make it safe on
network file systems, too.
"""

import os
import secrets
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import numpy as np

from prime_rl.envs.protocol import EpisodeResult, Outcome, Part, pack_sample, unpack_sample
from prime_rl.errors import UserError
from prime_rl.transport.commit import disk_errors
from prime_rl.transport.rollouts import as_array

FORMAT = 1
_BUSY_SECONDS = 10.0
_COPY_ATTEMPTS = 50
_COPY_PAUSE_SECONDS = 0.1
_DAMAGED_ATTEMPTS = 3

# 16 KiB pages: tokens of an episode lie in few overflow pages. The partial index holds only what is not trained yet.
_SCHEMA = f"""
PRAGMA page_size = 16384;
BEGIN;
CREATE TABLE meta (key TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;
CREATE TABLE issued (env TEXT PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE carried (
    env TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL, count INTEGER NOT NULL, PRIMARY KEY (env, state, reason)
) WITHOUT ROWID;
CREATE TABLE groups (
    number INTEGER PRIMARY KEY, env TEXT NOT NULL, task_index INTEGER NOT NULL, task_id TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('open', 'batched', 'discarded')), step INTEGER
);
CREATE TABLE episodes (
    group_number INTEGER NOT NULL, number INTEGER NOT NULL, attempt INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('issued', 'finished', 'batched', 'trained', 'dropped')),
    reason TEXT, detail TEXT NOT NULL, retried INTEGER NOT NULL, step INTEGER,
    version INTEGER, life INTEGER, first INTEGER, last INTEGER,
    reward REAL, tokens INTEGER, output_tokens INTEGER, is_truncated INTEGER,
    id TEXT GENERATED ALWAYS AS (group_number || '.' || number || '.' || attempt) VIRTUAL,
    PRIMARY KEY (group_number, number, attempt)
) WITHOUT ROWID;
CREATE INDEX episodes_batched ON episodes (step) WHERE state = 'batched';
CREATE TABLE results (id TEXT PRIMARY KEY, data BLOB NOT NULL);
INSERT INTO meta VALUES ('format', {FORMAT}), ('groups_opened', 0), ('version', 0);
COMMIT;
"""


# -- opening -------------------------------------------------------------------------------------------------------------------


def in_memory() -> sqlite3.Connection:
    """An empty ledger without a file, for a benchmark."""
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    db.executescript(_SCHEMA)
    return db


def create(path: Path) -> None:
    """Make an empty ledger under another name and rename it: what stands under its own name is whole.

    Raises:
        UserError: the place cannot be written to, or a journal without its ledger lies there.
    """
    if (journal := journal_of(path)).exists():
        raise UserError(f"{journal} stands there without its ledger: put {path.name} back beside it, or move it away")
    with file_errors(path), disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f".{path.name}.tmp-*"):
            left.unlink()
        staged = path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}")
        db = sqlite3.connect(staged, isolation_level=None)
        try:
            db.executescript(_SCHEMA)
        finally:
            db.close()
        os.replace(staged, path)
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def connect(path: Path, shown: Path | None = None) -> sqlite3.Connection:
    """Open an existing ledger; a transaction that a crash cut short is rolled back.

    Args:
        shown: The name that messages give it, for a copy.

    Raises:
        UserError: it is damaged, truncated, locked or of another format. Nothing is written then.
    """
    with file_errors(shown or path):
        db = sqlite3.connect(f"file:{_quoted(path)}?mode=rw", uri=True, isolation_level=None, timeout=_BUSY_SECONDS, check_same_thread=False)  # fmt: skip
        try:
            _check(db, path, shown or path)
            db.execute("PRAGMA journal_mode = DELETE")
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA secure_delete = OFF")  # freed tokens need not be overwritten
            db.execute("PRAGMA cache_size = -131072")  # KiB: a step's changes stay in memory until the commit …
            db.execute("PRAGMA cache_spill = OFF")  # … so that until then only the journal is written
        except BaseException:
            db.close()
            raise
    return db


def _check(db: sqlite3.Connection, path: Path, shown: Path) -> None:
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "meta" not in tables:
        raise UserError(damaged(shown, "it is no ledger"))
    row = db.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    if row is None or row[0] != FORMAT:
        format_ = row[0] if row else "unknown"
        raise UserError(
            f"{shown} has format {format_}; this version reads format {FORMAT}: go on with the version that wrote it"
        )
    pages, size = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    if (length := path.stat().st_size) < pages * size:
        raise UserError(damaged(shown, f"it is truncated: {length} bytes of {pages * size}"))
    if (problem := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise UserError(damaged(shown, problem.splitlines()[-1]))


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turn what sqlite says about the file, the disk and its locks into a `UserError`; everything else passes."""
    try:
        yield
    except sqlite3.Error as error:
        code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
        what = {
            sqlite3.SQLITE_FULL: f"disk full while writing {path}: nothing was committed; free space and start again",
            sqlite3.SQLITE_BUSY: f"{path} is locked by another program for more than {_BUSY_SECONDS:.0f} s: end it (readers copy the file first)",
            sqlite3.SQLITE_IOERR: f"cannot read or write {path} ({error}): check the disk, then start again",
            sqlite3.SQLITE_READONLY: f"cannot write {path} ({error}): check its permissions",
            sqlite3.SQLITE_PERM: f"cannot write {path} ({error}): check its permissions",
            sqlite3.SQLITE_CANTOPEN: f"cannot open {path} or its journal ({error}): check the permissions of both and of their directory",
            sqlite3.SQLITE_CORRUPT: damaged(path, str(error)),
            sqlite3.SQLITE_NOTADB: damaged(path, str(error)),
        }.get(code)
        if what is None:
            raise
        raise UserError(what) from error


def journal_of(path: Path) -> Path:
    """Where sqlite keeps the old pages during a transaction."""
    return path.with_name(f"{path.name}-journal")


# -- results ---------------------------------------------------------------------------------------------------------------------


def pack_result(result: EpisodeResult) -> bytes:
    """A result as msgpack, its tokens as on the wire, but for eight of the mask a byte."""
    data = dict(vars(result))
    data["outcome"] = result.outcome.value
    data["parts"] = [vars(part) for part in result.parts]
    data["samples"] = [
        {**pack_sample(sample), "loss_mask": np.packbits(as_array(sample.loss_mask, np.bool_)).tobytes()}
        for sample in result.samples
    ]
    return msgpack.packb(data)


def unpack_result(data: bytes) -> EpisodeResult:
    """The inverse of `pack_result`."""
    values = msgpack.unpackb(data)
    values["outcome"] = Outcome(values["outcome"])
    values["parts"] = [Part(**part) for part in values.get("parts", [])]
    for sample in values["samples"]:
        tokens = len(sample["input_ids"]) // 4
        sample["loss_mask"] = np.unpackbits(np.frombuffer(sample["loss_mask"], dtype=np.uint8), count=tokens).tobytes()
    values["samples"] = [unpack_sample(sample) for sample in values["samples"]]
    return EpisodeResult(**values)


# -- reading beside the writer -------------------------------------------------------------------------------------------------


@contextmanager
def open_copy(path: Path) -> Iterator[sqlite3.Connection]:
    """A private copy of a ledger that may be in use; its writer is never locked out.

    Raises:
        UserError: there is no ledger, it does not hold still, or it is damaged.
    """
    with tempfile.TemporaryDirectory(prefix="ledger-") as directory:
        target = Path(directory) / path.name
        for left in reversed(range(_DAMAGED_ATTEMPTS)):
            _copy(path, target)
            try:
                db = connect(target, shown=path)
                break
            except UserError:  # copied amid a write after all? Then the next copy is whole
                if not left:
                    raise
                time.sleep(_COPY_PAUSE_SECONDS)
        try:
            yield db
        finally:
            db.close()


def _copy(path: Path, target: Path) -> None:
    """Copy a ledger with its journal; again while it changes underneath."""
    for _ in range(_COPY_ATTEMPTS):
        before = _stamp(path)
        if before[0] is None:
            raise UserError(f"{path} does not exist: the run has no ledger")
        try:
            journal_of(target).unlink(missing_ok=True)
            shutil.copyfile(path, target)
            if before[1] is not None:
                shutil.copyfile(journal_of(path), journal_of(target))
        except FileNotFoundError:  # the transaction ended
            continue
        if _stamp(path) == before:
            return
        time.sleep(_COPY_PAUSE_SECONDS)
    raise UserError(f"{path} changed all the time for {_COPY_ATTEMPTS * _COPY_PAUSE_SECONDS:.0f} s: try again")


def _stamp(path: Path) -> tuple[tuple[int, int, bytes] | None, tuple[int, int, bytes] | None]:
    """What tells whether the ledger or its journal was written; times alone are too coarse, so sqlite's change counter goes with them."""
    return _stamp_of(path), _stamp_of(journal_of(path))


def _stamp_of(path: Path) -> tuple[int, int, bytes] | None:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            return status.st_mtime_ns, status.st_size, file.read(32)
    except FileNotFoundError:
        return None
    except IsADirectoryError as error:
        raise UserError(f"{path} is a directory, no ledger: move it out of the way") from error


def damaged(path: Path, what: str) -> str:
    return (
        f"{path} is damaged ({what}). Put back a good copy; or move {path.name}* out of the way and start again: it is then rebuilt from the "
        "committed batches, without what was in flight or waited for a batch"
    )


def _quoted(path: Path) -> str:
    """A path inside an sqlite URI."""
    return str(path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
