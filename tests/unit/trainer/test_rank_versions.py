"""Versions of several ranks, of which each has some rows of every tensor, and none shares a host with another."""

import json
from pathlib import Path

from conftest import make_tiny_model
from support.processes import REPOSITORY, Command

SECONDS = 300.0


def test_what_servers_get_is_what_the_ranks_trained(tmp_path: Path) -> None:
    """Contract: of three ranks (with three experts), and of two replicas of two ranks each, on as many hosts as ranks, servers get bit for bit the rows
    of all; what must outlive the processes is written in full; a tmpfs, which is one host's, is refused."""
    model = make_tiny_model(tmp_path / "model", experts=3)
    runs = [
        {
            "ranks": ranks,
            "kind": kind,
            "model": str(model),
            "root": str(tmp_path / f"{kind}-{ranks}"),
            "replicas": replicas,
        }
        for kind in ("filesystem", "memory")
        for ranks, replicas in ((3, 1), (4, 2))
    ]
    env = {"PYTHONPATH": str(REPOSITORY / "tests")}
    with Command("ranks", json.dumps(runs), log=tmp_path / "log", env=env, module="support.rank_versions") as command:
        command.succeed(SECONDS)
