"""`orchestrator`: makes rollouts, scores them, cuts batches."""

import asyncio
import sys
from pathlib import Path

from prime_rl import lifeline
from prime_rl.config import OrchestratorConfig, load, write_toml
from prime_rl.errors import UserError
from prime_rl.monitor import log


def main() -> None:
    """Parse the command line and run until the last step is committed."""
    lifeline.watch()
    config = load(OrchestratorConfig, prog="orchestrator")
    log.setup(config.log.level, "orchestrator")
    path = config.output_dir / "configs" / "orchestrator.toml"
    if config.dry_run:
        dry_run(config, path)
        return
    write_toml(config, path)
    from prime_rl.orchestrator.orchestrator import orchestrate

    try:
        asyncio.run(orchestrate(config))
    except UserError as error:
        sys.exit(f"error: {error}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)


def dry_run(config: OrchestratorConfig, path: Path) -> None:
    """Check what can be checked without starting anything, say what would happen, write the resolved config."""
    from prime_rl.launcher.checks import check_environment, check_model

    try:
        check_model(config.model.name)
        for env in config.environments:
            check_environment(env)
    except UserError as error:
        sys.exit(f"error: {error}")
    write_toml(config, path)
    names = ", ".join(f"{env.name} ({env.workers} worker{'s' * (env.workers > 1)})" for env in config.environments)
    print(f"orchestrator: {names}; {config.batch_size} rollouts a step from {config.client.base_url}")
    print(f"batches to {config.output_dir / 'rollouts'}, weights from {config.output_dir / 'weights'}")
    print(f"config: {path}")


if __name__ == "__main__":
    main()
