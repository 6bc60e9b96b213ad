"""Workers that die, hang, never start or lose their parent: contained, named, restarted, cleaned up."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from environments import environment, write_environments
from fake_engine import FakeEngine, make_tokenizer

from prime_rl import faults
from prime_rl.config.shared import EnvConfig
from prime_rl.envs import pool as pool_module
from prime_rl.envs import worker_pool as worker_pool_module
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
    async with serving(model, *envs, hang_timeout=10.0) as world:
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


async def _run_until_it_fails(pool: EnvPool, env: str) -> None:
    for _ in range(3):
        await run(pool, env)


def pids(pool: EnvPool) -> list[int]:
    return [process.pid for process in pool._processes.values()]


def pid(pool: EnvPool, env: str) -> int:
    """The process of an environment's only worker, 0 while it is not ready."""
    return next((process.pid for process in pool._envs[env].processes if process is not None and process.tasks), 0)


def alive(pid: int) -> bool:
    """A process that is there and no zombie (in a container nobody may reap orphans)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


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


def plan_faults(directory: Path, monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str]) -> None:
    """Each fires once: the nth match of a pattern meets the nth fault of that pattern."""
    plan = directory / "faults.json"
    plan.write_text(json.dumps([{"point": point, "process": "environment", "do": do} for point, do in points]))
    monkeypatch.setenv(faults.ENV, str(plan))


async def test_every_fault_of_a_worker_is_an_outcome(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed or stopped with an episode or with its result in hand; a result lost, doubled or failed: each costs its own
    episode at most, is counted once, and the next episode runs."""
    monkeypatch.setattr(worker_pool_module, "HEARTBEAT_TIMEOUT", 12.0)
    monkeypatch.setattr(pool_module, "GRACE_SECONDS", 0.2)
    run_point, result_point = "run:env-good", "result:env-good"
    plan_faults(
        tmp_path,
        monkeypatch,
        *((run_point, "kill"), (run_point, "stop")),
        *((result_point, do) for do in ("kill", "stop", "drop", "duplicate", "error")),
    )
    async with serving(model, environment("env-good")) as (pool, _):
        results = [await run(pool, "env-good") for _ in range(4)]
        assert [result.outcome for result in results] == [Outcome.WORKER_DIED] * 4
        assert ["SIGKILL" in result.message for result in results] == [True, False] * 2
        assert all("no heartbeat" in result.message for result in results[1::2])
        await until(lambda: pid(pool, "env-good") != 0, START_SECONDS)
        worker = pid(pool, "env-good")
        assert (await run(pool, "env-good", seconds=3.0)).outcome is Outcome.TIMEOUT
        assert (await run(pool, "env-good")).ok
        assert (await run(pool, "env-good")).outcome is Outcome.ERRORED
        assert (await run(pool, "env-good")).ok
        assert pid(pool, "env-good") == worker
        (process,) = pool._processes.values()
        assert process.finished == 3  # not the one that was lost, and the doubled one once
    assert pool.restarts == 4


async def test_a_worker_killed_before_it_is_ready(model: Path) -> None:
    """SIGKILL while it loads is no fault of the environment: it is started again, and the start succeeds."""
    async with FakeEngine(model) as engine:
        pool = EnvPool(
            [environment("env-good")],
            model=str(model),
            base_url=engine.base_url,
            api_key=None,
            output_dir=model.parent / "out",
        )
        starting = asyncio.create_task(pool.start(START_SECONDS))
        try:
            await until(lambda: bool(pids(pool)))
            os.kill(pids(pool)[0], signal.SIGKILL)
            async with asyncio.timeout(START_SECONDS):
                await starting
            assert (await run(pool, "env-good")).ok
        finally:
            await pool.close()
    assert pool.restarts == 1


async def test_garbage_from_a_worker(model: Path, tmp_path: Path) -> None:
    """A broken frame costs the worker that sent it its process and its episodes; one from a stranger is ignored."""
    source = f"""
import pathlib
import prime_rl.envs.worker as worker
encode, sent = worker.encode, pathlib.Path({str(tmp_path / "sent")!r})
def garble(message):
    if message.kind == "result" and not sent.exists():
        sent.touch()
        return bytes([0xC1])
    return encode(message)
worker.encode = garble
worker.main()
"""
    script, python = tmp_path / "garble.py", tmp_path / "python"
    script.write_text(source)
    path = os.environ["PYTHONPATH"]
    python.write_text(f'#!/bin/sh\nshift 2\nPYTHONPATH="$PYTHONPATH:{path}" exec "{sys.executable}" {script} "$@"\n')
    python.chmod(0o755)
    async with serving(model, environment("env-good", python=str(python))) as (pool, _):
        result = await run(pool, "env-good")
        assert (result.outcome, "broken message" in result.message) == (Outcome.WORKER_DIED, True)
        with zmq.asyncio.Context.instance().socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(pool._address)
            for frames in ([b""], [b"x", b"y", b"z"], [b"\xc1"]):
                await stranger.send_multipart(frames)
            assert (await run(pool, "env-good")).ok
    assert pool.restarts == 1


