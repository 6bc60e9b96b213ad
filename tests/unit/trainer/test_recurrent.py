"""Hybrids: a recurrent layer's state never crosses the documents of a packed row, whatever the family."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from prime_rl.errors import UserError
from prime_rl.trainer import perf
from prime_rl.trainer.loss import cross_entropy
from prime_rl.trainer.memory import Shape
from prime_rl.trainer.model import Policy
from prime_rl.trainer.packing import Document, collate, to_device
from prime_rl.trainer.parallel import World
from prime_rl.trainer.parameters import named_parameters, stored_tensors, write_tensors
from support import trainer as support

CPU = torch.device("cpu")
LENGTHS = (17, 2, 40, 1, 9)  # convolutions reach over 4 tokens, scans go in chunks of 8, delta rules in chunks of 64

SHAPE: dict[str, Any] = {
    "vocab_size": support.VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_d_conv": 4, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2,
    "mamba_chunk_size": 8, "mamba_expand": 2,
}  # fmt: skip
MULTIPLIERS: dict[str, Any] = {
    "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 0.9], "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.8,
    "embedding_multiplier": 2.0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "qwen3_5_text tied": DELTA | {"tie_word_embeddings": True},
    "qwen3_next": DELTA | {"mlp_only_layers": [0, 1, 2], "num_experts": 4, "moe_intermediate_size": 32},
    "falcon_h1": MAMBA | MULTIPLIERS | {"mamba_d_ssm": 128},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": MAMBA
    | {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0, "shared_intermediate_size": 96},
    "zamba2": MAMBA
    | {"layers_block_type": ["mamba", "hybrid", "mamba"], "mamba_ngroups": 2, "n_mamba_heads": 8, "num_mem_blocks": 1},
    "zamba": {"layers_block_type": ["mamba", "hybrid", "mamba"]},
    "jamba": {
        "num_experts": 1, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_d_conv": 4,
        "mamba_dt_rank": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3},
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4,
        "chunk_size": 8, "expand": 2, "layers_block_type": ["mamba", "attention", "mlp"],
    },
    "minimax": {"layer_types": DELTA["layer_types"], "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8},
    "qwen3_5_moe_text": DELTA | EXPERTS,
    "recurrent_gemma": {
        "lru_width": 64, "attention_window_size": 8, "block_types": ["recurrent", "recurrent", "attention"],
    },
}  # fmt: skip
# Delta rules solve triangular systems: transformers' own gradients in float32 are 1.6e-5 off those in float64.
GRADIENT_ERROR = {"qwen3_next": 4e-5, "qwen3_5_moe_text": 4e-5}
# One of each kind of mixer.
KINDS = ("qwen3_5_text", "falcon_h1", "jamba", "lfm2", "minimax", "recurrent_gemma")


def save(model_type: str, directory: Path) -> Path:
    """A random model; its vectors are not all alike, so that none can be left out or given to another head."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type.split()[0], **{**SHAPE, **FAMILIES[model_type]})
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    directories: dict[str, Path] = {}

    def get(model_type: str) -> Path:
        if model_type not in directories:
            directories[model_type] = save(model_type, tmp_path_factory.mktemp(model_type))
        return directories[model_type]

    return get


