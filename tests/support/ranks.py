"""The trainer's ranks, forked from one process that has imported everything already: `python -m support.ranks RUNS`.

RUNS is JSON, a list of (ranks, the trainer's command line); one run follows the other, and the first that fails ends it.
"""

import json
import sys
from pathlib import Path

from prime_rl.entrypoints import trainer
from prime_rl.trainer.rl import train as imported  # noqa: F401
from support.forking import fork_ranks
from support.processes import REPOSITORY, Command

SECONDS = 300.0


def train_on_ranks(runs: list[tuple[int, list[str]]], log: Path) -> None:
    """Do these runs, one after the other; each must succeed."""
    env = {"PYTHONPATH": str(REPOSITORY / "tests")}
    with Command("ranks", json.dumps(runs), log=log, env=env, module="support.ranks") as command:
        command.succeed(SECONDS)


if __name__ == "__main__":
    for count, given in json.loads(sys.argv[1]):
        sys.argv[1:] = given
        fork_ranks(count, trainer.main, SECONDS)
