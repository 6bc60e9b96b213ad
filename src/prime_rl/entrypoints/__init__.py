"""Mains of the commands: parse, check, then call."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from prime_rl import lifeline
from prime_rl.config import load, write_toml
from prime_rl.config.base import BaseConfig
from prime_rl.errors import UserError
from prime_rl.monitor import log
from prime_rl.transport.settings import dry_path

_Config = TypeVar("_Config", bound=BaseConfig)


def run_command(
    kind: type[_Config], name: str, run: Callable[[_Config], None], errors: type[Exception] = UserError
) -> None:
    """Parse the command line and run. One of `errors` is one line and status 1, an interruption status 130."""
    _run(kind, name, lambda config, _: run(config), 0, errors)


def run_trainer(kind: type[_Config], name: str, run: Callable[[_Config, int], None]) -> None:
    """As `run_command`, in one process or one rank of torchrun."""
    # Before torch is imported. A server and environments need the other half, and threads that wait for cores are slow.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2)))
    _run(kind, name, run, int(os.environ.get("RANK", 0)), UserError)


def _run(
    kind: type[_Config], name: str, run: Callable[[_Config, int], None], rank: int, errors: type[Exception]
) -> None:
    lifeline.watch()
    config = load(kind, prog=name)
    log.setup(config.log.level, f"{name}.{rank}" if rank else name)
    try:
        run(config, rank)
    except (errors, UserError) as error:
        log.fail(error) if rank == 0 else sys.exit(1)  # every rank fails alike: one of them says why
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)


def show(config: BaseConfig, name: str, *lines: str) -> None:
    """Print what a dry run would do, and write the resolved config."""
    path: Path = dry_path(config.output_dir, name)
    write_toml(config, path)
    print(*lines, f"config: {path}", sep="\n")
