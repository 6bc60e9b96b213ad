"""Which component of the loss each token feeds, by algorithm."""

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from prime_rl.config import RLConfig
from prime_rl.config.orchestrator import GRPO, OPD, OPSD, SFT, AlgorithmConfig, Echo, TeacherConfig, TeacherServer
from prime_rl.envs.protocol import ROLES, EpisodeResult, Outcome, Result, SampleTokens, decode, encode
from prime_rl.orchestrator.ledger import pack_result, unpack_result
from prime_rl.orchestrator.samples import streams_of
from prime_rl.trainer.loss import STREAMS
from prime_rl.trainer.rl.data import document
from prime_rl.transport.rollouts import Sample, write_batch

TEACHER = TeacherConfig(base_url="http://teacher")
ROLES_OF = ["user", "user", "assistant", "assistant", "tool", "tool", "assistant", "user"]
MASK = [False, False, False, True, False, False, True, False]


def sequence(reference: bool = False) -> SampleTokens:
    """user user | assistant: scaffold, sampled | tool tool | sampled | user"""
    found = SampleTokens.of(
        range(10, 18),
        MASK,
        [-0.5 * sampled for sampled in MASK],
        3,
        0.0,
        roles=[ROLES.index(role) for role in ROLES_OF],
    )
    found.ref_logprobs = array("f", [0.0, *[-0.25] * 7]) if reference else None
    return found


def streams(
    config: AlgorithmConfig, advantage: float = 0.5, *, keep_zero: bool = False, tokens: int = 8
) -> dict[str, Any] | None:
    given = sequence(reference=config.component == "ref_kl")
    mask, logprobs = np.array(MASK[:tokens]), np.array(given.logprobs[:tokens], dtype=np.float32)
    return streams_of(config, given, mask, logprobs, advantage, keep_zero)


def test_by_reward() -> None:
    """Advantages on sampled tokens, nothing else. One of zero is not worth a place, unless it is to widen the denominator."""
    found = streams(GRPO())
    assert found["advantages"].tolist() == [0.5 * sampled for sampled in MASK]
    assert found.keys() == {"loss_mask", "logprobs", "advantages"}
    assert streams(GRPO(), 0.0) is None
    assert streams(GRPO(), 0.0, keep_zero=True)


def test_echo() -> None:
    """Cross-entropy on tool results after the first reply, not on what came before, nor on replies; also where the advantage is zero."""
    found = streams(Echo(weights={"tool": 0.1, "user": 0.2, "assistant": 5.0}))
    assert found["ce_weight"].tolist() == pytest.approx([0, 0, 0, 0, 0.1, 0.1, 0, 0.2])
    assert "rl_weight" not in found
    later = sequence()
    later.loss_mask = bytes([False] * 6 + [True, False])  # its first reply was trained with an earlier sequence
    mask = np.frombuffer(later.loss_mask, dtype=bool)
    found = streams_of(Echo(weights={"tool": 0.1}), later, mask, np.zeros(8, np.float32), 0.5, False)
    assert found["ce_weight"].tolist() == pytest.approx([0, 0, 0, 0, 0.1, 0.1, 0, 0])
    alike = streams(Echo(), 0.0)
    assert not alike["rl_weight"].any()
    assert streams(Echo(), 0.0, tokens=4) is None  # what is left of it has no such token


@pytest.mark.parametrize("config", [OPD(teacher=TEACHER), OPSD()])
def test_distillation_on_policy(config: AlgorithmConfig) -> None:
    """The policy's tokens, each with what the teacher thinks of it; rewards do not matter."""
    found = streams(config, 0.0, tokens=7)
    assert found["loss_mask"].tolist() == MASK[:7]
    assert not found["rl_weight"].any()
    assert found["ref_kl_weight"].tolist() == [float(sampled) for sampled in MASK[:7]]
    assert found["ref_logprobs"].tolist() == [0.0, *[-0.25] * 6]


