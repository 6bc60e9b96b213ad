"""The trainer's ranks, forked from one process that has imported everything already: `python -m support.ranks RUNS`.

RUNS is JSON, a list of (ranks, the trainer's command line); one run follows the other, and the first that fails ends it.
"""

import json
import multiprocessing
import os
import sys
from pathlib import Path

from conftest import free_port
from prime_rl.entrypoints import trainer
from prime_rl.trainer.rl import train as imported  # noqa: F401
from support.processes import REPOSITORY, Command

SECONDS = 300.0


def train_on_ranks(runs: list[tuple[int, list[str]]], log: Path) -> None:
    """Do these runs, one after the other; each must succeed."""
    env = {"PYTHONPATH": str(REPOSITORY / "tests")}
    with Command("ranks", json.dumps(runs), log=log, env=env, module="support.ranks") as command:
        command.succeed(SECONDS)


def _run(ranks: int, arguments: list[str]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    sys.argv[1:] = arguments
    processes = []
    for rank in range(ranks):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(multiprocessing.get_context("fork").Process(target=trainer.main, daemon=True))
        processes[-1].start()
    for process in processes:
        process.join(SECONDS)
        if process.exitcode != 0:
            raise SystemExit(f"a rank of {ranks} ended with {process.exitcode}")


if __name__ == "__main__":
    for count, given in json.loads(sys.argv[1]):
        _run(count, given)
