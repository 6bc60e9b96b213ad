"""The policy: what its head is read from, gradients of one rank, freed weights; what does not fit is refused in
one line. (`test_architectures.py`: packing changes nothing.)"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import Qwen3ForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from prime_rl.config.trainer import TrainerModel
from prime_rl.errors import UserError
from prime_rl.trainer.lm_head import PLAIN
from prime_rl.trainer.loss import cross_entropy
from prime_rl.trainer.model import build_policy
from prime_rl.trainer.packing import collate, to_device
from prime_rl.trainer.parameters import named_parameters
from prime_rl.trainer.source import find_model
from support import trainer as support
from support.architectures import build_reference, tiny_config

gradients = support.gradients

CPU = torch.device("cpu")


def change_logits(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """Let Qwen3's forward change its logits."""
    plain = Qwen3ForCausalLM.forward

    def forward(self: Qwen3ForCausalLM, *args: object, **kwargs: object) -> CausalLMOutputWithPast:
        out = plain(self, *args, **kwargs)
        return CausalLMOutputWithPast(logits=change(out.logits))

    monkeypatch.setattr(Qwen3ForCausalLM, "forward", forward)


def test_a_scale_and_a_cap(tied_model, make_policy, monkeypatch):
    """An unknown forward's scale and cap are read off it, to float32's accuracy; and nothing off a plain one."""
    assert make_policy(tied_model).head_form == PLAIN
    change_logits(monkeypatch, lambda logits: 30 * torch.tanh(logits.float() / 3.7 / 30))
    form = make_policy(tied_model).head_form
    assert form.scale == pytest.approx(1 / 3.7, rel=1e-7)
    assert form.cap == pytest.approx(30, rel=1e-7)


OTHER_CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda logits: logits / logits.square().mean(-1, keepdim=True).sqrt(),
    "shift": lambda logits: logits + torch.linspace(0, 1, logits.shape[-1]),
    "clamp": lambda logits: logits.clamp(-4, 4),
    "negated": lambda logits: -logits,
    "not finite": lambda logits: logits * torch.nan,
    "failing": lambda logits: logits @ torch.ones(3, 3),
}


@pytest.mark.parametrize("change", OTHER_CHANGES)
def test_other_changes_of_logits_are_refused(change, tied_model, make_policy, monkeypatch):
    """What is neither a scale nor a soft-cap nor a bias is refused in one line with the architecture and the error."""
    change_logits(monkeypatch, OTHER_CHANGES[change])
    message = "does not compute logits" if change == "failing" else r"changes its logits by more .* off by (\d|nan)"
    with pytest.raises(UserError, match=rf"tied.* Qwen3ForCausalLM {message}") as caught:
        make_policy(tied_model)
    assert "\n" not in str(caught.value)


