"""The bundled packages, as a worker hosts them, against a scripted engine that plays them well, badly, and not at all."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from alphabet_sort.data import Problem, problems
from calculator.data import problems as word_problems
from kuhn_poker.game import DEALS
from prime_rl.envs.protocol import EpisodeResult, Outcome, Setup
from prime_rl.envs.verifiers_v1 import VerifiersEnv
from support.fake_engine import FakeEngine, assert_exact, make_tokenizer
from wordle.data import words

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEMPLATE = Path(__file__).parents[2] / "assets" / "tiny-reverse" / "chat_template.jinja"


@dataclass
class World:
    engine: FakeEngine
    envs: dict[str, VerifiersEnv]

    async def play(self, env: str, task: int, reply: Callable[[str], str]) -> EpisodeResult:
        self.engine.reply = reply
        self.engine.reset()
        sampling = {"temperature": 1.0, "max_tokens": 200}
        return await self.envs[env].run(task, sampling, 0, "1.2.3", self.engine.base_url)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    root = tmp_path_factory.mktemp("bundled")
    data = root / "problems.jsonl"
    data.write_text(
        json.dumps({"problem": "Half?", "answer": r"\frac{1}{2}", "subject": "Algebra", "level": 1, "unique_id": "a"})
    )
    settings: dict[str, dict[str, Any]] = {
        "math500": {"data": str(data)},
        "alphabet-sort": {"split": "eval", "num_tasks": 8},
        "wordle": {"split": "eval", "max_turns": 4},
        "kuhn-poker": {},
        "calculator": {"num_tasks": 4},
    }
    model = make_tokenizer(root / "model", TEMPLATE.read_text())
    async with AsyncExitStack() as stack:
        envs = {}
        for name, args in settings.items():
            turns = 4 if name == "calculator" else 0
            setup = Setup(name, name, args, str(model), "auto", 8, "info", max_turns=turns)
            envs[name] = await stack.enter_async_context(VerifiersEnv(setup))
        yield World(await stack.enter_async_context(FakeEngine(model, max_model_len=2048)), envs)


def _asked(prompt: str) -> str:
    """What the environment said last."""
    return prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


def _turn(prompt: str) -> int:
    return prompt.count("<|im_start|>user\n") - 1


def _sorter(problem: Problem) -> Callable[[str], str]:
    return lambda prompt: "<sorted>" + "\n".join(problem.truth(_turn(prompt))) + "</sorted>"


@pytest.mark.parametrize(("answer", "reward"), [(r"so \boxed{0.5}", 1.0), (r"\boxed{2}", 0.0), ("a half", 0.0)])
async def test_a_benchmark(world: World, answer: str, reward: float) -> None:
    """A benchmark's package judges here as elsewhere: equal expressions are right."""
    result = await world.play("math500", 0, lambda prompt: answer)
    assert (result.outcome, result.reward, result.metrics["answered"]) == (
        Outcome.OK,
        reward,
        float("box" in answer),
    ), result.message
    assert_exact(result.samples[0], world.engine.exchanges)


async def test_sorting_well(world: World) -> None:
    """Every turn right: reward 1, one exact sample of all turns."""
    for task, problem in enumerate(problems("eval", 8)):
        result = await world.play("alphabet-sort", task, _sorter(problem))
        assert result.ok, result.message
        assert result.task_id == f"alphabet-sort/{problem.id}"
        assert (result.reward, result.metrics) == (1.0, {"turns_right": 1.0})
        assert result.num_turns == len(problem.turns) == len(world.engine.exchanges)
        assert _asked(world.engine.tokenizer.decode(world.engine.exchanges[-1].prompt)) == problem.message(-1 + result.num_turns)  # fmt: skip
        (sample,) = result.samples
        assert_exact(sample, world.engine.exchanges)


