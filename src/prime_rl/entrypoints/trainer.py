"""`trainer`: trains on the rollouts that an orchestrator commits."""

from contextlib import nullcontext

from prime_rl import faults
from prime_rl.config import TrainerConfig
from prime_rl.entrypoints import run_trainer, show
from prime_rl.importing import quick_imports
from prime_rl.launcher.preflight import check_model
from prime_rl.launcher.rundir import as_benchmark, cleaned
from prime_rl.monitor.monitor import metrics_path
from prime_rl.transport.commit import disk_errors
from prime_rl.transport.settings import check_and_commit


def main() -> None:
    """Parse the command line and train: one process, or one rank of torchrun."""
    faults.arm("trainer")
    run_trainer(TrainerConfig, "trainer", run)


def run(config: TrainerConfig, rank: int) -> None:
    """Check what can be checked before torch is imported, then train, which writes the resolved config."""
    check_model(config.model.name, weights=config.data.fake is None)
    if config.bench:
        config = as_benchmark(config)
    if config.dry_run:
        if rank == 0:
            data = "fake data" if config.data.fake else f"rollouts in {config.output_dir / 'rollouts'}"
            weights = config.output_dir / "weights"
            show(config, "trainer", f"trainer: {config.model.name} on {config.device}, {data}, versions to {weights}")
        return
    if rank == 0:
        with cleaned(config.output_dir, "trainer") if config.clean else nullcontext():
            check_and_commit(config, "trainer")
        if config.bench:
            metrics_path(config.output_dir, "trainer").unlink(missing_ok=True)  # of an earlier benchmark
    with quick_imports():
        from prime_rl.trainer.rl.train import train

    with disk_errors(config.output_dir):
        train(config)


if __name__ == "__main__":
    main()
