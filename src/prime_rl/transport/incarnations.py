"""What stands in the run directory about the trainer's incarnations, in the words of `protocol.py`: incarnation files, versions and who made them, the lease.

The trainer opens an incarnation by committing `incarnations/<incarnation>.json`; the orchestrator says in `leases/orchestrator.json` what it may still read, and so
does an evaluation that follows a run, in `leases/eval.json`.
"""

import json
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from prime_rl.errors import UserError
from prime_rl.transport.commit import MANIFEST, CommitError, clean_stages, list_steps, read_manifest, write_atomically
from prime_rl.transport.protocol import BASE, Lease
from prime_rl.transport.tmpfs import InTmpfs, tmpfs_of
from prime_rl.transport.weights import version_dir, weights_manifest


def read_incarnations(output_dir: Path) -> dict[int, int]:
    """Every incarnation that was opened, and the step it started from.

    Raises:
        CommitError: an incarnation file is damaged. They are renamed into place, so something other than us wrote it.
    """
    return {incarnation: table["step"] for incarnation, table in _read_files(output_dir).items()}


def sparing_incarnations(output_dir: Path) -> dict[int, int]:
    """The incarnations that keep the newest of what they give up, and the steps they started from."""
    return {
        incarnation: table["step"]
        for incarnation, table in _read_files(output_dir).items()
        if table.get("spares") is True
    }


def _read_files(output_dir: Path) -> dict[int, dict[str, Any]]:
    incarnations = {}
    for path in (output_dir / "incarnations").glob("*.json"):
        if path.stem.isdigit():
            try:
                table = json.loads(path.read_bytes())
                incarnations[int(path.stem)] = {**table, "step": int(table["step"])}
            except (ValueError, KeyError, TypeError) as error:
                raise CommitError(f"{path} cannot be read: {error}") from error
    return incarnations


def run_id(output_dir: Path) -> str | None:
    """What tells this run from others that save their checkpoints in the same place; None before its first incarnation.

    Every incarnation file holds it; it is the nonce of the base model's version, where there is one.
    """
    tables = _read_files(output_dir)
    for incarnation in sorted(tables):
        if isinstance(run := tables[incarnation].get("run"), str):
            return run
    try:
        return read_manifest(version_dir(output_dir / "weights", BASE)).nonce
    except CommitError:
        return None


def next_incarnation(output_dir: Path, saved_by: Collection[int] = ()) -> int:
    """The number of an incarnation that is opened now: above all that anything in the run directory tells of, for incarnation files may have been lost.

    Args:
        saved_by: The incarnations that saved the training states.
    """
    made_by = {incarnation for version, incarnation in read_versions(output_dir / "weights").items() if version != BASE}
    held = {lease.incarnation for lease in leases(output_dir)}
    return 1 + max({*read_incarnations(output_dir), *made_by, *held, *saved_by}, default=-1)


def open_incarnation(output_dir: Path, start: int, *, spares: bool = False, saved_by: Collection[int] = ()) -> int:
    """Commit a new incarnation that starts from step `start`. Only the trainer does so.

    Args:
        spares: Whether the newest of what it gives up is kept aside, for nobody can be sure that it will be made again.
        saved_by: The incarnations that saved the training states.

    Returns:
        Its number.
    """
    directory = output_dir / "incarnations"
    directory.mkdir(parents=True, exist_ok=True)
    clean_stages(directory)
    incarnation = next_incarnation(output_dir, saved_by)
    table = {"step": start, "spares": spares, "run": run_id(output_dir) or secrets.token_hex(8)}
    write_atomically(directory / f"{incarnation}.json", json.dumps(table).encode())
    return incarnation


class Look(NamedTuple):
    """What a version's manifest said at a look: the incarnation that made it, and its place where that is a tmpfs."""

    incarnation: int
    tmpfs: InTmpfs | None


Seen = dict[tuple[int, int, int], Look]  # (version, inode and time of its manifest) -> what it said


def read_versions(weights_dir: Path, seen: Seen | None = None) -> dict[int, int]:
    """Every committed version, and the incarnation that made it. One that is removed or damaged meanwhile, or lost with its host's memory, is left out.

    Args:
        seen: What earlier calls found; a caller that looks often keeps one, so that each manifest is read once.
    """
    looks = _look({} if seen is None else seen, weights_dir)
    return {version: look.incarnation for version, look in looks.items() if look.tmpfs is None or not look.tmpfs.gone}


