"""Metrics of a process as columns that grow with its file, and curves of them that fit a screen."""

import threading
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_rl.monitor.monitor import Tail


class MetricColumns:
    """The columns of one metrics file. Only what was added since the last call is read; half a line waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()  # bounded: held while added lines are read
        self._start_over(0)

    def _start_over(self, inode: int) -> None:
        self._inode, self._size, self._tail = inode, 0, Tail(self.path)
        self._columns: dict[str, tuple[array[int], array[float]]] = {}

    def read(self) -> None:
        """Take in added lines; all of them where the file was replaced or cut."""
        with self._lock:
            stat = self.path.stat() if self.path.exists() else None
            if stat is None or stat.st_ino != self._inode or stat.st_size < self._size:
                self._start_over(0 if stat is None else stat.st_ino)
            self._size = 0 if stat is None else stat.st_size
            rows = self._tail.read()
            for key in {key for row in rows for key in row} - {"step"}:
                steps, values = self._columns.setdefault(key, (array("q"), array("d")))
                own = [row for row in rows if key in row]
                steps.extend([int(row["step"]) for row in own])
                values.extend([row[key] for row in own])

    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._columns)

    def last_step(self) -> int:
        with self._lock:
            return max((steps[-1] for steps, _ in self._columns.values() if steps), default=-1)

    def curve(self, key: str, points: int, low: float, high: float) -> dict[str, Any]:
        """Return at most `points` points of steps `low` to `high`: `step` and `value`. Of a step that was repeated the
        later line counts. Where there are more steps than points, those of a `bucket` share one: `value` is the mean of
        their `count` values, `min` and `max` are theirs, so that no spike is lost. All keys have the same buckets."""
        with self._lock:
            spans = [(steps[0], steps[-1]) for steps, _ in self._columns.values() if steps]
            steps, values = map(np.array, self._columns.get(key, ((), ())))
        if (np.diff(steps) <= 0).any():
            steps, last = np.unique(steps[::-1], return_index=True)
            values = values[::-1][last]
        inside = slice(np.searchsorted(steps, low), np.searchsorted(steps, high, side="right"))
        steps, values = steps[inside], values[inside]
        low, high = max(low, min(spans, default=(0, 0))[0]), min(high, max((end for _, end in spans), default=0))
        if high - low < points or not len(steps):
            return {"step": steps.tolist(), "value": _short(values)}
        bucket = ((steps - low) * points // (high - low + 1)).astype(int)
        starts = np.flatnonzero(np.diff(bucket, prepend=-1))
        counts = np.diff([*starts, len(steps)])
        return {
            "step": steps[starts].tolist(),
            "bucket": bucket[starts].tolist(),
            "count": counts.tolist(),
            "value": _short(np.add.reduceat(values, starts) / counts),
            "min": _short(np.minimum.reduceat(values, starts)),
            "max": _short(np.maximum.reduceat(values, starts)),
        }


def _short(values: npt.NDArray[np.float64]) -> list[float]:
    """Return numbers with the digits that a screen can show; times (unix seconds) need more."""
    return [float(f"{value:.14g}" if value > 1e9 else f"{value:.6g}") for value in values.tolist()]
