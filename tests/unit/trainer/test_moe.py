"""Experts of every family: routed in float32, chosen once, compiled once; their files are those of the family."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from prime_rl.errors import UserError
from prime_rl.trainer import moe, parameters, router_replay, routing
from prime_rl.trainer.loss import cross_entropy
from prime_rl.trainer.packing import collate, to_device
from prime_rl.trainer.parameters import StoredTensor, named_parameters
from prime_rl.trainer.routing import correction_biases, step_metrics, update_biases
from prime_rl.trainer.sft.train import means
from prime_rl.trainer.training_loop import forward_backward
from prime_rl.trainer.weight_copy import WeightCopy
from prime_rl.transport.weights import weights_manifest
from support import trainer as support
from support.architectures import LENGTHS, build_reference, tiny_config

CPU = torch.device("cpu")
FAMILIES = (
    "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "gpt_oss", "granitemoe", "granitemoeshared",
    "hunyuan_v1_moe", "lfm2_moe", "minimax_m2", "mixtral", "nemotron_h", "olmoe", "phimoe", "qwen2_moe",
    "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
)  # fmt: skip
"""Types with experts. (`test_architectures.py`: they, and their files, are as transformers computes them.)"""


@pytest.mark.parametrize("family", FAMILIES)
def test_correction_biases_stay_in_float32(family, make_policy, world, tmp_path):
    """Contract: in an export of any dtype, and nothing else."""
    build_reference(tiny_config(family), tmp_path)
    exported = WeightCopy(make_policy(tmp_path), world, torch.bfloat16).tensors
    exact = {name for name, entry in exported.items() if entry.dtype == "F32"}
    assert exact == {name for name in exported if name.endswith(("correction_bias", "expert_bias"))}


@pytest.mark.parametrize("level", ["pointwise", "wide", "attention"])
def test_experts_are_chosen_once(level, moe_model, make_policy):
    """What a checkpointed block keeps is in the order of its experts: backward takes their choice as it was."""

    class Choices(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.made += operator is torch.ops.aten.topk.default
            return operator(*args, **(kwargs or {}))

    policy = make_policy(moe_model, activation_checkpointing=level)
    with Choices() as choices:
        policy(to_device(collate(support.random_documents(LENGTHS), 1), CPU), cross_entropy)[0].backward()
    assert choices.made == 2


def test_experts_in_float32_are_not_compiled(moe_model, make_policy):
    """Contract: refused in one line where compiling was asked for."""
    with pytest.raises(UserError, match="has experts, which compile in bfloat16 only"):
        make_policy(moe_model, compile=True)


@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "hunyuan_v1_moe", "ernie4_5_moe"])
def test_router_keeps_float32(family, reshard, make_policy, monkeypatch, tmp_path):
    """In bfloat16 blocks routers get float32, with float32 parameters that have gradients in every micro-batch."""
    build_reference(tiny_config(family), tmp_path)
    seen = []
    route = routing.route

    def look(forward: Any, router: nn.Module, hidden: Tensor, *bias: Tensor) -> Any:
        (weight,) = router.parameters()
        seen.append(weight.detach().clone())
        assert hidden.dtype == torch.bfloat16
        _, weights, _ = out = route(forward, router, hidden, *bias)
        assert weight.dtype == weights.dtype == torch.float32
        return out

    policy = make_policy(tmp_path, dtype="bfloat16", reshard_after_forward=reshard)
    monkeypatch.setattr(routing, "route", look)
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
def test_layers_share_a_graph(moe_model, make_policy):
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


def test_fused_files_are_read(moe_model, make_policy, tmp_path):
    """Files that hold all experts of a layer in one tensor, as transformers does, give the same weights."""
    lm = AutoModelForCausalLM.from_pretrained(moe_model, dtype=torch.float32)
    directory = Path(shutil.copytree(moe_model, tmp_path / "model"))
    save_file(dict(lm.named_parameters()), directory / "model.safetensors")
    documents = collate(support.random_documents(LENGTHS), 1)
    a, b = (make_policy(each)(to_device(documents, CPU))[0] for each in (moe_model, directory))
    assert torch.equal(a, b)


@pytest.mark.parametrize("index", [(), (2, slice(1, 3)), (slice(1, 3),)], ids=str)
def test_slices_of_sharded_parameters(index, world, monkeypatch):
    """The rows of all ranks, each from its first one on, are the tensor of the files."""
    whole = torch.arange(5 * 4 * 3).view(5, 4, 3)
    tensor = StoredTensor("", list(whole[index].shape), whole, index)
    out = torch.full(tensor.shape, -1)
    monkeypatch.setattr(parameters, "DTensor", Tensor)
    for place in ((0, 2), (2, 4), (4, 5), (5, 5)):
        monkeypatch.setattr(parameters, "local_part", lambda _, rows=whole[slice(*place)]: rows)
        monkeypatch.setattr(parameters, "rows_of_rank", lambda *_, place=place: place)
        local, start = tensor.local(world)
        if local.numel():
            out[start : start + local.shape[0]] = local
    assert torch.equal(out, whole[index])


@pytest.mark.parametrize("family", ["jamba", "llama4_text", "phimoe"])
def test_routers_that_cannot_be_replayed_are_refused(family, tmp_path):
    """Those that choose otherwise than by the largest scores, or do not return their choice."""
    build_reference(tiny_config(family), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    moe.set_up(model, family)
    with pytest.raises(UserError, match="^router_replay: .* does not return the experts chosen for it"):
        router_replay.set_up(model.model.layers, family)


REPLAYED: dict[str, dict[str, Any]] = {
    **{family: {} for family in (*FAMILIES, "afmoe") if family != "phimoe"},
    # Only one group of two experts has weights.
    "deepseek_v2": {"topk_method": "group_limited_greedy", "n_routed_experts": 8, "n_group": 4, "topk_group": 1},
}


@pytest.mark.parametrize("family", REPLAYED)
def test_routers_of_a_family(family, tmp_path):
    """Contract: a router's choice is replaced, whatever its formula: its own changes nothing, another is computed."""
    build_reference(tiny_config(family, **REPLAYED[family]), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    moe.set_up(model, family)
    assert moe.router_parameters(model)
    routers = router_replay.set_up(model.model.layers, family)
    blocks, seen, ids = moe.moe_blocks(model), list[Tensor](), torch.arange(40)[None] * 7
    count = next(blocks[0].experts.parameters()).shape[0]
    assert (routers.k, routers.experts, len(routers.sparse)) == (2, count, len(blocks))
    for block in blocks:
        block.experts.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        own = seen.copy()
        for chosen in (own, [torch.stack([one[:, 0], (one[:, 0] + 3) % count], 1) for one in own]):
            for block, each in zip(blocks, chosen, strict=True):
                block.router.replayed = each.to(torch.int16)
            seen.clear()
            got = model(ids, use_cache=False).logits
            assert all(map(torch.equal, seen, chosen))
            assert (chosen is own) == torch.allclose(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("level", ["none", "pointwise", "full", "compiled", "replayed"])
def test_a_token_is_counted_once(level, moe_model, make_policy, world):
    """Contract: of all micro-batches, no padding, although backward computes blocks again; replayed experts count."""
    dtype, routers = "bfloat16" if level == "compiled" else "float32", router_replay.Routers(2, (0, 1), 2, 5)
    experts, chosen = np.broadcast_to(np.array([3, 4], dtype=np.int16), (2, 9, 2)), list[Tensor]()
    groups = [[replace(each, experts=experts) for each in support.random_documents(n)] for n in ((17, 40), (9,), ())]
    batches = [collate(group, 1, 16, routers if level == "replayed" else None) for group in groups]
    plain = make_policy(moe_model, dtype=dtype)
    for block in plain.sparse:
        block.experts.register_forward_pre_hook(lambda _, inputs: chosen.append(inputs[1]))
    for batch in batches:
        plain(batch, cross_entropy)
        chosen[-2:] = [each[: batch.tokens].flatten().bincount(minlength=5) for each in chosen[-2:]]
    counts = torch.stack(chosen).view(3, 2, 5).sum(0).float()
    checkpointing = {"compiled": "attention", "replayed": "wide"}.get(level, level)
    policy = make_policy(moe_model, dtype=dtype, activation_checkpointing=checkpointing, compile=level == "compiled")
    sums = forward_backward(policy, batches, cross_entropy, world).tolist()
    assert torch.tensor(sums[:12]).view(2, 6)[:, :5].tolist() == counts.tolist()
    metrics, peaks = step_metrics(policy.sparse, means, sums), counts.amax(1) / (66 * 2 / 5)
    assert metrics["moe/load_max/mean"] == pytest.approx(peaks.mean())
    assert metrics["moe/load_max/max"] == pytest.approx(peaks.max())
    assert metrics["moe/unused_experts"] == (counts == 0).float().mean()
    assert metrics["loss/mean"] == sums[12]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "granitemoe"])
