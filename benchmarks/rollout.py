"""Rollouts through our stack against vLLM's offline engine: the same model, prompts, lengths and requests in flight.

    python benchmarks/rollout.py --json benchmarks/results/rollout_h200.json          # one GPU, about six minutes
    python benchmarks/rollout.py --only ours --workers 4                              # one half alone (or: bare)
    python benchmarks/rollout.py --model tiny --device cpu --flight 8 --prompt 64 --reply 32 --batch 32

Bare: `LLM.generate` with token prompts and `ignore_eos`. Ours: `inference`, an orchestrator with `--bench`, environment
workers, an environment whose prompts have so many tokens and whose replies are as long (`min_tokens = max_tokens`).
Both have the same model, engine limits and number of attempts at a prompt. Beginning and end count on neither side:
bare is the difference of a long and a short run, ours the second and third quarter of all tokens by the server's own
counter. Both sides return log-probabilities; bare is measured without them, too. Random weights.

Runs where prime-rl is on PYTHONPATH without being installed, too. Ends all processes that it has started.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import describe_gpus, describe_machine
from rollout_bare import WAVES
from rollout_parts import (
    REPOSITORY,
    Load,
    Watch,
    await_true,
    environment,
    fetch,
    make_model,
    make_prompts,
    running,
    scratch,
)
from tables import markdown

from prime_rl.config.shared import ORCHESTRATOR_STEPS

BAR = 0.9
HALVES = ("bare", "ours")
START_SECONDS, RUN_SECONDS = 300.0, 420.0


def bare(load: Load, prompts: list[list[int]], arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """vLLM's offline engine. The half with log-probabilities alone, which is measured first, suffices for the ratio."""
    task, result, log = directory / "load.json", directory / "bare.json", directory / "bare.log"
    flags = load.engine_flags(arguments.device == "cpu")
    needed = (1 + WAVES) * load.flight // load.group + 1
    task.write_text(
        json.dumps(
            {
                **{"model": str(load.model), "length": load.length, "reply": load.reply},
                **{"flight": load.flight, "group": load.group, "flags": flags, "prompts": prompts[:needed]},
            }
        )
    )
    env = environment(directory / "bare", arguments.device == "cpu") | engine_cache()
    command = [sys.executable, REPOSITORY / "benchmarks" / "rollout_bare.py", task, result]
    with running("bare vLLM", command, env, log) as process:
        try:
            process.wait(START_SECONDS + arguments.limit)
            failure = f"status {process.returncode}, see {log}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            failure = f"not measured within {START_SECONDS:.0f} s for its start and {arguments.limit:.0f} s"
    rates = json.loads(result.read_text()) if result.exists() else {}
    if not failure:
        return rates
    print("\n".join(log.read_text(errors="replace").splitlines()[-25:]) + f"\nbare vLLM: {failure}", flush=True)
    return rates | ({"incomplete": failure} if "with logprobs" in rates else {"failed": failure})


def engine_cache() -> dict[str, str]:
    """The place that `inference` chooses for what vLLM compiles: what one side has compiled the other need not."""
    from prime_rl.inference.compat import require_engine

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return {"VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT", str(cache / f"vllm-{require_engine().release}"))}


