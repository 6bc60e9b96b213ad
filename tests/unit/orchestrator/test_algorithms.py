"""Advantages against values worked out by hand, and what must not matter to them on random ragged batches."""

import math
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest

from conftest import REPOSITORY
from prime_rl.config.orchestrator import (
    GDPO,
    GRPO,
    OPO,
    RAE,
    RLOO,
    AlgorithmConfig,
    CustomAlgorithm,
    LinearPenalty,
    MaxRL,
    OverlongPenalty,
    ReinforcePP,
    RewardAlgorithm,
)
from prime_rl.errors import UserError
from prime_rl.orchestrator.algorithms import ESTIMATORS, Trajectory, advantages, carries_signal, penalized
from support.scripted import follow, fresh

Groups = list[list[Trajectory]]


def rewarded(*rewards: float) -> list[Trajectory]:
    return [Trajectory(reward) for reward in rewards]


def of_one(config: AlgorithmConfig, group: Sequence[Trajectory]) -> list[float]:
    """The advantages of a batch of one group."""
    return advantages(config, [group], {})[0][0]


@pytest.mark.parametrize(
    ("config", "group", "expected"),
    [
        (GRPO(), rewarded(1.0, 0.0, 0.0, 0.0), [0.75, -0.25, -0.25, -0.25]),
        (GRPO(), rewarded(0.2, 0.4), [-0.1, 0.1]),
        (GRPO(), rewarded(0.3, 0.3, 0.3), [0.0, 0.0, 0.0]),
        # The population std is sqrt(3) / 4 = 0.4330127.
        (GRPO(std_normalize=True), rewarded(1.0, 0.0, 0.0, 0.0), [0.75 / 0.4330137, *[-0.25 / 0.4330137] * 3]),
        (RLOO(), rewarded(1.0, 0.0, 0.0), [1.0, -0.5, -0.5]),  # the others' means are 0, 0.5 and 0.5
        # Rewards 1 and 0 of 30 and 10 tokens: the baseline is 0.75.
        (OPO(), [Trajectory(1.0, output_tokens=30), Trajectory(0.0, output_tokens=10)], [0.25, -0.75]),
        (MaxRL(), rewarded(1.0, 0.0, 0.0, 0.0), [3.0, -1.0, -1.0, -1.0]),  # (1 - 1/4) / (1/4) = 3
        (MaxRL(), rewarded(0.0, 0.0), [0.0, 0.0]),  # nobody succeeds
        (MaxRL(), rewarded(1.0, -2.0), [0.0, 0.0]),  # the mean is below zero
        # Where the other attempts failed there is nothing to compare with: 0, not the reward.
        *(
            (config, [Trajectory(0.7, output_tokens=3, rewards={"right": 0.7})], [0.0])
            for config in (GRPO(), GRPO(std_normalize=True), RLOO(), OPO(), MaxRL(), GDPO())
        ),
    ],
)
def test_advantages_of_one_group(config: AlgorithmConfig, group: list[Trajectory], expected: list[float]) -> None:
    assert of_one(config, group) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_reinforce_pp() -> None:
    """Rewards 1, 1 and 0, 0: mean 1/2 and std 1/2 over the batch; with each group's mean taken off nothing is left."""
    groups = [rewarded(1.0, 1.0), rewarded(0.0, 0.0)]
    assert advantages(ReinforcePP(), groups, {})[0] == [
        pytest.approx([1, 1], rel=1e-5),
        pytest.approx([-1, -1], rel=1e-5),
    ]
    assert advantages(ReinforcePP(group_baseline=True), groups, {})[0] == [[0.0, 0.0], [0.0, 0.0]]


def test_rae() -> None:
    """Decay 1/2, rewards 1, 1, 0: averages before them 0, 1/2, 3/4. Each agent has its own; the next batch goes on."""
    values, state = advantages(RAE(decay=0.5), [rewarded(1.0, 1.0), rewarded(0.0)], {})
    assert values == [[1.0, 0.5], [-0.75]]
    assert state == {"": 0.375}
    game = [Trajectory(1.0, agent="white"), Trajectory(-1.0, agent="black")]
    values, after = advantages(RAE(decay=0.5), [game], {**state, "white": 1.0})
    assert values == [[0.0, -1.0]]
    assert after == {"": 0.375, "white": 1.0, "black": -0.5}


def test_gdpo() -> None:
    """Two functions of other scales weigh the same; the sum of the rewards does not matter. std of (0, 1) is 1/2, of
    (0, 10) is 5. A trajectory without the rewards that it is to be judged by is named."""
    group = [
        Trajectory(7.0, rewards={"right": 1.0, "short": 0.0}),
        Trajectory(7.0, rewards={"right": 0.0, "short": 10.0}),
    ]
    both = [Trajectory(1.0, rewards={"right": right, "short": right}) for right in (1.0, 0.0)]
    for weights, sums in (({}, [0.0, 0.0, 2.0, -2.0]), ({"right": 3.0, "short": 1.0}, [2.0, -2.0, 4.0, -4.0])):
        values, _ = advantages(GDPO(weights=weights), [group, both], {})
        std = math.sqrt(sum(value * value for value in sums) / 4)
        assert [*values[0], *values[1]] == pytest.approx([value / std for value in sums], abs=1e-5)
    for weights, rewards, known in (({}, {}, "none"), ({"b": 1.0}, {"a": 1.0}, "a")):
        with pytest.raises(UserError, match=f"gdpo needs rewards of single functions .* the environment gives {known}"):
            of_one(GDPO(weights=weights), [Trajectory(1.0, rewards=rewards)])


