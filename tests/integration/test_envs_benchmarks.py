"""The packages of benchmarks behind our worker's adapter: a scripted engine answers, and the reward comes back with the tokens."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from fake_engine import FakeEngine, make_tokenizer

from prime_rl.envs.protocol import EpisodeResult, Outcome, Setup

MATH = {"problem": "Half?", "answer": r"\frac{1}{2}", "unique_id": "one"}
CODE = {
    "question_id": "double", "question_content": "Double it.", "starter_code": "", "difficulty": "easy", "contest_date": "2024-09-01T00:00:00",
    "public_test_cases": json.dumps([{"input": "2", "output": "4", "testtype": "stdin"}]), "private_test_cases": "[]", "metadata": "{}",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("model"))


async def episode(id: str, row: dict[str, Any], reply: str, model: Path, place: Path) -> EpisodeResult:
    from prime_rl.envs.verifiers_v1 import VerifiersEnv

    data = place / "rows.jsonl"
    data.write_text(json.dumps(row) + "\n")
    env = VerifiersEnv(Setup(id, id, {"data": str(data), "instructions": ""}, str(model), "auto", 4, "info"))
    async with FakeEngine(model, reply=lambda _: reply) as engine, env:
        return await env.run(0, {"max_tokens": 200}, 0, "e", engine.base_url)


@pytest.mark.parametrize(
    ("id", "row", "reply", "reward", "answered"),
    [
        ("math500", MATH, r"\boxed{0.5}", 1.0, 1.0),
        ("math500", MATH, r"\boxed{2}", 0.0, 1.0),
        ("math500", MATH, "half", 0.0, 0.0),
        ("livecodebench", CODE, "```python\nprint(2 * int(input()))\n```", 1.0, 1.0),
        ("livecodebench", CODE, "```python\nimport os; os.fork(); print(4)\n```", 0.0, 1.0),
    ],
)
async def test_rewards(
    id: str, row: dict[str, Any], reply: str, reward: float, answered: float, model: Path, tmp_path: Path
) -> None:
    """Contract: what the reply is worth is the episode's reward."""
    result = await episode(id, row, reply, model, tmp_path)
    assert result.outcome is Outcome.OK, result.message
    assert result.reward == reward
    assert result.metrics["answered"] == answered
