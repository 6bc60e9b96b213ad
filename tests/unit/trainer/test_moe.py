"""Experts of every family: routed in float32 and computed in groups; the same as transformers' own, which loop over them;
their files are those of the family."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from prime_rl.errors import UserError
from prime_rl.trainer import moe, parameters, router_replay
from prime_rl.trainer.loss import cross_entropy
from prime_rl.trainer.model import Policy
from prime_rl.trainer.packing import collate, to_device
from prime_rl.trainer.parallel import World
from prime_rl.trainer.parameters import StoredTensor, initialize_buffers, load_weights
from prime_rl.trainer.source import find_model
from prime_rl.trainer.weight_copy import WeightCopy
from support import trainer as support

CPU = torch.device("cpu")
LENGTHS = (17, 2, 40, 1, 9)
SHAPE = {
    "vocab_size": support.VOCABULARY, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "initializer_range": 0.2,
    "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
GROUPS = {
    "n_routed_experts": 8, "moe_intermediate_size": 16, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
DELTA = {
    "num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**GROUPS, **LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**GROUPS, **LATENT},
    "dots1": GROUPS,
    "ernie4_5_moe": {
        "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "glm4_moe": GROUPS,
    "gpt_oss": {"num_local_experts": 8},
    "granitemoe": {"num_local_experts": 8},
    "granitemoeshared": {"num_local_experts": 8, "shared_intermediate_size": 24},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
    "lfm2_moe": {
        "num_experts": 8, "moe_intermediate_size": 16, "num_dense_layers": 1, "layer_types": ["full_attention", "conv"],
    },
    "minimax_m2": {"num_local_experts": 8},
    "mixtral": {"num_local_experts": 8},
    "nemotron_h": {"n_routed_experts": 8, "moe_intermediate_size": 16},
    "olmoe": {"num_experts": 8},
    "phimoe": {"num_local_experts": 8},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    "qwen3_5_moe_text": DELTA,
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "qwen3_next": DELTA,
}  # fmt: skip
"""Settings that give a tiny model of each model type experts."""


def make_model(family: str, **settings: Any) -> PreTrainedModel:
    """transformers' model, random, computing expert by expert. Its biases, those that correct routers too, are not zero."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES.get(family, {}), **settings})
    lm = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
    for name, tensor in [*lm.named_parameters(), *lm.named_buffers()]:
        if "bias" in name:
            tensor.data.normal_(std=0.1)
    return lm


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_loop_over_experts(family: str) -> None:
    """Logits and every gradient, the routers' too, are those of transformers' loop over the experts, also where experts
    get no token."""
    theirs = make_model(family)
    ours = copy.deepcopy(theirs).train()
    moe.set_up(ours, family)
    ids = torch.randint(support.VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(1))
    logits = [lm(ids, use_cache=False).logits for lm in (theirs, ours)]
    torch.testing.assert_close(logits[1], logits[0], atol=1e-5, rtol=1e-5)
    for each in logits:
        (each[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).sum() / 10).backward()
    assert moe.router_parameters(ours)
    for parameter in moe.router_parameters(ours):
        assert parameter.grad is not None
        assert parameter.grad.any()
    want = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, want[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_unpacked_equals_transformers(
    family: str, make_policy: Callable[..., Policy], tmp_path: Path
) -> None:
    """Log-probabilities and gradients, with blocks that compute part of their forward again."""
    theirs = make_model(family)
    theirs.save_pretrained(tmp_path)
    policy = make_policy(tmp_path, activation_checkpointing="pointwise")
    documents = support.random_documents(LENGTHS)
    logprobs = []
    for document in documents:
        ids = torch.tensor(document.input_ids)
        logits = theirs(ids[None], use_cache=False).logits[0, :-1] / document.temperature
        logprob = torch.log_softmax(logits, -1).gather(1, ids[1:, None]).squeeze(1)
        logprobs.append(logprob[torch.tensor(document.loss_mask[1:])])
    packed, _ = policy(to_device(collate(documents, 1), CPU))
    torch.testing.assert_close(packed, torch.cat(logprobs), atol=1e-5, rtol=1e-5)
    alone = support.gradients(policy, [[document] for document in documents])
    together = support.gradients(policy, [documents])
    streams = collate(documents, 1).streams
    cross_entropy(torch.cat(logprobs), torch.zeros_like(packed), streams)[0].backward()
    want = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    for name, gradient in together.items():
        largest = max(1.0, gradient.abs().max().item())  # sums over all tokens, up to 30
        torch.testing.assert_close(gradient, alone[name], atol=1e-5 * largest, rtol=0, msg=name)
        torch.testing.assert_close(gradient, want[name], atol=1e-5 * largest, rtol=0, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_files_of_a_family(family: str, world: World, tmp_path: Path) -> None:
    """transformers' files are read, and what is written has the same names and values. Correction biases stay in float32
    in an export of any dtype."""
    theirs = make_model(family)
    theirs.save_pretrained(tmp_path / "theirs")
    source = find_model(str(tmp_path / "theirs"))
    policy = nn.Module()
    with torch.device("meta"):
        policy.lm = AutoModelForCausalLM.from_config(source.config, experts_implementation="eager")
    assert isinstance(policy.lm, PreTrainedModel)
    moe.set_up(policy.lm, family)
    policy.lm.to_empty(device="cpu")
    policy.lm.tie_weights()
    initialize_buffers(policy.lm, family)
    load_weights(policy, tmp_path / "theirs", world)
    want = theirs.state_dict()
    for name, tensor in policy.lm.state_dict().items():
        assert torch.equal(tensor, want[name]), name

    copies = WeightCopy(policy, world, torch.float32)
    copies.copy().finish()
    (tmp_path / "ours").mkdir()
    copies.write_files(copies.to_host(), source, tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    assert again.keys() == want.keys()
    for name, tensor in again.items():
        assert torch.equal(tensor, want[name]), name
    rounded = WeightCopy(policy, world, torch.bfloat16)
    exact = {name for name, entry in rounded.tensors.items() if entry.dtype == "F32"}
    assert exact == {name for name in rounded.tensors if name.endswith(("correction_bias", "expert_bias"))}


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
@pytest.mark.parametrize("family", ["qwen3_moe", "hunyuan_v1_moe", "ernie4_5_moe"])
def test_router_keeps_float32(
    family: str,
    reshard: bool,
    make_policy: Callable[..., Policy],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Where blocks compute in bfloat16, routers get float32, and their parameters are gathered in it, micro-batch after
    micro-batch, and have gradients."""
    make_model(family).save_pretrained(tmp_path)
    seen = []
    route = moe.route

    def look(forward: Any, router: nn.Module, hidden: Tensor, *bias: Tensor) -> Any:
        (weight,) = router.parameters()
        seen.append(weight.detach().clone())
        assert hidden.dtype == torch.bfloat16
        _, weights, _ = out = route(forward, router, hidden, *bias)
        assert weight.dtype == weights.dtype == torch.float32
        return out

    policy = make_policy(tmp_path, dtype="bfloat16", reshard_after_forward=reshard)
    monkeypatch.setattr(moe, "route", look)
    parameters = moe.router_parameters(policy)
    masters = [parameter.full_tensor().clone() for parameter in parameters]
    for last in (False, True):
        for unit in policy.units:
            unit.set_reshard_after_backward(last)
        policy(to_device(collate(support.random_documents((17, 30)), 1), CPU), cross_entropy)[0].backward()
    assert all(parameter.grad.full_tensor().any() for parameter in moe.router_parameters(policy))
    assert len(seen) == 2 * len(masters)
    for values, master in zip(seen, 2 * masters, strict=True):
        assert torch.equal(values, master)


@pytest.mark.usefixtures("quick_compiler")
def test_layers_share_a_graph(moe_model: Path, make_policy: Callable[..., Policy]) -> None:
    """Contract: the blocks of all layers are compiled once, for training, with routers that FSDP manages."""
    policy = make_policy(moe_model, dtype="bfloat16", compile=True, reshard_after_forward=True)
    torch._dynamo.utils.counters.clear()
    policy(to_device(collate(support.random_documents((17, 30)), 1), CPU))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    policy.lm.model.layers = policy.lm.model.layers[:1]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    policy(to_device(collate(support.random_documents((17, 30)), 1), CPU))
    assert graphs == torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("family", ["llama4_text", "longcat_flash", "jetmoe"])
def test_other_experts_are_refused(family: str) -> None:
    """Experts that the trainer would not compute are refused by name."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(family))
    with pytest.raises(UserError, match=r"(Experts|MoA) is not part of transformers' experts interface"):
        moe.set_up(lm, family)


@pytest.mark.parametrize(
    ("family", "settings"),
    [("lfm2", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}), ("qwen3_5_text", {})],
)
def test_parameters_of_three_dimensions_are_no_experts(family: str, settings: dict[str, Any]) -> None:
    """Convolutions have them, too."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    assert any(parameter.ndim == 3 for parameter in lm.parameters())
    moe.set_up(lm, family)


def test_fused_files_are_read(moe_model: Path, make_policy: Callable[..., Policy], tmp_path: Path) -> None:
    """Files that hold all experts of a layer in one tensor, as transformers does, give the same weights."""
    lm = AutoModelForCausalLM.from_pretrained(moe_model, dtype=torch.float32)
    directory = Path(shutil.copytree(moe_model, tmp_path / "model"))
    save_file(dict(lm.named_parameters()), directory / "model.safetensors")
    documents = collate(support.random_documents(LENGTHS), 1)
    a, b = (make_policy(each)(to_device(documents, CPU))[0] for each in (moe_model, directory))
    assert torch.equal(a, b)


@pytest.mark.parametrize("index", [(), (2, slice(1, 3))], ids=str)
def test_slices_of_sharded_parameters(
    index: tuple[int, slice] | tuple[()], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of all ranks, each from its first one on, are the tensor of the files."""
    whole = torch.arange(5 * 4 * 3).view(5, 4, 3)
    tensor = StoredTensor("", list(whole[index].shape), whole, index)
    out = torch.full(tensor.shape, -1)
    for first, end in ((0, 2), (2, 4), (4, 5), (5, 5)):
        monkeypatch.setattr(parameters, "local_rows", lambda *_, rows=whole[first:end], at=first: (rows, at))
        local, start = tensor.local(world)
        if local.numel():
            out[start : start + local.shape[0]] = local
    assert torch.equal(out, whole[index])


def test_routers_that_would_be_logged_are_no_obstacle(
    moe_model: Path, make_policy: Callable[..., Policy], world: World, tmp_path: Path
) -> None:
    """Contract: a config with `output_router_logits` trains."""
    directory = Path(shutil.copytree(moe_model, tmp_path / "model"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"output_router_logits": True}))
    make_policy(directory)


NOT_REPLAYED = {"phimoe"}
"""Families whose routers choose otherwise than by the largest scores of all."""


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_of_a_family(family: str) -> None:
    """Contract: a router's choice is replaced, whatever its formula: with its own nothing changes, with another one the
    experts get that; or the family is refused."""
    model = make_model(family)
    moe.set_up(model, family)
    if family in NOT_REPLAYED:
        with pytest.raises(UserError, match="cannot be replaced"):
            router_replay.set_up(model.model.layers, family)
        return
    routers = router_replay.set_up(model.model.layers, family)
    blocks, seen, ids = moe.sparse_blocks(model), list[Tensor](), torch.arange(40)[None] * 7
    assert (routers.k, routers.experts, len(routers.sparse)) == (2, 8, len(blocks))
    for block in blocks:
        block.experts.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        own = seen.copy()
        for chosen in (own, [torch.stack([one[:, 0], (one[:, 0] + 3) % 8], 1) for one in own]):
            for block, each in zip(blocks, chosen, strict=True):
                block.router.replayed = each.to(torch.int16)
            seen.clear()
            got = model(ids, use_cache=False).logits
            assert all(map(torch.equal, seen, chosen))
            assert (chosen is own) == torch.allclose(got, want, atol=1e-5, rtol=1e-5)
