"""Attention alone: TFLOP/s of every backend, forward and backward, on the shapes that the trainer's steps have.

Run by `trainer.py --suite attention`. Backward counts 2.5 times the forward's FLOP; only pairs of a token and an earlier one of its document count.
"""

import statistics
import time
from collections.abc import Callable

import torch
from steps import document_lengths
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from prime_rl.errors import UserError
from prime_rl.trainer import attention
from prime_rl.trainer.parallel import close_world, init_world

BACKENDS = ("flash_attention_4", "flash_attention_3", "cudnn", "flash_attention_2", "varlen", "sdpa")
HEAD_DIM = 128

# documents, query heads, key heads: 0.6B (16, 8), 4B (32, 8), 30B-A3B (32, 4)
SHAPES = (
    ("1x16384", 16, 8),
    ("16x4096", 16, 8),
    ("32x512", 16, 8),
    ("lognormal:16384", 16, 8),
    ("1x65536", 16, 8),
    ("1x16384", 32, 8),
    ("8x4096", 32, 4),
)
TINY_SHAPES = (("2x64", 4, 2), ("lognormal:2048", 4, 2))


def row_name(documents: str, heads: int, kv_heads: int, backend: str) -> str:
    return f"{documents}, {heads}/{kv_heads} heads, {backend}"


def measure_backend(
    backend: str, shapes: tuple[tuple[str, int, int], ...], device: str, repeat: int = 8
) -> dict[str, dict[str, object]]:
    """Median times and rates of one backend on every shape; `absent` says why it cannot run."""
    world = init_world(device, 120)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows: dict[str, dict[str, object]] = {}
    for documents, heads, kv_heads in shapes:
        lengths = document_lengths(documents)
        config = Qwen3Config(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=HEAD_DIM)
        row: dict[str, object] = {"backend": backend, "documents": documents, "heads": heads, "kv_heads": kv_heads}
        rows[row_name(documents, heads, kv_heads, backend)] = row
        if backend == "sdpa" and device == "cuda":
            row["absent"] = "is the reference: its scores of all tokens with all would not fit"
            continue
        try:
            attention.set_up(backend, config, dtype, world)
        except UserError as error:
            row["absent"] = str(error)
            continue
        forward, backward = _passes(lengths, heads, kv_heads, dtype, world.device)
        work = sum(2.0 * heads * HEAD_DIM * n * n for n in lengths)
        ahead, back = _median_seconds(forward, repeat, device), _median_seconds(backward, repeat, device)
        row |= {"forward_ms": 1e3 * ahead, "forward_tflops": work / ahead / 1e12}
        row |= {"backward_ms": 1e3 * back, "backward_tflops": 2.5 * work / back / 1e12}
    close_world()
    return rows


def _passes(
    lengths: list[int], heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[[], object], Callable[[], object]]:
    """One forward pass through what transformers calls, and one backward pass of it."""
    tokens = sum(lengths)
    draw = torch.Generator(device).manual_seed(0)

    def projected(count: int) -> Tensor:  # as the model makes them: [1, H, T, D], a view of [T, H, D]
        made = torch.randn(1, tokens, count, HEAD_DIM, device=device, generator=draw).to(dtype)
        return made.transpose(1, 2).requires_grad_()

    q, k, v = projected(heads), projected(kv_heads), projected(kv_heads)
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    function = ALL_ATTENTION_FUNCTIONS[attention.NAME]
    module, told = nn.Module(), attention.boundaries(ends, max(lengths))

    def forward() -> Tensor:
        out: Tensor = function(module, q, k, v, None, **told)[0]
        return out

    out = forward()
    d_out = torch.randn(out.shape, device=device, generator=draw).to(dtype)
    return forward, lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)


def _median_seconds(action: Callable[[], object], repeat: int, device: str) -> float:
    for _ in range(3):
        action()
    times = []
    if device != "cuda":
        for _ in range(repeat):
            started = time.perf_counter()
            action()
            times.append(time.perf_counter() - started)
        return statistics.median(times)
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeat)]
    for start, end in marks:
        start.record()
        action()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks) / 1e3
