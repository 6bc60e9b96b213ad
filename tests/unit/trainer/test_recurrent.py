"""Hybrids and other layers: what is computed at once, again or compiled is the same, what is counted, what is refused.
(`test_architectures.py`: a recurrent layer's state never crosses the documents of a packed row.)"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from prime_rl.config.trainer import TrainerModel
from prime_rl.errors import UserError
from prime_rl.trainer import perf, recurrent, recurrent_kernels
from prime_rl.trainer.loss import cross_entropy
from prime_rl.trainer.memory import Shape
from prime_rl.trainer.model import build_policy
from prime_rl.trainer.packing import collate
from prime_rl.trainer.parameters import named_parameters
from prime_rl.trainer.policy_check import check_policy
from prime_rl.trainer.source import find_model
from support import trainer as support
from support.architectures import LENGTHS, VARIANTS, build_reference, tiny_config

# One of each kind of mixer, and of experts.
KINDS = ("qwen3_5_text", "falcon_h1", "jamba", "lfm2", "minimax", "recurrent_gemma", "deepseek_v3", "gpt_oss")


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    directories: dict[str, Path] = {}

    def get(model_type: str) -> Path:
        if model_type not in directories:
            directories[model_type] = tmp_path_factory.mktemp(model_type)
            kind, settings = VARIANTS.get(model_type, (model_type, {}))
            build_reference(tiny_config(kind, **settings), directories[model_type])
        return directories[model_type]

    return get


@pytest.mark.parametrize(
    "settings",
    [
        {"activation_checkpointing": "pointwise"},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "attention", "activation_offload": True, "reshard_after_forward": True},
    ],
    ids=["pointwise", "full", "sharded and offloaded"],
)
@pytest.mark.parametrize("model_type", KINDS)
def test_what_is_computed_again_is_the_same(model_type, settings, saved, make_policy):
    """Even when another micro-batch went through the layers between forward and backward."""
    groups = [support.random_documents(LENGTHS), support.random_documents((3, 30))]
    want = support.gradients(make_policy(saved(model_type), activation_checkpointing="none"), groups)
    policy = make_policy(saved(model_type), **settings)
    masters = dict(named_parameters(policy))  # while gathered, modules hold copies
    for unit in policy.units:
        unit.set_reshard_after_backward(False)
    losses = [policy(collate(group, 1), cross_entropy)[0] for group in groups]
    for loss in losses:
        loss.backward()
    for name, parameter in masters.items():
        torch.testing.assert_close(parameter.grad.full_tensor(), want[name], atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize(("name", "kinds"), [("recurrent_gemma", 1), ("granite_swa", 2), ("llama4 chunks", 2)])
def test_what_is_compiled_is_the_same(name, kinds, saved, world):
    """Whole layers with attention (also with a product of symbolic width, with windows, chunks and temperatures), which
    are one graph for each kind and all packs, and feed-forward layers around recurrent modules."""
    source = find_model(str(saved(name)))
    plain, policy = (
        build_policy(source, TrainerModel(compile=compiled, activation_checkpointing=level), world, tokens=69)
        for compiled, level in ((False, "none"), (True, "pointwise"))
    )
    counters.clear()
    for lengths in ((30, 39), LENGTHS, (69,)):
        groups = [support.random_documents(lengths)]
        want = support.gradients(plain, groups)
        for parameter, gradient in support.gradients(policy, groups).items():
            scale = max(1.0, want[parameter].abs().max().item())
            torch.testing.assert_close(gradient, want[parameter], atol=4e-5 * scale, rtol=0, msg=parameter)
    assert counters["stats"]["unique_graphs"] == kinds + 2  # the head, for one number of loss tokens and for any


def use_kernels(monkeypatch: pytest.MonkeyPatch, ignored: int = 0, slope: float = 1.0) -> None:
    """flash-linear-attention's, in torch's own operations: they ignore so many boundaries, and scale gradients."""

    def alone(function: Callable[..., Tensor], *row: Tensor, cu_seqlens: Tensor) -> Tensor:
        lengths = cu_seqlens[[0, *range(1 + ignored, len(cu_seqlens))]].diff().tolist()
        return torch.cat([function(*each) for each in zip(*(x.split(lengths, 1) for x in row), strict=True)], 1)

    mix = partial(alone, lambda q, k, v, g, b: torch_chunk_gated_delta_rule(q, k, v, g=g, beta=b)[0])

    def differentiate(function: Callable[..., Tensor], d_out: Tensor, *row: Tensor, **named: Any) -> Sequence[Tensor]:
        leaves = [x.detach().requires_grad_() for x in row]
        out = partial(function, *leaves, cu_seqlens=named["cu_seqlens"])
        with ThreadPoolExecutor(1) as thread:  # autograd does nothing within an operator
            return thread.submit(lambda: torch.autograd.grad(out(), leaves, slope * d_out)).result()

    def rule(*row: Any, cu_seqlens: Tensor, **named: Any) -> Sequence[Tensor]:
        return row[3].clone(), mix(*row[:5], cu_seqlens=cu_seqlens), row[3].new_zeros(*row[3].shape, 64)

    def rule_backward(*row: Any, **named: Any) -> Sequence[Tensor]:
        *d_qkv, dg, d_beta = differentiate(mix, row[8], *row[:5], **named)
        return *d_qkv, d_beta, dg

    kernels = SimpleNamespace(chunk_gated_delta_rule_fwd=rule, chunk_gated_delta_rule_bwd=rule_backward)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule.chunk", kernels)


@pytest.mark.parametrize(
    ("kernels", "reason"),
    [(None, "No module named 'fla'"), ({"ignored": 1}, "do not keep documents apart"), ({"slope": 1.05}, "off by 5")],
)
def test_kernels_are_tried(kernels, reason, monkeypatch):
    """One that ignores boundaries, or has a wrong gradient, is not trusted; nor is one that is missing."""
    if kernels is not None:
        use_kernels(monkeypatch, **kernels)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(tiny_config("qwen3_5_text"))
    mixer, width = recurrent.mixers(lm.model.layers)[0], lm.config.hidden_size
    assert reason in str(recurrent.try_at_once(mixer, width, torch.float32, torch.device("cpu")))


def test_another_librarys_convolution():
    """Of causal-conv1d, which transformers takes where it is installed, `activation` is no fourth argument."""

    def convolve(x: Tensor, weight: Tensor, bias: Any = None, seq_idx: Any = None, activation: Any = None) -> Any:
        return seq_idx, activation

    ours = recurrent_kernels.AT_ONCE["causal_conv1d_fn"]
    assert ours(convolve, torch.ones(1, 2, 5), torch.ones(2, 4), None, activation="silu") == (None, "silu")


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize(("model_type", "kind"), [("qwen3_5_text", "linear_attention"), ("lfm2", "conv")])
def test_all_documents_at_once(model_type, kind, world, monkeypatch, tmp_path):
    """Tried, and compiled with the layer, it is one document at a time, for any number and length of documents; one
    graph serves all layers of a kind."""
    use_kernels(monkeypatch)
    config = tiny_config(model_type, num_hidden_layers=3, layer_types=[kind, kind, "full_attention"])
    build_reference(config, tmp_path)
    source, groups = find_model(str(tmp_path)), [*map(support.random_documents, ((70, 1, 64), (90, 2), LENGTHS))]
    want = support.gradients(build_policy(source, TrainerModel(compile=False), world), groups)
    monkeypatch.setattr(recurrent, "why_one_by_one", recurrent.try_at_once)
    policy = build_policy(source, TrainerModel(compile=True, activation_checkpointing="attention"), world)
    assert policy.boundaries is recurrent.on_device
    counters.clear()
    for name, gradient in support.gradients(policy, groups).items():
        assert (gradient - want[name]).norm() <= 1e-3 * want[name].norm(), name
    assert counters["stats"]["unique_graphs"] <= 8  # layers, norm and head, for one number of tokens and for any
    check_policy(policy, "tiny", world, torch.float32)


def test_what_is_counted():
    """Attention counts where it is, convolutions whole, and a recurrent layer's projections take memory."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(tiny_config("qwen3_5_text"))
    assert perf.attention_layers(lm) == 1
    matrices = sum(p.numel() for p in lm.parameters() if p.ndim > 1) - lm.get_input_embeddings().weight.numel()
    assert perf.matmul_parameters(lm) == matrices
    delta = lm.model.layers[0].linear_attn
    projections = delta.in_proj_qkv, delta.in_proj_z, delta.in_proj_b, delta.in_proj_a, delta.out_proj
    assert Shape.of(lm).mixed == sum(projection.out_features for projection in projections)


def test_shared_layers_are_refused(make_policy, tmp_path):
    build_reference(tiny_config("zamba"), tmp_path)
    with pytest.raises(UserError, match=r"\(ZambaForCausalLM\) shares weights between its layers"):
        make_policy(tmp_path)
