#!/usr/bin/env python3
"""Say whether what runs in this container is well, by exit status 0 or 1: the images' HEALTHCHECK, a liveness probe.

    container_health.py [RUN]     # without RUN: PRIME_OUTPUT_DIR, and the directories in it

Trainer, orchestrator and `rl` are judged by status/*.json, as `rl doctor` does, but those of this container alone: a
trainer is well while it waits for a server that is down. A server that is ready has to answer on /health.
"""

import os
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from prime_rl.config.inference import SERVER, ServerConfig
from prime_rl.launcher import rundir
from prime_rl.launcher.supervise import RestartPolicy, stall_reason
from prime_rl.monitor.status import ProcessStatus, read_status
from prime_rl.processes import is_alive, this_host

ANSWER_SECONDS = 10.0


def own_processes(run: Path) -> Iterator[tuple[str, str | None]]:
    """Yield each process of this container that reports in a run directory, and what is wrong with it."""
    for name, status in read_status(run).items():
        if status.host == this_host() and status.outcome is None:
            yield name, fault(run, name, status)


def fault(run: Path, name: str, status: ProcessStatus) -> str | None:
    if not is_alive(status.id):
        return "died without a last word"
    if name == rundir.LAUNCHER:  # it watches the others, and makes no progress of its own
        return None
    serves = name.startswith(SERVER)
    if (stall := stall_reason(name, status, RestartPolicy(), time.time(), 0.0, serves)) is not None or not serves:
        return stall
    return None if status.ready is None else no_answer(run / "configs" / f"{name}.toml")


def no_answer(path: Path) -> str | None:
    """Return why the server with this resolved config does not answer; None where it does, or is headless."""
    config = tomllib.loads(path.read_text())
    if config.get("headless"):
        return None
    server = {key: value for key, value in config["server"].items() if value != "None"}
    url = f"{ServerConfig(**server).url}/health"
    try:
        urllib.request.urlopen(url, timeout=ANSWER_SECONDS).close()
    except OSError as error:
        return f"{url}: {error}"
    return None


def main(arguments: list[str]) -> str | None:
    """Return what is wrong; None where all is well."""
    directory = Path(arguments[0] if arguments else os.environ.get("PRIME_OUTPUT_DIR", "outputs"))
    runs = [directory] if arguments else [directory, *(path.parent for path in directory.glob("*/status"))]
    found = [(name, problem) for run in runs for name, problem in own_processes(run)]
    if not found:
        return f"no process of this container reports in {directory}"
    return "; ".join(f"{name}: {problem}" for name, problem in found if problem) or None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
