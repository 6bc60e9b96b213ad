"""From the trainer's memory to a worker's, without an engine: how long `publish` holds the loop up, and how long until a verified copy lies with the worker.

    python benchmarks/weight_exchange.py --model 0.6B --device cuda --json benchmarks/results/weight_exchange_h100.json
    torchrun --nproc-per-node 2 benchmarks/weight_exchange.py --model 0.6B --device cuda     # gathered from two ranks
    uv run --group cpu python benchmarks/weight_exchange.py --model tiny

A policy of the model's shape publishes versions as the trainer does (`WeightPublisher`); a worker in a process of its own receives each and compares its
checksums with the manifest, as a server's worker does while it stages. One row a place of the worker: the trainer's GPU (CUDA IPC), the next GPU
(NCCL), the CPU (TCP). Each row: medians over the versions but the first, which connects; `exact` is whether every tensor had its checksum.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe_gpus, describe_machine
from steps import model_source

from prime_rl.config.trainer import TrainerModel, WeightsConfig
from prime_rl.trainer.model import build_policy
from prime_rl.trainer.parallel import close_world, init_world
from prime_rl.trainer.weight_publisher import WeightPublisher
from prime_rl.transport.exchange import Subscriber, checksums, layout
from prime_rl.transport.weights import verify_weights, version_dir, weights_manifest


def receive(place: str) -> None:
    """The worker: a version's directory a line, answered by a line of JSON."""
    device = torch.device(place)
    subscriber, buffer = Subscriber(), torch.empty(0, dtype=torch.uint8, device=device)
    for line in sys.stdin:
        manifest = weights_manifest(Path(line.strip()))
        places, size = layout(manifest.tensors)
        if buffer.numel() != size:
            buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        began = time.perf_counter()
        backend = subscriber.receive(manifest, buffer)
        received = time.perf_counter()
        found = checksums(buffer, places)
        exact = all(found[name] == entry.checksum for name, entry in manifest.tensors.items())
        verified = time.perf_counter()
        answer = {"backend": backend, "receive": received - began, "verify": verified - received, "exact": exact}
        print(json.dumps(answer), flush=True)


def measure(options: argparse.Namespace) -> None:
    world = init_world(options.device, 600)
    source = model_source(options.model)
    config = TrainerModel(attention="sdpa", compile=False, activation_checkpointing="none")
    policy = build_policy(source, config, world)
    with tempfile.TemporaryDirectory() as scratch:
        root, times = Path(os.environ.get("EXCHANGE_ROOT", scratch)), {}
        publisher = WeightPublisher(
            root, policy, source, world, torch.bfloat16, weights=WeightsConfig(transport="memory", host="127.0.0.1"), memory=True,
            on_committed=lambda version, parts: times.update(parts),
        )  # fmt: skip
        publisher.open(0)
        publisher.settle()
        places = (
            ["cpu"]
            if options.device == "cpu"
            else [f"cuda:{gpu}" for gpu in range(torch.cuda.device_count())] + ["cpu"]
        )
        rows: dict[str, Any] = {}
        version = 0
        for place in places:
            worker = None
            if world.is_main:
                command = [sys.executable, __file__, "--receive", place]
                env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
                worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
            found = []
            for _ in range(options.versions + 1):
                version += 1
                with torch.no_grad():
                    torch._foreach_mul_([parameter.to_local() for parameter in policy.parameters()], 1.03125)
                if world.device.type == "cuda":
                    torch.cuda.synchronize()
                began = time.perf_counter()
                publisher.publish(version)
                returned = time.perf_counter()
                publisher.settle()
                committed = time.perf_counter()
                if worker is not None:
                    assert worker.stdin is not None
                    assert worker.stdout is not None
                    print(version_dir(root / "weights", version), file=worker.stdin, flush=True)
                    answer = json.loads(worker.stdout.readline())
                    parts = {
                        name.removeprefix("time/export_"): seconds
                        for name, seconds in times.items()
                        if "export_" in name
                    }
                    found.append({"publish": returned - began, "committed": committed - began, **parts, **answer})
            if worker is not None:
                worker.kill()
                name = f"{options.model} ranks={world.size} to {place} by {found[-1]['backend']}"
                rows[name] = summary(found[1:])
                rows[name]["total"] = rows[name]["committed"] + rows[name]["receive"] + rows[name]["verify"]
                print(name, {key: round(value, 4) if isinstance(value, float) else value for key, value in rows[name].items()}, flush=True)  # fmt: skip
        began = time.perf_counter()
        publisher.ensure(version, durable=True)
        if world.is_main:
            verify_weights(version_dir(root / "weights", version))
            print(f"durable and verified in {time.perf_counter() - began:.2f} s", flush=True)
        publisher.close()
    close_world()
    if world.is_main and options.json is not None:
        before = json.loads(options.json.read_text())["rows"] if options.json.exists() else {}
        machine = {**describe_machine(), "gpus": describe_gpus() if options.device == "cuda" else []}
        measured = {name: {**row, "measured": machine} for name, row in rows.items()}
        options.json.write_text(json.dumps({"rows": before | measured}, indent=1) + "\n")


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    numbers = {key for key, value in found[0].items() if isinstance(value, float)}
    row: dict[str, Any] = {key: statistics.median(one[key] for one in found) for key in sorted(numbers)}
    return row | {"backend": found[0]["backend"], "exact": all(one["exact"] for one in found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a shape of `steps.model_source`: tiny, 0.6B, 1.7B, 4B")
    parser.add_argument("--device", default="cpu", choices=("cuda", "cpu"))
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the figures; other rows in it stay")
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    options = parser.parse_args()
    receive(options.receive) if options.receive else measure(options)


if __name__ == "__main__":
    main()