def _look(seen: Seen, weights_dir: Path) -> dict[int, Look]:
    looks = {}
    for version in list_steps(weights_dir):
        directory = version_dir(weights_dir, version)
        try:
            stat = (directory / MANIFEST).stat()
            key = (version, stat.st_ino, stat.st_mtime_ns)
            if key not in seen:
                manifest = weights_manifest(directory)
                seen[key] = Look(manifest.incarnation, manifest.tmpfs)
        except (CommitError, FileNotFoundError):
            continue
        looks[version] = seen[key]
    return looks


def refuse_outlived(output_dir: Path, incarnation: int) -> None:
    """Raise UserError if a later incarnation than `incarnation` was opened: two trainers must not write one history."""
    newest = max(read_incarnations(output_dir), default=incarnation)
    if newest > incarnation:
        raise UserError(
            f"another trainer has gone on with the run in {output_dir} (incarnation {newest}; this one is {incarnation}): "
            "this one ends and commits no more"
        )


def lost_versions(weights_dir: Path) -> list[int]:
    """Versions whose tensors lay in memory and, as far as this host can see, are there no more, ascending."""
    held = {version: tmpfs_of(version_dir(weights_dir, version)) for version in list_steps(weights_dir)}
    return [version for version, place in held.items() if place is not None and not Path(place.directory).is_dir()]


ORCHESTRATOR, EVAL = "orchestrator", "eval"
"""Who reads versions, each with a lease of its own."""


def lease_path(output_dir: Path, reader: str = ORCHESTRATOR) -> Path:
    """The place of a reader's lease."""
    return output_dir / "leases" / f"{reader}.json"


def read_lease(output_dir: Path, reader: str = ORCHESTRATOR) -> Lease | None:
    """What a reader may still read; None where it holds no lease.

    Raises:
        CommitError: the file is damaged.
    """
    path = lease_path(output_dir, reader)
    try:
        table = json.loads(path.read_bytes())
        return Lease(
            table["incarnation"] if "incarnation" in table else table["life"], table["version"]
        )  # the earlier name
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise CommitError(f"{path} cannot be read: {error}") from error


def leases(output_dir: Path) -> list[Lease]:
    """Those that are held.

    Raises:
        CommitError: a file is damaged.
    """
    return [lease for reader in (ORCHESTRATOR, EVAL) if (lease := read_lease(output_dir, reader)) is not None]


def strictest_lease(output_dir: Path) -> Lease | None:
    """What any reader may still read; None where nobody holds a lease. Raises CommitError: a file is damaged."""
    if not (held := leases(output_dir)):
        return None
    return Lease(min(lease.incarnation for lease in held), min(lease.version for lease in held))


def write_lease(output_dir: Path, lease: Lease, reader: str = ORCHESTRATOR) -> None:
    """Replace a reader's lease durably. Only it does so."""
    path = lease_path(output_dir, reader)
    path.parent.mkdir(parents=True, exist_ok=True)
    clean_stages(path.parent, path.name)
    write_atomically(path, json.dumps({"incarnation": lease.incarnation, "version": lease.version}).encode())


def drop_lease(output_dir: Path, reader: str = ORCHESTRATOR) -> None:
    """Give a lease back: nothing is read any more."""
    lease_path(output_dir, reader).unlink(missing_ok=True)


_CALL = "files_wanted.json"  # in `weights/`


def ask_for_files(output_dir: Path, incarnation: int, reason: str) -> None:
    """Say that servers cannot reach the publisher of this incarnation: versions are to be written to files. Only the orchestrator does so."""
    write_atomically(
        output_dir / "weights" / _CALL, json.dumps({"incarnation": incarnation, "reason": reason}).encode()
    )


def call_for_files(output_dir: Path, incarnation: int) -> str | None:
    """Why servers ask this incarnation of the trainer for files; None where they do not."""
    try:
        call = json.loads((output_dir / "weights" / _CALL).read_bytes())
        return str(call["reason"]) if call["incarnation"] == incarnation else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
