"""Where the orchestrator goes on, and its part of a checkpoint.

The state after each step is in the manifest of the batch that ended it (`extra["state"]`), committed with the batch by
one rename. A checkpoint's part is a copy of it, made whenever the trainer's part of that step is there: nothing about
checkpoints has to be remembered over a crash.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from prime_rl.errors import UserError
from prime_rl.transport import checkpoints
from prime_rl.transport.commit import (
    MANIFEST,
    CommitError,
    disk_errors,
    list_steps,
    read_manifest,
    stage,
)
from prime_rl.transport.incarnations import run_id
from prime_rl.transport.protocol import first_missing_batch, joinable
from prime_rl.transport.settings import suggestions

if TYPE_CHECKING:
    from prime_rl.config.shared import CkptConfig

PART: checkpoints.Part = "orchestrator"
STATE_FILE = "state.json"


@dataclass(frozen=True)
class OrchestratorState:
    """The orchestrator's state between two steps. Random numbers have none: task stream and requests are functions of `seed`.

    Args:
        step: The next step to collect.
        seed: The run's seed.
        groups_opened: The position in the task stream.
        algorithm: What each environment's algorithm remembers, if anything.
        curriculum: The difficulty pools of each environment that has any, whole: no earlier batch is needed.
    """

    step: int = 0
    seed: int = 0
    groups_opened: int = 0
    algorithm: dict[str, Any] = field(default_factory=dict)
    curriculum: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class ResumePoint:
    """Where the run goes on: `step` is collected next, `version` is the step that the trainer's incarnation starts from.

    `resumed`: from a checkpoint, with what was committed after it. `recovered`: from whatever is committed.
    """

    step: int = 0
    version: int = 0
    resumed: bool = False
    recovered: bool = False
    state: OrchestratorState = field(default_factory=OrchestratorState)

    @property
    def fresh(self) -> bool:
        """Whether this is a run from the beginning."""
        return not (self.resumed or self.recovered)


def resume_point(
    output_dir: Path, ckpt: "CkptConfig | None", max_steps: int | None = None, recover: bool = False
) -> ResumePoint:
    """Find where to start: at step 0, or after what the run directory already holds.

    Batches committed beyond the checkpoint are trained again unchanged, so collecting goes on after them.

    Args:
        recover: Go on after a crash: everything that is committed counts. The run may once have been resumed from a checkpoint.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or it lies beyond `max_steps`.
    """
    asked, rollouts = ckpt.resume_step if ckpt is not None else None, output_dir / "rollouts"
    if asked is None and not recover:
        return ResumePoint()
    batches, version = list_steps(rollouts), 0
    if recover and (asked is None or asked in batches):
        start, state = min(batches, default=0), OrchestratorState()
    else:
        assert asked is not None
        root = checkpoints_root(output_dir, ckpt)
        start = checkpoints.choose_step(root, asked, PART, None if recover else max_steps)
        state, version = read_part(root, start), 0 if recover else start
    step = first_missing_batch(batches, start)
    if step > start:
        try:
            state = read_state(rollouts, step - 1)
        except CommitError as error:
            raise UserError(f"cannot go on from step {step}: the batch before it is damaged ({error})") from error
    return ResumePoint(step, version, resumed=not recover, recovered=recover, state=state)


def checkpoints_root(output_dir: Path, ckpt: "CkptConfig | None") -> Path:
    """Return the directory of the run's checkpoints."""
    return ((ckpt and ckpt.output_dir) or output_dir) / "checkpoints"


def refuse_used(output_dir: Path, progress: ResumePoint) -> None:
    """Raise UserError where a fresh run would mix its batches with those of an earlier one."""
    if not progress.fresh:
        return
    for name, first in (("rollouts", 0), ("weights", 1)):  # a trainer that is up already has committed version 0
        if steps := [step for step in list_steps(output_dir / name) if step >= first]:
            ways = suggestions(output_dir, saved=bool(list_steps(output_dir / "checkpoints")))
            raise UserError(f"{output_dir / name} holds steps {steps[0]}-{steps[-1]} of an earlier run: {ways}")


