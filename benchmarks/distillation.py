"""What a teacher is worth: the policy learns from a better model alone, and its reward on held-out tasks rises.

    uv run --group cpu python benchmarks/distillation.py [--steps 15] [--json benchmarks/results/distillation_cpu.json]

The teacher is made first, by the headline run (examples/reverse_text/cpu.toml), and served; then one run of each
example of examples/algorithms that needs one. About eight minutes on two cores.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from machine import describe_machine
from rl_runs import REPOSITORY, run_rl

from prime_rl.monitor import read_metrics

BASE, EXAMPLES = "examples/reverse_text/cpu.toml", ("opd", "sft")
PORT, EVAL = 8101, "eval/reverse-text/reward/mean"
RUN_SECONDS, START_SECONDS = 900.0, 180.0


def run(directory: Path, *more: str) -> dict[str, Any]:
    """One run: the reward before and after, on held-out tasks, and of each step's own rollouts."""
    run_rl({}, directory, ["@", BASE, *more], RUN_SECONDS)
    rows = read_metrics(directory / "metrics" / "orchestrator.jsonl")
    held_out = [row[EVAL] for row in rows if EVAL in row]
    return {
        "held_out": [round(held_out[0], 4), round(held_out[-1], 4)],
        "rewards": [round(row["reward/mean"], 4) for row in rows if "reward/mean" in row],
    }


@contextmanager
def serving(model: Path, directory: Path) -> Iterator[None]:
    """`model` behind the address that the examples name."""
    command = [sys.executable, "-m", "prime_rl.entrypoints.inference", "--model.name", str(model)]
    command += ["--server.port", str(PORT), "--max-model-len", "256", "--device", "cpu", "--output-dir", str(directory)]
    with (directory.parent / "teacher-server.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not answers():
                if server.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"the teacher's server did not start: see {log.name}")
                time.sleep(0.5)
            yield
        finally:
            server.terminate()
            server.wait(60)


def answers() -> bool:
    try:
        with urllib.request.urlopen(f"http://localhost:{PORT}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15, help="of each student")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="prime-rl-distillation-"))
    runs = {"teacher": run(scratch / "teacher")}
    newest = max(
        (scratch / "teacher" / "weights").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_"))
    )
    with serving(newest, scratch / "served"):
        for name in EXAMPLES:
            runs[name] = run(
                scratch / name, "@", f"examples/algorithms/{name}.toml", "--max-steps", str(arguments.steps)
            )
    for name, found in runs.items():
        before, after = found["held_out"]
        print(f"{name:>8}: held-out {before:.4f} -> {after:.4f} in {len(found['rewards'])} steps")
    result = {"machine": describe_machine(), "steps": arguments.steps, "runs": runs}
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
        arguments.json.chmod(0o644)
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
