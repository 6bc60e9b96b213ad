"""How soon `inference` is ready on CPU, with and without forking the engine.

    python benchmarks/inference_start.py [--model DIR] [--repeats 2]

Prints one line per recipe: seconds until /health answers (median and range), then tokens/s of 64 concurrent requests.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from conftest import InferenceServer, launch_server, make_tiny_model

RECIPES: dict[str, dict[str, Any]] = {
    "default": {"cpu": {"fork_engine": False}},
    "fork_engine": {"cpu": {"fork_engine": True}},
    "fork_engine, deterministic": {"cpu": {"fork_engine": True}, "deterministic": True},
}
REQUESTS, PROMPT, REPLY = 64, 100, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model directory (default: a random tiny model)")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        model = options.model or make_tiny_model(root / "model")
        for name, settings in RECIPES.items():
            ready, speed = [], []
            for repeat in range(options.repeats):
                start = time.perf_counter()
                with launch_server(root / f"{name}-{repeat}", model, settings) as server:
                    ready.append(time.perf_counter() - start)
                    speed.append(asyncio.run(throughput(server)))
            print(
                f"{name:30} ready {statistics.median(ready):5.1f} s ({min(ready):.1f}-{max(ready):.1f}), "
                f"{max(speed):6.0f} tokens/s at {REQUESTS} concurrent, load {os.getloadavg()[0]:.1f}",
                flush=True,
            )


async def throughput(server: InferenceServer) -> float:
    """Sampled tokens per second, best of three rounds after one to warm up."""
    body = {
        "model": str(server.model),
        "sampling_params": {"max_tokens": REPLY, "ignore_eos": True, "logprobs": 0, "temperature": 1.0},
    }
    best = 0.0
    async with httpx.AsyncClient(
        base_url=server.root, timeout=300, limits=httpx.Limits(max_connections=None)
    ) as client:
        for _ in range(4):
            start = time.perf_counter()
            prompts = [[(7 * i + j) % 250 for j in range(PROMPT)] for i in range(REQUESTS)]
            answers = await asyncio.gather(
                *(client.post("/v1/generate", json=body | {"token_ids": prompt}) for prompt in prompts)
            )
            for answer in answers:
                answer.raise_for_status()
            best = max(best, REQUESTS * REPLY / (time.perf_counter() - start))
    return best


if __name__ == "__main__":
    main()
