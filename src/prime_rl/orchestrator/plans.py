"""What the orchestrator's configuration means: the core's limits, which environments are evaluated, and the worker pool of them all."""

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prime_rl.config.shared import ORCHESTRATOR_STEPS
from prime_rl.envs.pool import EnvPool
from prime_rl.envs.venv import prepare
from prime_rl.envs.worker_pool import worker_range
from prime_rl.evals.runner import EvalPlan
from prime_rl.orchestrator.scheduler import Limits
from prime_rl.orchestrator.teachers import Teachers

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig
    from prime_rl.config.shared import EnvConfig


def limits(config: "OrchestratorConfig") -> Limits:
    """The scheduler's numbers. A benchmark has no trainer: it may run ahead for all of its few steps."""
    level = steps_ahead(config)
    fixed = None if config.max_concurrent == "auto" else config.max_concurrent  # `concurrency` finds it
    return Limits(
        batch_size=config.batch_size,
        group_size=config.rollouts_per_example,
        async_level=level,
        max_off_policy_steps=max(config.max_off_policy_steps, level),
        max_concurrent=min(fixed or config.batch_size * (config.async_level + 1), slots(config)),
        max_steps=ORCHESTRATOR_STEPS if config.bench else config.max_steps,
    )


def steps_ahead(config: "OrchestratorConfig") -> int:
    """Steps that sampling may run ahead: all of them where no trainer takes part."""
    if config.bench:
        return ORCHESTRATOR_STEPS
    return config.async_level if config.trainer else config.max_steps or sys.maxsize


def most_in_flight(config: "OrchestratorConfig") -> int:
    """As many episodes as the steps that may be sampled hold, and the workers run: no number lets more start."""
    return min(config.batch_size * (steps_ahead(config) + 1), slots(config))


def slots(config: "OrchestratorConfig") -> int:
    """Episodes that the workers run at once, as many workers as there may be. More would wait for a slot and grow old."""
    return sum(worker_range(env.workers, env.max_workers)[1] * env.max_concurrent for env in config.environments)


def eval_environments(config: "OrchestratorConfig") -> "list[EnvConfig]":
    """What is evaluated: the environments named for it, else the training ones with their argument `split` set to "eval"."""
    if config.eval is None:
        return []
    if config.eval.environments:
        return config.eval.environments
    return [env.model_copy(update={"args": {**env.args, "split": "eval"}}) for env in config.environments]


def eval_plans(config: "OrchestratorConfig") -> Iterator[EvalPlan]:
    """One plan for each evaluation environment."""
    section = config.eval
    if section is None:
        return
    for env in eval_environments(config):
        base = section.sampling.over(config.sampling)
        sampling = env.sampling.over(base) if env.sampling else base
        yield EvalPlan(
            env.name,
            eval_worker(env.name),
            sampling,
            section.num_examples,
            section.rollouts_per_example,
            config.seq_len,
        )


def eval_worker(name: str) -> str:
    """The pool's name of an evaluation environment, which may bear the same name as a training one."""
    return f"{name}-eval"


def make_pool(config: "OrchestratorConfig", teachers: Teachers) -> EnvPool:
    """The worker pool of all training and evaluation environments. Evaluations are the policy's own, whoever samples what it learns from."""
    names = [env.name for env in config.environments]
    evals = [env.model_copy(update={"name": eval_worker(env.name)}) for env in eval_environments(config)]
    return EnvPool(
        prepare([*config.environments, *evals]),
        model=config.model.name,
        base_url=config.client.base_urls,
        api_key=os.environ.get(config.client.api_key_var),
        renderer=config.renderer,
        output_dir=config.output_dir,
        log_level=config.log.level,
        samplers={name: sampler for name in names if (sampler := teachers.sampler_of(name)) is not None},
        demonstrations={name: shown for name in names if (shown := teachers.demonstration_of(name)) is not None},
    )
