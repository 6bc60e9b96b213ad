"""docs/guides/algorithms.md adds an algorithm: that very text runs."""

import asyncio
import re
import tomllib
from pathlib import Path

import pytest

from conftest import REPOSITORY
from prime_rl.transport.rollouts import open_batch
from support.scripted import World, has_batch, until


def block(name: str) -> str:
    """The code after `<!-- example: name -->`."""
    text = (REPOSITORY / "docs" / "guides" / "algorithms.md").read_text()
    (found,) = re.findall(rf"<!-- example: {name} -->\n```\w+\n(.*?)```", text, re.DOTALL)
    return found


async def test_the_worked_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file and one line: the orchestrator trains on what the function says, in three groups of two attempts each."""
    monkeypatch.chdir(tmp_path)
    Path("ranks.py").write_text(block("file"))
    (tmp_path / "run").mkdir()
    world = World(tmp_path / "run", **tomllib.loads(block("line")))
    world.trainer.live(0, 0)
    world.trainer.commit(0)
    run = asyncio.create_task(world.orchestrator().run())
    for version in (1, 2, 3):
        await until(has_batch(world, version - 1), run=run)
        world.trainer.commit(version)
    await run
    for step in range(3):
        batch = open_batch(world.directory / "rollouts" / f"step_{step}")
        rows = sorted(batch.rows(range(len(batch))), key=lambda row: row.reward)
        assert [float(row.advantages[-1]) for row in rows] == [-0.5, 0.5]
