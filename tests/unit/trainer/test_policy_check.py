"""Before training a policy is compared with the model's own forward: right ones pass and stay as they are, wrong ones
are refused."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from prime_rl.errors import UserError
from prime_rl.trainer import attention
from prime_rl.trainer.model import Policy
from prime_rl.trainer.policy_check import check_policy
from support import trainer as support
from support.architectures import build_reference, tiny_config

SETTINGS: list[dict[str, object]] = [
    {"reshard_after_forward": False},
    {"reshard_after_forward": True, "activation_checkpointing": "full"},
    {"reshard_after_forward": False, "activation_checkpointing": "wide", "dtype": "bfloat16", "compile": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["gathered", "sharded", "compiled"])
def test_right_policies_pass_and_stay_as_they_are(settings, each_model, world, make_policy):
    """Contract: in every set-up the check compiles nothing, and the next step's gradients are those without it."""
    groups = [support.random_documents((17, 30)), support.random_documents((25,))]
    plain, policy = (make_policy(each_model, **settings) for _ in range(2))
    counters.clear()
    check_policy(policy, "model", world, torch.bfloat16 if settings.get("compile") else torch.float32)
    assert counters["stats"]["unique_graphs"] == 0
    assert policy.lm.config._attn_implementation == attention.NAME
    with torch.compiler.set_stance("force_eager"):
        want, got = (support.gradients(each, groups) for each in (plain, policy))
    for name, gradient in want.items():
        assert torch.equal(got[name], gradient), name


def leak(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    """Let documents attend to those before them."""
    boundaries = attention.boundaries

    def merged(cu_seqlens: Tensor, max_seqlen: int) -> dict[str, Tensor]:
        return boundaries(cu_seqlens[[0, -1]], int(cu_seqlens[-1]))

    monkeypatch.setattr(attention, "boundaries", merged)


def skew_scale(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    policy.head_form = replace(policy.head_form, scale=policy.head_form.scale * 1.3)


def break_weight(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    policy.lm.model.norm.weight.to_local().detach().fill_(torch.nan)


# Rounding sends tokens of the last two to other experts.
MODELS = ("granite", 0, "float32"), ("granite", 0, "bfloat16"), ("mellum", 1, "bfloat16"), ("minimax_m2", 3, "bfloat16")


@pytest.mark.parametrize(("model_type", "seed", "dtype"), MODELS)
@pytest.mark.parametrize("fault", [leak, skew_scale, break_weight])
def test_wrong_policies_are_refused(fault, model_type, seed, dtype, world, make_policy, monkeypatch, tmp_path):
    """Contract: a document that sees the one before it, logits of another scale, and what is not a number are refused
    in one line with the architecture and the difference; right models pass, however large their rounding."""
    build_reference(tiny_config(model_type), tmp_path, seed)
    policy = make_policy(tmp_path, dtype=dtype)
    check_policy(policy, "m", world, getattr(torch, dtype))
    fault(monkeypatch, policy)
    message = r"model m cannot be trained: .* \w+ForCausalLM's own forward by (\d|nan)"
    with pytest.raises(UserError, match=message) as caught:
        check_policy(policy, "m", world, getattr(torch, dtype))
    assert "\n" not in str(caught.value)
    assert policy.lm.config._attn_implementation == attention.NAME


def test_a_forward_that_fails_is_refused(world, tied_model, make_policy, monkeypatch):
    """Contract: what the model's code raises on packed documents is one line with the architecture, before training."""
    policy = make_policy(tied_model)
    monkeypatch.setattr(policy.lm.model.norm, "forward", lambda hidden: hidden @ hidden)
    with pytest.raises(UserError, match="model m cannot be trained: the forward of Qwen3ForCausalLM fails") as caught:
        check_policy(policy, "m", world, torch.float32)
    assert "\n" not in str(caught.value)
