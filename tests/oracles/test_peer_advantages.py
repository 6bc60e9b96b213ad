"""Advantages against verl's and TRL's own. Where ours mean something else on purpose, `factor` says by how much.

Rewards are whole numbers of about a thousand, so that the small numbers added to standard deviations, which differ, do not count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
from pydantic import TypeAdapter

from prime_rl.config.orchestrator import AlgorithmConfig, ByReward
from prime_rl.orchestrator.algorithms import Attempt, advantages, penalized
from support.oracles import Answers

Floats = npt.NDArray[np.float64]
EXACT, SINGLE = 1e-8, 2e-6  # TRL computes in float32, and so does verl's gdpo

GROUPS = "aaaabbbbccccdddd"  # TRL has groups of one size
RAGGED = "aaabbbbbccddddde"  # verl may have others, also a group of one
_draw = np.random.default_rng(0)
REWARDS = _draw.integers(0, 4096, len(GROUPS)).astype(float)
FUNCTIONS = {"first": REWARDS, "second": _draw.integers(-500, 500, len(GROUPS)).astype(float)}
LENGTHS = _draw.integers(1, 40, len(GROUPS)).tolist()
ONE_TOKEN = [1] * len(GROUPS)  # where verl's mean over tokens is one over episodes


def of_groups(groups: str, of: Callable[[Floats], Any], values: Floats = REWARDS) -> Floats:
    """(B,) what `of` gives for the values of each attempt's group."""
    names = np.array(list(groups))
    return np.array([of(values[names == name]) for name in groups], dtype=float)


def sample_over_population(count: Any) -> Any:
    """The sample standard deviation divided by that of the population."""
    return np.sqrt(count / (count - 1))


@dataclass(frozen=True)
class Case:
    """An algorithm of ours, and what a peer is asked for the same rewards.

    Args:
        config: As in `orchestrator.algorithm`.
        factor: What our advantages are times the peer's, of each attempt.
        rewards: What the peer gets in place of `REWARDS`.
    """

    config: dict[str, Any]
    oracle: str
    call: dict[str, Any]
    groups: str = GROUPS
    factor: float | Floats = 1.0
    lengths: list[int] | None = None
    rewards: Floats | None = None

    @property
    def question(self) -> dict[str, Any]:
        if self.oracle == "trl":
            return {"functions": [REWARDS.tolist()], "settings": {}} | self.call
        rewards, lengths = REWARDS if self.rewards is None else self.rewards, self.lengths or LENGTHS
        return {"rewards": rewards.tolist(), "groups": list(self.groups), "lengths": lengths} | self.call


GROUPS_OF_SEVERAL = RAGGED.replace("e", "d")
COUNTS = of_groups(GROUPS_OF_SEVERAL, len)
BATCH_STD = sample_over_population(len(GROUPS))
PENALIZED = {"type": "overlong", "max_tokens": 32, "cache": 16, "scale": 100}
WEIGHTS = {"first": 1000.0, "second": 2000.0}  # so large for the same reason
BOTH = [values.tolist() for values in FUNCTIONS.values()]
GDPO_VERL = {
    "estimator": "gdpo",
    "functions": {name: values.tolist() for name, values in FUNCTIONS.items()},
    "config": {"gdpo_reward_keys": list(WEIGHTS), "gdpo_reward_weights": list(WEIGHTS.values())},
}
GDPO_TRL = {"trainer": "grpo", "functions": BOTH, "settings": {"multi_objective_aggregation": "normalize_then_sum"}}
OF_SEVERAL = 1.0 * (of_groups(RAGGED, len) > 1)  # 0 where an attempt is alone in its group
OF_SIZE_4 = sample_over_population(4)

CASES: dict[str, Case] = {
    # A group of one is 0 here and keeps its reward in verl.
    "grpo": Case({"type": "grpo"}, "verl", {"estimator": "grpo", "by_std": False}, RAGGED, OF_SEVERAL),
    "grpo, TRL": Case({"type": "grpo"}, "trl", {"trainer": "grpo", "settings": {"scale_rewards": "none"}}),
    # Divided by the standard deviation of the population here, of the sample there.
    "grpo by std": Case(
        {"type": "grpo", "std_normalize": True}, "verl", {"estimator": "grpo"}, GROUPS_OF_SEVERAL, sample_over_population(COUNTS)
    ),
    "grpo by std, TRL": Case({"type": "grpo", "std_normalize": True}, "trl", {"trainer": "grpo"}, factor=OF_SIZE_4),
    "echo": Case({"type": "echo", "weights": {"tool": 0.1}}, "verl", {"estimator": "grpo", "by_std": False}),
    "echo by std": Case({"type": "echo", "std_normalize": True}, "verl", {"estimator": "grpo"}, factor=OF_SIZE_4),
    "rloo": Case({"type": "rloo"}, "verl", {"estimator": "rloo_vectorized"}, RAGGED),
    "rloo, TRL": Case({"type": "rloo"}, "trl", {"trainer": "rloo"}),
    "opo": Case({"type": "opo"}, "verl", {"estimator": "opo"}, RAGGED, OF_SEVERAL),
    # Neither peer has it: it is grpo of rewards divided by the mean of their group.
    "max_rl": Case(
        {"type": "max_rl"}, "verl", {"estimator": "grpo", "by_std": False}, GROUPS_OF_SEVERAL,
        rewards=REWARDS / of_groups(GROUPS_OF_SEVERAL, np.mean),
    ),
    # By episodes where verl normalizes by tokens; the standard deviation is the population's here.
    "reinforce_pp": Case(
        {"type": "reinforce_pp"}, "verl", {"estimator": "reinforce_plus_plus"}, factor=BATCH_STD, lengths=ONE_TOKEN
    ),
    "reinforce_pp, group_baseline": Case(
        {"type": "reinforce_pp", "group_baseline": True}, "verl", {"estimator": "reinforce_plus_plus_baseline"},
        GROUPS_OF_SEVERAL, BATCH_STD, ONE_TOKEN,
    ),
    # TRL's own name for it: RLOO, normalized over the batch.
    "reinforce_pp, group_baseline, TRL": Case(
        {"type": "reinforce_pp", "group_baseline": True}, "trl", {"trainer": "rloo", "settings": {"normalize_advantages": True}},
        factor=BATCH_STD,
    ),
    "gdpo": Case({"type": "gdpo", "weights": WEIGHTS}, "verl", GDPO_VERL, factor=BATCH_STD, lengths=ONE_TOKEN),
    "gdpo, TRL": Case(
        {"type": "gdpo", "weights": WEIGHTS}, "trl",
        GDPO_TRL | {"settings": GDPO_TRL["settings"] | {"reward_weights": list(WEIGHTS.values())}}, factor=BATCH_STD,
    ),
    # Without `weights` all functions weigh the same, as in TRL without `reward_weights`.
    "gdpo, equal, TRL": Case(
        {"type": "gdpo"}, "trl", GDPO_TRL | {"settings": GDPO_TRL["settings"] | {"reward_weights": [1000.0, 1000.0]}}, factor=BATCH_STD,
    ),
    "length penalty": Case(
        {"type": "grpo", "length_penalty": PENALIZED}, "verl", {"estimator": "grpo", "by_std": False},
        rewards=REWARDS - 100 * np.clip((np.array(LENGTHS) - 16) / 16, 0, 1),
    ),
}  # fmt: skip

