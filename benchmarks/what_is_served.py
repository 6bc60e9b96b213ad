"""The cost of knowing what a server serves, and how far a right server is off: hashes, its answer, the fixed prompt.

    python benchmarks/what_is_served.py --model 4B --json benchmarks/results/what_is_served_h200.json
    python benchmarks/what_is_served.py --model tiny --device cpu --dtype bfloat16                      # no GPU

A model with random weights, its last norm scaled so that distributions are as sharp as a trained model's, is the base;
a second version is it with noise. Both are scored by the trainer and committed; a server loads them as in a run. Needs
vLLM (0.31 or 0.26) and no network.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from forked import run_forked
from machine import describe_gpus, describe_machine
from steps import TOKENIZER, model_source

from prime_rl.config.shared import ClientConfig
from prime_rl.config.trainer import TrainerModel
from prime_rl.fleet.client import InferenceClient
from prime_rl.fleet.logprob_check import LogprobCheck, compare
from prime_rl.trainer.model import build_policy, compute_dtype
from prime_rl.trainer.parallel import close_world, init_world, seconds
from prime_rl.trainer.parameters import named_parameters
from prime_rl.trainer.reference_scorer import ReferenceScorer
from prime_rl.trainer.source import find_model
from prime_rl.trainer.weight_copy import WeightCopy
from prime_rl.trainer.weight_publisher import write_version
from prime_rl.transport.commit import step_dir
from prime_rl.transport.weights import (
    WeightsManifest,
    verify_weights,
    weights_manifest,
    write_base_version,
)

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from conftest import InferenceServer, launch_server

REPEATS = 10


def write_model(directory: Path, model: str, layers: int | None, sharpness: float, device: str) -> None:
    """Export random weights of a model's shape as version 0, in bfloat16."""
    world = init_world(device, 60)
    source = model_source(model, layers)
    policy = build_policy(source, TrainerModel(attention="sdpa", compile=False, activation_checkpointing="none"), world)
    with torch.no_grad():
        dict(named_parameters(policy))["model.norm.weight"].fill_(sharpness)
    source.config.architectures = [type(policy.lm).__name__]  # a made-up shape does not say it; vLLM asks
    copies = WeightCopy(policy, world, torch.bfloat16)
    seconds(*copies.copy())
    write_version(copies, source, directory, version=0, incarnation=0)
    for path in TOKENIZER.glob("tokenizer*"):  # vLLM wants one, although ids go in and out
        shutil.copy(path, directory)
    close_world()


def write_versions(model: Path, root: Path, device: str, drift: float) -> dict[str, float]:
    """Commit versions 0 and 1 with their fixed prompts scored. Return seconds until the host is free, and in all."""
    world = init_world(device, 600)
    source = find_model(str(model))
    policy = build_policy(source, TrainerModel(), world)
    computed = compute_dtype("auto", world.device)
    scorer = ReferenceScorer(policy, world, source.config.vocab_size, computed, torch.bfloat16)
    write_base_version(root, model, scorer.score(as_exported=False)())
    with torch.no_grad():
        for parameter in policy.parameters():
            local = parameter.to_local() if isinstance(parameter, torch.distributed.tensor.DTensor) else parameter
            local.mul_(1 + drift * torch.randn_like(local))
    handed, done = [], []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        scored = scorer.score()
        handed.append(time.perf_counter() - began)
        reference = scored()
        done.append(time.perf_counter() - began)
    copies = WeightCopy(policy, world, torch.bfloat16)
    seconds(*copies.copy())
    write_version(copies, source, step_dir(root, 1), version=1, incarnation=0, reference=reference)
    close_world()
    return {
        "trainer_host_seconds": statistics.median(handed[1:]),
        "trainer_device_seconds": statistics.median(done[1:]),
    }


async def ask(server: InferenceServer, root: Path) -> dict[str, float]:
    """Have the server load both versions, and see how long each check takes and how far off it is."""
    base, drifted = (weights_manifest(step_dir(root, version)) for version in (0, 1))
    check = LogprobCheck()
    async with (
        InferenceClient(ClientConfig(base_url=server.base_url), logprob_check=check) as checked,
        InferenceClient(ClientConfig(base_url=server.base_url)) as engine,
    ):
        row: dict[str, float] = {}
        for name, version in (("base", base), ("drifted", drifted)):
            await checked.update(version)
            found = compare(
                await engine.score(_tokens(version)), version.reference.logprobs if version.reference else ()
            )
            row |= {f"{name}_mean": found.mean, f"{name}_most": found.largest}
        tolerance = check.calibrations[server.root].tolerance
        assert tolerance is not None
        row |= {"band_mean": tolerance.mean, "band_most": tolerance.largest}
        row["report_seconds"] = await _median(engine.served)
        row["server_seconds"] = await _median(lambda: engine.score(_tokens(drifted)))
        row["load_seconds"] = await _median(lambda: engine.load_weights(drifted), repeats=3)
    began = time.perf_counter()
    verify_weights(drifted.directory)
    row["hash_seconds"] = time.perf_counter() - began
    row["gib"] = sum(file.stat().st_size for file in drifted.directory.glob("*.safetensors")) / 2**30
    return row


def _tokens(version: WeightsManifest) -> tuple[int, ...]:
    assert version.reference is not None
    return version.reference.tokens


async def _median(call: Callable[[], Awaitable[object]], repeats: int = REPEATS) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        await call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6B", help="shape: 0.6B, 1.7B, 4B, 8B, tiny (0.6B)")
    parser.add_argument("--layers", type=int, help="layers of it (all)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="auto", help="what the server computes in (auto)")
    parser.add_argument("--compiled", action="store_true", help="let vLLM compile and capture graphs (slower to start)")
    parser.add_argument("--drift", type=float, default=0.02, help="relative noise of the second version (0.02)")
    parser.add_argument("--sharpness", type=float, default=6.0, help="weight of the last norm (6)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "what_is_served.log")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        row = measure(arguments, Path(scratch))
    for name, value in row.items():
        print(f"{name:<24}{value:>12.3g}")
    if arguments.json is not None:
        setting = {
            key: getattr(arguments, key) for key in ("model", "layers", "dtype", "compiled", "drift", "sharpness")
        }
        head: dict[str, Any] = {**describe_machine(), "gpus": describe_gpus(), **setting}
        arguments.json.write_text(json.dumps({**head, **row}, indent=1) + "\n")


def measure(arguments: argparse.Namespace, scratch: Path) -> dict[str, float]:
    """Write the versions, then start a server on the base and ask it."""
    model, served = scratch / "model" / "step_0", scratch / "server"
    run = served / "weights" / "run"  # a server takes weights from below its root only
    job = partial(write_model, model, arguments.model, arguments.layers, arguments.sharpness, arguments.device)
    _done(run_forked(job, limit=300, log=arguments.log), arguments.log)
    writing = partial(write_versions, model, scratch / "versions", arguments.device, arguments.drift)
    row: dict[str, float] = _done(run_forked(writing, limit=300, log=arguments.log), arguments.log)
    settings = {"model": {"name": str(model), "dtype": arguments.dtype}, "enforce_eager": not arguments.compiled}
    with launch_server(served, model, settings) as server:
        (scratch / "versions").rename(run)
        return row | asyncio.run(ask(server, run))


def _done(outcome: Any, log: Path) -> Any:
    if outcome.error:
        sys.exit(f"{outcome.error} (log: {log})")
    return outcome.value


if __name__ == "__main__":
    main()
