"""Say where the time of a run's steps goes and what limits it, from the metrics rows of trainer and orchestrator.

The console, the metrics (`limit/*`) and `rl doctor` all ask here. The rule: the side that is busy nearly all the time
limits the run. Where neither is, and measured waits explain at least half of what the busier one loses, the longest
wait does; else the pipeline, in which the two take turns.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

Row = Mapping[str, float]

FULL = 0.8  # of the time: a side that is busy for so long waits for nothing that matters
NOTABLE = 0.1  # of the time: a wait shorter than this limits nothing
STEPS = 100  # the last ones, which are judged
KEPT = 200  # steps whose metrics are kept: one side is ahead of the other, or goes back to a recovery checkpoint


@dataclass(frozen=True)
class Shares:
    """Shares of a window's time, from 0 to 1: four of the trainer's, two of the engines', one of a worker's."""

    waited: float = 0.0  # the trainer waited for a batch
    publish: float = 0.0  # the trainer waited until an earlier version was published
    saved: float = 0.0  # the trainer's loop stood still for a checkpoint
    read: float = 0.0  # the trainer waited for a batch that was committed to be read and packed
    idle: float = 0.0  # no episode was in flight
    paused: float = 0.0  # the engines generated nothing while they loaded weights
    cpu: float = 0.0  # what the busiest environment worker used of a core; 0 where it is not known

    @property
    def trained(self) -> float:
        """The trainer computed: it waited for nothing."""
        return max(1.0 - self.waited - self.publish - self.saved - self.read, 0.0)

    @property
    def sampled(self) -> float:
        """Episodes were in flight and the engines were not paused."""
        return max(1.0 - self.idle - self.paused, 0.0)

    def __str__(self) -> str:
        return (
            f"trainer: computes {self.trained:.0%}, waits for batches {self.waited:.0%}; "
            f"engines: sample {self.sampled:.0%}, load weights {self.paused:.0%}, idle {self.idle:.0%}"
        )


@dataclass(frozen=True)
class Limit:
    """What a run would be faster without, its share of the time, and why, in a few words."""

    name: str
    share: float
    reason: str

    @property
    def metric(self) -> str:
        return "limit/" + self.name.removeprefix("the ").replace(" ", "_")

    def __str__(self) -> str:
        return f"limited by {self.name} ({self.reason})"


def limit_of(shares: Shares) -> Limit:
    trained, sampled = shares.trained, shares.sampled
    worker_bound = sampled > 0 and shares.cpu >= FULL * sampled
    if trained >= max(FULL, sampled):
        reason = "both sides are busy" if sampled >= FULL else f"engines wait {1 - sampled:.0%}"
        return Limit("training", trained, reason)
    if sampled >= FULL and not worker_bound:
        reason = "both sides are busy" if trained >= FULL else f"trainer waits {1 - trained:.0%}"
        return Limit("generation", sampled, reason)
    synced = max(shares.publish, shares.paused)
    causes = (
        Limit("weight sync", synced, f"versions hold a side up for {synced:.0%}"),
        Limit("checkpoints", shares.saved, f"saving stops the trainer for {shares.saved:.0%}"),
        Limit("data", shares.read, f"the trainer waits {shares.read:.0%} to read batches"),
        Limit("environment workers", sampled * worker_bound, f"the busiest uses {shares.cpu:.0%} of a core"),
    )
    loss, longest = 1.0 - max(trained, sampled), max(causes, key=lambda cause: cause.share)
    if longest.share >= NOTABLE and sum(cause.share for cause in causes) >= loss / 2:
        return longest
    return Limit("the pipeline", loss, f"neither side is full: engines sample {sampled:.0%}, trainer {trained:.0%}")


def shares_of(orchestrator: Sequence[Row], trainer: Sequence[Row]) -> Shares | None:
    """Return the shares of the same steps' rows of both sides; None where these lack the times of steps and waits."""
    waits = any("time/idle" in row for row in orchestrator) and any("time/wait_for_batch" in row for row in trainer)
    step = "time/step"
    if not waits or not all(sum(row.get(step, 0.0) for row in rows) > 0 for rows in (orchestrator, trainer)):
        return None

    def share(rows: Sequence[Row], seconds: Callable[[Row], float]) -> float:
        return min(max(sum(map(seconds, rows)) / sum(row.get(step, 0.0) for row in rows), 0.0), 1.0)

    return Shares(
        waited=share(trainer, lambda row: row.get("time/wait_for_batch", 0.0) - row.get("time/read_batch", 0.0)),
        publish=share(trainer, lambda row: row.get("time/export", 0.0)),
        saved=share(trainer, lambda row: row.get("time/save_ckpt", 0.0)),
        read=share(trainer, lambda row: row.get("time/read_batch", 0.0)),
        idle=share(orchestrator, lambda row: row.get("time/idle", 0.0)),
        paused=share(orchestrator, lambda row: row.get("time/update_pause", 0.0)),
        cpu=share(orchestrator, lambda row: row.get("workers/cpu", 0.0) * row.get(step, 0.0)),
    )


def recent_shares(
    orchestrator: Mapping[int, Row], trainer: Mapping[int, Row], starts: Collection[int], since: float = 0.0
) -> Shares | None:
    """Return the shares of the last `STEPS` steps that both sides made `since` then (unix seconds), of their rows by
    step; None before there are any. Steps in `starts`, at which a trainer began, include its start-up and are left out,
    as the very first is."""
    both = sorted(orchestrator.keys() & trainer.keys())
    made = [step for step in both if min(orchestrator[step]["time"], trainer[step]["time"]) >= since][1:]
    steps = [step for step in made if step not in starts][-STEPS:]
    return shares_of([orchestrator[step] for step in steps], [trainer[step] for step in steps])
