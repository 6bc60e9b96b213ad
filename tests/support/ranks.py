"""Ranks of a trainer, forked from a process that has imported everything: `python -m support.ranks ENTRYPOINT RUNS`.

RUNS is JSON, a list of (ranks, the command line of `trainer` or `sft`); runs follow one another, and a failure ends it.
"""

import importlib
import json
import sys
from pathlib import Path

from support.forking import fork_ranks
from support.processes import REPOSITORY, Command

SECONDS = 300.0


def train_on_ranks(runs: list[tuple[int, list[str]]], log: Path, entrypoint: str = "trainer") -> None:
    """Do these runs, one after the other; each must succeed."""
    env = {"PYTHONPATH": str(REPOSITORY / "tests")}
    with Command("ranks", entrypoint, json.dumps(runs), log=log, env=env, module="support.ranks") as command:
        command.succeed(SECONDS)


if __name__ == "__main__":
    main = importlib.import_module(f"prime_rl.entrypoints.{sys.argv[1]}").main
    importlib.import_module(f"prime_rl.trainer.{'rl' if sys.argv[1] == 'trainer' else 'sft'}.train")
    for count, given in json.loads(sys.argv[2]):
        sys.argv[1:] = given
        fork_ranks(count, main, SECONDS)
