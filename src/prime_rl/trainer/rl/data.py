"""What the RL trainer trains on: rollouts that the orchestrator commits, or random samples."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from prime_rl.errors import UserError
from prime_rl.trainer.loss import STREAMS
from prime_rl.trainer.packing import (
    LONGEST,
    Costs,
    Document,
    HostBatch,
    Ints,
    Prefetch,
    collate,
    pinned,
    plan,
    rollout_lengths,
)
from prime_rl.trainer.parallel import World, agree, sum_over_ranks
from prime_rl.transport.commit import is_listed, wait_for
from prime_rl.transport.rollouts import Sample, open_batch, step_dir
from prime_rl.wait import WaitTimeout

if TYPE_CHECKING:
    from prime_rl.config.trainer import FakeData as FakeConfig
    from prime_rl.config.trainer import PolicyLoss

_SCALES = slice(STREAMS.index("rl_scale"), len(STREAMS))
_MASK = STREAMS.index("mask")


@dataclass(frozen=True)
class StepData:
    """One step: this rank's micro-batches, the lengths of all ranks' samples, and the run's environments, in the order of their places in streams.

    Args:
        example: A sample for people to read, on rank 0.
        groups: Of each document of each of the micro-batches, its group's place among all groups of the step, where `normalize` needs them.
        group_count: Groups of the step, over all ranks.
    """

    batches: list[HostBatch]
    lengths: list[int]
    environments: list[str]
    example: Sample | None = None
    groups: list[Ints] = field(default_factory=list)
    group_count: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


class Data(Protocol):
    """Where steps come from. Every rank calls `arrived`, `wait` and `read`, with the same step."""

    def arrived(self, step: int) -> bool:
        """Whether the step's data is there already: the same answer on every rank."""

    def wait(self, step: int, stop: Callable[[], bool]) -> bool:
        """Wait until the step's data is there. False when a rank was asked to stop."""

    def read(self, step: int) -> StepData:
        """This rank's share, which a thread has read and packed."""

    def close(self) -> None:
        """Let the thread end."""


class RolloutData:
    """Batches that the orchestrator commits under `root`.

    Args:
        vocabulary: Rows of the embedding; token ids must lie below.
        multiple_of: Micro-batches are padded to a multiple of so many tokens.
        timeout: Seconds to wait for a batch.
        read_seconds: How long reading one may take.
        loss: The loss, which says what weights are divided by and whether samples need log-probabilities of a reference model.
        on_wait: Told again and again what is waited for and for how long already.
    """

    def __init__(
        self,
        root: Path,
        world: World,
        *,
        seq_len: int,
        vocabulary: int,
        costs: Costs,
        multiple_of: int,
        timeout: float,
        read_seconds: float,
        loss: "PolicyLoss",
        on_wait: Callable[[str, float], None],
    ) -> None:
        self.root, self.world, self.seq_len, self.vocabulary = root, world, seq_len, vocabulary
        self.costs, self.multiple_of, self.timeout, self.on_wait = costs, multiple_of, timeout, on_wait
        self.loss = loss
        self._ahead = Prefetch(self._read, world.device, read_seconds, lambda step: is_listed(step_dir(root, step)))

    def arrived(self, step: int) -> bool:
        return self._exchange(False, self.world.is_main and is_listed(step_dir(self.root, step)), False)[1]

    def wait(self, step: int, stop: Callable[[], bool]) -> bool:
        """Only rank 0 looks into the directory; at every look the ranks tell each other how things stand, so that they never part.

        Raises:
            WaitTimeout: on every rank, when the orchestrator has not committed the step in time.
        """
        path = step_dir(self.root, step)
        subject = f"{path.parent.name}/{path.name}"
        if not self.world.is_main:
            began = time.monotonic()
            while True:  # ends with rank 0's wait; should that rank die, the collective fails
                self.on_wait(subject, time.monotonic() - began)
                asked, found, expired = self._exchange(stop(), False, False)
                if expired:
                    raise WaitTimeout(subject, "orchestrator", self.timeout)
                if asked or found:
                    return not asked
        try:
            arrived = wait_for(
                path,
                owner="orchestrator",
                timeout=self.timeout,
                poll=0.05,
                on_wait=lambda waited: self.on_wait(subject, waited),
                stop=lambda: self._exchange(stop(), False, False)[0],
            )
        except WaitTimeout:
            self._exchange(False, False, True)
            raise
        return arrived is not None and not self._exchange(stop(), True, False)[0]

    def _exchange(self, stop: bool, found: bool, expired: bool) -> tuple[bool, bool, bool]:
        asked, ready, late = sum_over_ranks(self.world, [stop, found, expired])
        return asked > 0, ready > 0, late > 0

    def read(self, step: int) -> StepData:
        """
        Raises:
            UserError: the batch is damaged, or does not fit the model or `seq_len`.
        """
        return normalize(agree(self.world, lambda: self._ahead.take(step)), self.world, self.loss)

    def close(self) -> None:
        self._ahead.close()

    def _read(self, step: int) -> StepData:
        batch = open_batch(step_dir(self.root, step), check_bytes=self.world.is_main)
        if len(batch) == 0:
            raise UserError(f"{batch.directory} holds no samples")
        mine = plan(batch.lengths, self.seq_len, self.world.size, self.costs)[self.world.rank]
        wanted = [index for indices in mine for index in indices]
        rows = dict(zip(wanted, batch.rows(wanted), strict=True))
        for sample in rows.values():
            check_tokens(sample, self.vocabulary)
        environments, reference = batch.environments, self.loss.kl_coef > 0
        documents = {i: document(row, environments.index(row.env), reference) for i, row in rows.items()}
        batches = [collate([documents[i] for i in indices], len(STREAMS), self.multiple_of) for indices in mine]
        example = batch.rows([step % len(batch)])[0] if self.world.is_main else None
        data = StepData(pinned(batches, self.world.device), batch.lengths.tolist(), environments, example)
        return grouped(data, batch.group_ids(), mine) if self.loss.normalization == "group" else data


