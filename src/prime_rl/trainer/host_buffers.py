"""Equal buffers on the host with rows of weights in each, which threads or a process write out, hash, or send."""

import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from prime_rl.errors import UserError
from prime_rl.trainer.row_files import (
    Held,
    Holding,
    Range,
    Row,
    WriterProcess,
    copy_rows,
    hash_ranges,
    hash_rows,
    write_held_rows,
    write_rows,
)

Arrivals = Callable[[], Iterator[int]]
"""Waits for what is copied into a buffer, and yields up to which byte it is there; in the end more than any."""


class HostBuffers:
    """What a buffer holds is read by one thread at a time.

    Args:
        size: Bytes of each.
        shared: A process of its own reads the memory, and others may (else threads do).

    Attributes:
        count: How many there are to be.
        memory: File descriptor of all of them one after the other, where they are shared and there.
    """

    def __init__(self, size: int, *, shared: bool) -> None:
        self.size, self.shared, self.count = size, shared, 1
        self.memory: int | None = None
        self.writer: WriterProcess | None = None
        self._all = memoryview(b"")
        self._views: list[memoryview] = []
        self._held = Held()

    @property
    def stride(self) -> int:
        """Bytes from one buffer to the next: whole pages, so that each can be locked by itself."""
        return -(-self.size // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def bytes(self) -> int:
        """Of all."""
        return self.count * self.stride

    def allocate(self) -> list[memoryview]:
        """The buffers, which are made once.

        Raises:
            UserError: there is no such memory.
        """
        if not self._views:
            with self._there_is_memory():
                if self.shared and self.size:
                    self.memory = os.memfd_create("weights")
                    os.ftruncate(self.memory, self.bytes)
                self._map()
        return self._views

    def adopt(self, memory: int) -> None:
        """Let the buffers lie in this memory of another process. It is closed with them.

        Raises:
            UserError: there is no room for it here.
        """
        with self._there_is_memory():
            self.memory = memory
            self._map()

    @contextmanager
    def _there_is_memory(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.close()
            raise UserError(f"no {self.bytes:,} bytes of host memory for the weights ({error.strerror})") from error

    def _map(self) -> None:
        memory = -1 if self.memory is None else self.memory
        self._all = memoryview(mmap.mmap(memory, self.bytes) if self.size else b"")
        if self.memory is not None:
            self.writer = WriterProcess(self.memory, self.bytes)
            self.writer.start()
        starts = (index * self.stride for index in range(self.count))
        self._views = [self._all[start : start + self.size] for start in starts]

    def write(
        self,
        index: int,
        directory: Path,
        files: Mapping[str, Sequence[Row]],
        arrivals: Arrivals,
        *,
        hashing: bool,
        how: Holding | None = None,
    ) -> dict[str, str]:
        """`row_files.write_rows` out of a buffer, or with `how` `write_held_rows`."""
        if self.writer is not None:
            return self.writer.write_rows(directory, files, arrivals, hashing, first=index * self.stride, how=how)
        _exhaust(arrivals)
        if how is not None:
            return write_held_rows(self._views[index], directory, files, _is_there, self._held, how)
        return write_rows(self._views[index], directory, files, _is_there, hashing)

    def copy(self, index: int, into: "HostBuffers", there: int, rows: Sequence[Row], arrivals: Arrivals) -> None:
        """`row_files.copy_rows` out of a buffer into one of others that are shared."""
        rows = [row._replace(offset=there * into.stride + row.offset) for row in rows]
        if self.writer is not None:
            path = f"/proc/{os.getpid()}/fd/{into.memory}"
            self.writer.copy_rows(path, into.bytes, rows, arrivals, first=index * self.stride)
        else:
            _exhaust(arrivals)
            copy_rows(self._views[index], into._all, rows, _is_there)

    def hash(self, index: int, rows: Sequence[Row], arrivals: Arrivals) -> dict[str, str]:
        """`row_files.hash_rows` of a buffer."""
        if self.writer is not None:
            return self.writer.hash_rows(rows, arrivals, first=index * self.stride)
        _exhaust(arrivals)
        return hash_rows(self._views[index], rows, _is_there)

    def hash_files(self, directory: Path, ranges: Sequence[Range]) -> dict[str, str]:
        """`row_files.hash_ranges`, where the rows are hashed, too."""
        return hash_ranges(directory, ranges) if self.writer is None else self.writer.hash_ranges(directory, ranges)

    def abandon(self) -> None:
        """Keep whoever still reads a buffer from going on. The buffers stay."""
        if self.writer is not None:
            self.writer.abandon()

    def close(self) -> None:
        """Give the memory back. Nothing may be copying into it any more."""
        if self.writer is not None:
            self.writer.close()
        if self.memory is not None:
            os.close(self.memory)
        self._all, self._views, self.memory, self.writer = memoryview(b""), [], None, None


def _exhaust(arrivals: Arrivals) -> None:
    for _ in arrivals():
        pass


def _is_there(end: int) -> None:
    """All has arrived."""
