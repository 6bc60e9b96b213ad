"""Where the orchestrator goes on. It keeps no state of its own: the step follows from the trainer's checkpoint, everything else from the
committed batches and the seed.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prime_rl.errors import UserError
from prime_rl.transport.commit import CommitError, list_steps, read_manifest
from prime_rl.transport.weights import version_dir, weights_manifest

if TYPE_CHECKING:
    from prime_rl.config.shared import CkptConfig

_TRAINER_PART = "trainer"


@dataclass(frozen=True)
class Progress:
    """`step` is the next step to collect, `groups_opened` the groups drawn from the task stream so far, `version` the weights to start on."""

    step: int = 0
    groups_opened: int = 0
    version: int = 0
    resumed: bool = False


@dataclass(frozen=True)
class Incarnation:
    """One life of the trainer: its number, and the step it started from. -1 before the first."""

    number: int = -1
    start: int = 0


def resume_progress(output_dir: Path, ckpt: "CkptConfig | None", max_steps: int | None = None) -> Progress:
    """Where to start: step 0, or after what the run directory already holds for the checkpoint that is resumed.

    Batches committed beyond the checkpoint are trained again unchanged, so collecting goes on after them.

    Raises:
        UserError: there is no such checkpoint, or it lies beyond `max_steps`.
    """
    if ckpt is None or ckpt.resume_step is None:
        return Progress()
    root = (ckpt.output_dir or output_dir) / "checkpoints"
    saved = [step for step in list_steps(root) if (root / f"step_{step}" / _TRAINER_PART).is_dir()]
    if not saved:
        raise UserError(f"nothing to resume: {root} holds no checkpoint of the trainer")
    step = saved[-1] if ckpt.resume_step == -1 else ckpt.resume_step
    if step not in saved:
        raise UserError(f"no checkpoint of step {step} in {root}; there are {', '.join(map(str, saved))}")
    if max_steps is not None and step > max_steps:
        raise UserError(f"max_steps {max_steps} is below the checkpoint's step {step}: nothing to do")
    following = step
    committed = list_steps(output_dir / "rollouts")
    while following in committed:
        following += 1
    return Progress(following, _groups_opened(output_dir / "rollouts", following - 1), step, resumed=True)


def refuse_used(output_dir: Path, progress: Progress) -> None:
    """Raise UserError where a fresh run would mix its batches with those of an earlier one."""
    if not progress.resumed and (steps := list_steps(output_dir / "rollouts")):
        raise UserError(
            f"{output_dir / 'rollouts'} holds steps {steps[0]}-{steps[-1]} of an earlier run: choose another output_dir, remove it "
            "(`rl --clean`), or go on from a checkpoint with --ckpt.resume-step"
        )


def latest_incarnation(output_dir: Path) -> Incarnation:
    """The trainer's present life, by the files that it commits when it starts."""
    numbers = [int(path.stem) for path in (output_dir / "incarnations").glob("*.json") if path.stem.isdigit()]
    if not numbers:
        return Incarnation()
    number = max(numbers)
    return Incarnation(number, json.loads((output_dir / "incarnations" / f"{number}.json").read_text())["step"])


def newest_version(weights_dir: Path, incarnation: Incarnation) -> int | None:
    """The newest committed version of a life: one it made, or the one it started from. None before there is one."""
    for version in reversed(list_steps(weights_dir)):
        if version == incarnation.start:
            return version
        try:
            if weights_manifest(version_dir(weights_dir, version)).incarnation == incarnation.number:
                return version
        except CommitError:  # pruned since it was listed
            continue
    return None


def _groups_opened(rollouts: Path, last: int) -> int:
    """How far the task stream was drawn when the batch of step `last` was committed."""
    if last < 0:
        return 0
    try:
        return int(read_manifest(rollouts / f"step_{last}").extra["groups_opened"])
    except (CommitError, KeyError) as error:
        raise UserError(f"cannot resume: the batch before the checkpoint is missing or damaged ({error})") from error
