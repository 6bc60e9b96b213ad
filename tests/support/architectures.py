"""Tiny random models of every type that transformers knows, and how far the trainer is from transformers on them."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from prime_rl.config.trainer import TrainerModel
from prime_rl.errors import UserError
from prime_rl.trainer.loss import cross_entropy
from prime_rl.trainer.model import build_policy
from prime_rl.trainer.packing import Document, collate
from prime_rl.trainer.parallel import World
from prime_rl.trainer.parameters import named_parameters, stored_tensors
from prime_rl.trainer.perf import step_costs
from prime_rl.trainer.policy_check import check_policy
from prime_rl.trainer.source import find_model
from support.trainer import random_documents

VOCABULARY = 320  # 32 more than documents use: tokens that a model treats in a special way (images, padding)
LARGEST = 20_000_000  # parameters of a tiny model
LENGTHS = (17, 2, 40, 1, 9)  # of documents that share a row: longer than windows and chunks, shorter than a convolution

# What a field of a config is set to, if the config has it.
_WIDTHS = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim_model": 64, "embedding_size": 64,
    "intermediate_size": 96, "ffn_hidden_size": 96, "ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_ffn_dim": 96,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "moe_shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48, "expert_ffn_hidden_size": 32, "intermediate_size_mlp": 80,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "attention_heads": 4, "num_key_value_heads": 2,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dim_head": 16,
    "num_global_key_value_heads": 1, "global_head_dim": 32, "dense_intermediate_size": 80,
    "max_position_embeddings": 128, "n_positions": 128, "max_seq_len": 128, "sliding_window": 8,
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_k": 2, "moe_topk": 2, "top_k_experts": 2, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "attention_chunk_size": 16,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_dt_rank": 4,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8, "state_size": 8,
    "mamba_d_ssm": 128, "mamba_n_groups": 2, "time_step_rank": 4,
    "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8,
    "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "laurel_rank": 8,
    "query_pre_attn_scalar": 24, "router_hidden_size": 16,
}  # fmt: skip
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
# Multipliers that do nothing by default, so that one that is left out would not be noticed.
_NEUTRAL = re.compile(r"multiplier|scaling|scale")
_TOKEN = re.compile(r"_(token|token_id|token_index)$")

FAMILIES: dict[str, tuple[str, ...]] = {
    "Llama 3": ("llama",), "Llama 4 (text)": ("llama4_text",), "Mistral": ("mistral",),
    "Ministral": ("ministral", "ministral3"), "Qwen2": ("qwen2",), "Qwen3": ("qwen3",), "Phi-3, Phi-4": ("phi3",),
    "Gemma 2": ("gemma2",), "Gemma 3 (text)": ("gemma3_text",),
    "Granite 3": ("granite",), "Granite 4": ("granitemoehybrid",), "Cohere": ("cohere",), "Cohere2": ("cohere2",),
    "OLMo 2": ("olmo2",), "OLMo 3": ("olmo3",), "SmolLM3": ("smollm3",), "GLM-4": ("glm4",), "gpt-oss": ("gpt_oss",),
    "EXAONE 4": ("exaone4",), "ERNIE 4.5": ("ernie4_5",), "Hunyuan (dense)": ("hunyuan_v1_dense",),
    "Starcoder2": ("starcoder2",), "Falcon-H1": ("falcon_h1",), "LFM2": ("lfm2",), "Nemotron-H": ("nemotron_h",),
    "Qwen3-MoE": ("qwen3_moe",), "Qwen3-Next": ("qwen3_next",), "Qwen3.5": ("qwen3_5_text",),
    "Qwen3.5-MoE": ("qwen3_5_moe_text",), "GLM-4.5": ("glm4_moe",),
    "DeepSeek-V3": ("deepseek_v3",), "Mixtral": ("mixtral",), "OLMoE": ("olmoe",), "Granite-MoE": ("granitemoe",),
    "Phi-1, Phi-2": ("phi",), "Gemma 4 (text)": ("gemma4_text",), "AFMoE": ("afmoe",), "Apertus": ("apertus",),
}  # fmt: skip
"""Families whose contract `tests/unit/trainer/test_architectures.py` guards, and their types."""

_GEMMA4 = {
    "head_dim": 16, "global_head_dim": 32, "num_key_value_heads": 2, "num_kv_shared_layers": 0,
    "final_logit_softcapping": 4.0, "per_layer_config": {1: {"head_dim": 32}},
}  # fmt: skip
_COMPASS = {"full_attention": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [3, 3, 2]}}
# What the rule above does not get right.
OVERRIDES: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": _COMPASS, "logit_scale": 0.25},
    "cwm": {"layer_types": ["sliding_attention", "full_attention"]},
    "dbrx": {
        "tie_word_embeddings": False, "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "doge": {"num_experts": 16, "is_moe": False},
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_layer_end_index": 1, "moe_layer_interval": 1},
    "falcon_h1": {"mlp_multipliers": [1.25, 0.75], "ssm_multipliers": [1.25, 0.75, 1.5, 0.8, 1.1]},
    "gemma3n_text": {
        "num_hidden_layers": 5, "layer_types": [*["sliding_attention", "full_attention"] * 2, "sliding_attention"],
        "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0, 0.0], "num_kv_shared_layers": 2,
        "intermediate_size": [96] * 5,
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "gpt_neo": {
        "num_layers": 2, "attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"],
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 4},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1},
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "longcat_flash": {"zero_expert_num": 2},
    "llama4_text": {"moe_layers": [1], "attention_chunk_size": 128, "num_experts_per_tok": 1, "attn_scale": 0.5},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"],
        "index_block_size": 4, "index_topk_blocks": 2,
    },
    "qwen4_exp_text": {
        "ple_embed_dim": 64, "hc_lowrank": 8, "heads_per_ngram": 2, "ngram_vocab_size_base": 200,
        "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 2,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 48], "axial_pos_shape": [8, 16], "num_buckets": 4},
    "xglm": {"attention_heads": 4},
    "xlm": {"emb_dim": 64},
    "zamba": {
        "n_mamba_heads": 2, "attention_hidden_size": 128, "attention_head_dim": 32, "num_hidden_layers": 5,
        "attn_layer_period": 2, "attn_layer_offset": 1, "layers_block_type": None,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def tiny_config(model_type: str, **settings: Any) -> PreTrainedConfig:
    """The default config of a type, with a few narrow layers that have one of each kind, and `settings`."""
    kind = CONFIG_MAPPING[model_type]
    return kind(**{**_shrunk(kind()), **settings})


def _shrunk(default: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a config that are not as in `default`."""
    assert is_dataclass(default)
    values = {field.name: vars(default).get(field.name) for field in fields(default)}
    changed: dict[str, Any] = {}
    special = VOCABULARY - 32
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            changed[name] = _shrunk(value)
        elif name in _WIDTHS and (value is not None or name in ("head_dim", "num_key_value_heads")):
            changed[name] = _WIDTHS[name]
        elif _TOKEN.search(name) and isinstance(value, int | list) and not isinstance(value, bool):
            if isinstance(value, list) or value >= VOCABULARY - 32:
                changed[name] = special = special + 1
        elif isinstance(value, float) and value == 1.0 and _NEUTRAL.search(name):
            changed[name] = 1.25
    if "kv_lora_rank" in values:  # latent attention has a key for every query head
        changed["num_key_value_heads"] = _WIDTHS["num_attention_heads"]
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if values.get(name) is not None:
            changed[name] = 4.0  # so that the logits of a tiny model reach it
    count_name = next((name for name in _LAYERS if isinstance(values.get(name), int)), None)
    if count_name is not None:
        count = values[count_name]
        lists = {
            name: value
            for name, value in values.items()
            if isinstance(value, list | tuple) and len(value) == count and list(value) != list(range(count))
        }
        kinds = list(dict.fromkeys(zip(*lists.values(), strict=True)))[:6]
        layers = [kinds[index % len(kinds)] for index in range(max(2, len(kinds)))] if kinds else [(), ()]
        for name in set(values) & set(_LAYERS):
            changed[name] = len(layers)
        changed |= {name: [layer[index] for layer in layers] for index, name in enumerate(lists)}
    return {**changed, **OVERRIDES.get(default.model_type, {})}


