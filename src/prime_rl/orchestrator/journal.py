"""The ledger in the loop: what an earlier incarnation left is put back into the core, what happens is written at the right moments, and the two accounts
must agree.

A finished episode is written only after the engines have proven what they serve: whatever the ledger holds as finished may be trained.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from loguru import logger

from prime_rl.envs.protocol import EpisodeResult
from prime_rl.errors import UserError
from prime_rl.orchestrator.account import Account
from prime_rl.orchestrator.ckpt import Progress, State, refuse_other_seed
from prime_rl.orchestrator.core import Batch, Core, Drop, Finished, Group, Start, Task
from prime_rl.orchestrator.curriculum import Curriculum
from prime_rl.orchestrator.ledger import Ledger, OpenGroup, read_batches
from prime_rl.orchestrator.metrics import Tally
from prime_rl.orchestrator.samples import Scored
from prime_rl.transport.settings import ways_out

FLUSH_SECONDS = 1.0  # the least time between two flushes within a step


class Journal:
    """One run's ledger, and its place in the task stream."""

    def __init__(self, output_dir: Path, seed: int, progress: Progress) -> None:
        """Raises UserError when the ledger is damaged, or belongs to a run that this one would be mixed with."""
        self.rollouts = output_dir / "rollouts"
        self.seed = seed
        self.ledger = Ledger(output_dir / "ledger.sqlite")
        self._drawn: Counter[str] = Counter()  # groups by environment
        self.left: dict[int, list[float]] = {}  # rewards of groups that left without a batch since the last one
        self.discards: Counter[str] = (
            Counter()
        )  # groups that left without a batch since the last one, in an earlier incarnation
        self._flushed = time.monotonic()
        issued = self.ledger.account().total.issued
        if progress.fresh and issued:
            self.ledger.close()
            raise UserError(
                f"{self.ledger.path} tells of {issued} episodes of an earlier run: {ways_out(output_dir, saved=False)}"
            )
        try:
            refuse_other_seed(progress, seed)
        except UserError:
            self.ledger.close()
            raise

    # -- going on ------------------------------------------------------------------------------------------------------------

    def restore(
        self, core: Core[EpisodeResult], state: State, stream: Iterator[Task], version: int, curriculum: Curriculum
    ) -> Tally:
        """Put into `core` what an earlier incarnation left, and draw `stream` to where it was.

        Args:
            stream: The task stream from its beginning.
            version: The newest committed version of the present history.
            curriculum: Difficulty pools, as they are at the beginning of a run. They go on from `state`, and with what left since.

        Returns:
            Counts since the last committed batch.

        Raises:
            UserError: the ledger's tasks are not the ones that the stream gives.
        """
        for line in self.ledger.reconcile(read_batches(self.rollouts), version):
            logger.warning("ledger: {}", line)
        known = self.ledger.groups_opened()
        tasks = self._draw_again(stream, state, known, curriculum)
        self._drawn.update(task.env for task in tasks)
        core.groups_opened = len(tasks)
        groups = [self._restored(group, tasks, curriculum) for group in self.ledger.open_groups(core.limits.group_size)]
        for number in state.open_groups:
            if number >= known:  # drawn in a run whose ledger is not here: a checkpoint that was taken elsewhere
                task = _task_of(number, tasks[number], state, curriculum)
                groups.append(self._opened_elsewhere(number, task, core.limits.group_size))
        total = self.ledger.account().total
        dropped = {Drop(reason): count for reason, count in total.dropped.items()}
        core.restore(groups, total.issued, total.trained + total.batched, dropped)
        if groups:
            finished = sum(len(group.finished) for group in groups)
            again = sum(len(group.again) for group in groups)
            logger.info(
                "{} open groups go on, with {} finished episodes; {} are started again", len(groups), finished, again
            )
        before = Account.from_json(state.ledger) if known else Account()
        self.discards = self.ledger.discards - Counter(state.discards)
        return Tally.since(before.total, total)

    def _draw_again(self, stream: Iterator[Task], state: State, known: int, curriculum: Curriculum) -> list[Task]:
        """What was drawn before: `known` groups of this ledger, or those of `state`.

        From difficulty pools only what was drawn since `state` is drawn again alike, for they have not changed since; of what was drawn before
        only the environments count.
        """
        tasks = list(itertools.islice(stream, state.groups_opened))
        curriculum.load(state.curriculum)
        for left in self.ledger.left_since(state.step):
            self.left[left.number] = left.rewards
            curriculum.leave(left.number, Task(left.env, left.task_index, left.task_id), left.rewards)
        return [*tasks, *itertools.islice(stream, max(0, known - len(tasks)))]

    def _restored(self, found: OpenGroup, tasks: Sequence[Task], curriculum: Curriculum) -> Group[EpisodeResult]:
        task, pools = Task(found.env, found.task_index, found.task_id), curriculum.pools.get(found.env)
        if not pools.holds(task) if pools is not None else tasks[found.number] != task:
            raise UserError(
                f"group {found.number} is about task {task.task_id} of {task.env}, but the seed and the environments give "
                f"{tasks[found.number].task_id} of {tasks[found.number].env}: go on with those that the run began with"
            )
        finished = [
            Finished(
                Start(found.number, one.number, one.attempt, task, one.version),
                one.first,
                one.last,
                one.result,
                one.incarnation,
            )
            for one in found.finished
        ]
        return Group(found.number, task, waiting=found.waiting, again=found.again, finished=finished, lost=found.lost)

    def _opened_elsewhere(self, number: int, task: Task, size: int) -> Group[EpisodeResult]:
        self.ledger.opened(number, task.env, task.index, task.task_id)
        return Group(number, task, waiting=[(i, 0) for i in range(size)])

    def drawing(self, stream: Iterator[Task]) -> Iterator[Task]:
        """The rest of the stream; what is drawn is counted."""
        for task in stream:
            self._drawn[task.env] += 1
            yield task

    # -- writing -------------------------------------------------------------------------------------------------------------

    def extra(
        self,
        core: Core[EpisodeResult],
        batch: Batch[EpisodeResult],
        scored: Scored,
        curriculum: dict[str, dict[str, Any]],
    ) -> dict[str, Any]:
        """What the manifest of a batch says about episodes, and the orchestrator's state once it is committed."""
        numbers = [group.number for group in batch.groups]
        extra = self.ledger.batch_extra(
            batch.step, scored.trained, scored.filtered, scored.truncated, numbers, scored.details
        )
        batched = set(numbers)
        still_open = [number for number in core.open_groups if number not in batched]
        tasks = {number: self.ledger.task_of(number) for number in still_open if curriculum}
        state = State(
            step=batch.step + 1,
            seed=self.seed,
            groups_opened=core.groups_opened,
            environments=dict(sorted(self._drawn.items())),
            open_groups=still_open,
            algorithm=scored.state,
            curriculum=curriculum,
            open_tasks={str(number): task.index for number, task in tasks.items() if task.env in curriculum},
            discards=dict(self.ledger.discards),
            ledger=extra["ledger"]["account"],
        )
        return extra | {"state": state.to_json()}

    @property
    def due(self) -> bool:
        """Whether it is time to flush within a step."""
        return time.monotonic() - self._flushed >= FLUSH_SECONDS

    async def flush(self) -> None:
        """Write what was recorded, in a thread. One transaction.

        Raises:
            UserError: the disk is full.
        """
        self._flushed = time.monotonic()
        await asyncio.to_thread(self.ledger.flush)

    def check(self, core: Core[EpisodeResult]) -> None:
        """The scheduler's account and the ledger's are conserved, and the same.

        Raises:
            UserError: they are not; the message tells the difference.
        """
        account = self.ledger.account()
        try:
            core.check_conservation()
            account.check()
        except AssertionError as error:
            raise UserError(
                f"episodes are lost or counted twice, so the run stops (a fault of prime-rl): {error}"
            ) from error
        total = account.total
        ours = {
            "issued": core.issued,
            "in flight": core.owed,
            "finished": core.waiting_for_batch,
            "in a batch": core.trained,
        } | {str(reason): count for reason, count in core.dropped.items()}
        theirs = {
            "issued": total.issued,
            "in flight": total.in_flight,
            "finished": total.finished,
            "in a batch": total.batched + total.trained,
        } | total.dropped
        wrong = [
            f"{name}: {ours.get(name, 0)} here, {theirs.get(name, 0)} in the ledger"
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name, 0) != theirs.get(name, 0)
        ]
        if wrong:
            raise UserError(
                f"the scheduler and {self.ledger.path.name} do not agree, so the run stops (a fault of prime-rl): {'; '.join(wrong)}"
            )

    def close(self) -> None:
        """Close the file; call `flush` before."""
        self.ledger.close()


def _task_of(number: int, drawn: Task, state: State, curriculum: Curriculum) -> Task:
    """The task of a group that was open in `state`, where the stream now gives `drawn`."""
    pools, index = curriculum.pools.get(drawn.env), state.open_tasks.get(str(number))
    task = None if pools is None or index is None else pools.task(index)
    return task or drawn
