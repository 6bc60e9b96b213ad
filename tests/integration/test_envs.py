"""Environment workers as real processes, against a scripted engine: tokens are exact, faults are outcomes."""

import asyncio
import sys
import time
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from environments import environment, write_environments
from fake_engine import FakeEngine, make_tokenizer

from prime_rl.envs.pool import EnvPool
from prime_rl.envs.protocol import EpisodeResult, Outcome

pytestmark = pytest.mark.asyncio(loop_scope="module")

START_SECONDS = 180.0


@dataclass
class World:
    engine: FakeEngine
    pool: EnvPool
    output: Path

    async def run(self, env: str, *, seconds: float = 60.0, task: int = 0, **sampling: Any) -> EpisodeResult:
        return await self.pool.run(
            env=env,
            task_index=task,
            sampling={"temperature": 0.7, "max_tokens": 64, **sampling},
            policy_version=3,
            episode_id="1.2.3",
            deadline=time.monotonic() + seconds,
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """One worker each for a good and a raising environment, and an engine."""
    root = tmp_path_factory.mktemp("envs")
    path = write_environments(root / "path")
    envs = [
        environment("reverse-text", {"num_tasks": 8}),
        environment("env-bad-reward"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(path))
        async with FakeEngine(make_tokenizer(root / "model")) as engine:
            pool = EnvPool(
                envs, model=str(engine.model), base_url=engine.base_url, api_key="secret", output_dir=root / "out"
            )
            await pool.start(START_SECONDS)
            yield World(engine, pool, root / "out")
            await pool.close()


@pytest.fixture(autouse=True)
def _reset(world: World) -> None:
    world.engine.exchanges.clear()
    world.engine.delay, world.engine.status, world.engine.malformed = 0.0, 200, False
    world.engine.reply = lambda prompt: "<reversed_text>abc</reversed_text>"


async def test_tokens_are_the_engines(world: World) -> None:
    """Prompt ids as sent, sampled ids and logprobs as answered, bit for bit; sampling and policy version as asked."""
    result = await world.run("reverse-text", seed=42, min_tokens=None)
    (exchange,) = world.engine.exchanges
    (sample,) = result.samples
    assert result.ok
    assert list(sample.input_ids) == exchange.prompt + exchange.completion
    assert sample.prompt_len == len(exchange.prompt)
    assert list(sample.loss_mask) == [False] * len(exchange.prompt) + [True] * len(exchange.completion)
    assert sample.logprobs == array("f", [0.0] * len(exchange.prompt) + exchange.logprobs)
    sent = exchange.body["sampling_params"]
    assert {key: sent[key] for key in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "logprobs")} == {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "max_tokens": 64,
        "seed": 42,
        "logprobs": 1,
    }
    assert "min_tokens" not in sent
    assert exchange.body["cache_salt"] == "v3"


async def test_prompt_is_the_chat_template(world: World) -> None:
    """What the engine gets is the model's own template of the task."""
    await world.run("reverse-text", task=1)
    text = world.pool.tasks("reverse-text")[1].task_id.removeprefix("reverse-text/")
    system = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    expected = world.engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert world.engine.exchanges[0].prompt == expected


async def test_result_describes_the_episode(world: World) -> None:
    """Ids are echoed; the reward is the environment's; prompt and answer are readable."""
    text = world.pool.tasks("reverse-text")[0].task_id.removeprefix("reverse-text/")
    world.engine.reply = lambda prompt: f"<reversed_text>{text[::-1]}</reversed_text>"
    result = await world.run("reverse-text")
    assert (result.episode_id, result.env, result.task_id) == ("1.2.3", "reverse-text", f"reverse-text/{text}")
    assert (result.reward, result.rewards, result.num_turns, result.is_truncated) == (1.0, {"lcs": 1.0}, 1, False)
    assert result.prompt.endswith(f"user: {text}")
    assert result.completion == f"<reversed_text>{text[::-1]}</reversed_text>"


async def test_truncated(world: World) -> None:
    """An answer cut by max_tokens is marked, and stays trainable."""
    result = await world.run("reverse-text", max_tokens=3)
    assert (result.ok, result.is_truncated, sum(result.samples[0].loss_mask)) == (True, True, 3)


async def test_raising_reward_is_errored(world: World) -> None:
    """A reward that raises costs its own episode, with the exception named; its chatter goes to the environment's log."""
    result = await world.run("env-bad-reward")
    assert (result.outcome, result.samples) == (Outcome.ERRORED, [])
    assert "ZeroDivisionError: division by zero" in result.message
    assert "chatter from a reward" in (world.output / "logs" / "envs" / "env-bad-reward.log").read_text()
    assert world.pool.restarts == 0


@pytest.mark.parametrize(("status", "outcome"), [(500, "engine_unavailable"), (404, "engine_refused")])
async def test_engine_errors(world: World, status: int, outcome: str) -> None:
    """A failing engine is not the environment's fault."""
    world.engine.status = status
    result = await world.run("reverse-text")
    assert (result.outcome, result.samples) == (Outcome(outcome), [])


async def test_deadline(world: World) -> None:
    """An episode past its deadline is a timeout, and its engine request is given up."""
    world.engine.delay = 300.0
    result = await world.run("reverse-text", seconds=1.0)
    assert result.outcome is Outcome.TIMEOUT
    await _until(lambda: world.engine.running == 0)


async def test_cancel(world: World) -> None:
    """Cancelling the call cancels the engine's request; the worker goes on."""
    world.engine.delay = 300.0
    calls = [asyncio.create_task(world.run("reverse-text", task=i, seconds=300.0)) for i in range(3)]
    await _until(lambda: world.engine.running == 3)
    for call in calls:
        call.cancel()
    assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*calls, return_exceptions=True))
    await _until(lambda: world.engine.running == 0)
    world.engine.delay = 0.0
    assert (await world.run("reverse-text")).ok


async def test_many_at_once(world: World) -> None:
    """Concurrent episodes do not mix: every result has its own exchange's tokens."""
    world.engine.reply = lambda prompt: prompt.split("user\n")[1].split("<|im_end|>")[0][::-1]
    results = await asyncio.gather(*(world.run("reverse-text", task=i % 8) for i in range(64)))
    decoded = [
        world.engine.tokenizer.decode(list(r.samples[0].input_ids[r.samples[0].prompt_len : -1])) for r in results
    ]
    assert decoded == [r.task_id.removeprefix("reverse-text/")[::-1] for r in results]


async def _until(condition: Any, seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.05)
