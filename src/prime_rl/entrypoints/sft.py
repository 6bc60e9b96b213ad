"""`sft`: fine-tunes a model on demonstrations."""

from contextlib import nullcontext

from loguru import logger

from prime_rl.config import SFTConfig
from prime_rl.entrypoints import begin, rank_of, run_command
from prime_rl.importing import quick_imports
from prime_rl.inference.checks import check_model
from prime_rl.launcher import slurm
from prime_rl.launcher.preflight import check_dataset, check_environment, check_lora, state_memory
from prime_rl.transport.commit import disk_errors


def main() -> None:
    run_command(SFTConfig, "sft", run)


def run(config: SFTConfig) -> None:
    """Check what can be checked before torch is imported, then train, which writes the resolved config."""
    check_model(config.model.name, weights=config.data.fake is None)
    resumes = config.ckpt is not None and config.ckpt.resume_step is not None
    check_lora(config.lora, config.model.name, resumes=resumes)
    for environment in [] if config.eval is None or config.bench else config.eval.environments:
        check_environment(environment)
    if config.data.fake is None:
        check_dataset(config.data.name)
    if config.slurm is not None:
        return slurm.submit(config, "sft")
    from prime_rl.launcher.ports import with_ports
    from prime_rl.launcher.sidecar import EvalSidecar

    evaluates = rank_of("sft") == 0 and not config.bench and config.eval is not None
    config = with_ports(config, "eval.client") if evaluates else config
    evaluation = EvalSidecar(config) if evaluates else nullcontext()  # refuses before --clean removes anything
    if (accepted := begin(config, "sft", plan)) is None:
        return
    if rank_of("sft") == 0:
        logger.info("loading torch, {} and the data; logs in {}", accepted.model.name, accepted.output_dir / "logs")
    with quick_imports():
        from prime_rl.trainer import training_loop
        from prime_rl.trainer.sft.train import make_recipe

    with evaluation as sidecar:
        with disk_errors(accepted.output_dir):
            training_loop.run(accepted, make_recipe)
        if sidecar is not None:
            sidecar.finish()


def plan(config: SFTConfig) -> list[str]:
    data, weights = "fake data" if config.data.fake else config.data.name, config.output_dir / "weights"
    what = "weights" if config.lora is None else config.lora.describe()
    lines = [f"sft: {config.model.name} on {config.device}, {data}, {what} to {weights}", state_memory(config)]
    if config.eval is not None:
        names = ", ".join(env.name for env in config.eval.environments)
        server = config.inference.server if config.inference else None
        by = config.eval.client.servers if server is None else f"a server on port {server.port}"
        when = f"every {config.eval.interval} steps and " if config.eval.interval else ""
        lines.append(f"evaluates {names} {when}at the end, by {by}")
    return lines


if __name__ == "__main__":
    main()
