"""What a process is doing right now, for people and for the launcher: `status/<process>.json`, replaced atomically.

A thread writes a sign of life every two seconds, whatever the process is busy with: one whose heartbeat is old is dead or halted. Whether it
gets anywhere is another question, which `progress` answers.
"""

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from loguru import logger

from prime_rl.monitor.record import build, read_table
from prime_rl.processes import ProcessId, me

HEARTBEAT_SECONDS = 2.0
GONE_SECONDS = (
    180.0  # without a sign: a launcher may wait for a minute before it starts a trainer again, which then imports torch
)
WAITS_FOR_US_SECONDS = 10.0  # a trainer that was asked to stop as well looks up within a second
_SAY_WAIT_SECONDS = 5.0  # from when the console hears of a wait: the first for each owner,
_SAY_LATER_WAIT_SECONDS = 30.0  # and later ones, which are common between steps
_MIN_INTERVAL_SECONDS = 0.2  # of writes that change nothing but times
_FULL_OR_AWAY = (errno.ENOSPC, errno.EDQUOT, errno.ENOENT, errno.EIO, errno.ESTALE)
_IN_THE_WAY = (errno.EISDIR, errno.ENOTDIR)  # somebody's directory under the file's name
_TOLERATED = (*_FULL_OR_AWAY, *_IN_THE_WAY)


@dataclass(frozen=True)
class Waiting:
    """A wait has a subject, an owner and a deadline. Times are unix seconds."""

    subject: str
    owner: str
    since: float
    deadline: float


@dataclass(frozen=True)
class ProcessStatus:
    """Times are unix seconds.

    Args:
        process: `trainer`, `orchestrator`, `inference`; `trainer.1` is the trainer's rank 1.
        phase: What it does, with progress within it after `: `.
        step: The step it is at (0-based).
        since: When the phase began.
        heartbeat: When the process last said that it lives.
        waiting: What it waits for.
        outcome: How it ended, by its own word: `finished`, `stopped`, `failed: …`.
        progress: When it last got on: another phase, step or item of work, or the end of a wait. 0 where it is not known.
        ready: When it reached its steady state in this incarnation; None before.
        host: Name of the host that it runs on.
        started: Its start time in clock ticks since that host's boot; tells a reused pid from the old one. 0 where it is not known.
    """

    process: str
    pid: int
    phase: str
    step: int | None
    since: float
    heartbeat: float
    waiting: Waiting | None
    outcome: str | None
    progress: float = 0.0
    ready: float | None = None
    host: str = ""
    started: int = 0

    @property
    def id(self) -> ProcessId:
        """Meaningful on `host` alone."""
        return ProcessId(self.pid, self.started)


class Status:
    """Writer side. Changes are written at once, other calls at most five times a second. Any thread may call.

    A process has one status under each name: a second object for it goes on where the first one was.

    Args:
        of: Whom the status is of, where that is not the process that writes it.
    """

    def __init__(self, output_dir: Path, process: str, of: ProcessId | None = None) -> None:
        self._path = status_path(
            output_dir.resolve(), process
        )  # by which the one before is known, however it was written
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stages(self._path)
        self._process = process
        self._phase = "starting"
        self._since = self._progress = time.time()
        self._step: int | None = None
        self._waiting: Waiting | None = None
        self._say_wait = 0.0  # when to say it next
        self._owners: set[str] = set()  # who was waited for long enough to be named
        self._outcome: str | None = None
        self._ready: float | None = None
        self._host, self._id = socket.gethostname(), of or me()
        self._last_write = 0.0
        # Reentrant: a signal handler may call while the same thread is inside.
        self._lock = threading.RLock()  # bounded: held for the write of one small file
        self._ended = threading.Event()
        self._succeed(_writers.get(self._path))
        _writers[self._path] = self
        self._write()
        threading.Thread(target=self._beat, name=f"heartbeat-{process}", daemon=True).start()

    def phase(self, text: str) -> None:
        """A new phase (`loading the model`) ends the wait before it. What follows `: ` is progress within the phase
        (`evaluating: 3/20`), which may change as often as it likes."""
        with self._lock:
            changed = phase_name(text) != phase_name(self._phase) or self._waiting is not None
            if changed:
                self._since = time.time()
            if changed or text != self._phase:
                self._progress = time.time()
            self._phase, self._waiting = text, None
            self._changed_or_heartbeat(changed)

    def step(self, n: int) -> None:
        """Step `n` (0-based) has begun."""
        with self._lock:
            changed, self._step = n != self._step, n
            if changed:
                self._progress = time.time()
            self._changed_or_heartbeat(changed)

    def progress(self) -> None:
        """Work got on within the phase: an item done, an episode landed. Call it as often as you like."""
        with self._lock:
            self._progress = time.time()
            self._changed_or_heartbeat(False)

    def ready(self) -> None:
        """The steady state is reached in this incarnation: what fails from here on is worth starting again."""
        with self._lock:
            changed = self._ready is None
            self._ready = self._ready or time.time()
            self._changed_or_heartbeat(changed)

    def waiting(self, subject: str, owner: str, deadline_seconds: float) -> None:
        """Call it once per wait or again and again during it. `deadline_seconds` counts from the first call."""
        with self._lock:
            now = time.time()
            current = self._waiting
            changed = current is None or (current.subject, current.owner) != (subject, owner)
            if changed:
                self._waiting = Waiting(subject, owner, now, now + deadline_seconds)
                self._say_wait = now + (_SAY_LATER_WAIT_SECONDS if owner in self._owners else _SAY_WAIT_SECONDS)
            self._changed_or_heartbeat(changed)

    def done(self, outcome: str) -> None:
        """Last word: `finished`, `stopped`, `failed: …`. The heartbeat ends with it."""
        with self._lock:
            self._phase, self._since, self._outcome, self._waiting = "done", time.time(), outcome, None
            self._write()
        self.close()

    def close(self) -> None:
        """End the heartbeat and leave the file as it is. Safe to call twice."""
        self._ended.set()

    def _succeed(self, before: "Status | None") -> None:
        if before is not None and before._id == self._id:
            before.close()
            self._ready = before._ready

    def _beat(self) -> None:
        while not self._ended.wait(
            HEARTBEAT_SECONDS
        ):  # bounded: a daemon thread, it ends with the process, or with close()
            with self._lock, suppress(OSError):  # whatever it is may have passed by the next beat
                if not self._ended.is_set():
                    self._write()
                    self._say()

    def _say(self) -> None:
        """Name a long wait at the console, and again whenever it has become twice as long; of several ranks the first does."""
        now, wait = time.time(), self._waiting
        if wait is None or now < self._say_wait or "." in self._process:
            return
        self._owners.add(wait.owner)
        waited = now - wait.since
        self._say_wait = now + max(waited, 60.0)
        logger.info(
            "waiting for {} from {} in {}: {:.0f} s (at most {:.0f} s)",
            wait.subject, wait.owner, self._path.parents[1], waited, wait.deadline - wait.since,
        )  # fmt: skip

    def _changed_or_heartbeat(self, changed: bool) -> None:
        if changed or time.monotonic() - self._last_write >= _MIN_INTERVAL_SECONDS:
            self._write()

    def _write(self) -> None:
        status = ProcessStatus(
            self._process,
            self._id.pid,
            self._phase,
            self._step,
            self._since,
            time.time(),
            self._waiting,
            self._outcome,
            self._progress,
            self._ready,
            self._host,
            self._id.started,
        )
        _replace(self._path, status)
        self._last_write = time.monotonic()


