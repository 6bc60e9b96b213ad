"""Run jobs in forked processes with time limits: one that fails, hangs or runs out of memory takes no other with it.

Imports are paid once, by the process that forks; it must not touch the GPU itself, since CUDA does not survive a fork.
Where an import did (transformers imports torchao if installed, which asks for the GPU), jobs are spawned and import for
themselves.
"""

import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Outcome:
    """What rank 0 returned, or why there is nothing; and how long it took."""

    value: Any
    error: str | None
    seconds: float


def run_forked(job: Callable[[], Any], *, limit: float, log: Path, ranks: int = 1) -> Outcome:
    """Run `job` in `ranks` processes, with torchrun's variables if there are several. Output is appended to `log`.

    Args:
        job: It and its value must pickle. Rank 0's counts.
        limit: Seconds after which all of them are killed, with everything that they have started.
    """
    started = time.monotonic()
    port = _free_port()
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")
    receiver, sender = context.Pipe(duplex=False)
    environments = [_rank_environment(rank, ranks, port) if ranks > 1 else {} for rank in range(ranks)]
    processes: list[BaseProcess] = [
        context.Process(target=_run, args=(job, sender if rank == 0 else None, log, environment))
        for rank, environment in enumerate(environments)
    ]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: none of them holds anything
            for process in processes:
                process.start()
        sender.close()  # or the end of rank 0 would not be seen
        value, error = _await(receiver, processes, limit)
    finally:
        for process in processes:
            _end(process)
    return Outcome(value, error, time.monotonic() - started)


def _await(receiver: Connection, processes: list[BaseProcess], limit: float) -> tuple[Any, str | None]:
    deadline = time.monotonic() + limit
    waiting: dict[Any, BaseProcess | None] = {receiver: None, **{process.sentinel: process for process in processes}}
    while True:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if receiver in ready:
            try:
                return receiver.recv()
            except EOFError:
                processes[0].join(_GRACE_SECONDS)
                return None, f"it ended without a word, exit code {processes[0].exitcode}"
        if not ready:
            return None, f"it took longer than {limit:.0f} s"
        for sentinel in ready:
            ended = waiting.pop(sentinel)
            if ended is not None and ended.exitcode:
                return None, f"a rank ended with exit code {ended.exitcode}"


def _run(job: Callable[[], Any], sender: Connection | None, log: Path, environment: dict[str, str]) -> None:
    os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.environ.update(environment)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    status = 0
    try:
        result: tuple[Any, str | None] = (job(), None)
    except BaseException as error:  # noqa: BLE001  whatever it is, it is the outcome of this job
        traceback.print_exc()
        result, status = (None, f"{type(error).__name__}: {' '.join(str(error).split())[:1500]}"), 1
    if sender is not None:
        sender.send(result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads and process groups that are left need not be waited for


def _end(process: BaseProcess) -> None:
    """Kill what is left of a process and of its group."""
    if process.pid is None:
        return
    process.join(0.2)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # nothing is left
        return
    finally:
        process.join(_GRACE_SECONDS)


def _rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return dict(zip(names, map(str, (rank, rank, ranks, ranks, "127.0.0.1", port)), strict=True))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
