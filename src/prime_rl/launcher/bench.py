"""`--bench` measures, and touches no run: what it writes has a directory of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from prime_rl.config import OrchestratorConfig, RLConfig, SFTConfig, TrainerConfig
from prime_rl.errors import UserError
from prime_rl.launcher import rundir

DIRECTORY = "bench"

Config = TypeVar("Config", TrainerConfig, SFTConfig, OrchestratorConfig)
Say = Callable[[str], None]


def bench_dir(output_dir: Path) -> Path:
    """`bench/` in the run directory. Who is told that directory itself (the processes that `rl` starts) stays in it.

    Raises:
        UserError: it holds a run.
    """
    directory = output_dir if output_dir.name == DIRECTORY else output_dir / DIRECTORY
    measured = {"metrics"}  # benchmarks write these, too
    if rundir.recoverable(directory) or set(rundir.results(directory)) - measured:
        raise UserError(
            f"{directory} is the place of benchmarks, and holds a run: rename it, or choose another --output-dir"
        )
    return directory


def apart(config: Config, say: Say) -> Config:
    """The config of one process for a benchmark: neither the run in its `output_dir` nor one in W&B is touched.

    An orchestrator evaluates nothing: no trainer commits what the server could prove that it serves.

    Args:
        say: Told where what it writes goes, unless that is where it was told to.

    Raises:
        UserError: a run is in the way.
    """
    monitor = config.monitor
    if monitor.wandb is not None:
        monitor = monitor.model_copy(update={"wandb": monitor.wandb.model_copy(update={"id": None})})
    unmeasured: dict[str, None] = {"eval": None} if isinstance(config, OrchestratorConfig) else {}
    return config.model_copy(update={"output_dir": _place(config.output_dir, say), "monitor": monitor, **unmeasured})


def run_apart(config: RLConfig, say: Say) -> RLConfig:
    """The same for a whole run. It goes on from nothing, saves nothing, and evaluates nothing."""
    there = {"output_dir": _place(config.output_dir, say)}
    inference = config.inference and config.inference.model_copy(update=there)
    pair = {
        "trainer": config.trainer.model_copy(update={**there, "ckpt": None}),
        "orchestrator": config.orchestrator.model_copy(update={**there, "ckpt": None, "eval": None}),
    }
    return config.model_copy(update={**there, **pair, "inference": inference, "ckpt": None, "recover": False})


def _place(output_dir: Path, say: Say) -> Path:
    directory = bench_dir(output_dir)
    if directory != output_dir:
        say(f"benchmark: what it writes goes to {directory}, no run is touched")
    return directory