def refuse_other_seed(progress: ResumePoint, seed: int) -> None:
    """Raise UserError where a run would go on with other tasks than it began with."""
    if not progress.fresh and progress.state.groups_opened and progress.state.seed != seed:
        began = f"the run began with seed {progress.state.seed} and would go on with {seed}"
        raise UserError(f"{began}: tasks would be repeated and left out; give --seed {progress.state.seed}")


def read_state(rollouts: Path, step: int) -> OrchestratorState:
    """Read the state after the batch of `step`.

    Raises:
        CommitError: the batch is not committed, or its manifest says nothing of a state.
    """
    directory = rollouts / f"step_{step}"
    return _state(read_manifest(directory).extra.get("state"), directory / MANIFEST)


def read_part(root: Path, step: int) -> OrchestratorState:
    """Read the state in this process's part of checkpoint `step`.

    Raises:
        UserError: it is damaged.
    """
    path = checkpoints.part_dir(root, step, PART) / STATE_FILE
    try:
        return _state(json.loads(path.read_bytes()), path)
    except (CommitError, OSError, ValueError) as error:
        raise UserError(f"cannot resume from step {step}: {error}") from error


class JointCheckpoints:
    """The orchestrator owns the joint manifest: it adds its part to the trainer's, joins the two, removes what is not kept."""

    def __init__(self, output_dir: Path, ckpt: "CkptConfig | None") -> None:
        self.root = checkpoints_root(output_dir, ckpt)
        self.rollouts = output_dir / "rollouts"
        self._keep = ckpt.keep if ckpt is not None else None
        self._keep_interval = ckpt.keep_interval if ckpt is not None else None
        # The trainer may be reading it, while a later one that it is about to give up still stands.
        self._resumed = () if ckpt is None or ckpt.resume_step is None else (ckpt.resume_step,)
        self._hopeless: set[int] = set()
        # An earlier incarnation may have died before it removed something. After a resume, checkpoints about to be
        # superseded may still exist: do not prune before the next checkpoint.
        self._untidy = not self._resumed

    def join(self, incarnations: Mapping[int, int]) -> list[int]:
        """Complete every checkpoint whose trainer part is committed and belongs to the current lineage. Returns their steps.

        Raises:
            UserError: the disk is full.
        """
        joined = [step for step in self._waiting(incarnations) if self._join(step)]
        if joined or self._untidy:
            self._untidy = False
            run = run_id(self.rollouts.parent)
            checkpoints.remove_expendable(self.root, self._keep, self._keep_interval, self._resumed, run)
        return joined

    def _waiting(self, incarnations: Mapping[int, int]) -> list[int]:
        """Steps with a trainer part of the current lineage and no joint manifest."""
        complete = {*checkpoints.complete_steps(self.root), *self._hopeless}
        parts, run = {}, run_id(self.rollouts.parent)
        for step in checkpoints.steps_with(self.root, "trainer"):
            if step not in complete:
                try:
                    manifest = read_manifest(checkpoints.part_dir(self.root, step, "trainer"))
                except CommitError:  # set aside since it was listed
                    continue
                if manifest.extra.get("run", run) != run:  # a run that shares the place
                    continue
                parts[step] = checkpoints.saved_by(manifest, max(incarnations, default=0))
        return joinable(parts, incarnations)

    def _join(self, step: int) -> bool:
        try:
            part = checkpoints.part_dir(self.root, step, PART)
            state = read_state(self.rollouts, step - 1)
            if not (part / MANIFEST).is_file():
                with stage(part, step=step, producer=PART) as directory, disk_errors(directory):
                    (directory / STATE_FILE).write_text(json.dumps(asdict(state), indent=1))
            checkpoints.join(self.root, step, checkpoints.BOTH_PARTS, PART)
        except (CommitError, FileNotFoundError) as error:
            if checkpoints.part_dir(self.root, step, "trainer").is_dir():  # else it was set aside meanwhile
                self._hopeless.add(step)
                logger.warning("checkpoint {} stays without the orchestrator's part: {}", step, error)
            return False
        logger.info("checkpoint {} is complete", step)
        return True


def _state(data: object, path: Path) -> OrchestratorState:
    if not isinstance(data, dict):
        raise CommitError(f"{path} contains no orchestrator state: another version wrote it")
    try:
        return OrchestratorState(**data)
    except TypeError as error:
        raise CommitError(
            f"{path} has a state of the orchestrator that this version does not know ({error})"
        ) from error