async def test_a_worker_gets_the_secrets_that_it_was_promised(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names in `secrets` are passed on, other secrets are not; the log names them, and holds no value."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-for-the-judge")
    monkeypatch.setenv("HF_TOKEN", "hf-not-for-it")
    async with serving(model, environment("env-secrets", secrets=["OPENAI_API_KEY"])) as (pool, _):
        assert (await run(pool, "env-secrets")).reward == 1.0
        variables = Path(f"/proc/{pid(pool, 'env-secrets')}/environ").read_bytes()
        assert b"hf-not-for-it" not in variables
    log = (model.parent / "out" / "logs" / "envs" / "env-secrets.log").read_text()
    assert log.count("HF_TOKEN") == 1
    assert "hf-not-for-it" not in log


async def test_crash_loop_ends_the_pool(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that keeps dying without finishing an episode is an error of the run, which quotes the log."""
    monkeypatch.setattr(worker_pool_module, "MAX_DEATHS", 2)
    async with serving(model, environment("env-exits")) as (pool, _):
        result = await run(pool, "env-exits")
        assert (result.outcome, "its worker exited with status 3" in result.message) == (Outcome.ERRORED, True)
        with pytest.raises(UserError, match="died 2 times in a row") as caught:
            await _run_until_it_fails(pool, "env-exits")
        assert "exited with status 3" in str(caught.value)
        assert "about to exit" in str(caught.value)
        with pytest.raises(UserError):
            await run(pool, "env-exits")


async def test_engine_down_and_close(model: Path) -> None:
    """Nobody listens at the engine's port: `engine_unavailable`, at once; the same workers go on once it is back.
    `close` leaves no process."""
    async with serving(model, environment("env-good", workers=2)) as (pool, engine):
        assert (await run(pool, "env-good")).ok
        await engine._runner.cleanup()
        for _ in range(2):
            assert (await run(pool, "env-good")).outcome is Outcome.ENGINE_UNAVAILABLE
        await engine.__aenter__()
        assert [(await run(pool, "env-good")).ok for _ in range(2)] == [True, True]
        workers = pids(pool)
        assert pool.restarts == 0
    assert len(workers) == 2
    assert not any(alive(worker) for worker in workers)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (environment("no-such-env"), r"environment 'no-such-env' not found: .*no_such_env"),
        (environment("env-good", python="/nowhere/python"), r"cannot start a worker of 'env-good': .*/nowhere/python"),
        (environment("env-good", python="/bin/false"), r"'env-good' died before it was ready: exited with status 1"),
    ],
)
async def test_start_names_what_is_wrong(model: Path, env: EnvConfig, message: str) -> None:
    """An environment that cannot start fails the start, with its cause, and leaves no process."""
    with pytest.raises(UserError, match=message):
        async with serving(model, env):
            pass


async def test_other_version_is_refused(model: Path, tmp_path: Path) -> None:
    """A worker of another prime-rl (in an environment's own Python) is refused by its hello."""
    python = tmp_path / "python"
    patch = "import prime_rl.envs.worker as w; w.VERSION = 999; w.main()"
    python.write_text(f'#!/bin/sh\nshift 2\nexec "{sys.executable}" -c "{patch}" "$@"\n')
    python.chmod(0o755)
    with pytest.raises(UserError, match="speaks protocol 999"):
        async with serving(model, environment("env-good", python=str(python))):
            pass


async def test_two_environments_of_one_name(model: Path) -> None:
    """Names are how environments are told apart."""
    with pytest.raises(UserError, match="two environments are named 'env-good'"):
        async with serving(model, environment("env-good"), environment("env-good")):
            pass


ORPHAN = """
import asyncio, sys, time
from pathlib import Path
sys.path.insert(0, {support!r})
from environments import environment
from prime_rl.envs.pool import EnvPool

async def main():
    pool = EnvPool([environment("env-blocking")], model={model!r}, base_url={url!r}, api_key=None, output_dir=Path({out!r}))
    await pool.start(180)
    asyncio.create_task(pool.run(env="env-blocking", task_index=0, sampling={{"max_tokens": 4}}, policy_version=0,
                                 episode_id="e", deadline=time.monotonic() + 600))
    await asyncio.sleep(0.1)
    print([process.pid for process in pool._processes.values()][0], flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_worker_dies_with_its_parent(model: Path, tmp_path: Path) -> None:
    """SIGKILL of the orchestrator leaves no worker behind, not even one whose loop is blocked."""
    async with FakeEngine(model) as engine:
        source = ORPHAN.format(
            support=str(Path(__file__).parents[1] / "support"),
            model=str(model),
            url=engine.base_url,
            out=str(tmp_path / "out"),
        )
        parent = await asyncio.create_subprocess_exec(sys.executable, "-c", source, stdout=subprocess.PIPE)
        try:
            assert parent.stdout is not None
            async with asyncio.timeout(START_SECONDS):
                worker = int(await parent.stdout.readline())
                await until(lambda: engine.started == 1)
            assert alive(worker)
        finally:
            parent.kill()
            await parent.wait()
        await until(lambda: not alive(worker))
