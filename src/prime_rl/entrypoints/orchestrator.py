"""`orchestrator`: makes rollouts, scores them, cuts batches."""

import asyncio

from prime_rl.config import OrchestratorConfig, write_toml
from prime_rl.entrypoints import begin, run_command
from prime_rl.inference.checks import check_model
from prime_rl.launcher.preflight import check_environment
from prime_rl.launcher.rundir import refuse_results
from prime_rl.monitor import log
from prime_rl.monitor.monitor import bench_table
from prime_rl.orchestrator import membership
from prime_rl.orchestrator.checkpoint import resume_point


def main() -> None:
    run_command(OrchestratorConfig, "orchestrator", run)


def run(config: OrchestratorConfig) -> None:
    """Check what can be checked before anything starts, write the resolved config, run."""
    check_model(config.model.name)
    for env in config.environments if config.bench else config.all_environments():
        check_environment(env)
    if not (config.dry_run or config.bench or config.clean) and resume_point(config).fresh:
        refuse_results(config.output_dir)  # before that run's own config is written over
    if config.tenant is not None and not config.dry_run:
        config = membership.prepare(config)
    if (accepted := begin(config, "orchestrator", plan)) is None:
        return
    log.setup(accepted.log.level, "orchestrator", accepted.output_dir)
    write_toml(accepted, accepted.output_dir / "configs" / "orchestrator.toml")
    from prime_rl.orchestrator.orchestrator import orchestrate

    asyncio.run(orchestrate(accepted))
    if accepted.bench:
        print(bench_table(accepted.output_dir, "orchestrator"))


def plan(config: OrchestratorConfig) -> list[str]:
    names = ", ".join(f"{env.name} (workers: {env.workers})" for env in config.environments)
    return [
        f"orchestrator: {names}; {config.batch_size} rollouts a step from {config.client.servers}",
        f"batches to {config.output_dir / 'rollouts'}, weights from {config.output_dir / 'weights'}",
    ]


if __name__ == "__main__":
    main()
