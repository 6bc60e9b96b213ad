"""A committed version whose tensors lie elsewhere made one that holds them itself."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from prime_rl import faults
from prime_rl.transport.commit import (
    CommitError,
    disk_errors,
    hash_file,
    read_manifest,
    replace_manifest,
    subject_of,
    sync,
)
from prime_rl.transport.delta import DELTA_SUFFIX
from prime_rl.transport.weights import (
    INDEX,
    BuildsOn,
    WeightsManifest,
    chain,
    check_tensors,
    hash_directory,
    never_written,
    read_files,
    weights_manifest,
)

_ASIDE = ".lasting"


def make_lasting(directory: Path, write: Callable[[Path], object] | None = None) -> bool:
    """Bring the tensors of a committed version into its own directory in full: from memory, from the versions that it builds on, or, where they
    were sent, from who has them. Only the trainer does so.

    Until the manifest is replaced, last, the version is what it was. Readers that have read the old one find nothing at its place once that is
    removed, and try again.

    Args:
        write: Writes the files of a version that was sent into a directory.

    Returns:
        Whether they lay elsewhere.

    Raises:
        CommitError: what lies there is not what the manifest says.
        UserError: the disk is full; the version is what it was.
    """
    manifest = weights_manifest(directory)
    if manifest.sender is not None:
        if write is None:
            raise CommitError(never_written(directory))
    elif manifest.memory is None and manifest.builds_on is None:
        return False
    else:
        write = partial(_write_files, manifest)
    aside = directory / _ASIDE
    stays = "the version stays in memory" if manifest.sender is None else "it is in no file"
    with disk_errors(directory, stays):
        shutil.rmtree(aside, ignore_errors=True)  # of one that was killed
        aside.mkdir()
        try:
            write(aside)
            for path in aside.iterdir():
                sync(path)
            check_tensors(manifest, hash_directory(aside))
            faults.point(f"lasting:{subject_of(directory)}")
            known = read_manifest(directory)
            changes = [name for name in known.files if name.endswith(DELTA_SUFFIX)]
            files = {name: entry for name, entry in known.files.items() if name not in changes}
            for path in sorted(aside.iterdir()):
                files[path.name] = {"size": path.stat().st_size, "xxh3": hash_file(path)}
                os.rename(path, directory / path.name)
            sync(directory)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        extra = {key: value for key, value in known.extra.items() if key not in ("memory", "sender")}
        if manifest.delta is not None:
            extra["delta"] = vars(BuildsOn(None, None))
        replace_manifest(directory, files, extra)
        for name in changes:
            (directory / name).unlink()
    faults.point(f"lasts:{subject_of(directory)}")
    return True


def _write_files(manifest: WeightsManifest, directory: Path) -> None:
    """The files of a model directory that hold its tensors, and their index where there is one."""
    for file, data in read_files(manifest):
        data.tofile(directory / file)
    index = chain(manifest)[-1].files / INDEX
    if index.exists():
        shutil.copyfile(index, directory / INDEX)
