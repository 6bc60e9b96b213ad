"""From a batch of groups to samples: advantages, the zero-advantage filter, and the per-token streams that the trainer executes.

Which component of the loss each token feeds:

| algorithm | sampled tokens | other tokens |
|---|---|---|
| by reward | policy gradient, with the advantage | – |
| echo | as above | cross-entropy on what the environment says after the first reply, by role |
| opd, opsd | towards the teacher's log-probabilities | – |
| sft | cross-entropy: they are the teacher's, not the policy's, and so on no mask | – |
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from prime_rl.config.orchestrator import Echo
from prime_rl.envs.protocol import ROLES, EpisodeResult, SampleTokens
from prime_rl.orchestrator.admission import in_order
from prime_rl.orchestrator.algorithms import advantages, attempts
from prime_rl.orchestrator.scheduler import Batch, Finished
from prime_rl.transport.rollouts import Sample, as_array

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig
    from prime_rl.config.orchestrator import AlgorithmConfig

Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


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
            if episode.result.filtered:
                scored.filtered.append(name)
                scored.details[name] = episode.result.filtered
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


@dataclass(frozen=True)
class Streams:
    """Of one sequence of T tokens, each of shape (T,). `trained`: some component has a token of it."""

    loss_mask: Mask
    logprobs: Floats
    advantages: Floats
    trained: bool
    more: dict[str, Any] = field(
        default_factory=dict
    )  # optional streams, by their names in `transport.rollouts.Sample`


def streams_of(
    config: "AlgorithmConfig", sequence: SampleTokens, mask: Mask, logprobs: Floats, advantage: float, keep_zero: bool
) -> Streams:
    """The streams of the first T tokens of a sequence.

    Args:
        mask: (T,) the sampled tokens.
        logprobs: (T,) of the sampler.
        keep_zero: Tokens of advantage zero are members of the RL component, too: they widen its denominator, and feed the loss's penalties and bonus.
    """
    tokens, nothing = len(mask), np.zeros(len(mask), dtype=np.float32)
    sampled = mask.astype(np.float32)
    if config.component == "ce":
        return Streams(
            np.zeros(tokens, dtype=bool), nothing, nothing, True, {"rl_weight": nothing, "ce_weight": sampled}
        )
    reference, scored = _reference(sequence, sampled)
    if config.component == "ref_kl":
        weights = {"rl_weight": nothing, "ref_kl_weight": scored}
        return Streams(mask, logprobs, nothing, bool(scored.any()), weights | reference)
    foreseen = _foreseen(sequence, mask, config.weights) if isinstance(config, Echo) else nothing
    by_reward = (advantage != 0.0 or keep_zero) and bool(scored.any())
    more = reference | ({"ce_weight": foreseen} if foreseen.any() else {})
    if not by_reward or not np.array_equal(scored, sampled):
        more["rl_weight"] = scored if by_reward else nothing
    return Streams(mask, logprobs, sampled * np.float32(advantage), by_reward or bool(foreseen.any()), more)


def _reference(sequence: SampleTokens, sampled: Floats) -> tuple[dict[str, Any], Floats]:
    """The stream of the scores, 0 where there are none, and `sampled` without the tokens that were to be scored and are not; each of shape (T,)."""
    if sequence.ref_logprobs is None:
        return {}, sampled
    scores = np.asarray(sequence.ref_logprobs, dtype=np.float32)[: len(sampled)]
    within = np.arange(len(sampled)) < len(scores)
    return {"ref_logprobs": np.pad(scores, (0, len(sampled) - len(scores)))}, sampled * within


def _foreseen(sequence: SampleTokens, mask: Mask, weights: dict[str, float]) -> Floats:
    """(T,) weights of the tokens that the environment gave after the policy's first reply, by the role of their message."""
    assert sequence.roles is not None, "a worker gives the roles of all tokens"
    by_role = np.array([weights.get(role, 0.0) for role in ROLES], dtype=np.float32)
    weight = by_role[np.frombuffer(sequence.roles, dtype=np.uint8)[: len(mask)]]
    after = np.arange(len(mask)) >= sequence.prompt_len
    return np.where(after & ~mask, weight, np.float32(0))