def test_backward_has_the_weights_that_it_reads(dense_model, make_policy):
    """Where weights are freed, one pass keeps those of embedding and head neither after forward nor while backward is
    in the layers; two passes read the head's again in backward. Both give the same gradients, again and again."""
    policy = make_policy(dense_model, reshard_after_forward=True)
    batch = to_device(collate(support.random_documents((17, 30)), 1), CPU)
    held, results = list[bool](), []

    def root_is_gathered() -> bool:
        (group,) = policy._get_fsdp_state()._fsdp_param_groups
        return any(p._unsharded_param.untyped_storage().size() for p in group.fsdp_params)

    policy.lm.model.layers[0].register_full_backward_pre_hook(lambda *_: held.append(root_is_gathered()))
    for in_one_pass in (True, False, True):
        policy.zero_grad()
        loss, _ = policy(batch, cross_entropy) if in_one_pass else cross_entropy(*policy(batch), batch.streams)
        held.append(root_is_gathered())
        loss.backward()
        results.append({name: p.grad.full_tensor().clone() for name, p in named_parameters(policy)})
    assert held == [False, False, False, True, False, False]  # after forward, and in the layers' backward
    for result in results[1:]:
        for name, gradient in results[0].items():
            torch.testing.assert_close(result[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_a_single_rank_have_the_bits_of_torchs(dtype, each_model, make_policy, monkeypatch):
    """Added up where they are, over two steps of two micro-batches, with weights gathered (no FSDP) or freed."""
    groups = [support.random_documents((17, 30)), support.random_documents((25,))]
    ours = [make_policy(each_model, dtype=dtype, reshard_after_forward=reshard) for reshard in (False, True)]
    monkeypatch.setattr(FSDPModule, "set_custom_reduce_scatter", lambda unit, comm: None)
    policies = *ours, make_policy(each_model, dtype=dtype, reshard_after_forward=True)
    masters = [dict(named_parameters(policy)) for policy in policies]  # while gathered, modules hold copies
    for _ in range(2):
        for policy in policies:
            policy.zero_grad()
        for last, group in zip((False, True), groups, strict=True):
            for policy in policies:
                for unit in policy.units:
                    unit.set_reshard_after_backward(last)
                policy(to_device(collate(group, 1), CPU), cross_entropy)[0].backward()
            *found, wanted = ({name: p.grad.to_local() for name, p in of.items()} for of in masters)
            for name, gradient in wanted.items():
                assert gradient.dtype == torch.float32
                assert all(torch.equal(gradients[name], gradient) for gradients in found), name
        for policy in policies:
            for parameter in policy.parameters():  # masters again, since the step's last backward
                parameter.to_local().detach().mul_(1.01)


def test_a_last_norm_of_another_name(make_policy, tmp_path):
    """Persimmon's last norm is no part of the root, whose weights are freed before backward."""
    build_reference(tiny_config("persimmon"), tmp_path)
    groups = [support.random_documents((17, 30)), support.random_documents((25,))]
    freed, kept = (make_policy(tmp_path, reshard_after_forward=reshard) for reshard in (True, False))
    want = gradients(kept, groups)
    assert any("final_layernorm" in name and gradient.any() for name, gradient in want.items())
    for name, gradient in gradients(freed, groups).items():
        torch.testing.assert_close(gradient, want[name], atol=1e-6, rtol=1e-5, msg=name)


def retensor(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


BREAKAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "no config.json"),
    "config is not JSON": (lambda d: (d / "config.json").write_text("{"), "config.json cannot be used"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "holds no safetensors files"),
    "truncated": (lambda d: (d / "model.safetensors").write_bytes(b"\1\0\0"), "damaged or unreadable"),
    "missing tensor": (lambda d: retensor(d, lambda t: t.pop("model.norm.weight")), "no tensor model.norm.weight"),
    "missing expert": (
        lambda d: retensor(d, lambda t: t.pop("model.layers.1.mlp.experts.2.up_proj.weight")),
        "has no tensor model.layers.1.*2.up_proj",
    ),
    "misshapen expert": (
        lambda d: retensor(d, lambda t: t.update({"model.layers.0.mlp.experts.1.down_proj.weight": torch.ones(2, 3)})),
        "has shape .2, 3.",
    ),
    "wrong shape": (
        lambda d: retensor(d, lambda t: t.update({"model.norm.weight": torch.ones(3)})),
        r"model.norm.weight has shape \[3\], the model's has \[64\]",
    ),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_broken_model_directory(name, world, moe_model, tmp_path):
    """Each way a model directory can be broken is one clear line. A missing path is not looked up on the hub."""
    change, message = BREAKAGES[name]
    directory = Path(shutil.copytree(moe_model, tmp_path / "model"))
    change(directory)
    with pytest.raises(UserError, match=message) as caught:
        build_policy(find_model(str(directory)), TrainerModel(), world)
    assert "\n" not in str(caught.value)
    for missing in (str(tmp_path / "none"), "./no-such-model", "outputs/weights/step_3"):
        with pytest.raises(UserError, match=f"{missing} does not exist"):
            find_model(missing)


def test_random_weights_follow_the_seed(world, tied_model, tmp_path):
    """The same seed gives the same random model, another seed another one, and norms are 1."""
    (tmp_path / "config.json").write_text((tied_model / "config.json").read_text())
    source = find_model(str(tmp_path), random_weights=True)
    a, b, c = (
        {n: p.full_tensor() for n, p in named_parameters(build_policy(source, TrainerModel(), world, seed))}
        for seed in (0, 0, 1)
    )
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])
    assert (a["model.norm.weight"] == 1).all()
