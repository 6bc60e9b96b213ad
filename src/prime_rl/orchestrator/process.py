"""The orchestrator as a process: it is made from its config, hears signals, and leaves its last word in the status file."""

import asyncio
import gc
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

from loguru import logger

from prime_rl.envs.pool import EnvPool
from prime_rl.envs.venv import prepare
from prime_rl.errors import UserError
from prime_rl.fleet.client import InferenceClient
from prime_rl.fleet.logprob_check import LogprobCheck
from prime_rl.fleet.router import connect_all
from prime_rl.monitor import Monitor, Status, read_metrics
from prime_rl.orchestrator.evaluation import eval_environments, eval_worker
from prime_rl.orchestrator.metrics import bench_table
from prime_rl.orchestrator.orchestrator import Orchestrator
from prime_rl.orchestrator.teachers import Teachers
from prime_rl.transport.commit import CommitError

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig
    from prime_rl.config.shared import ClientConfig

FULL_COLLECTION_SECONDS = 600.0  # between two looks at all objects there are


async def orchestrate(config: "OrchestratorConfig") -> None:
    """Run the orchestrator to its end, or until SIGINT or SIGTERM asks it to stop (the second signal stops at once)."""
    spare_collector()
    status = Status(config.output_dir, "orchestrator")
    try:
        await _orchestrate(config, status)
    except asyncio.CancelledError:
        logger.info("stopped at once: what was in flight is started again in a run that goes on")
        status.done("stopped")
        raise


def spare_collector() -> None:
    """Have the garbage collector look at what is young alone: `collect_by_the_clock` does the rest.

    Nearly everything here is freed by its count. By Python's own rule the collector looks at all there is the oftener the larger the fleet, and
    holds up the event loop each time. What it stops for, and how long: benchmarks/simulate_fleet.py.
    """
    gc.collect()
    gc.freeze()  # modules, functions, settings: never garbage
    gc.set_threshold(5_000, 10, 1_000_000_000)  # Python's own: 700, 10, 10; the last is, in effect, never


async def collect_by_the_clock() -> None:
    """Look at all there is, for as long as the run: cycles that had grown old before they were garbage."""
    while True:  # bounded: cancelled at the end of the run
        await asyncio.sleep(FULL_COLLECTION_SECONDS)
        gc.collect()


async def _orchestrate(config: "OrchestratorConfig", status: Status) -> None:
    monitor = Monitor(config.output_dir, "orchestrator", config.monitor, config.model_dump(mode="json"))
    teachers = Teachers(config)
    pool: EnvPool | None = None
    collector = asyncio.create_task(collect_by_the_clock(), name="garbage collector")
    current = asyncio.current_task()
    assert current is not None
    try:
        _hear(current.cancel)  # nothing has been made that could be lost
        if teachers.names:
            status.phase("waiting for teachers")
        await teachers.start(status.waiting)
        pool = make_pool(config, teachers)
        async with AsyncExitStack() as stack:
            connect = partial(_connect, stack, config.client, LogprobCheck() if config.logprob_check else None)
            engines = connect_all(config.client, connect)
            orchestrator = Orchestrator(config, pool, engines, status, monitor, teachers)
            _hear(partial(_on_signal, orchestrator, current))
            await orchestrator.run()
        status.done("stopped" if orchestrator.stopping else "finished")
        if config.bench:
            print(bench_table(read_metrics(config.output_dir / "metrics" / "orchestrator.jsonl")))
    except* (UserError, CommitError) as group:
        message = str(_first(group))
        status.done(f"failed: {message}")
        raise UserError(message) from group
    finally:
        collector.cancel()
        if pool is not None:
            await pool.close()
        await teachers.close()
        monitor.close()


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


def _connect(
    stack: AsyncExitStack, client: "ClientConfig", logprob_check: LogprobCheck | None, root: str
) -> InferenceClient:
    """The client of one server, for as long as the run."""
    engine = InferenceClient(client, root, logprob_check)
    stack.push_async_exit(engine)
    return engine


def _first(group: BaseExceptionGroup) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _hear(on_signal: Callable[[], object]) -> None:
    """What SIGINT and SIGTERM do from now on."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)


def _on_signal(orchestrator: Orchestrator, task: "asyncio.Task[None]") -> None:
    if orchestrator.stopping or not orchestrator.started:
        task.cancel()  # nothing has been made that could be lost
        return
    logger.info("stopping: nothing new is issued (a second signal stops at once)")
    orchestrator.stop()
