"""`trainer`: trains on the rollouts that an orchestrator commits."""

from prime_rl.config import TrainerConfig
from prime_rl.entrypoints import begin, run_command
from prime_rl.importing import quick_imports
from prime_rl.inference.checks import check_model
from prime_rl.launcher.preflight import check_lora, state_memory
from prime_rl.transport.commit import disk_errors


def main() -> None:
    run_command(TrainerConfig, "trainer", run)


def run(config: TrainerConfig) -> None:
    """Check what can be checked before torch is imported, then train, which writes the resolved config."""
    check_model(config.model.name, weights=config.data.fake is None)
    resumes = config.recover or (config.ckpt is not None and config.ckpt.resume_step is not None)
    check_lora(config.lora, config.model.name, resumes=resumes)
    if (accepted := begin(config, "trainer", plan)) is None:
        return
    with quick_imports():
        from prime_rl.trainer import shared_training, training_loop
        from prime_rl.trainer.rl.train import make_recipe

    with disk_errors(accepted.output_dir):
        if accepted.tenants is None:
            training_loop.run(accepted, make_recipe)
        else:
            shared_training.run(accepted)


def plan(config: TrainerConfig) -> list[str]:
    data = "fake data" if config.data.fake else f"rollouts in {config.output_dir / 'rollouts'}"
    what = "versions" if config.lora is None else config.lora.describe()
    where = f"{config.model.name} on {config.device}, {data}, {what} to {config.output_dir / 'weights'}"
    return [f"trainer: {where}", state_memory(config, slots=1 if config.tenants is None else config.tenants.slots)]


if __name__ == "__main__":
    main()
