"""Losses and their gradients against verl's and TRL's own, from samples to the loss of the step, in float64.

Where ours means something else on purpose, `factor` says by how much. Sequences, groups and the batch have numbers of tokens that are powers of two, so
that our weights, which are float32, are exact.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import numpy as np
import numpy.typing as npt
import pytest
import torch
from pydantic import TypeAdapter

from prime_rl.config.trainer import LossConfig, PolicyLoss
from prime_rl.trainer.loss import STREAMS
from prime_rl.trainer.parallel import World
from prime_rl.transport.rollouts import Sample
from support import trainer as support
from support.losses import slopes, step_loss
from support.oracles import Answers

world = support.world
Floats = npt.NDArray[np.float64]
TOLERANCE = 1e-8  # verl adds 1e-8 to its denominators

# -- the batch ---------------------------------------------------------------------------------------------------------------

LENGTHS = np.array([2, 2, 4, 8, 8, 8, 16, 16])  # sampled tokens of each sequence
GROUPS = "aaabccdd"
TOKENS = 24  # of each sequence, beside one of the prompt
FIXED_LENGTH = 32


def _float32(values: Floats) -> Floats:
    """Values that batches can hold."""
    return values.astype(np.float32).astype(np.float64)


def _batch() -> dict[str, Floats]:
    draw = np.random.default_rng(0)
    shape = (len(LENGTHS), TOKENS)
    mask = np.argsort(np.argsort(draw.uniform(size=shape), axis=1), axis=1) < LENGTHS[:, None]
    old = _float32(-draw.uniform(0.05, 3, shape))
    logprob = np.minimum(old + draw.normal(0, 0.5, shape) + draw.normal(0, 0.1, (len(LENGTHS), 1)), -0.01)
    return {
        "mask": mask.astype(float),
        "old": old,
        "logprob": logprob,
        "reference": _float32(logprob + draw.uniform(-2, 2, shape)),  # at most 7.4 times as probable as to the policy
        "entropy": draw.uniform(0, 2, shape),
        "advantages": _float32(draw.normal(size=len(LENGTHS))),
    }


BATCH = _batch()
MASK, ADVANTAGES = BATCH["mask"], BATCH["advantages"]
HALF = np.arange(len(LENGTHS)) >= 6  # the last group, which has half of the sampled tokens
LOG_RATIO = (BATCH["logprob"] - BATCH["old"]) * MASK
GEOMETRIC = np.exp(LOG_RATIO.sum(1) / LENGTHS)[:, None]
PULL = BATCH["reference"] - BATCH["logprob"]  # the advantage of the component ref_kl


# -- what is compared --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A loss of ours, and calls of a peer whose sum, each times its weight, it must be.

    Args:
        config: As in `trainer.loss`.
        calls: (weight, call of the driver).
        factor: What our gradient is times the peer's, of each token.
        entropy_factor: The same of the gradient in the entropies.
        has_value: The peer's loss has our value, too.
        trained: [B] sequences that the orchestrator sends: those without advantage are left out by default.
    """

    config: dict[str, Any]
    oracle: str
    calls: list[tuple[float, dict[str, Any]]]
    factor: float | Floats = 1.0
    entropy_factor: float | Floats = 1.0
    has_value: bool = True
    trained: npt.NDArray[np.bool_] | None = None
    component: str = "rl"


def verl(
    of: str, advantages: Floats = ADVANTAGES[:, None], aggregation: str = "token-mean", **call: Any
) -> dict[str, Any]:
    per_token = np.broadcast_to(advantages, MASK.shape).tolist()
    return {"of": of, "advantages": per_token, "aggregation": aggregation, **call}


