"""Where a trainer step's time goes: GPU time per group of kernels, overlap, idle time, and what the host waited for.

    python benchmarks/trainer_profile.py --case "0.6B 1x16384" --case "4B 1x16384 memory_limit=80" --json profile.json

Cases are written as for `trainer.py`. The profiler is attached for two steps after the warm-up, which costs them a
little; figures are per step.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from forked import run_forked
from machine import describe_gpus, describe_machine
from steps import Bench, Case, parse_case

Span = tuple[float, float, str]
"""Start and end in microseconds, and the name of a kernel or copy."""

# The first group of which a part is in the kernel's name, in lower case. Inductor's have `triton_` in front: pointwise.
GROUPS = {
    "pointwise": ("triton_",),
    "nccl": ("nccl",),
    "copies": ("memcpy", "memset", "direct_copy", "copyfunctor", "chunk_cat", "split_with_sizes"),
    "optimizer and clipping": ("multi_tensor", "lpnorm", "adam"),
    "head": ("_stats", "_dlogits"),
    "attention": ("flash", "fmha", "sdpa", "attention", "attn"),
    "matmul": ("gemm", "nvjet", "cutlass", "splitk", "cublas", "grouped_mm"),
}
_LAST = ("copies", "nccl")  # credited with time only where nothing else runs
_ANNOTATIONS = ("FSDP::", "ProfilerStep", "Optimizer.")  # of regions: no kernels
# Runtime calls by which the host waits for the device.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def group_of(name: str) -> str:
    """The group that a kernel belongs to."""
    return next((group for group, parts in GROUPS.items() if any(part in name.lower() for part in parts)), "pointwise")


def breakdown(kernels: Sequence[Span], steps: int) -> dict[str, Any]:
    """Return milliseconds and kernels per step and group. `alone` credits every instant to one group, the first that
    runs then, in the order of `GROUPS` but with communication and copies last: with idle they add up to the span. What
    is still being exported at the end is left out."""
    last = max(end for _, end, name in kernels if group_of(name) != "copies")
    seen = [(start, min(end, last), group_of(name)) for start, end, name in kernels if start < last]
    first = min(start for start, _, _ in seen)
    total: defaultdict[str, float] = defaultdict(float)
    count: Counter[str] = Counter()
    for start, end, group in seen:
        total[group] += end - start
        count[group] += 1
    alone = _alone(seen)
    unit = 1e3 * steps
    groups = {
        group: {"ms": total[group] / unit, "alone_ms": alone.get(group, 0.0) / unit, "kernels": count[group] / steps}
        for group in GROUPS
        if count[group]
    }
    idle = (last - first) - sum(alone.values())
    return {"span_ms": (last - first) / unit, "idle_ms": idle / unit, "kernels": len(seen) / steps, "groups": groups}


def _alone(spans: Iterable[Span]) -> dict[str, float]:
    order = [group for group in GROUPS if group not in _LAST] + list(_LAST)
    changes = []
    for start, end, group in spans:
        changes += [(start, 1, group), (end, -1, group)]
    alone: defaultdict[str, float] = defaultdict(float)
    running: Counter[str] = Counter()
    before = 0.0
    for at, change, group in sorted(changes):
        busy = next((other for other in order if running[other] > 0), None)
        if busy is not None:
            alone[busy] += at - before
        running[group] += change
        before = at
    return alone


def longest(kernels: Sequence[Span], steps: int, most: int = 25) -> list[dict[str, Any]]:
    """The kernels that took the most time, by name."""
    total: defaultdict[str, float] = defaultdict(float)
    count: Counter[str] = Counter()
    for start, end, name in kernels:
        total[name] += end - start
        count[name] += 1
    return [
        {"name": name[:160], "group": group_of(name), "ms": time / (1e3 * steps), "times": count[name] / steps}
        for name, time in sorted(total.items(), key=lambda item: -item[1])[:most]
    ]


def profile(case: Case, device: str, scratch: Path, steps: int = 2) -> dict[str, Any]:
    """Some steps of `case` under the profiler."""
    activity = torch.profiler.ProfilerActivity
    with Bench(case, device, scratch) as bench:
        for _ in range(case.warm + 1):
            bench.step()
        bench.finish_steps()
        with torch.profiler.profile(activities=[activity.CUDA if device == "cuda" else activity.CPU]) as seen:
            for _ in range(steps):
                bench.step()
            bench.finish_steps()
        chosen = bench.chosen()
    kind = torch.autograd.DeviceType.CUDA if device == "cuda" else torch.autograd.DeviceType.CPU
    events = list(seen.events())
    kernels = [
        (e.time_range.start, e.time_range.end, e.name)
        for e in events
        if e.device_type == kind and not e.name.startswith(_ANNOTATIONS)
    ]
    waits = {name: count / steps for name, count in Counter(e.name for e in events if e.name in WAITS).items()}
    return {**breakdown(kernels, steps), "host_waits": waits, "longest": longest(kernels, steps), "chosen": chosen}


def show(name: str, row: dict[str, Any]) -> str:
    """A case's table."""
    if "failed" in row:
        return f"{name}: FAILED: {row['failed']}"
    waits = ", ".join(f"{wait} {count:g}" for wait, count in row["host_waits"].items()) or "none"
    lines = [
        f"{name} ({row['chosen']})",
        f"  {row['span_ms']:.1f} ms a step, {row['idle_ms']:.1f} of it idle, {row['kernels']:.0f} kernels; host "
        f"waits: {waits}",
    ]
    lines += [f"  {'':<24}{'ms':>10}{'alone':>10}{'kernels':>9}"]
    for group, part in sorted(row["groups"].items(), key=lambda item: -item[1]["ms"]):
        lines.append(f"  {group:<24}{part['ms']:>10.1f}{part['alone_ms']:>10.1f}{part['kernels']:>9.0f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", required=True, help='for example "0.6B 1x16384 memory_limit=15"')
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--scratch", type=Path, help="directory for exported weights (a temporary one)")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "trainer_profile.log")
    parser.add_argument("--json", type=Path, help="file for the figures; rows of other cases in it are kept")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows: dict[str, dict[str, Any]] = {}
    if arguments.json is not None and arguments.json.is_file():
        rows = json.loads(arguments.json.read_text())["rows"]
    for text in arguments.case:
        case = parse_case(text)
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
            job = partial(profile, case, arguments.device, Path(scratch))
            outcome = run_forked(job, limit=case.limit, log=arguments.log, ranks=case.ranks)
        rows[text] = outcome.value if outcome.error is None else {"failed": outcome.error}
        print(show(text, rows[text]), flush=True)
        if arguments.json is not None:
            head = {**describe_machine(), "gpus": describe_gpus()}
            arguments.json.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
