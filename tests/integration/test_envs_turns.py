"""Conversations of several turns, in a worker's process, against a scripted engine: limits, full context, samples."""

from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prime_rl.envs.protocol import EpisodeResult, Outcome, Run, Setup
from prime_rl.envs.verifiers_v1 import VerifiersEnv
from support.environments import SOURCES, write_environments
from support.fake_engine import FakeEngine, assert_exact


@pytest.fixture(autouse=True)
def _environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(write_environments(tmp_path)))


@asynccontextmanager
async def world(
    model: Path, env_id: str = "env-words", args: dict[str, Any] | None = None, context: int = 512, **settings: Any
) -> AsyncIterator[tuple[FakeEngine, Any]]:
    setup = Setup(env_id, env_id, args or {}, str(model), "auto", "info", **settings)
    async with FakeEngine(model, max_model_len=context) as engine, VerifiersEnv(setup) as env:
        engine.reply = lambda prompt: f"reply {len(engine.exchanges)}"
        yield engine, env


async def run(engine: FakeEngine, env: Any, max_tokens: int | None = 64) -> EpisodeResult:
    return await env.run(Run(1, "e", 0, env.task_ids[0], {"max_tokens": max_tokens}, 0, engine.base_url, 0.0))


async def test_experts_come_with_the_turns(tiny_model: Path) -> None:
    """Contract: an episode that needs the engine's choice of experts asks for those that it does not have yet, turn by
    turn, and has one row for each token but the last. A server that does not return them is refused, by name.
    At `max_turns` the conversation ends, is judged and marked."""
    request = Run(1, "e", 0, "", {"max_tokens": 64, "routed_experts_prompt_start": 0}, 0, "", 0.0)
    async with world(tiny_model, max_turns=2) as (engine, env):
        request = replace(request, task_id=env.task_ids[0], base_url=engine.base_url)
        result = await env.run(request)
        assert (result.outcome, "router_replay" in result.message) == (Outcome.ENGINE_REFUSED, True), result.message
        engine.reset()
        engine.replays = True
        result = await env.run(request)
    assert (result.ok, result.num_turns, result.reward, result.is_truncated) == (True, 2, 2.0, True), result.message
    (sample,) = result.samples
    assert_exact(sample, engine.exchanges)
    assert sample.experts is not None
    assert array("H", sample.experts.rows).tolist() == [at for at in range(len(sample.input_ids) - 1) for _ in range(2)]
    asked = [exchange.body["sampling_params"]["routed_experts_prompt_start"] for exchange in engine.exchanges]
    ends = [len(exchange.prompt) + len(exchange.completion) - 1 for exchange in engine.exchanges]
    assert asked == [0, *ends[:-1]]


async def test_a_full_context_stops(tiny_model: Path) -> None:
    """The last replies get the room that is left; where there is none the conversation ends, is judged and marked."""
    async with world(tiny_model, args={"words": ["word " * 8] * 9}, context=250) as (engine, env):
        engine.reply = lambda prompt: "long " * 4
        result = await run(engine, env)
    assert (result.ok, result.is_truncated) == (True, True), result.message
    assert 1 < result.num_turns < 9
    assert result.reward == result.num_turns
    for exchange in engine.exchanges:
        assert exchange.body["sampling_params"]["max_tokens"] == min(64, 250 - len(exchange.prompt)) > 0
    assert_exact(*result.samples, engine.exchanges)
    assert len(result.samples[0].input_ids) <= 250


async def test_a_task_longer_than_the_context(tiny_model: Path) -> None:
    """Always `prompt_too_long`, with the task, its tokens and the context; also where it fills it to the last token."""
    async with world(tiny_model, args={"words": ["x" * 300]}, context=128) as (engine, env):
        result = await run(engine, env)
        assert (result.outcome, engine.started) == (Outcome.PROMPT_TOO_LONG, 0)
        assert result.task_id in result.message
        assert "128" in result.message
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "x" * 300}]
        ids = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        length = len(ids)
        assert str(length) in result.message
    async with world(tiny_model, args={"words": ["x" * 300]}, context=length) as (engine, env):
        assert (await run(engine, env, max_tokens=None)).outcome is Outcome.PROMPT_TOO_LONG


@pytest.mark.parametrize(("of", "code"), [("env_good", "float(trace.num_turns)"), ("env_words", "task.data.answer")])
async def test_code_that_raises_is_named(of: str, code: str, tiny_model: Path, tmp_path: Path) -> None:
    """Contract: what a reward function or an environment's `run` raises is reported with file and line, and no more."""
    source = SOURCES[of].replace(code, "{}['score']")
    write_environments(tmp_path, {f"raises_in_{of}": source})
    line = source[: source.index("{}['score']")].count("\n") + 1
    async with world(tiny_model, f"raises-in-{of}") as (engine, env):
        result = await run(engine, env)
    assert result.outcome is Outcome.ERRORED
    assert result.message.endswith(f": KeyError: 'score' ({tmp_path}/raises_in_{of}.py:{line})")
