"""Workers that grow and shrink in number, hang, print without end, crash and return rubbish: contained, replaced, and
the episode at fault named.

The workers are real processes around a scripted environment (`support/stub_worker.py`), ready in a moment.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from prime_rl import faults
from prime_rl.config.shared import EnvConfig
from prime_rl.envs import pool as pool_module
from prime_rl.envs.pool import EnvPool
from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.errors import UserError
from prime_rl.processes import identify
from support.scripted import until
from support.stub_worker import TASKS, stub_python, tell

SECONDS = 120.0  # until something that should happen counts as not happening


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "ADJUST_SECONDS", 0.2)
    monkeypatch.setattr(pool_module, "BACKOFF_SECONDS", 0.1)
    monkeypatch.setattr(pool_module, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(pool_module, "TERM_SECONDS", 1.0)


def stub(directory: Path, args: dict[str, Any] | None = None, **settings: Any) -> EnvConfig:
    few = {} if "max_workers" in settings else {"workers": 1}
    settings = {"id": "stub", "max_concurrent": 4, **few, "python": str(stub_python(directory)), **settings}
    return EnvConfig(args={"directory": str(directory), **(args or {})}, **settings)


@asynccontextmanager
async def serving(directory: Path, *envs: EnvConfig, **options: Any) -> AsyncIterator[EnvPool]:
    address = "http://127.0.0.1:9"
    pool = EnvPool(envs, model="none", base_url=address, api_key=None, output_dir=directory / "out", **options)
    try:
        await pool.start(SECONDS)
        yield pool
    finally:
        await pool.close()


async def run(
    pool: EnvPool, task: int = 0, name: str = "0.0.0", seconds: float = SECONDS, env: str = "stub"
) -> EpisodeResult:
    return await pool.run(env=env, task_index=task, sampling={}, policy_version=0, episode_id=name, timeout=seconds)


def pids(pool: EnvPool) -> set[int]:
    return {worker.child.pid for worker in pool.workers.values()}


async def test_workers_are_added_while_episodes_wait(tmp_path):
    """The workers there are run as many as fit; more than that start others, up to `max_workers`."""
    env = stub(tmp_path, {"slow": 1000.0}, max_concurrent=2, max_workers=3)
    async with serving(tmp_path, env) as pool:
        stubs = pool.sets["stub"]
        episodes = [asyncio.create_task(run(pool, TASKS - 1, str(number))) for number in range(2)]
        await until(lambda: sum(len(worker.pending) for worker in pool.of(stubs)) == 2)
        assert len(pool.of(stubs)) == 1
        episodes += [asyncio.create_task(run(pool, TASKS - 1, str(number))) for number in range(2, 9)]
        await until(lambda: sorted(len(worker.pending) for worker in pool.of(stubs)) == [2, 2, 2])
        for episode in episodes:
            episode.cancel()
        await asyncio.wait(episodes, timeout=SECONDS)
        assert (await run(pool)).ok
        assert pool.restarts == 0


async def test_workers_follow_their_load(tmp_path, monkeypatch):
    """Busy workers and idle cores: more start though slots are free; workers not needed end after their episodes."""
    monkeypatch.setattr(pool_module, "cores", lambda: 4)
    monkeypatch.setattr(pool_module, "IDLE_SECONDS", 0.5)
    env = stub(tmp_path, {"blocks": 0.05, "slow": 3.0}, max_concurrent=64, max_workers=3)
    async with serving(tmp_path, env) as pool:
        stubs = pool.sets["stub"]
        async with asyncio.timeout(SECONDS):
            while len(pool._ready(stubs)) < 3:
                assert all(result.ok for result in await asyncio.gather(*(run(pool, 0, str(i)) for i in range(30))))
        slow = [asyncio.create_task(run(pool, TASKS - 1, f"slow-{number}")) for number in range(6)]
        await until(lambda: len(pool._ready(stubs)) < 3)
        assert len(pool.of(stubs)) == 3  # the one that is to end has episodes
        assert (await run(pool)).ok
        assert all([(await task).ok for task in slow])
        await until(lambda: len(pool.of(stubs)) == 1)
        assert (await run(pool)).ok
        assert pool.restarts == 0


async def test_the_queue_for_a_full_worker(tmp_path):
    """Nobody is overtaken. The wait takes none of an episode's time: together these take longer than one may."""
    async with serving(tmp_path, stub(tmp_path, {"seconds": 0.15}, max_concurrent=1)) as pool:
        order: list[int] = []

        async def one(number: int) -> None:
            assert (await run(pool, number % (TASKS - 1), str(number), seconds=1.0)).ok
            order.append(number)

        await asyncio.gather(*(one(number) for number in range(12)))
        assert order == list(range(12))


