"""How many workers an environment gets, and when one is replaced: pure decisions, which `worker_pool` carries out, and what they are made on."""

import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_WORKERS, _CORES_A_WORKER = 4, 4  # at least: so many where there are so many cores for each
HIGH, LOW, TARGET = 0.7, 0.35, 0.5  # cores that the mean worker uses: above, more are started; below, some end; aim

_PROC, _QUOTA = Path("/proc"), Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class Load:
    """An environment's workers at one moment, without those that are to end and the successors that replace one."""

    workers: int  # ready or starting
    starting: int
    use: float  # cores: the sum over the ready ones of the part of the last seconds in which each one's event loop or threads were busy
    episodes: int  # in flight, and waiting for a slot


@dataclass(frozen=True)
class Bounds:
    """What an environment may have."""

    slots: int  # episodes that one worker runs at a time
    least: int
    most: int


def workers_wanted(load: Load, bounds: Bounds, free: int) -> int:
    """How many workers the load calls for.

    Enough slots for all episodes; and where the workers are busy, more of them, so that each is about half busy. A worker that is
    always busy says only that one is too few: one round of growth at most doubles their number, and waits for those that are starting.

    Args:
        free: Workers that there is room for on idle cores. Slots are given without: waiting for an engine takes no core.
    """
    ready = load.workers - load.starting
    wanted = load.workers
    if load.starting:
        pass
    elif load.use > HIGH * ready:
        wanted = ready + min(math.ceil(load.use / TARGET) - ready, free)
    elif load.use < LOW * (ready - 1):
        wanted = math.ceil(load.use / TARGET)
    return min(max(wanted, -(-load.episodes // bounds.slots), bounds.least), bounds.most)


def worker_range(workers: int | Literal["auto"], max_workers: int | None, environments: int = 1) -> tuple[int, int]:
    """The least and the most workers that an environment has, by its settings.

    Episodes of a batch start together and often end together: one worker would take them one after the other, though it is idle between. A host with
    cores to spare soon has several.
    """
    if workers != "auto":
        return workers, workers
    most = max_workers or cores()
    return min(most, max(1, min(_WORKERS, cores() // _CORES_A_WORKER) // environments)), most


def why_replace(finished: int, resident: int, episodes: int | None, mib: int | None) -> str | None:
    """Why a worker is to be replaced, None while it is not.

    Args:
        finished: Episodes that it has finished.
        resident: Bytes of memory of the worker and what it has started.
        episodes, mib: The limits, where there are any.
    """
    if episodes is not None and finished >= episodes:
        return f"has finished {finished} episodes (recycle_episodes {episodes})"
    if mib is not None and resident > mib << 20:
        return f"holds {resident >> 20} MiB (recycle_mib {mib})"
    return None


def cores() -> int:
    """Processor cores that this process and its children may use."""
    available = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no such control group, or no limit ("max")
        quota, period = _QUOTA.read_text().split()
        available = min(available, max(1, int(quota) // int(period)))
    return available


class IdleCores:
    """How many of our cores were idle lately, whoever used the others. Measures from call to call, and averages over the last few."""

    def __init__(self) -> None:
        self._names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        self._before = self._counters()
        self._idle = 0.0

    def measure(self) -> float:
        before, self._before = self._before, self._counters()
        idle, total = (now - then for now, then in zip(self._before, before, strict=True))
        # A sandbox's kernel may count nothing: then nothing speaks against its cores but that workers do not get busier.
        now = len(self._names) * idle / total if total else float(len(self._names))
        self._idle = (self._idle + min(now, cores())) / 2
        return self._idle

    def _counters(self) -> tuple[int, int]:
        """Idle time, and time, of all our cores together."""
        idle = total = 0
        for line in (_PROC / "stat").read_text().splitlines():
            name, *counts = line.split()
            if name in self._names:
                times = [int(count) for count in counts[:8]]  # the others are part of these
                idle, total = idle + times[3] + times[4], total + sum(times)
        return idle, total
