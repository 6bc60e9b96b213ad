"""Versions of several ranks that are told by their changes, or sent: what needs whole tensors, of which each rank has some rows."""

import json
from pathlib import Path

import pytest

from conftest import make_tiny_model
from support.processes import REPOSITORY, Command

SECONDS = 300.0


@pytest.mark.parametrize("kind", [pytest.param("filesystem-delta", marks=pytest.mark.slow), "process-group"])
def test_ranks_put_their_rows_together(kind: str, tmp_path: Path) -> None:
    """Contract: of three ranks (with three experts), and of two replicas of one rank each, servers get bit for bit what the ranks would have written;
    after a rank has lost what it held, too; and what must last is written in full."""
    model = make_tiny_model(tmp_path / "model", experts=3)
    runs = [
        {"ranks": ranks, "kind": kind, "model": str(model), "root": str(tmp_path / str(ranks)), "replicas": replicas}
        for ranks, replicas in ((3, 1), (2, 2))
    ]
    env = {"PYTHONPATH": str(REPOSITORY / "tests")}
    with Command("ranks", json.dumps(runs), log=tmp_path / "log", env=env, module="support.rank_versions") as command:
        command.succeed(SECONDS)
