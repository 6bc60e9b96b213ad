"""What the RL trainer trains on: rollouts that the orchestrator commits, or random samples."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from prime_rl.errors import UserError
from prime_rl.trainer.batch import pinned
from prime_rl.trainer.loss import STREAMS
from prime_rl.trainer.packing import Costs, Document, HostBatch, collate, plan
from prime_rl.trainer.parallel import World, agree, sum_over_ranks
from prime_rl.transport.commit import wait_for
from prime_rl.transport.rollouts import Sample, open_batch, step_dir
from prime_rl.wait import WaitTimeout

if TYPE_CHECKING:
    from prime_rl.config.trainer import FakeData as FakeConfig

_SCALES = slice(STREAMS.index("rl_scale"), len(STREAMS))
_MASK = STREAMS.index("mask")


@dataclass(frozen=True)
class StepData:
    """One step: this rank's micro-batches, and counts over all ranks. `example` is one sample for people to read, on rank 0."""

    batches: list[HostBatch]
    lengths: list[int]
    loss_tokens: int
    example: Sample | None = None

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


class Data(Protocol):
    """Where steps come from. Every rank calls both, with the same step."""

    def wait(self, step: int, stop: Callable[[], bool]) -> bool:
        """Wait until the step's data is there. False when a rank was asked to stop."""

    def read(self, step: int) -> StepData:
        """Read and pack this rank's share."""


class RolloutData:
    """Batches that the orchestrator commits under `root`.

    Args:
        vocabulary: Rows of the embedding; token ids must lie below.
        multiple_of: Micro-batches are padded to a multiple of so many tokens.
        timeout: Seconds to wait for a batch.
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
        on_wait: Callable[[str, float], None],
    ) -> None:
        self.root, self.world, self.seq_len, self.vocabulary = root, world, seq_len, vocabulary
        self.costs, self.multiple_of, self.timeout, self.on_wait = costs, multiple_of, timeout, on_wait

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
        return normalize(agree(self.world, lambda: self._read(step)), self.world)

    def _read(self, step: int) -> StepData:
        batch = open_batch(step_dir(self.root, step), check_bytes=self.world.is_main)
        if len(batch) == 0:
            raise UserError(f"{batch.directory} holds no samples")
        mine = plan(batch.lengths, self.seq_len, self.world.size, self.costs)[self.world.rank]
        wanted = [index for indices in mine for index in indices]
        rows = dict(zip(wanted, batch.rows(wanted), strict=True))
        for sample in rows.values():
            check_tokens(sample, self.vocabulary)
        batches = [collate([document(rows[i]) for i in indices], len(STREAMS), self.multiple_of) for indices in mine]
        example = batch.rows([step % len(batch)])[0] if self.world.is_main else None
        return StepData(pinned(batches, self.world.device), batch.lengths.tolist(), 0, example)


class FakeData:
    """Random samples, the same for one seed on any number of ranks. Needs neither orchestrator nor model files."""

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
    ) -> None:
        length = config.seq_len or max(2, seq_len // config.micro_batch_size)
        self.lengths = [length] * config.batch_size
        self.plan = plan(self.lengths, seq_len, world.size, costs, config.micro_batch_size)[world.rank]
        self.world, self.vocabulary, self.multiple_of, self.seed = world, vocabulary, multiple_of, seed

    def wait(self, step: int, stop: Callable[[], bool]) -> bool:
        return sum_over_ranks(self.world, [stop()])[0] == 0

    def read(self, step: int) -> StepData:
        batches = [
            collate([document(self._sample(step, i)) for i in indices], len(STREAMS), self.multiple_of)
            for indices in self.plan
        ]
        return normalize(StepData(pinned(batches, self.world.device), self.lengths, 0), self.world)

    def _sample(self, step: int, index: int) -> Sample:
        """Every token but the first is trained; its sampler was a uniform model with a little noise."""
        draw, tokens = np.random.default_rng([self.seed, step, index]), self.lengths[index]
        mask = np.arange(tokens) > 0
        return Sample(
            sample_id=f"fake-{step}-{index}",
            group_id=f"fake-{step}",
            task_id="fake",
            env="fake",
            policy_versions=[step],
            input_ids=draw.integers(0, self.vocabulary, tokens).tolist(),
            loss_mask=mask.tolist(),
            logprobs=(mask * (0.1 * draw.standard_normal(tokens) - np.log(self.vocabulary))).tolist(),
            advantages=(mask * draw.standard_normal()).tolist(),
            temperature=1.0,
            reward=0.0,
        )


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


def document(sample: Sample) -> Document:
    """A sample's tokens and streams, in the order of `STREAMS`. The scale rows hold the bare weights still.

    Without weight streams every token of the loss mask is a member of the RL component with weight 1; cross-entropy and reference-KL
    weights make members of any token, on the mask or off it.
    """
    mask = np.asarray(sample.loss_mask, dtype=bool)
    zeros = np.zeros(mask.size, dtype=np.float32)

    def given(values: Sequence[float] | None, default: np.ndarray) -> np.ndarray:
        return default if values is None else np.asarray(values, dtype=np.float32)

    rl = given(sample.rl_weight, np.ones_like(zeros)) * mask
    ce = given(sample.ce_weight, zeros)
    ref_kl = given(sample.ref_kl_weight, zeros)
    if ref_kl.any() and sample.ref_logprobs is None:
        raise UserError(f"sample {sample.sample_id} has ref_kl_weight but no ref_logprobs")
    rows = (mask, sample.logprobs, sample.advantages, given(sample.ref_logprobs, zeros), rl, ce, ref_kl)
    streams = np.stack([np.asarray(row, dtype=np.float32) for row in rows])
    trained = mask | (ce != 0) | (ref_kl != 0)
    return Document(np.asarray(sample.input_ids, dtype=np.int64), trained, float(sample.temperature), streams)


def normalize(data: StepData, world: World) -> StepData:
    """Divide each component's weights by its number of member tokens in the whole step: one sum over the ranks, before any backward."""
    members = sum((np.count_nonzero(b.streams[_SCALES], axis=1) for b in data.batches), np.zeros(3))
    masked = sum(float(b.streams[_MASK].sum()) for b in data.batches)
    *counts, loss_tokens = sum_over_ranks(world, [*members.tolist(), masked])
    divisors = np.maximum(counts, 1).astype(np.float32)[:, None]
    for batch in data.batches:
        batch.streams[_SCALES] /= divisors
    return replace(data, loss_tokens=int(loss_tokens))
