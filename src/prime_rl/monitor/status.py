"""What a process is doing right now, for people and for the launcher: `status/<process>.json`, replaced atomically."""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

_MIN_INTERVAL_SECONDS = 0.2  # of writes that change nothing but the heartbeat


@dataclass(frozen=True)
class Waiting:
    """A wait has a subject, an owner and a deadline. Times are unix seconds."""

    subject: str
    owner: str
    since: float
    deadline: float


@dataclass(frozen=True)
class ProcessStatus:
    """Times are unix seconds; `since` is when the phase began, `heartbeat` when the process last wrote."""

    process: str
    pid: int
    phase: str
    step: int | None
    since: float
    heartbeat: float
    waiting: Waiting | None
    outcome: str | None


class Status:
    """Writer side. Changes are written at once, mere heartbeats at most five times a second. One thread."""

    def __init__(self, output_dir: Path, process: str) -> None:
        self._path = status_path(output_dir, process)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._process = process
        self._phase = "starting"
        self._since = time.time()
        self._step: int | None = None
        self._waiting: Waiting | None = None
        self._outcome: str | None = None
        self._last_write = 0.0
        self._write()

    def phase(self, text: str) -> None:
        """A new phase (`loading the model`) ends the wait before it. What follows `: ` is progress within the phase
        (`evaluating: 3/20`), which may change as often as it likes."""
        changed = phase_name(text) != phase_name(self._phase) or self._waiting is not None
        if changed:
            self._since = time.time()
        self._phase, self._waiting = text, None
        self._changed_or_heartbeat(changed)

    def step(self, n: int) -> None:
        """Step `n` (0-based) has begun."""
        changed, self._step = n != self._step, n
        self._changed_or_heartbeat(changed)

    def waiting(self, subject: str, owner: str, deadline_seconds: float) -> None:
        """Call it once per wait or again and again during it. `deadline_seconds` counts from the first call."""
        now = time.time()
        current = self._waiting
        changed = current is None or (current.subject, current.owner) != (subject, owner)
        if changed:
            self._waiting = Waiting(subject, owner, now, now + deadline_seconds)
        self._changed_or_heartbeat(changed)

    def done(self, outcome: str) -> None:
        """Last word: `finished`, `stopped`, `failed: …`."""
        self._phase, self._since, self._outcome, self._waiting = "done", time.time(), outcome, None
        self._write()

    def _changed_or_heartbeat(self, changed: bool) -> None:
        if changed or time.monotonic() - self._last_write >= _MIN_INTERVAL_SECONDS:
            self._write()

    def _write(self) -> None:
        status = ProcessStatus(
            self._process,
            os.getpid(),
            self._phase,
            self._step,
            self._since,
            time.time(),
            self._waiting,
            self._outcome,
        )
        temporary = self._path.with_name(f".{self._path.name}.tmp-{os.getpid()}")
        temporary.write_text(json.dumps(asdict(status)))
        temporary.replace(self._path)
        self._last_write = time.monotonic()


def phase_name(text: str) -> str:
    """A phase without its progress."""
    return text.partition(": ")[0]


def status_path(output_dir: Path, process: str) -> Path:
    return output_dir / "status" / f"{process}.json"


def read_status(output_dir: Path) -> dict[str, ProcessStatus]:
    """Every process's last word, by name; of processes that are gone too: compare `pid` and `heartbeat`."""
    found = {}
    for path in sorted((output_dir / "status").glob("*.json")):
        fields = json.loads(path.read_text())
        waiting = fields.pop("waiting")
        found[path.stem] = ProcessStatus(**fields, waiting=None if waiting is None else Waiting(**waiting))
    return found
