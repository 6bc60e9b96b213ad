"""Whole runs of `rl`, for the scripts here that measure them."""

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from prime_rl.monitor import read_metrics

REPOSITORY = Path(__file__).parents[1]


def visible() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(index) for index in range(torch.cuda.device_count())]


def run_rl(
    settings: Mapping[str, Any],
    output_dir: Path,
    more: Sequence[str],
    seconds: float,
    gpus: Sequence[str] | None = None,
) -> None:
    """Run `rl` with these settings and further arguments, on these GPUs. Exit with its last lines if it fails."""
    command = [sys.executable, "-m", "prime_rl.entrypoints.rl", "--output-dir", str(output_dir)]
    for name, value in settings.items():
        command += [f"--{name}", str(value)]
    environment = dict(os.environ)
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    log = output_dir.with_suffix(".log")
    with log.open("wb") as out:
        process = subprocess.Popen([*command, *more], cwd=REPOSITORY, env=environment, stdout=out, stderr=out)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # rl ends what it has started
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()  # its children end with it
            code = None
    if code != 0:
        ended = f"was not done after {seconds:.0f} s" if code is None else f"exited with {code}"
        sys.exit(f"{' '.join(command)}\nrl {ended}\n{log.read_text()[-4000:]}")


def steady(output_dir: Path, process: str, steps: Iterable[int]) -> list[dict[str, float]]:
    """What `process` measured of these steps."""
    rows = read_metrics(output_dir / "metrics" / f"{process}.jsonl")
    return [row for row in rows if int(row["step"]) in steps and "time/step" in row]


def mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
