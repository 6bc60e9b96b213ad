"""Check every few seconds that the engine answers, through its own queue, which a stuck engine does not serve.

vLLM's health route notices only engines that have ended. Here each answer is progress of the `inference` status, so
that a halted engine shows as a stall; and a dead engine ends this process with an error, where vLLM alone would stop
as if it had been asked to.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from loguru import logger

from prime_rl.monitor import Status

ASK_SECONDS = 2.0  # between two questions; the engine answers one in about a millisecond
LOOK_SECONDS = 0.25  # between two looks at what costs nothing: whether the engine has ended, whether it has answered
GRACE_SECONDS = 2.0  # for requests in flight to get their error before this process ends


async def watch_engine(client: Any, status: Status, on_stop: Callable[[], None]) -> None:
    """Ask and look until cancelled or until the engine is dead. Runs in the server's event loop, in the main thread.

    Args:
        client: vLLM's engine client.
        status: Progresses with each answer.
        on_stop: Called when a signal asks to stop.
    """
    stopping, handlers = False, []

    def watch_signals() -> None:
        """Notice a stop beside the handlers that vLLM gives its event loop, which stay in force."""
        for number in (signal.SIGTERM, signal.SIGINT):
            current = signal.getsignal(number)
            if current in handlers:
                continue

            def note_stop(signum: int, frame: FrameType | None, previous: Any = current) -> None:
                nonlocal stopping
                if not stopping:
                    on_stop()
                stopping = True
                if callable(previous):
                    previous(signum, frame)

            handlers.append(note_stop)
            signal.signal(number, note_stop)

    question, due = None, 0.0
    try:
        while stopping or not client.errored:  # bounded: ends with the server's event loop
            watch_signals()
            if question is not None and question.done():
                if question.exception() is None:
                    status.progress()
                question, due = None, time.monotonic() + ASK_SECONDS
            if question is None and time.monotonic() >= due:  # one question at a time, however long it takes
                question = asyncio.create_task(client.collective_rpc("prime_served"))
            await asyncio.sleep(LOOK_SECONDS)
        await asyncio.sleep(GRACE_SECONDS)
    finally:
        # vLLM may have noticed first, and be ending the loop. After a stop its client counts as errored, too.
        if client.errored and not stopping:
            logger.error("the engine died; its own last words are above")
            status.done("failed: the engine died")
            os._exit(1)
