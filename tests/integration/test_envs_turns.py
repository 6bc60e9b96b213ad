"""Conversations of several turns, in the process of a worker, against a scripted engine: limits, a full context, samples."""

import itertools
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from prime_rl.envs.protocol import EpisodeResult, Outcome, Run, SampleTokens, Setup
from support.environments import write_environments
from support.fake_engine import FakeEngine, make_tokenizer
from support.turn_environments import SOURCES


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(write_environments(tmp_path, SOURCES)))


@asynccontextmanager
async def world(
    model: Path, env_id: str = "env-words", args: dict[str, Any] | None = None, context: int = 512, **settings: Any
) -> AsyncIterator[tuple[FakeEngine, Any]]:
    from prime_rl.envs.verifiers_v1 import VerifiersEnv

    setup = Setup(env_id, env_id, args or {}, str(model), "auto", "info", **settings)
    async with FakeEngine(model, max_model_len=context) as engine, VerifiersEnv(setup) as env:
        engine.reply = lambda prompt: f"reply {len(engine.exchanges)}"
        yield engine, env


async def run(engine: FakeEngine, env: Any, max_tokens: int | None = 64) -> EpisodeResult:
    return await env.run(Run(1, "e", 0, env.task_ids[0], {"max_tokens": max_tokens}, 0, engine.base_url, 0.0))


def trained(samples: list[SampleTokens]) -> list[list[tuple[int, float]]]:
    """The tokens with loss of each sample, with their log-probabilities."""
    streams = [zip(one.input_ids, one.loss_mask, one.logprobs, strict=True) for one in samples]
    return [[(token, logprob) for token, mask, logprob in stream if mask] for stream in streams]


def joined(lists: list[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def sampled(engine: FakeEngine) -> list[list[tuple[int, float]]]:
    return [list(zip(one.completion, array("f", one.logprobs), strict=True)) for one in engine.exchanges]


async def test_a_full_context_stops(model: Path) -> None:
    """The last replies get the room that is left; where there is none the conversation ends, is judged and marked."""
    async with world(model, args={"words": ["word " * 8] * 9}, context=128) as (engine, env):
        engine.reply = lambda prompt: "long " * 4
        result = await run(engine, env)
    assert (result.ok, result.is_truncated) == (True, True), result.message
    assert 1 < result.num_turns < 9
    assert result.reward == result.num_turns
    for exchange in engine.exchanges:
        assert exchange.body["sampling_params"]["max_tokens"] == min(64, 128 - len(exchange.prompt)) > 0
    (sample,) = result.samples
    assert trained([sample]) == [joined(sampled(engine))]
    assert len(sample.input_ids) <= 128


async def test_a_task_longer_than_the_context(model: Path) -> None:
    """Always `prompt_too_long`, with the task, its tokens and the context; also where it fills it to the last token."""
    async with world(model, args={"words": ["x" * 300]}, context=128) as (engine, env):
        result = await run(engine, env)
        assert (result.outcome, engine.started) == (Outcome.PROMPT_TOO_LONG, 0)
        assert result.task_id in result.message
        assert "128" in result.message
        length = len(
            engine.tokenizer.apply_chat_template(
                [{"role": "system", "content": "s"}, {"role": "user", "content": "x" * 300}],
                add_generation_prompt=True,
                return_dict=False,
            )
        )
        assert str(length) in result.message
    async with world(model, args={"words": ["x" * 300]}, context=length) as (engine, env):
        assert (await run(engine, env, max_tokens=None)).outcome is Outcome.PROMPT_TOO_LONG


@pytest.mark.parametrize("settings", [{}, {"trajectories": "branched"}, {"max_turns": 1}])
async def test_two_agents(model: Path, settings: dict[str, Any]) -> None:
    """A game of the model against itself: each side is a part with its own reward and samples, exact as any."""
    async with world(model, "env-duel", **settings) as (engine, env):
        result = await run(engine, env)
    assert result.ok, result.message
    assert sorted((part.agent, part.reward) for part in result.parts) == [("black", -1.0), ("white", 1.0)]
    assert all(
        one.agent == result.parts[one.part].agent and one.reward == result.parts[one.part].reward
        for one in result.samples
    )
    moves = 2 if "max_turns" not in settings else 1
    assert all(part.num_turns == moves for part in result.parts)
    assert sorted(joined(trained(result.samples))) == sorted(joined(sampled(engine)))
    assert len(result.samples) == (4 if settings.get("trajectories") else 2)
