"""Directories committed as the processes of a run commit them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from prime_rl.transport.commit import stage, step_dir
from prime_rl.transport.weights import hash_directory, manifest_extra


def commit_empty(directory: Path, step: int, producer: str = "trainer", **extra: Any) -> None:
    """Commit a directory that holds nothing but its manifest."""
    with stage(directory, step=step, producer=producer, extra=extra):
        pass


def commit_weights(root: Path, version: int, write: Callable[[Path], object], **changes: Any) -> Path:
    """Commit the files that `write` puts into a directory as version `version`; `changes` are of its manifest."""
    extra: dict[str, Any] = {}
    with stage(step_dir(root, version), step=version, producer="trainer", extra=extra) as directory:
        write(directory)
        extra |= {**manifest_extra(version, 0, hash_directory(directory)), **changes}
    return step_dir(root, version)
