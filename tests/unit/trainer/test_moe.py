"""Experts: routed in float32 and computed in groups; the same as transformers' own block, which loops over
them."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from prime_rl.errors import UserError
from prime_rl.trainer import moe
from prime_rl.trainer.loss import cross_entropy
from prime_rl.trainer.model import Policy
from prime_rl.trainer.packing import collate, to_device
from prime_rl.trainer.parallel import World
from support import trainer as support

gradients = support.gradients

CPU = torch.device("cpu")
LENGTHS = (17, 2, 40, 1, 9)


def make_block(experts: int = 6, k: int = 2, normalized: bool = True) -> Qwen3MoeSparseMoeBlock:
    """transformers' block, random, computing expert by expert."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "moe_intermediate_size": 8, "num_experts": experts, "num_experts_per_tok": k}
    block = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**shape, norm_topk_prob=normalized, experts_implementation="eager"))
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    return block


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("tokens", "experts", "k", "normalized"), [(37, 6, 2, True), (30, 6, 3, False), (2, 16, 4, True)], ids=str
)
def test_equals_the_loop_over_experts(tokens: int, experts: int, k: int, normalized: bool) -> None:
    """Outputs and every gradient are those of transformers' loop over the experts, also where experts get no token."""
    block = make_block(experts, k, normalized)
    ours = moe.SparseBlock(copy.deepcopy(block))
    hidden = random(1, tokens, 16)
    got, want = support.block_gradients(ours, hidden), support.block_gradients(block, hidden)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("level", ["pointwise", "wide", "attention"])
def test_experts_are_chosen_once(level: str, moe_model: Path, make_policy: Callable[..., Policy]) -> None:
    """What a checkpointed block keeps lies in the order of its experts: backward takes their choice as it was, it never
    makes it again."""

    class Choices(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.made += operator is torch.ops.aten.topk.default
            return operator(*args, **(kwargs or {}))

    policy = make_policy(moe_model, activation_checkpointing=level)
    with Choices() as choices:
        policy(to_device(collate(support.random_documents(LENGTHS), 1), CPU), cross_entropy)[0].backward()
    assert choices.made == 2


def test_experts_in_float32_are_not_compiled(moe_model: Path, make_policy: Callable[..., Policy]) -> None:
    """Contract: refused in one line where compiling was asked for."""
    with pytest.raises(UserError, match="has experts, which compile in bfloat16 only"):
        make_policy(moe_model, compile=True)


@pytest.mark.parametrize("reshard", [False, True])
def test_router_keeps_float32(
    reshard: bool, moe_model: Path, make_policy: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where blocks compute in bfloat16, the router's matrix is gathered in float32, micro-batch after micro-batch, and
    has gradients."""
    seen = []
    route = moe.route

    def look(hidden: Tensor, weight: Tensor, k: int, normalized: bool) -> tuple[Tensor, Tensor]:
        seen.append((hidden.dtype, weight.dtype, weight.detach().clone()))
        return route(hidden, weight, k, normalized)

    monkeypatch.setattr(moe, "route", look)
    policy = make_policy(moe_model, dtype="bfloat16", reshard_after_forward=reshard)
    seen.clear()  # attention was examined in a forward pass without data
    masters = [block.gate.weight.full_tensor().clone() for block in moe.sparse_blocks(policy)]
    for last in (False, True):
        for unit in policy.units:
            unit.set_reshard_after_backward(last)
        policy(to_device(collate(support.random_documents((17, 30)), 1), CPU), cross_entropy)[0].backward()
    assert all(block.gate.weight.grad.full_tensor().any() for block in moe.sparse_blocks(policy))
    assert len(seen) == 4
    for (hidden, weight, values), master in zip(seen, 2 * masters, strict=True):
        assert (hidden, weight) == (torch.bfloat16, torch.float32)
        assert torch.equal(values, master)


def test_unknown_experts_are_refused(make_policy: Callable[..., Policy], tmp_path: Path) -> None:
    """A model whose experts the trainer would name and route wrongly is refused."""
    shape = {"hidden_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 32, "num_experts": 4}
    model = AutoModelForCausalLM.from_config(Qwen2MoeConfig(**shape, num_attention_heads=2, num_key_value_heads=2))
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="experts of a family that the trainer does not know"):
        make_policy(tmp_path)


def test_routers_that_would_be_logged_are_no_obstacle(
    moe_model: Path, make_policy: Callable[..., Policy], world: World, tmp_path: Path
) -> None:
    """Contract: a config with `output_router_logits` trains."""
    directory = Path(shutil.copytree(moe_model, tmp_path / "model"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"output_router_logits": True}))
    make_policy(directory)
