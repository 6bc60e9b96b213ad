"""`trainer`: trains on the rollouts that an orchestrator commits."""

import os
import sys

from prime_rl import lifeline
from prime_rl.config import TrainerConfig, load, write_toml
from prime_rl.errors import UserError
from prime_rl.launcher.checks import check_model
from prime_rl.monitor import Status, log


def main() -> None:
    """Parse the command line and train: one process, or one rank of torchrun."""
    lifeline.watch()
    config = load(TrainerConfig, prog="trainer")
    rank = int(os.environ.get("RANK", 0))
    log.setup(config.log.level, f"trainer.{rank}" if rank else "trainer")
    try:
        run(config, rank)
    except UserError as error:
        # Every rank fails alike: one of them says why.
        sys.exit(f"error: {error}" if rank == 0 else 1)


def run(config: TrainerConfig, rank: int) -> None:
    """Check what can be checked before torch is imported, write the resolved config, train."""
    check_model(config.model.name, weights=config.data.fake is None)
    path = config.output_dir / "configs" / "trainer.toml"
    if rank == 0:
        write_toml(config, path)
    if config.dry_run:
        if rank == 0:
            data = "fake data" if config.data.fake else f"rollouts in {config.output_dir / 'rollouts'}"
            print(
                f"trainer: {config.model.name} on {config.device}, {data}, versions to {config.output_dir / 'weights'}"
            )
            print(f"config: {path}")
        return
    from prime_rl.trainer.rl.train import train

    try:
        train(config)
    except UserError as error:
        if rank == 0:
            Status(config.output_dir, "trainer").done(f"failed: {error}")
        raise


if __name__ == "__main__":
    main()
