"""From a batch of groups to samples: advantages, the zero-advantage filter, and the token streams the trainer executes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from prime_rl.envs.protocol import EpisodeResult, SampleTokens
from prime_rl.orchestrator.algorithms import Attempt, advantages
from prime_rl.orchestrator.algorithms.streams import streams_of
from prime_rl.orchestrator.filters import OFF_POLICY, why_group
from prime_rl.orchestrator.scheduler import Batch, Finished, Group
from prime_rl.transport.rollouts import Sample, as_array

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig


@dataclass(frozen=True)
class ScoredBatch:
    """A batch's samples, and what became of its finished episodes, by name."""

    samples: list[Sample]
    trained: list[str]
    filtered: list[str]  # of advantage zero, or left out by a filter
    truncated: list[str]  # all sampled tokens are cut off
    state: dict[str, Any] = field(default_factory=dict)  # of each environment's algorithm, after this batch
    details: dict[str, str] = field(default_factory=dict)  # which filter left an episode out
    advantages: dict[str, dict[int, float]] = field(default_factory=dict)  # the advantage of each part of each episode


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
        Samples in the order of their groups. With `filter_zero_advantage` those of advantage zero are left out: no policy gradient comes from them, they
        only widen the loss's denominator. A penalty or bonus of all tokens (`loss.kl_coef`, `loss.entropy_coef`) needs them: `RLConfig` refuses the two
        together. Left out are also those whose sampled tokens all lie beyond `seq_len`.
    """
    scored = ScoredBatch([], [], [], [], dict(state))
    values = _advantages(batch, config, scored.state)
    scored.advantages.update(values)
    for group in batch.groups:
        for episode in in_order(group):
            name = episode.start.episode
            if why := why_left_out(episode, batch.step, config):
                scored.filtered.append(name)
                scored.details[name] = why
                continue
            rows = episode_samples(episode, values[name], temperatures[group.task.env], config)
            if rows is None:
                scored.truncated.append(name)
            elif not rows:
                scored.filtered.append(name)
            else:
                scored.trained.append(name)
                scored.samples.extend(rows)
    return scored


def why_left_out(episode: Finished[EpisodeResult], step: int, config: "OrchestratorConfig") -> str:
    """The filter that leaves the episode out of the batch of `step`, "" where none does."""
    bound = config.filters_of(episode.start.task.env).off_policy
    if not episode.result.filtered and bound is not None and step - episode.first > bound.max_steps:
        return OFF_POLICY
    return episode.result.filtered


def in_order(group: Group[EpisodeResult]) -> list[Finished[EpisodeResult]]:
    """Its finished episodes by their place in it, whoever finished first."""
    return sorted(group.finished, key=lambda episode: episode.start.number)


def turned_away(group: Group[EpisodeResult], step: int, config: "OrchestratorConfig") -> str | None:
    """Why a complete group is not worth a place in the batch of `step`, or None: the core's gate."""
    env, episodes = group.task.env, in_order(group)
    filters = config.filters_of(env)
    left_out = [why_left_out(episode, step, config) for episode in episodes]
    counted = [one for episode in episodes for one in attempts(episode.result).values()]
    rewards = [episode.result.reward for episode in episodes]
    return why_group(filters, config.algorithm_of(env), rewards, left_out, counted)


def attempts(result: EpisodeResult) -> dict[int, Attempt]:
    """What an algorithm sees of an episode: one attempt for each of its parts that has something to train, by the part's number."""
    sequences: dict[int, list[SampleTokens]] = {}
    for sequence in result.samples:
        sequences.setdefault(sequence.part, []).append(sequence)
    by_part = {}
    for number, its in sorted(sequences.items()):
        scores = result.parts[number] if result.parts else result
        by_part[number] = Attempt(
            reward=scores.reward,
            output_tokens=sum(sequence.loss_mask.count(1) for sequence in its),
            total_tokens=sum(len(sequence.input_ids) for sequence in its),
            turns=scores.num_turns,
            rewards=scores.rewards,
            metrics=scores.metrics,
            is_truncated=scores.is_truncated,
            agent=its[0].agent,
        )
    return by_part


