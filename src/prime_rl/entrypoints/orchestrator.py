"""`orchestrator`: makes rollouts, scores them, cuts batches."""

import asyncio
from contextlib import nullcontext

from prime_rl import faults
from prime_rl.config import OrchestratorConfig, write_toml
from prime_rl.entrypoints import run_command, show
from prime_rl.launcher.console import Console
from prime_rl.launcher.preflight import check_environment, check_model
from prime_rl.launcher.rundir import as_benchmark, cleaned, refuse_results
from prime_rl.monitor import log
from prime_rl.monitor.monitor import metrics_path
from prime_rl.orchestrator.checkpoint import resume_point
from prime_rl.transport.commit import CommitError
from prime_rl.transport.settings import check_and_commit


def main() -> None:
    """Parse the command line and run until the last step is committed."""
    faults.arm("orchestrator")
    run_command(OrchestratorConfig, "orchestrator", run, CommitError)


def run(config: OrchestratorConfig) -> None:
    """Check what can be checked before anything starts, write the resolved config, run."""
    check_model(config.model.name)
    if config.bench:
        config = as_benchmark(config)
    for env in config.all_environments():
        check_environment(env)
    if not (config.dry_run or config.bench or config.clean) and resume_point(config).fresh:
        refuse_results(config.output_dir)  # before that run's own config is written over
    if config.dry_run:
        names = ", ".join(f"{env.name} (workers: {env.workers})" for env in config.environments)
        show(
            config,
            "orchestrator",
            f"orchestrator: {names}; {config.batch_size} rollouts a step from {config.client.servers}",
            f"batches to {config.output_dir / 'rollouts'}, weights from {config.output_dir / 'weights'}",
        )
        return
    with cleaned(config.output_dir, "orchestrator") if config.clean else nullcontext():
        check_and_commit(config, "orchestrator")
    log.setup(config.log.level, "orchestrator", config.output_dir)
    write_toml(config, config.output_dir / "configs" / "orchestrator.toml")
    if config.bench:
        metrics_path(config.output_dir, "orchestrator").unlink(missing_ok=True)  # of an earlier benchmark
    from prime_rl.orchestrator.orchestrator import orchestrate

    asyncio.run(orchestrate(config))
    if config.bench:
        print("\n".join(Console(config.output_dir, None, bench=True).bench_table()))


if __name__ == "__main__":
    main()
