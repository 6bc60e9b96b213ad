"""`sft`: fine-tunes a model on demonstrations."""

import os
import sys

from loguru import logger

from prime_rl import faults, lifeline
from prime_rl.config import SFTConfig, load, write_toml
from prime_rl.errors import UserError
from prime_rl.importing import quick_imports
from prime_rl.launcher.preflight import check_dataset, check_environment, check_model
from prime_rl.launcher.rundir import cleaned, separate_bench
from prime_rl.monitor import Status, log
from prime_rl.monitor.monitor import check_wandb, metrics_path
from prime_rl.transport.commit import disk_errors
from prime_rl.transport.settings import dry_path


def main() -> None:
    """Parse the command line and fine-tune: one process, or one rank of torchrun."""
    faults.arm("trainer")
    # Before torch is imported. A server and environments need the other half, and threads that wait for cores are slow.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2)))
    lifeline.watch()
    config = load(SFTConfig, prog="sft")
    rank = int(os.environ.get("RANK", 0))
    log.setup(config.log.level, f"sft.{rank}" if rank else "sft")
    try:
        run(config, rank)
    except UserError as error:
        log.fail(error) if rank == 0 else sys.exit(1)  # every rank fails alike: one of them says why
    except KeyboardInterrupt:  # while the last version is evaluated: the training itself ends in order
        sys.exit(130)


def run(config: SFTConfig, rank: int) -> None:
    """Check what can be checked before torch is imported, then train; the resolved config is written once the run is not refused."""
    check_model(config.model.name, weights=config.data.fake is None)
    if rank == 0:  # which logs alone
        check_wandb(config.monitor.wandb)
    for environment in [] if config.eval is None or config.bench else config.eval.environments:
        check_environment(environment)
    if config.data.fake is None:
        check_dataset(config.data.name)
    if config.bench:
        config = separate_bench(config, logger.info if rank == 0 else logger.debug)
    if config.dry_run:
        if rank == 0:
            path = dry_path(config.output_dir, "sft")
            write_toml(config, path)
            data = "fake data" if config.data.fake else config.data.name
            print(f"sft: {config.model.name} on {config.device}, {data}, weights to {config.output_dir / 'weights'}")
            if config.eval is not None:
                names = ", ".join(env.name for env in config.eval.environments)
                server = config.inference.server if config.inference else None
                by = config.eval.client.servers if server is None else f"a server on port {server.port}"
                when = f"every {config.eval.interval} steps and " if config.eval.interval else ""
                print(f"evaluates {names} {when}at the end, by {by}")
            print(f"config: {path}")
        return
    if config.clean and rank == 0:
        with cleaned(config.output_dir, "sft"):
            Status(config.output_dir, "sft").phase(
                "starting"
            )  # others that clean must see this run before torch is imported
    if config.bench and rank == 0:
        metrics_path(config.output_dir, "sft").unlink(missing_ok=True)  # of an earlier benchmark
    with quick_imports():
        from prime_rl.trainer.sft.train import train

    if rank > 0 or config.bench:
        with disk_errors(config.output_dir):
            train(config)
        return
    from prime_rl.launcher.sidecar import EvalSidecar

    with EvalSidecar(config) as sidecar:
        with disk_errors(config.output_dir):
            train(config)
        sidecar.finish()


if __name__ == "__main__":
    main()
