"""The bundled packages, as a worker hosts them, against a scripted engine that plays well, badly, or not at all."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from calculator.data import problems as word_problems
from kuhn_poker.game import DEALS
from prime_rl.envs.protocol import EpisodeResult, Outcome, Run, Setup
from prime_rl.envs.verifiers_v1 import VerifiersEnv
from support.fake_engine import TEMPLATE, FakeEngine, assert_exact, make_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class World:
    engine: FakeEngine
    envs: dict[str, VerifiersEnv]

    async def play(self, env: str, task: int, reply: Callable[[str], str]) -> EpisodeResult:
        self.engine.reply = reply
        self.engine.reset()
        task_id = self.envs[env].task_ids[task]
        run = Run(1, "1.2.3", task, task_id, {"max_tokens": 200}, 0, self.engine.base_url, 0.0)
        return await self.envs[env].run(run)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    root = tmp_path_factory.mktemp("bundled")
    data = root / "problems.jsonl"
    data.write_text(
        json.dumps({"problem": "Half?", "answer": r"\frac{1}{2}", "subject": "Algebra", "level": 1, "unique_id": "a"})
    )
    settings: dict[str, dict[str, Any]] = {
        "math500": {"data": str(data)},
        "kuhn-poker": {},
        "calculator": {"num_tasks": 4},
    }
    model = make_tokenizer(root / "model", TEMPLATE)
    async with AsyncExitStack() as stack:
        envs = {}
        for name, args in settings.items():
            setup = Setup(name, name, args, str(model), "auto", "info", max_turns=4)
            envs[name] = await stack.enter_async_context(VerifiersEnv(setup))
        yield World(await stack.enter_async_context(FakeEngine(model, max_model_len=2048)), envs)


def _asked(prompt: str) -> str:
    """What the environment said last."""
    return prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


def _turn(prompt: str) -> int:
    return prompt.count("<|im_start|>user\n") - 1


async def test_a_benchmark(world):
    """A benchmark's package judges here as elsewhere: equal expressions are right."""
    for answer, reward in ((r"so \boxed{0.5}", 1.0), (r"\boxed{2}", 0.0), ("a half", 0.0)):
        result = await world.play("math500", 0, lambda prompt, answer=answer: answer)
        assert (result.outcome, result.reward) == (Outcome.OK, reward), result.message
        assert result.metrics["answered"] == float("box" in answer)
        assert_exact(result.samples[0], world.engine.exchanges)


def _caller(prompt: str) -> str:
    return f"<move>{'call' if 'call?' in _asked(prompt) else 'bet'}</move>"


def _folder(prompt: str) -> str:
    if "fold or call?" in _asked(prompt):
        return "<move>fold</move>"
    return f"<move>{'check' if 'act first' in prompt else 'bet'}</move>"


def _cheat(prompt: str) -> str:
    return "<move>fold</move>"


@pytest.mark.parametrize(
    ("task", "reply", "turns", "chips"),
    [
        (0, _caller, {"player_1": [0], "player_2": [1]}, -2.0),  # JQ-1
        (11, _folder, {"player_2": [0, 2], "player_1": [1]}, 1.0),  # KQ-2: the opener speaks twice and loses its ante
        (1, _cheat, {"player_2": [0]}, 2.0),  # JQ-2: who opens with nonsense loses; the other never spoke
    ],
)  # all games: tests/unit/bundled/test_kuhn_poker.py
async def test_poker(world, task, reply, turns, chips):
    """Each seat gets its own chips with its own tokens, whichever acts first; a player sees only its own card."""
    result = await world.play("kuhn-poker", task, reply)
    assert result.ok, result.message
    deal, exchanges = DEALS[task], world.engine.exchanges
    assert result.task_id == f"kuhn-poker/{deal.id}"
    won = {"player_1": chips, "player_2": -chips}
    assert {sample.agent: sample.reward for sample in result.samples} == {agent: won[agent] for agent in turns}
    for sample in result.samples:
        assert_exact(sample, [exchanges[turn] for turn in turns[sample.agent]])
    text = world.engine.tokenizer.decode(exchanges[0].prompt)
    assert f"Your card is {deal.cards[deal.first]}. You act first." in text


async def test_calculating(world):
    """The tool's definition reaches the prompt, its result the next; the right number earns all; one exact sample."""
    problem = word_problems("train", 4)[3]
    told: list[str] = []

    def reply(prompt: str) -> str:
        told.append(_asked(prompt))
        call = json.dumps({"name": "calculate", "arguments": {"expression": problem.expression}})
        return f"<answer>{problem.answer}</answer>" if _turn(prompt) else f"<tool_call>\n{call}\n</tool_call>"

    result = await world.play("calculator", 3, reply)
    assert result.ok, result.message
    assert result.task_id == f"calculator/{problem.id}"
    assert told == [problem.text, f"<tool_response>\n{problem.answer}\n</tool_response>"]
    assert '"name": "calculate"' in world.engine.tokenizer.decode(world.engine.exchanges[0].prompt)
    assert result.rewards == pytest.approx({"correct": 1.0, "format": 0.1})
    assert (result.metrics["tool_calls"], result.metrics["refused_expressions"]) == (1.0, 0.0)
    (sample,) = result.samples
    assert_exact(sample, world.engine.exchanges)
