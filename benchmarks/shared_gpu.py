"""A whole run on one GPU that serves and trains (`rl --share-gpus`): `reverse_text`, 20 steps, random weights of a 0.6B model's shape.

    python benchmarks/shared_gpu.py --json benchmarks/results/shared_gpu_h200.json        # one GPU, a few minutes

Told apart: until the first step begins (vLLM's start, compilation), and the steps.
"""

import argparse
import json
import math
import shutil
import tempfile
import time
from pathlib import Path

from machine import describe_gpus, describe_machine
from mismatch import TOKENIZER, write_model
from rl_runs import mean, run_rl, steady, visible


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="0.6B")
    parser.add_argument("--layers", type=int, help="of the model (None: all)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=900.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("more", nargs="*", help="settings of rl")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="prime-rl-shared-") as scratch:
        model, output_dir = Path(scratch) / "model" / "step_0", Path(scratch) / "outputs"
        write_model(model, arguments.model, arguments.layers, 1.0, arguments.device)
        for path in TOKENIZER.glob("*.jinja"):
            shutil.copy(path, model)
        settings = {
            "device": arguments.device,
            "model.name": model,
            "max-steps": arguments.steps,
            "trainer.seq-len": 16384,  # a micro-batch, of many replies
            "orchestrator.seq-len": 1024,
            "trainer.optim.lr": 1e-6,
            "orchestrator.batch-size": 128,
            "orchestrator.rollouts-per-example": 8,
            "orchestrator.sampling.max-tokens": 128,
            "orchestrator.environment.id": "reverse-text",
            "orchestrator.environment.workers": 2,
            "inference.max-model-len": 1024,
        }
        # Random weights are rewarded alike: without it no batch would fill.
        more = ["--orchestrator.no-filter-zero-advantage", *arguments.more]
        more += ["--share-gpus"] if arguments.device == "cuda" else []
        began = time.time()
        run_rl(settings, output_dir, more, arguments.timeout, visible()[:1] if arguments.device == "cuda" else None)
        ended = time.time()
        rows = {name: steady(output_dir, name, range(arguments.steps)) for name in ("orchestrator", "trainer")}
        first = rows["orchestrator"][0]
        ready = first["time"] - first["time/step"]
        found = {
            "start": ready - began,
            "steps": ended - ready,
            "step": mean(row["time/step"] for row in rows["orchestrator"][5:]),
            "training": mean(row["time/step"] - row["time/wait_for_batch"] for row in rows["trainer"][5:]),
            "update": mean(row["time/update_weights"] for row in rows["orchestrator"][5:]),
            "tokens": mean(row["progress/tokens"] for row in rows["orchestrator"]),
            "mismatch_kl": max(row.get("mismatch_kl/mean", math.nan) for row in rows["trainer"]),
            "versions": len(rows["trainer"]),
        }
    print(", ".join(f"{name} {value:.4g}" for name, value in found.items()))
    if arguments.json:
        machine = describe_machine() | {"gpus": describe_gpus() if arguments.device == "cuda" else []}
        arguments.json.write_text(
            json.dumps({"machine": machine, "steps_run": arguments.steps, **found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
