"""Throughput, model FLOP utilisation and peak memory of a step."""

import inspect
import resource

import torch
from transformers import PretrainedConfig, PreTrainedModel

from prime_rl.trainer import moe, recurrent
from prime_rl.trainer.memory import GIB
from prime_rl.trainer.packing import Costs
from prime_rl.trainer.parallel import World
from prime_rl.trainer.source import attention_heads

# Dense bfloat16 peak in FLOP/s, by a part of the device's name; the first that matches.
_PEAKS = {
    "B200": 2.25e15,
    "H200 NVL": 835e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
}


def peak_flops(device: torch.device) -> float | None:
    """The GPU's dense bfloat16 peak in FLOP/s; None on CPU and for unknown GPUs."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAKS.items() if part in name), None)


def matmul_parameters(lm: PreTrainedModel, *, trained: bool = False) -> int:
    """Count the parameters that a token is multiplied by: all matrices, the head, and the experts that it is sent to.
    `trained`: only those that have a gradient.

    The embedding is looked up, but a tied head multiplies by the same matrix. Experts are kept as [experts, out, in].
    Of recurrent layers convolutions and gates count; products of their state with itself do not: no parameter.
    """
    lookup = lm.get_input_embeddings().weight
    chosen = moe.experts_per_token(lm)
    counted = [p for p in lm.parameters() if p.requires_grad or not trained]
    whole = {parameter for mixer in recurrent.mixers(lm.model.layers) for parameter in mixer.parameters()}
    matrices = sum(p.numel() for p in counted if (p.ndim == 2 or (p.ndim == 3 and p in whole)) and p is not lookup)
    experts = sum(p.numel() * chosen // p.shape[0] for p in counted if p.ndim == 3 and p not in whole)
    tied = lm.lm_head.weight is lookup and (lookup.requires_grad or not trained)
    return matrices + experts + (lookup.numel() if tied else 0)


def attention_layers(lm: PreTrainedModel) -> int:
    """The modules whose forward looks an attention function up: in hybrids fewer than there are layers."""
    calls = (inspect.unwrap(type(module).forward).__code__.co_names for module in lm.model.layers.modules())
    return sum("ALL_ATTENTION_FUNCTIONS" in names for names in calls)


def step_costs(lm: PreTrainedModel, config: PretrainedConfig) -> Costs:
    """FLOP of forward and backward over a document, with causal attention and without recomputation.

    4 per matmul parameter and token, and 2 for its gradient if it is trained; 12 · layers with attention · heads ·
    head size per pair of tokens, of which a document of n tokens has n²/2.
    """
    heads, _, size = attention_heads(config)
    products = 4.0 * matmul_parameters(lm) + 2.0 * matmul_parameters(lm, trained=True)
    return Costs(products, 6.0 * attention_layers(lm) * heads * size)


def ideal_seconds(flops: float, world: World) -> float | None:
    """Seconds that all ranks together would take for so many FLOP at their peak; None where that is not known."""
    peak = peak_flops(world.device)
    return None if peak is None else flops / peak / world.size


def peak_memory_gib(device: torch.device) -> tuple[float, float]:
    """Return the peak GiB since the last reset in tensors and in the allocator. On CPU: the process's resident peak."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB, torch.cuda.max_memory_reserved(device) / GIB
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    return resident, resident


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
