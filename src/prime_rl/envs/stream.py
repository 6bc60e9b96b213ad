"""Endless tasksets: their tasks are read in order and named by their index, so that a count of those drawn is all that a resumed run needs.

Every worker reads the whole stream for itself. It must therefore be the same each time it is read: the `random` module has a state of its own while
a task is made, and a stream whose first tasks still differ is refused.
"""

import asyncio
import hashlib
import random
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

KEPT = 10_000  # tasks: an earlier one is read again from the beginning
COMPARED = 4
SLICE_SECONDS = 0.05  # of reading ahead, before other episodes run


class TaskStream:
    """An endless taskset. `digest` identifies it by its first tasks."""

    def __init__(self, taskset: Iterable[Any]) -> None:
        """Raises ValueError when it ends, or differs when it is read again."""
        self._taskset = taskset
        self._lock = asyncio.Lock()
        readings = []
        for _ in range(2):
            self._rewind()
            readings.append([self._read().key for _ in range(COMPARED)])
        if readings[0] != readings[1]:
            raise ValueError(
                "the endless taskset gives other tasks each time it is read: seed it, so that every worker and a resumed run get the same ones"
            )
        self.first = self._kept[0]
        self.digest = hashlib.sha256("\n".join(readings[0]).encode()).hexdigest()[:8]

    async def task(self, index: int) -> Any:
        """The task at `index`; other episodes run while the stream is read up to it.

        Raises:
            Exception: the taskset's own, or a ValueError where it ends before; the next call reads from the beginning.
        """
        async with self._lock:  # bounded: by the deadline of the episode that holds it
            if index < self._next - len(self._kept):
                self._rewind()
            until = time.monotonic() + SLICE_SECONDS
            while self._next <= index:  # bounded: each turn reads a task
                try:
                    self._read()
                except Exception:
                    self._rewind()
                    raise
                if time.monotonic() > until:
                    await asyncio.sleep(0)
                    until = time.monotonic() + SLICE_SECONDS
            return self._kept[index - self._next]

    def _rewind(self) -> None:
        self._tasks: Iterator[Any] = iter(self._taskset)
        self._random = random.Random(0).getstate()
        self._kept: deque[Any] = deque(maxlen=KEPT)
        self._next = 0

    def _read(self) -> Any:
        others = random.getstate()
        random.setstate(self._random)
        try:
            task = next(self._tasks)
        except StopIteration:
            raise ValueError(f"the taskset is declared endless (INFINITE) and ended after {self._next} tasks") from None
        finally:
            self._random = random.getstate()
            random.setstate(others)
        self._kept.append(task)
        self._next += 1
        return task
