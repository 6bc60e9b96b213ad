"""What evaluations between steps cost a run: how much longer training takes, against an evaluation that runs alone.

    uv run --group cpu python benchmarks/interleaved_evals.py [--pairs 2] [--json FILE]

Two runs a pair: one evaluates only the base model, before its first step, the other every few steps as well. Both make
the same steps.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from machine import describe_machine
from rl_runs import REPOSITORY, run_rl

from prime_rl.monitor import read_metrics

STEPS, INTERVAL, TASKS = 13, 3, 256
WARM = 2  # steps that are not counted
SECONDS = 900.0


def one_run(directory: Path, seed: int, interleaved: bool) -> dict[str, Any]:
    """Seconds of the counted steps, and of each evaluation."""
    more = [
        "@",
        str(REPOSITORY / "examples" / "reverse_text" / "cpu.toml"),
        "--max-steps",
        str(STEPS),
        "--seed",
        str(seed),
    ]
    more += ["--orchestrator.eval.num-examples", str(TASKS), "--orchestrator.eval.no-at-end"]
    if interleaved:
        more += ["--orchestrator.eval.interval", str(INTERVAL)]
    run_rl({}, directory, more, SECONDS)
    trained = {
        int(row["step"]): row["time"]
        for row in read_metrics(directory / "metrics" / "trainer.jsonl")
        if "loss/mean" in row
    }
    rows = read_metrics(directory / "metrics" / "orchestrator.jsonl")
    evals = {int(row["step"]): row["eval/reverse-text/time"] for row in rows if "eval/reverse-text/time" in row}
    return {"seconds": trained[STEPS - 1] - trained[WARM - 1], "alone": evals.pop(0), "beside": list(evals.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    pairs = []
    with tempfile.TemporaryDirectory(prefix="prime-rl-bench-") as scratch:
        for seed in range(arguments.pairs):
            without, with_evals = (one_run(Path(scratch) / f"{seed}-{kind}", seed, kind) for kind in (False, True))
            evaluations = len(with_evals["beside"])
            alone = statistics.mean([without["alone"], with_evals["alone"]])
            extra = (with_evals["seconds"] - without["seconds"]) / evaluations
            pairs.append(
                {
                    "seed": seed,
                    "evaluations": evaluations,
                    "seconds_without": round(without["seconds"], 2),
                    "seconds_with": round(with_evals["seconds"], 2),
                    "longer_per_evaluation": round(extra, 2),
                    "alone": round(alone, 2),
                    "beside": round(statistics.mean(with_evals["beside"]), 2),
                }
            )
            print(pairs[-1], flush=True)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"machine": describe_machine(), "tasks": TASKS, "pairs": pairs}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
