"""FlashAttention 4 beside the trainer's attention kernels: ms and TFLOP/s, forward and backward, of 16k packed tokens.

    PYTHONPATH=src python benchmarks/flash_attention.py OUT.json [--seconds 400] [--only NAME,…]

Every kernel is measured in a process of its own, so that one that cannot be imported, fails or hangs costs only its own
rows. `package` is flash-attn-4 called through its public function, the others are the trainer's backends (one is
`flash_attention_4`). "first" is a shape's first call, compiled. Backward counts 2.5 times the forward's FLOP; only
pairs of a token and an earlier one of its document count.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

KERNELS = ("flash_attention_4", "package", "flash_attention_3", "cudnn", "varlen")
HEAD_DIM = 128
SMALL = (700, 1, 1347)
# query heads, key heads
MODELS = {"Qwen3-0.6B": (16, 8), "Qwen3-4B": (32, 8)}
DOCUMENTS = {
    "1 of 16k": (16384,),
    # As the rollouts of a step: many short ones, a few long ones.
    "mixed": (4096, 2048, 1873, 1536, 1211, 1024, 997, 768, 640, 611, 512, 401, 256, 177, 128, 61, 45),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=int, default=400, help="hard limit for all kernels together")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--only", default=",".join(KERNELS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure(args.one, args.repeat)
        return
    end = time.monotonic() + args.seconds
    rows: list[dict[str, Any]] = []
    for kernel in args.only.split(","):
        rows += in_a_process(kernel, args.repeat, end - time.monotonic())
        args.out.write_text(json.dumps(rows, indent=1))
    print_table(rows)


def in_a_process(kernel: str, repeat: int, seconds: float) -> list[dict[str, Any]]:
    """The rows of one kernel; the last one has a `reason` when it did not come to the end."""
    if seconds < 10:
        return [{"kernel": kernel, "reason": "no time left"}]
    command = [sys.executable, __file__, "unused", "--one", kernel, "--repeat", str(repeat)]
    print(f"{kernel}: at most {seconds:.0f} s", flush=True)
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        output, reason = found.stdout, ""
        if found.returncode:
            lines = found.stderr.strip().splitlines() or [f"exit status {found.returncode}"]
            reason = next((line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception)\b", line)), lines[-1])
            print(found.stderr[-4000:], flush=True)
    except subprocess.TimeoutExpired as error:
        # Bytes here, whatever `text` says.
        output, reason = (error.stdout or b"").decode(), f"ran over {seconds:.0f} s"
        print((error.stderr or b"").decode()[-2000:], flush=True)
    rows = [{"kernel": kernel, **json.loads(line)} for line in output.splitlines() if line.startswith("{")]
    return rows + ([{"kernel": kernel, "reason": reason}] if reason else [])


def print_table(rows: list[dict[str, Any]]) -> None:
    head = (
        "kernel",
        "model",
        "documents",
        "forward ms",
        "backward ms",
        "both ms",
        "fwd TFLOP/s",
        "bwd TFLOP/s",
        "first fwd s",
        "first bwd s",
    )
    lines = [head]
    for row in rows:
        if "reason" in row:
            print(f"{row['kernel']}: {row['reason']}")
        elif "error" in row:
            print(
                f"{row['kernel']}: import {row['import_s']:.1f} s; relative errors {row['error']} (out, dq, dk, dv) "
                f"with {row['versions']}"
            )
        else:
            both = row["forward_ms"] + row["backward_ms"]
            times = [f"{x:.3f}" for x in (row["forward_ms"], row["backward_ms"], both)]
            rates = [f"{row[x]:.0f}" for x in ("forward_tflops", "backward_tflops")]
            firsts = [f"{row[x]:.1f}" for x in ("first_forward_s", "first_backward_s")]
            lines.append((row["kernel"], row["model"], row["documents"], *times, *rates, *firsts))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def measure(kernel: str, repeat: int) -> None:
    """Print one line of JSON for the comparison with float32, then one for each shape."""
    import torch

    began = time.perf_counter()
    attend = operator(kernel)
    imported = time.perf_counter() - began
    q, k, v, d_out = draw(SMALL, 16, 8)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    got = attend(*leaves, *boundaries(SMALL))
    got = (got.detach(), *torch.autograd.grad(got, leaves, d_out))
    want = reference(q, k, v, d_out)
    error = [f"{((a.float() - b).norm() / b.norm()).item():.1e}" for a, b in zip(got, want, strict=True)]
    versions = f"torch {torch.__version__}, {torch.cuda.get_device_name()}"
    print(json.dumps({"import_s": imported, "error": error, "versions": versions}), flush=True)
    for model, (heads, key_heads) in MODELS.items():
        for name, lengths in DOCUMENTS.items():
            row = {"model": model, "documents": name, **times(attend, lengths, heads, key_heads, repeat)}
            print(json.dumps(row), flush=True)


def operator(kernel: str) -> Callable[..., Any]:
    """(q, k, v, cu_seqlens, longest as a tensor, longest) -> out"""
    scale = HEAD_DIM**-0.5
    if kernel == "package":
        from flash_attn.cute import flash_attn_varlen_func

        def attend(q: Any, k: Any, v: Any, cu_seqlens: Any, _: Any, longest: int) -> Any:
            options = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "softmax_scale": scale, "causal": True}
            return flash_attn_varlen_func(q, k, v, max_seqlen_q=longest, max_seqlen_k=longest, **options)[0]

        return attend

    from prime_rl.trainer.attention_kernels import KERNELS, load

    if reason := load(kernel):
        raise SystemExit(reason)
    ours = KERNELS[kernel]
    return lambda q, k, v, cu_seqlens, longest, _: ours(q, k, v, cu_seqlens, longest, scale, None)[0]


def draw(lengths: tuple[int, ...], heads: int, key_heads: int) -> list[Any]:
    """q, k, v and the gradient of out: [T, H, D]."""
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(sum(lengths), h, HEAD_DIM) for h in (heads, key_heads, key_heads, heads)]
    return [torch.randn(shape, device="cuda", generator=generator).bfloat16() for shape in shapes]


def boundaries(lengths: tuple[int, ...]) -> tuple[Any, Any, int]:
    import torch

    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    return ends, torch.tensor(max(lengths)), max(lengths)


def reference(q: Any, k: Any, v: Any, d_out: Any) -> list[Any]:
    """Out, dq, dk and dv in float32, document by document."""
    import torch

    leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
    parts = zip(*(x.split(SMALL) for x in leaves), strict=True)
    sdpa: Any = torch.nn.functional.scaled_dot_product_attention
    causal = {"is_causal": True, "enable_gqa": True}
    outs = [sdpa(*(x.transpose(0, 1)[None] for x in part), **causal)[0].transpose(0, 1) for part in parts]
    out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out.float())]


def times(
    attend: Callable[..., Any], lengths: tuple[int, ...], heads: int, key_heads: int, repeat: int
) -> dict[str, float]:
    import torch

    q, k, v, d_out = draw(lengths, heads, key_heads)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = boundaries(lengths)
    out: list[Any] = []

    def forward() -> None:
        out[:] = [attend(*leaves, *mask)]

    def backward() -> None:
        torch.autograd.grad(out[0], leaves, d_out, retain_graph=True)

    row = {"first_forward_s": once(forward), "first_backward_s": once(backward)}
    work = sum(2.0 * heads * HEAD_DIM * n * n for n in lengths)
    for name, action, flop in (("forward", forward, work), ("backward", backward, 2.5 * work)):
        milliseconds = median_ms(action, repeat)
        row |= {f"{name}_ms": milliseconds, f"{name}_tflops": flop / milliseconds / 1e9}
    return row


def once(action: Callable[[], None]) -> float:
    import torch

    began = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def median_ms(action: Callable[[], None], repeat: int) -> float:
    import torch

    for _ in range(5):
        action()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeat)]
    for start, end in marks:
        start.record()
        action()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks)


if __name__ == "__main__":
    main()
