"""Runs with teachers: what waits for them, how long, and who is told. A scripted engine and pool, real teachers' clients."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_rl.envs.protocol import Outcome
from prime_rl.errors import UserError
from prime_rl.monitor.status import read_status
from prime_rl.orchestrator import orchestrator as loop
from prime_rl.orchestrator import teachers
from support.scripted import World, has_batch, until


def make_world(directory: Path, kind: str, **more: Any) -> World:
    teacher = {"base_url": "http://teacher", "model": "big", "max_concurrent": 1}
    world = World(directory, algorithm={"type": kind, "teacher": teacher}, batch_size=8, max_steps=1, **more)
    world.trainer.live(0, 0)
    world.trainer.commit(0)
    return world


async def run_to_the_end(world: World, watch: Callable[[Any], None] = lambda orchestrator: None) -> None:
    orchestrator = world.orchestrator()
    watch(orchestrator)
    run = asyncio.create_task(orchestrator.run())
    await until(has_batch(world, 0), run=run)
    world.trainer.commit(1)
    await run
    await orchestrator.teachers.close()


async def test_who_samples_is_asked_for_as_many_episodes_as_it_allows(tmp_path: Path) -> None:
    """Contract: `max_concurrent` of an `sft` teacher holds over all its episodes, and an episode's time begins when it has its turn. What it sampled takes
    no slot of the policy's server, and says nothing of it."""
    world = make_world(tmp_path, "sft", rollout_timeout=30.0)
    now, most, left, praised = [], [], [], []
    sample = world.pool.run

    async def counting(*, deadline: float, **more: Any) -> Any:
        now.append(1)
        most.append(len(now))
        left.append(deadline - time.monotonic())
        result = await sample(**more)
        now.pop()
        return result

    world.pool.run, world.pool.seconds = counting, 0.05

    def watch(orchestrator: Any) -> None:
        for call in ("start", "succeeded"):
            setattr(orchestrator.fleet, call, lambda *of: praised.append(of))

    await run_to_the_end(world, watch)
    assert max(most) == 1
    assert len(left) >= 8
    assert min(left) > 29.97  # the last of eight has waited for 0.35 s
    assert praised == []


async def test_a_queue_at_a_slow_teacher_costs_no_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: the wait for other episodes' scores runs nobody's time down, is told with the teacher's name and a deadline that holds, and each
    score is progress; the server that sampled is told of each success."""

    async def slowly(self: teachers.Teacher, tokens: list[int]) -> list[float]:
        await asyncio.sleep(0.1)
        return [0.0, *[-1.0] * (len(tokens) - 1)]

    monkeypatch.setattr(teachers.Teacher, "_ask", slowly)
    monkeypatch.setattr(loop, "_QUIET_SECONDS", -1.0)
    monkeypatch.setattr(loop, "_WAKE_SECONDS", 0.02)
    told: list[tuple[str, float]] = []
    failed: list[Outcome] = []
    praised: list[object] = []

    def watch(orchestrator: Any) -> None:
        waiting, land = orchestrator.status.waiting, orchestrator._end_episode

        def noted(subject: str, owner: str, seconds: float) -> None:
            told.append((owner, seconds))
            waiting(subject, owner, seconds)

        def landed(start: Any, result: Any) -> None:
            failed.extend([] if result.ok else [result.outcome])
            land(start, result)

        orchestrator.status.waiting, orchestrator._end_episode = noted, landed
        orchestrator.fleet.succeeded = praised.append

    await run_to_the_end(make_world(tmp_path, "opd", rollout_timeout=0.3), watch)
    assert failed == []
    assert len(praised) >= 8
    owner, seconds = next((owner, seconds) for owner, seconds in told if owner.startswith("inference, "))
    assert owner == "inference, environments and the teacher at http://teacher"
    assert seconds > 0.3 + 4 * 120.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_while_teachers_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Contract: it ends at once, with a last word."""
    monkeypatch.setattr(loop, "spare_collector", lambda: None)
    world = World(tmp_path, algorithm={"type": "sft", "teacher": {"base_url": "http://127.0.0.1:9"}})
    run = asyncio.create_task(loop.orchestrate(world.config))
    try:
        await until(lambda: (said := read_status(tmp_path).get("orchestrator")) and said.waiting, run=run)
        os.kill(os.getpid(), number)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(run, 60.0)
    finally:
        for one in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(one)
    assert read_status(tmp_path)["orchestrator"].outcome == "stopped"


async def test_a_teacher_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: what it does not score is made again, then dropped and counted; where it stays silent the run ends, and says who is to blame."""
    asked = []

    async def dying(self: teachers.Teacher, route: str, body: Any) -> Any:
        asked.append(route)
        if len(asked) > 5:
            raise teachers.TeacherTrouble("http://teacher did not answer")
        logprobs = [None, *({str(one): {"logprob": -1.0}} for one in body["prompt"][1:])]
        return {"choices": [{"prompt_logprobs": logprobs}]}

    monkeypatch.setattr(teachers.Teacher, "_request", dying)
    orchestrator = make_world(tmp_path, "opd").orchestrator()
    with pytest.raises(
        UserError, match=r"more than max_error_rate .*teacher_unavailable: http://teacher did not answer"
    ):
        await asyncio.wait_for(orchestrator.run(), 30.0)
    await orchestrator.teachers.close()
