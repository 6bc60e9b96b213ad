"""What a process is doing right now, for people and for the launcher: `status/<process>.json`, replaced atomically.

A thread writes a heartbeat every two seconds, whatever the process is busy with: one whose heartbeat is old is dead or
halted. `progress` says whether it makes any.
"""

import functools
import json
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar, cast

from loguru import logger
from pydantic import FiniteFloat, TypeAdapter, ValidationError

from prime_rl.processes import ProcessId, me, this_host

HEARTBEAT_SECONDS = 2.0
# Without a sign: a launcher may wait for a minute before it starts a trainer again, which then imports torch.
GONE_SECONDS = 180.0
WAITS_FOR_US_SECONDS = 10.0  # a trainer that was asked to stop as well looks up within a second
_SAY_WAIT_SECONDS = 10.0  # from when the log hears of a wait
_MIN_INTERVAL_SECONDS = 0.2  # of writes that change nothing but times

_Record = TypeVar("_Record")
_adapter = functools.cache(TypeAdapter)


@dataclass(frozen=True)
class Waiting:
    """A wait has a subject, an owner and a deadline. Times are unix seconds."""

    subject: str
    owner: str
    since: FiniteFloat
    deadline: FiniteFloat

    def __str__(self) -> str:
        return f"{self.subject} from {self.owner}, for {time.time() - self.since:.0f} s"


@dataclass(frozen=True)
class ProcessStatus:
    """Times are unix seconds."""

    process: str  # `trainer`, `orchestrator`, `inference`; `trainer.1` is the trainer's rank 1
    pid: int
    phase: str  # what it does, with progress within it after `: `
    step: int | None  # that it is at (0-based)
    since: FiniteFloat  # when the phase began
    heartbeat: FiniteFloat  # when the process last reported that it is alive
    waiting: Waiting | None  # what it waits for
    outcome: str | None  # how it ended, by its own word: `finished`, `stopped`, `failed: …`
    progress: FiniteFloat = 0.0  # when it last made any: another phase, step or item, the end of a wait. 0: not known
    ready: FiniteFloat | None = None  # when it reached its steady state in this incarnation; None before
    host: str = ""
    started: int = 0  # in clock ticks since that host's boot, which tells a reused pid. 0: not known
    url: str = ""  # of its server, for other hosts

    @property
    def id(self) -> ProcessId:
        """Meaningful on `host` alone."""
        return ProcessId(self.pid, self.started)

    @property
    def doing(self) -> str:
        return self.phase if self.step is None else f"{self.phase}, step {self.step}"


def new_status(process: str) -> ProcessStatus:
    now, own, host = time.time(), me(), this_host()
    return ProcessStatus(process, own.pid, "starting", None, now, now, None, None, now, None, host, own.started)


class Status:
    """Writer side. Changes are written at once, other calls at most five times a second. Any thread may call. A process
    has one status under each name: a second object for it goes on where the first one was."""

    def __init__(self, output_dir: Path, process: str, url: str = "") -> None:
        # Resolved: by it the one before is known, however it was written.
        self._path = status_path(output_dir.resolve(), process)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        for path in self._path.parent.glob(f".{self._path.name}.tmp-*"):
            path.unlink(missing_ok=True)  # half-written when this process was killed
        self._status = replace(new_status(process), url=url)
        self._say_wait = 0.0  # when to say it next
        self._last_write = 0.0
        # Reentrant: a signal handler may call while the same thread is inside.
        self._lock = threading.RLock()  # bounded: held for the write of one small file
        self._ended = threading.Event()
        if (before := _writers.get(self._path)) is not None:
            before.close()
        _writers[self._path] = self
        self._write()
        threading.Thread(target=self._beat, name=f"heartbeat-{process}", daemon=True).start()

    def phase(self, text: str) -> None:
        """A new phase (`loading the model`) ends the wait before it. What follows `: ` is progress within the phase
        (`evaluating: 3/20`), which may change as often as it likes."""
        with self._lock:
            now, last = time.time(), self._status
            changed = phase_name(text) != phase_name(last.phase) or last.waiting is not None
            since = now if changed else last.since
            progress = now if changed or text != last.phase else last.progress
            self._update(changed, phase=text, waiting=None, since=since, progress=progress)

    def step(self, n: int) -> None:
        """Step `n` (0-based) has begun."""
        with self._lock:
            changed = n != self._status.step
            self._update(changed, step=n, progress=time.time() if changed else self._status.progress)

    def progress(self) -> None:
        """Work got on within the phase: an item done, an episode landed. Call it as often as you like."""
        with self._lock:
            self._update(False, progress=time.time())

    def ready(self) -> None:
        """The steady state is reached in this incarnation: what fails from here on is worth starting again."""
        with self._lock:
            self._update(self._status.ready is None, ready=self._status.ready or time.time())

    def waiting(self, subject: str, owner: str, deadline_seconds: float) -> None:
        """Call it once per wait or again and again during it. `deadline_seconds` counts from the first call."""
        with self._lock:
            now, current = time.time(), self._status.waiting
            changed = current is None or (current.subject, current.owner) != (subject, owner)
            if changed:
                current = Waiting(subject, owner, now, now + deadline_seconds)
                self._say_wait = now + _SAY_WAIT_SECONDS
            self._update(changed, waiting=current)

    def done(self, outcome: str) -> None:
        """Last word: `finished`, `stopped`, `failed: …`. The heartbeat ends with it."""
        with self._lock:
            self._update(True, phase="done", since=time.time(), outcome=outcome, waiting=None)
        self.close()

    def close(self) -> None:
        """End the heartbeat and leave the file as it is. Safe to call twice."""
        self._ended.set()

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):  # bounded: a daemon thread, ends with the process, or close()
            with self._lock:
                if not self._ended.is_set():
                    self._write()
                    self._say()

    def _say(self) -> None:
        """Log a long wait, and again whenever it has become twice as long; of several ranks the first one's."""
        now, wait = time.time(), self._status.waiting
        if wait is None or now < self._say_wait or "." in self._status.process:
            return
        waited = now - wait.since
        self._say_wait = now + max(waited, 60.0)
        limit = wait.deadline - wait.since
        logger.info("waiting for {} (at most {:.0f} s; in {})", wait, limit, self._path.parents[1])

    def _update(self, changed: bool, **values: Any) -> None:
        self._status = replace(self._status, **values)
        if changed or monotonic() - self._last_write >= _MIN_INTERVAL_SECONDS:
            self._write()

    def _write(self) -> None:
        self._status = replace(self._status, heartbeat=time.time())
        with suppress(OSError):  # a full disk, or one that is away for a moment: by the next beat it may be back
            write_record(self._path, self._status)
        self._last_write = monotonic()


