"""`sft`: fine-tunes a model on demonstrations."""

from loguru import logger

from prime_rl import faults
from prime_rl.config import SFTConfig
from prime_rl.entrypoints import run_trainer, show
from prime_rl.importing import quick_imports
from prime_rl.launcher.preflight import check_dataset, check_environment, check_model
from prime_rl.launcher.rundir import as_benchmark, cleaned
from prime_rl.monitor import Status
from prime_rl.monitor.monitor import metrics_path
from prime_rl.transport.commit import disk_errors


def main() -> None:
    """Parse the command line and fine-tune: one process, or one rank of torchrun."""
    faults.arm("trainer")
    run_trainer(SFTConfig, "sft", run)


def run(config: SFTConfig, rank: int) -> None:
    """Check what can be checked before torch is imported, then train, which writes the resolved config."""
    check_model(config.model.name, weights=config.data.fake is None)
    for environment in [] if config.eval is None or config.bench else config.eval.environments:
        check_environment(environment)
    if config.data.fake is None:
        check_dataset(config.data.name)
    if config.bench:
        config = as_benchmark(config)
    if config.dry_run:
        if rank == 0:
            data, weights = "fake data" if config.data.fake else config.data.name, config.output_dir / "weights"
            lines = [f"sft: {config.model.name} on {config.device}, {data}, weights to {weights}"]
            if config.eval is not None:
                names = ", ".join(env.name for env in config.eval.environments)
                server = config.inference.server if config.inference else None
                by = config.eval.client.servers if server is None else f"a server on port {server.port}"
                when = f"every {config.eval.interval} steps and " if config.eval.interval else ""
                lines.append(f"evaluates {names} {when}at the end, by {by}")
            show(config, "sft", *lines)
        return
    if config.clean and rank == 0:
        with cleaned(config.output_dir, "sft"):
            # Others that clean must see this run before torch is imported.
            Status(config.output_dir, "sft").phase("starting")
    if rank == 0:
        logger.info("loading torch, {} and the data; logs in {}", config.model.name, config.output_dir / "logs")
    if config.bench and rank == 0:
        metrics_path(config.output_dir, "sft").unlink(missing_ok=True)  # of an earlier benchmark
    with quick_imports():
        from prime_rl.trainer.sft.train import train

    if rank > 0 or config.bench or config.eval is None:
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
