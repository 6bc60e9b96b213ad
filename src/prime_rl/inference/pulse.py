"""Is the engine still there? Asked every few seconds through the engine's own queue, which a halted or stuck engine does not serve.

vLLM's health route knows only of engines that have ended. Here an answer is progress of the `inference` status, so that an engine that is
stopped shows as a stall; and a dead engine ends this process with an error, where vLLM alone would stop as if it had been asked to.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from loguru import logger

from prime_rl.monitor import Status

PULSE_SECONDS = 2.0  # between two questions; the engine answers one in about a millisecond
LOOK_SECONDS = 0.25  # between two looks at what costs nothing: whether the engine has ended, whether it has answered
GRACE_SECONDS = 2.0  # for requests in flight to get their error before this process ends


class EngineClient(Protocol):
    """The part of vLLM's client that is used here."""

    @property
    def errored(self) -> bool: ...

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> list[Any]: ...


class Pulse:
    """`asyncio.create_task(Pulse(engine, status).run())` in the server's event loop, in the main thread."""

    def __init__(
        self,
        engine: EngineClient,
        status: Status,
        end: Callable[[], None] | None = None,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """`end` is called once the engine is dead; by default it ends the process with status 1. `on_stop` is called when a signal asks to stop."""
        self._engine, self._on_stop = engine, on_stop
        self._status = status
        self._end = end or (lambda: os._exit(1))
        self._asked_to_stop = False
        self._watching: list[Callable[[int, FrameType | None], None]] = []

    async def run(self) -> None:
        """Ask, look, until cancelled or until the engine is dead."""
        try:
            while True:  # bounded: ends with the server's event loop
                question = asyncio.create_task(self._engine.collective_rpc("prime_served"))
                while (
                    not question.done()
                ):  # bounded: by the engine's life; one question at a time, however long it takes
                    await self._look()
                    await asyncio.wait({question}, timeout=LOOK_SECONDS)
                if question.exception() is None:
                    self._status.progress()
                for _ in range(round(PULSE_SECONDS / LOOK_SECONDS)):
                    await self._look()
                    await asyncio.sleep(LOOK_SECONDS)
        finally:
            self._note_death()  # vLLM may have found it first, and be ending the loop

    async def _look(self) -> None:
        self._watch_signals()
        if self._note_death():
            await asyncio.sleep(GRACE_SECONDS)
            self._end()

    def _note_death(self) -> bool:
        """A client that has been told to stop counts as errored, too: only one that nobody stopped has lost its engine."""
        global _died
        dead = self._engine.errored and not self._asked_to_stop
        if dead and not _died:
            _died = True
            logger.error("the engine died; its own last words are above")
            self._status.done("failed: the engine died")
        return dead

    def _watch_signals(self) -> None:
        """Learn of a stop beside the handlers that vLLM gives its event loop, which are called through a file descriptor and stay in force."""
        for number in (signal.SIGTERM, signal.SIGINT):
            current = signal.getsignal(number)
            if current in self._watching:
                continue

            def stopped(signum: int, frame: FrameType | None, before: Any = current) -> None:
                if not self._asked_to_stop:
                    self._on_stop()
                self._asked_to_stop = True
                if callable(before):
                    before(signum, frame)

            self._watching.append(stopped)
            signal.signal(number, stopped)


_died = False


def engine_died() -> bool:
    """Whether a pulse in this process has lost its engine."""
    return _died
