"""The rows of tests/integration/commands.md, and a checkout in which their lines can be pasted."""

import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from support.processes import REPOSITORY, run_forked

PAGE = REPOSITORY / "tests" / "integration" / "commands.md"
KINDS = ("runs", "plans", "hint", "refused", "migrated", "help", "path", "test", "elsewhere")
PROGRAMS = REPOSITORY / ".venv" / "bin"
VARIABLES = {
    "API_KEY": "secret",
    "OPENAI_API_KEY": "secret",
    "WANDB_API_KEY": "0" * 40,
    "INFERENCE_SERVER_IP": "10.15.42.2",
    "DATA_PARALLEL_ADDRESS": "10.15.42.1",
    "RDZV_ENDPOINT": "127.0.0.1:0",
    "OUTPUT_DIR": "outputs-shared",
}


@dataclass(frozen=True)
class Row:
    """A line or promise, and what is expected of it: a kind, and for most kinds a text."""

    seeds: str
    line: str
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.line[:70]} → {self.kind}"


def read_rows() -> list[Row]:
    """Every row of the page's tables.

    Raises:
        AssertionError: a row that cannot be read, so that none is left out silently.
    """
    rows = []
    for line in PAGE.read_text().splitlines():
        if not re.match(r"\| \d", line):
            continue
        cells = [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        assert len(cells) == 3, line
        seeds, promise, expected = cells
        kind, _, text = expected.strip("`").partition(": ")
        assert kind in KINDS, line
        rows.append(Row(seeds, promise.strip("`"), kind, text))
    return rows


def make_checkout(directory: Path) -> Path:
    """A directory with the files that pasted lines name, whose outputs are its own."""
    directory.mkdir(parents=True)
    for name in ("assets", "configs", "environments", "examples", "scripts", "src"):
        (directory / name).symlink_to(REPOSITORY / name)
    return directory


def parse_line(line: str) -> tuple[dict[str, str], list[str]]:
    """The environment variables and the arguments of a pasted line, without `uv run`."""
    words = shlex.split(re.sub(r"\$(\w+)", lambda match: VARIABLES[match[1]], line))
    assignments: dict[str, str] = {}
    while "=" in words[0] and not words[0].startswith("-"):
        name, _, value = words.pop(0).partition("=")
        assignments[name] = value
    if words[:2] == ["uv", "run"]:
        words = words[2:]
    return assignments, words


def run_line(
    line: str, checkout: Path, *more: object, environment: dict[str, str] | None = None, seconds: float = 120
) -> tuple[int, str]:
    """Execute a pasted line with further arguments. Returns its exit status and everything that it printed."""
    words, env = prepare(line, environment)
    done = subprocess.run(
        [PROGRAMS / words[0], *words[1:], *map(str, more)],
        cwd=checkout, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds,
    )  # fmt: skip
    return done.returncode, done.stdout


def fork_line(
    line: str, checkout: Path, *more: object, environment: dict[str, str] | None = None, seconds: float = 120
) -> tuple[int, str]:
    """The same for one of our commands that trains nothing (torch's threads do not outlive a fork), by `run_forked`."""
    words, env = prepare(line, environment)
    done = run_forked(*words, *more, cwd=checkout, env=env, seconds=seconds)
    return done.returncode, done.stdout + done.stderr


def prepare(line: str, environment: dict[str, str] | None) -> tuple[list[str], dict[str, str]]:
    """A pasted line's arguments, and the variables of its process."""
    assignments, words = parse_line(line)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PRIME_", "WANDB_", "PYTEST"))}
    return words, {**inherited, **VARIABLES, **(environment or {}), **assignments}
