"""`orchestrator`: makes rollouts, scores them, cuts batches."""

import asyncio
import sys

from prime_rl import lifeline
from prime_rl.config import OrchestratorConfig, load, write_toml
from prime_rl.errors import UserError
from prime_rl.monitor import log


def main() -> None:
    """Parse the command line and run until the last step is committed."""
    lifeline.watch()
    config = load(OrchestratorConfig, prog="orchestrator")
    log.setup(config.log.level, "orchestrator")
    write_toml(config, config.output_dir / "configs" / "orchestrator.toml")
    if config.dry_run:
        return
    from prime_rl.orchestrator.orchestrator import orchestrate

    try:
        asyncio.run(orchestrate(config))
    except UserError as error:
        sys.exit(f"error: {error}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)


if __name__ == "__main__":
    main()
