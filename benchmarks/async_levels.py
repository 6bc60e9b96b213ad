"""What it is worth that sampling runs ahead of training: steps per second at async level 1 against level 0, where both take as long.

    python benchmarks/async_levels.py --device cuda --json benchmarks/results/async_levels_h200.json     # two GPUs
    uv run --group cpu python benchmarks/async_levels.py --batch 16 --group 4 --reply 32 --steps 6 --warm 2      # that it runs; both share the CPU

Whole runs of `rl` with the bundled model and `reverse_text`, one for each level. At level 0 a step is generation, then training, then the new
weights; their two times are taken there and printed, with what is left. Twice as fast is the most that running ahead can be, where the two are
equal: `--reply` (tokens of each reply, exactly) and `--batch` lengthen generation, a smaller `--micro-batch` (tokens) makes more of them. Settings of
`rl` may follow `--`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import describe_gpus, describe_machine

from prime_rl.monitor import read_metrics

REPOSITORY = Path(__file__).parents[1]
MATCHED = 1.25  # the two times differ by no more than this factor


def settings(arguments: argparse.Namespace, level: int, directory: Path) -> dict[str, Any]:
    """Of one run, by the names that `rl` takes."""
    found: dict[str, Any] = {
        "output-dir": directory,
        "device": arguments.device,
        "model.name": REPOSITORY / arguments.model if (REPOSITORY / arguments.model).is_dir() else arguments.model,
        "max-steps": arguments.steps,
        "async-level": level,
        "seed": arguments.seed,
        "trainer.seq-len": arguments.micro_batch,
        "orchestrator.seq-len": min(arguments.micro_batch, arguments.context),
        "orchestrator.batch-size": arguments.batch,
        "orchestrator.rollouts-per-example": arguments.group,
        "orchestrator.sampling.min-tokens": arguments.reply,
        "orchestrator.sampling.max-tokens": arguments.reply,
        "orchestrator.environment.id": "reverse-text",
        "inference.max-model-len": arguments.context,
        "inference.server.port": arguments.port,
    }
    if arguments.device == "cpu":
        found |= {"trainer.weights.dtype": "float32", "inference.cpu.fork-engine": "true"}
    return found


def run(arguments: argparse.Namespace, level: int, directory: Path) -> dict[str, Any]:
    """One whole run; what its steps took, after the first ones, which warm up, and without the last one, which nothing follows."""
    command = [sys.executable, "-m", "prime_rl.entrypoints.rl"]
    for name, value in settings(arguments, level, directory).items():
        command += [f"--{name}", str(value)]
    command += ["--orchestrator.no-filter-zero-advantage", *arguments.more]  # every step trains on all that it sampled
    log = directory.with_suffix(".log")
    with log.open("wb") as out:
        done = subprocess.run(command, cwd=REPOSITORY, stdout=out, stderr=subprocess.STDOUT, timeout=arguments.timeout)
    if done.returncode:
        sys.exit(f"async level {level}: rl exited with {done.returncode}\n{log.read_text()[-3000:]}")
    trainer = steady(directory / "metrics" / "trainer.jsonl", arguments)
    orchestrator = steady(directory / "metrics" / "orchestrator.jsonl", arguments)
    seconds = mean(row["time/step"] for row in trainer)
    return {
        "async_level": level,
        "steps": len(trainer),
        "steps_per_second": 1 / seconds,
        "step": seconds,
        "training": mean(row["time/step"] - row["time/wait_for_batch"] for row in trainer),
        "generation": mean(row["time/step"] - row["time/wait_for_weights"] for row in orchestrator),
        "update": mean(row["time/update_weights"] for row in orchestrator),
        "tokens": mean(row["progress/tokens"] for row in orchestrator),
        "off_policy": mean(row["off_policy/mean"] for row in orchestrator),
    }


def steady(path: Path, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Rows of the steps that count."""
    steps = range(arguments.warm, arguments.steps - 1)
    return [row for row in read_metrics(path) if int(row["step"]) in steps and "time/step" in row]


def mean(values: Any) -> float:
    found = list(values)
    return sum(found) / len(found)


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Prints the table, and what follows from it."""
    columns = ("steps_per_second", "step", "generation", "training", "update", "tokens", "off_policy")
    print("".join(f"{name:>18}" for name in ("async_level", *columns)))
    for row in rows:
        print(f"{row['async_level']:>18}" + "".join(f"{row[name]:>18.4g}" for name in columns))
    apart, together = rows
    balance = apart["generation"] / apart["training"]
    most = (apart["generation"] + apart["training"]) / max(apart["generation"], apart["training"])
    ratio = together["steps_per_second"] / apart["steps_per_second"]
    matched = 1 / MATCHED <= balance <= MATCHED
    print(
        f"generation / training at level 0: {balance:.2f}"
        + ("" if matched else ": not matched (--reply, --micro-batch)")
    )
    print(
        f"async level 1 is {ratio:.2f} times as fast as level 0; these two times allow {most:.2f} and what an update costs"
    )
    return {"ratio": ratio, "generation_over_training": balance, "matched": matched}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default="assets/tiny-reverse")
    parser.add_argument("--batch", type=int, default=256, help="episodes of a step")
    parser.add_argument("--group", type=int, default=8, help="attempts at one task")
    parser.add_argument("--reply", type=int, default=128, help="tokens of each reply")
    parser.add_argument("--micro-batch", type=int, default=512, help="tokens of a packed micro-batch")
    parser.add_argument("--context", type=int, default=512, help="most tokens of prompt and reply")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--warm", type=int, default=5, help="steps that are not counted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for each of the two runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("more", nargs="*", help="settings of rl")
    arguments = parser.parse_args()
    if arguments.warm + 2 > arguments.steps:
        parser.error("--steps leaves none between the first ones and the last one")
    scratch = Path(tempfile.mkdtemp(prefix="prime-rl-async-"))
    rows = [run(arguments, level, scratch / f"level-{level}") for level in (0, 1)]
    result = report(rows)
    if arguments.json:
        given = {name: value for name, value in vars(arguments).items() if name not in ("json", "timeout", "port")}
        machine = describe_machine() | {"gpus": describe_gpus()}
        arguments.json.write_text(
            json.dumps({"machine": machine, "settings": given, **result, "levels": rows}, indent=1) + "\n"
        )
    if not os.environ.get("KEEP"):
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
