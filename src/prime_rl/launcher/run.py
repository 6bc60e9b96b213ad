"""`rl` after its configuration has been read: check, plan, start, watch, sum up."""

import os
import time
from pathlib import Path

from prime_rl.config import RLConfig, write_toml
from prime_rl.launcher import checks, rundir
from prime_rl.launcher.console import Console
from prime_rl.launcher.gpus import visible_gpus
from prime_rl.launcher.plan import Machine, Plan, describe, make_plan
from prime_rl.launcher.progress import bench_table, minutes, summary
from prime_rl.launcher.supervise import Outcome, Supervisor
from prime_rl.orchestrator.ckpt import resume_progress


def run(config: RLConfig) -> int:
    """Run to the end; returns the exit status. Raises UserError for what cannot work, before anything is started."""
    machine = Machine(visible_gpus(os.environ), len(os.sched_getaffinity(0)), os.environ)
    plan = make_plan(config, machine)
    _check(config)
    if config.dry_run:
        _check_directory(config)
        _check_port(plan)
        _write_configs(plan)
        print(describe(plan))
        return Outcome.SUCCESS.value
    with rundir.Owner(config.output_dir) as owner:
        _check_directory(config)
        _check_port(plan)
        if _resumes(config):
            rundir.forget_status(config.output_dir)
        else:  # asked for, or nothing but the remains of a run that failed at its start
            rundir.clean(config.output_dir)
        _write_configs(plan)
        with Console(config.output_dir, config.max_steps) as console:
            return _supervise(config, plan, owner, console).value


def _supervise(config: RLConfig, plan: Plan, owner: rundir.Owner, console: Console) -> Outcome:
    def tick() -> None:
        console.tick()
        owner.beat()

    began = time.time()
    names = ", ".join(process.name for process in plan.processes)
    console.say(f"starting {names}; logs in {config.output_dir / 'logs'}")
    outcome = Supervisor(plan.processes, plan.server, config.output_dir, console.say, tick).run()
    console.look()
    _sum_up(config.output_dir, began, outcome, console, config.bench)
    return outcome


def _sum_up(output_dir: Path, began: float, outcome: Outcome, console: Console, bench: bool) -> None:
    words = {Outcome.SUCCESS: "done", Outcome.FAILURE: "failed", Outcome.INTERRUPTED: "interrupted"}[outcome]
    console.say(
        f"{words}: {console.progress.steps} steps in {minutes(console.seconds)}, "
        f"peak memory {console.peak_memory / 2**30:.1f} GiB"
    )
    if outcome is not Outcome.FAILURE and not bench:
        for line in summary(output_dir, began):
            console.say(line)
    if bench:
        for line in bench_table(output_dir, began):
            console.say(line)


def _check(config: RLConfig) -> None:
    sections = (config.trainer, config.orchestrator, config.inference)
    for name in {section.model.name for section in sections if section is not None}:
        checks.check_model(name)
    if config.orchestrator.renderer == "auto":
        checks.check_chat_template(config.orchestrator.model.name)
    resume_progress(config.output_dir, config.orchestrator.ckpt, config.orchestrator.max_steps)
    evaluated = [] if config.orchestrator.eval is None else config.orchestrator.eval.environments
    for environment in (*config.orchestrator.environments, *evaluated):
        checks.check_environment(environment)


def _check_port(plan: Plan) -> None:
    if plan.server is not None and plan.server.port is not None:
        checks.check_port(plan.server.host, plan.server.port)


def _check_directory(config: RLConfig) -> None:
    if not config.clean and not _resumes(config):
        rundir.refuse_results(config.output_dir)


def _resumes(config: RLConfig) -> bool:
    return any(
        ckpt is not None and ckpt.resume_step is not None
        for ckpt in (config.ckpt, config.trainer.ckpt, config.orchestrator.ckpt)
    )


def _write_configs(plan: Plan) -> None:
    for path, section in plan.configs.items():
        write_toml(section, path)
