"""Check every few seconds that the engine answers, through its own queue, which a halted or stuck engine does not serve.

vLLM's health route notices only engines that have ended. Here each answer is progress of the `inference` status, so
that a halted engine shows as a stall; and a dead engine ends this process with an error, where vLLM alone would stop
as if it had been asked to.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from loguru import logger

from prime_rl.monitor import Status

ASK_SECONDS = 2.0  # between two questions; the engine answers one in about a millisecond
LOOK_SECONDS = 0.25  # between two looks at what costs nothing: whether the engine has ended, whether it has answered
GRACE_SECONDS = 2.0  # for requests in flight to get their error before this process ends

_died = False


def engine_died() -> bool:
    """Return whether the engine of this process has died."""
    return _died


class EngineWatch:
    """`asyncio.create_task(EngineWatch(client, status).run())` in the server's event loop, in the main thread.

    Args:
        client: vLLM's engine client.
        status: Progresses with each answer.
        end: Called once the engine is dead; ends the process with status 1 by default.
        on_stop: Called when a signal asks to stop.
    """

    def __init__(
        self,
        client: Any,
        status: Status,
        end: Callable[[], None] = lambda: os._exit(1),
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._client, self._status, self._end, self._on_stop = client, status, end, on_stop
        self._asked_to_stop = False
        self._handlers: list[Callable[[int, FrameType | None], None]] = []

    async def run(self) -> None:
        """Ask and look until cancelled or until the engine is dead."""
        try:
            while True:  # bounded: ends with the server's event loop
                # One question at a time, however long it takes.
                question = asyncio.create_task(self._client.collective_rpc("prime_served"))
                while not question.done():  # bounded: by the engine's end
                    await self._look()
                    await asyncio.wait({question}, timeout=LOOK_SECONDS)
                if question.exception() is None:
                    self._status.progress()
                for _ in range(round(ASK_SECONDS / LOOK_SECONDS)):
                    await self._look()
                    await asyncio.sleep(LOOK_SECONDS)
        finally:
            self._note_death()  # vLLM may have noticed first, and be ending the loop

    async def _look(self) -> None:
        self._watch_signals()
        if self._note_death():
            await asyncio.sleep(GRACE_SECONDS)
            self._end()

    def _note_death(self) -> bool:
        """Return whether the engine is dead: a client that was asked to stop counts as errored, too, but is not."""
        global _died
        dead = self._client.errored and not self._asked_to_stop
        if dead and not _died:
            _died = True
            logger.error("the engine died; its own last words are above")
            self._status.done("failed: the engine died")
        return dead

    def _watch_signals(self) -> None:
        """Notice a stop beside the handlers that vLLM gives its event loop, which stay in force."""
        for number in (signal.SIGTERM, signal.SIGINT):
            current = signal.getsignal(number)
            if current in self._handlers:
                continue

            def note_stop(signum: int, frame: FrameType | None, previous: Any = current) -> None:
                if not self._asked_to_stop:
                    self._on_stop()
                self._asked_to_stop = True
                if callable(previous):
                    previous(signum, frame)

            self._handlers.append(note_stop)
            signal.signal(number, note_stop)
