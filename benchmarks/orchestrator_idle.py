"""What the orchestrator costs while it waits: CPU share of a core over some seconds in which the trainer does nothing.

    uv run --group cpu python benchmarks/orchestrator_idle.py [--seconds 20]

A real server and a real orchestrator with async_level 0: after the batch of step 0 it waits for version 1, which never comes.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import cpu_seconds, descendants, describe_machine

from prime_rl.transport.commit import is_listed
from prime_rl.transport.weights import write_base_version
from prime_rl.wait import wait

REPOSITORY = Path(__file__).parents[1]
MODEL = REPOSITORY / "assets" / "tiny-reverse"
PORT = 8390


def start(name: str, directory: Path, *arguments: object) -> "subprocess.Popen[bytes]":
    command = [
        sys.executable,
        "-m",
        f"prime_rl.entrypoints.{name}",
        "--output-dir",
        directory,
        "--model.name",
        MODEL,
        *arguments,
    ]
    with (directory / f"{name}.log").open("wb") as log:
        return subprocess.Popen([str(part) for part in command], cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="prime-rl-idle-"))
    write_base_version(directory / "weights", MODEL)
    (directory / "incarnations").mkdir()
    (directory / "incarnations" / "0.json").write_text('{"step": 0}')  # as a trainer would begin its incarnation
    server = start("inference", directory, "--server.port", PORT, "--cpu.fork-engine")
    orchestrator = start(
        "orchestrator", directory, "--environment.id", "reverse-text", "--batch-size", 16, "--rollouts-per-example", 8,
        "--seq-len", 512, "--sampling.max-tokens", 32, "--async-level", 0, "--max-steps", 2, "--no-filter-zero-advantage",
        "--client.base-url", f"http://localhost:{PORT}",
    )  # fmt: skip
    try:
        wait(
            lambda: is_listed(directory / "rollouts" / "step_0"),
            subject="rollouts/step_0",
            owner="orchestrator",
            seconds=180,
            stop=lambda: orchestrator.poll() is not None,
        )
        time.sleep(2)
        workers = [pid for pid in descendants(orchestrator.pid) if pid != orchestrator.pid]
        before, began = cpu_seconds(orchestrator.pid), time.monotonic()
        worker_before = sum(cpu_seconds(pid) for pid in workers)
        time.sleep(arguments.seconds)
        elapsed = time.monotonic() - began
        share = (cpu_seconds(orchestrator.pid) - before) / elapsed
        worker_share = (sum(cpu_seconds(pid) for pid in workers) - worker_before) / elapsed
    finally:
        for process in (orchestrator, server):
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    print(f"orchestrator, waiting: {share:.2%} of a core; its {len(workers)} environment workers: {worker_share:.2%}")
    if arguments.output:
        result = {
            "machine": describe_machine(),
            "seconds": elapsed,
            "orchestrator_core_share": share,
            "workers_core_share": worker_share,
        }
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
