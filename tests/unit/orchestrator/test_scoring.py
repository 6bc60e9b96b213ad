"""From episodes to samples: advantages by hand, the filter, exact tokens."""

import math

import pytest

from prime_rl.config.orchestrator import GRPO
from prime_rl.envs.protocol import EpisodeResult, Outcome, SampleTokens
from prime_rl.orchestrator.algorithms import group_advantages
from prime_rl.orchestrator.core import Batch, Finished, Group, Start, Task
from prime_rl.orchestrator.samples import score_batch

TASK = Task("reverse-text", 3, "train/abc")


class Settings:
    """The part of the orchestrator's configuration that scoring reads."""

    def __init__(self, seq_len=100, filter_zero_advantage=True):
        self.algorithm = GRPO()
        self.seq_len = seq_len
        self.filter_zero_advantage = filter_zero_advantage


def tokens(prompt=2, sampled=3) -> SampleTokens:
    return SampleTokens.of(
        input_ids=list(range(10, 10 + prompt + sampled)),
        loss_mask=[False] * prompt + [True] * sampled,
        logprobs=[0.0] * prompt + [-0.5] * sampled,
        prompt_len=prompt,
        reward=0.0,
    )


def episode(number, reward, first=0, last=0, samples=None, **fields) -> Finished[EpisodeResult]:
    result = EpisodeResult(
        "e", "reverse-text", "train/abc", Outcome.OK, reward=reward, samples=samples or [tokens()], **fields
    )
    return Finished(Start(7, number, 0, TASK, first), first, last, result)


def batch(*groups) -> Batch[EpisodeResult]:
    return Batch(5, [Group(7 + i, TASK, finished=list(finished)) for i, finished in enumerate(groups)])


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0, 0.0, 0.0], [0.75, -0.25, -0.25, -0.25]),
        ([0.2, 0.4], [-0.1, 0.1]),
        ([0.3, 0.3, 0.3], [0.0, 0.0, 0.0]),
        ([0.1], [0.0]),
    ],
)
def test_grpo_advantages_are_rewards_minus_the_mean_of_the_group(rewards, expected):
    """Values worked out by hand; equal rewards give exact zeros."""
    assert group_advantages(GRPO(), rewards) == pytest.approx(expected, abs=1e-12)


def test_grpo_can_divide_by_the_population_std():
    """[1, 0, 0, 0]: std = sqrt(3)/4 = 0.4330127."""
    values = group_advantages(GRPO(std_normalize=True), [1.0, 0.0, 0.0, 0.0])
    assert values == pytest.approx([0.75 / 0.4330137, *[-0.25 / 0.4330137] * 3], rel=1e-6)


def test_equal_rewards_that_are_no_binary_fractions_give_exact_zeros():
    """0.1 + 0.1 + 0.1 is not 0.3 in floating point: the filter must not depend on that."""
    assert group_advantages(GRPO(), [0.1, 0.1, 0.1]) == [0.0, 0.0, 0.0]


def test_a_sample_carries_its_lineage_and_its_advantage_on_sampled_tokens_only():
    """Ids, versions from the oldest to the newest, temperature, and the advantage on the loss mask."""
    scored = score_batch(batch([episode(0, 1.0, 2, 4), episode(1, 0.0, 3, 3)]), Settings(), {"reverse-text": 0.7})
    first, second = scored.samples
    assert (first.sample_id, first.group_id, first.task_id, first.env) == ("7.0.0.0", "7", "train/abc", "reverse-text")
    assert first.policy_versions == [2, 3, 4]
    assert first.temperature == 0.7
    assert list(first.advantages) == [0.0, 0.0, 0.5, 0.5, 0.5]
    assert list(second.advantages) == [0.0, 0.0, -0.5, -0.5, -0.5]
    assert scored.trained == ["7.0.0", "7.1.0"]
    first.check()


def test_groups_without_spread_are_filtered_and_counted():
    """Zero-advantage filter: no samples, and not counted as trained; switched off they stay."""
    groups = batch([episode(0, 0.5), episode(1, 0.5)], [episode(0, 1.0), episode(1, 0.0)])
    assert [s.group_id for s in score_batch(groups, Settings(), {"reverse-text": 1.0}).samples] == ["7", "7"]
    assert len(score_batch(groups, Settings(), {"reverse-text": 1.0}).trained) == 2
    assert len(score_batch(groups, Settings(), {"reverse-text": 1.0}).filtered) == 2
    assert len(score_batch(groups, Settings(filter_zero_advantage=False), {"reverse-text": 1.0}).samples) == 4


def test_samples_are_cut_to_seq_len_and_marked_truncated():
    """The trainer never meets a sample longer than its micro-batch; one without sampled tokens left is left out."""
    rows = score_batch(batch([episode(0, 1.0), episode(1, 0.0)]), Settings(seq_len=4), {"reverse-text": 1.0}).samples
    assert [len(row.input_ids) for row in rows] == [4, 4]
    assert all(row.is_truncated for row in rows)
    scored = score_batch(batch([episode(0, 1.0), episode(1, 1.0)]), Settings(seq_len=2), {"reverse-text": 1.0})
    assert (scored.samples, scored.trained, scored.filtered) == ([], [], [])
    assert scored.truncated == [
        "7.0.0",
        "7.1.0",
    ]  # whatever their advantage is: they are not dropped for want of a signal


def test_the_order_within_a_group_does_not_depend_on_who_finished_first():
    """Determinism: attempts are scored and written in their order."""
    scored = score_batch(batch([episode(1, 0.0), episode(0, 1.0)]), Settings(), {"reverse-text": 1.0})
    assert [sample.sample_id for sample in scored.samples] == ["7.0.0.0", "7.1.0.0"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.logprobs.pop(),
        lambda s: s.logprobs.__setitem__(0, -1.0),
        lambda s: s.logprobs.__setitem__(3, 0.5),
        lambda s: s.logprobs.__setitem__(3, math.nan),
        lambda s: setattr(s, "loss_mask", s.loss_mask + b"\1"),
    ],
)
def test_inexact_tokens_stop_the_run(damage):
    """Tokens in, tokens out, asserted per sample."""
    sequence = tokens()
    damage(sequence)
    with pytest.raises(AssertionError):
        score_batch(batch([episode(0, 1.0, samples=[sequence]), episode(1, 0.0)]), Settings(), {"reverse-text": 1.0})
