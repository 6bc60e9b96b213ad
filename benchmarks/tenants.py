"""Tenants that share a trainer and a server, against runs of the same work one after the other.

    uv run --group cpu python benchmarks/tenants.py --tenants 2 --json benchmarks/results/tenants_cpu.json
    python benchmarks/tenants.py --device cuda --model 0.6B --json tenants.json     # one GPU

Each tenant, and each run, trains LoRA on reverse-text with the default options of `rl`. Runs one after the other have
the rate of one of them, so one is measured. The rate is that of steady state: samples that were trained from the fifth
step of the last tenant to get there until the first one's last. On a GPU the weights are random; nothing is learned.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from machine import describe_gpus, describe_machine
from rl_runs import REPOSITORY, run_rl
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
    parser.add_argument("--model-dir", type=Path, help="where its weights are, or are written")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32, help="of a reply, at most")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of each run")
    parser.add_argument("--part", choices=("alone", "together"), help="measure one alone; the other is in --json")
    parser.add_argument("--scratch", type=Path, help="where the runs stay (default: nowhere)")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch, model = arguments.scratch or Path(name), REPOSITORY / "assets/tiny-reverse"
        scratch.mkdir(parents=True, exist_ok=True)
        if arguments.model:
            model = arguments.model_dir or scratch / "model"
            if not (model / "config.json").is_file():
                write_random_model(model, arguments.model)
        row = {
            "machine": describe_machine() | {"gpus": describe_gpus() if arguments.device == "cuda" else []},
            "command": " ".join(sys.argv),
            "tenants": arguments.tenants,
        }
        if arguments.part is not None and arguments.json.exists():
            row = json.loads(arguments.json.read_text()) | row
        for part, measure in (("alone", measure_alone), ("together", measure_tenants)):
            if arguments.part in (None, part):
                row[part] = measure(arguments, model, scratch)
    if row.keys() >= {"alone", "together"}:
        row["times"] = row["together"]["samples_per_second"] / row["alone"]["samples_per_second"]
    arguments.json.write_text(json.dumps(row, indent=1) + "\n")
    print(json.dumps(row, indent=1))


def of_deployment(arguments: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Options of `rl`, and of `rl tenants`."""
    options = {"device": arguments.device, "model.name": model, "trainer.lora.rank": 16}
    options |= {"trainer.seq-len": 16384 if arguments.device == "cuda" else 1024, "inference.max-model-len": 768}
    return options if arguments.device == "cuda" else options | {"inference.fork-engine": "true"}


def of_tenant(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of an orchestrator."""
    return {
        "batch-size": arguments.batch_size,
        "rollouts-per-example": 8,
        "seq-len": 768,
        "sampling.max-tokens": arguments.tokens,
        "environment.id": "reverse-text",
        "filter-zero-advantage": "false",  # random weights are rewarded alike
    }


def measure_alone(arguments: argparse.Namespace, model: Path, scratch: Path) -> dict[str, Any]:
    options = of_deployment(arguments, model) | {"max-steps": arguments.steps, "trainer.optim.lr": 1e-5}
    options |= {f"orchestrator.{name}": value for name, value in of_tenant(arguments).items()}
    began = time.time()
    run_rl(options, scratch / "alone", ["--share-gpus"] * (arguments.device == "cuda"), arguments.timeout)
    return summarize([scratch / "alone"], began)


def measure_tenants(arguments: argparse.Namespace, model: Path, scratch: Path) -> dict[str, Any]:
    began, output_dir, processes = time.time(), scratch / "together", []
    deployment = of_deployment(arguments, model) | {
        "output-dir": output_dir,
        "trainer.tenants.slots": arguments.tenants,
    }
    own = of_tenant(arguments) | {"model.name": model, "max-steps": arguments.steps, "tenant.optim.lr": 1e-5}
    try:
        more = ["--share-gpus"] * (arguments.device == "cuda")
        processes.append(start(["rl", "tenants"], deployment, more, scratch / "deployment.log"))
        ready = output_dir / "settings" / "trainer.json"
        wait(ready.exists, subject=str(ready), owner="rl tenants", seconds=120)
        for number in range(arguments.tenants):
            options = own | {"tenant.join": output_dir, "tenant.name": f"t{number}", "seed": number}
            processes.append(start(["orchestrator"], options, [], scratch / f"t{number}.log"))
        for process in processes[1:]:
            if process.wait(max(began + arguments.timeout - time.time(), 1.0)) != 0:
                logs = [path.read_text()[-2000:] for path in sorted(scratch.glob("*.log"))]
                sys.exit("a tenant failed:\n" + "\n".join(logs))
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGINT)
            process.wait(60)
    return summarize([output_dir / "tenants" / f"t{number}" for number in range(arguments.tenants)], began)


def start(command: list[str], options: dict[str, Any], more: list[str], log: Path) -> "subprocess.Popen[bytes]":
    argv = [sys.executable, "-m", f"prime_rl.entrypoints.{command[0]}", *command[1:]]
    for name, value in options.items():
        argv += [f"--{name}", str(value)]
    with log.open("wb") as out:
        return subprocess.Popen([*argv, *more], cwd=REPOSITORY, stdout=out, stderr=out)


def summarize(directories: list[Path], began: float) -> dict[str, Any]:
    """Return the rates of runs that go on at the same time, and what they took from the first start to the last end."""
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
        "whole_seconds": max(rows[-1]["time"] for rows in runs) - began,
        "queued": sum(row.get("tenant/queued", 0.0) for row in counted) / len(counted),
        "waits_for_batch": sum(row["time/wait_for_batch"] for row in counted) / len(counted),
    }


if __name__ == "__main__":
    main()
