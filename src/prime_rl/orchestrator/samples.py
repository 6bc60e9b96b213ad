"""From a batch of groups to samples: advantages, the zero-advantage filter, and the token streams the trainer executes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prime_rl.envs.protocol import EpisodeResult, SampleTokens
from prime_rl.orchestrator.algorithms import group_advantages
from prime_rl.orchestrator.core import Batch, Finished
from prime_rl.transport.rollouts import Sample

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
    """One sample for each token sequence of an episode, cut to `seq_len` tokens; one whose sampled tokens are all cut off is left out."""
    start, result = episode.start, episode.result
    rows = []
    for number, sequence in enumerate(result.samples):
        _assert_exact(sequence)
        mask = sequence.loss_mask[:seq_len]
        if not any(mask):
            continue
        rows.append(
            Sample(
                sample_id=f"{start.episode}.{number}",
                group_id=str(start.group),
                task_id=start.task.task_id,
                env=start.task.env,
                policy_versions=list(range(episode.first, episode.last + 1)),
                input_ids=sequence.input_ids[:seq_len],
                loss_mask=mask,
                logprobs=sequence.logprobs[:seq_len],
                advantages=[advantage if sampled else 0.0 for sampled in mask],
                temperature=temperature,
                reward=result.reward,
                is_truncated=result.is_truncated or len(sequence.input_ids) > seq_len,
            )
        )
    return rows


def output_tokens(result: EpisodeResult) -> int:
    """Sampled tokens of an episode."""
    return sum(sum(sample.loss_mask) for sample in result.samples)


def _assert_exact(sequence: SampleTokens) -> None:
    """Tokens in, tokens out: every sampled token has the log-probability it was sampled with, and no other token has one."""
    lengths = {len(sequence.input_ids), len(sequence.loss_mask), len(sequence.logprobs)}
    if len(lengths) != 1:
        raise AssertionError(f"a sample's streams have different lengths: {sorted(lengths)}")
    for sampled, logprob in zip(sequence.loss_mask, sequence.logprobs, strict=True):
        if not (sampled or logprob == 0.0) or logprob > 0.0:
            raise AssertionError(f"a {'sampled' if sampled else 'given'} token has log-probability {logprob}")