async def test_solving_wordle(world: World) -> None:
    """A wrong guess, then the word: solved with three of four replies' worth of speed; the game ends there."""
    secret = words("eval")[2]
    result = await world.play("wordle", 2, lambda prompt: f"<guess>{secret if _turn(prompt) else 'zzzzz'}</guess>")
    assert result.ok, result.message
    assert result.task_id == f"wordle/{secret}"
    assert result.rewards == pytest.approx({"solved": 1.0, "speed": 0.5 * 0.75, "partial": 0.5, "format": 0.2})
    assert (result.reward, result.num_turns, result.metrics) == (pytest.approx(2.075), 2, {"guesses": 2.0})
    assert _asked(world.engine.tokenizer.decode(world.engine.exchanges[1].prompt)) == "z z z z z\nX X X X X\n3 left."
    assert_exact(result.samples[0], world.engine.exchanges)


def _bettor(prompt: str) -> str:
    return f"<move>{'call' if 'call?' in _asked(prompt) else 'bet'}</move>"


@pytest.mark.parametrize("task", [0, 7])  # either player first; all games: tests/unit/bundled/test_kuhn_poker.py
async def test_bet_and_call(world: World, task: int) -> None:
    """Each seat gets its own two chips, won or lost, with its own tokens, whichever acts first."""
    result = await world.play("kuhn-poker", task, _bettor)
    assert result.ok, result.message
    deal = DEALS[task]
    assert result.task_id == f"kuhn-poker/{deal.id}"
    won = 2.0 if "JQK".index(deal.cards[0]) > "JQK".index(deal.cards[1]) else -2.0
    assert {part.agent: part.rewards for part in result.parts} == {
        "player_1": {"chips": won},
        "player_2": {"chips": -won},
    }
    first, second = world.engine.exchanges
    samples = {sample.agent: sample for sample in result.samples}
    opener, other = ("player_1", "player_2") if deal.first == 0 else ("player_2", "player_1")
    assert_exact(samples[opener], [first])
    assert_exact(samples[other], [second])
    assert (samples["player_1"].reward, samples["player_2"].reward) == (won, -won)
    text = world.engine.tokenizer.decode(first.prompt)
    assert f"Your card is {deal.cards[deal.first]}. You act first." in text  # and nothing of the other's


async def test_check_bet_fold(world: World) -> None:
    """The long game: the opener speaks twice in one conversation and loses its ante."""

    def reply(prompt: str) -> str:
        if "fold or call?" in _asked(prompt):
            return "<move>fold</move>"
        return f"<move>{'check' if 'act first' in prompt else 'bet'}</move>"

    result = await world.play("kuhn-poker", 11, reply)  # KQ-2
    assert {part.agent: (part.reward, part.num_turns) for part in result.parts} == {
        "player_1": (1.0, 1),
        "player_2": (-1.0, 2),
    }
    one, two, three = world.engine.exchanges
    samples = {sample.agent: sample for sample in result.samples}
    assert_exact(samples["player_2"], [one, three])
    assert_exact(samples["player_1"], [two])


async def test_illegal_opening(world: World) -> None:
    """Who opens with nonsense loses too. The other never spoke: there is nothing of it to train on."""
    result = await world.play("kuhn-poker", 1, lambda prompt: "<move>fold</move>")  # JQ-2
    assert result.ok, result.message
    (sample,) = result.samples
    assert (sample.agent, result.reward, result.rewards) == ("player_2", -2.0, {"chips": -2.0})


def _call(**arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'calculate', 'arguments': arguments})}\n</tool_call>"


async def test_calculating(world: World) -> None:
    """The tool's definition reaches the prompt, its result the next one; the right number earns everything; one exact sample."""
    problem = word_problems("train", 4)[3]
    told: list[str] = []

    def reply(prompt: str) -> str:
        told.append(_asked(prompt))
        return f"<answer>{problem.answer}</answer>" if _turn(prompt) else _call(expression=problem.expression)

    result = await world.play("calculator", 3, reply)
    assert result.ok, result.message
    assert result.task_id == f"calculator/{problem.id}"
    assert told == [problem.text, f"\n<tool_response>\n{problem.answer}\n</tool_response>".lstrip()]
    assert '"name": "calculate"' in world.engine.tokenizer.decode(world.engine.exchanges[0].prompt)
    assert result.rewards == pytest.approx({"correct": 1.0, "format": 0.1})
    assert (result.metrics["tool_calls"], result.metrics["refused_expressions"]) == (1.0, 0.0)
    (sample,) = result.samples
    assert_exact(sample, world.engine.exchanges)
