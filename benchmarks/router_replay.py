"""What router replay costs: bytes a token of a batch and of an answer, and the speed of an engine.

    python benchmarks/router_replay.py --model DIRECTORY             # one GPU
    python benchmarks/router_replay.py --model DIRECTORY --urls A B  # servers without and with it that run already
    python benchmarks/router_replay.py --table                       # README.md's table again from the JSON files

Two servers of one model, one of which was started with `router_replay`, are asked in turns, by requests of random
tokens with replies of one length. What the trainer pays is a case of `benchmarks/trainer.py` (`replay=true`), whose
rows `--table` shows beside those without (`results/router_replay_trainer_h200.json`).
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from machine import describe_gpus, describe_machine, renewed
from rollout_parts import await_true, environment, fetch, running, scratch

from prime_rl.transport.rollouts import Sample, write_batch

HERE = Path(__file__).parent
RESULTS, TRAINER = HERE / "results" / "router_replay_h200.json", HERE / "results" / "router_replay_trainer_h200.json"
PAGE = HERE / "README.md"
LAYERS, K, EXPERTS = 48, 8, 128  # of Qwen3-30B-A3B, whose samples are written
START_SECONDS = 300.0
NAMES = "without", "with"


def file_bytes(tokens: int, samples: int = 64) -> dict[str, float]:
    """Bytes a token of `samples.arrow`, without and with the experts of Qwen3-30B-A3B."""
    draw, sizes, mask = np.random.default_rng(0), {}, np.arange(tokens) > tokens // 5
    for name in NAMES:
        replayed = name == "with"
        rows = [
            Sample(
                sample_id=f"{number:032x}", group_id=f"{number // 8:032x}", task_id=f"{number // 8}", env="env",
                policy_versions=[0], input_ids=draw.integers(0, 150000, tokens, dtype=np.int32),
                loss_mask=mask, logprobs=-draw.random(tokens, dtype=np.float32) * mask,
                advantages=0.5 * mask.astype(np.float32), temperature=1.0, reward=1.0, is_truncated=False,
                routed_experts=draw.integers(0, EXPERTS, (tokens - 1, LAYERS * K), np.uint8) if replayed else None,
            )
            for number in range(samples)
        ]  # fmt: skip
        with tempfile.TemporaryDirectory() as directory:
            write_batch(Path(directory), 0, rows)
            (file,) = Path(directory).rglob("samples.arrow")
            sizes[name] = file.stat().st_size / samples / tokens
    return sizes


async def turn(url: str, model: str, replay: bool, load: argparse.Namespace, seed: int) -> dict[str, float]:
    """`flight` requests at once, `waves` times: sampled tokens a second, and bytes of answers a token."""
    draw, waiting = np.random.default_rng(seed), asyncio.Semaphore(load.flight)
    params = {"max_tokens": load.reply, "min_tokens": load.reply, "temperature": 1.0, "ignore_eos": True}
    params |= {"routed_experts_prompt_start": 0} if replay else {}
    limits = httpx.Limits(max_connections=load.flight)

    async def ask(prompt: list[int]) -> int:
        async with waiting:
            answer = await client.post(
                "/v1/sample", json={"model": model, "token_ids": prompt, "sampling_params": params}
            )
        answer.raise_for_status()
        return len(answer.content)

    async with httpx.AsyncClient(base_url=url, timeout=load.limit, limits=limits) as client:
        prompts = draw.integers(0, 256, (load.flight * load.waves, load.prompt)).tolist()
        began = time.perf_counter()
        sizes = await asyncio.gather(*map(ask, prompts))
        seconds = time.perf_counter() - began
    tokens = len(sizes) * (load.prompt + load.reply)
    return {"tokens_per_second": len(sizes) * load.reply / seconds, "answer_bytes": sum(sizes) / tokens}


def engines(load: argparse.Namespace, urls: list[str]) -> dict[str, Any]:
    """Of each server its turns, and their medians; the first turn of each is not counted."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
    for number in range(load.turns + 1):
        for name, url in zip(NAMES, urls, strict=True):
            row = asyncio.run(turn(url, str(load.model), name == "with", load, number))
            print(f"{name} replay: {row['tokens_per_second']:,.0f} tokens/s", flush=True)
            turns[name] += [row] if number else []
    keys = "tokens_per_second", "answer_bytes"
    return {
        name: {key: statistics.median(row[key] for row in rows) for key in keys} | {"turns": rows}
        for name, rows in turns.items()
    }


