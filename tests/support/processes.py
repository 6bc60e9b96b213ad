"""Start the project's own commands as a user would, in process groups that die with the test."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from prime_rl.lifeline import Lifeline

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
        self._line = Lifeline()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module or f"prime_rl.entrypoints.{name}", *map(str, arguments)],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env={**inherited(), "OMP_NUM_THREADS": "1", **self._line.env, **(env or {})},
                pass_fds=self._line.pass_fds,
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.close()  # kills the whole group
        self.process.wait(30)


def wait_for_all(commands: Sequence[Command], timeout: float) -> None:
    """Every command exits with 0 within `timeout` seconds; the first that fails fails the test at once."""
    deadline = time.monotonic() + timeout
    while any(command.process.poll() is None for command in commands):
        failed = [command for command in commands if command.process.poll() not in (None, 0)]
        late = (
            [command for command in commands if command.process.poll() is None] if time.monotonic() > deadline else []
        )
        for command in failed + late:
            raise AssertionError(f"{command.name} exited with {command.process.poll()}:\n{command.tail()}")
        time.sleep(0.1)
    for command in commands:
        command.succeed(0)
