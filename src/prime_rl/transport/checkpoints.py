"""`checkpoints/step_N`: the parts that each process commits, and the joint manifest that makes them one checkpoint.

A part is a committed directory (`step_N/trainer`, `step_N/orchestrator`). The owner of the joint manifest writes
`step_N/manifest.json` once every part is there; only then is the checkpoint complete. A part without its partner is not
resumed from; only a trainer that recovers takes its own newest part (`recoverable`).
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from prime_rl import faults
from prime_rl.errors import UserError
from prime_rl.transport import commit
from prime_rl.transport.commit import MANIFEST, CommitError, Manifest, list_steps, read_manifest, step_dir
from prime_rl.transport.protocol import expendable_checkpoints, valid

Part = Literal["trainer", "orchestrator"]
TRAINER_ONLY: tuple[Part, ...] = ("trainer",)  # sft, fake data, a trainer without an orchestrator
BOTH_PARTS: tuple[Part, ...] = ("trainer", "orchestrator")


def part_dir(root: Path, step: int, part: Part) -> Path:
    return step_dir(root, step) / part


def is_committed(directory: Path) -> bool:
    return (directory / MANIFEST).is_file()


def steps_with(root: Path, *parts: Part) -> list[int]:
    """Return the steps in which one of `parts` is committed, ascending; complete checkpoints and others."""
    return [step for step in list_steps(root) if any(is_committed(part_dir(root, step, part)) for part in parts)]


def complete_steps(root: Path) -> list[int]:
    """Return the steps whose joint manifest is there, ascending."""
    return [step for step in list_steps(root) if is_committed(step_dir(root, step))]


def saved_by(state: Manifest, default: int = 0) -> int:
    """Return the trainer's incarnation that saved a state; `default` if its manifest does not say."""
    return int(state.extra.get("incarnation", default))


def trainer_is_alone(output_dir: Path) -> bool:
    """Whether no orchestrator takes part in the run: then the trainer owns the joint manifests."""
    return not any((output_dir / name).exists() for name in ("status/orchestrator.json", "configs/orchestrator.toml"))


def join(root: Path, step: int, parts: Sequence[Part], producer: str) -> None:
    """Write the joint manifest over committed parts. Its owner calls it; once complete, a checkpoint stays as it is.
    Raises CommitError if a part is not committed."""
    path = step_dir(root, step) / MANIFEST
    commit.clean_stages(path.parent, MANIFEST)  # left by an earlier incarnation of the owner
    if path.is_file():
        return
    files: dict[str, commit.FileEntry] = {}
    for part in parts:
        own = part_dir(root, step, part) / MANIFEST
        read_manifest(own.parent)
        files[f"{part}/{MANIFEST}"] = {"size": own.stat().st_size, "xxh3": commit.hash_file(own)}
    faults.point(f"join:checkpoints/step_{step}", path)
    joint = Manifest(step, producer, files[f"{parts[0]}/{MANIFEST}"]["xxh3"][:16], files, {"parts": list(parts)})
    commit.write_atomically(path, json.dumps(vars(joint), indent=1).encode())
    faults.point(f"joined:checkpoints/step_{step}", path)


def choose_step(root: Path, asked: int, part: Part, max_steps: int | None = None) -> int:
    """Return the step that `part` resumes from; -1 is the newest complete checkpoint.

    A step asked for by its number may hold this part alone: then only this process goes on from it. Raises UserError if
    there is no such checkpoint, it is damaged or of a newer format, or it lies beyond `max_steps`.
    """
    complete, own = complete_steps(root), steps_with(root, part)
    step = asked if asked in own else None
    if asked == -1:
        step = max(complete, default=None)
    if step is None:
        held = f"complete checkpoints of steps {complete}" if complete else "no complete checkpoint"
        if parts := sorted(set(own).difference(complete)):
            held += f", and single parts of steps {parts} (one resumes its own process, if asked for by number)"
        raise UserError(f"ckpt.resume_step {asked}: {root} holds {held}")
    if max_steps is not None and step > max_steps:
        raise UserError(f"max_steps {max_steps} is below the checkpoint's step {step}: nothing to do")
    check(root, step, part)
    return step


