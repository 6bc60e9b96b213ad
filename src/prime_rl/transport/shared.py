"""Two processes of one host that pass bytes by both mapping the memory that these lie in: nothing is sent, but for where they lie.

The receiver says when it has read, so that the sender knows what may be written over, and the sender answers whether it was what was asked for until then.
"""

import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from prime_rl.transport.line import Line, PairError

BACKEND = "shared-memory"


def describe(descriptor: int, size: int) -> dict[str, int]:
    """By what another process of this user finds this process's anonymous file (memfd) of so many bytes."""
    status = os.fstat(descriptor)
    return {
        "process": os.getpid(),
        "descriptor": descriptor,
        "device": status.st_dev,
        "inode": status.st_ino,
        "size": size,
    }


def map_memory(described: Any) -> mmap.mmap | None:
    """The memory that `describe` told of, to be read; None where it cannot be had: on another host, in another container, by another user."""
    if not isinstance(described, Mapping):
        return None
    try:
        process, descriptor, device, inode, size = (
            int(described[key]) for key in ("process", "descriptor", "device", "inode", "size")
        )
        opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except (OSError, KeyError, TypeError, ValueError, OverflowError):
        return None
    try:
        status = os.fstat(opened)  # elsewhere this number may be anybody's
        if (status.st_dev, status.st_ino) != (device, inode) or status.st_size < size:
            return None
        return mmap.mmap(opened, size, prot=mmap.PROT_READ)
    except (OSError, ValueError, OverflowError):
        return None
    finally:
        os.close(opened)


class Lender:
    """The sender's side."""

    def __init__(self, line: Line, seconds: float) -> None:
        self.line, self._seconds = line, seconds

    def lend(self, start: int, count: int) -> None:
        """Let so many bytes of the memory be read, and wait until they were. Raises PairError where the other side is gone, or silent."""
        self.line.tell(self._seconds, at=start)
        if self.line.expect("read", self._seconds) != count:
            raise PairError("the receiver has read something else")

    def flush(self) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        self.line.close()


class Borrower:
    """The receiver's side."""

    backend = BACKEND

    def __init__(self, line: Line, memory: mmap.mmap, seconds: float) -> None:
        self.line, self._seconds, self._mapped = line, seconds, memory
        self._memory = np.frombuffer(memory, np.uint8)
        self._at: int | None = None  # where the next block lies, once the sender has said it

    def receive(self, block: memoryview) -> None:
        """Fill `block` with the next bytes. Raises PairError where the sender gives the transfer up, with its reason, or is gone, or silent."""
        first = self._begin()
        if first + len(block) > self._memory.size:
            raise PairError("the sender's memory ends before what it says")
        np.frombuffer(block, np.uint8)[:] = self._memory[first : first + len(block)]
        self._at = first + len(block)

    def end(self, count: int) -> None:
        """After the last block: so many bytes were read, and were what was asked for until then. Raises PairError as `receive` does."""
        self._begin()
        self.line.tell(self._seconds, read=count)
        if self.line.expect("done", self._seconds) != count:
            raise PairError("the sender has lent something else")
        self._at = None

    def close(self) -> None:
        """Not to be used again."""
        self.line.close()
        self._memory = np.empty(0, np.uint8)
        with suppress(BufferError):  # a thread is reading: it goes with that
            self._mapped.close()

    def _begin(self) -> int:
        if self._at is None:
            at = self.line.expect("at", self._seconds)
            if not isinstance(at, int) or at < 0:
                raise PairError(f"the sender says that the bytes lie at {at!r}")
            self._at = at
        return self._at