# Flags that change no number, or are not of the architecture.
_SAME = re.compile(r"use_cache|tie_.*|output_.*|is_(encoder_)?decoder|return_dict|.*kernels?|.*cache.*|add_cross.*")
_CLIPS = {"clip_qkv", "qkv_clip", "final_logit_softcapping", "attn_logit_softcapping", "moe_jitter_eps"}
_ROPE: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.8, "mscale_all_dim": 0.6},
    "llama3": {"factor": 4.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"original_max_position_embeddings": 100},
}


def variants(config: PreTrainedConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Settings that make another model of a type: each flag turned over, dropout and noise, clipping, kinds of rotary
    embedding (all kinds for Llama, whose code the others share), sizes of heads."""
    names = {field.name for field in fields(config)}  # type: ignore[arg-type]
    for name in sorted(names):
        value = vars(config).get(name)
        if isinstance(value, bool) and not _SAME.fullmatch(name):
            yield f"{name}={not value}", {name: not value}
        elif value is None and name in _CLIPS:
            yield f"{name}=1", {name: 1.0}
        elif isinstance(value, float | int) and re.search("dropout|pdrop|jitter", name) and "classifier" not in name:
            yield f"{name}=0.3", {name: 0.3}
    rope = vars(config).get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        head_dim = vars(config).get("head_dim") or config.hidden_size // config.num_attention_heads
        half = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
        factors = {"short_factor": [1.1] * half, "long_factor": [1.0 + index for index in range(half)]}
        for kind in _ROPE if config.model_type == "llama" else ("dynamic", "yarn", "longrope"):
            own = {**_ROPE[kind], **(factors if kind == "longrope" else {})}
            yield f"{kind} rope", {"rope_parameters": {**rope, "rope_type": kind, **own}}
        if (
            config.model_type == "llama"
        ):  # beyond the length from which on the longest document sets the frequencies of all
            long = {**rope, "rope_type": "longrope", **factors, "original_max_position_embeddings": 16}
            yield "longrope beyond 16 tokens", {"rope_parameters": long}
            yield (
                "dynamic rope beyond 32 tokens",
                {"rope_parameters": {**rope, "rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32},
            )
        yield "partial rope", {"rope_parameters": {**rope, "partial_rotary_factor": 0.5}}
    layers = list(vars(config).get("layer_types") or ())
    if "sliding_window" in names and layers and not any("sliding" in kind for kind in layers):
        switch = {"use_sliding_window": True} if "use_sliding_window" in names else {}
        yield "sliding window", {"layer_types": ["sliding_attention", *layers[1:]], "sliding_window": 8, **switch}
    if vars(config).get("head_dim") and "head_dim" in names:
        yield "wide heads", {"head_dim": 24}


_ROPES = dict(variants(tiny_config("llama")))
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: ("llama", _ROPES[f"{kind} rope"]) for kind in ("linear", "dynamic", "yarn", "llama3", "longrope")},
    **{f"{name} sliding": (name, dict(variants(tiny_config(name)))["sliding window"]) for name in ("qwen2", "smollm3")},
    "granite_swa": ("granite_swa", {"layer_types": ["sliding_attention", "full_attention"]}),
    "granitemoeshared": ("granitemoeshared", {"logits_scaling": 2.0}),
    "deepseek_v2 groups": ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}),
    "qwen3_moe logged": ("qwen3_moe", {"norm_topk_prob": True, "output_router_logits": True}),
    "minicpm3": ("minicpm3", {"dim_model_base": 32}),
    "zamba": ("zamba", {"tie_word_embeddings": False}),
    "llama4 chunks": ("llama4_text", {"moe_layers": [], "attention_chunk_size": 80, "floor_scale": 8192}),
}
"""Settings that make another model of a type."""


class CannotBeBuilt(Exception):
    """transformers makes no model of a tiny config, or none that computes anything."""


@torch.no_grad()
def build_reference(config: PreTrainedConfig, directory: Path, seed: int = 0) -> None:
    """Save a random model of `config`, none of whose parameters has a value at which leaving it out changes nothing.

    Matrices are normal with a deviation of about 0.2 (transformers draws them narrower); what it sets to a constant
    (norms, biases, sinks) is moved by some 0.2.

    Raises:
        CannotBeBuilt: says why.
    """
    torch.manual_seed(seed)
    for part in (config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))):
        if isinstance(getattr(part, "initializer_range", None), float):
            part.initializer_range = 0.2
    try:
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
        if size > LARGEST:
            raise CannotBeBuilt(f"its tiny config has {size / 1e6:.0f} M parameters")
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, tensor in {**dict(lm.named_parameters()), **lm.state_dict()}.items():
            if tensor.is_floating_point() and tensor.numel() and (tensor.ndim < 2 or tensor.std() == 0):
                noise = torch.randn_like(tensor) * 0.2
                tensor += noise.abs() if "A_log" in name else noise
        lm.save_pretrained(directory)
    except CannotBeBuilt:
        raise
    except Exception as error:  # transformers' own code for any type
        raise CannotBeBuilt(one_line(error)) from error


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def reason_of(error: UserError, directory: Path) -> str:
    """A refusal's text without the model's place."""
    return str(error).replace(str(directory), "X")


@dataclass(frozen=True)
class Outcome:
    """Log-probability of every loss token and gradient of every parameter."""

    logprob: Tensor
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """How far the trainer is from transformers: nats of a loss token at most, packed and alone, and the largest error
    of a gradient relative to its largest element.

    `unwritten` are the names of tensors in the model's files that the trainer's exports would not have, or not so.
    """

    logprob: float
    alone: float
    gradient: float
    parameter: str
    unwritten: tuple[str, ...]


def transformers_outcome(
    directory: Path, documents: Sequence[Document], attention: str = "eager", adapter: Path | None = None
) -> Outcome:
    """Of transformers' own model, document by document, as it evaluates, with logits and its plain attention; of PEFT's
    with an adapter."""
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=attention)
    if adapter is not None:
        lm = PeftModel.from_pretrained(lm, adapter, is_trainable=True)
    lm.eval()
    logprobs = []
    for document in documents:
        ids = torch.as_tensor(document.input_ids)
        chosen = torch.as_tensor(document.loss_mask[1:])
        logits = lm(input_ids=ids[None], use_cache=False).logits[0, :-1].float() / document.temperature
        logprob = torch.log_softmax(logits, -1).gather(1, ids[1:, None]).squeeze(1)[chosen]
        weights = torch.as_tensor(document.streams[0, 1:])[chosen]
        (-(logprob * weights).sum()).backward()
        logprobs.append(logprob.detach())
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in lm.named_parameters() if p.requires_grad
    }
    return Outcome(torch.cat(logprobs), grads)


def trainer_outcomes(
    directory: Path, documents: Sequence[Document], world: World
) -> tuple[Outcome, Outcome, tuple[str, ...]]:
    """Run the trainer as users do, packed and document by document; return tensors that its exports would miss."""
    tokens = sum(len(document.input_ids) for document in documents)
    source = find_model(str(directory))
    policy = build_policy(source, TrainerModel(head_chunk=7), world, tokens=tokens)
    check_policy(policy, str(directory), world, torch.float32)
    step_costs(policy.lm, source.config)  # as a run does

    def run(groups: Sequence[Sequence[Document]], *, in_one_pass: bool) -> Outcome:
        policy.zero_grad()
        logprobs = []
        for group in groups:
            batch = collate(group, 1)
            with torch.no_grad():
                logprobs.append(policy(batch)[0])
            loss, _ = policy(batch, cross_entropy) if in_one_pass else cross_entropy(*policy(batch), batch.streams)
            loss.backward()
        grads = {
            name: torch.zeros(p.shape) if p.grad is None else p.grad.full_tensor().clone()  # type: ignore[attr-defined]
            for name, p in named_parameters(policy)
            if p.requires_grad
        }
        return Outcome(torch.cat(logprobs), grads)

    packed = run([documents], in_one_pass=True)
    alone = run([[document] for document in documents], in_one_pass=False)
    written = {tensor.name: tensor.local(world)[0] for tensor in stored_tensors(policy)}
    stored = dict[str, Tensor]()
    for path in directory.glob("*.safetensors"):
        stored |= load_file(path)
    unwritten = [name for name in stored if name not in written or not torch.equal(written[name], stored[name])]
    return packed, alone, tuple(sorted(unwritten))


def is_computable(directory: Path) -> bool:
    """Whether transformers computes a model that it could make."""
    try:
        transformers_outcome(directory, random_documents(LENGTHS[:1]))
    except Exception:  # noqa: BLE001 code of any model
        return False
    return True


def gradient_error(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative error and its parameter. Gradients that are next to nothing beside those of other
    parameters (of a bias that softmax takes away again) are not held to their own size."""
    zero = torch.zeros(())  # of a parameter that one of them does not differentiate: a bias that only chooses experts
    floor = 1e-3 * max(gradient.abs().max().item() for gradient in theirs.values() if gradient.numel())
    errors = {}
    for name in {**theirs, **ours}:
        gradient = theirs.get(name, zero)
        difference = ours.get(name, zero) - gradient
        if difference.numel():
            errors[name] = difference.abs().max().item() / max(gradient.abs().max().item(), floor)
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return errors[worst], worst


def compare(model_type: str, settings: dict[str, Any], directory: Path, world: World) -> Difference:
    """How far the trainer is from transformers on a random model of a type, which is left in `directory`.

    Args:
        settings: Of its config, in place of those of `tiny_config`.

    Raises:
        CannotBeBuilt: transformers cannot make or compute it.
        UserError: the trainer refuses it.
    """
    try:
        config = tiny_config(model_type, **settings)
    except Exception as error:
        raise CannotBeBuilt(one_line(error)) from error
    build_reference(config, directory)
    documents = random_documents(LENGTHS)
    failure = None
    try:
        packed, alone, unwritten = trainer_outcomes(directory, documents, world)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 transformers may not compute it, either
        failure = error
    try:
        theirs = transformers_outcome(directory, documents)
    except Exception as error:
        raise CannotBeBuilt(one_line(error)) from error
    if failure is not None:
        raise failure
    if not theirs.logprob.isfinite().all():
        raise CannotBeBuilt("its own forward gives no finite log-probabilities")
    gradient, parameter = max(
        (gradient_error(each.gradients, theirs.gradients) for each in (packed, alone)), key=lambda pair: pair[0]
    )
    return Difference(
        (packed.logprob - theirs.logprob).abs().max().item(),
        (alone.logprob - theirs.logprob).abs().max().item(),
        gradient,
        parameter,
        unwritten,
    )


def ties_embeddings(config: PreTrainedConfig) -> tuple[bool | None, ...]:
    """The values of `tie_word_embeddings` that make different models of a type; (None,) if the config has no say."""
    text = config.get_text_config()
    return (True, False) if text is config and "tie_word_embeddings" in {f.name for f in fields(config)} else (None,)