def server_command(load: argparse.Namespace, port: int, replay: bool, run: Path) -> list[object]:
    memory = ["--gpu-memory-utilization", 0.3, "--kv-cache-gib", load.kv_cache_gib] if load.device == "cuda" else []
    return [
        *(sys.executable, "-m", "prime_rl.entrypoints.inference", "--output-dir", run, "--model.name", load.model),
        *("--device", load.device, "--server.port", port, "--max-model-len", load.prompt + load.reply, *memory),
        *("--vllm", json.dumps({"max_num_seqs": load.flight}), *(["--router-replay"] if replay else [])),
    ]


def healthy(url: str) -> bool:
    return fetch(f"{url}/health") is not None


def started(load: argparse.Namespace, stack: ExitStack) -> list[str]:
    """Both servers, on one GPU. The second may use what the first has compiled."""
    directory, urls = scratch(), list[str]()
    for port, name in enumerate(NAMES, load.port):
        log, command = directory / f"{name}.log", server_command(load, port, name == "with", directory / name)
        env = environment(directory / f"env {name}", load.device == "cpu")
        server = stack.enter_context(running(f"the server {name}", command, env, log))
        url = f"http://127.0.0.1:{port}"
        await_true("the server", START_SECONDS, partial(healthy, url), server, log)
        urls.append(url)
    return urls


def table() -> list[str]:
    measured, trained = json.loads(RESULTS.read_text()), json.loads(TRAINER.read_text())["cases"]
    asked, layers = measured["engines"], measured["layers"]
    rows = [("bytes a token in `samples.arrow`, 48 layers", measured["file_bytes"], ".0f")]
    for label, key in (("bytes a token in answers", "answer_bytes"), ("engine, tokens/s", "tokens_per_second")):
        rows.append((f"{label}, {layers} layers", {name: asked[name][key] for name in NAMES}, ",.0f"))
    rates: dict[str, list[float]] = {name: [] for name in NAMES}
    for row in trained.values():
        if "failed" not in row:
            rates[NAMES[row["case"]["replay"]]].append(row["tokens_per_second"])
    layers = next(row["case"]["layers"] for row in trained.values() if "failed" not in row)
    rows.append((f"trainer, {layers} layers, tokens/s", {name: statistics.mean(rates[name]) for name in NAMES}, ",.0f"))
    lines = ["| Qwen3-30B-A3B | without replay | with | |", "|---|---|---|---|"]
    for label, values, form in rows:
        one, other = (values[name] for name in NAMES)
        lines.append(f"| {label} | {one:{form}} | {other:{form}} | {other / one:.3f} × |")
    machine = measured["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return [*lines, "", f"On {', '.join(measured['gpus'][:1]) or machine['cpu']}, {machine['date']}; {packages}."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model with experts")
    parser.add_argument("--urls", nargs=2, help="servers without and with replay that run already")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--flight", type=int, default=256, help="requests in flight (256)")
    parser.add_argument("--waves", type=int, default=4, help="times as many requests (4)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (128)")
    parser.add_argument("--reply", type=int, default=512, help="tokens of a reply (512)")
    parser.add_argument("--turns", type=int, default=2, help="of each server, beside the first (2)")
    parser.add_argument("--kv-cache-gib", type=float, default=16.0)
    parser.add_argument("--port", type=int, default=8630)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for an answer (120)")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="measure nothing")
    load = parser.parse_args()
    if not load.table:
        with ExitStack() as stack:
            urls = load.urls or started(load, stack)
            layers = json.loads((load.model / "config.json").read_text())["num_hidden_layers"]
            rows = {
                "layers": layers,
                "file_bytes": file_bytes(load.prompt + load.reply),
                "engines": engines(load, urls),
            }
        load.json.write_text(
            json.dumps({"machine": describe_machine(), "gpus": describe_gpus(), **rows}, indent=1) + "\n"
        )
        print(json.dumps(rows, indent=1))
    if load.table or load.json == RESULTS:
        PAGE.write_text(renewed(PAGE, "replay", "\n".join(table())))


if __name__ == "__main__":
    main()