def test_auxiliary_loss(family, make_policy, world, tmp_path):
    """Contract: value and gradients of transformers' function, the mean over layers and, by tokens, micro-batches."""
    build_reference(tiny_config(family), tmp_path)
    policy = make_policy(tmp_path, moe_aux_loss=0.5, activation_checkpointing="pointwise")
    logits, want = list[Tensor](), torch.zeros(())
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    balance: Any = vars(sys.modules[type(model).__module__])["load_balancing_loss_func"]
    for block in moe.moe_blocks(model):
        block.router.register_forward_hook(lambda _, __, out: logits.append(next(o for o in out if o.shape[-1] > 2)))
    batches = [collate(support.random_documents((tokens,)), 1, 16) for tokens in (17, 40)]
    for batch in batches:
        batch.streams.zero_()  # no other loss
        model(batch.input_ids[None, : batch.tokens])
        for of_layer in logits[-2:]:
            want = want + 0.5 * batch.tokens / 57 / 2 * balance((of_layer,), of_layer.shape[1], 2)
    want.backward()
    for block in policy.sparse:
        block.router.loss_scale.fill_(0.5 / 57 / 2)
    sums = forward_backward(policy, batches, cross_entropy, world).tolist()
    assert step_metrics(policy.sparse, means, sums)["moe/aux_loss"] == pytest.approx(want.item(), rel=1e-5)
    assert all(parameter.grad.any() for parameter in moe.router_parameters(model))
    for (name, parameter), other in zip(named_parameters(policy), model.parameters(), strict=True):
        gradient = torch.zeros_like(other) if other.grad is None else other.grad
        torch.testing.assert_close(parameter.grad.full_tensor(), gradient, atol=1e-5, rtol=1e-4, msg=name)


