"""Losses, their gradients and advantages against verl's and TRL's own, in float64, from samples to the loss of the
step.

Where ours means something else on purpose, `factor` says by how much. Sequences, groups and the batch have numbers of
tokens that are powers of two, so that our weights, which are float32, are exact. Rewards are about a thousand, so that
the small numbers added to standard deviations, which differ, do not count.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import numpy as np
import numpy.typing as npt
import pytest
import torch
from pydantic import BaseModel, TypeAdapter

from prime_rl.config.orchestrator import AlgorithmConfig, ByReward
from prime_rl.config.trainer import LossConfig, PolicyLoss
from prime_rl.orchestrator.algorithms import Attempt, advantages
from prime_rl.trainer.loss import STREAMS
from prime_rl.trainer.parallel import World
from prime_rl.transport.rollouts import Sample
from support import trainer as support
from support.losses import slopes, step_loss

world = support.world
Floats = npt.NDArray[np.float64]
Config = dict[str, Any]
Call = dict[str, Any]
Answers = Callable[[str], Any]
EXACT, SINGLE = 1e-8, 2e-6  # verl adds 1e-8 to denominators; TRL's advantages and verl's gdpo are float32


def validated(union: Any, config: Config) -> Any:
    return TypeAdapter(union).validate_python(config)


# ---- losses

LENGTHS = np.array([2, 2, 4, 8, 8, 8, 16, 16])  # sampled tokens of each sequence
GROUPS = "aaabccdd"
TOKENS = 24  # of each sequence, beside one of the prompt
FIXED_LENGTH = 32


def make_batch() -> dict[str, Floats]:
    draw, shape = np.random.default_rng(0), (len(LENGTHS), TOKENS)

    def float32(values: Floats) -> Floats:
        return values.astype(np.float32).astype(np.float64)

    mask = np.argsort(np.argsort(draw.uniform(size=shape), axis=1), axis=1) < LENGTHS[:, None]
    old = float32(-draw.uniform(0.05, 3, shape))
    logprob = np.minimum(old + draw.normal(0, 0.5, shape) + draw.normal(0, 0.1, (len(LENGTHS), 1)), -0.01)
    return {
        "mask": mask.astype(float),
        "old": old,
        "logprob": logprob,
        "reference": float32(logprob + draw.uniform(-2, 2, shape)),  # at most 7.4 times as probable as to the policy
        "entropy": draw.uniform(0, 2, shape),
        "advantages": float32(draw.normal(size=len(LENGTHS))),
    }


BATCH = make_batch()
MASK, ADVANTAGES = BATCH["mask"], BATCH["advantages"]
HALF = np.arange(len(LENGTHS)) >= 6  # the last group, which has half of the sampled tokens
GEOMETRIC = np.exp(((BATCH["logprob"] - BATCH["old"]) * MASK).sum(1) / LENGTHS)[:, None]
SURVIVORS = ((GEOMETRIC > 0.9) & (GEOMETRIC < 1.1)) * MASK
PULL = BATCH["reference"] - BATCH["logprob"]  # the advantage of the component ref_kl


@dataclass(frozen=True)
class Loss:
    """A loss of ours, and calls of a peer whose sum, each times its weight, it must be.

    Args:
        config: As in `trainer.loss`.
        factor: What our gradient is times the peer's, of each token; `entropy_factor` the same in the entropies.
        has_value: The peer's loss has our value, too.
        trained: [B] sequences that the orchestrator sends: those without advantage are left out by default.
    """

    config: Config
    calls: list[tuple[float, Call]]
    peer: str = "verl"
    factor: float | Floats = 1.0
    entropy_factor: float | Floats = 1.0
    has_value: bool = True
    trained: npt.NDArray[np.bool_] | None = None
    component: str = "rl"


MEAN_OF_SEQUENCES = {"aggregation": "seq-mean-token-mean"}


def verl(of: str, advantages: Floats = ADVANTAGES[:, None], **call: Any) -> Call:
    per_token = np.broadcast_to(advantages, MASK.shape).tolist()
    return {"of": of, "advantages": per_token, "aggregation": "token-mean", **call}


def clip(low: float, high: float, dual: float = 1e9) -> Call:
    return {"settings": {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": dual}}


def clipped(advantages: Floats = ADVANTAGES[:, None], **call: Any) -> tuple[float, Call]:
    """verl's form of `GRPO`."""
    return 1, verl("vanilla", advantages, **clip(0.1, 0.3), **call)


