"""Put what an earlier orchestrator left back into the scheduler: open groups, finished episodes, the place in the task stream, difficulty pools."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from loguru import logger

from prime_rl.envs.protocol import EpisodeResult
from prime_rl.errors import UserError
from prime_rl.orchestrator.checkpoint import ResumePoint, refuse_other_seed
from prime_rl.orchestrator.ledger import Counts, Ledger, read_batches, total
from prime_rl.orchestrator.scheduler import Group, GroupSlot, Opened, Scheduler, State, Task
from prime_rl.orchestrator.tasks import Curriculum
from prime_rl.transport.settings import ways_out


def open_ledger(output_dir: Path, seed: int, progress: ResumePoint) -> Ledger:
    """The run's ledger.

    Raises:
        UserError: it is damaged, or belongs to a run that this one would be mixed with.
    """
    ledger = Ledger(output_dir / "ledger.sqlite")
    try:
        issued = total(ledger.counts()).issued
        if progress.fresh and issued:
            ways = ways_out(output_dir, saved=False)
            raise UserError(f"{ledger.path} has {issued} episodes of an earlier run: {ways}")
        refuse_other_seed(progress, seed)
    except UserError:
        ledger.close()
        raise
    return ledger


def restore(
    scheduler: Scheduler[EpisodeResult],
    ledger: Ledger,
    rollouts: Path,
    progress: ResumePoint,
    stream: Iterator[Task],
    version: int,
    curriculum: Curriculum,
) -> Counts:
    """Restore a run into `scheduler`, and draw `stream` to where it was.

    Args:
        stream: The task stream from its beginning.
        version: The newest committed version of the present history.
        curriculum: Difficulty pools as at the beginning of a run; they go on from the saved state.

    Returns:
        Counts over all environments at the last committed batch, or now if that batch was removed.

    Raises:
        UserError: the ledger's tasks are not the ones that the stream gives.
    """
    state, batches = progress.state, read_batches(rollouts)
    for line in ledger.reconcile(batches, version, progress.step):
        logger.warning("ledger: {}", line)
    known = ledger.groups_opened
    # From difficulty pools only what was drawn since `state` is drawn again alike, for they have not changed since; before, environments alone count.
    tasks = list(itertools.islice(stream, state.groups_opened))
    curriculum.load(state.curriculum)
    tasks += itertools.islice(stream, max(0, known - len(tasks)))
    scheduler.groups_opened = len(tasks)
    groups = ledger.open_groups(scheduler.limits.group_size)
    for group in groups:
        task, pools = group.task, curriculum.pools.get(group.task.env)
        if not pools.holds(task) if pools is not None else tasks[group.number] != task:
            drawn = tasks[group.number]
            raise UserError(
                f"group {group.number} is about task {task.task_id} of {task.env}, but the seed and the environments give "
                f"{drawn.task_id} of {drawn.env}: go on with those that the run began with"
            )
    for number in state.open_groups:
        if number >= known:  # it was opened in a run whose ledger is not here: a checkpoint that was taken elsewhere
            task, index = tasks[number], state.open_tasks.get(str(number))
            pools = curriculum.pools.get(task.env)
            if pools is not None and index is not None:  # else the stream gives it again
                task = pools.task(index) or task
            ledger.record(Opened(number, task))
            groups.append(Group(number, task, {i: GroupSlot(i) for i in range(scheduler.limits.group_size)}))
    scheduler.restore(groups)
    if groups:
        finished = sum(len(group.finished) for group in groups)
        retried = sum(slot.state is State.RETRY for group in groups for slot in group.slots.values())
        logger.info(
            "{} open groups go on, with {} finished episodes; {} are started again", len(groups), finished, retried
        )
    newest = next((batch for batch in batches if batch.event.step == progress.step - 1), None)
    before = newest.counts if newest is not None else ledger.counts() if progress.step else {}
    return total(before)