async def test_a_slot_that_never_comes(tmp_path):
    """The wait for a slot has a deadline, by the time of those before it; the episode may be tried again."""
    async with serving(tmp_path, stub(tmp_path, {"slow": 1000.0}, max_concurrent=1)) as pool:
        has_one = asyncio.create_task(run(pool, TASKS - 1, "a"))
        await until(lambda: any(worker.pending for worker in pool.workers.values()))
        pool._start_timeout = 0.1
        result = await run(pool, 0, "b", seconds=0.1)
        assert (result.outcome, "no result from environment 'stub'" in result.message) == (Outcome.WORKER_DIED, True)
        assert not has_one.done()
        has_one.cancel()


async def test_what_is_cancelled_together_is_not_begun(tmp_path, monkeypatch):
    """Of episodes that are cancelled at once, those that wait do not get the slots of those that had one."""
    async with serving(tmp_path, stub(tmp_path, {"slow": 1000.0}, max_concurrent=1)) as pool:
        sent, send = list[str](), pool._send

        def note(worker: Any, message: Any) -> None:
            sent.append(type(message).__name__)
            send(worker, message)

        monkeypatch.setattr(pool, "_send", note)
        episodes = [asyncio.create_task(run(pool, TASKS - 1, name)) for name in "abc"]
        await until(lambda: any(worker.pending for worker in pool.workers.values()))
        for episode in episodes:
            episode.cancel()
        await asyncio.wait(episodes, timeout=SECONDS)
        assert sent == ["Run", "Cancel"]


async def test_a_closed_pool_answers(tmp_path):
    """Neither those who wait for a worker nor those who have one wait for their deadline."""
    async with serving(tmp_path, stub(tmp_path, {"slow": 1000.0}, max_concurrent=1)) as pool:
        has_one, waits = (asyncio.create_task(run(pool, TASKS - 1, name)) for name in "ab")
        await until(lambda: any(worker.pending for worker in pool.workers.values()))
    async with asyncio.timeout(SECONDS / 2):
        assert (await has_one).outcome is Outcome.WORKER_DIED
        with pytest.raises(UserError, match="closed"):
            await waits
        with pytest.raises(UserError, match="closed"):
            await run(pool)


async def test_a_stopped_worker_ends_with_its_pool(tmp_path):
    """Contract: also where the end of the pool is not waited for."""
    async with serving(tmp_path, stub(tmp_path)) as pool:
        (worker,) = pids(pool)
        os.kill(worker, signal.SIGSTOP)
        closing = asyncio.create_task(pool.close())
        await asyncio.sleep(0.0)
        closing.cancel()
        await asyncio.wait([closing], timeout=SECONDS)
        assert identify(worker) is None