REFUSED = [("qwen3", "aux_loss"), ("jamba", "aux_loss"), ("deepseek_v3", "aux_loss"), ("mixtral", "bias_update")]


@pytest.mark.parametrize(("family", "key"), REFUSED)
def test_others_are_refused(family, key, make_policy, tmp_path):
    build_reference(tiny_config(family), tmp_path)
    with pytest.raises(UserError, match=f"^model.moe_{key}: .*ForCausalLM has no routers with"):
        make_policy(tmp_path, **{f"moe_{key}": 1e-3})


def test_correction_biases(run_training, tmp_path):
    """Contract: those of experts above the mean load fall, others rise. They are exported, also from a run that went on
    from a checkpoint, and the exported model computes what the trainer does."""
    build_reference(tiny_config("deepseek_v3"), tmp_path / "model")
    moe.set_up(lm := AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32), "m")
    (bias,) = correction_biases(blocks := moe.moe_blocks(lm))
    before, found = bias.clone(), []
    update_biases(blocks, torch.tensor([9.0, 2.0, 5.0, 4.0, 0.0, 7.0]), 0.25)
    torch.testing.assert_close(bias - before, torch.tensor([-0.25, 0.25, 0.0, 0.25]))
    for ends in ((3,), (1, 3)):  # odd numbers of updates, which cannot cancel
        support.write_rollouts(directory := tmp_path / str(len(ends)), 3)
        for resumed, end in enumerate(ends):
            ckpt = {"interval": 1, "resume_step": resumed or None}
            config = support.make_config(directory, tmp_path / "model", max_steps=end, ckpt=ckpt)
            model = config.model.model_copy(update={"moe_bias_update": 0.25})
            run_training(config.model_copy(update={"model": model}))
        version = directory / "weights" / "step_3"
        found.append(load_file(version / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"])
    assert torch.equal(*found)
    assert ((found[0] - before).abs() > 0.2).any()
    reference: Any = weights_manifest(version).reference
    ids, lm = torch.tensor(reference.tokens), AutoModelForCausalLM.from_pretrained(version, dtype=torch.float32)
    own = lm(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].tolist()
    assert reference.logprobs == pytest.approx(own, abs=1e-4)
