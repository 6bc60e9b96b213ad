"""From episodes to samples: advantages by hand, the filter, exact tokens."""

import math
import statistics
from dataclasses import replace

import pytest
import torch

from prime_rl.config.orchestrator import GDPO, GRPO, RAE, RLOO, FilterConfig
from prime_rl.config.trainer import PolicyLoss
from prime_rl.envs.protocol import EpisodeResult, Outcome, Part, SampleTokens
from prime_rl.errors import UserError
from prime_rl.orchestrator.samples import ScoredBatch, score_batch
from prime_rl.orchestrator.scheduler import Batch, Finished, Group, Start, Task
from prime_rl.trainer.loss import STREAMS
from prime_rl.trainer.packing import StepData, collate
from prime_rl.trainer.parallel import World
from prime_rl.trainer.rl.data import document, grouped, normalize
from prime_rl.transport.rollouts import write_batch

TASK = Task("reverse-text", 3, "train/abc")


class Settings:
    """The part of the orchestrator's configuration that scoring reads."""

    def __init__(self, seq_len=100, filter_zero_advantage=True, **algorithms):
        self.algorithms = {"reverse-text": GRPO(), **algorithms}
        self.seq_len = seq_len
        self.filter_zero_advantage = filter_zero_advantage

    def algorithm_of(self, env):
        return self.algorithms[env]

    def filters_of(self, env):
        return FilterConfig()


def tokens(prompt=2, sampled=3, reward=0.0, agent="") -> SampleTokens:
    return SampleTokens.of(
        input_ids=list(range(10, 10 + prompt + sampled)),
        loss_mask=[False] * prompt + [True] * sampled,
        logprobs=[0.0] * prompt + [-0.5] * sampled,
        prompt_len=prompt,
        reward=reward,
        agent=agent,
    )


def episode(number, reward, first=0, last=0, samples=None, **fields) -> Finished[EpisodeResult]:
    result = EpisodeResult(
        "e", "reverse-text", "train/abc", Outcome.OK, reward=reward, samples=samples or [tokens()], **fields
    )
    return Finished(Start(7, number, 0, TASK, first), first, last, result)


def batch(*groups) -> Batch[EpisodeResult]:
    def of_group(number, finished):
        return [replace(one, start=replace(one.start, group=number)) for one in finished]

    return Batch(5, [Group(7 + i, TASK, finished=of_group(7 + i, finished)) for i, finished in enumerate(groups)])


def score(groups: Batch[EpisodeResult], **settings: object) -> ScoredBatch:
    return score_batch(groups, Settings(**settings), {"reverse-text": 1.0}, {})


def test_a_sample_carries_its_lineage_and_its_advantage_on_sampled_tokens_only(tmp_path):
    """Ids, versions from the oldest to the newest, temperature, and the advantage on the loss mask."""
    scored = score_batch(batch([episode(0, 1.0, 2, 4), episode(1, 0.0, 3, 3)]), Settings(), {"reverse-text": 0.7}, {})
    first, second = scored.samples
    assert (first.sample_id, first.group_id, first.task_id, first.env) == ("7.0.0.0", "7", "train/abc", "reverse-text")
    assert first.policy_versions == [2, 3, 4]
    assert first.temperature == 0.7
    assert list(first.advantages) == [0.0, 0.0, 0.5, 0.5, 0.5]
    assert list(second.advantages) == [0.0, 0.0, -0.5, -0.5, -0.5]
    assert scored.trained == ["7.0.0", "7.1.0"]
    write_batch(tmp_path, 0, [first])  # its streams fit


def test_groups_without_spread_are_filtered_and_counted():
    """Zero-advantage filter: no samples, and not counted as trained; switched off they stay."""
    groups = batch([episode(0, 0.5), episode(1, 0.5)], [episode(0, 1.0), episode(1, 0.0)])
    scored = score(groups)
    assert [sample.group_id for sample in scored.samples] == ["8", "8"]
    assert (len(scored.trained), len(scored.filtered)) == (2, 2)
    assert len(score(groups, filter_zero_advantage=False).samples) == 4


