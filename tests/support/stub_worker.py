"""A real environment worker around a scripted environment, which needs no model and is ready in a moment; what it does
wrong is told by files.

`stub_python(directory)` makes an "interpreter" for `EnvConfig.python` that runs it. `tell(directory, task, deed)` has
that task's next episode do the deed, once; `args = {"chance": …}` has a share of all do one, by a seeded draw.
"""

import asyncio
import contextlib
import ctypes
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any, Self

import prime_rl.envs.worker as worker
from prime_rl.envs.ids import Broken
from prime_rl.envs.protocol import EpisodeResult, Outcome, Run, SampleTokens, Setup

TASKS = 8
_serving: list[worker.WorkerServer] = []


class StubEnv:
    """Every episode takes `seconds` (the last task's `slow`) and blocks for `blocks`; its name draws its reward."""

    bounded = True

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.task_ids = [f"{setup.name}/{number}" for number in range(TASKS)]
        self.directory = Path(setup.args.get("directory", "/nowhere"))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def run(self, run: Run) -> EpisodeResult:
        draw = random.Random(f"{self.setup.name}/{run.episode_id}/{self.setup.args.get('seed', 0)}")
        usual = self.setup.args.get("seconds", 0.01)
        await asyncio.sleep(self.setup.args.get("slow", usual) if run.task_index == TASKS - 1 else usual)
        time.sleep(self.setup.args.get("blocks", 0.0))
        result = self.result(run.task_index, run.episode_id, draw)
        deed = self.deed(run.task_index, draw)
        return result if deed is None else await do(deed, result, self.directory)

    def deed(self, task: int, draw: random.Random) -> str | None:
        with contextlib.suppress(OSError):
            told = self.directory / f"{self.setup.name}.{task}"
            deed = told.read_text()
            told.unlink()
            return deed
        if draw.random() < self.setup.args.get("chance", 0.0):
            return draw.choice(self.setup.args["deeds"])
        return None

    def result(self, task: int, episode_id: str, draw: random.Random) -> EpisodeResult:
        tokens = SampleTokens(
            array("i", [1, draw.randrange(1000)]), bytes([False, True]), array("f", [0.0, -draw.random()]), 1, 0.0
        )
        return EpisodeResult(
            episode_id, self.setup.name, self.task_ids[task], Outcome.OK, reward=draw.random(), samples=[tokens],
            num_turns=1,
        )  # fmt: skip


def tell(directory: Path, env: str, deed: str, task: int = 0) -> None:
    """Have the next episode of a task do it."""
    (directory / f"{env}.{task}").write_text(deed)


async def do(deed: str, result: EpisodeResult, directory: Path) -> Any:
    """One thing that goes wrong."""
    match deed:
        case "kill" | "stop":
            os.kill(os.getpid(), signal.SIGKILL if deed == "kill" else signal.SIGSTOP)
        case "exit":
            print("about to exit", flush=True)
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "sys-exit":
            await asyncio.gather(_quit())
        case "loop":
            await asyncio.gather(_loop())
        case "hold":  # the interpreter's lock, as an extension's endless loop does
            ctypes.PyDLL(None).sleep(ctypes.c_uint(100_000))
        case "raise" | "broken":
            raise RuntimeError("scripted") if deed == "raise" else Broken("scripted")
        case "stray":
            await _stray(directory)
        case "bytes":
            await _serving[0]._socket.send(b"\xc1\xff" * 100)
        case "giant":
            result.message = "x" * ((worker.MOST_BYTES) + 1)
        case "unsendable":
            result.metrics = {"object": object()}
    return result


async def _quit() -> None:
    sys.exit(4)


async def _loop() -> None:
    begin = time.monotonic()
    while time.monotonic() - begin < 100_000:
        with contextlib.suppress(Exception):
            hashlib.sha256(b"x").digest()


async def _stray(directory: Path) -> None:
    """A daemon: in a session of its own, its parent gone, its number in a file."""
    told = directory / "stray"
    script = (
        "import os,sys,time; os.setsid(); os.fork() and os._exit(0);"
        "open(sys.argv[1] + '.new','w').write(str(os.getpid()));"
        "os.replace(sys.argv[1] + '.new', sys.argv[1]); time.sleep(1000)"
    )
    told.unlink(missing_ok=True)
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", script, str(told)], check=True, timeout=60)
    async with asyncio.timeout(60):
        while not told.exists():
            await asyncio.sleep(0.02)


def stub_python(directory: Path) -> Path:
    """An "interpreter" whose workers host a `StubEnv`."""
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nshift 3\nexec "{sys.executable}" {__file__} "$@"\n')
    python.chmod(0o755)
    return python


async def _serve(self: worker.WorkerServer, setup: Setup, serve: Any = worker.WorkerServer.serve) -> None:
    _serving.append(self)  # the deeds above find it
    worker.HANG_SECONDS = setup.args.get("hang", worker.HANG_SECONDS)
    await serve(self, setup)


if __name__ == "__main__":
    worker.load = StubEnv
    worker.WorkerServer.serve = _serve
    worker.main()
