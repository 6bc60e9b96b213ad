"""The next step's data, prepared by a thread while the current step is computed."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Event
from typing import Generic, TypeVar

import torch

from prime_rl.wait import WaitTimeout

T = TypeVar("T")

_LOOK_SECONDS = 0.05


class Prefetch(Generic[T]):
    """Prepares step after step, at most one ahead of what was taken. Nothing here talks to other ranks.

    Args:
        prepare: Makes a step's data, in the thread. What it raises is raised where that step is taken.
        device: Where the data goes: a thread has to be told which GPU its page-locked memory belongs to.
        seconds: How long preparing a step may take once it is asked for.
        there: Whether what a step is made of is there. While it is not, the thread looks again and again until the step is asked for.
    """

    def __init__(
        self,
        prepare: Callable[[int], T],
        device: torch.device,
        seconds: float,
        there: Callable[[int], bool] = lambda step: True,
    ) -> None:
        self._prepare, self._there, self._device, self._seconds = prepare, there, device, seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._asked = Event()
        self._closed = False
        self._next: tuple[int, Future[T | None]] | None = None

    def start(self, step: int) -> None:
        """Let the thread prepare `step`, unless it does so already."""
        if self._next is None or self._next[0] != step:
            self._asked.clear()
            self._next = step, self._thread.submit(self._work, step)

    def take(self, step: int) -> T:
        """The data of `step`, which is there. The thread goes on to the next one.

        Raises:
            WaitTimeout: preparing it takes longer than `seconds`.
        """
        self.start(step)
        assert self._next is not None
        self._asked.set()
        prepared = self._next[1]
        if wait([prepared], timeout=self._seconds).not_done:
            raise WaitTimeout(f"data of step {step}", "the thread that prepares it", self._seconds)
        data = prepared.result(timeout=0)
        assert data is not None, "taken after it was closed"
        self.start(step + 1)
        return data

    def close(self) -> None:
        """Let the thread end when it has finished the step that it is at, if any."""
        self._closed = True
        self._asked.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _work(self, step: int) -> T | None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while not self._there(step):
            if self._asked.wait(_LOOK_SECONDS):  # bounded: `take` or `close` asks
                break
        return None if self._closed else self._prepare(step)
