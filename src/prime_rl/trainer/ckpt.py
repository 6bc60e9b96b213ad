"""The training state on disk over a run: what it resumes from, what is saved when, and what later incarnations need.

`checkpoints/step_N/trainer` and `recovery/step_N` hold the state after N updates (model, optimizer and progress; data
and learning rate are functions of the step and the seed), committed by rename. Any number of ranks can load either.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from loguru import logger

from prime_rl import faults
from prime_rl.config.trainer import TrainerConfig, TrainingConfig
from prime_rl.errors import UserError
from prime_rl.trainer import training_state
from prime_rl.trainer.model import Policy
from prime_rl.trainer.optim import ShardedOptimizer
from prime_rl.trainer.parallel import World, agree, background_world, on_main, sum_over_ranks
from prime_rl.trainer.source import Source
from prime_rl.trainer.weight_publisher import WeightPublisher
from prime_rl.transport import checkpoints, incarnations
from prime_rl.transport.commit import Stage, clean_stages, list_steps, prune, read_manifest, step_dir, subject_of
from prime_rl.transport.protocol import current_incarnation
from prime_rl.transport.settings import suggestions
from prime_rl.transport.weights import version_hash, weights_manifest
from prime_rl.wait import LEAST_POLL_SECONDS, TaskThread, wait

PART: checkpoints.Part = "trainer"
Kind = Literal["checkpoint", "recovery checkpoint"]
_STATE = "state"
# Recovery checkpoints by the clock
_FIRST_RECOVERY_STEPS = 3  # updates before the first one: a run that is killed early has one
_CHECKPOINT_MARGIN_STEPS = 3  # before a checkpoint, which would wait for it, none is begun


@dataclass(frozen=True)
class Progress:
    """`step` updates were made, on `tokens` tokens of `samples` samples."""

    step: int = 0
    tokens: int = 0
    samples: int = 0


def recovery_pause(held_up: float, writing: float) -> float:
    """Seconds until the next recovery checkpoint; the last one held the loop up and was written for so many.

    They may hold the loop up for 1 % of the run's time, and be written during 5 % of it: writing takes a disk, and now
    and then the interpreter. At least one an hour is made, except within the last steps before a checkpoint is due.
    """
    return min(max(held_up / 0.01, writing / 0.05), 3600.0)


class Checkpoints:
    """Everything between the training state and the disk. Every rank calls every method, at the same point of the run.

    The order: `choose`, `check_model`, `load`, `begin`; in each step `poll`, `before_update`, and `save` where it is
    `due`; `finish`; `close` in any case. One save at most is under way; the next call raises what failed in the
    background, on every rank. With `recover` the run resumes from its last committed state, if it has begun. Recovery
    checkpoints are always written in the background; with `recovery_interval` "auto" as `recovery_pause` says, and
    never while one is being written. `alone`: whether no other process takes part in the checkpoints, so that this one
    joins them.
    """

    def __init__(self, config: TrainingConfig, world: World, *, alone: Callable[[], bool]) -> None:
        self.world, self.alone = world, alone
        rl = config if isinstance(config, TrainerConfig) else None
        self.recover = rl is not None and rl.recover
        self.recovery_interval = None if rl is None else rl.recovery_interval
        self._recoverable = rl is not None
        self.output_dir, self.config, self.max_steps = config.output_dir, config.ckpt, config.max_steps
        self.root = ((config.ckpt and config.ckpt.output_dir) or config.output_dir) / "checkpoints"
        self.recovery, self.weights = config.output_dir / "recovery", config.output_dir / "weights"
        self._alpha = None if config.lora is None else config.lora.alpha  # part of the policy, and of no tensor
        self.resumed: Path | None = None  # the state that this run resumes from
        self.base: str | None = None  # hash of the base model
        self.incarnation = 0
        self._saving: Path | None = None  # the state that is being written in the background
        self._recovery_due = False  # by the clock, after the present step
        # Of the last save: when it was, and the seconds that it took of the loop and of the thread.
        self._held_up = self._writing = 0.0
        self._saved_at: float | None = None
        self._background = background_world(world, config.dist_timeout)
        self._copy = training_state.HostCopy(world.device)
        self._thread = TaskThread("checkpoint", "the thread that writes it", config.dist_timeout, world.use_device)

    def choose(self, marked_finished: bool = False) -> bool:
        """Decide what to resume from, before anything is loaded or written. Rank 0 hashes it, within `dist_timeout`.

        Returns whether a run that is to be recovered, and whose last status was `finished` (`marked_finished`), has
        nothing left to do: its last state and version are committed. Raises UserError: there is no such checkpoint, it
        is damaged or of a newer format; an earlier run or something foreign is in the way.
        """
        resumed, is_finished = on_main(self.world, lambda: self._choose(marked_finished))
        self.resumed = None if resumed is None else Path(resumed)
        return is_finished

    def check_model(self, source: Source) -> None:
        """Raise UserError unless the base model is the one that the run, and the state it resumes from, began with. It
        is hashed only where there is something to compare it with."""

        def check() -> None:
            run, began = step_dir(self.weights, 0), None
            if run.is_dir() and ((first := weights_manifest(run)).adapter or first.base):  # else an adapter's sum
                began = first.adapter.base if first.adapter else first.hash
            saved = None if self.resumed is None else read_manifest(self.resumed).extra.get("base")
            if source.directory is None or not (began or saved):
                return
            base = version_hash(source.tensors)
            for directory, other in ((run, began), (self.resumed, saved)):
                if other not in (None, base):
                    raise UserError(
                        f"{directory} belongs to another base model than {source.name}: give the model.name that it "
                        "began with"
                    )

        on_main(self.world, check)

    def load(self, policy: Policy, optimizer: ShardedOptimizer) -> Progress:
        """Put the chosen state, which is verified, into model and optimizer; they are what is saved from now on. Raises
        UserError if the state is damaged, or belongs to another model."""
        self.policy, self.optimizer = policy, optimizer
        if self.resumed is None:
            return Progress()
        directory = self.resumed
        extra = on_main(self.world, lambda: read_manifest(directory).extra)
        if (alpha := extra.get("alpha")) is not None and self._alpha not in (None, alpha):
            raise UserError(
                f"{directory} was trained with another lora.alpha than {self._alpha:g}: give lora.alpha = {alpha:g}"
            )
        agree(self.world, lambda: training_state.load(self._state(), directory / _STATE, self.world))
        return Progress(**extra["progress"])

    def begin(self, versions: WeightPublisher, start: int) -> None:
        """Open an incarnation that goes on from step `start`, rename or remove superseded ones, commit its version."""
        self.incarnation, self.base = versions.open(start)
        on_main(self.world, lambda: self._supersede_after(start))
        if start > 0:
            versions.ensure(start)
        if self.recovery_interval is not None or self._in_background("checkpoint"):
            self._thread.submit("host memory for checkpoints", partial(self._copy.reserve, self._state()))
        self._start = start

    def due(self, step: int) -> Kind | None:
        """What is to be saved after `step` updates."""
        interval = None if self.config is None else self.config.interval
        if interval is not None and step % interval == 0:
            return "checkpoint"
        every = self.recovery_interval
        if every == "auto":
            recovers = self._recovery_due and (interval is None or -step % interval > _CHECKPOINT_MARGIN_STEPS)
        else:
            recovers = every is not None and step % every == 0
        return "recovery checkpoint" if recovers else None

    def holds_up(self, kind: Kind) -> bool:
        """Whether `save` will wait for a disk: what it waits for must not wait for the loop."""
        return self._saving is not None or not self._in_background(kind)

    def _in_background(self, kind: Kind) -> bool:
        return kind != "checkpoint" or (self.config is not None and self.config.save_async)

    def will_need(self, version: int, async_level: int) -> bool:
        """Whether a checkpoint that is due then needs this version (`protocol.prunable`)."""
        interval = None if self.config is None else self.config.interval
        return interval is not None and -version % interval <= async_level

    def save(
        self, progress: Progress, kind: Kind = "checkpoint", dependencies_committed: Callable[[], bool] = lambda: True
    ) -> None:
        """Commit the training state, once what must not be behind it (its row, its version) is committed. In the
        background: return once a copy of it is begun; the thread waits for `dependencies_committed`. Raises UserError
        if the disk is full, or an earlier save failed; no final name holds anything half-written."""
        began = time.monotonic()
        self.settle()
        final = self._final(progress.step, kind)
        if self._in_background(kind):
            copy = self._copy.take(self._state())
            faults.point(f"saved-copy:step_{progress.step}")
            self._saving = final
            self._thread.submit(subject_of(final), lambda: self._write(copy, progress, final, dependencies_committed))
        else:
            self._write(self._state(), progress, final, dependencies_committed)
        self._saved_at = time.monotonic()
        self._held_up = self._saved_at - began

    def before_update(self) -> None:
        """To be called before the state changes: the device changes it after it is copied. The host does not wait."""
        self._copy.before_update()

    def poll(self, step: int) -> None:
        """Take the result of a finished save and schedule recovery checkpoints. Called at the start of step `step`.
        Raises what a save failed with, on every rank in the same step: the ranks agree on everything here, in one
        sum."""
        by_clock = self.recovery_interval == "auto"
        if not self._thread.tasks and not by_clock:
            return
        finished = [task for _, task in self._thread.tasks if task.done()]
        failed = any(task.exception(timeout=0) is not None for task in finished)
        idle = len(finished) == len(self._thread.tasks)
        if self._saved_at is None:
            late = step + 1 >= self._start + _FIRST_RECOVERY_STEPS
        else:
            late = time.monotonic() - self._saved_at > recovery_pause(self._held_up, self._writing)
        all_idle, any_failed, is_late = sum_over_ranks(self.world, [idle, failed, late and self.world.is_main])
        all_are_idle = all_idle == self.world.size
        if any_failed or all_are_idle:
            self.settle()
        self._recovery_due = by_clock and all_are_idle and is_late > 0  # nobody waits for a recovery checkpoint

    @property
    def idle(self) -> bool:
        """Whether this rank saves nothing in the background."""
        return self._thread.idle

    def settle(self) -> None:
        """Wait for the save in the background, at most `dist_timeout`. Raises UserError if it fails or takes longer."""
        if self._thread.tasks:
            agree(self.world, self._thread.results)
            self._saving = None  # not before: until it is committed, `needed` names it

    def finish(self, progress: Progress, stopped: bool = False) -> None:
        """At the end of a run, save the last state, with nothing left under way: as a checkpoint; without `ckpt` a run
        that was `stopped` saves a recovery checkpoint, to go on from here."""
        self.settle()
        final = self._final(progress.step, "recovery checkpoint" if self.config is None else "checkpoint")
        is_saved = on_main(self.world, lambda: checkpoints.is_committed(final))
        wanted = self.config is not None or (stopped and self.recovery_interval is not None)
        if wanted and progress.step > 0 and not is_saved:
            self._write(self._state(), progress, final, lambda: True)

    def close(self) -> None:
        """Let the thread finish its work, for at most `dist_timeout`, and log what failed."""
        self._copy.closed = True
        for failure in self._thread.close():
            logger.error("{}", failure)

    def needed(self) -> set[int]:
        """Steps of the checkpoints that are committed or being written, whose weights must stay. Rank 0."""
        final = self._saving
        saving = set() if final is None or final.name != PART else {int(final.parent.name.removeprefix("step_"))}
        return {*checkpoints.steps_with(self.root, PART), *saving}

    # ---- what to resume from, on rank 0

    def _choose(self, marked_finished: bool) -> tuple[str | None, bool]:
        resume = None if self.config is None else self.config.resume_step
        ours = incarnations.read_versions(self.weights)
        if foreign := [step_dir(self.weights, each) for each in list_steps(self.weights) if each not in ours]:
            raise UserError(
                f"{foreign[0]} was not made by this program, or is damaged: move it out of the run directory"
            )
        # The launcher restarts a trainer that was asked to resume with both: a run that has begun goes on by itself.
        opened = incarnations.read_incarnations(self.output_dir)
        begun = opened or list_steps(self.recovery) or max(list_steps(self.weights), default=0) > 0
        if self.recover and (resume is None or begun):
            is_finished = marked_finished and self.max_steps in list_steps(self.weights)
            if is_finished and self.config is None:
                return None, True
            newest = self._newest_whole()
            return newest, is_finished and newest == str(self._final(self.max_steps or 0, "checkpoint"))
        if resume is not None:
            step = checkpoints.choose_step(self.root, resume, PART, self.max_steps)
            later = [other for other in checkpoints.steps_with(self.root, PART) if other > step]
            if later and not opened:
                raise UserError(
                    f"{self.root} has later checkpoints, of another run (up to step_{later[-1]}): to branch off, copy "
                    f"step_{step} into a checkpoints directory of this run's own"
                )
            return str(self._final(step, "checkpoint")), False
        saved = checkpoints.steps_with(self.root, PART)
        versions = [version for version in list_steps(self.weights) if version > 0]
        for directory, what, steps in ((self.root, "checkpoints", saved), (self.weights, "versions", versions)):
            if steps:
                ways = suggestions(self.output_dir, saved=bool(saved), recover=self._recoverable)
                raise UserError(f"{directory} holds {what} of an earlier run (up to step_{steps[-1]}): {ways}")
        return None, False

    def _newest_whole(self) -> str | None:
        opened, damaged = incarnations.read_incarnations(self.output_dir), []
        for step, directory, problem in checkpoints.recoverable(self.root, self.recovery, opened):
            if problem is None:
                logger.info("recovering from {}, after {} updates", subject_of(directory), step)
                return str(directory)
            logger.warning("skipping {} ({}), trying an older checkpoint", subject_of(directory), problem)
            damaged.append(f"{directory} ({problem})")
        if damaged:
            raise UserError(
                f"cannot recover: every checkpoint is damaged: {'; '.join(damaged)}: put back a copy, or move these "
                "out of the run directory to start over from the base model"
            )
        start = current_incarnation(opened).start
        if start > 0:
            raise UserError(
                f"cannot recover: the run went on from step {start}, and neither that state nor a later one stands in "
                f"{self.root}: put it back, or go on from another one with --ckpt.resume-step"
            )
        done = max(list_steps(self.weights), default=0)
        logger.warning("no state was saved: training starts over from the base model, {} updates are made again", done)
        return None

    def _supersede_after(self, start: int) -> None:
        checkpoints.clean(self.root, PART)
        for path in checkpoints.supersede_after(self.root, start, self.incarnation):
            logger.warning("a checkpoint beyond step {} is superseded; it was moved to {}", start, path)
        clean_stages(self.recovery)
        self._remove_recovery_but(max((step for step in list_steps(self.recovery) if step <= start), default=None))
        # A crash may have come between part and joint manifest.
        if self.alone() and start in checkpoints.steps_with(self.root, PART):
            checkpoints.join(self.root, start, checkpoints.TRAINER_ONLY, PART)

    # ---- writing

    def _state(self) -> training_state.State:
        return training_state.training_state(self.policy, self.optimizer)

    def _final(self, step: int, kind: Kind) -> Path:
        if kind == "checkpoint":
            return checkpoints.part_dir(self.root, step, PART)
        return step_dir(self.recovery, step)

    def _write(
        self, state: training_state.State, progress: Progress, final: Path, dependencies_committed: Callable[[], bool]
    ) -> None:
        """Write and commit `state`, in any thread. Rank 0 hashes its files within `dist_timeout`; the others wait."""
        began, world = time.monotonic(), self._background
        self._copy.synchronize()
        nonce = on_main(world, lambda: secrets.token_hex(8))
        stage = agree(world, lambda: Stage(final, nonce))
        extra = {"progress": asdict(progress), "incarnation": self.incarnation, "base": self.base, "alpha": self._alpha}
        with stage:
            training_state.save(state, stage.path / _STATE, world)
            on_main(world, lambda: self._await_dependencies(progress.step, final, dependencies_committed))
            on_main(world, lambda: incarnations.refuse_if_superseded(self.output_dir, self.incarnation))
            on_main(world, lambda: stage.commit(step=progress.step, producer=PART, extra=extra))
        on_main(world, lambda: self._tidy(progress.step, final))
        self._writing = time.monotonic() - began

    def _await_dependencies(self, step: int, final: Path, dependencies_committed: Callable[[], bool]) -> None:
        wait(
            lambda: self._copy.closed or dependencies_committed(),
            subject=f"row and version of the state after {step} updates",
            owner="the training loop",
            seconds=self._thread.seconds,
            poll=LEAST_POLL_SECONDS,
        )
        if not dependencies_committed():
            raise UserError(
                f"{subject_of(final)} is not committed: the run ended before this step's metrics and weights were"
            )

    def _tidy(self, step: int, final: Path) -> None:
        if final.name != PART:
            self._remove_recovery_but(step)
        elif self.alone() and self.config is not None:
            checkpoints.join(self.root, step, checkpoints.TRAINER_ONLY, PART)
            checkpoints.remove_expendable(self.root, self.config.keep, self.config.keep_interval)

    def _remove_recovery_but(self, kept: int | None) -> None:
        for step in list_steps(self.recovery):
            if step != kept:
                prune(self._final(step, "recovery checkpoint"))
