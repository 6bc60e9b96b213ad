"""Whole runs of `rl` with default options: how soon it trains, how fast it samples, where the time of a step goes.

    uv run --group cpu python benchmarks/end_to_end.py cpu --json benchmarks/results/end_to_end.json
    python benchmarks/end_to_end.py shared-128 shared-512 two-512 --json benchmarks/results/end_to_end.json  # GPUs
    python benchmarks/end_to_end.py shared-128 two-512 --dry-run --layers 1      # check the settings, no GPU
    python benchmarks/end_to_end.py --tables                                     # from results/ into README.md

| case | |
|---|---|
| `cpu` | `examples/reverse_text/cpu.toml`: the bundled tiny model learns |
| `shared-128` | `--share-gpus`: Qwen3-0.6B's shape, random weights, 128 rollouts of 128 tokens a step in groups of 8 |
| `shared-512` | the same, 256 rollouts of 512 tokens |
| `two-128`, `two-512` | the same two, one GPU serves and one trains |

`peers/trl_grpo.py` gives TRL the same work and adds its row to the same file; `peers/vllm_serve.py` adds how long `vllm
serve` alone takes to answer. Settings of `rl` may follow `--`. `two-…` takes two GPUs.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from machine import describe_gpus, describe_machine, renewed
from rl_runs import mean, run_rl, visible
from steps import write_random_model

from prime_rl.monitor.limits import limit_of, shares_of
from prime_rl.monitor.monitor import metrics_path, read_metrics

HERE = Path(__file__).parent
README, RESULTS = HERE / "README.md", HERE / "results" / "end_to_end.json"
CASES = {"cpu": None, "shared-128": (128, 128), "shared-512": (256, 512), "two-128": (128, 128), "two-512": (256, 512)}
WARM = 5  # steps that compile, or follow a start
LEAST = 4  # steps that are counted, of a run that is too short for leaving steps out: they may come in pairs
HANGING = 2  # last steps, ahead of which nothing is sampled any more
PARTS = {  # column: whose, and which of its `time/…`
    "engines: step": ("orchestrator", "step"),
    "nothing in flight": ("orchestrator", "idle"),
    "version staged": ("orchestrator", "update_stage"),
    "paused for it": ("orchestrator", "update_pause"),
    "trainer: step": ("trainer", "step"),
    "waits for a batch": ("trainer", "wait_for_batch"),
    "of it reads it": ("trainer", "read_batch"),
    "forward, backward": ("trainer", "forward_backward"),
    "optimizer": ("trainer", "optimizer"),
    "waits to publish": ("trainer", "export"),
    "save_ckpt": ("trainer", "save_ckpt"),
}
EVAL = "eval/reverse-text/reward/mean"


def settings(case: str, arguments: argparse.Namespace, model: Path) -> tuple[dict[str, Any], list[str]]:
    """Of a case: options of `rl` with their values, and further arguments."""
    if (work := CASES[case]) is None:
        return {}, ["@", "examples/reverse_text/cpu.toml"]
    rollouts, tokens = work
    options = {
        "device": arguments.device,
        "model.name": model,
        "max-steps": arguments.steps,
        "trainer.seq-len": 16384,  # a micro-batch, of many replies
        "orchestrator.seq-len": 1024,
        "trainer.optim.lr": 1e-6,
        "orchestrator.batch-size": rollouts,
        "orchestrator.rollouts-per-example": 8,
        "orchestrator.sampling.max-tokens": tokens,
        "orchestrator.environment.id": "reverse-text",
        "inference.max-model-len": 1024,
    }
    # Random weights are rewarded alike: without it no batch would fill.
    more = ["--orchestrator.no-filter-zero-advantage"]
    if arguments.device == "cuda":
        more += ["--share-gpus"] if case.startswith("shared") else ["--trainer-gpus", "1", "--inference-gpus", "1"]
    return options, more


def measure(case: str, arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """One whole run; ends this process where it fails. With `--dry-run` the plan is printed and nothing is measured."""
    model, output_dir = arguments.model_dir or scratch / "model", scratch / case / "outputs"
    output_dir.parent.mkdir(parents=True)
    on_gpus = arguments.device == "cuda" and case != "cpu"
    if case != "cpu" and not (model / "config.json").is_file():
        write_random_model(model, arguments.model, arguments.layers)
    options, more = settings(case, arguments, model)
    gpus = (
        (["0", "1"] if arguments.dry_run else visible())[: 1 if case.startswith("shared") else 2] if on_gpus else None
    )
    more += arguments.more
    if arguments.dry_run:  # on a host whose GPU nobody can ask for its memory
        more += ["--dry-run", *(["--trainer.model.memory-limit", "45"] if "--share-gpus" in more else [])]
    began = time.time()
    with GpuMemory(on_gpus and not arguments.dry_run) as memory:
        run_rl(options, output_dir, more, arguments.timeout, gpus)
    if arguments.dry_run:
        print(output_dir.with_suffix(".log").read_text())
        return {}
    row = {
        "case": case,
        "random": case != "cpu",
        "machine": describe_machine() | {"gpus": describe_gpus() if on_gpus else []},
        "note": arguments.note,
    }
    return row | summarize(output_dir, began, time.time()) | {"device_used_gib": memory.most}


def summarize(output_dir: Path, began: float, ended: float) -> dict[str, Any]:
    """Return what a run's metrics say. Seconds are of the steps after the first five, before the last two, if any."""
    whole = {name: read_metrics(metrics_path(output_dir, name)) for name in ("orchestrator", "trainer")}
    orchestrator, trainer = ([row for row in rows if "time/step" in row] for rows in whole.values())
    most = len(trainer)
    counted = range(WARM, most - HANGING) if most >= WARM + HANGING + LEAST else range(1, most)
    making, training = ([row for row in rows if int(row["step"]) in counted] for rows in (orchestrator, trainer))
    seconds = [row["time/step"] for row in trainer]
    after = seconds[WARM:] or seconds
    rewards = [row["reward/mean"] for row in orchestrator]
    evals = [row[EVAL] for row in whole["orchestrator"] if EVAL in row]
    shares = shares_of(making, training)
    took = sum(row["time/step"] for row in making)
    return {
        "steps": len(counted),
        "until_first_step": trainer[0]["time"] - began,
        "whole_seconds": ended - began,
        "step_seconds": [round(each, 3) for each in seconds],
        "median_step": statistics.median(after),
        "slowest_over_median": max(after) / statistics.median(after),
        "sampled_tokens_per_second": sum(row["perf/throughput"] * row["time/step"] for row in making) / took,
        "sampled_tokens_per_step": mean(row["perf/throughput"] * row["time/step"] for row in making),
        "trained_tokens_per_step": mean(row["progress/tokens"] for row in making),
        "off_policy_mean": mean(row["off_policy/mean"] for row in making),
        "mismatch_kl_max": max(row["mismatch_kl/mean"] for row in trainer),
        "reward": [mean(rewards[:WARM]), mean(rewards[-WARM:])],
        "held_out": [evals[0], evals[-1]] if evals else None,
        "limit": None if shares is None else str(limit_of(shares)),
        "shares": None if shares is None else vars(shares),
        "seconds": {
            "step": took / len(making),
            "train": mean(row["time/step"] - row["time/wait_for_batch"] for row in training),
            "update_weights": mean(row.get("time/update_weights", 0.0) for row in making),
        },
        "parts": {"orchestrator": parts(making), "trainer": parts(training)},
    }