async def test_equal_environments_share_workers(tmp_path, monkeypatch):
    """An environment that is trained on and evaluated is loaded once; results bear the name that was asked for. Other
    arguments or promised secrets: other workers, which alone get them."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-for-the-judge")
    envs = [stub(tmp_path), stub(tmp_path, name="stub-eval"), stub(tmp_path, secrets=["OPENAI_API_KEY"], name="other")]
    async with serving(tmp_path, *envs) as pool:
        assert len(pids(pool)) == 2
        results = [await run(pool, env=name) for name in ("stub", "stub-eval", "other")]
        assert [(result.env, result.ok) for result in results] == [("stub", True), ("stub-eval", True), ("other", True)]
        assert (pool.tasks("stub-eval"), results[1].reward) == (pool.tasks("stub"), results[0].reward)
        for worker in pool.workers.values():
            variables = Path(f"/proc/{worker.child.pid}/environ").read_bytes().split(b"\0")
            assert (b"OPENAI_API_KEY=sk-for-the-judge" in variables) == (worker.env == "other")


OWN = {
    "raise": (Outcome.ERRORED, "scripted"),
    "sys-exit": (Outcome.ERRORED, "SystemExit: 4"),
    "unsendable": (Outcome.INVALID, "cannot be sent: TypeError"),
    "giant": (Outcome.INVALID, "MiB"),
    "stray": (Outcome.OK, ""),
}
DEADLY = {
    "kill": (Outcome.WORKER_DIED, "SIGKILL"),
    "exit": (Outcome.ERRORED, "in this episode's code its worker failed with exit status 3"),
    "broken": (Outcome.ERRORED, "scripted"),
    "segfault": (Outcome.ERRORED, "in this episode's code its worker was killed by SIGSEGV"),
    "bytes": (Outcome.WORKER_DIED, "broken message"),
    "hold": (Outcome.ERRORED, "in this episode's code its worker failed with exit status 1"),
    "loop": (Outcome.ERRORED, "in this episode's code its worker failed with exit status 1"),
}


async def two(pool: EnvPool, directory: Path, deed: str) -> tuple[EpisodeResult, EpisodeResult]:
    """An episode that does it, and one that runs meanwhile in the same worker."""
    neighbour = asyncio.create_task(run(pool, TASKS - 1, "neighbour"))
    await until(lambda: any(worker.pending for worker in pool.workers.values()))
    tell(directory, "stub", deed)
    return await run(pool, 0, "offending"), await neighbour


async def test_what_is_its_own_alone(tmp_path):
    """It costs the episode its result at most; its worker goes on with the others. What is no result is named."""
    async with serving(tmp_path, stub(tmp_path, {"slow": 0.3})) as pool:
        (worker,) = workers = pids(pool)
        own, offered = (int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in ("self", worker))
        assert offered > own  # the kernel ends workers before the run
        for deed, (outcome, message) in OWN.items():
            offending, neighbour = await two(pool, tmp_path, deed)
            assert (deed, offending.outcome, neighbour.outcome) == (deed, outcome, Outcome.OK)
            assert message in offending.message
        assert (pids(pool), pool.restarts) == (workers, 0)
        stray = int((tmp_path / "stray").read_text())
        assert identify(stray)
        os.kill(worker, signal.SIGKILL)
        await until(lambda: not identify(stray))  # a daemon in a session of its own


async def test_what_costs_the_worker(tmp_path, monkeypatch):
    """A worker that dies, hangs, or whose messages are none, is replaced; the episode in whose code it died fails, the
    others may be tried again. However often that comes in a row: it is no failure to load."""
    monkeypatch.setattr(pool_module, "MAX_DEATHS", 2)
    async with serving(tmp_path, stub(tmp_path, {"slow": 1.0, "hang": 2.5})) as pool:
        for deed, (outcome, message) in DEADLY.items():
            offending, neighbour = await two(pool, tmp_path, deed)
            assert (deed, offending.outcome, neighbour.outcome) == (deed, outcome, Outcome.WORKER_DIED)
            assert message in offending.message
        assert (await run(pool)).ok
        assert pool.restarts == len(DEADLY)
    log = (tmp_path / "out" / "logs" / "envs" / "stub.log").read_text()
    assert all(said in log for said in ("Segmentation fault", "Timeout (0:00:02.5", "in _loop"))


async def test_deadline_holds_when_the_worker_is_blocked(tmp_path):
    """The pool answers by the deadline (and its grace) even when the worker's own timer cannot run."""
    async with serving(tmp_path, stub(tmp_path, {"blocks": 600.0})) as pool:
        before = pids(pool)
        result = await run(pool, seconds=1.0)
        assert (result.outcome, "after an episode's deadline" in result.message) == (Outcome.WORKER_DIED, True)
        await until(lambda: pids(pool).isdisjoint(before))


async def test_every_fault_of_a_worker_is_an_outcome(tmp_path, monkeypatch):
    """Killed with a result in hand; a result lost, doubled or failed: one episode lost at most, counted once."""
    # The nth match of a point meets its nth fault.
    deeds = ("kill", "drop", "duplicate", "error")
    plan = [{"point": "result:stub", "process": "environment", "do": deed} for deed in deeds]
    (tmp_path / "faults.json").write_text(json.dumps(plan))
    monkeypatch.setenv(faults.ENV, str(tmp_path / "faults.json"))
    async with serving(tmp_path, stub(tmp_path)) as pool:
        assert (await run(pool)).outcome is Outcome.WORKER_DIED
        assert (await run(pool, seconds=1.0)).outcome is Outcome.WORKER_DIED
        outcomes = [(await run(pool)).outcome for _ in range(3)]
        assert outcomes == [Outcome.OK, Outcome.ERRORED, Outcome.OK]
        assert pool.restarts == 2


async def test_a_kill_at_the_start(tmp_path):
    """SIGKILL while it loads is no fault of the environment: it is started again."""
    pool = EnvPool([stub(tmp_path)], model="none", base_url="", api_key=None, output_dir=tmp_path / "out")
    starting = asyncio.create_task(pool.start(SECONDS))
    try:
        await until(lambda: bool(pids(pool)))
        os.kill(next(iter(pids(pool))), signal.SIGKILL)
        await starting
        assert (await run(pool)).ok
        assert pool.restarts == 1
    finally:
        await pool.close()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "a worker of environment 'stub' cannot be started: .*/python-of-its-own"),
        ("echo about to exit; exit 1", "'stub' died 2 times in a row .*failed with exit status 1\n.*about to exit"),
    ],
)  # fmt: skip
async def test_crash_loop_ends_the_pool(tmp_path, script, message, monkeypatch):
    """A worker that keeps dying without an episode is an error of the run, which quotes the log."""
    monkeypatch.setattr(pool_module, "MAX_DEATHS", 2)
    python = tmp_path / "python-of-its-own"
    if script is not None:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    with pytest.raises(UserError, match=message):
        async with serving(tmp_path, stub(tmp_path, python=str(python))):
            pass
