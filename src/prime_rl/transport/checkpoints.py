"""`checkpoints/step_N`: the parts that each process commits, and the joint manifest that makes them one checkpoint.

A part is a committed directory (`step_N/trainer`, `step_N/orchestrator`). The owner of the joint manifest writes `step_N/manifest.json` once every
part is there; only then is the checkpoint complete. A part without its partner is never chosen by itself.
"""

import json
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from prime_rl import faults
from prime_rl.errors import UserError
from prime_rl.transport.commit import (
    MANIFEST,
    CommitError,
    FormatError,
    Manifest,
    clean_stages,
    hash_file,
    list_steps,
    prune,
    read_manifest,
    supersede,
    verify,
    write_atomically,
)
from prime_rl.transport.protocol import current_incarnation, expendable_checkpoints, resume_step, valid

Part = Literal["trainer", "orchestrator"]
ALONE: tuple[Part, ...] = ("trainer",)  # sft, fake data, a trainer without an orchestrator
TOGETHER: tuple[Part, ...] = ("trainer", "orchestrator")


def step_dir(root: Path, step: int) -> Path:
    """The place of checkpoint `step` under the checkpoints root."""
    return root / f"step_{step}"


def part_dir(root: Path, step: int, part: Part) -> Path:
    """The final place of one process's part."""
    return step_dir(root, step) / part


def steps_with(root: Path, part: Part) -> list[int]:
    """Steps in which `part` is committed, ascending; complete checkpoints and others."""
    return [step for step in list_steps(root) if (part_dir(root, step, part) / MANIFEST).is_file()]


def run_of(directory: Path) -> str | None:
    """The run that saved a state (`incarnations.run_id`); None where that cannot be told."""
    try:
        run = read_manifest(directory).extra.get("run")
    except CommitError:
        return None
    return run if isinstance(run, str) else None


def saved_by(state: Manifest, default: int = 0) -> int:
    """The trainer's incarnation that saved a state, by its manifest; `default` where that does not tell."""
    return int(state.extra.get("incarnation", state.extra.get("life", default)))  # the earlier name


def belongs(root: Path, step: int, run: str | None) -> bool:
    """Whether checkpoint `step` is of this run, as far as can be told: a place for checkpoints may be shared by several runs."""
    return run is None or run_of(part_dir(root, step, "trainer")) in (None, run)


def complete_steps(root: Path) -> list[int]:
    """Steps whose joint manifest stands, ascending."""
    return [step for step in list_steps(root) if (step_dir(root, step) / MANIFEST).is_file()]


def trainer_is_alone(output_dir: Path) -> bool:
    """Whether no orchestrator takes part in the run: then the trainer owns the joint manifests."""
    return not any((output_dir / name).exists() for name in ("status/orchestrator.json", "configs/orchestrator.toml"))


def join(root: Path, step: int, parts: Sequence[Part], producer: str) -> None:
    """Write the joint manifest over committed parts. Its owner calls it; once complete, a checkpoint stays as it is.

    Raises:
        CommitError: a part is not committed.
    """
    directory = step_dir(root, step)
    if (directory / MANIFEST).is_file():
        return
    files: dict[str, dict[str, Any]] = {}
    for part in parts:
        path = part_dir(root, step, part) / MANIFEST
        read_manifest(path.parent)
        files[f"{part}/{MANIFEST}"] = {"size": path.stat().st_size, "xxh3": hash_file(path)}
    for left in directory.glob(f".{MANIFEST}.tmp-*"):  # by an earlier incarnation of the owner
        left.unlink(missing_ok=True)
    faults.point(f"join:checkpoints/step_{step}", directory / MANIFEST)
    joint = Manifest(step, producer, files[f"{parts[0]}/{MANIFEST}"]["xxh3"][:16], files, {"parts": list(parts)})
    write_atomically(directory / MANIFEST, json.dumps(asdict(joint), indent=1).encode())
    faults.point(f"joined:checkpoints/step_{step}", directory / MANIFEST)


def find(root: Path, asked: int, part: Part, max_steps: int | None = None) -> int:
    """The step that `part` resumes from; -1 is the newest complete checkpoint.

    A step asked for by its number may be one in which only this part stands: then only this process goes on from it.

    Raises:
        UserError: there is no such checkpoint, it is damaged or of a newer format, or it lies beyond `max_steps`.
    """
    complete, own = complete_steps(root), steps_with(root, part)
    step = resume_step(complete if asked == -1 else own, asked)
    if step is None:
        raise UserError(f"ckpt.resume_step {asked}: {_nothing(root, asked, complete, own)}")
    if max_steps is not None and step > max_steps:
        raise UserError(f"max_steps {max_steps} is below the checkpoint's step {step}: nothing to do")
    check(root, step, part)
    return step


def check(root: Path, step: int, part: Part) -> None:
    """`part` of checkpoint `step` is whole, and the one that its joint manifest names.

    Raises:
        UserError: it is not, or a newer format wrote it; the message names other checkpoints.
    """
    try:
        mine = part_dir(root, step, part)
        verify(mine)
        if (step_dir(root, step) / MANIFEST).is_file():
            listed = read_manifest(step_dir(root, step)).files
            entry = listed.get(f"{part}/{MANIFEST}")
            if entry is None:
                return  # joined before this process took part
            if hash_file(mine / MANIFEST) != entry["xxh3"]:
                raise CommitError(f"{mine} is not the part that {step_dir(root, step) / MANIFEST} names")
    except CommitError as error:
        others = ", ".join(str(other) for other in complete_steps(root) if other != step)
        hint = f"; other checkpoints to go on from, with --ckpt.resume-step: {others}" if others else ""
        raise UserError(f"cannot resume from step {step}: {error}{hint}") from error