def ours(load: Load, texts: list[str], arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Server, orchestrator and workers."""
    env = environment(directory / "ours", arguments.device == "cpu")
    (directory / "prompts.json").write_text(json.dumps(texts))
    url, log = f"http://127.0.0.1:{arguments.port}", directory / "server.log"
    with running("the server", server_command(load, arguments, directory / "run"), env, log) as server:
        began = time.monotonic()
        await_true("the server", START_SECONDS, lambda: fetch(f"{url}/health") is not None, server, log)
        ready = time.monotonic() - began
        if fetch(f"{url}/weights") is None:
            sys.exit(f"the server has no weight routes: vLLM has not found our plugin (log: {log})")
        results = rollouts(load, arguments, directory, env, {"server": server.pid}, url)
    return {**results, "ready_seconds": ready}


def rollouts(
    load: Load, arguments: argparse.Namespace, directory: Path, env: dict[str, str], roots: dict[str, int], url: str
) -> dict[str, Any]:
    """The orchestrator against a server that is up."""
    log, total = directory / "orchestrator.log", ORCHESTRATOR_STEPS * arguments.batch
    with running("the orchestrator", orchestrator_command(load, arguments, directory, url), env, log) as process:
        roots = {**roots, "orchestrator": process.pid}
        with Watch(f"{url}/metrics", roots) as watch:
            await_true("the orchestrator", START_SECONDS, lambda: watch.tokens[-1:] > watch.tokens[:1], process, log)
            while process.poll() is None and time.monotonic() < watch.seconds[0] + arguments.limit:
                time.sleep(0.2)
    if process.returncode:
        sys.exit("\n".join(log.read_text().splitlines()[-25:]) + f"\nthe orchestrator failed (log: {log})")
    rows = [json.loads(row) for row in (directory / "run/bench/metrics/orchestrator.jsonl").read_text().splitlines()]
    middle = rows[1:-1]  # the first warms up, while the last is made fewer are in flight
    seconds = sum(row["time/step"] for row in middle)
    errors = sum(row["errors/rate"] for row in rows)
    rates = watch.rates(total * load.reply)
    results = {
        **rates,
        "orchestrator_tokens_per_second": sum(row["perf/throughput"] * row["time/step"] for row in middle) / seconds,
        "rollouts_per_second": sum(row["progress/samples"] for row in middle) / seconds,
        "tokens_of_a_reply": rows[-1]["num_output_tokens/mean"],
        "tokens_of_a_prompt": rows[-1]["num_total_tokens/mean"] - rows[-1]["num_output_tokens/mean"],
        "errors": errors,
        "cpu_ms_per_rollout": {
            name: 1000 * rates[f"cores {name}"] * load.reply / rates["tokens_per_second"]
            for name in ("orchestrator", "workers")
            if f"cores {name}" in rates
        },
    }
    if errors or (results["tokens_of_a_prompt"], results["tokens_of_a_reply"]) != (load.prompt, load.reply):
        results["failed"] = "there were errors, or prompts or replies of other lengths"
    return results


def server_command(load: Load, arguments: argparse.Namespace, run: Path) -> list[object]:
    """`inference`, with the engine limits of the other side."""
    shared = load.engine_flags(arguments.device == "cpu")
    chosen = {"enforce_eager", "dtype", "enable_chunked_prefill", "seed", "logprobs_mode", "generation_config"}
    extra = {name: value for name, value in shared.items() if name not in chosen}  # the others are what it does anyway
    config = run.parent / "inference.toml"
    lines = ["[vllm]", *(f"{name} = {json.dumps(value)}" for name, value in extra.items())]
    config.write_text("\n".join(lines) + "\n")
    return [
        *(sys.executable, "-m", "prime_rl.entrypoints.inference", "@", config),
        *("--output-dir", run, "--model.name", load.model, "--server.port", arguments.port),
        *("--max-model-len", load.length),
    ]


def orchestrator_command(load: Load, arguments: argparse.Namespace, directory: Path, url: str) -> list[object]:
    return [
        *(sys.executable, "-m", "prime_rl.entrypoints.orchestrator", "--bench", "--output-dir", directory / "run"),
        *("--model.name", load.model, "--client.base-url", url, "--environment.id", "fixed-reply"),
        *("--environment.args.path", directory / "prompts.json", "--environment.workers", arguments.workers),
        *("--environment.max-concurrent", load.flight, "--max-concurrent", load.flight),
        *("--batch-size", arguments.batch, "--rollouts-per-example", load.group, "--seq-len", load.length),
        *("--sampling.max-tokens", load.reply, "--sampling.min-tokens", load.reply, "--no-filter-zero-advantage"),
    ]


def table(measured: dict[str, Any], load: Load) -> list[list[str]]:
    """One line for each measurement."""
    lines = [["", "tokens/s", "of bare", "of bare without logprobs", "replies/s", "running", "preempted", "cores"]]
    both = [
        measured.get("bare", {}).get(name, {}).get("tokens_per_second")
        for name in ("with logprobs", "without logprobs")
    ]
    for name, rate in (
        ("bare vLLM, log-probabilities of the sampled tokens", both[0]),
        ("bare vLLM, without log-probabilities", both[1]),
    ):
        if rate:
            lines.append([name, f"{rate:,.0f}", *_shares(rate, both), f"{rate / load.reply:.1f}", "", "", ""])
    for name, row in measured.get("ours", {}).items():
        if "tokens_per_second" not in row:
            continue
        rate = row["tokens_per_second"]
        cores = ", ".join(
            f"{key.removeprefix('cores ')} {value:.2f}" for key, value in row.items() if key.startswith("cores ")
        )
        counts = [f"{row['running']:.0f}", f"{row['preemptions']:.0f}"] if "running" in row else ["", ""]
        shares = _shares(rate, both)
        lines.append(
            [f"through the orchestrator: {name}", f"{rate:,.0f}", *shares, f"{rate / load.reply:.1f}", *counts, cores]
        )
    return lines


def label(arguments: argparse.Namespace) -> str:
    """What was chosen on our side."""
    return f"workers: {arguments.workers}"


def _shares(rate: float, both: list[float | None]) -> list[str]:
    return [f"{rate / one:.3f}" if one else "" for one in both]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=HALVES, help="one part alone (bare and ours)")
    parser.add_argument("--model", default="0.6B", help="0.6B, 1.7B, 4B, 8B: the shape alone; or tiny (0.6B)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--flight", type=int, default=512, help="requests in flight (512)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (128)")
    parser.add_argument("--reply", type=int, default=512, help="tokens of a reply (512)")
    parser.add_argument("--group", type=int, default=16, help="attempts at one prompt (16)")
    parser.add_argument(
        "--batch", type=int, default=1024, help=f"rollouts of a step, of which there are {ORCHESTRATOR_STEPS} (1024)"
    )
    parser.add_argument("--workers", default="auto", help="environment workers (auto)")
    parser.add_argument("--port", type=int, default=8430)
    parser.add_argument(
        "--limit", type=float, default=RUN_SECONDS, help="seconds for each side, without its start (420)"
    )
    parser.add_argument("--commit", help="what is measured, where there is no repository")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args()


def main() -> None:
    arguments, directory = parse(), scratch()
    model = make_model(arguments.model, directory / "model")
    load = Load(model, arguments.prompt, arguments.reply, arguments.flight, min(arguments.group, arguments.flight))
    count = max((1 + WAVES) * load.flight, ORCHESTRATOR_STEPS * arguments.batch) // load.group + 1
    texts, prompts = make_prompts(load, count)
    results: dict[str, Any] = {}
    for half in [arguments.only] if arguments.only else HALVES:
        if half == "bare":
            results[half] = bare(load, prompts, arguments, directory)
        else:
            results[half] = {label(arguments): ours(load, texts, arguments, directory)}
        results = kept(results, arguments)  # at once: the next half may fail
    print(json.dumps({half: results[half] for half in HALVES if half in results}, indent=1))
    print(markdown(table(results, load)))
    judge(results, arguments)


def kept(results: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the results into the file, beside those that it has, and return all of them."""
    if arguments.json is None:
        return results
    options = {name: value for name, value in vars(arguments).items() if name not in ("json", "only", "commit")}
    head = {**describe_machine(), "gpus": describe_gpus(), "commit": arguments.commit or commit(), "options": options}
    before = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    rows = {**before.get("ours", {}), **results.get("ours", {})}
    results = {**before, **results, **({"ours": rows} if rows else {}), **head}
    arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return results


def judge(results: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Say whether the bar is reached.

    Raises:
        SystemExit: something failed.
    """
    bare_rate = results.get("bare", {}).get("with logprobs", {}).get("tokens_per_second")
    rate = results.get("ours", {}).get(label(arguments), {}).get("tokens_per_second")
    if bare_rate and rate:
        share = rate / bare_rate
        print(f"ours / bare: {share:.3f}, the bar is {BAR:.2f}: {'reached' if share >= BAR else 'not reached'}")
    rows = {"bare": results.get("bare", {}), **results.get("ours", {})}
    if failed := [f"{name}: {row['failed']}" for name, row in rows.items() if "failed" in row]:
        sys.exit("failed: " + "; ".join(failed))


def commit() -> str:
    """The commit that is checked out; empty where there is no repository."""
    if shutil.which("git") is None:
        return ""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True)
    return asked.stdout.strip()


if __name__ == "__main__":
    main()
