"""A committed version whose tensors lie elsewhere made one that holds them itself."""

import os
import shutil
from pathlib import Path

from prime_rl import faults
from prime_rl.transport.commit import (
    MANIFEST,
    disk_errors,
    hash_file,
    read_manifest,
    replace_manifest,
    subject_of,
    sync,
)
from prime_rl.transport.weights import check_tensors, hash_directory, weights_manifest

_ASIDE = ".lasting"


def make_lasting(directory: Path) -> bool:
    """Copy the tensors of a committed version from memory into its own directory. Only the trainer does so.

    Until the manifest is replaced, last, the version is what it was. Readers that have read the old one find nothing at its place once that is
    removed, and try again.

    Returns:
        Whether they lay elsewhere.

    Raises:
        CommitError: what lies there is not what the manifest says.
        UserError: the disk is full; the version is what it was.
    """
    manifest = weights_manifest(directory)
    if manifest.memory is None:
        return False
    aside = directory / _ASIDE
    with disk_errors(directory, "the version stays in memory"):
        shutil.rmtree(aside, ignore_errors=True)  # of one that was killed
        aside.mkdir()
        try:
            held = sorted(path for path in manifest.files.iterdir() if path.name != MANIFEST)
            for path in held:
                sync(Path(shutil.copyfile(path, aside / path.name)))
            check_tensors(manifest, hash_directory(aside))
            faults.point(f"lasting:{subject_of(directory)}")
            known = read_manifest(directory)
            files = dict(known.files)
            for path in held:
                copied = aside / path.name
                files[path.name] = {"size": copied.stat().st_size, "xxh3": hash_file(copied)}
                os.rename(copied, directory / path.name)
            sync(directory)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        extra = {key: value for key, value in known.extra.items() if key != "memory"}
        replace_manifest(directory, files, extra)
    faults.point(f"lasts:{subject_of(directory)}")
    return True
