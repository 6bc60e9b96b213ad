"""The headline run on this machine, by seed: does the reward rise, how long does it take, how much memory does it need.

    uv run --group cpu python benchmarks/reverse_text_cpu.py [--seeds 0 1 2] [--output FILE]

Memory is the proportional set size (PSS) of the whole process tree, sampled every half second: shared pages count once.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from machine import describe_machine, tree_pss_bytes

from prime_rl.monitor import read_metrics

REPOSITORY = Path(__file__).parents[1]
EVAL = "eval/reverse-text/reward/mean"


def run_seed(seed: int, config: str, directory: Path) -> dict[str, Any]:
    """One whole run, vLLM's start included."""
    command = [
        sys.executable,
        "-m",
        "prime_rl.entrypoints.rl",
        "@",
        config,
        "--seed",
        str(seed),
        "--output-dir",
        str(directory),
    ]
    began = time.monotonic()
    with (directory.parent / f"rl-{seed}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT)
        peak = watch_memory(process)
    seconds = time.monotonic() - began
    if process.returncode:
        sys.exit(f"seed {seed}: rl exited with {process.returncode}; see {log.name}")
    orchestrator = read_metrics(directory / "metrics" / "orchestrator.jsonl")
    trainer = read_metrics(directory / "metrics" / "trainer.jsonl")
    rewards = [row["reward/mean"] for row in orchestrator if "reward/mean" in row]
    evals = [row[EVAL] for row in orchestrator if EVAL in row]
    return {
        "seed": seed,
        "seconds": round(seconds, 1),
        "peak_memory_gib": round(peak / 2**30, 2),
        "steps": len(rewards),
        "reward_first5": round(statistics.mean(rewards[:5]), 4),
        "reward_last5": round(statistics.mean(rewards[-5:]), 4),
        "eval_before": round(evals[0], 4),
        "eval_after": round(evals[-1], 4),
        "mismatch_kl_max": max(row["mismatch_kl/mean"] for row in trainer),
        "seconds_per_step": round(statistics.median(row["time/step"] for row in orchestrator if "time/step" in row), 2),
    }


def watch_memory(process: "subprocess.Popen[bytes]") -> int:
    """Wait for the run; returns the peak PSS of its process tree in bytes."""
    peak = 0
    ended = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not ended.wait(0.5):
            peak = max(peak, tree_pss_bytes(process.pid))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        process.wait(1800)
    finally:
        ended.set()
        thread.join()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--config", default="examples/reverse_text/cpu.toml")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="prime-rl-bench-"))
    runs = [run_seed(seed, arguments.config, scratch / f"seed-{seed}") for seed in arguments.seeds]
    columns = [
        "seed",
        "seconds",
        "peak_memory_gib",
        "steps",
        "reward_first5",
        "reward_last5",
        "eval_before",
        "eval_after",
        "mismatch_kl_max",
    ]
    print("".join(f"{column:>17}" for column in columns))
    for run in runs:
        print("".join(f"{run[column]:>17.6g}" for column in columns))
    result = {"machine": describe_machine(), "config": arguments.config, "runs": runs}
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    if not os.environ.get("KEEP"):
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