def weighted(level: str | None, bounds: float | str = 2.0, **correction: Any) -> list[tuple[float, Call]]:
    """verl's REINFORCE with importance weights; bounds "low_high" mask, one bound truncates."""
    settings = {"loss_type": "reinforce", "rollout_is": level, "rollout_is_threshold": bounds}
    return [(1, verl("bypass_mode", correction=settings | correction))]


def kl(kind: str, against: str = "reference", **call: Any) -> Call:
    return {"of": "kl", "kl": kind, "against": against, "aggregation": "token-mean", **call}


GRPO = {"type": "grpo", "clip_low": 0.1, "clip_high": 0.3}
GSPO = {"type": "gspo", "clip_low": 0.02, "clip_high": 0.04}
CISPO = {"type": "cispo", "clip_low": 0.3, "clip_high": 0.4}
MASKED = {"type": "reinforce", "importance": "mask"}
TRL = {"epsilon": 0.1, "epsilon_high": 0.3, "loss_type": "dapo"}
OF_GROUPS = [MASK * (np.array(list(GROUPS)) == group)[:, None] for group in dict.fromkeys(GROUPS)]

LOSSES: dict[str, Loss] = {
    # The value of verl's DPPO is that of r · A · log π with r detached: its gradient is ours.
    "default": Loss(
        {"type": "default", "mask_low": 0.1, "mask_high": 0.15, "adv_tau": 0.7, "kl_tau": 0.3},
        [(0.7, verl("dppo_tv", **clip(0.1, 0.15))), (0.6, kl("k2", "old"))],
        has_value=False,
    ),
    # Neither peer has it: dropped one way, dropped the other way, and never dropped.
    "ipo": Loss(
        {"type": "ipo", "threshold": 0.1, "adv_tau": 0.7, "kl_tau": 0.3},
        [
            (0.7, verl("dppo_tv", **clip(0.1, 0.1))),
            (-0.7, verl("dppo_tv", -ADVANTAGES[:, None], **clip(0.1, 0.1))),
            (-0.7, verl("dppo_tv", **clip(1, 1))),
            (0.6, kl("k2", "old")),
        ],
        has_value=False,
    ),
    "grpo": Loss(GRPO, [clipped()]),
    "grpo, TRL": Loss(GRPO, [(1, TRL)], "trl"),
    "ppo_clip": Loss(GRPO | {"type": "ppo_clip", "dual_clip": 1.5}, [(1, verl("vanilla", **clip(0.1, 0.3, 1.5)))]),
    "gspo": Loss(GSPO, [(1, verl("gspo", **MEAN_OF_SEQUENCES, **clip(0.02, 0.04)))]),
    "cispo": Loss(CISPO, [(1, verl("cispo", **clip(0.3, 0.4)))]),
    "reinforce": Loss({"type": "reinforce", "importance": "none"}, weighted(None)),
    "truncate, token": Loss({"type": "reinforce", "high": 1.2}, weighted("token", 1.2)),
    "truncate, sequence": Loss({"type": "reinforce", "level": "sequence", "high": 1.2}, weighted("sequence", 1.2)),
    "truncate, geometric, TRL": Loss(
        {"type": "reinforce", "level": "geometric", "high": 1.05},
        [(1, {"loss_type": "cispo", "epsilon_high": 1.05, "importance_sampling_level": "sequence"})],
        "trl",
    ),
    "mask, token": Loss(MASKED | {"low": 0.7, "high": 1.5}, weighted("token", "0.7_1.5")),
    "mask, sequence": Loss(MASKED | {"level": "sequence", "low": 0.3, "high": 3}, weighted("sequence", "0.3_3.0")),
    # Rejected tokens stay in the denominator here. verl's bounds of a rejection are of sampler / policy.
    "mask, geometric": Loss(
        MASKED | {"level": "geometric", "low": 0.9, "high": 1.1},
        weighted(None, rollout_rs="seq_mean_k1", rollout_rs_threshold=f"{1 / 1.1}_{1 / 0.9}"),
        factor=GEOMETRIC * SURVIVORS.sum() / MASK.sum(),
        has_value=False,
    ),
    # Of what they are the mean. Samples without advantage are left out, and so out of denominators.
    "sequences": Loss(
        GRPO | {"normalization": "sequence"},
        [clipped((ADVANTAGES * HALF)[:, None], **MEAN_OF_SEQUENCES)],
        factor=4,
        trained=HALF,
    ),
    "fixed length": Loss(
        GRPO | {"normalization": "fixed", "fixed_length": FIXED_LENGTH},
        [clipped(aggregation="seq-mean-token-sum-norm", length=FIXED_LENGTH)],
    ),
    # Neither peer has it: their mean over the tokens of one group, for each.
    "groups": Loss(
        CISPO | {"normalization": "group"},
        [(1 / len(OF_GROUPS), verl("cispo", mask=mask.tolist(), **clip(0.3, 0.4))) for mask in OF_GROUPS],
    ),
    # Beside the policy gradient
    "k1": Loss(GRPO | {"kl_coef": 0.3, "kl_estimator": "k1"}, [clipped(), (0.3, kl("k1+"))]),
    "k2": Loss(
        GRPO | {"kl_coef": 0.3, "kl_estimator": "k2", "normalization": "sequence"},
        [clipped(**MEAN_OF_SEQUENCES), (0.3, kl("k2", **MEAN_OF_SEQUENCES))],
    ),
    "k3": Loss(GRPO | {"kl_coef": 0.3, "kl_estimator": "k3"}, [clipped(), (0.3, kl("k3"))]),
    "k3, TRL": Loss(GRPO | {"kl_coef": 0.3}, [(1, TRL | {"beta": 0.3, "use_bias_correction_kl": False})], "trl"),
    # TRL's bonus is a mean over tokens whatever the loss is a mean of; ours follows `normalization`.
    "entropy of sequences, TRL": Loss(
        GRPO | {"normalization": "sequence", "entropy_coef": 0.2},
        [(1, TRL | {"loss_type": "grpo", "entropy_coef": 0.2})],
        "trl",
        entropy_factor=(MASK.sum() / (len(LENGTHS) * LENGTHS))[:, None],
        has_value=False,
    ),
    "cross-entropy": Loss(GRPO, [(1, {"of": "nll", "aggregation": "token-mean"})], component="ce"),
    # r · A but where the probability fell by over 0.2: verl drops these for negative advantages, so positive ones
    # change sign.
    "towards a teacher": Loss(
        GRPO,
        [
            (1, verl("dppo_tv", np.minimum(PULL, 0), **clip(0.2, 1))),
            (-1, verl("dppo_tv", -np.maximum(PULL, 0), **clip(0.2, 1))),
            (2e-3, kl("k2", "old")),
        ],
        has_value=False,
        component="ref_kl",
    ),
}


