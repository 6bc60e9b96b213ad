"""Environment workers as real processes, against a scripted engine: tokens are exact, faults are outcomes."""

import asyncio

import pytest
import pytest_asyncio

from prime_rl.envs.protocol import Outcome
from support.environments import environment, open_pool
from support.fake_engine import assert_exact, make_tokenizer
from support.scripted import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory):
    """A worker and an engine."""
    root = tmp_path_factory.mktemp("envs")
    envs = [environment("reverse-text", {"num_tasks": 8})]
    async with open_pool(envs, make_tokenizer(root / "model"), root / "out") as world:
        yield world


@pytest.fixture(autouse=True)
def _reset(world):
    world.engine.reset()
    world.engine.reply = lambda prompt: "<reversed_text>abc</reversed_text>"


async def test_an_episode_is_what_the_engine_gave(world):
    """The prompt is the model's own template of the task; prompt ids as sent, sampled ids and logprobs as answered, bit
    for bit; sampling and version as asked; ids echoed, the environment's reward, prompt and answer readable."""
    text = world.pool.tasks("reverse-text")[1].removeprefix("reverse-text/")
    world.engine.reply = lambda prompt: f"<reversed_text>{text[::-1]}</reversed_text>"
    result = await world.run("reverse-text", task=1, seed=42)
    (exchange,) = world.engine.exchanges
    (sample,) = result.samples
    assert result.ok
    system = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    expected = world.engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert exchange.prompt == expected
    assert_exact(sample, world.engine.exchanges)
    assert sample.prompt_len == len(exchange.prompt)
    asked = {"temperature": 0.7, "max_tokens": 64, "seed": 42, "logprobs": 1}
    sent = exchange.body["sampling_params"]
    assert {key: sent[key] for key in asked} == asked
    assert exchange.body["cache_salt"] == "v3"
    assert (result.episode_id, result.env, result.task_id) == ("1.2.3", "reverse-text", f"reverse-text/{text}")
    assert (result.reward, result.rewards, result.num_turns, result.is_truncated) == (1.0, {"lcs": 1.0}, 1, False)
    assert result.prompt.endswith(f"user: {text}")
    assert result.completion == f"<reversed_text>{text[::-1]}</reversed_text>"


async def test_deadline_and_cancellation(world):
    """An episode past its deadline is a timeout. Then, or if its call is cancelled, its request is dropped."""
    world.engine.delay = 300.0
    assert (await world.run("reverse-text", seconds=1.0)).outcome is Outcome.TIMEOUT
    await until(lambda: world.engine.running == 0)
    calls = [asyncio.create_task(world.run("reverse-text", task=i, seconds=300.0)) for i in range(3)]
    await until(lambda: world.engine.running == 3)
    for call in calls:
        call.cancel()
    assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*calls, return_exceptions=True))
    await until(lambda: world.engine.running == 0)
    world.engine.delay = 0.0
    assert (await world.run("reverse-text")).ok


async def test_many_at_once(world):
    """Concurrent episodes do not mix: every result has its own exchange's tokens."""
    world.engine.reply = lambda prompt: prompt.split("user\n")[1].split("<|im_end|>")[0][::-1]
    results = await asyncio.gather(*(world.run("reverse-text", task=i % 8) for i in range(64)))
    decoded = [
        world.engine.tokenizer.decode(list(r.samples[0].input_ids[r.samples[0].prompt_len : -1])) for r in results
    ]
    assert decoded == [r.task_id.removeprefix("reverse-text/")[::-1] for r in results]
