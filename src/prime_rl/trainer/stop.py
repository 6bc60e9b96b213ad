"""Being asked to stop: the first signal ends the run after the current step, the second one ends it now."""

import os
import signal
from types import FrameType


class StopSignal:
    """Listens to SIGINT and SIGTERM from its creation on. Call it to ask whether one has come."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)

    def __call__(self) -> bool:
        return self.requested

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(130)
        self.requested = True
        # Not by the logger, which this signal may have interrupted.
        os.write(2, b"asked to stop: finishing the current step (again: stop now)\n")