class FakeData:
    """Random samples, the same for one seed on any number of ranks. Needs neither orchestrator nor model files.

    Lengths are all the same (`fixed`), or spread as those of real rollouts (`lognormal`: median 600, sigma 0.9). Each sample is a group of its own.
    """

    def __init__(
        self,
        config: "FakeConfig",
        world: World,
        *,
        seq_len: int,
        vocabulary: int,
        costs: Costs,
        multiple_of: int,
        seed: int,
        read_seconds: float,
        loss: "PolicyLoss",
    ) -> None:
        self.config, self.world, self.seq_len, self.vocabulary = config, world, seq_len, vocabulary
        self.costs, self.multiple_of, self.seed, self.loss = costs, multiple_of, seed, loss
        self._ahead = Prefetch(self._make, world.device, read_seconds)

    def arrived(self, step: int) -> bool:
        return True

    def wait(self, step: int, stop: Callable[[], bool]) -> bool:
        return sum_over_ranks(self.world, [stop()])[0] == 0

    def read(self, step: int) -> StepData:
        return normalize(agree(self.world, lambda: self._ahead.take(step)), self.world, self.loss)

    def close(self) -> None:
        self._ahead.close()

    def _make(self, step: int) -> StepData:
        config, lengths = self.config, self._lengths(step)
        most = config.micro_batch_size if config.lengths == "fixed" else None
        mine = plan(lengths, self.seq_len, self.world.size, self.costs, most)[self.world.rank]
        batches = [
            collate([self._document(step, i, lengths[i]) for i in indices], len(STREAMS), self.multiple_of)
            for indices in mine
        ]
        return grouped(StepData(pinned(batches, self.world.device), lengths, []), range(len(lengths)), mine)

    def _lengths(self, step: int) -> list[int]:
        config = self.config
        if config.lengths == "fixed":
            return [config.seq_len or max(2, self.seq_len // config.micro_batch_size)] * config.batch_size
        longest = min(config.seq_len or LONGEST, self.seq_len)
        return rollout_lengths(np.random.default_rng([self.seed, step]), config.batch_size, longest)

    def _document(self, step: int, index: int, tokens: int) -> Document:
        """Every token but the first is trained; its sampler was a uniform model with a little noise."""
        draw = np.random.default_rng([self.seed, step, index])
        mask = np.arange(tokens) > 0
        streams = np.zeros((len(STREAMS), tokens), dtype=np.float32)
        streams[_MASK] = streams[STREAMS.index("rl_scale")] = mask
        noise = draw.standard_normal(tokens, dtype=np.float32)
        streams[STREAMS.index("logprobs")] = mask * (0.1 * noise - np.float32(np.log(self.vocabulary)))
        streams[STREAMS.index("advantages")] = mask * np.float32(draw.standard_normal())
        return Document(draw.integers(0, self.vocabulary, tokens), mask, 1.0, streams)


def check_tokens(sample: Sample, vocabulary: int) -> None:
    """Raise UserError for a token that the model does not have, or a temperature that no distribution has."""
    ids = np.asarray(sample.input_ids)
    if ids.size == 0 or ids.min() < 0 or ids.max() >= vocabulary:
        worst = "no tokens" if ids.size == 0 else f"token {int(ids.max() if ids.max() >= vocabulary else ids.min())}"
        raise UserError(
            f"sample {sample.sample_id} has {worst}, the trainer's model has {vocabulary} tokens: is it the model that sampled it?"
        )
    if not sample.temperature > 0:
        raise UserError(
            f"sample {sample.sample_id} was sampled at temperature {sample.temperature}; training needs > 0"
        )


def document(sample: Sample, environment: int = 0, reference: bool = False) -> Document:
    """A sample's tokens and streams, in the order of `STREAMS`. The scale rows hold the bare weights still.

    Without weight streams every token of the loss mask is a member of the RL component with weight 1; cross-entropy and reference-KL
    weights make members of any token, on the mask or off it.

    Args:
        environment: Its place among the run's environments.
        reference: RL tokens need the log-probabilities of a reference model.

    Raises:
        UserError: they are needed, and not there.
    """
    mask = np.asarray(sample.loss_mask, dtype=bool)
    zeros = np.zeros(mask.size, dtype=np.float32)

    def given(values: "Sequence[float] | np.ndarray | None", default: np.ndarray) -> np.ndarray:
        return default if values is None else np.asarray(values, dtype=np.float32)

    rl = given(sample.rl_weight, np.ones_like(zeros)) * mask
    ce = given(sample.ce_weight, zeros)
    ref_kl = given(sample.ref_kl_weight, zeros)
    if ref_kl.any() and sample.ref_logprobs is None:
        raise UserError(f"sample {sample.sample_id} has ref_kl_weight but no ref_logprobs")
    if reference and rl.any() and sample.ref_logprobs is None:
        raise UserError(f"sample {sample.sample_id} has no ref_logprobs, which loss.kl_coef needs")
    place = np.full_like(zeros, environment)
    rows = (mask, sample.logprobs, sample.advantages, given(sample.ref_logprobs, zeros), place, rl, ce, ref_kl)
    streams = np.stack([np.asarray(row, dtype=np.float32) for row in rows])
    trained = mask | (ce != 0) | (ref_kl != 0)
    return Document(np.asarray(sample.input_ids, dtype=np.int64), trained, float(sample.temperature), streams)


def grouped(data: StepData, group_of: "Sequence[str] | Sequence[int]", mine: Sequence[Sequence[int]]) -> StepData:
    """With the groups of this rank's documents. Every rank numbers them alike.

    Args:
        group_of: The group of each of the step's samples.
        mine: The samples in each micro-batch of this rank.
    """
    place = {group: number for number, group in enumerate(dict.fromkeys(group_of))}
    groups = [np.array([place[group_of[index]] for index in indices], dtype=np.int64) for indices in mine]
    return replace(data, groups=groups, group_count=len(place))


def normalize(data: StepData, world: World, loss: "PolicyLoss") -> StepData:
    """Divide each component's weights by its denominator in the whole step: one sum over the ranks, before any backward.

    The denominator is the component's number of member tokens over all micro-batches and ranks. For the RL component `loss.normalization` may say
    another one. With n tokens of a sequence of it, and N sequences that have any, it is

        token     all member tokens of the step: common practice, also in implementations of DAPO (ScaleRL's "token average")
        sequence  n · N  (GRPO's paper; ScaleRL's "sample average")
        group     the member tokens of the sequence's group · the groups that have any: the mean over groups of the mean over a group's tokens, which
                  DAPO's formula (arXiv:2503.14476) and CISPO's (arXiv:2506.13585) are, and ScaleRL's "prompt average" (arXiv:2510.13786)
        fixed     `loss.fixed_length` · N  (Dr. GRPO, arXiv:2503.20783)
    """
    members = sum((np.count_nonzero(b.streams[_SCALES], axis=1) for b in data.batches), np.zeros(3))
    if loss.normalization in ("sequence", "fixed"):
        members[0] = sum(_share_within_sequences(batch, loss.fixed_length) for batch in data.batches)
    of_group = _tokens_of_groups(data) if loss.normalization == "group" else np.zeros(0)
    summed = np.array(sum_over_ranks(world, [*members.tolist(), *of_group.tolist()]))
    members, of_group = summed[: len(members)], summed[len(members) :]
    if loss.normalization == "group":
        members[0] = np.count_nonzero(of_group)
        for batch, groups in zip(data.batches, data.groups, strict=True):
            batch.streams[_SCALES][0] /= np.maximum(of_group, 1)[groups[batch.documents()]].astype(np.float32)
    divisors = np.maximum(members, 1).astype(np.float32)[:, None]
    for batch in data.batches:
        batch.streams[_SCALES] /= divisors
    return data


def _share_within_sequences(batch: HostBatch, length: int | None) -> int:
    """Divide the RL weights of each sequence by `length`, or by its number of member tokens. Gives the number of sequences that have any."""
    weights, document = batch.streams[_SCALES][0], batch.documents()
    tokens = np.bincount(document[weights != 0], minlength=batch.sizes[2])
    weights /= np.float32(length) if length else np.maximum(tokens, 1)[document]
    return int(np.count_nonzero(tokens))


def _tokens_of_groups(data: StepData) -> npt.NDArray[np.float64]:
    """This rank's member tokens of the RL component in each group of the step, [group_count]."""
    tokens = np.zeros(data.group_count)
    for batch, groups in zip(data.batches, data.groups, strict=True):
        members = batch.documents()[batch.streams[_SCALES][0] != 0]
        tokens += np.bincount(groups[members], minlength=data.group_count)
    return tokens
