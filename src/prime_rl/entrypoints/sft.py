"""`sft`: fine-tunes a model on demonstrations."""

import os
import sys

from prime_rl import lifeline
from prime_rl.config import SFTConfig, load, write_toml
from prime_rl.errors import UserError
from prime_rl.launcher.checks import check_dataset, check_model
from prime_rl.monitor import Status, log


def main() -> None:
    """Parse the command line and fine-tune: one process, or one rank of torchrun."""
    lifeline.watch()
    config = load(SFTConfig, prog="sft")
    rank = int(os.environ.get("RANK", 0))
    log.setup(config.log.level, f"sft.{rank}" if rank else "sft")
    try:
        run(config, rank)
    except UserError as error:
        # Every rank fails alike: one of them says why.
        sys.exit(f"error: {error}" if rank == 0 else 1)


def run(config: SFTConfig, rank: int) -> None:
    """Check what can be checked before torch is imported, write the resolved config, train."""
    check_model(config.model.name, weights=config.data.fake is None)
    if config.data.fake is None:
        check_dataset(config.data.name)
    path = config.output_dir / "configs" / "sft.toml"
    if rank == 0:
        write_toml(config, path)
    if config.dry_run:
        if rank == 0:
            data = "fake data" if config.data.fake else config.data.name
            print(f"sft: {config.model.name} on {config.device}, {data}, weights to {config.output_dir / 'weights'}")
            print(f"config: {path}")
        return
    from prime_rl.trainer.sft.train import train

    try:
        train(config)
    except UserError as error:
        if rank == 0:
            Status(config.output_dir, "sft").done(f"failed: {error}")
        raise


if __name__ == "__main__":
    main()
