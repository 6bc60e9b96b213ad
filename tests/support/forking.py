"""Ranks forked from a process that has imported everything already; for GPUs spawned: CUDA does not survive a fork.

That process is `python -m support.forking MODULE:FUNCTION RUNS`: RUNS is JSON, a list of the arguments of the function,
and `ranks`. Runs follow one another, and a failure ends it.
"""

import importlib
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from conftest import free_port
from support.processes import REPOSITORY, Command

SECONDS = 300.0


def on_ranks(function: str, runs: Sequence[dict[str, Any]], log: Path, **env: str) -> None:
    """Do these runs of `module:function`, one after the other; each must succeed."""
    path = f"{REPOSITORY / 'tests'}:{os.environ.get('PYTHONPATH', '')}"
    arguments, variables = (function, json.dumps(runs)), {"PYTHONPATH": path, **env}
    with Command("ranks", *arguments, log=log, env=variables, module="support.forking") as command:
        command.succeed(SECONDS)


def train(arguments: Sequence[str], entrypoint: str = "trainer") -> None:
    """A rank of `trainer` or `sft`, by its command line."""
    sys.argv[1:] = arguments
    importlib.import_module(f"prime_rl.entrypoints.{entrypoint}").main()


def fork_ranks(ranks: int, target: Callable[..., object], **arguments: Any) -> None:
    """Run `target` on so many ranks of one host, with torchrun's variables. End this process where one fails."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    # What is imported may have looked: torchao does.
    context = multiprocessing.get_context("spawn" if arguments.get("device") == "cuda" else "fork")
    processes = []
    for rank in range(ranks):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(context.Process(target=target, kwargs=arguments, daemon=True))
        processes[-1].start()
    for process in processes:
        process.join(SECONDS)
        if process.exitcode != 0:
            raise SystemExit(f"a rank of {ranks} ended with {process.exitcode}: {arguments}")


if __name__ == "__main__":
    for name in ("rl", "sft"):
        importlib.import_module(f"prime_rl.trainer.{name}.train")
    module, _, function = sys.argv[1].partition(":")
    for run in json.loads(sys.argv[2]):
        fork_ranks(run.pop("ranks"), getattr(importlib.import_module(module), function), **run)