_writers: dict[Path, Status] = {}  # of this process


@contextmanager
def unless_full() -> Iterator[None]:
    """For files that are no results: where the disk is full, fails or is away, or the run directory gone, they are not written, and nobody
    fails by it.

    Those who write results tell of it.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _TOLERATED:
            raise


def say_for(output_dir: Path, process: str, outcome: str) -> None:
    """The last word of a process that has ended, or was never started, and has said none: nobody is to wait for it."""
    now, path = time.time(), status_path(output_dir, process)
    _remove_stages(path)
    last = read_one(path) or ProcessStatus(process, 0, "done", None, now, now, None, None)
    if last.outcome is None:
        _replace(path, replace(last, phase="done", heartbeat=now, waiting=None, outcome=outcome))


def _remove_stages(path: Path) -> None:
    """Remove what processes that were killed while they wrote their status left beside `path`."""
    with unless_full():
        for stage in path.parent.glob(f".{path.name}.tmp-*"):
            if stage.name != _stage(path).name:
                stage.unlink(missing_ok=True)


def _stage(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp-{os.getpid()}")


def _replace(path: Path, status: ProcessStatus) -> None:
    temporary = _stage(path)
    with unless_full():
        temporary.write_text(json.dumps(asdict(status)))
        temporary.replace(path)


def phase_name(text: str) -> str:
    """A phase without its progress."""
    return text.partition(": ")[0]


def status_path(output_dir: Path, process: str) -> Path:
    return output_dir / "status" / f"{process}.json"


def read_status(output_dir: Path) -> dict[str, ProcessStatus]:
    """Every process's last word, by name; of processes that are gone too: compare `started` and `heartbeat`."""
    read = {path.stem: read_one(path) for path in sorted((output_dir / "status").glob("*.json"))}
    return {name: status for name, status in read.items() if status is not None}


def read_one(path: Path) -> ProcessStatus | None:
    """One process's last word; None where there is none, or nothing that is one: empty after a power cut, damaged, foreign."""
    return build(ProcessStatus, read_table(path))


class TrainerWatch:
    """Follows the trainer's status file, to see when the trainer has ended. Times are our own clock's: heartbeats are compared with each other only.

    Args:
        process: The name of its status; `sft` has one of its own.
    """

    def __init__(
        self, output_dir: Path, monotonic: Callable[[], float] = time.monotonic, process: str = "trainer"
    ) -> None:
        self._output_dir, self._monotonic, self._process = output_dir, monotonic, process
        self._sign: object = None
        self._sign_at = self._idle_at = monotonic()

    def ended(self, *, asked_to_stop: bool) -> bool:
        """Whether nothing more is to come: its status says so, is old, or shows that it waits for batches, which we do not make any more.

        No status at all is no end: the launcher removes it when it starts a trainer again. One that failed may be started again, too, but not where
        all is being stopped.
        """
        trainer, now = read_one(status_path(self._output_dir, self._process)), self._monotonic()
        sign = None if trainer is None else (trainer.pid, trainer.heartbeat)
        if sign != self._sign:
            self._sign, self._sign_at = sign, now
        waiting = None if trainer is None else trainer.waiting
        if not (asked_to_stop and waiting is not None and waiting.owner == "orchestrator"):
            self._idle_at = now
        outcome = "" if trainer is None else trainer.outcome or ""
        done = outcome in ("finished", "stopped") or (asked_to_stop and outcome.startswith("failed"))
        return done or now - self._sign_at > GONE_SECONDS or now - self._idle_at > WAITS_FOR_US_SECONDS