def remove(root: Path, step: int) -> None:
    """Remove a checkpoint with all its parts. Only the owner of the joint manifest does so."""
    prune(step_dir(root, step))


def remove_expendable(
    root: Path, keep: int | None, keep_interval: int | None, in_progress: Collection[int] = (), run: str | None = None
) -> list[int]:
    """Remove complete checkpoints beyond `keep`, and parts older than the newest complete one that never found their partner.

    Args:
        run: The run whose checkpoints these are; those of others count for nothing and stay.
        in_progress: Steps that are being saved, or resumed from.

    Returns:
        The steps that were removed.
    """
    complete = [step for step in complete_steps(root) if belongs(root, step, run)]
    gone = expendable_checkpoints(complete, keep, keep_interval)
    if complete:
        gone += [
            step
            for step in list_steps(root)
            if step < complete[-1] and step not in complete and not _foreign(root, step) and belongs(root, step, run)
        ]
    gone = [step for step in gone if step not in in_progress]
    for step in gone:
        remove(root, step)
    return sorted(gone)


def clean(root: Path, part: Part) -> None:
    """Remove what a dead writer of `part` left half-done."""
    for step in list_steps(root):
        directory = step_dir(root, step)
        for path in directory.glob(f".{part}.*"):
            if ".tmp-" in path.name or ".old-" in path.name:
                shutil.rmtree(path, ignore_errors=True)
        if (directory / MANIFEST).is_file():  # else the owner of the joint manifest may be at work
            for path in directory.glob(f".{MANIFEST}.tmp-*"):
                path.unlink(missing_ok=True)
        if not any(directory.iterdir()):
            directory.rmdir()
    clean_stages(root)


def set_aside_after(root: Path, step: int, incarnation: int, run: str | None = None) -> list[Path]:
    """Rename the checkpoints of `run` beyond `step` out of the way, which incarnation `incarnation` gives up by going on from `step`.

    They are not deleted, for they may have been given up by mistake. Whoever resumes may call it, and any number of times.

    Returns:
        Where they lie now.
    """
    moved = []
    for later in list_steps(root):
        if later > step and not _foreign(root, later) and belongs(root, later, run):
            renamed = supersede(step_dir(root, later), incarnation)
            if renamed is not None:  # else the other process was first
                moved.append(renamed)
    return moved


def foreign(root: Path) -> list[Path]:
    """Directories under a checkpoint's name that hold something, but no part of a checkpoint. Nothing of ours may be mixed into them."""
    return [
        step_dir(root, step)
        for step in list_steps(root)
        if _foreign(root, step) and any(not path.name.startswith(".") for path in step_dir(root, step).iterdir())
    ]


def recoverable(
    root: Path, recovery: Path, incarnations: Mapping[int, int], run: str | None = None
) -> Iterator[tuple[int, Path, str | None]]:
    """Committed states that a trainer may recover from, newest first: its parts of checkpoints, joined or not, and recovery checkpoints.

    States that a later incarnation gave up are left out, and those of other runs, but for the one that the present history went on from.

    Args:
        run: The run that recovers.
        recovery: The directory of the recovery checkpoints.
        incarnations: The trainer's incarnations and the steps they started from.

    Returns:
        Step, directory, and what is wrong with it (None: its bytes are the ones that were committed).

    Raises:
        UserError: a newer version of this program wrote one: to pass it over would lose its steps.
    """
    found = [(step, part_dir(root, step, "trainer")) for step in steps_with(root, "trainer")]
    found += [(step, step_dir(recovery, step)) for step in list_steps(recovery)]
    start = current_incarnation(incarnations).start
    for step, directory in sorted(found, reverse=True):
        if run is not None and run_of(directory) not in (None, run):
            if step == start > 0:
                yield step, directory, _damage(directory)
            continue
        try:
            made_by = saved_by(read_manifest(directory), max(incarnations, default=0))
            if valid(step, made_by, incarnations):
                verify(directory)
                yield step, directory, None
        except FormatError as error:
            raise UserError(f"cannot recover: {error}") from error
        except CommitError as error:
            yield step, directory, str(error)


def _damage(directory: Path) -> str | None:
    try:
        verify(directory)
    except CommitError as error:
        return str(error)
    return None


def _foreign(root: Path, step: int) -> bool:
    """Not ours to touch: a directory without any part."""
    return not any((part_dir(root, step, part) / MANIFEST).is_file() for part in TOGETHER)


def _nothing(root: Path, asked: int, complete: list[int], own: list[int]) -> str:
    if asked == -1 and own:
        return (
            f"{root} holds no complete checkpoint, only single parts of step {', '.join(map(str, own))} (a part alone resumes its own "
            "process, if asked for by number)"
        )
    if not complete and not own:
        return f"{root} holds no checkpoint"
    return f"not in {root}, which has {', '.join(map(str, sorted({*complete, *own})))}"
