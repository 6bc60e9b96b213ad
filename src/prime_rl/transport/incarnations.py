"""Read and write the trainer's incarnations, versions and leases in the run directory, as the types of `protocol.py`.

The trainer opens an incarnation by committing `incarnations/<incarnation>.json`. The orchestrator commits in
`leases/orchestrator.json` what servers may still read.
"""

import json
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from prime_rl import faults
from prime_rl.errors import UserError
from prime_rl.transport.commit import MANIFEST, CommitError, clean_stages, list_steps, step_dir, write_atomically
from prime_rl.transport.protocol import Incarnation, Lease, current_incarnation, newest_version
from prime_rl.transport.weights import WeightsManifest, weights_manifest

_LEASE = "leases/orchestrator.json"


def read_incarnations(output_dir: Path) -> dict[int, int]:
    """Return every incarnation that was opened, and the step it started from. Raises CommitError if a file is damaged.
    They are renamed into place, so something other than us wrote it."""
    incarnations = {}
    for path in (output_dir / "incarnations").glob("*.json"):
        if path.stem.isdigit():
            try:
                incarnations[int(path.stem)] = int(json.loads(path.read_bytes())["step"])
            except (ValueError, KeyError, TypeError) as error:
                raise CommitError(f"{path} cannot be read: {error}") from error
    return dict(sorted(incarnations.items()))


def open_incarnation(output_dir: Path, start: int) -> int:
    """Commit a new incarnation that starts from step `start` and return its number. Only the trainer does so."""
    directory = output_dir / "incarnations"
    directory.mkdir(parents=True, exist_ok=True)
    clean_stages(directory)
    incarnation = 1 + max(read_incarnations(output_dir), default=-1)
    faults.point(f"incarnation:{incarnation}")
    write_atomically(directory / f"{incarnation}.json", json.dumps({"step": start}).encode())
    return incarnation


def refuse_if_superseded(output_dir: Path, incarnation: int) -> None:
    """Raise UserError if a later incarnation than `incarnation` was opened: two trainers must not write one lineage."""
    newest = max(read_incarnations(output_dir), default=incarnation)
    if newest > incarnation:
        raise UserError(
            f"another trainer has gone on with the run in {output_dir} (incarnation {newest}; this one is "
            f"{incarnation}): this one ends and commits no more"
        )


@lru_cache(maxsize=4096)
def _made_by(directory: Path, inode: int, modified: int) -> int:
    """Return the incarnation that a version's manifest names. The same file (by inode and time) is read once."""
    return weights_manifest(directory).incarnation


def read_versions(weights_dir: Path) -> dict[int, int]:
    """Return every committed version, and the incarnation that made it. One that is removed or damaged meanwhile is
    left out."""
    versions = {}
    for version in list_steps(weights_dir):
        directory = step_dir(weights_dir, version)
        with suppress(CommitError, FileNotFoundError):
            stat = (directory / MANIFEST).stat()
            versions[version] = _made_by(directory, stat.st_ino, stat.st_mtime_ns)
    return versions


def read_lease(output_dir: Path) -> Lease | None:
    """Return what servers may still read; None if there is no lease. Raises CommitError if the file is damaged."""
    path = output_dir / _LEASE
    try:
        table = json.loads(path.read_bytes())
        return Lease(table["incarnation"], table["version"])
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise CommitError(f"{path} cannot be read: {error}") from error


class PublishedVersions:
    """Incarnations and versions at the last refresh, and the lease, which the orchestrator alone writes."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self.incarnations: dict[int, int] = {}
        self.versions: dict[int, int] = {}
        self.lease = read_lease(output_dir)

    @property
    def incarnation(self) -> Incarnation:
        return current_incarnation(self.incarnations)

    @property
    def newest(self) -> int | None:
        """The newest version of the current lineage."""
        return newest_version(self.versions, self.incarnations)

    def refresh(self) -> None:
        """Read the run directory. Versions first: a version is never seen without the incarnation that made it."""
        self.versions = read_versions(self._output_dir / "weights")
        self.incarnations = read_incarnations(self._output_dir)

    def manifest(self, version: int) -> WeightsManifest:
        """Read what a version consists of. Raises CommitError if it is not committed (any more)."""
        return weights_manifest(step_dir(self._output_dir / "weights", version))

    def write_lease(self, lease: Lease | None) -> None:
        """Replace the lease durably: what may still be read, so that the trainer does not remove it (None: nothing)."""
        path = self._output_dir / _LEASE
        if lease is None:
            path.unlink(missing_ok=True)
        elif lease != self.lease:
            path.parent.mkdir(parents=True, exist_ok=True)
            clean_stages(path.parent)
            write_atomically(path, json.dumps(vars(lease)).encode())
        self.lease = lease
