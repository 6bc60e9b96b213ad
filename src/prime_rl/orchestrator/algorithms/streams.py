"""Which component of the loss each token feeds: from an advantage and an algorithm to the streams that the trainer executes.

| algorithm | sampled tokens | other tokens |
|---|---|---|
| by reward | policy gradient, with the advantage | – |
| echo | as above | cross-entropy on what the environment says after the first reply, by role |
| opd, opsd | towards the teacher's log-probabilities | – |
| sft | cross-entropy: they are the teacher's, not the policy's, and so on no mask | – |

Where a teacher or a reference model has scored the leading tokens only, because no more fitted its context, sampled tokens behind them feed neither
policy gradient nor divergence.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from prime_rl.config.orchestrator import Echo
from prime_rl.envs.protocol import ROLES, SampleTokens

if TYPE_CHECKING:
    from prime_rl.config.orchestrator import AlgorithmConfig

Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


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
