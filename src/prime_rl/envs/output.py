"""What workers print: carried from a pipe into a log of bounded size, by a thread, so that neither a disk nor an event loop has to bear it.

The wire is a socket of its own: nothing that is printed can get into it.
"""

import contextlib
import fcntl
import os
import select
import threading
import time
from pathlib import Path
from typing import IO

LOG_BYTES = 16 << 20  # of a log, and of the one before it
TAIL_LINES = 12
_TAIL_BYTES = 16384
_CHUNK = 1 << 20
_LOOK_SECONDS = 0.5
_F_SETPIPE_SZ = 1031  # fcntl.F_SETPIPE_SZ


class Log:
    """A file that several workers of an environment, and we, write to. When it is full it becomes `NAME.log.1`, in the place of the last one."""

    def __init__(self, path: Path, limit: int | None = None) -> None:
        self.path = path
        self._limit = limit or LOG_BYTES
        self._lock = threading.Lock()  # bounded: its holders write to a file

    @property
    def former(self) -> Path:
        """Where what came before it is."""
        return self.path.with_name(f"{self.path.name}.1")

    def write(self, data: bytes) -> None:
        """Append. What does not fit on a full disk is lost: a worker must not stop for it."""
        with self._lock, contextlib.suppress(OSError):
            while data:
                with self._open() as file:
                    room = self._limit - file.tell()
                    file.write(data[: max(room, 0)])
                data = data[max(room, 0) :]
                if data:
                    self.path.replace(self.former)

    def begin(self) -> None:
        """Be there, however little is said."""
        with contextlib.suppress(OSError):
            self._open().close()

    def note(self, text: str) -> None:
        """A line of ours."""
        self.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} INFO    prime-rl: {text}\n".encode())

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines, indented for printing below a message."""
        with self._lock:
            text = _end_of(self.path)
            if text.count(b"\n") <= lines:  # the first may have been begun in the former
                text = _end_of(self.former) + text
        return "\n".join(f"  | {line}" for line in text.decode(errors="replace").splitlines()[-lines:])

    def _open(self) -> IO[bytes]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self.path.open("ab", buffering=0)


def _end_of(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read(_TAIL_BYTES)


class Output:
    """The pipe that one worker prints into, and the thread that empties it until the last who could write to it is gone."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._reader, self.writer = os.pipe()  # `writer` is the worker's standard output and error
        with contextlib.suppress(OSError):  # a user may not have as much as they like
            fcntl.fcntl(self._reader, _F_SETPIPE_SZ, _CHUNK)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="worker's output", daemon=True)

    def begin(self) -> None:
        """Once the worker has its end, or could not be started."""
        os.close(self.writer)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether all that was printed is in the log, and nothing can follow."""
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stop listening, whoever may still print: they get SIGPIPE."""
        self._closing.set()

    def _carry(self) -> None:
        poller = select.poll()
        poller.register(self._reader, select.POLLIN)
        try:
            while not self._closing.is_set():
                if not poller.poll(1000 * _LOOK_SECONDS):
                    continue
                data = os.read(self._reader, _CHUNK)  # bounded: there is something to read
                if not data:
                    break
                self._log.write(data)
        finally:
            os.close(self._reader)
