"""A whole evaluation on its own: named environments against a running server, a table and a results file."""

import json
import math
import os
import sys
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from prime_rl.envs.pool import EnvPool
from prime_rl.envs.protocol import EpisodeResult
from prime_rl.envs.venv import prepare
from prime_rl.errors import UserError
from prime_rl.monitor import Monitor, Status, log
from prime_rl.orchestrator.engine import Engine, Misrouted
from prime_rl.orchestrator.evals import EvalPlan, EvalReport, evaluate
from prime_rl.orchestrator.fleet import Fleet, Replica, RoutedPool
from prime_rl.orchestrator.members import first_members
from prime_rl.orchestrator.routed import NO_VERSION, connect_all
from prime_rl.orchestrator.samples import output_tokens
from prime_rl.transport.commit import write_atomically

if TYPE_CHECKING:
    from prime_rl.config import EvalConfig
    from prime_rl.config.shared import ClientConfig

logger = log.get("eval")

_LOG_WIDTH = 140


async def run_evals(config: "EvalConfig") -> list[EvalReport]:
    """Evaluate every environment, one after the other; write `evals/<env>.jsonl`, log metrics, print a table.

    Raises:
        UserError: the server does not answer, an environment cannot be loaded, or no episode of an environment succeeded.
    """
    status = Status(config.output_dir, "eval")
    monitor = Monitor(config.output_dir, "eval", config.monitor, config.model_dump(mode="json"))
    pool = EnvPool(
        prepare(config.environments),
        model=config.model.name,
        base_url=config.client.base_urls,
        api_key=os.environ.get(config.client.api_key_var),
        renderer=config.renderer,
        output_dir=config.output_dir,
        log_level=config.log.level,
    )
    reports = []
    try:
        async with AsyncExitStack() as stack:
            status.phase("waiting for the server")
            connect = partial(_connect, stack, config.client)
            engines = connect_all(config.client, connect)
            if config.client.discover is not None:
                _, found = await first_members(config.client, config.model.name, status.waiting)
                engines = [connect(member.address) for member in found]
            fleet = Fleet(engines)
            version = await _admit(
                fleet, await fleet.wait_ready(status.waiting, config.client.ready_timeout), config.model.name
            )
            await pool.start(config.client.ready_timeout)
            routed = RoutedPool(pool, fleet)
            for env in config.environments:
                sampling = env.sampling.over(config.sampling) if env.sampling else config.sampling
                plan = EvalPlan(
                    env.name, env.name, sampling, config.num_examples, config.rollouts_per_example, config.seq_len
                )
                status.phase(f"evaluating {env.name}")
                report = await evaluate(
                    routed, plan, version=version, seed=config.seed, max_concurrent=config.max_concurrent, timeout=config.rollout_timeout
                )  # fmt: skip
                monitor.log(version, report.metrics())
                write_results(report, config.output_dir / "evals" / f"{env.name}.jsonl")
                reports.append(report)
    except Misrouted as error:
        raise UserError(str(error)) from error
    finally:
        await pool.close()
        monitor.close()
    print_table(reports, config.model.name)
    if dead := [report for report in reports if not report.scored]:
        first = next(result for attempts in dead[0].results for result in attempts)
        raise UserError(
            f"no episode of {', '.join(report.env for report in dead)} succeeded; the first one: {first.outcome}: {first.message}"
        )
    status.done("finished")
    return reports


def _connect(stack: AsyncExitStack, client: "ClientConfig", root: str) -> Engine:
    engine = Engine(client, root)
    stack.push_async_exit(engine)
    return engine


async def _admit(fleet: Fleet, ready: list[Replica], model: str) -> int:
    """Let in all servers that are there. Returns the version that they serve.

    Raises:
        UserError: they do not serve the same, or another model.
    """
    served = {replica: await replica.engine.served() for replica in ready}
    for replica, one in served.items():
        one.check_name(replica.name, model)
    served = {replica: one for replica, one in served.items() if not one.leaving} or served  # if there is another
    if mixed := next((replica.name for replica, one in served.items() if one.version == NO_VERSION), None):
        raise UserError(f"the servers behind {mixed} do not serve the same weights")
    if len({(one.version, one.hash) for one in served.values()}) > 1:
        listed = ", ".join(f"{replica.name} version {one.version} ({one.hash[:12]})" for replica, one in served.items())
        raise UserError(f"the servers do not serve the same weights: {listed}")
    for replica in fleet.replicas:
        if replica in served:
            fleet.admit(replica)
        else:
            what = "is to leave" if replica in ready else "does not answer"
            logger.warning("%s %s: evaluating without it", replica.name, what)
    return next(iter(served.values())).version


def write_results(report: EvalReport, path: Path) -> None:
    """One JSON object a line and attempt: what was asked, what came back, what it scored."""
    lines = [
        json.dumps(_row(result, attempt)) for attempts in report.results for attempt, result in enumerate(attempts)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, ("\n".join(lines) + "\n").encode())


def print_table(reports: list[EvalReport], model: str) -> None:
    """The report for people."""
    table = Table(title=f"{model}", title_justify="left")
    for column in (
        "environment",
        "version",
        "tasks",
        "k",
        "avg@k",
        "± 95 %",
        "errors",
        "truncated",
        "tokens",
        "seconds",
    ):
        table.add_column(column, justify="left" if column == "environment" else "right")
    for report in reports:
        metrics, prefix = report.metrics(), f"eval/{report.env}"
        k = max((len(attempts) for attempts in report.results), default=0)
        table.add_row(
            report.env,
            str(report.version),
            str(len(report.results)),
            str(k),
            _number(metrics.get(f"{prefix}/avg@{k}")),
            _number(confidence(report)),
            str(sum(report.errors.values())),
            _number(metrics.get(f"{prefix}/is_truncated/mean")),
            _number(metrics.get(f"{prefix}/num_output_tokens/mean")),
            f"{report.seconds:.1f}",
        )
    # A log file has no width: rich would cut the columns to 80.
    Console(width=None if sys.stdout.isatty() else _LOG_WIDTH).print(table)


def confidence(report: EvalReport) -> float | None:
    """Half width of the 95 % normal interval of avg@k over tasks: 1.96 · s / sqrt(tasks); None below two tasks."""
    means = [
        sum(r.reward for r in scored) / len(scored)
        for attempts in report.results
        if (scored := [r for r in attempts if r.ok])
    ]
    if len(means) < 2:
        return None
    mean = sum(means) / len(means)
    variance = sum((value - mean) ** 2 for value in means) / (len(means) - 1)
    return 1.96 * math.sqrt(variance / len(means))


def _row(result: EpisodeResult, attempt: int) -> dict[str, object]:
    return {
        "task_id": result.task_id,
        "attempt": attempt,
        "outcome": str(result.outcome),
        "message": result.message,
        "reward": result.reward if result.ok else None,
        "rewards": result.rewards,
        "metrics": result.metrics,
        "is_truncated": result.is_truncated,
        "output_tokens": output_tokens(result),
        "prompt": result.prompt,
        "completion": result.completion,
    }


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}".rstrip("0").rstrip(".")