def transformers_own(directory: Path, documents: list[Document]) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities of the loss tokens, one document at a time, and gradients of the cross-entropy."""
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").train()
    logprobs, loss = [], torch.zeros(())
    for document in documents:
        ids, trained = torch.tensor(document.input_ids), torch.tensor(document.loss_mask[1:])
        logits = theirs(ids[None], use_cache=False).logits[0, :-1] / document.temperature
        logprobs.append(torch.log_softmax(logits, -1).gather(1, ids[1:, None]).squeeze(1)[trained])
        loss -= (logprobs[-1] * torch.tensor(document.streams[0, 1:])[trained]).sum()
    loss.backward()
    return torch.cat(logprobs).detach(), {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_packed_equals_alone_equals_transformers(
    model_type: str, saved: Callable[[str], Path], make_policy: Callable[..., Policy]
) -> None:
    """Log-probabilities, and gradients of every parameter."""
    policy = make_policy(saved(model_type), head_chunk=7)
    documents = support.random_documents(LENGTHS)
    packed = policy(to_device(collate(documents, 1), CPU))
    alone = [policy(to_device(collate([document], 1), CPU)) for document in documents]
    for a, b in zip(packed, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(a, torch.cat(b), atol=1e-5, rtol=1e-5)
    logprobs, gradients = transformers_own(saved(model_type), documents)
    torch.testing.assert_close(packed[0], logprobs, atol=1e-5, rtol=1e-5)

    together = support.gradients(policy, [documents])
    apart = support.gradients(policy, [[document] for document in documents])
    assert together.keys() == gradients.keys()
    error = GRADIENT_ERROR.get(model_type, 1e-5)
    for name, gradient in together.items():
        assert gradient.any(), f"{name} has no gradient"
        scale = max(1.0, gradient.abs().max().item())
        for other in (apart[name], gradients[name]):
            torch.testing.assert_close(gradient, other, atol=error * scale, rtol=0, msg=name)


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if "tied" not in name])
def test_a_poisoned_document_leaves_its_neighbours_alone(
    model_type: str, saved: Callable[[str], Path], make_policy: Callable[..., Policy]
) -> None:
    """Between two documents lies one of ordinary, of huge and of no numbers: the others' log-probabilities have the same
    bits, and (where no infinity is multiplied by their zeros) so have all gradients of their loss."""
    policy = make_policy(saved(model_type))
    masters = dict(named_parameters(policy))  # while gathered, modules hold copies
    poison = support.VOCABULARY - 1
    documents = [
        replace(document, input_ids=document.input_ids % poison, loss_mask=document.loss_mask & (index != 1))
        for index, document in enumerate(support.random_documents((17, 21, 30)))
    ]
    documents[1] = replace(documents[1], input_ids=np.full(21, poison))
    batch = to_device(collate(documents, 1), CPU)
    with torch.no_grad():
        row = policy.lm.get_input_embeddings().weight.to_local()[poison]
        row.copy_(torch.randn_like(row))

    def compute(scale: float) -> tuple[Tensor, dict[str, Tensor]]:
        row.detach().mul_(scale)
        for unit in policy.units:
            unit.reshard()
        policy.zero_grad()
        loss, _ = cross_entropy(*policy(batch), batch.streams)
        loss.backward()
        logprobs, _ = policy(batch)
        return logprobs.detach(), {name: p.grad.full_tensor().clone() for name, p in masters.items()}

    logprobs, gradients = compute(1.0)
    huge, of_huge = compute(1e4)
    assert torch.equal(huge, logprobs)
    for name, gradient in gradients.items():
        assert torch.equal(of_huge[name], gradient), name
    assert torch.equal(compute(torch.nan)[0], logprobs)


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
def test_what_is_computed_again_is_the_same(
    model_type: str, settings: dict[str, Any], saved: Callable[[str], Path], make_policy: Callable[..., Policy]
) -> None:
    """Even when another micro-batch went through the layers between forward and backward."""
    groups = [support.random_documents(LENGTHS), support.random_documents((3, 30))]
    want = support.gradients(make_policy(saved(model_type), activation_checkpointing="none"), groups)
    policy = make_policy(saved(model_type), **settings)
    masters = dict(named_parameters(policy))  # while gathered, modules hold copies
    for unit in policy.units:
        unit.set_reshard_after_backward(False)
    losses = [policy(to_device(collate(group, 1), CPU), cross_entropy)[0] for group in groups]
    for loss in losses:
        loss.backward()
    for name, parameter in masters.items():
        torch.testing.assert_close(parameter.grad.full_tensor(), want[name], atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.usefixtures("quick_compiler")
def test_what_is_compiled_around_recurrent_modules_is_the_same(
    saved: Callable[[str], Path], make_policy: Callable[..., Policy]
) -> None:
    """Whole layers with attention (here with a product of symbolic width) and others' feed-forward layers."""
    model_type = "recurrent_gemma"
    policy = make_policy(saved(model_type), compile=True, activation_checkpointing="pointwise")
    for lengths in ((5, 33), LENGTHS):
        groups = [support.random_documents(lengths)]
        want = support.gradients(make_policy(saved(model_type), activation_checkpointing="none"), groups)
        for name, gradient in support.gradients(policy, groups).items():
            scale = max(1.0, want[name].abs().max().item())
            torch.testing.assert_close(gradient, want[name], atol=4e-5 * scale, rtol=0, msg=name)


@pytest.mark.parametrize("model_type", KINDS)
def test_exported_weights_are_transformers_again(
    model_type: str, saved: Callable[[str], Path], make_policy: Callable[..., Policy], world: World, tmp_path: Path
) -> None:
    """Vectors and convolutions under the same names: what is exported after an update is what transformers loads."""
    policy = make_policy(saved(model_type))
    for parameter in policy.parameters():
        parameter.to_local().detach().mul_(1.01)
    (tmp_path / "config.json").write_text((saved(model_type) / "config.json").read_text())
    write_tensors(tmp_path / "model.safetensors", {t.name: t.local(world)[0] for t in stored_tensors(policy)})
    documents = support.random_documents(LENGTHS)
    logprobs, _ = policy(to_device(collate(documents, 1), CPU))
    torch.testing.assert_close(logprobs, transformers_own(tmp_path, documents)[0], atol=1e-5, rtol=1e-5)


def test_what_is_counted() -> None:
    """Attention counts where it is, convolutions whole, and a recurrent layer's projections take memory."""
    with torch.device("meta"):
        config = AutoConfig.for_model("qwen3_5_text", **SHAPE, **DELTA)
        lm = AutoModelForCausalLM.from_config(config)
    assert perf.attention_layers(lm) == 1
    matrices = sum(p.numel() for p in lm.parameters() if p.ndim > 1) - lm.get_input_embeddings().weight.numel()
    assert perf.matmul_parameters(lm) == matrices
    delta = lm.model.layers[0].linear_attn
    projections = delta.in_proj_qkv, delta.in_proj_z, delta.in_proj_b, delta.in_proj_a, delta.out_proj
    assert Shape.of(lm).mixed == sum(projection.out_features for projection in projections)


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("mamba", {}, r"\(MambaForCausalLM\) has not the form"),
        ("olmo_hybrid", DELTA, r"files of OlmoHybridForCausalLM hold .*q_conv1d.weight in a form that the trainer"),
        ("zamba2", {**FAMILIES["zamba2"], "layers_block_type": ["hybrid"] * 3, "tie_word_embeddings": True},
         r"\(Zamba2ForCausalLM\) shares weights between its layers"),
    ],
    ids=["mamba", "olmo_hybrid", "zamba2"],
)  # fmt: skip
def test_refused_by_name(
    model_type: str, settings: dict[str, Any], reason: str, make_policy: Callable[..., Policy], tmp_path: Path
) -> None:
    config = AutoConfig.for_model(model_type, **{**SHAPE, **settings})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=reason):
        make_policy(tmp_path)
