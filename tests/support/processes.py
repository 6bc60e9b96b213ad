"""Start the project's own commands as a user would, in process groups that die with the test."""

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from prime_rl import processes

REPOSITORY = Path(__file__).parents[2]


def inherited() -> dict[str, str]:
    """This process's environment. pytest changes it in its own thread, which a copy in another may stumble over."""
    return {name: value for name in list(os.environ) if (value := os.environ.get(name)) is not None}


class Command:
    """One running `python -m prime_rl.entrypoints.<name> …`; its output goes to `log`."""

    def __init__(
        self,
        name: str,
        *arguments: object,
        log: Path,
        env: dict[str, str] | None = None,
        module: str | None = None,
        cwd: Path = REPOSITORY,
    ) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module or f"prime_rl.entrypoints.{name}", *map(str, arguments)],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env={**inherited(), "OMP_NUM_THREADS": "1", **processes.variable(), **(env or {})},
                start_new_session=True,
            )

    def wait(self, timeout: float) -> int:
        """The exit status; a process that is not done in time fails the test with its last lines."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{self.name} did not end within {timeout:.0f} s:\n{self.tail()}") from error

    def succeed(self, timeout: float) -> None:
        """Wait for exit status 0."""
        status = self.wait(timeout)
        assert status == 0, f"{self.name} exited with {status}:\n{self.tail()}"

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def close(self) -> None:
        """Kill the whole group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def torchrun(ranks: int, script: Path, config: Path, log: Path, env: dict[str, str] | None = None) -> Command:
    """`script @ config` on so many ranks of this host."""
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    arguments = ("--nproc-per-node", ranks, *rendezvous, script, "@", config)
    return Command("torchrun", *arguments, log=log, module="torch.distributed.run", env=env)


def until(condition: Callable[[], object], what: str, *commands: Command, seconds: float = 120.0) -> None:
    """Poll until it holds. Fail with the last lines of `commands` after a deadline, or if one of them ends before."""
    deadline = time.monotonic() + seconds
    while not condition():
        ended = [command.name for command in commands if command.process.poll() is not None]
        if ended or time.monotonic() > deadline:
            lines = [f"no {what} within {seconds:.0f} s (ended: {ended})", *(command.tail(15) for command in commands)]
            raise AssertionError("\n".join(lines))
        time.sleep(0.05)


def wait_for_all(commands: Sequence[Command], timeout: float) -> None:
    """Every command exits with 0 within `timeout` seconds; the first that fails fails the test at once."""
    deadline, statuses = time.monotonic() + timeout, [command.process.poll() for command in commands]
    while None in statuses and not any(statuses) and time.monotonic() < deadline:
        time.sleep(0.1)
        statuses = [command.process.poll() for command in commands]
    for command in sorted(commands, key=lambda command: not command.process.poll()):  # first one that failed
        command.succeed(0)


def run_forked(
    name: str, *arguments: object, cwd: Path = REPOSITORY, env: Mapping[str, str] | None = None, seconds: float = 120.0
) -> "subprocess.CompletedProcess[str]":
    """Run one of our commands in a fork of this process, which has done the imports: most of a short run's time."""
    words = [name, *map(str, arguments)]
    with tempfile.TemporaryDirectory() as directory:
        outputs = [Path(directory) / stream for stream in ("stdout", "stderr")]
        fork = multiprocessing.get_context("fork")
        child = fork.Process(target=_call, args=(words, inherited() if env is None else env, cwd, outputs))
        child.start()
        child.join(seconds)
        assert child.exitcode is not None, f"{name} did not end within {seconds:.0f} s"
        return subprocess.CompletedProcess(words, child.exitcode, *(output.read_text() for output in outputs))


def _call(words: list[str], env: Mapping[str, str], cwd: Path, outputs: list[Path]) -> None:
    for number, output in enumerate(outputs, 1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = words
    importlib.import_module(f"prime_rl.entrypoints.{words[0]}").main()
