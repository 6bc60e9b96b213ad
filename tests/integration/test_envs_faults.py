"""Workers of verifiers environments that die, hang or never start: contained, named, restarted. test_envs_isolation.py has what needs no verifiers."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from environments import environment, write_environments
from fake_engine import FakeEngine, make_tokenizer

from prime_rl.config.shared import EnvConfig
from prime_rl.envs import pool as pool_module
from prime_rl.envs.pool import EnvPool
from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.errors import UserError

pytestmark = pytest.mark.asyncio(loop_scope="module")

START_SECONDS = 180.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(write_environments(root / "path")))
        yield make_tokenizer(root / "model")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(model: Path) -> AsyncIterator[tuple[EnvPool, FakeEngine]]:
    """A pool for the faults that it survives: starting workers is what takes the time here."""
    envs = [environment("env-good"), environment("env-blocking"), environment("env-bad-reward", {"prompt": "x" * 600})]
    async with serving(model, *envs, hang_timeout=5.0) as world:
        yield world


@asynccontextmanager
async def serving(model: Path, *envs: EnvConfig, **options: Any) -> AsyncIterator[tuple[EnvPool, FakeEngine]]:
    async with FakeEngine(model) as engine:
        pool = EnvPool(
            envs, model=str(model), base_url=engine.base_url, api_key=None, output_dir=model.parent / "out", **options
        )
        try:
            await pool.start(START_SECONDS)
            yield pool, engine
        finally:
            await pool.close()


async def run(pool: EnvPool, env: str, seconds: float = 120.0) -> EpisodeResult:
    return await pool.run(
        env=env,
        task_index=0,
        sampling={"max_tokens": 16},
        policy_version=0,
        episode_id="e",
        deadline=time.monotonic() + seconds,
    )


def pids(pool: EnvPool) -> list[int]:
    return [process.pid for process in pool.workers.values()]


def pid(pool: EnvPool, env: str) -> int:
    """The process of an environment's only worker, 0 while it is not ready."""
    return next((worker.pid for worker in pool._ready(pool.sets[env])), 0)


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.05)


async def test_killed_worker_fails_its_episodes_and_comes_back(shared: tuple[EnvPool, FakeEngine]) -> None:
    """SIGKILL in flight: every episode it had is `worker_died`, the next ones run on a new worker."""
    pool, engine = shared
    engine.delay = 300.0
    before = pool.restarts
    calls = [asyncio.create_task(run(pool, "env-good")) for _ in range(4)]
    await until(lambda: engine.running == 4)
    killed = pid(pool, "env-good")
    os.kill(killed, signal.SIGKILL)
    results = await asyncio.gather(*calls)
    assert {r.outcome for r in results} == {Outcome.WORKER_DIED}
    assert "SIGKILL" in results[0].message
    engine.delay = 0.0
    assert (await run(pool, "env-good")).ok
    assert pid(pool, "env-good") != killed
    assert pool.restarts > before


async def test_hung_reward_is_contained(shared: tuple[EnvPool, FakeEngine]) -> None:
    """A reward that blocks the worker's loop is named and interrupted; neither its worker nor other environments notice."""
    pool, _ = shared
    worker = pid(pool, "env-blocking")
    hung = asyncio.create_task(run(pool, "env-blocking"))
    assert (await run(pool, "env-good")).ok
    result = await hung
    assert result.outcome is Outcome.ERRORED
    assert "env_blocking.py" in result.message
    assert "in marks" in result.message
    assert pid(pool, "env-blocking") == worker


async def test_deadline_holds_when_the_worker_is_blocked(
    shared: tuple[EnvPool, FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool answers by the deadline (and its grace) even when the worker's own timer cannot run."""
    pool, _engine = shared
    await until(lambda: pid(pool, "env-blocking") != 0, START_SECONDS)
    monkeypatch.setattr(pool_module, "GRACE_SECONDS", 0.2)
    result = await run(pool, "env-blocking", seconds=3.0)
    assert result.outcome is Outcome.TIMEOUT
    assert "no answer from the worker" in result.message


async def test_prompt_longer_than_the_context(shared: tuple[EnvPool, FakeEngine]) -> None:
    """A reason of its own, seen before anything is sent."""
    pool, engine = shared
    sent = engine.started
    assert (await run(pool, "env-bad-reward")).outcome is Outcome.PROMPT_TOO_LONG
    assert engine.started == sent


async def test_engine_down(shared: tuple[EnvPool, FakeEngine]) -> None:
    """Nobody listens at the engine's port: `engine_unavailable`, at once; the same workers go on once it is back."""
    pool, engine = shared
    assert (await run(pool, "env-good")).ok
    workers, restarts = pids(pool), pool.restarts
    await engine._runner.cleanup()
    for _ in range(2):
        assert (await run(pool, "env-good")).outcome is Outcome.ENGINE_UNAVAILABLE
    await engine.__aenter__()
    assert (await run(pool, "env-good")).ok
    assert (pids(pool), pool.restarts) == (workers, restarts)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (environment("no-such-env"), r"environment 'no-such-env' not found: .*no_such_env"),
        (environment("env-good", python="/nowhere/python"), r"cannot start a worker of 'env-good': .*/nowhere/python"),
        (
            environment("env-good", python="/bin/false"),
            r"'env-good' died before it was ready: failed with exit status 1",
        ),
    ],
)
async def test_start_names_what_is_wrong(model: Path, env: EnvConfig, message: str) -> None:
    """An environment that cannot start fails the start, with its cause, and leaves no process."""
    with pytest.raises(UserError, match=message):
        async with serving(model, env):
            pass


async def test_two_environments_of_one_name(model: Path) -> None:
    """Names are how environments are told apart."""
    with pytest.raises(UserError, match="two environments are named 'env-good'"):
        async with serving(model, environment("env-good"), environment("env-good")):
            pass