def check(root: Path, step: int, part: Part) -> None:
    """Check that `part` of checkpoint `step` is whole, and the one that its joint manifest names. Raises UserError,
    which names other checkpoints, if it is not, or a newer format wrote it."""
    directory, own = step_dir(root, step), part_dir(root, step, part)
    try:
        commit.verify(own)
        if (directory / MANIFEST).is_file():
            entry = read_manifest(directory).files.get(f"{part}/{MANIFEST}")
            # None: joined before this process took part.
            if entry is not None and commit.hash_file(own / MANIFEST) != entry["xxh3"]:
                raise CommitError(f"{own} is not the part that {directory / MANIFEST} names")
    except CommitError as error:
        others = ", ".join(str(other) for other in complete_steps(root) if other != step)
        hint = f"; other checkpoints to go on from, with --ckpt.resume-step: {others}" if others else ""
        raise UserError(f"cannot resume from step {step}: {error}{hint}") from error


def remove_expendable(
    root: Path, keep: int | None, keep_interval: int | None, in_progress: Collection[int] = ()
) -> None:
    """Remove complete checkpoints beyond `keep`, and parts without partner older than the newest complete one. Steps
    `in_progress` are being saved, or resumed from."""
    complete = complete_steps(root)
    expendable = {*expendable_checkpoints(complete, keep, keep_interval)}
    incomplete = set(steps_with(root, *BOTH_PARTS)).difference(complete)
    expendable |= {step for step in incomplete if complete and step < complete[-1]}
    for step in sorted(expendable.difference(in_progress)):
        commit.prune(step_dir(root, step))


def supersede_after(root: Path, step: int, incarnation: int) -> list[Path]:
    """Rename the checkpoints after `step`, where `incarnation` starts: they are superseded. Return their new paths.
    They are not deleted, in case `step` was a mistake: they can be renamed back by hand."""
    renamed = []
    for directory in (step_dir(root, number) for number in steps_with(root, *BOTH_PARTS) if number > step):
        faults.point(f"set-aside:{commit.subject_of(directory)}")
        with commit.disk_errors(directory, "it stays as it is"):
            renamed.append(directory.rename(root / f"given_up_{incarnation}_{directory.name}"))
    return renamed


def clean(root: Path, part: Part) -> None:
    """Remove what a dead writer of `part` left unfinished."""
    for step in list_steps(root):
        commit.clean_stages(step_dir(root, step), part)
        if part == "trainer":  # which is the first to write into a checkpoint
            with suppress(OSError):  # it is not empty
                step_dir(root, step).rmdir()
    commit.clean_stages(root)


def recoverable(root: Path, recovery: Path, incarnations: Mapping[int, int]) -> Iterator[tuple[int, Path, str | None]]:
    """Yield committed states that a trainer may recover from, newest first: checkpoints' parts, recovery checkpoints.

    States that a later incarnation superseded are left out. Each comes as its step, its directory, and what is wrong
    with it (None: its bytes are the ones that were committed). Raises UserError if a newer version of this program
    wrote one: to skip it would lose its steps.
    """
    states = [(step, part_dir(root, step, "trainer")) for step in steps_with(root, "trainer")]
    states += [(step, step_dir(recovery, step)) for step in list_steps(recovery)]
    for step, directory in sorted(states, reverse=True):
        try:
            if valid(step, saved_by(read_manifest(directory), max(incarnations, default=0)), incarnations):
                commit.verify(directory)
                yield step, directory, None
        except commit.FormatError as error:
            raise UserError(f"cannot recover: {error}") from error
        except CommitError as error:
            yield step, directory, str(error)
