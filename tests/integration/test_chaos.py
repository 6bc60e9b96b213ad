"""Chaos: workers are killed, stopped, hang and return rubbish while a run trains. It ends; no episode is lost.

Real are the orchestrator, its ledger and batches, the pool, and the workers; scripted are the trainer, the engine and
what environments do (`support/stub_worker.py`). An episode's deed is a draw over its name, a worker's end one, too.
"""

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from faults import audit as finished_run
from prime_rl.envs import pool as pool_module
from prime_rl.envs.pool import EnvPool
from prime_rl.envs.protocol import EpisodeResult
from prime_rl.orchestrator.audit import audit
from support.scripted import World, fresh, has_batch, until
from support.stub_worker import stub_python

CRASHES = ["kill", "stop", "exit", "segfault", "sys-exit", "raise"]
HANGS = ["loop", "hold", "stray"]
RUBBISH = ["bytes", "giant", "unsendable"]


class Witness(EnvPool):
    """Counts what the orchestrator was told."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.outcomes: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()

    async def run(self, **asked: Any) -> EpisodeResult:
        result = await super().run(**asked)
        self.outcomes[result.outcome] += 1
        self.answered[asked["episode_id"]] += 1
        return result


def environments(directory: Path, seed: int) -> list[dict[str, Any]]:
    """Three that go wrong in their own ways; each grows."""
    shares = {"crashes": (CRASHES, 0.15), "hangs": (HANGS, 0.1), "rubbish": (RUBBISH, 0.35)}
    return [
        {
            "id": "stub", "name": name, "python": str(stub_python(directory)), "max_workers": 2, "max_concurrent": 4,
            "args": {"deeds": deeds, "chance": chance, "seed": seed, "seconds": 0.05, "hang": 3.0,
                     "directory": str(directory)},
        }
        for name, (deeds, chance) in shares.items()
    ]  # fmt: skip


async def strike(pool: EnvPool, chance: random.Random, pause: float) -> None:
    """SIGKILL and SIGSTOP to workers, ready or not."""
    while True:
        await asyncio.sleep(chance.uniform(0.5, 1.5) * pause)
        if processes := list(pool.workers.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(processes).child.pid, chance.choice([signal.SIGKILL, signal.SIGSTOP]))


async def train(world: World, steps: int) -> None:
    for step in range(steps):
        await until(has_batch(world, step), timeout=500)
        world.trainer.commit(step + 1)


async def endure(directory: Path, monkeypatch: pytest.MonkeyPatch, *, steps: int, seed: int, pause: float) -> Witness:
    """One run of so many steps."""
    monkeypatch.setattr(pool_module, "MAX_DEATHS", 20)  # of which two thirds are ours
    monkeypatch.setattr(pool_module, "GRACE_SECONDS", 2.0)
    world = fresh(
        directory / "run", environment=None, environments=environments(directory, seed), batch_size=12,
        rollouts_per_example=2, async_level=1, max_steps=steps, max_error_rate=1.0, rollout_timeout=5.0, seed=seed,
    )  # fmt: skip
    pool = Witness(
        world.config.environments, model="none", base_url=world.engine.root, api_key=None, output_dir=world.directory
    )
    world.pool = pool  # type: ignore[assignment]
    trainer = asyncio.create_task(train(world, steps))
    striker = asyncio.create_task(strike(pool, random.Random(seed), pause))
    try:
        async with asyncio.timeout(540):
            await world.orchestrator().run()
            await trainer
    finally:
        striker.cancel()
        trainer.cancel()
        await pool.close()
    return pool


@pytest.mark.parametrize(
    ("seed", "steps", "pause"),
    [(1, 8, 1.5), *(pytest.param(seed, 40, 3.0, marks=pytest.mark.slow) for seed in range(3))],
)
async def test_a_run_survives_its_environments(tmp_path, monkeypatch, seed, steps, pause):
    """Contract: a run of so many steps, with a fault every second or so, ends right: every episode ended once, as the
    ledger, the batches and the pool say alike."""
    run, pool = tmp_path / "run", await endure(tmp_path, monkeypatch, steps=steps, seed=seed, pause=pause)
    assert list(finished_run._ledger(run, steps)) == []
    assert list(finished_run._batches(run, steps)) == []
    assert list(finished_run._leftovers(run)) == []
    outcomes, faults = audit(run)
    assert faults == []
    assert {env for env, *_ in outcomes} == {"crashes", "hangs", "rubbish"}
    assert all(name in ("issued", "trained") or name.startswith("dropped") for _, name, *_ in outcomes)
    assert max(pool.answered.values()) == 1
    assert pool.restarts >= 3
    assert pool.outcomes["worker_died"] >= 3
    assert pool.outcomes["invalid"] >= 1
