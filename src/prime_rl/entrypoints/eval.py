"""`eval`: named environments against a running server, the versions that it is given, or an API."""

import asyncio
import signal
from collections.abc import Awaitable

from prime_rl.config import EvalConfig, write_toml
from prime_rl.entrypoints import run_command, show
from prime_rl.errors import UserError
from prime_rl.inference.checks import local_model
from prime_rl.launcher import slurm
from prime_rl.launcher.preflight import check_environment, check_key
from prime_rl.monitor import log


def main() -> None:
    run_command(EvalConfig, "eval", run)


def run(config: EvalConfig) -> None:
    check_key(config.client)
    if config.client.type != "chat" and not config.client.servers.startswith("https:"):  # an API has names of its own
        local_model(config.model.name)
    from prime_rl.envs.ids import installed
    from prime_rl.evals.run import check_versions, run_evals

    if not config.environments:
        raise UserError(f"no environment: give --environment-ids; installed are {', '.join(installed())}")
    check_versions(config)
    for env in config.environments:
        check_environment(env)
    if config.slurm is not None:
        return slurm.submit(config, "eval")
    if config.dry_run:
        names = ", ".join(env.name for env in config.environments)
        of = "" if config.weights_dir is None else f", versions of {config.weights_dir}"
        show(config, "eval", f"eval: {names} with {config.model.name} at {config.client.servers}{of}")
        return
    write_toml(config, config.output_dir / "configs" / "eval.toml")
    log.setup(config.log.level, "eval", config.output_dir)
    asyncio.run(_until_asked_to_stop(run_evals(config)))


async def _until_asked_to_stop(work: Awaitable[object]) -> None:
    """SIGTERM ends it in order, as Ctrl-C does."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await task  # bounded: every episode has its deadline, and a run that is followed its end


if __name__ == "__main__":
    main()