def ours(case: Loss, world: World) -> tuple[float, Floats, Floats]:
    """The loss of the step, and its gradients in log-probabilities and entropies, each (B, T)."""
    rows = np.flatnonzero(case.trained if case.trained is not None else np.ones(len(LENGTHS)))
    samples, logprobs, entropies = [], {}, {}
    for row in rows:
        mask, weight = np.append(0, MASK[row]), {"rl_weight": np.zeros(TOKENS + 1)}
        weight[f"{case.component}_weight"] = mask
        samples.append(
            Sample(
                sample_id=str(row), group_id=GROUPS[row], task_id="0", env="env", policy_versions=[0], reward=0.0,
                input_ids=np.ones(TOKENS + 1, dtype=np.int64), loss_mask=mask.astype(bool), temperature=1.0,
                logprobs=np.append(0, BATCH["old"][row]) * mask, advantages=ADVANTAGES[row] * mask,
                ref_logprobs=np.append(0, BATCH["reference"][row]), **weight,
            )
        )  # fmt: skip
        for by, name in ((logprobs, "logprob"), (entropies, "entropy")):
            by[str(row)] = torch.tensor(np.append(0, BATCH[name][row]), dtype=torch.float64, requires_grad=True)
    new = (logprobs, entropies)
    loss = step_loss(validated(LossConfig, case.config), samples, new, world)
    gradients = np.zeros((2, len(LENGTHS), TOKENS))
    gradients[:, rows] = slopes(loss, new).numpy().reshape(2, len(rows), TOKENS + 1)[:, :, 1:]
    return loss.item(), gradients[0], gradients[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_losses_agree(name: str, world: World, answers: Answers) -> None:
    """Contract: the loss of a step and its gradient are the peer's, but for what is said to differ."""
    case = LOSSES[name]
    replies = [(weight, answers(case.peer)["losses"][f"{name}/{i}"]) for i, (weight, _) in enumerate(case.calls)]

    def total(key: str) -> Any:
        return sum(weight * np.array(reply[key]) for weight, reply in replies)

    loss, gradient, entropy_gradient = ours(case, world)
    np.testing.assert_allclose(gradient, case.factor * total("gradient") * MASK, rtol=EXACT, atol=1e-12)
    expected = case.entropy_factor * total("entropy_gradient") * MASK
    np.testing.assert_allclose(entropy_gradient, expected, rtol=EXACT, atol=1e-12)
    if case.has_value:
        assert loss == pytest.approx(case.factor * total("loss"), rel=EXACT)


# ---- advantages

EVEN = "aaaabbbbccccdddd"  # TRL has groups of one size
SEVERAL = "aaabbbbbccdddddd"
RAGGED = "aaabbbbbccddddde"  # with a group of one
_draw = np.random.default_rng(0)
REWARDS = _draw.integers(0, 4096, len(EVEN)).astype(float)
FUNCTIONS = {"first": REWARDS, "second": _draw.integers(-500, 500, len(EVEN)).astype(float)}
OUTPUT_TOKENS = _draw.integers(1, 40, len(EVEN)).tolist()


def of_groups(groups: str, of: Callable[[Floats], Any]) -> Floats:
    """(B,) what `of` gives for the rewards of each attempt's group."""
    names = np.array(list(groups))
    return np.array([of(REWARDS[names == name]) for name in groups], dtype=np.float64)


def sample_over_population(count: Any) -> Any:
    """The standard deviation is the population's here, the sample's there."""
    return np.sqrt(count / (count - 1))


@dataclass(frozen=True)
class Advantage:
    """An algorithm of ours, and what a peer is asked for the same rewards.

    Args:
        config: As in `orchestrator.algorithm`.
        factor: What our advantages are times the peer's, of each attempt.
        one_token: Take episodes of one token: verl normalizes by tokens, we by episodes.
        rewards: What the peer gets in place of `REWARDS`.
    """

    config: Config
    call: Call
    groups: str = EVEN
    factor: float | Floats = 1.0
    peer: str = "verl"
    one_token: bool = False
    rewards: Floats | None = None


UNSCALED = {"estimator": "grpo", "by_std": False}
WEIGHTS = {"first": 1000.0, "second": 2000.0}  # so large for the same reason
OF_BATCH = sample_over_population(len(EVEN))
GDPO = {
    "estimator": "gdpo",
    "functions": {name: values.tolist() for name, values in FUNCTIONS.items()},
    "config": {"gdpo_reward_keys": list(WEIGHTS), "gdpo_reward_weights": list(WEIGHTS.values())},
}
OVERLONG = {"type": "overlong", "max_tokens": 32, "cache": 16, "scale": 100}

ADVANTAGE_CASES: dict[str, Advantage] = {
    # A group of one is 0 here and keeps its reward in verl.
    "grpo": Advantage({"type": "grpo"}, UNSCALED, RAGGED, 1.0 * (of_groups(RAGGED, len) > 1)),
    "grpo by std": Advantage(
        {"type": "grpo", "std_normalize": True}, {"estimator": "grpo"}, SEVERAL,
        sample_over_population(of_groups(SEVERAL, len)),
    ),
    "grpo by std, TRL": Advantage(
        {"type": "grpo", "std_normalize": True}, {"trainer": "GRPO", "settings": {}},
        factor=sample_over_population(4), peer="trl",
    ),
    "echo": Advantage({"type": "echo", "weights": {"tool": 0.1}}, UNSCALED),
    "echo by std": Advantage(
        {"type": "echo", "std_normalize": True}, {"estimator": "grpo"}, factor=sample_over_population(4)
    ),
    "rloo": Advantage({"type": "rloo"}, {"estimator": "rloo_vectorized"}, RAGGED),
    "rloo, TRL": Advantage({"type": "rloo"}, {"trainer": "RLOO", "settings": {}}, peer="trl"),
    "opo": Advantage({"type": "opo"}, {"estimator": "opo"}, RAGGED, 1.0 * (of_groups(RAGGED, len) > 1)),
    # Neither peer has it: it is grpo of rewards divided by the mean of their group.
    "max_rl": Advantage({"type": "max_rl"}, UNSCALED, SEVERAL, rewards=REWARDS / of_groups(SEVERAL, np.mean)),
    "reinforce_pp": Advantage(
        {"type": "reinforce_pp"}, {"estimator": "reinforce_plus_plus"}, factor=OF_BATCH, one_token=True
    ),
    "reinforce_pp, group_baseline": Advantage(
        {"type": "reinforce_pp", "group_baseline": True}, {"estimator": "reinforce_plus_plus_baseline"}, SEVERAL,
        OF_BATCH, one_token=True,
    ),
    "gdpo": Advantage({"type": "gdpo", "weights": WEIGHTS}, GDPO, factor=OF_BATCH, one_token=True),
    "length penalty": Advantage(
        {"type": "grpo", "length_penalty": OVERLONG}, UNSCALED,
        rewards=REWARDS - 100 * np.clip((np.array(OUTPUT_TOKENS) - 16) / 16, 0, 1),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ADVANTAGE_CASES)
def test_advantages_agree(name: str, answers: Answers) -> None:
    """Contract: the advantages of a batch of groups are the peer's, the same at every token."""
    case = ADVANTAGE_CASES[name]
    tokens = [row if isinstance(row, list) else [row] for row in answers(case.peer)["advantages"][name]]
    expected = np.array([row[-1] for row in tokens])
    assert all(value == row[-1] for row in tokens for value in row)
    members: dict[str, list[Attempt]] = {}
    for group, reward, length, *rewards in zip(case.groups, REWARDS, OUTPUT_TOKENS, *FUNCTIONS.values(), strict=True):
        attempt = Attempt(reward, output_tokens=length, rewards=dict(zip(FUNCTIONS, rewards, strict=True)))
        members.setdefault(group, []).append(attempt)
    config = validated(AlgorithmConfig, case.config)
    values = [value for group in advantages(config, [*members.values()], {})[0] for value in group]
    tolerance = SINGLE if case.peer == "trl" or config.type == "gdpo" else EXACT
    np.testing.assert_allclose(values, expected * case.factor, rtol=tolerance, atol=tolerance * np.abs(expected).max())


def question(peer: str) -> dict[str, Any]:
    """All calls of a peer: losses by case/number of the call, advantages by case."""
    return {
        "batch": {name: rows.tolist() for name, rows in BATCH.items()},
        "losses": {
            f"{name}/{number}": call
            for name, case in LOSSES.items()
            for number, (_, call) in enumerate(case.calls)
            if case.peer == peer
        },
        "advantages": {
            name: {
                "rewards": (REWARDS if case.rewards is None else case.rewards).tolist(),
                "groups": list(case.groups),
                "lengths": [1] * len(EVEN) if case.one_token else OUTPUT_TOKENS,
                **case.call,
            }
            for name, case in ADVANTAGE_CASES.items()
            if case.peer == peer
        },
    }


# ---- nothing is forgotten

NOT_COMPARED = {
    "custom": "the loss, or the advantages, are the user's own function",
    "opd": "no advantage: its tokens feed the component ref_kl",
    "opsd": "no advantage: its tokens feed the component ref_kl",
    "sft": "no advantage: its tokens feed the component ce",
    "rae": "neither peer has moving averages of an agent's rewards",
}
Settings = set[tuple[str, str, Any]]


def choices(annotation: Any) -> set[Any]:
    """The values that an annotation names; {None} where it names none, as any value stands for the others."""
    if annotation is bool:
        return {True, False}
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return set().union(*(choices(part) for part in get_args(annotation))) - {None} or {None}


def declared(models: Iterable[type[BaseModel]], base: type[BaseModel]) -> Settings:
    """Every setting, and choice of one, with the type that has it; those of `base` with any."""
    return {
        ("any" if name in base.model_fields else kind, name, choice)
        for model in models
        if (kind := model.model_fields["type"].default) not in NOT_COMPARED
        for name, field in model.model_fields.items()
        for choice in choices(field.annotation)
    }


def compared(configs: Iterable[Any], base: type[BaseModel]) -> Settings:
    return {
        ("any" if name in base.model_fields else config.type, name, getattr(config, name) if chosen else None)
        for config in configs
        for name, field in type(config).model_fields.items()
        if (chosen := choices(field.annotation) != {None}) or name in config.model_fields_set
    }


@pytest.mark.parametrize(
    ("union", "cases", "base"), [(LossConfig, LOSSES, PolicyLoss), (AlgorithmConfig, ADVANTAGE_CASES, ByReward)]
)
def test_everything_is_compared(union: Any, cases: dict[str, Loss | Advantage], base: type[BaseModel]) -> None:
    """Contract: a new type, setting or choice of a setting is compared with a peer, or named with a reason."""
    configs = [validated(union, case.config) for case in cases.values()]
    assert declared(get_args(union), base) - compared(configs, base) == set()


def test_every_component_is_compared() -> None:
    components = {name.removesuffix("_scale") for name in STREAMS if name.endswith("_scale")}
    assert components == {case.component for case in LOSSES.values()}
