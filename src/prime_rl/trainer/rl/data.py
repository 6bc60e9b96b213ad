"""What the RL trainer trains on: rollouts that the orchestrator commits, or random samples."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prime_rl.config import TrainerConfig
from prime_rl.config.trainer import PolicyLoss
from prime_rl.errors import UserError
from prime_rl.trainer.loss import STREAMS
from prime_rl.trainer.packing import LONGEST, Document, Ints, MicroBatch, OnWait, StepData, StepSource, rollout_lengths
from prime_rl.trainer.parallel import World, sum_over_ranks
from prime_rl.trainer.router_replay import Routers, chosen_experts
from prime_rl.trainer.source import Source
from prime_rl.trainer.step_tokens import SampleRow, StepTokens
from prime_rl.transport.commit import list_steps, step_dir, subject_of
from prime_rl.transport.rollouts import Sample, open_batch
from prime_rl.wait import LEAST_POLL_SECONDS, WaitTimeout

_SCALES = slice(STREAMS.index("rl_scale"), len(STREAMS))


class PolicyData(StepSource):
    """Steps of samples whose weights add up as `loss.normalization` says."""

    def __init__(self, config: TrainerConfig, world: World, source: Source) -> None:
        self.config, self.vocabulary = config, source.vocabulary
        super().__init__(world, config.dist_timeout)

    def read(self, step: int) -> StepData:
        return normalize(super().read(step), self.world, self.config.loss)


class RolloutData(PolicyData):
    """Batches that the orchestrator commits under `rollouts`."""

    @property
    def root(self) -> Path:
        return self.config.output_dir / "rollouts"

    def exists(self, step: int) -> bool:
        return step in list_steps(self.root)

    def arrived(self, step: int) -> bool:
        return sum_over_ranks(self.world, [self.world.is_main and self.exists(step)])[0] > 0

    def wait(self, step: int, stop: Callable[[], bool], on_wait: OnWait) -> bool:
        """Wait for the batch. Only rank 0 looks into the directory; at every look the ranks exchange what they know.
        Raises WaitTimeout, on every rank, if the orchestrator has not committed the step in time."""
        timeout, is_main = self.config.rollout_timeout, self.world.is_main
        subject, deadline = subject_of(step_dir(self.root, step)), time.monotonic() + timeout
        while True:  # bounded: by rank 0's deadline; should that rank die, the collective fails
            on_wait(subject, "orchestrator", timeout)
            late = is_main and time.monotonic() > deadline
            asked, exists, expired = sum_over_ranks(self.world, [stop(), is_main and self.exists(step), late])
            if asked or exists:
                return not asked
            if expired:
                raise WaitTimeout(subject, "orchestrator", timeout)
            time.sleep(LEAST_POLL_SECONDS)  # bounded: a moment

    def prepare(self, step: int) -> StepData:
        batch = open_batch(step_dir(self.root, step), check_bytes=self.world.is_main)
        if len(batch) == 0:
            raise UserError(f"{batch.directory} holds no samples")

        rows = list[SampleRow]()

        def documents(wanted: list[int]) -> Iterator[Document]:
            for sample in batch.rows(wanted):
                check_tokens(sample, self.vocabulary)
                own = np.flatnonzero(np.asarray(sample.loss_mask)[1:]) + 1
                advantage = float(np.asarray(sample.advantages)[own].mean()) if own.size else 0.0
                rows.append(SampleRow(sample.sample_id, sample.env, own.size, sample.reward, advantage))
                yield document(sample, self.config.loss.kl_coef > 0, self.routers)

        lengths, by_group = batch.lengths.tolist(), self.config.loss.normalization == "group"
        mine, batches = self.pack(lengths, self.config.seq_len, len(STREAMS), documents)
        group_of = batch.columns("group_id")["group_id"] if by_group else range(len(lengths))
        mask, logprobs = np.concatenate([one.streams[:2].numpy() for one in batches], 1)
        sampled = StepTokens(rows, mask > 0, logprobs[mask > 0])
        return grouped(StepData(batches, lengths, len(lengths), sampled=sampled), group_of, mine)


class FakeSamples(PolicyData):
    """Random samples, the same for one seed on any number of ranks. Needs neither orchestrator nor model files. Lengths
    are all the same (`fixed`), or spread as those of real rollouts (`lognormal`). Each sample is a group of its own."""

    def prepare(self, step: int) -> StepData:
        fake, seq_len = self.config.data.fake, self.config.seq_len
        assert fake is not None
        if fake.lengths == "fixed":
            lengths = [fake.seq_len or max(2, seq_len // fake.micro_batch_size)] * fake.batch_size
            seq_len = min(seq_len, fake.micro_batch_size * lengths[0])
        else:
            longest = min(fake.seq_len or LONGEST, seq_len)
            lengths = rollout_lengths(np.random.default_rng([self.config.seed, step]), fake.batch_size, longest)
        mine, batches = self.pack(
            lengths, seq_len, len(STREAMS), lambda wanted: (self._document(step, i, lengths[i]) for i in wanted)
        )
        return grouped(StepData(batches, lengths, len(lengths)), range(len(lengths)), mine)

    def _document(self, step: int, index: int, tokens: int) -> Document:
        """Every token but the first is trained; its sampler was a uniform model with a little noise."""
        draw = np.random.default_rng([self.config.seed, step, index])
        mask = np.arange(tokens) > 0
        streams = np.zeros((len(STREAMS), tokens), dtype=np.float32)
        streams[[STREAMS.index("mask"), STREAMS.index("rl_scale")]] = mask
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
            f"sample {sample.sample_id} has {worst}, the trainer's model has {vocabulary} tokens: is it the model that "
            "sampled it?"
        )
    if not sample.temperature > 0:
        raise UserError(
            f"sample {sample.sample_id} was sampled at temperature {sample.temperature}; training needs > 0"
        )


def document(sample: Sample, reference: bool = False, routers: Routers | None = None) -> Document:
    """A sample's tokens and streams, in the order of `STREAMS`. The scale rows hold the bare weights still.

    Without weight streams every token of the loss mask belongs to the RL component with weight 1; a cross-entropy or
    reference-KL weight makes any token belong to that component, on the mask or off it. Raises UserError if
    log-probabilities of a reference model are needed (`reference`: by RL tokens) and missing, or none of the `routers`
    of a model that replays them chose the experts.
    """
    mask = np.asarray(sample.loss_mask, dtype=bool)
    zeros = np.zeros(mask.size, dtype=np.float32)

    def stream(values: "Sequence[float] | np.ndarray | None", default: np.ndarray) -> np.ndarray:
        return default if values is None else np.asarray(values, dtype=np.float32)

    rl = stream(sample.rl_weight, np.ones_like(zeros)) * mask
    ce = stream(sample.ce_weight, zeros)
    ref_kl = stream(sample.ref_kl_weight, zeros)
    if ref_kl.any() and sample.ref_logprobs is None:
        raise UserError(f"sample {sample.sample_id} has ref_kl_weight but no ref_logprobs")
    if reference and rl.any() and sample.ref_logprobs is None:
        raise UserError(f"sample {sample.sample_id} has no ref_logprobs, which loss.kl_coef needs")
    rows = (mask, sample.logprobs, sample.advantages, stream(sample.ref_logprobs, zeros), rl, ce, ref_kl)
    streams = np.stack([np.asarray(row, dtype=np.float32) for row in rows])
    trained = mask | (ce != 0) | (ref_kl != 0)
    experts = None
    if routers is not None and sample.routed_experts is not None:
        experts = chosen_experts(sample.routed_experts, routers, sample.sample_id)
        if (count := experts.shape[1]) < (last := int(mask.nonzero()[0].max(initial=0))):
            raise UserError(f"sample {sample.sample_id} has the experts of {count} of {last} computed tokens")
    ids = np.asarray(sample.input_ids, dtype=np.int64)
    return Document(ids, trained, float(sample.temperature), streams, experts)


def grouped(data: StepData, group_of: "Sequence[str] | Sequence[int]", mine: Sequence[Sequence[int]]) -> StepData:
    """With the groups of this rank's documents, which every rank numbers alike: `group_of` each of the step's samples,
    over which `normalize` averages, or the sample itself. `mine`: the samples in each micro-batch of this rank."""
    place = {group: number for number, group in enumerate(dict.fromkeys(group_of))}
    groups = [np.array([place[group_of[index]] for index in indices], dtype=np.int64) for indices in mine]
    return replace(data, groups=groups, group_count=len(place))


def normalize(data: StepData, world: World, loss: PolicyLoss) -> StepData:
    """Divide each component's weights by its denominator in the whole step: one sum over ranks, before any backward.

    The denominator is the component's number of tokens (of nonzero weight) over all micro-batches and ranks. For the RL
    component `loss.normalization` may name another. With n of its tokens in a sequence, and N sequences with any, it is

        token     all tokens of the step: common practice, also in implementations of DAPO (ScaleRL's "token average")
        sequence  n · N  (GRPO's paper; ScaleRL's "sample average")
        group     the tokens of the sequence's group · the groups with any: the mean over groups of the mean over a
                  group's tokens, which DAPO's formula (arXiv:2503.14476) and CISPO's (arXiv:2506.13585) are, and
                  ScaleRL's "prompt average" (arXiv:2510.13786)
        fixed     `loss.fixed_length` · N  (Dr. GRPO, arXiv:2503.20783)
    """
    counts = sum((np.count_nonzero(_scales(b), axis=1) for b in data.batches), np.zeros(3))
    tokens, owners = np.zeros(0 if loss.normalization == "token" else data.group_count), list[Ints]()
    for batch, groups in zip(data.batches, data.groups, strict=True) if len(tokens) else ():
        owners.append(groups[batch.documents()[0]])
        tokens += np.bincount(owners[-1][_scales(batch)[0] != 0], minlength=len(tokens))
    summed = np.array(sum_over_ranks(world, [*counts.tolist(), *tokens.tolist()]))
    counts, tokens = summed[: len(counts)], summed[len(counts) :]
    if len(tokens):
        counts[0] = np.count_nonzero(tokens)
        lengths = np.maximum(tokens, 1) if loss.fixed_length is None else np.full_like(tokens, loss.fixed_length)
        for batch, owner in zip(data.batches, owners, strict=True):
            _scales(batch)[0] /= lengths[owner].astype(np.float32)
    divisors = np.maximum(counts, 1).astype(np.float32)[:, None]
    for batch in data.batches:
        _scales(batch)[:] /= divisors
    return data


def _scales(batch: MicroBatch) -> npt.NDArray[np.float32]:
    """The weights of the three components, [3, L], a view: what is written to it is written to the batch."""
    return batch.streams[_SCALES].numpy()
