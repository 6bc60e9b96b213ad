"""When the trainer has said its last word: the orchestrator joins the last checkpoint, and serves the last version, before it goes."""

import time
from collections.abc import Callable
from pathlib import Path

from prime_rl.monitor.status import ProcessStatus, read_status

GONE_SECONDS = (
    180.0  # a launcher may wait for a minute before it starts a trainer again, which then has to import torch
)
WAITS_FOR_US_SECONDS = 10.0  # a trainer that was asked to stop as well looks up within a second


class TrainerWatch:
    """Follows the trainer's status file. Times are our own clock's: heartbeats are compared with each other only.

    Args:
        process: The name of its status; `sft` has one of its own.
    """

    def __init__(
        self, output_dir: Path, monotonic: Callable[[], float] = time.monotonic, process: str = "trainer"
    ) -> None:
        self._output_dir, self._monotonic, self._process = output_dir, monotonic, process
        self._sign: object = None
        self._sign_at = self._idle_at = monotonic()

    def ended(self, *, asked_to_stop: bool) -> bool:
        """Whether nothing more is to come: it said so, it has given no sign for long, or it waits for batches that we do not make any more.

        No status at all is no end: the launcher removes it when it starts a trainer again. One that failed may be started again, too, but not where
        all is being stopped.
        """
        trainer, now = read_status(self._output_dir).get(self._process), self._monotonic()
        sign = None if trainer is None else (trainer.pid, trainer.heartbeat)
        if sign != self._sign:
            self._sign, self._sign_at = sign, now
        if not (asked_to_stop and trainer is not None and _waits_for_us(trainer)):
            self._idle_at = now
        outcome = "" if trainer is None else trainer.outcome or ""
        said = outcome in ("finished", "stopped") or (asked_to_stop and outcome.startswith("failed"))
        return said or now - self._sign_at > GONE_SECONDS or now - self._idle_at > WAITS_FOR_US_SECONDS


def _waits_for_us(trainer: ProcessStatus) -> bool:
    return trainer.waiting is not None and trainer.waiting.owner == "orchestrator"
