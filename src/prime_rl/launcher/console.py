"""What the person at the terminal sees: start-up phases, a line per step, a summary. Plain lines when it is no terminal."""

import errno
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from prime_rl.launcher.progress import Progress, minutes
from prime_rl.monitor import read_status
from prime_rl.monitor.status import ProcessStatus, phase_name
from prime_rl.processes import memory_bytes

if TYPE_CHECKING:
    from rich.live import Live

_LOOK_SECONDS = 0.25
_MEMORY_SECONDS = 5.0
_PATIENCE_SECONDS = 10.0  # a wait shorter than this is normal and not worth a line
_PATIENCE_WHILE_STEPPING_SECONDS = 60.0


class Console:
    """Prints what metrics and status files say. `say` and `tick` are the supervisor's callbacks."""

    def __init__(self, output_dir: Path, max_steps: int | None, apart: Mapping[str, int] | None = None) -> None:
        self.progress = Progress(output_dir, max_steps, apart)
        self.peak_memory = 0  # bytes, of this process and all below it
        self._output_dir = output_dir
        self._began = time.monotonic()
        self._next_look = 0.0
        self._next_memory = 0.0
        self._phases: dict[str, str] = {}
        self._waits_told: set[tuple[str, str, float]] = set()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live("", auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} {text}"
        with self._terminal_may_go():
            if self._live is None:
                print(line, flush=True)
            else:
                self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def tick(self) -> None:
        """Call it as often as you like: it looks at the files four times a second."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            self.look()
        if now >= self._next_memory:
            self._next_memory = now + _MEMORY_SECONDS
            self.peak_memory = max(self.peak_memory, memory_bytes(os.getpid()))

    def look(self) -> None:
        """Tell what is new."""
        statuses = {
            name: status for name, status in read_status(self._output_dir).items() if "." not in name
        }  # no ranks
        for status in statuses.values():
            self._tell_phase(status)
            self._tell_wait(status)
        for line in self.progress.lines():
            self.say(line)
        if self._live is not None:
            from rich.text import Text

            text = Text(self._status_line(statuses), style="dim", overflow="ellipsis", no_wrap=True)
            with self._terminal_may_go():
                self._live.update(text, refresh=True)

    @contextmanager
    def _terminal_may_go(self) -> Iterator[None]:
        """A closed terminal or pipe (`rl … | head`) must not end the run: what is left to say is dropped."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            self._live = None
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)

    def _tell_phase(self, status: ProcessStatus) -> None:
        """Print the phases of a process until the first step; from then on there is a line for each step."""
        name = phase_name(status.phase)
        if self._phases.get(status.process) == name:
            return
        self._phases[status.process] = name
        if not self.progress.begun and name not in ("starting", "done"):
            self.say(f"{status.process}: {name}")

    def _tell_wait(self, status: ProcessStatus) -> None:
        wait = status.waiting
        if wait is None or (status.process, wait.subject, wait.since) in self._waits_told:
            return
        patience = _PATIENCE_WHILE_STEPPING_SECONDS if self.progress.begun else _PATIENCE_SECONDS
        now = time.time()
        if now - wait.since >= patience:
            self._waits_told.add((status.process, wait.subject, wait.since))
            left = max(0.0, wait.deadline - now)
            self.say(f"{status.process} waits for {wait.subject} from {wait.owner} (gives up in {minutes(left)})")

    def _status_line(self, statuses: dict[str, ProcessStatus]) -> str:
        doing = []
        for status in statuses.values():
            wait = status.waiting
            doing.append(f"{status.process}: {status.phase if wait is None else f'waits for {wait.subject}'}")
        return f"{minutes(self.seconds)}  " + " · ".join(doing)