def parts(rows: list[dict[str, float]]) -> dict[str, list[float]]:
    """Mean and most seconds a step of everything that is timed."""
    names = sorted({name for row in rows for name in row if name.startswith("time/")})
    values = {name: [row.get(name, 0.0) for row in rows] for name in names}
    return {name.removeprefix("time/"): [mean(each), max(each)] for name, each in values.items()}


class GpuMemory:
    """Watches what is used of the first visible GPU, by whatever process: `most`, in GiB."""

    def __init__(self, there: bool) -> None:
        self.most = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True) if there else None

    def __enter__(self) -> "GpuMemory":
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        asked = ["nvidia-smi", f"--id={visible()[0]}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self._ended.wait(2.0):
            with suppress(OSError, ValueError, subprocess.SubprocessError):
                shown = subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout
                self.most = max(self.most, float(shown) / 1024)


def store(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    """Replace these rows of the file, by their names, and keep the others."""
    stored = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(dict(sorted({**stored, **rows}.items())), indent=1) + "\n")


def show(rows: dict[str, dict[str, Any]]) -> str:
    """The tables: whole runs, and where a step's time goes."""
    lines = [
        "| run | first step trained after | step, median (slowest) | sampled tokens/s | of TRL | "
        "reward, first 5 → last 5 steps | limited by | on |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        machine = row["machine"]
        gpus = {gpu.partition(",")[0] for gpu in machine.get("gpus", [])}
        where = ", ".join(gpus or [f"{machine['cores']} cores of {machine['cpu']}"])
        where += f", {machine['date']}{'; ' + row['note'] if row.get('note') else ''}"
        if "until_ready" in row:
            lines.append(f"| {name} | answers after {row['until_ready']:.0f} s | | | | | | {where} |")
            continue
        peers = [other["sampled_tokens_per_second"] for other in rows.values() if other.get("peer_of") == name]
        ratio = f"**{row['sampled_tokens_per_second'] / max(peers):.2f}**" if peers else ""
        reward = "{:.3f} → {:.3f}".format(*row["reward"]) if row.get("reward") and not row.get("random") else ""
        limit = (row.get("limit") or "").removeprefix("limited by ")
        first = f"{row['until_first_step']:.0f} s" if row["until_first_step"] else ""
        step = (
            f"{row['median_step']:.2f} s ({row['slowest_over_median']:.1f} ×)"
            if "median_step" in row
            else f"{row['seconds']['step']:.2f} s, mean"
        )
        lines.append(
            f"| {name} | {first} | {step} | {row['sampled_tokens_per_second']:,.0f} | {ratio} | "
            f"{reward} | {limit} | {where} |"
        )
    timed = {name: row["parts"] for name, row in rows.items() if "parts" in row}
    if timed:
        lines += ["", f"| seconds a step, mean (most) | {' | '.join(PARTS)} |", "|---" * (len(PARTS) + 1) + "|"]
    for name, each in timed.items():
        cells = (_cell(each[process].get(part)) for process, part in PARTS.values())
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(timed: list[float] | None) -> str:
    return "" if timed is None else f"{timed[0]:.2f} ({timed[1]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="of the random models (cpu: to try a case)"
    )
    parser.add_argument("--model", default="0.6B", help="whose shape random weights have")
    parser.add_argument("--layers", type=int, help="of the model (None: all)")
    parser.add_argument("--model-dir", type=Path, help="where the random model is, or is written")
    parser.add_argument("--runs", type=Path, help="a directory that keeps the run directories (None: they are deleted)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each run")
    parser.add_argument("--note", default="", help="what else is to be known of the rows")
    parser.add_argument("--dry-run", action="store_true", help="only validate the settings and print the plans")
    parser.add_argument(
        "--tables",
        action="store_true",
        help="write those of results/end_to_end.json into README.md, and measure nothing",
    )
    parser.add_argument("--json", type=Path)
    ours, _, more = " ".join(map(shlex.quote, sys.argv[1:])).partition(" -- ")
    arguments = parser.parse_args(shlex.split(ours))
    arguments.more = shlex.split(more)
    if arguments.tables:
        README.write_text(renewed(README, "runs", show(json.loads(RESULTS.read_text()))))
        return
    if not arguments.cases or (unknown := set(arguments.cases) - CASES.keys()):
        parser.error(f"name cases of {', '.join(CASES)}" + (f", not {', '.join(unknown)}" if arguments.cases else ""))
    with tempfile.TemporaryDirectory(prefix="prime-rl-runs-") as temporary:
        for case in arguments.cases:
            if row := measure(case, arguments, arguments.runs or Path(temporary)):
                print(show({case: row}), flush=True)
                if arguments.json:
                    store(arguments.json, {case: row})


if __name__ == "__main__":
    main()