_writers: dict[Path, Status] = {}  # of this process


def say_for(output_dir: Path, process: str, outcome: str) -> None:
    """The last word of a process that has ended, or was never started, and has said none: nobody is to wait for it."""
    now, path = time.time(), status_path(output_dir, process)
    last = read_record(ProcessStatus, path) or ProcessStatus(process, 0, "done", None, now, now, None, None)
    if last.outcome is None:
        with suppress(OSError):
            write_record(path, replace(last, phase="done", heartbeat=now, waiting=None, outcome=outcome))


def write_record(path: Path, record: Any) -> None:
    """Replace a small JSON file by a dataclass. It is not made durable: what it says is of the moment."""
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")  # hosts may share the directory
    try:
        temporary.write_text(json.dumps(asdict(record)))
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def phase_name(text: str) -> str:
    """A phase without its progress."""
    return text.partition(": ")[0]


def status_path(output_dir: Path, process: str) -> Path:
    return output_dir / "status" / f"{process}.json"


def read_status(output_dir: Path) -> dict[str, ProcessStatus]:
    """Every process's last word, by name; of processes that are gone too: compare `started` and `heartbeat`."""
    read = {path.stem: read_record(ProcessStatus, path) for path in sorted((output_dir / "status").glob("*.json"))}
    return {name: status for name, status in read.items() if status is not None}


def read_record(kind: type[_Record], path: Path) -> _Record | None:
    """Read a dataclass from another process's small JSON file; None where there is none, or a damaged or foreign one.
    Fields that it does not know are passed over, those with a default may be missing."""
    try:
        if not path.is_file():  # a pipe would keep the reader waiting
            return None
        record: _Record = _adapter(cast(Any, kind)).validate_json(path.read_bytes(), strict=True)
        return record
    except (OSError, ValidationError):  # ValidationError: of a power cut, or somebody else's
        return None


class TrainerWatch:
    """Follow the trainer's status file (of several `processes` that of the last heartbeat), to see when it has ended.
    Heartbeats, which are another host's times, are compared with each other only."""

    def __init__(self, output_dir: Path, processes: Sequence[str] = ("trainer",)) -> None:
        self._paths = [status_path(output_dir, process) for process in processes]
        self._sign: object = None
        self._sign_at = self._idle_at = monotonic()

    def ended(self, *, asked_to_stop: bool) -> bool:
        """Return whether nothing more is to come: its status says so, is old, or waits for batches no longer made.

        A missing status is no end: the launcher removes it when it restarts a trainer. A failed one may be restarted,
        too, but not where all is being stopped.
        """
        statuses = [status for path in self._paths if (status := read_record(ProcessStatus, path)) is not None]
        trainer, now = max(statuses, key=lambda status: status.heartbeat, default=None), monotonic()
        sign = trainer and (trainer.pid, trainer.heartbeat)
        if sign != self._sign:
            self._sign, self._sign_at = sign, now
        waits_for_us = trainer and trainer.waiting and trainer.waiting.owner == "orchestrator"
        if not (asked_to_stop and waits_for_us):
            self._idle_at = now
        outcome = (trainer and trainer.outcome) or ""
        done = outcome in ("finished", "stopped") or (asked_to_stop and outcome.startswith("failed"))
        return done or now - self._sign_at > GONE_SECONDS or now - self._idle_at > WAITS_FOR_US_SECONDS