def _advantages(
    batch: Batch[EpisodeResult], config: "OrchestratorConfig", state: dict[str, Any]
) -> dict[str, dict[int, float]]:
    """The advantage of each part of each episode. `state` is brought to what it is after this batch."""
    by_episode: dict[str, dict[int, float]] = {}
    by_env: dict[str, list[list[Finished[EpisodeResult]]]] = {}
    for group in batch.groups:
        by_env.setdefault(group.task.env, []).append(in_order(group))
    for env, groups in by_env.items():
        named = [
            [(e.start.episode, part, one) for e in group for part, one in attempts(e.result).items()]
            for group in groups
        ]
        values, after = advantages(
            config.algorithm_of(env), [[one for *_, one in group] for group in named], state.get(env, {})
        )
        if after:
            state[env] = after
        for episodes, row in zip(named, values, strict=True):
            for (name, part, _), value in zip(episodes, row, strict=True):
                by_episode.setdefault(name, {})[part] = value
    return by_episode


def episode_samples(
    episode: Finished[EpisodeResult],
    part_advantages: Mapping[int, float],
    temperature: float,
    config: "OrchestratorConfig",
) -> list[Sample] | None:
    """One sample for each token sequence of an episode that some component of the loss is to learn from, cut to `seq_len` tokens.

    Its streams are arrays, of the types that are written: no work a token in Python, and a fourth of the memory of lists.

    Args:
        part_advantages: The advantage of each of its parts.

    Returns:
        None where all sampled tokens are cut off.
    """
    start, result = episode.start, episode.result
    algorithm, seq_len = config.algorithm_of(start.task.env), config.seq_len
    rows, fits = [], False
    for number, sequence in enumerate(result.samples):
        ids, mask, logprobs = exact_streams(sequence)
        mask = mask[:seq_len]
        if not mask.any():
            continue
        fits = True
        streams = streams_of(
            algorithm,
            sequence,
            mask,
            logprobs[:seq_len],
            part_advantages[sequence.part],
            not config.filter_zero_advantage,
        )
        if not streams.trained:
            continue
        rows.append(
            Sample(
                sample_id=f"{start.episode}.{number}",
                group_id=str(start.group),
                task_id=start.task.task_id,
                env=start.task.env,
                policy_versions=list(range(episode.first, episode.last + 1)),
                input_ids=ids[:seq_len],
                loss_mask=streams.loss_mask,
                logprobs=streams.logprobs,
                advantages=streams.advantages,
                temperature=temperature,
                reward=sequence.reward if result.parts else result.reward,
                is_truncated=result.is_truncated or len(sequence.input_ids) > seq_len,
                **streams.more,
            )
        )
    return rows if fits else None


def output_tokens(result: EpisodeResult) -> int:
    """Sampled tokens of an episode."""
    return sum(sequence.loss_mask.count(1) for sequence in result.samples)


def exact_streams(
    sequence: SampleTokens,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
    """Ids, loss mask and log-probabilities, each of shape (T,).

    Raises:
        AssertionError: a sampled token has no log-probability that it can have been sampled with, or another token has one.
    """
    streams = sequence.input_ids, sequence.loss_mask, sequence.logprobs
    if len(lengths := {len(stream) for stream in streams}) != 1:
        raise AssertionError(f"a sample's streams have different lengths: {sorted(lengths)}")
    ids, mask = as_array(sequence.input_ids, np.int32), as_array(sequence.loss_mask, np.bool_)
    logprobs = as_array(sequence.logprobs, np.float32)
    fine = (logprobs <= 0.0) & (mask | (logprobs == 0.0))  # not one that is no number
    if not fine.all():
        first = int(np.argmin(fine))
        kind = "sampled" if mask[first] else "given"
        raise AssertionError(f"a {kind} token has log-probability {sequence.logprobs[first]}")
    return ids, mask, logprobs
