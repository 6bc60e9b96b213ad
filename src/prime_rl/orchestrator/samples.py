"""From a batch of groups to samples: advantages, the zero-advantage filter, and the token streams the trainer executes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from prime_rl.envs.protocol import EpisodeResult, SampleTokens
from prime_rl.orchestrator.algorithms import group_advantages
from prime_rl.orchestrator.core import Batch, Finished
from prime_rl.transport.rollouts import Sample, as_array

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig


@dataclass(frozen=True)
class Scored:
    """A batch's samples, and what became of its finished episodes, by name."""

    samples: list[Sample]
    trained: list[str]
    filtered: list[str]  # of advantage zero
    truncated: list[str]  # all sampled tokens are cut off


def score_batch(batch: Batch[EpisodeResult], config: "OrchestratorConfig", temperatures: dict[str, float]) -> Scored:
    """Score every group and build the samples of the episodes that carry signal.

    Args:
        temperatures: The sampling temperature of each environment.

    Returns:
        Samples in the order of their groups. With `filter_zero_advantage` those of advantage zero are left out: they would only widen the
        loss's denominator. So are those whose sampled tokens all lie beyond `seq_len`.
    """
    scored = Scored([], [], [], [])
    for group in batch.groups:
        finished = sorted(group.finished, key=lambda episode: episode.start.number)
        advantages = group_advantages(config.algorithm, [episode.result.reward for episode in finished])
        for episode, advantage in zip(finished, advantages, strict=True):
            rows = episode_samples(episode, advantage, temperatures[group.task.env], config.seq_len)
            if not rows:
                scored.truncated.append(episode.start.episode)
            elif config.filter_zero_advantage and advantage == 0.0:
                scored.filtered.append(episode.start.episode)
            else:
                scored.trained.append(episode.start.episode)
                scored.samples.extend(rows)
    return scored


def episode_samples(
    episode: Finished[EpisodeResult], advantage: float, temperature: float, seq_len: int
) -> list[Sample]:
    """One sample for each token sequence of an episode, cut to `seq_len` tokens; one whose sampled tokens are all cut off is left out.

    Its streams are arrays, of the types that are written: no work a token in Python, and a fourth of the memory of lists.
    """
    start, result = episode.start, episode.result
    rows = []
    for number, sequence in enumerate(result.samples):
        ids, mask, logprobs = exact_streams(sequence)
        mask = mask[:seq_len]
        if not mask.any():
            continue
        rows.append(
            Sample(
                sample_id=f"{start.episode}.{number}",
                group_id=str(start.group),
                task_id=start.task.task_id,
                env=start.task.env,
                policy_versions=list(range(episode.first, episode.last + 1)),
                input_ids=ids[:seq_len],
                loss_mask=mask,
                logprobs=logprobs[:seq_len],
                advantages=mask * np.float32(advantage),
                temperature=temperature,
                reward=result.reward,
                is_truncated=result.is_truncated or len(sequence.input_ids) > seq_len,
            )
        )
    return rows


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
