"""Throughput, model FLOP utilisation and peak memory of a step."""

import resource
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PretrainedConfig

from prime_rl.trainer.packing import Costs

GIB = 1 << 30

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


def matmul_parameters(model: nn.Module) -> int:
    """Parameters that take part in a matrix product for every token: linear layers with the head, without the embedding lookup."""
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))


def attention_width(config: PretrainedConfig) -> int:
    """layers · heads · head size: one token's look at one other costs 4 FLOP per unit of it, forward."""
    text = config.get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return text.num_hidden_layers * text.num_attention_heads * head


def flops(matmul: int, width: int, lengths: Sequence[int]) -> float:
    """FLOP of forward and backward over documents of these lengths, as causal attention needs them (recomputation does not count).

    6 per matmul parameter and token; attention 12 · width per pair of tokens, of which a causal document of n tokens has n²/2.
    """
    return sum(6.0 * matmul * n + 6.0 * width * n * n for n in lengths)


def costs(matmul: int, width: int) -> Costs:
    """The same as a price for packing."""
    return Costs(6.0 * matmul, 6.0 * width)


def peak_memory_gib(device: torch.device) -> float:
    """Most memory held since the last reset: reserved by the allocator on CUDA; on CPU the process's resident peak since its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
