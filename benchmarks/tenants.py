"""Tenants that share a trainer and a server, against one that has them for itself.

    uv run --group cpu python benchmarks/tenants.py --tenants 2 --json benchmarks/results/tenants_cpu.json
    nvidia-cuda-mps-control -d                                                      # one GPU, processes side by side
    python benchmarks/tenants.py --device cuda --model 0.6B --tokens 128 --batch-sizes 16 32 64 --json tenants.json

One deployment, in which first one tenant trains LoRA on reverse-text for some steps, and then all of them do. Runs one
after the other have the rate of one of them. The rate is that of steady state: samples that were trained from the fifth
step of the last tenant to get there until the first one's last. On a GPU the weights are random; nothing is learned.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from machine import describe_gpus, describe_machine
from rl_runs import REPOSITORY
from steps import write_random_model

from prime_rl.monitor import read_metrics
from prime_rl.monitor.monitor import metrics_path
from prime_rl.wait import wait

WARM = 5  # steps that are not counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=4)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", help="a shape (0.6B), with random weights (default: the bundled tiny model)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64])
    parser.add_argument("--tokens", type=int, default=32, help="of a reply, at most")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds, in all")
    parser.add_argument("--scratch", type=Path, help="where the runs stay (default: nowhere)")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "machine": describe_machine() | {"gpus": describe_gpus() if arguments.device == "cuda" else []},
        "command": " ".join(sys.argv),
    }
    with tempfile.TemporaryDirectory() as name:
        scratch, model = arguments.scratch or Path(name), REPOSITORY / "assets/tiny-reverse"
        scratch.mkdir(parents=True, exist_ok=True)
        if arguments.model:
            model = scratch / "model"
            write_random_model(model, arguments.model)
        for row in measure(arguments, model, scratch):
            result.setdefault("rows", []).append(row)
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps(row, indent=1), flush=True)


def measure(arguments: argparse.Namespace, model: Path, scratch: Path) -> Iterator[dict[str, Any]]:
    """Yield one row for each number of samples in a step."""
    output_dir, deadline, processes = scratch / "deployment", time.time() + arguments.timeout, []
    options = {"device": arguments.device, "model.name": model, "output-dir": output_dir, "trainer.lora.rank": 16}
    options |= {"trainer.tenants.slots": arguments.tenants, "inference.max-model-len": 768}
    options |= {"trainer.seq-len": 16384} if arguments.device == "cuda" else {"trainer.seq-len": 1024}
    more = ["--share-gpus"] if arguments.device == "cuda" else ["--inference.fork-engine"]
    try:
        processes.append(start(["rl", "tenants"], options, more, scratch / "deployment.log"))
        ready = output_dir / "settings" / "trainer.json"
        wait(ready.exists, subject=str(ready), owner="rl tenants", seconds=120)
        for batch_size in arguments.batch_sizes:
            row: dict[str, Any] = {"samples_of_a_step": batch_size, "tenants": arguments.tenants}
            for part, count in (("alone", 1), ("together", arguments.tenants)):
                names = [f"{part}-{batch_size}-{number}" for number in range(count)]
                own = {
                    "model.name": model,
                    "max-steps": arguments.steps,
                    "tenant.optim.lr": 1e-5,
                    "tenant.join": output_dir,
                    "batch-size": batch_size,
                    "rollouts-per-example": 8,
                    "seq-len": 768,
                    "sampling.max-tokens": arguments.tokens,
                    "environment.id": "reverse-text",
                    "filter-zero-advantage": "false",  # random weights are rewarded alike
                }
                for seed, name in enumerate(names):
                    options = own | {"tenant.name": name, "seed": seed}
                    processes.append(start(["orchestrator"], options, [], scratch / f"{name}.log"))
                for process in processes[1:]:
                    if process.wait(max(deadline - time.time(), 1.0)) != 0:
                        logs = [path.read_text()[-2000:] for path in sorted(scratch.glob("*.log"))]
                        sys.exit("a tenant failed:\n" + "\n".join(logs))
                del processes[1:]
                row[part] = summarize([output_dir / "tenants" / name for name in names])
            yield row | {"times": row["together"]["samples_per_second"] / row["alone"]["samples_per_second"]}
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGINT)
            process.wait(60)


def start(command: list[str], options: dict[str, Any], more: list[str], log: Path) -> "subprocess.Popen[bytes]":
    argv = [sys.executable, "-m", f"prime_rl.entrypoints.{command[0]}", *command[1:]]
    for name, value in options.items():
        argv += [f"--{name}", str(value)]
    with log.open("wb") as out:
        return subprocess.Popen([*argv, *more], cwd=REPOSITORY, stdout=out, stderr=out)


def summarize(directories: list[Path]) -> dict[str, Any]:
    """Return the rate of tenants that go on at the same time, and what their steps wait for."""
    runs = [[row for row in read_metrics(metrics_path(path, "trainer")) if "time/step" in row] for path in directories]
    first, last = max(rows[WARM - 1]["time"] for rows in runs), min(rows[-1]["time"] for rows in runs)
    counted = [row for rows in runs for row in rows if first < row["time"] <= last]
    samples = sum(
        row["progress/total_samples"] - before["progress/total_samples"]
        for rows in runs
        for before, row in pairwise(rows)
        if first < row["time"] <= last
    )
    return {
        "samples_per_second": samples / (last - first),
        "steps_counted": len(counted),
        "queued": sum(row["tenant/queued"] for row in counted) / len(counted),
        "waits_for_batch": sum(row["time/wait_for_batch"] for row in counted) / len(counted),
    }


if __name__ == "__main__":
    main()
