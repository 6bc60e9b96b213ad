"""The ledger: every episode from its issue to its end, in `ledger.sqlite` of the run directory.

An episode `group.number.attempt` is *issued*, then *finished* or *dropped*; a finished one is *batched* with the batch that holds it, and *trained*
once the version after that step is committed. Recording is cheap and in memory, in the order of events; `flush` writes what changed since the
last one in a single transaction. The rename of `rollouts/step_n` is the commit of a batch: its manifest says which episodes are in it, and the
ledger is an index that `reconcile` brings to what the manifests say. A finished episode is stored with its tokens until its batch is committed.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prime_rl.envs.protocol import EpisodeResult
from prime_rl.orchestrator.account import Account


def episode_id(group: int, number: int, attempt: int) -> str:
    """`group.number.attempt`: an episode's name in the ledger, the logs and the batches' lineage."""
    return f"{group}.{number}.{attempt}"


@dataclass(frozen=True)
class Stored:
    """A finished episode that is in no batch: issued on `version`, sampled by `first` … `last` as they stood in life `life`."""

    number: int
    attempt: int
    version: int
    life: int
    first: int
    last: int
    result: EpisodeResult


@dataclass
class OpenGroup:
    """A group that is neither batched nor discarded, as far as the ledger knows it: what the core needs to go on."""

    number: int
    env: str
    task_index: int
    task_id: str
    waiting: list[tuple[int, int]] = field(default_factory=list)  # (number in the group, attempt) not issued yet
    again: list[tuple[int, int]] = field(default_factory=list)  # issued, but in flight when the orchestrator died
    finished: list[Stored] = field(default_factory=list)
    lost: int = 0  # ended without a result, and not issued again


@dataclass(frozen=True)
class BatchRecord:
    """What the manifest of `rollouts/step_n` says about episodes; `Ledger.batch_extra` writes it."""

    step: int
    trained: list[str]
    filtered: list[str]
    truncated: list[str]
    groups: list[tuple[int, str, int, str]]  # (number, env, task index, task id)
    groups_opened: int
    account: Account  # with this batch counted as batched


def read_batches(rollouts: Path) -> list[BatchRecord]:
    """The records of all committed batches under `rollouts`, by step.

    Raises:
        UserError: a committed batch's manifest cannot be read, or lists no episodes.
    """
    raise NotImplementedError


class Ledger:
    """One run's ledger. One writer: the orchestrator. Recording calls belong to one thread; `flush` may run in another at the same time.

    Recording calls raise `ValueError` for what cannot happen: an episode that ends without having been issued, one that ends twice.

    Args:
        path: `ledger.sqlite`; made if it is missing (then `created` is set, and `reconcile` rebuilds what the manifests know).

    Raises:
        UserError: the file is damaged, truncated, locked or of a newer format; it is left as it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.created = False

    # -- recording, in the event loop ------------------------------------------------------------------------------------------

    def opened(self, group: int, env: str, task_index: int, task_id: str) -> None:
        """A group was opened."""
        raise NotImplementedError

    def issued(self, episode: str, version: int, life: int) -> None:
        """An episode of an open group starts. The same one may be issued again if it was in flight when the orchestrator died."""
        raise NotImplementedError

    def finished(self, episode: str, first: int, last: int, life: int, result: EpisodeResult) -> None:
        """An episode ended with a result; versions `first` … `last`, as they stood in life `life`, may have sampled it."""
        raise NotImplementedError

    def dropped(self, episode: str, reason: str, detail: str = "", retried: bool = False) -> None:
        """An issued or finished episode will not be trained. With `retried` its next attempt will be issued."""
        raise NotImplementedError

    def batched(
        self,
        step: int,
        trained: Sequence[str],
        filtered: Sequence[str],
        truncated: Sequence[str],
        groups: Sequence[int],
    ) -> None:
        """The batch of `step` was committed (its directory has its final name): `groups` are closed, their tokens are forgotten.

        Args:
            trained: Episodes with samples in it.
            filtered: Episodes left out for want of a learning signal.
            truncated: Episodes left out because none of their sampled tokens fits `seq_len`.
            groups: The groups of the batch. Every finished episode of theirs is in one of the three lists.
        """
        raise NotImplementedError

    def discarded(self, groups: Iterable[int], reason: str = "filtered", detail: str = "") -> None:
        """Groups leave without a batch: their finished episodes are dropped for `reason`. Also for groups that lost every episode."""
        raise NotImplementedError

    def trained_through(self, version: int) -> None:
        """`version` of the present history is committed: batches of steps below it are trained."""
        raise NotImplementedError

    def rewound(self, step: int) -> None:
        """A new life of the trainer began at `step`: batches from there on are trained again, so they are batched, not trained."""
        raise NotImplementedError

    # -- writing, in a worker thread -------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether something was recorded since the last flush."""
        raise NotImplementedError

    def flush(self) -> None:
        """Write everything recorded so far in one transaction. Call it before a batch is renamed into place, and after.

        Raises:
            UserError: the disk is full, or another program keeps the file locked. What was to be written is kept: a later flush writes it.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close the file. What was not flushed is lost."""
        raise NotImplementedError

    # -- reading -----------------------------------------------------------------------------------------------------------------

    def account(self) -> Account:
        """The account now, with what is not flushed yet. Costs next to nothing: it is counted as things are recorded."""
        raise NotImplementedError

    def groups_opened(self) -> int:
        """How many groups were drawn from the task stream: one more than the highest group number."""
        raise NotImplementedError

    def open_groups(self, group_size: int) -> list[OpenGroup]:
        """Groups that are neither batched nor discarded, in the order of opening; what was in flight is to be started again, same attempt."""
        raise NotImplementedError

    def batch_extra(
        self,
        step: int,
        trained: Sequence[str],
        filtered: Sequence[str],
        truncated: Sequence[str],
        groups: Sequence[int],
    ) -> dict[str, Any]:
        """What the manifest of the batch of `step` must say (`write_batch(extra=…)`), so that the ledger can be reconciled with it."""
        raise NotImplementedError

    def reconcile(self, batches: Sequence[BatchRecord], version: int) -> list[str]:
        """Bring the ledger to what the committed batches say, and flush it. Call it at start, before `open_groups`.

        Args:
            batches: Records of all batches that stand in the run directory (`read_batches`).
            version: The newest committed version of the present history: steps below it are trained, later ones will be trained again.

        Returns:
            What had to be mended, for the log; empty when ledger and manifests agree.
        """
        raise NotImplementedError
