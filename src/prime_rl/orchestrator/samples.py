"""From finished episodes to samples: what is left out, advantages, and the trainer's per-token streams.

A filter looks at an episode once, when it ends. An episode that it leaves out is not trained, and counted by the
filter's name, but the others of its group are still compared with it. A group in which nothing is left to train is
rejected, and another one takes its place.

Which component of the loss each token feeds:

| algorithm | sampled tokens | other tokens |
|---|---|---|
| by reward | policy gradient, with the advantage | – |
| echo | as above | cross-entropy on what the environment says after the first reply, by role |
| opd, opsd | towards the teacher's log-probabilities | – |
| sft | cross-entropy; `loss_mask` is off because the teacher sampled them | – |
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from loguru import logger

from prime_rl.config.orchestrator import Echo
from prime_rl.envs.protocol import ROLES, EpisodeResult, RoutedExperts, SampleTokens
from prime_rl.errors import UserError
from prime_rl.orchestrator.algorithms import advantages, call_user_function, carries_signal, trajectories, user_function
from prime_rl.orchestrator.scheduler import Batch, Finished, Group
from prime_rl.transport.rollouts import Sample, as_array

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig
    from prime_rl.config.orchestrator import AlgorithmConfig, FilterConfig, GibberishFilter, RepetitionFilter

_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, and without a pattern (2^64 divided by the golden ratio)
_MAX_EMPTY_BATCHES = 10  # in a row
_LEAST_REJECTED = 100  # in a row: ten small batches are not enough to tell bad luck from a task that teaches nothing
_HOPELESS = "the task is too easy or too hard, its reward is broken, or the filters are too strict"

Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


# -- what is left out --------------------------------------------------------------------------------------------------


class Admission:
    """Decides about every complete group, and when the run is hopeless.
    Raises UserError: a function of the user's own is not there, or does not take its arguments."""

    def __init__(self, config: "OrchestratorConfig") -> None:
        for algorithm, key in config.in_use("algorithm"):
            if algorithm.type == "custom":
                user_function(algorithm, key)
        for filters, key in config.in_use("filters"):
            if filters.custom is not None:
                user_function(filters.custom, f"{key}.custom")
        self._config, self._groups = config, config.batch_size // config.rollouts_per_example
        self.empty_batches = 0  # in a row; reset by the loop when a batch with samples is committed
        self._rejected: Counter[str] = Counter()  # groups in a row, by reason

    def gate(self, group: Group[EpisodeResult]) -> str | None:
        """Return why a complete group is rejected, or None.
        Raises UserError: so many in a row were that no batch will come together."""
        why = rejection_reason(group, self._config)
        if why is None:
            self._rejected.clear()
            return None
        self._rejected[why] += 1
        count = self._rejected.total()
        if count > max(_MAX_EMPTY_BATCHES * self._groups, _LEAST_REJECTED):
            reasons = ", ".join(f"{name}: {number}" for name, number in sorted(self._rejected.items()))
            raise UserError(f"{count} groups in a row were rejected ({reasons}): {_HOPELESS}")
        return why

    def note_empty_batch(self, step: int, why: Collection[str]) -> None:
        """A batch without samples was discarded. `why`: what its episodes were left out for.
        Raises UserError: too many in a row were like that."""
        reasons = ", ".join(sorted(why))
        logger.warning("step {}: the batch carries no learning signal ({}); collecting another one", step, reasons)
        self.empty_batches += 1
        if self.empty_batches >= _MAX_EMPTY_BATCHES:
            row = f"{self.empty_batches} batches in a row"
            raise UserError(f"{row} carried no learning signal ({reasons}): {_HOPELESS}")


def rejection_reason(group: Group[EpisodeResult], config: "OrchestratorConfig") -> str | None:
    """Return why a complete group is rejected, or None: its episodes' filters if none is left, or a group filter."""
    env, results = group.task.env, [episode.result for episode in group.finished]
    filters = config.filters_of(env)
    if all(result.filtered for result in results):
        return "+".join(sorted({result.filtered for result in results}))
    counted = [one for result in results for one in trajectories(result).values()]
    if filters.dynamic_sampling and not carries_signal(config.algorithm_of(env), counted):
        return "dynamic_sampling"
    if filters.difficulty is not None:
        mean = sum(result.reward for result in results) / len(results)
        if not filters.difficulty.low < mean < filters.difficulty.high:
            return "difficulty"
    return None


def filter_reason(config: "FilterConfig", result: EpisodeResult, seq_len: int) -> str:
    """Return the name of the first filter that leaves the episode out, "" where none does.

    Args:
        seq_len: Tokens that a longer sequence is cut to.

    Raises:
        UserError: a filter of the user's own raises, or gives something else than yes or no.
    """
    longest = max((len(sequence.input_ids) for sequence in result.samples), default=0)
    if config.truncated is not None and (result.is_truncated or longest > seq_len):
        return "truncated"
    if config.repetition is not None and any(_repeats(one, config.repetition) for one in result.samples):
        return "repetition"
    if config.gibberish is not None and _improbable(result, config.gibberish):
        return "gibberish"
    if config.custom is not None:
        count = call_user_function(config.custom, "filter", result, f"episode {result.episode_id}")
        if not isinstance(count, bool | np.bool_):
            message = f"filter {config.custom.path} gave {count!r}: True (leave the episode out) or False is needed"
            raise UserError(message)
        return "custom" if count else ""
    return ""


