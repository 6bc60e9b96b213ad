"""Mains of the commands: parse, check, then call."""

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

from prime_rl import faults, processes
from prime_rl.config import OrchestratorConfig, SFTConfig, TrainerConfig, load, write_toml
from prime_rl.config.base import BaseConfig
from prime_rl.errors import UserError
from prime_rl.launcher.rundir import as_benchmark, cleaned
from prime_rl.monitor import Status, log
from prime_rl.monitor.monitor import metrics_path
from prime_rl.transport.settings import Party, check_and_commit, compare, dry_path

_TRAINERS = ("trainer", "sft")
_Config = TypeVar("_Config", bound=BaseConfig)
_Run = TypeVar("_Run", TrainerConfig, OrchestratorConfig, SFTConfig)


def run_command(kind: type[_Config], name: str, run: Callable[[_Config], object], prog: str = "") -> None:
    """Parse the command line and run. An error that says what to do is one line and status 1, an interruption 130."""
    if name in _TRAINERS:
        # Before torch is imported. A server and environments need the other half; threads that wait for cores are slow.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2)))
    faults.arm("trainer" if name in _TRAINERS else name)
    processes.watch()
    config, rank = load(kind, prog=prog or name), rank_of(name)
    log.setup(config.log.level, f"{name}.{rank}" if rank else name)
    try:
        run(config)
    except UserError as error:
        log.fail(error) if rank == 0 else sys.exit(1)  # every rank fails alike: one of them says why
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)


def rank_of(name: str) -> int:
    """The rank of this process under torchrun; 0 by itself, and of a command that does not train."""
    return int(os.environ.get("RANK", 0)) if name in _TRAINERS else 0


def begin(config: _Run, name: str, plan: Callable[[_Run], list[str]]) -> _Run | None:
    """Do as --bench, --dry-run and --clean say, and agree with the other processes of the run. Return the configuration
    to run with; None after a dry run, which prints the `plan`."""
    config = as_benchmark(config) if config.bench else config
    if rank_of(name) > 0:
        return None if config.dry_run else config
    if config.dry_run:
        show(config, name, *plan(config))
        return None
    party: Party = "trainer" if isinstance(config, TrainerConfig) else "orchestrator"
    if shares := not isinstance(config, SFTConfig):
        compare(config, party, gone=False)  # before anything is removed
    with cleaned(config.output_dir, name) if config.clean else nullcontext():
        if shares:
            check_and_commit(config, party)
        elif config.clean:
            Status(config.output_dir, name).phase("starting")  # for others that clean
    if config.bench:
        metrics_path(config.output_dir, name).unlink(missing_ok=True)  # of an earlier benchmark
    return config


def show(config: BaseConfig, name: str, *plan: str) -> None:
    """Print what a dry run would do, and write the resolved config."""
    path = dry_path(config.output_dir, name)
    write_toml(config, path)
    print(*filter(None, plan), f"config: {path}", sep="\n")
