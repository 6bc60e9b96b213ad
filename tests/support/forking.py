"""Ranks forked from a process that has imported everything already; for GPUs spawned: CUDA does not survive a fork."""

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from conftest import free_port


def fork_ranks(ranks: int, target: Callable[..., object], seconds: float, **arguments: Any) -> None:
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
        process.join(seconds)
        if process.exitcode != 0:
            raise SystemExit(f"a rank of {ranks} ended with {process.exitcode}: {arguments}")
