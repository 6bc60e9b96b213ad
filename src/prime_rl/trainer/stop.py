"""Being asked to stop: the first signal ends the run after the current step, the second one ends it now."""

import os
import signal
from types import FrameType

from loguru import logger


class StopSignal:
    """Listens to SIGINT and SIGTERM from its creation on. Call it to ask whether one has come."""

    def __init__(self) -> None:
        self.requested = self._said = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)

    def __call__(self) -> bool:
        if self.requested and not self._said:  # not in the handler, which may have interrupted the logger
            self._said = True
            logger.info("asked to stop: finishing the current step (again: stop now)")
        return self.requested

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(130)
        self.requested = True
