"""The attempts of one environment at one policy, in a directory of its own: what is finished is never lost, nor made twice.

settings.json     what the results depend on; another evaluation does not go on with them
results.jsonl     a line an attempt, appended as they finish; a failed one that is made again has a later line
"""

import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.errors import UserError
from prime_rl.evals.metrics import reply_tokens
from prime_rl.evals.runner import Results
from prime_rl.transport.commit import disk_errors, sync, write_atomically

RESULTS, SETTINGS = "results.jsonl", "settings.json"
LOCK = ".lock"


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """No other evaluation writes to the directory, or has the servers load other weights for it, meanwhile.

    Raises:
        UserError: one does.
    """
    with disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another evaluation is writing to {directory}: wait for it, or give another --output-dir"
            ) from error
        yield
    finally:
        os.close(file)


class Store(Results):
    """Results in a directory, open until `close`. Raises UserError where other settings made what is there."""

    def __init__(self, directory: Path, settings: Mapping[str, Any], *, clean: bool = False) -> None:
        super().__init__()
        self.directory = directory
        if clean and directory.is_dir():
            shutil.rmtree(directory)
        with disk_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._file = os.open(directory / RESULTS, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._check(settings)
            for row in self._read():
                super().add(row["attempt"], _result(row), row["version"])
        except BaseException:
            os.close(self._file)
            raise

    def add(self, attempt: int, result: EpisodeResult, version: int) -> None:
        """Append one. Whatever is killed afterwards, it stays; half a line is dropped by the next reader.

        Raises:
            UserError: the disk is full, or fails.
        """
        line = (json.dumps(_row(attempt, result, version)) + "\n").encode()
        with disk_errors(self.directory / RESULTS, "the results before are kept"):
            while line:
                line = line[os.write(self._file, line) :]
        super().add(attempt, result, version)

    def close(self) -> None:
        """Make it durable."""
        with disk_errors(self.directory / RESULTS, "a power cut may undo the last results"):
            sync(self.directory / RESULTS)
        os.close(self._file)

    def _check(self, settings: Mapping[str, Any]) -> None:
        check_settings(self.directory, settings)
        path = self.directory / SETTINGS
        if not path.exists():
            write_atomically(path, json.dumps(flat(settings), indent=1).encode())

    def _read(self) -> Iterable[dict[str, Any]]:
        path = self.directory / RESULTS
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):  # a killed writer's last words
            os.ftruncate(self._file, whole)
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise UserError(f"line {number} of {path} is damaged: mend it, or make the results anew with --clean") from error  # fmt: skip


def check_settings(directory: Path, settings: Mapping[str, Any], but: str = "") -> None:
    """What is in `directory`, if anything is, was made with these settings.

    Args:
        but: A setting that is not known yet.

    Raises:
        UserError: naming the first that differs.
    """
    path, now = directory / SETTINGS, flat(settings)
    try:
        before = json.loads(path.read_bytes())
    except FileNotFoundError:
        return
    except ValueError as error:
        raise UserError(f"{path} cannot be read ({error}): make the results anew with --clean") from error
    for key in sorted((before.keys() | now.keys()) - {but}):
        if before.get(key) != now.get(key):
            raise UserError(
                f"{directory} holds results made with {key} = {_shown(before, key)}, and now it is {_shown(now, key)}: "
                "go back to that, give another --output-dir, or make them anew with --clean"
            )


def setting(directory: Path, key: str) -> Any:
    """One of the settings that the results in `directory` were made with; None where there are none."""
    path = directory / SETTINGS
    return json.loads(path.read_bytes()).get(key) if path.exists() else None


def flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Dotted names: what differs can be named."""
    table: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            table |= flat(value, f"{before}{key}.")
        else:
            table[f"{before}{key}"] = value
    return table


def _shown(settings: Mapping[str, Any], key: str) -> str:
    return json.dumps(settings[key]) if key in settings else "nothing"


def _row(attempt: int, result: EpisodeResult, version: int) -> dict[str, Any]:
    return {
        "task_id": result.task_id,
        "attempt": attempt,
        "version": version,
        "outcome": str(result.outcome),
        "message": result.message,
        "reward": result.reward if result.ok else None,
        "rewards": _finite(result.rewards),
        "metrics": _finite(result.metrics),
        "is_truncated": result.is_truncated,
        "num_turns": result.num_turns,
        "input_tokens": result.input_tokens,
        "output_tokens": reply_tokens(result),
        "seconds": sum(result.timing.values()),
        "prompt": result.prompt,
        "completion": result.completion,
    }


def _result(row: Mapping[str, Any]) -> EpisodeResult:
    return EpisodeResult(
        "",
        "",
        row["task_id"],
        Outcome(row["outcome"]),
        row["message"],
        row["reward"] or 0.0,
        row["rewards"],
        row["metrics"],
        is_truncated=row["is_truncated"],
        num_turns=row["num_turns"],
        prompt=row["prompt"],
        completion=row["completion"],
        timing={"": row["seconds"]},
        input_tokens=row["input_tokens"],
        output_tokens=row["output_tokens"],
    )


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    """JSON has no other numbers."""
    return {name: value for name, value in values.items() if math.isfinite(value)}
