"""`trainer`: trains on the rollouts that an orchestrator commits."""

import os
import sys
from contextlib import nullcontext

from loguru import logger

from prime_rl import faults, lifeline
from prime_rl.config import TrainerConfig, load, write_toml
from prime_rl.errors import UserError
from prime_rl.importing import quick_imports
from prime_rl.launcher.preflight import check_model
from prime_rl.launcher.rundir import cleaned, separate_bench
from prime_rl.monitor import log
from prime_rl.monitor.monitor import check_wandb, metrics_path
from prime_rl.transport.commit import disk_errors
from prime_rl.transport.settings import agree, dry_path


def main() -> None:
    """Parse the command line and train: one process, or one rank of torchrun."""
    faults.arm("trainer")
    # Before torch is imported. A server and environments need the other half, and threads that wait for cores are slow.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2)))
    lifeline.watch()
    config = load(TrainerConfig, prog="trainer")
    rank = int(os.environ.get("RANK", 0))
    log.setup(config.log.level, f"trainer.{rank}" if rank else "trainer")
    try:
        run(config, rank)
    except UserError as error:
        log.fail(error) if rank == 0 else sys.exit(1)  # every rank fails alike: one of them says why


def run(config: TrainerConfig, rank: int) -> None:
    """Check what can be checked before torch is imported, then train; the resolved config is written once the run is not refused."""
    check_model(config.model.name, weights=config.data.fake is None)
    if rank == 0:  # which logs alone
        check_wandb(config.monitor.wandb)
    if config.bench:
        config = separate_bench(config, logger.info if rank == 0 else logger.debug)
    if config.dry_run:
        if rank == 0:
            path = dry_path(config.output_dir, "trainer")
            write_toml(config, path)
            data = "fake data" if config.data.fake else f"rollouts in {config.output_dir / 'rollouts'}"
            print(
                f"trainer: {config.model.name} on {config.device}, {data}, versions to {config.output_dir / 'weights'}"
            )
            print(f"config: {path}")
        return
    if rank == 0:
        with cleaned(config.output_dir, "trainer") if config.clean else nullcontext():
            agree(config, "trainer")
        if config.bench:
            metrics_path(config.output_dir, "trainer").unlink(missing_ok=True)  # of an earlier benchmark
    with quick_imports():
        from prime_rl.trainer.rl.train import train

    with disk_errors(config.output_dir):
        train(config)


if __name__ == "__main__":
    main()
