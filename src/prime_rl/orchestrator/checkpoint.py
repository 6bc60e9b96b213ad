"""Where the orchestrator resumes, and its part of a checkpoint.

The state after each step is in the manifest of the batch that ended it (`extra["state"]`), committed with the batch by
one rename. A checkpoint's part is a copy of it, made whenever the trainer's part of that step is there: nothing about
checkpoints has to be remembered over a crash.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from prime_rl.errors import UserError
from prime_rl.transport import checkpoints
from prime_rl.transport.commit import MANIFEST, CommitError, list_steps, read_manifest, stage
from prime_rl.transport.protocol import first_missing_batch, valid_versions

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig
    from prime_rl.config.shared import CkptConfig

PART: checkpoints.Part = "orchestrator"


@dataclass(frozen=True)
class OrchestratorState:
    """The orchestrator's state between two steps. Task stream and requests are functions of `seed`: no random state."""

    step: int = 0  # collected next
    seed: int = 0  # the run's
    groups_opened: int = 0  # the position in the task stream
    algorithm: dict[str, Any] = field(default_factory=dict)  # what each environment's algorithm remembers
    curriculum: dict[str, dict[str, Any]] = field(default_factory=dict)  # difficulty pools by environment, whole


@dataclass(frozen=True)
class ResumePoint:
    step: int = 0  # collected next
    version: int = 0  # resumed: the step that the trainer's incarnation starts from; else 0
    resumed: bool = False  # from a checkpoint, with what was committed after it
    recovered: bool = False  # from whatever is committed
    state: OrchestratorState = field(default_factory=OrchestratorState)

    @property
    def fresh(self) -> bool:
        return not (self.resumed or self.recovered)


def resume_point(config: "OrchestratorConfig") -> ResumePoint:
    """Find where to start: at step 0, or after what the run directory already holds.

    Batches committed beyond the checkpoint are trained again unchanged, so collecting resumes after them. With
    `recover`, after a crash, everything that is committed counts; the run may once have been resumed from a checkpoint.
    Raises UserError: there is no such checkpoint, it is damaged, or it lies beyond `max_steps`. Or the run would
    continue with other tasks than it began with.
    """
    ckpt, recover, rollouts = config.ckpt, config.recover, config.output_dir / "rollouts"
    asked = ckpt.resume_step if ckpt is not None else None
    if asked is None and not recover:
        return ResumePoint()
    batches, version, state = list_steps(rollouts), 0, OrchestratorState()
    try:
        if recover and (asked is None or asked in batches):
            start = min(batches, default=0)
        else:
            assert asked is not None
            root = JointCheckpoints(config.output_dir, ckpt).root
            start = checkpoints.choose_step(root, asked, PART, None if recover else config.max_steps)
            state, version = read_state(checkpoints.part_dir(root, start, PART)), 0 if recover else start
        step = first_missing_batch(batches, start)
        if step > start:
            state = read_state(rollouts / f"step_{step - 1}")
    except CommitError as error:
        raise UserError(f"cannot resume this run: {error}") from error
    if state.groups_opened and state.seed != config.seed:
        began = f"the run began with seed {state.seed} and would continue with {config.seed}"
        raise UserError(f"{began}: tasks would be repeated and left out; give --seed {state.seed}")
    return ResumePoint(step, version, resumed=not recover, recovered=recover, state=state)


def read_state(directory: Path) -> OrchestratorState:
    """Read the state in a batch, or in this process's part of a checkpoint.
    Raises CommitError: it is not committed, or its manifest says nothing of a state that this version knows."""
    try:
        return OrchestratorState(**read_manifest(directory).extra["state"])
    except (KeyError, TypeError) as error:
        raise CommitError(f"{directory} has no orchestrator state: another version wrote it ({error})") from error


class JointCheckpoints:
    """The orchestrator's joint manifests: add its part to the trainer's, join the two, remove what is not kept."""

    def __init__(self, output_dir: Path, ckpt: "CkptConfig | None") -> None:
        self.root = ((ckpt and ckpt.output_dir) or output_dir) / "checkpoints"
        self.rollouts = output_dir / "rollouts"
        self._keep = (None, None) if ckpt is None else (ckpt.keep, ckpt.keep_interval)
        # The trainer may be reading it, while a later one that it is about to supersede still stands.
        self._resumed = () if ckpt is None or ckpt.resume_step is None else (ckpt.resume_step,)
        self._single: set[int] = set()  # without a batch before them
        # An orchestrator that was killed may not have removed something. After a resume, checkpoints that are about to
        # be superseded may still exist: nothing is removed before the next one is complete.
        self._untidy = not self._resumed

    def join(self, incarnations: Mapping[int, int]) -> list[int]:
        """Complete every checkpoint whose committed trainer part is of the current lineage. Return their steps.
        Raises UserError where the disk is full."""
        waiting: dict[int, int] = {}  # the incarnation that saved each
        complete = {*checkpoints.complete_steps(self.root), *self._single}
        for step in set(checkpoints.steps_with(self.root, "trainer")) - complete:
            with suppress(CommitError):  # superseded since it was listed
                manifest = read_manifest(checkpoints.part_dir(self.root, step, "trainer"))
                waiting[step] = checkpoints.saved_by(manifest, max(incarnations, default=0))
        joined = [step for step in valid_versions(waiting, incarnations) if self._join(step)]
        if joined or self._untidy:
            self._untidy = False
            checkpoints.remove_expendable(self.root, *self._keep, self._resumed)
        return joined

    def _join(self, step: int) -> bool:
        part = checkpoints.part_dir(self.root, step, PART)
        try:
            state = read_state(self.rollouts / f"step_{step - 1}")
            if not (part / MANIFEST).is_file():
                with stage(part, step=step, producer=PART, extra={"state": asdict(state)}):
                    pass
            checkpoints.join(self.root, step, checkpoints.BOTH_PARTS, PART)
        except (CommitError, FileNotFoundError) as error:
            if checkpoints.part_dir(self.root, step, "trainer").is_dir():  # else it was superseded meanwhile
                self._single.add(step)
                logger.warning("checkpoint {} stays without the orchestrator's part: {}", step, error)
            return False
        logger.info("checkpoint {} is complete", step)
        return True