def output_tokens(result: EpisodeResult) -> int:
    return sum(sequence.loss_mask.count(1) for sequence in result.samples)


def _repeats(sequence: SampleTokens, rule: "RepetitionFilter") -> bool:
    """Whether more than `max_share` of the n-grams of the sampled tokens occurred before in them."""
    tokens = as_array(sequence.input_ids, np.int32)[as_array(sequence.loss_mask, np.bool_)]
    if len(tokens) < max(rule.min_tokens, rule.ngram):
        return False
    # 64-bit hashes: two different n-grams are taken for the same once in 10^9 replies of 100,000 tokens.
    names = np.zeros(len(tokens) - rule.ngram + 1, dtype=np.uint64)
    for place in range(rule.ngram):
        names = names * _FACTOR + tokens[place : place + len(names)].astype(np.uint64)
    return 1 - len(np.unique(names)) / len(names) > rule.max_share


def _improbable(result: EpisodeResult, rule: "GibberishFilter") -> bool:
    """Whether a token with a rare id and a low log-probability was sampled."""
    for sequence in result.samples:
        ids, mask = as_array(sequence.input_ids, np.int32), as_array(sequence.loss_mask, np.bool_)
        low = as_array(sequence.logprobs, np.float32) < rule.max_logprob
        if (mask & low & (ids >= rule.min_token_id)).any():
            return True
    return False


# -- batches -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoredBatch:
    """A batch's samples, and what became of its finished episodes, by name."""

    samples: list[Sample]
    state: dict[str, Any]  # of each environment's algorithm, after this batch
    advantages: dict[str, dict[int, float]]  # of each part of each episode
    trained: list[str] = field(default_factory=list)
    # What left it out: a filter, or "zero_advantage", or "beyond_seq_len" (all sampled tokens are cut off).
    filtered: dict[str, str] = field(default_factory=dict)


def score_batch(
    batch: Batch[EpisodeResult],
    config: "OrchestratorConfig",
    temperatures: Mapping[str, float],
    state: Mapping[str, Any],
) -> ScoredBatch:
    """Score every group and build the samples of the episodes that carry signal.

    Args:
        temperatures: The sampling temperature of each environment.
        state: Of each environment's algorithm, before this batch.

    Returns:
        Samples in the order of their groups. With `filter_zero_advantage` those of advantage zero are left out: no
        policy gradient comes from them, they only widen the loss's denominator. A penalty or bonus of all tokens
        (`loss.kl_coef`, `loss.entropy_coef`) needs them: `RLConfig` refuses the two together. Left out are also those
        whose sampled tokens all lie beyond `seq_len`.
    """
    after = dict(state)
    scored = ScoredBatch([], after, _advantages(batch, config, after))
    for group in batch.groups:
        for episode in group.finished:
            name = episode.start.episode
            if episode.result.filtered:
                scored.filtered[name] = episode.result.filtered
                continue
            rows = episode_samples(episode, scored.advantages[name], temperatures[group.task.env], config)
            if not rows:
                scored.filtered[name] = "beyond_seq_len" if rows is None else "zero_advantage"
            else:
                scored.trained.append(name)
                scored.samples.extend(rows)
    return scored


def _advantages(
    batch: Batch[EpisodeResult], config: "OrchestratorConfig", state: dict[str, Any]
) -> dict[str, dict[int, float]]:
    """Estimate the advantage of each part of each episode, and bring `state` to what it is after this batch."""
    by_episode: dict[str, dict[int, float]] = {}
    for env in dict.fromkeys(group.task.env for group in batch.groups):
        rows = [
            [(one.start.episode, *part) for one in group.finished for part in trajectories(one.result).items()]
            for group in batch.groups
            if group.task.env == env
        ]
        groups = [[trajectory for *_, trajectory in row] for row in rows]
        values, after = advantages(config.algorithm_of(env), groups, state.get(env, {}))
        if after:
            state[env] = after
        for row, advantages_of_row in zip(rows, values, strict=True):
            for (episode, part, _), value in zip(row, advantages_of_row, strict=True):
                by_episode.setdefault(episode, {})[part] = value
    return by_episode