def test_distillation_off_policy() -> None:
    """The teacher's tokens are on no mask: they say nothing about how far policy and sampler are apart."""
    found = streams(SFT(teacher=TeacherServer(base_url="http://teacher")), 0.0)
    assert not found["loss_mask"].any()
    assert not found["logprobs"].any()
    assert found["ce_weight"].tolist() == [float(sampled) for sampled in MASK]


@pytest.mark.parametrize("config", [OPD(teacher=TEACHER), OPSD(), GRPO(), Echo(weights={"tool": 0.1})])
def test_what_was_not_scored_is_not_learned(tmp_path: Path, config: AlgorithmConfig) -> None:
    """Contract: where the scores end early, sampled tokens behind them have no weight in what needs a score, and the trainer takes that."""
    given = sequence(reference=True)
    given.ref_logprobs = given.ref_logprobs[:5]  # sampled are 3 and 6
    mask, logprobs = np.array(MASK), np.array(given.logprobs, dtype=np.float32)
    found = streams_of(config, given, mask, logprobs, 0.5, False)
    name = "ref_kl_weight" if config.component == "ref_kl" else "rl_weight"
    assert found[name].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    assert found["ref_logprobs"].tolist() == [0.0, *[-0.25] * 4, 0.0, 0.0, 0.0]
    assert ("ce_weight" in found) == isinstance(config, Echo)
    sample = Sample("0", "0", "t", "x", [0], given.input_ids, temperature=1.0, reward=0.0, **found)
    write_batch(tmp_path, 0, [sample])  # its streams fit
    row = STREAMS.index("ref_kl_scale" if config.component == "ref_kl" else "rl_scale")
    assert document(sample, reference=True).streams[row].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    given.ref_logprobs = given.ref_logprobs[:2]
    assert (streams_of(config, given, mask, logprobs, 0.5, True) is not None) == isinstance(config, Echo)


def test_short_scores_are_kept_and_sent() -> None:
    """Contract: the ledger and the wire give back what they got."""
    given = sequence(reference=True)
    given.ref_logprobs = given.ref_logprobs[:5]
    result = EpisodeResult("e", "x", "t", Outcome.OK, samples=[given])
    assert unpack_result(pack_result(result)) == result
    assert decode(encode(Result(1, result))).episode == result


def test_a_divergence_needs_a_reference_model() -> None:
    with pytest.raises(ValidationError, match="the divergence from a reference model needs one"):
        RLConfig(orchestrator={"environment": {"id": "x"}}, trainer={"loss": {"kl_coef": 0.1}})


@pytest.mark.parametrize("loss", [{"kl_coef": 0.1}, {"entropy_coef": 0.01}, {"entropy_coef": -0.01}])
def test_penalties_reach_all_tokens_of_the_policy_or_are_refused(loss: dict[str, float]) -> None:
    """Contract: a penalty or bonus belongs to the policy's loss: beside distillation alone it is refused, and it never silently passes over samples of
    advantage zero, whose being left out is refused."""
    (name,), teacher = loss, {"base_url": "http://x"}
    reference = {"reference": teacher} if name == "kl_coef" else {}
    opd, kept = {"type": "opd", "teacher": teacher}, {"filter_zero_advantage": False}
    alone = {"environment": {"id": "x"}} | reference
    with pytest.raises(ValidationError, match=f"{name} has no effect: nothing is trained by reward"):
        RLConfig(orchestrator={**alone, "algorithm": opd, **kept}, trainer={"loss": loss})
    with pytest.raises(ValidationError, match=f"{name} would not reach .*filter_zero_advantage = false"):
        RLConfig(orchestrator=alone, trainer={"loss": loss})
    both = {"environments": [{"id": "x"}, {"id": "y", "algorithm": opd}]} | reference
    for orchestrator in (alone, both):
        assert RLConfig(orchestrator={**orchestrator, **kept}, trainer={"loss": loss}).trainer.loss