@pytest.mark.parametrize("normalization", ["token", "sequence", "group"])
@pytest.mark.parametrize("left_out", [True, False])
def test_what_is_in_the_denominator(normalization, left_out):
    """Contract: attempts of advantage zero count in the denominator if they are kept in the batch, and only then."""
    rewards, lengths = [[1.0, 0.0], [0.5, 0.5]], [[1, 2], [5, 9]]
    groups = [
        [episode(i, reward, samples=[tokens(sampled=n)]) for i, (reward, n) in enumerate(zip(*rows, strict=True))]
        for rows in zip(rewards, lengths, strict=True)
    ]
    samples = score(batch(*groups), filter_zero_advantage=left_out).samples
    packed = collate([document(sample) for sample in samples], len(STREAMS))
    one = World(0, 1, torch.device("cpu"), None)
    names = [sample.group_id for sample in samples]
    step = grouped(StepData([packed], []), names, [range(len(samples))])
    normalize(step, one, PolicyLoss(normalization=normalization))
    advantages, scales = (packed.streams[STREAMS.index(name)] for name in ("advantages", "rl_scale"))
    # A token of the two attempts that differ, of 1 and 2 tokens; the other two have 5 and 9.
    shares = {
        "token": [1 / 3, 1 / 3] if left_out else [1 / 17, 1 / 17],
        "sequence": [1 / 2, 1 / 2 / 2] if left_out else [1 / 4, 1 / 4 / 2],
        "group": [1 / 3, 1 / 3] if left_out else [1 / 2 / 3, 1 / 2 / 3],
    }[normalization]
    assert list((advantages * scales)[:3]) == pytest.approx([0.5 * shares[0], *[-0.5 * shares[1]] * 2])


def played(number, *players) -> Finished[EpisodeResult]:
    """An episode of several parts, each (agent, reward)."""
    parts = [Part(agent, reward, {"win": reward}, {}, 1, False) for agent, reward in players]
    samples = [replace(tokens(reward=one.reward, agent=one.agent), part=i) for i, one in enumerate(parts)]
    return episode(number, statistics.fmean(one.reward for one in parts), samples=samples, parts=parts)


def test_each_player_is_judged_by_its_own_rewards():
    """Of two players of a game the one that won is drawn to what it did, by the rewards of single functions too."""
    games = batch([played(0, ("white", 1.0), ("black", -1.0)), played(1, ("white", -1.0), ("black", 1.0))])
    for algorithm in (GRPO(), GDPO()):
        rows = score(games, **{"reverse-text": algorithm}).samples
        assert [row.reward for row in rows] == [1.0, -1.0, -1.0, 1.0]
        assert all(row.advantages[-1] * row.reward > 0 for row in rows)


def test_each_of_several_conversations_of_one_agent_is_an_attempt():
    """Best of two within an episode: all four of two episodes are compared, each by its own reward."""
    scored = score(batch([played(0, ("s", 1.0), ("s", 0.0)), played(1, ("s", 0.0), ("s", 1.0))]))
    assert [float(row.advantages[-1]) for row in scored.samples] == [0.5, -0.5, -0.5, 0.5]
    assert scored.advantages == {"7.0.0": {0: 0.5, 1: -0.5}, "7.1.0": {0: -0.5, 1: 0.5}}


def test_samples_are_cut_to_seq_len_and_marked_truncated():
    """The trainer never meets a sample longer than its micro-batch; one without sampled tokens left is left out."""
    rows = score(batch([episode(0, 1.0), episode(1, 0.0)]), seq_len=4).samples
    assert [len(row.input_ids) for row in rows] == [4, 4]
    assert all(row.is_truncated for row in rows)
    scored = score(batch([episode(0, 1.0), episode(1, 1.0)]), seq_len=2)
    assert (scored.samples, scored.trained, scored.filtered) == ([], [], [])
    assert scored.truncated == ["7.0.0", "7.1.0"]  # whatever their advantage is


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
    """Tokens in, tokens out, checked for every sample; the error names environment and episode."""
    sequence = tokens()
    damage(sequence)
    with pytest.raises(UserError, match="environment 'reverse-text', episode 7.0.0: a "):
        score(batch([episode(0, 1.0, samples=[sequence]), episode(1, 0.0)]))


def test_every_environment_has_its_own_algorithm_and_its_state():
    """Contract: groups are scored by the algorithm of their environment; what it remembers comes back, by environment, and is not changed before."""
    other = Task("poker", 0, "t")
    one = batch([episode(0, 1.0), episode(1, 0.0), episode(2, 0.0)]).groups
    finished = [replace(episode(i, 1.0 - i), start=Start(9, i, 0, other, 0)) for i in range(2)]
    settings = Settings(**{"reverse-text": RLOO(), "poker": RAE(decay=0.5)})
    given = {"poker": {"": 1.0}}
    scored = score_batch(
        Batch(5, [*one, Group(9, other, finished=finished)]), settings, {"reverse-text": 1.0, "poker": 1.0}, given
    )
    worth = {sample.sample_id: float(sample.advantages.sum() / 3) for sample in scored.samples}
    # poker: 1 - 1 = 0, which is filtered; the average stays 1; then 0 - 1 = -1, and it falls to 0.5
    assert worth == {"7.0.0.0": 1.0, "7.1.0.0": -0.5, "7.2.0.0": -0.5, "9.1.0.0": -1.0}
    assert scored.filtered == ["9.0.0"]
    assert (scored.state, given) == ({"poker": {"": 0.5}}, {"poker": {"": 1.0}})
