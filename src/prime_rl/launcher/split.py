"""Where the time of a run's steps goes on both sides, and in words what limits it: pure functions of metrics rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Row = Mapping[str, float]

NOTABLE = 0.1
"""Of the time: a side that stands still for less counts as busy."""


@dataclass(frozen=True)
class Split:
    """Shares of the time, from 0 to 1. What is missing of the trainer's to 1 goes into exports, checkpoints and the loop.

    Args:
        trained: The trainer computed.
        waited: It waited for a batch.
        updated: The engines loaded weights.
        gated: Nothing was in flight, as nothing may start before the trainer has made newer weights.
    """

    trained: float
    waited: float
    updated: float
    gated: float

    @property
    def sampled(self) -> float:
        """The engines sampled, or environments kept them waiting."""
        return max(1.0 - self.updated - self.gated, 0.0)

    @property
    def limit(self) -> str:
        """What the run would be faster without: the side that the other one waits for."""
        if max(self.waited, self.gated, self.updated) < NOTABLE:
            return "nothing (both sides are busy)"
        if self.updated >= max(self.waited, self.gated):
            return f"weight updates (engines load for {self.updated:.0%})"
        if self.waited >= self.gated:
            return f"generation (trainer waits {self.waited:.0%})"
        return f"training (engines wait {self.gated:.0%})"


def split(orchestrator: Sequence[Row], trainer: Sequence[Row]) -> Split | None:
    """Of the same steps' rows of both sides; None where these do not say how long each side took, and waited for the other."""

    def total(rows: Sequence[Row], key: str) -> float:
        return sum(row.get(key, 0.0) for row in rows)

    making, training = total(orchestrator, "time/step"), total(trainer, "time/step")
    waits = any("time/wait_for_weights" in row for row in orchestrator) and any(
        "time/wait_for_batch" in row for row in trainer
    )
    if not waits or making <= 0 or training <= 0:
        return None
    computed = total(trainer, "time/forward_backward") + total(trainer, "time/optimizer")
    return Split(
        trained=min(computed / training, 1.0),
        waited=min(total(trainer, "time/wait_for_batch") / training, 1.0),
        # Servers that do not tell how long they paused may have done so all the time.
        updated=min(
            sum(row.get("time/update_pause", row.get("time/update_weights", 0.0)) for row in orchestrator) / making, 1.0
        ),
        gated=min(total(orchestrator, "time/wait_for_weights") / making, 1.0),
    )


def split_lines(found: Split) -> list[str]:
    """For the end of a run."""
    return [
        f"time, trainer: computes {found.trained:.0%}, waits for batches {found.waited:.0%}; "
        f"engines: sample {found.sampled:.0%}, load weights {found.updated:.0%}, wait for the trainer {found.gated:.0%}",
        f"limited by {found.limit}",
    ]