def episode_samples(
    episode: Finished[EpisodeResult],
    part_advantages: Mapping[int, float],
    temperature: float,
    config: "OrchestratorConfig",
) -> list[Sample] | None:
    """Build one sample for each token sequence of an episode that some component of the loss is to learn from.

    A sequence is cut to `seq_len` tokens. A sample's streams are arrays, of the types that are written: no per-token
    Python work, and a quarter of the memory of lists.

    Args:
        part_advantages: The advantage of each of its parts.

    Returns:
        None where all sampled tokens are cut off.

    Raises:
        UserError: the environment gave streams that no model can have sampled.
    """
    start, result, seq_len = episode.start, episode.result, config.seq_len
    algorithm, keep_zero = config.algorithm_of(start.task.env), not config.filter_zero_advantage
    rows, fits = [], False
    for number, sequence in enumerate(result.samples):
        try:
            ids, mask, logprobs = exact_streams(sequence)
        except ValueError as error:
            raise UserError(f"environment {start.task.env!r}, episode {start.episode}: {error}") from error
        mask = mask[:seq_len]
        if not mask.any():
            continue
        fits = True
        streams = streams_of(algorithm, sequence, mask, logprobs[:seq_len], part_advantages[sequence.part], keep_zero)
        if streams is None:
            continue
        rows.append(
            Sample(
                sample_id=f"{start.episode}.{number}",
                group_id=str(start.group),
                task_id=start.task.task_id,
                env=start.task.env,
                policy_versions=list(range(episode.first, episode.last + 1)),
                input_ids=ids[:seq_len],
                routed_experts=None if sequence.experts is None else expert_rows(sequence.experts)[:seq_len],
                temperature=temperature,
                reward=sequence.reward if result.parts else result.reward,
                is_truncated=result.is_truncated or len(sequence.input_ids) > seq_len,
                **streams,
            )
        )
    return rows if fits else None


def expert_rows(experts: RoutedExperts) -> npt.NDArray[np.unsignedinteger[Any]]:
    """(N, layers · k) the experts of the first N tokens."""
    return np.frombuffer(experts.rows, dtype=f"<u{experts.itemsize}").reshape(-1, experts.layers * experts.k)


def exact_streams(sequence: SampleTokens) -> tuple[npt.NDArray[np.int32], Mask, Floats]:
    """Read ids, loss mask and log-probabilities, each of shape (T,). Raises ValueError: a sampled token has no
    log-probability that it can have been sampled with, or another token has one."""
    lengths = {len(stream) for stream in (sequence.input_ids, sequence.loss_mask, sequence.logprobs)}
    if len(lengths) != 1:
        raise ValueError(f"a sample's streams have different lengths: {sorted(lengths)}")
    ids, mask = as_array(sequence.input_ids, np.int32), as_array(sequence.loss_mask, np.bool_)
    logprobs = as_array(sequence.logprobs, np.float32)
    fine = (logprobs <= 0.0) & (mask | (logprobs == 0.0))  # a NaN is not
    if not fine.all():
        first = int(np.argmin(fine))
        kind = "sampled" if mask[first] else "prompt"
        raise ValueError(f"a {kind} token has log-probability {sequence.logprobs[first]}")
    return ids, mask, logprobs


def streams_of(
    config: "AlgorithmConfig", sequence: SampleTokens, mask: Mask, logprobs: Floats, advantage: float, keep_zero: bool
) -> dict[str, Any] | None:
    """Make the streams of the first T tokens of a sequence, each of shape (T,), by their names in `Sample`.

    Args:
        mask: (T,) the sampled tokens.
        logprobs: (T,) of the sampler.
        keep_zero: Tokens of advantage zero still count in the RL loss: in its denominator, KL penalty and entropy
            bonus.

    Returns:
        None where no component has a token of it.
    """
    nothing, sampled = np.zeros(len(mask), dtype=np.float32), mask.astype(np.float32)
    if config.component == "ce":
        unmasked = {"loss_mask": np.zeros_like(mask), "logprobs": nothing, "advantages": nothing}
        return {**unmasked, "rl_weight": nothing, "ce_weight": sampled}
    streams: dict[str, Any] = {"loss_mask": mask, "logprobs": logprobs, "advantages": nothing}
    if sequence.ref_logprobs is not None:
        streams["ref_logprobs"] = np.asarray(sequence.ref_logprobs, dtype=np.float32)[: len(mask)]
    if config.component == "ref_kl":
        return {**streams, "rl_weight": nothing, "ref_kl_weight": sampled}
    streams["advantages"] = sampled * np.float32(advantage)
    by_reward = advantage != 0.0 or keep_zero
    observation = _observation_weights(sequence, mask, config.weights) if isinstance(config, Echo) else nothing
    if observation.any():
        streams["ce_weight"] = observation
    elif not by_reward:
        return None
    if not by_reward:
        streams["rl_weight"] = nothing
    return streams


def _observation_weights(sequence: SampleTokens, mask: Mask, weights: dict[str, float]) -> Floats:
    """(T,) weights of the environment's tokens after the policy's first reply, by the role of their message."""
    assert sequence.roles is not None, "a worker gives the roles of all tokens"
    by_role = np.array([weights.get(role, 0.0) for role in ROLES], dtype=np.float32)
    weight = by_role[np.frombuffer(sequence.roles, dtype=np.uint8)[: len(mask)]]
    after = np.arange(len(mask)) >= sequence.prompt_len
    return np.where(after & ~mask, weight, np.float32(0))
