"""Two processes of one host, of which one reads the memory that the other one's bytes lie in: nothing is sent, but for where they lie.

The receiver says when it has read, so that the sender knows what may be written over, and the sender answers whether it was what was asked for until then.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from prime_rl.transport.line import Line, PairError

BACKEND = "shared-memory"
CUDA_IPC = "cuda-ipc"  # `device_memory.py`, which needs torch
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_WORD_SECONDS = 0.5  # between two words of a receiver that goes on reading


def describe(descriptor: int, size: int) -> dict[str, int | str]:
    """By what another process of this user finds this process's anonymous file (memfd) of so many bytes."""
    status = os.fstat(descriptor)
    return {
        "boot": host_id(),
        "process": os.getpid(),
        "descriptor": descriptor,
        "device": status.st_dev,
        "inode": status.st_ino,
        "size": size,
    }


def is_elsewhere(described: Any) -> bool:
    """Whether the memory that `describe` told of is another host's for certain."""
    return not isinstance(described, Mapping) or described.get("boot") != host_id()


def open_memory(described: Any, *, writable: bool = False) -> int | None:
    """A file descriptor of the memory that `describe` told of, to be read (and written) and closed; None where it cannot be had: on another host, in
    another container, by another user, or because it is gone."""
    if is_elsewhere(described):
        return None
    try:
        process, descriptor, device, inode, size = (
            int(described[key]) for key in ("process", "descriptor", "device", "inode", "size")
        )
        opened = os.open(
            f"/proc/{process}/fd/{descriptor}", (os.O_RDWR if writable else os.O_RDONLY) | os.O_NONBLOCK | os.O_NOCTTY
        )
    except (OSError, KeyError, TypeError, ValueError, OverflowError):
        return None
    status = os.fstat(opened)  # elsewhere this number may be anybody's
    if (status.st_dev, status.st_ino) != (device, inode) or status.st_size < size:
        os.close(opened)
        return None
    return opened


def host_id() -> str:
    """Of this host since it was started: the same in each of its containers."""
    return _BOOT_ID.read_text().strip()


class Lender:
    """The sender's side."""

    def __init__(self, line: Line, seconds: float, backend: str = BACKEND) -> None:
        self.line, self.backend, self._seconds = line, backend, seconds

    def lend(self, start: int, count: int, go_on: Callable[[], None]) -> None:
        """Let so many bytes of the memory be read, and wait until they were. `go_on` may raise at every word of the receiver's.

        Raises:
            PairError: the other side is gone, or silent.
        """
        self.line.tell(self._seconds, at=start)
        read = None
        while read != count:  # each word has a deadline, and `go_on` ends what goes on for ever
            read = self.line.expect("read", self._seconds)
            if not isinstance(read, int) or not 0 <= read <= count:
                raise PairError(f"the receiver says that it has read {read!r} of {count} bytes")
            go_on()

    def flush(self) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        self.line.close()


class Lent(Protocol):
    """The sender's memory, as the receiver sees it."""

    def open(self) -> str | None:
        """To be read, and closed. Returns None, or why it cannot be had."""
        ...

    def fill(self, block: memoryview, at: int) -> None:
        """With the bytes from `at` on. Raises PairError where they cannot be read."""
        ...

    def close(self) -> None: ...


class HostMemory:
    """That which `describe` told of."""

    def __init__(self, described: Any) -> None:
        self._described = described
        self._descriptor: int | None = None

    def open(self) -> str | None:
        self._descriptor = open_memory(self._described)
        return "it cannot be opened" if self._descriptor is None else None

    def fill(self, block: memoryview, at: int) -> None:
        assert self._descriptor is not None
        filled = 0
        while filled < len(block):  # each turn reads something, or raises
            try:
                more = os.preadv(self._descriptor, [block[filled:]], at + filled)
            except OSError as error:
                raise PairError(f"the sender's memory cannot be read ({error.strerror})") from error
            if not more:
                raise PairError("the sender's memory ends before what it says")
            filled += more

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class Borrower:
    """The receiver's side. The memory is open while a part of it is read, not longer: it would outlive a sender that has died.

    Args:
        memory: The sender's.
    """

    backend = BACKEND

    def __init__(self, line: Line, memory: Lent, seconds: float) -> None:
        self.line, self._memory, self._seconds = line, memory, seconds
        self._open = False
        self._at = self._read = 0
        self._told = 0.0  # when the sender heard last how much was read

    def receive(self, block: memoryview) -> None:
        """Fill `block` with the next bytes. Raises PairError where the sender gives the transfer up, with its reason, or is gone, or silent."""
        self._memory.fill(block, self._begin())
        self._has_read(len(block))

    def end(self, count: int) -> None:
        """After the last block: so many bytes were read, and were what was asked for until then. Raises PairError as `receive` does."""
        self._begin()
        if self._read != count:
            raise PairError(f"{self._read} bytes were read, not {count}")
        self._tell()
        if self.line.expect("done", self._seconds) != count:
            raise PairError("the sender has lent something else")
        self._close_memory()

    def close(self) -> None:
        """Not to be used again."""
        self.line.close()
        self._close_memory()

    def _has_read(self, count: int) -> None:
        """So many bytes more."""
        self._read += count
        if time.monotonic() - self._told > _WORD_SECONDS:
            self._tell()

    def _tell(self) -> None:
        self.line.tell(self._seconds, read=self._read)
        self._told = time.monotonic()

    def _begin(self) -> int:
        """Open the memory, once for each part. Returns where in it the next bytes lie."""
        if not self._open:
            at = self.line.expect("at", self._seconds)
            if not isinstance(at, int) or at < 0:
                raise PairError(f"the sender says that the bytes lie at {at!r}")
            if (why := self._memory.open()) is not None:
                raise PairError(f"the sender's memory is not there any more: {why}")
            self._open, self._at, self._read, self._told = True, at, 0, time.monotonic()
        return self._at + self._read

    def _close_memory(self) -> None:
        self._open = False
        self._memory.close()
