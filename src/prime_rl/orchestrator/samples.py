"""From a batch of groups to samples: advantages, the zero-advantage filter, and the trainer's per-token streams.

Which component of the loss each token feeds:

| algorithm | sampled tokens | other tokens |
|---|---|---|
| by reward | policy gradient, with the advantage | – |
| echo | as above | cross-entropy on what the environment says after the first reply, by role |
| opd, opsd | towards the teacher's log-probabilities | – |
| sft | cross-entropy; `loss_mask` is off because the teacher sampled them | – |
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from prime_rl.config.orchestrator import Echo
from prime_rl.envs.protocol import ROLES, EpisodeResult, SampleTokens
from prime_rl.errors import UserError
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
        Samples in the order of their groups. With `filter_zero_advantage` those of advantage zero are left out: no
        policy gradient comes from them, they only widen the loss's denominator. A penalty or bonus of all tokens
        (`loss.kl_coef`, `loss.entropy_coef`) needs them: `RLConfig` refuses the two together. Left out are also those
        whose sampled tokens all lie beyond `seq_len`.
    """
    scored = ScoredBatch([], [], [], [], dict(state))
    values = _advantages(batch, config, scored.state)
    scored.advantages.update(values)
    for group in batch.groups:
        for episode in group.finished:
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
    """Estimate the advantage of each part of each episode, and bring `state` to what it is after this batch."""
    by_episode: dict[str, dict[int, float]] = {}
    for env in dict.fromkeys(group.task.env for group in batch.groups):
        rows = [
            [(one.start.episode, *part) for one in group.finished for part in attempts(one.result).items()]
            for group in batch.groups
            if group.task.env == env
        ]
        groups = [[attempt for *_, attempt in row] for row in rows]
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
                temperature=temperature,
                reward=sequence.reward if result.parts else result.reward,
                is_truncated=result.is_truncated or len(sequence.input_ids) > seq_len,
                **streams,
            )
        )
    return rows if fits else None


def exact_streams(sequence: SampleTokens) -> tuple[npt.NDArray[np.int32], Mask, Floats]:
    """Read ids, loss mask and log-probabilities, each of shape (T,).

    Raises:
        ValueError: a sampled token has no log-probability that it can have been sampled with, or another token has one.
    """
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
