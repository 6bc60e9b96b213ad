"""Put what an earlier orchestrator left back into the scheduler: open groups, finished episodes, the place in the task stream, difficulty pools."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from loguru import logger

from prime_rl.envs.protocol import EpisodeResult
from prime_rl.errors import UserError
from prime_rl.orchestrator.admission import Admission
from prime_rl.orchestrator.checkpoint import ResumePoint, refuse_other_seed
from prime_rl.orchestrator.ledger import Counts, Ledger, read_batches, total
from prime_rl.orchestrator.scheduler import Group, GroupSlot, Opened, Scheduler, State, Task
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
    admission: Admission,
) -> Counts:
    """Restore a run into `scheduler`, and draw `stream` to where it was.

    Args:
        stream: The task stream from its beginning.
        version: The newest committed version of the present history.
        admission: Its difficulty pools are as at the beginning of a run. They go on from the saved state, and with what left since.

    Returns:
        Counts at the last committed batch, over all environments.

    Raises:
        UserError: the ledger's tasks are not the ones that the stream gives.
    """
    state, curriculum = progress.state, admission.curriculum
    for line in ledger.reconcile(read_batches(rollouts), version):
        logger.warning("ledger: {}", line)
    known = ledger.groups_opened
    # From difficulty pools only what was drawn since `state` is drawn again alike, for they have not changed since; before, environments alone count.
    tasks = list(itertools.islice(stream, state.groups_opened))
    curriculum.load(state.curriculum)
    left = ledger.left_since(state.step)
    for number, (task, rewards) in left.items():
        curriculum.leave(number, task, rewards)
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
    admission.restore(ledger.discards(state.step), {number: rewards for number, (_, rewards) in left.items()})
    return total({env: Counts(**one) for env, one in state.ledger.items()} if known else {})