def test_length_penalties() -> None:
    """Linear, mean 1/2: 0.25 · 10/20 + 0.1 · 5/5 + 0.1 · 1/2 = 0.275 of it, and 0.25 + 0.1 · 2/5 + 0.1 = 0.39 of it;
    none where the mean is negative, for length would be rewarded. Overlong, 100 tokens of room, the last 20 a cache:
    nothing up to 80, a half at 90, all of it from 100 on."""
    group = [
        Trajectory(1.0, output_tokens=10, total_tokens=15),
        Trajectory(0.0, output_tokens=20, total_tokens=22, turns=2),
    ]
    rewards = [trajectory.reward for trajectory in penalized(group, LinearPenalty())]
    assert rewards == pytest.approx([1 - 0.1375, -0.195])
    half = (1 - 0.1375 + 0.195) / 2
    assert of_one(GRPO(length_penalty=LinearPenalty()), group) == pytest.approx([half, -half])
    negative = [Trajectory(-1.0, 10, 10), Trajectory(0.5, 90, 90)]
    assert penalized(negative, LinearPenalty()) == negative
    group = [Trajectory(1.0, output_tokens=tokens) for tokens in (10, 80, 90, 100, 500)]
    penalty = OverlongPenalty(max_tokens=100, cache=20)
    assert [trajectory.reward for trajectory in penalized(group, penalty)] == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert penalized(group, None) == group


def test_penalties_compare_an_agent_with_its_own_kind() -> None:
    """Contract: in a zero-sum game, too, length costs the winner's kind something; negative rewards are left alone."""
    config = GRPO(length_penalty={"type": "linear", "output": 1.0, "input": 0.0, "turns": 0.0})
    game = [
        Trajectory(reward, length, agent=agent) for length in (10, 1000) for agent, reward in (("w", 1.0), ("b", -1.0))
    ]
    white, black, longer, other = of_one(config, game)
    assert white > 0 > longer
    assert (black, other) == (0.0, 0.0)


CONFIGS: list[AlgorithmConfig] = [
    GRPO(),
    GRPO(std_normalize=True),
    RLOO(),
    OPO(),
    MaxRL(),
    ReinforcePP(),
    ReinforcePP(group_baseline=True),
    RAE(decay=0.7),
    GDPO(),
    GDPO(weights={"a": 2.0, "b": -0.5}),
]


@pytest.mark.parametrize("config", CONFIGS, ids=[f"{i} {one.type}" for i, one in enumerate(CONFIGS)])
def test_a_group_without_signal(config: AlgorithmConfig) -> None:
    """Contract: no signal means exactly none, however the batch is normalized; only comparisons may say so."""
    alike = [Trajectory(0.3, 10, 20, rewards={"a": 0.1, "b": 0.2})] * 3
    differing = [*alike, Trajectory(1.0, 10, 20, rewards={"a": 1.0, "b": 0.0})]
    assert carries_signal(config, alike) != config.group_relative
    assert carries_signal(config, differing)
    if config.group_relative:
        assert advantages(config, [differing, alike], {})[0][1] == [0.0] * 3


def test_every_algorithm_by_reward_has_an_estimator() -> None:
    """Contract: no configured algorithm fails at the first batch for want of one."""
    assert ESTIMATORS.keys() == {one.model_fields["type"].default or "custom" for one in get_args(RewardAlgorithm)}


def best_alone(group: list[Trajectory], *, margin: float = 0.0) -> list[float]:
    best = max(trajectory.reward for trajectory in group) - margin
    return [1.0 if trajectory.reward >= best else 0.0 for trajectory in group]


def nonsense(group: list[Trajectory], value: float = math.nan) -> list[float]:
    return [value] * len(group)


def own(function: str, **args: float) -> CustomAlgorithm:
    return CustomAlgorithm(path=function if ":" in function else f"{__file__}:{function}", args=args)


def test_an_algorithm_of_ones_own() -> None:
    """Contract: a function gets a group's trajectories and arguments; a wrong one, or its numbers, are refused."""
    config = own("best_alone", margin=0.3)
    assert of_one(config, rewarded(1.0, 0.8, 0.2)) == [1.0, 1.0, 0.0]
    assert carries_signal(config, rewarded(1.0, 0.8))
    for wrong, message in (
        (CustomAlgorithm(path="nothing"), r"'nothing' \(module:name or file.py:name\) cannot be imported"),
        (own("no_such_module:f"), "algorithm.path: .* No module named 'no_such_module'"),
        (own("best_alone", margins=1), "unexpected keyword argument 'margins'"),
        (own("nonsense"), r"gave \[nan\] for 1 trajectories"),
        (own("nonsense", value=1e39), r"gave \[1e\+39\] for 1 trajectories"),
    ):
        with pytest.raises(UserError, match=message):
            of_one(wrong, rewarded(0.0))


async def test_the_worked_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The orchestrator trains on what docs/guides/algorithms.md adds, one file, one line, in three groups of two."""
    text = (REPOSITORY / "docs" / "guides" / "algorithms.md").read_text()
    file, line = (
        re.search(rf"<!-- example: {name} -->\n```\w+\n(.*?)```", text, re.DOTALL)[1] for name in ("file", "line")
    )
    monkeypatch.chdir(tmp_path)
    Path("ranks.py").write_text(file)
    (tmp_path / "run").mkdir()
    world = fresh(tmp_path / "run", **tomllib.loads(line))
    await follow(world, (1, 2, 3))
    for step in range(3):
        rows = sorted(world.rows(step), key=lambda row: row.reward)
        assert [float(row.advantages[-1]) for row in rows] == [-0.5, 0.5]