NOT_COMPARED = {
    "custom": "advantages are the user's own function",
    "opd": "no advantage: its tokens feed the component ref_kl (test_peer_losses)",
    "opsd": "no advantage: its tokens feed the component ref_kl (test_peer_losses)",
    "sft": "no advantage: its tokens feed the component ce (test_peer_losses)",
    "rae": "neither peer has moving averages of an agent's rewards",
}


def question(oracle: str) -> dict[str, Any]:
    calls = {name: case.question for name, case in CASES.items() if case.oracle == oracle}
    return {
        "advantages": calls,
        "overlong": {key: PENALIZED[key] for key in ("max_tokens", "cache")} | {"lengths": LENGTHS},
    }


def attempts() -> list[Attempt]:
    return [
        Attempt(reward, output_tokens=length, rewards=dict(zip(FUNCTIONS, rewards, strict=True)))
        for reward, length, *rewards in zip(REWARDS, LENGTHS, *FUNCTIONS.values(), strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_advantages_agree(name: str, answers: Answers) -> None:
    """Contract: the advantages of a batch of groups are the peer's, the same at every token, but for what is said to differ."""
    case = CASES[name]
    answer = answers(case.oracle)["advantages"][name]
    tokens = [row if isinstance(row, list) else [row] for row in answer]
    expected = np.array([row[-1] for row in tokens])
    assert all(value == row[-1] for row in tokens for value in row)
    names = list(dict.fromkeys(case.groups))
    members = [[one for one, group in zip(attempts(), case.groups, strict=True) if group == name] for name in names]
    config = TypeAdapter(AlgorithmConfig).validate_python(case.config)
    values = [value for group in advantages(config, members, {})[0] for value in group]
    tolerance = SINGLE if case.oracle == "trl" or config.type == "gdpo" else EXACT
    np.testing.assert_allclose(values, expected * case.factor, rtol=tolerance, atol=tolerance * np.abs(expected).max())


@pytest.mark.slow
def test_overlong_penalty(answers: Answers) -> None:
    """Contract: DAPO's penalty is TRL's, times `scale`."""
    config = TypeAdapter(AlgorithmConfig).validate_python({"type": "grpo", "length_penalty": PENALIZED})
    assert isinstance(config, ByReward)
    penalties = [after.reward - before.reward for before, after in zip(attempts(), penalized(attempts(), config.length_penalty), strict=True)]  # fmt: skip
    assert len(set(penalties)) > 3
    np.testing.assert_allclose(penalties, 100 * np.array(answers("trl")["overlong"]), rtol=1e-12)


def choices(annotation: Any) -> set[Any]:
    """What is to be tried of a setting: both of a switch; else None, which any value stands for."""
    return {True, False} if annotation is bool else {None}


def test_every_advantage_is_compared() -> None:
    """Contract: a new algorithm, or a new setting of one, is compared with a peer, or named with a reason."""
    settings_of_algorithms, settings_compared = set(), set()
    for algorithm in get_args(AlgorithmConfig):
        kind = algorithm.model_fields["type"].default
        if kind not in NOT_COMPARED:
            settings_of_algorithms.add((kind, "type", None))
            own = {name: field for name, field in algorithm.model_fields.items() if name not in ByReward.model_fields}
            settings_of_algorithms |= {(kind, name, choice) for name, field in own.items() if name != "type" for choice in choices(field.annotation)}  # fmt: skip
    for case in CASES.values():
        config = TypeAdapter(AlgorithmConfig).validate_python(case.config)
        settings_compared.add((config.type, "type", None))
        for name, field in type(config).model_fields.items():
            if choices(field.annotation) != {None}:
                settings_compared.add((config.type, name, getattr(config, name)))
            elif name in config.model_fields_set:
                settings_compared.add((config.type, name, None))
    assert settings_of_algorithms - settings_compared - NOT_COMPARED.keys() == set()
    assert set(ByReward.model_fields) == {"length_penalty"}
