"""The threads that an environment's blocking code runs in (`asyncio.to_thread`), and their end when the episode has long ended.

A deadline cancels an episode, not a thread that works for it: such threads would keep the interpreter busy, and in the end fill the executor, on
which verifiers itself depends. Standard library only.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from prime_rl.envs.attribution import Blocked, current_request

MOST = 64  # Python's own number is six on a machine of two cores: too few to lose some
LATE_SECONDS = 10.0  # that a thread may work on after its episode


@dataclass
class _Job:
    """What a thread does, and since when (`time.monotonic()`) it is known that nobody waits for it."""

    request: int
    over_since: float | None = None


class Threads(ThreadPoolExecutor):
    """A loop's default executor, which knows for which episode each thread works."""

    def __init__(self) -> None:
        super().__init__(MOST, thread_name_prefix="environment")
        self._jobs: dict[int, _Job] = {}  # by the threads' numbers

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """See `Executor.submit`."""
        return super().submit(self._work, current_request(), fn, *args, **kwargs)

    def interrupt(self, over: Callable[[int], bool]) -> None:
        """From another thread, now and then: end Python code that works for an episode which is long `over`. What does not come back from an
        extension hears it when it does."""
        now = time.monotonic()
        for thread, job in list(self._jobs.items()):
            if not job.request or not over(job.request):
                continue
            job.over_since = job.over_since or now
            if now - job.over_since > LATE_SECONDS and self._jobs.get(thread) is job:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Blocked))

    def _work(self, request: int, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        self._jobs[thread] = _Job(request)
        try:
            return fn(*args, **kwargs)
        except Blocked as error:
            raise TimeoutError("its episode had ended") from error
        finally:
            self._jobs.pop(thread, None)