def clip(low: float, high: float, dual: float = 1e9) -> dict[str, Any]:
    return {"settings": {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": dual}}


def weighted(level: str | None, bounds: float | str = 2.0, **correction: Any) -> dict[str, Any]:
    """verl's REINFORCE with importance weights; bounds "low_high" mask, one bound truncates."""
    settings = {"loss_type": "reinforce", "rollout_is": level, "rollout_is_threshold": bounds}
    return verl("bypass_mode", correction=settings | correction)


def kl(kind: str, against: str = "reference", aggregation: str = "token-mean") -> dict[str, Any]:
    return {"of": "kl", "kl": kind, "against": against, "aggregation": aggregation}


def by_group(call: Callable[..., dict[str, Any]]) -> list[tuple[float, dict[str, Any]]]:
    """The mean over groups of what `call` gives for one group."""
    masks = {group: MASK * (np.array(list(GROUPS)) == group)[:, None] for group in GROUPS}
    return [(1 / len(masks), call(mask=mask.tolist())) for mask in masks.values()]


def dropped_falls(advantages: Floats) -> list[tuple[float, dict[str, Any]]]:
    """The gradient of r · A but where the probability fell by over 0.2: verl drops these tokens for negative advantages, so positive ones change sign."""
    negative, positive = np.minimum(advantages, 0), np.maximum(advantages, 0)
    return [(1, verl("dppo_tv", negative, **clip(0.2, 1))), (-1, verl("dppo_tv", -positive, **clip(0.2, 1)))]


CLIPPED = {"clip_low": 0.1, "clip_high": 0.3}
GSPO = {"type": "gspo", "clip_low": 0.02, "clip_high": 0.04}
SURVIVORS = ((GEOMETRIC > 0.9) & (GEOMETRIC < 1.1)) * MASK
IN_BOUNDS = (np.exp(LOG_RATIO) >= 0.7) & (np.exp(LOG_RATIO) <= 1.5) & (MASK > 0)
TRL = {"epsilon": 0.1, "epsilon_high": 0.3, "loss_type": "dapo"}

CASES: dict[str, Case] = {
    # The value of verl's DPPO is that of r · A · log π with r detached: its gradient is ours.
    "default": Case(
        {"type": "default", "mask_low": 0.1, "mask_high": 0.15, "adv_tau": 0.7, "kl_tau": 0.3},
        "verl",
        [(0.7, verl("dppo_tv", **clip(0.1, 0.15))), (0.6, kl("k2", "old"))],
        has_value=False,
    ),
    # Dropped one way, dropped the other way, and never dropped.
    "ipo": Case(
        {"type": "ipo", "threshold": 0.1, "adv_tau": 0.7, "kl_tau": 0.3},
        "verl",
        [
            (0.7, verl("dppo_tv", **clip(0.1, 0.1))),
            (-0.7, verl("dppo_tv", -ADVANTAGES[:, None], **clip(0.1, 0.1))),
            (-0.7, verl("dppo_tv", **clip(1, 1))),
            (0.6, kl("k2", "old")),
        ],
        has_value=False,
    ),
    "grpo": Case({"type": "grpo", **CLIPPED}, "verl", [(1, verl("vanilla", **clip(0.1, 0.3)))]),
    "grpo, TRL": Case({"type": "grpo", **CLIPPED}, "trl", [(1, TRL)]),
    "ppo_clip": Case({"type": "ppo_clip", **CLIPPED, "dual_clip": 1.5}, "verl", [(1, verl("vanilla", **clip(0.1, 0.3, 1.5)))]),
    "ppo_clip, TRL": Case({"type": "ppo_clip", **CLIPPED, "dual_clip": 1.5}, "trl", [(1, TRL | {"delta": 1.5})]),
    "gspo": Case(GSPO, "verl", [(1, verl("gspo", aggregation="seq-mean-token-mean", **clip(0.02, 0.04)))]),
    "gspo, TRL": Case(
        GSPO,
        "trl",
        [(1, {"epsilon": 0.02, "epsilon_high": 0.04, "loss_type": "grpo", "importance_sampling_level": "sequence"})],
    ),
    "cispo": Case({"type": "cispo", "clip_low": 0.3, "clip_high": 0.4}, "verl", [(1, verl("cispo", **clip(0.3, 0.4)))]),
    "cispo, TRL": Case({"type": "cispo", "clip_high": 0.4}, "trl", [(1, {"loss_type": "cispo", "epsilon_high": 1.4})]),
    "reinforce": Case({"type": "reinforce", "importance": "none"}, "verl", [(1, weighted(None))]),
    "truncate, token": Case({"type": "reinforce", "high": 1.2}, "verl", [(1, weighted("token", 1.2))]),
    "truncate, sequence": Case(
        {"type": "reinforce", "level": "sequence", "high": 1.2}, "verl", [(1, weighted("sequence", 1.2))]
    ),
    "truncate, geometric": Case(
        {"type": "reinforce", "level": "geometric", "high": 1.05},
        "trl",
        [(1, {"loss_type": "cispo", "epsilon_high": 1.05, "importance_sampling_level": "sequence"})],
    ),
    "mask, token": Case(
        {"type": "reinforce", "importance": "mask", "low": 0.7, "high": 1.5}, "verl", [(1, weighted("token", "0.7_1.5"))]
    ),
    "mask, sequence": Case(
        {"type": "reinforce", "importance": "mask", "level": "sequence", "low": 0.3, "high": 3},
        "verl",
        [(1, weighted("sequence", "0.3_3.0"))],
    ),
    # -- of what they are the mean
    "sequences": Case(
        {"type": "grpo", "normalization": "sequence", **CLIPPED},
        "verl",
        [(1, verl("vanilla", aggregation="seq-mean-token-mean", **clip(0.1, 0.3)))],
    ),
    "sequences, TRL": Case({"type": "grpo", "normalization": "sequence", **CLIPPED}, "trl", [(1, TRL | {"loss_type": "grpo"})]),
    "fixed length": Case(
        {"type": "grpo", "normalization": "fixed", "fixed_length": FIXED_LENGTH, **CLIPPED},
        "verl",
        [(1, verl("vanilla", aggregation="seq-mean-token-sum-norm", length=FIXED_LENGTH, **clip(0.1, 0.3)))],
    ),
    "fixed length, TRL": Case(
        {"type": "grpo", "normalization": "fixed", "fixed_length": FIXED_LENGTH, **CLIPPED},
        "trl",
        [(1, TRL | {"loss_type": "dr_grpo", "max_completion_length": FIXED_LENGTH})],
    ),
    # Neither peer has it: their mean over the tokens of one group, for each.
    "groups": Case(
        {"type": "cispo", "clip_low": 0.3, "clip_high": 0.4, "normalization": "group"},
        "verl",
        by_group(lambda mask: verl("cispo", mask=mask, **clip(0.3, 0.4))),
    ),
    # -- beside the policy gradient
    "k1": Case(
        {"type": "grpo", **CLIPPED, "kl_coef": 0.3, "kl_estimator": "k1"},
        "verl",
        [(1, verl("vanilla", **clip(0.1, 0.3))), (0.3, kl("k1+"))],
    ),
    "k2": Case(
        {"type": "grpo", **CLIPPED, "kl_coef": 0.3, "kl_estimator": "k2", "normalization": "sequence"},
        "verl",
        [
            (1, verl("vanilla", aggregation="seq-mean-token-mean", **clip(0.1, 0.3))),
            (0.3, kl("k2", aggregation="seq-mean-token-mean")),
        ],
    ),
    "k3": Case(
        {"type": "grpo", **CLIPPED, "kl_coef": 0.3, "kl_estimator": "k3"},
        "verl",
        [(1, verl("vanilla", **clip(0.1, 0.3))), (0.3, kl("k3"))],
    ),
    "k3, TRL": Case(
        {"type": "grpo", **CLIPPED, "kl_coef": 0.3}, "trl", [(1, TRL | {"beta": 0.3, "use_bias_correction_kl": False})]
    ),
    "entropy, TRL": Case({"type": "grpo", **CLIPPED, "entropy_coef": 0.2}, "trl", [(1, TRL | {"entropy_coef": 0.2})]),
    "cross-entropy": Case({"type": "grpo"}, "verl", [(1, {"of": "nll", "aggregation": "token-mean"})], component="ce"),
    "towards a teacher": Case(
        {"type": "grpo"}, "verl", [*dropped_falls(PULL), (2e-3, kl("k2", "old"))], has_value=False, component="ref_kl"
    ),
    # -- where ours means something else
    # Samples without advantage are left out, and so out of denominators: half of the tokens, a quarter of the sequences.
    "tokens without advantage do not count": Case(
        {"type": "grpo", **CLIPPED},
        "verl",
        [(1, verl("vanilla", (ADVANTAGES * HALF)[:, None], **clip(0.1, 0.3)))],
        factor=2,
        trained=HALF,
    ),
    "sequences without advantage do not count": Case(
        {"type": "grpo", "normalization": "sequence", **CLIPPED},
        "verl",
        [(1, verl("vanilla", (ADVANTAGES * HALF)[:, None], "seq-mean-token-mean", **clip(0.1, 0.3)))],
        factor=4,
        trained=HALF,
    ),
    # verl can take rejected tokens out of the denominator: here they stay in it. (Its bounds of a rejection are of sampler / policy.)
    "masked tokens count": Case(
        {"type": "reinforce", "importance": "mask", "low": 0.7, "high": 1.5},
        "verl",
        [(1, weighted("token", 100.0, rollout_rs="token_k1", rollout_rs_threshold=f"{1 / 1.5}_{1 / 0.7}"))],
        factor=float(IN_BOUNDS.sum() / MASK.sum()),
    ),
    # So it is with sequences, which verl weighs by 1 where it does not reject them: here by their geometric mean.
    "mask, geometric": Case(
        {"type": "reinforce", "importance": "mask", "level": "geometric", "low": 0.9, "high": 1.1},
        "verl",
        [(1, weighted(None, rollout_rs="seq_mean_k1", rollout_rs_threshold=f"{1 / 1.1}_{1 / 0.9}"))],
        factor=GEOMETRIC * SURVIVORS.sum() / MASK.sum(),
        has_value=False,
    ),
    # TRL's bonus is a mean over tokens whatever the loss is a mean of; ours follows `normalization`.
    "entropy of sequences, TRL": Case(
        {"type": "grpo", "normalization": "sequence", **CLIPPED, "entropy_coef": 0.2},
        "trl",
        [(1, TRL | {"loss_type": "grpo", "entropy_coef": 0.2})],
        entropy_factor=(MASK.sum() / (len(LENGTHS) * LENGTHS))[:, None],
        has_value=False,
    ),
}  # fmt: skip

NOT_COMPARED = {"custom": "the loss is the user's own function"}


def question(oracle: str) -> dict[str, Any]:
    """The calls of all its cases, by case/number of the call."""
    calls = {
        f"{name}/{number}": call
        for name, case in CASES.items()
        if case.oracle == oracle
        for number, (_, call) in enumerate(case.calls)
    }
    return {"batch": {name: rows.tolist() for name, rows in BATCH.items()}, "losses": calls}


def ours(case: Case, world: World) -> tuple[float, Floats, Floats]:
    """The loss of the step, and its gradients in log-probabilities and entropies, each (B, T)."""
    config = TypeAdapter(LossConfig).validate_python(case.config)
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
    loss = step_loss(config, samples, new, world)
    gradients = np.zeros((2, len(LENGTHS), TOKENS))
    gradients[:, rows] = slopes(loss, new).numpy().reshape(2, len(rows), TOKENS + 1)[:, :, 1:]
    return loss.item(), gradients[0], gradients[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_losses_agree(name: str, world: World, answers: Answers) -> None:
    """Contract: the loss of a step and its gradient are the peer's, but for what is said to differ."""
    case = CASES[name]
    peer = answers(case.oracle)["losses"]
    answers = [(weight, peer[f"{name}/{number}"]) for number, (weight, _) in enumerate(case.calls)]
    loss, gradient, entropy_gradient = ours(case, world)
    expected = case.factor * sum(weight * np.array(answer["gradient"]) for weight, answer in answers)
    np.testing.assert_allclose(gradient, expected * MASK, rtol=TOLERANCE, atol=1e-12)
    if case.oracle == "trl":
        ((_, answer),) = answers
        expected = case.entropy_factor * np.array(answer["entropy_gradient"])
        np.testing.assert_allclose(entropy_gradient, expected * MASK, rtol=TOLERANCE, atol=1e-12)
    if case.has_value:
        assert loss == pytest.approx(
            case.factor * sum(weight * answer["loss"] for weight, answer in answers), rel=TOLERANCE
        )


# -- nothing is forgotten ----------------------------------------------------------------------------------------------------


def literals(annotation: Any) -> set[Any]:
    """The values that an annotation names; {None} where it names none, as any value stands for the others."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return set().union(*(literals(part) for part in get_args(annotation))) - {None} or {None}


def test_every_loss_is_compared() -> None:
    """Contract: a new loss, a new setting of one or a new choice of a setting is compared with a peer, or named with a reason."""
    settings_of_losses, settings_compared = set(), set()
    for loss in get_args(LossConfig):
        kind = loss.model_fields["type"].default
        settings_of_losses.add((kind, "type", kind))
        for name, field in loss.model_fields.items():
            if name != "type":
                owner = "any" if name in PolicyLoss.model_fields else kind
                settings_of_losses |= {(owner, name, value) for value in literals(field.annotation)}
    for case in CASES.values():
        config = TypeAdapter(LossConfig).validate_python(case.config)
        for name, field in type(config).model_fields.items():
            owner = "any" if name in PolicyLoss.model_fields and name != "type" else config.type
            choice, value = literals(field.annotation) != {None}, getattr(config, name)
            if choice or name in config.model_fields_set:
                settings_compared.add((owner, name, value if choice else None))
    assert {one for one in settings_of_losses - settings_compared if one[0] not in NOT_COMPARED} == set()
    components = {name.removesuffix("_scale") for name in STREAMS if name.endswith("_scale")}
    assert components == {case.component for case in CASES.values()}
