"""Core and ledger together, through crashes at any event: what an orchestrator that died left is gone on with, and nothing is lost or doubled."""

import json
import random
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.config.orchestrator import CurriculumConfig
from prime_rl.envs.protocol import EpisodeResult, Outcome, SampleTokens
from prime_rl.orchestrator.ckpt import Progress, State, resume_progress
from prime_rl.orchestrator.core import Core, Drop, Limits, Start, Task
from prime_rl.orchestrator.curriculum import Curriculum
from prime_rl.orchestrator.journal import Journal
from prime_rl.orchestrator.samples import Scored
from prime_rl.orchestrator.tasks import task_stream
from prime_rl.transport.commit import stage
from prime_rl.transport.protocol import newest_version

TASKS = {
    "env": [Task("env", i, f"task-{i}") for i in range(5)],
    "other": [Task("other", i, f"o-{i}") for i in range(3)],
}


class World:
    """A trainer, a fleet and an orchestrator in one thread, driven by chance. The run directory is real; a crash forgets all that is not in it."""

    def __init__(self, directory: Path, limits: Limits, seed: int) -> None:
        self.directory, self.limits, self.random = directory, limits, random.Random(seed)
        self.incarnations = {0: 0}
        self.versions = {0: 0}
        self.batches: list[set[str]] = []
        self.crashes = 0
        self.start()

    def start(self) -> None:
        """A new incarnation of the orchestrator."""
        progress = resume_progress(self.directory, None, recover=self.crashes > 0)
        self.journal = Journal(self.directory, 0, progress)
        stream = task_stream(TASKS, {"env": 2.0, "other": 1.0}, 0)
        newest = newest_version(self.versions, self.incarnations)
        self.core: Core[EpisodeResult] = Core(
            self.limits, self.journal.drawing(stream), step=progress.step, version=newest, incarnation=max(self.incarnations), record=self.journal.ledger
        )  # fmt: skip
        self.journal.restore(self.core, progress.state, stream, newest, Curriculum({}, {}, 0))
        self.core.begin_incarnation(max(self.incarnations), self.incarnations)
        self.journal.check(self.core)
        self.flying: dict[str, Start] = {}

    def run(self) -> None:
        for _ in range(5_000):
            if self.core.done:
                return
            while (start := self.core.next_start()) is not None:
                assert start.episode not in self.flying
                self.flying[start.episode] = start
            self.random.choices([getattr(self, name) for name in WEIGHTS], list(WEIGHTS.values()))[0]()
            self.journal.check(self.core)
        raise AssertionError("the run did not end: it is stuck")

    def land(self) -> None:
        if not self.flying:
            return
        episode = self.random.choice(sorted(self.flying))
        self.flying.pop(episode)
        if self.random.random() < 0.2:
            self.core.fail(episode, Drop.ERRORED, retry=self.random.random() < 0.5)
        else:
            tokens = SampleTokens.of([1, 2], [False, True], [0.0, -1.0], 1, 0.0)
            self.core.finish(episode, EpisodeResult(episode, "env", "t", Outcome.OK, reward=0.5, samples=[tokens]))

    def verify(self) -> None:
        self.core.verify(self.core.unverified())

    def invalidate(self) -> None:
        self.forget(self.core.invalidate("scripted", self.core.running_or_unverified()))

    def flush(self) -> None:
        self.journal.ledger.flush()

    def train(self) -> None:
        """The trainer commits a version, if there is a batch for it."""
        newest = newest_version(self.versions, self.incarnations)
        if newest < len(self.batches):
            self.versions[newest + 1] = max(self.incarnations)

    def serve(self) -> None:
        newest = newest_version(self.versions, self.incarnations)
        self.journal.ledger.trained_through(newest)
        if newest > self.core.version and not self.core.must_go_back:
            self.core.serve(newest)
            stale = self.core.stale()
            for start in stale:
                self.core.fail(start.episode, Drop.STALE)
            self.forget(stale)

    def rewind(self) -> None:
        """The trainer dies and goes on from an earlier version; the orchestrator notices."""
        incarnation, back_to = max(self.incarnations) + 1, self.random.choice(sorted(self.versions))
        self.incarnations[incarnation] = back_to
        self.versions = {version: made for version, made in self.versions.items() if version <= back_to}
        self.forget(self.core.begin_incarnation(incarnation, self.incarnations))
        self.journal.ledger.rewound(back_to)
        if self.core.must_go_back:
            self.core.go_back(back_to)

    def ship(self) -> None:
        """Cut a batch and commit it; a crash may come at any point of that."""
        batch = self.core.ready_batch()
        if batch is None:
            return
        self.verify()
        names = sorted(batch.episodes)
        filtered = names[: self.random.randint(0, len(names) - 1)]
        trained = names[len(filtered) :]
        extra = self.journal.extra(self.core, batch, Scored([], trained, filtered, []), {})
        if self.random.random() < 0.1:
            return self.crash()
        self.journal.ledger.flush()
        if self.random.random() < 0.1:
            return self.crash()
        place = self.directory / "rollouts" / f"step_{batch.step}"
        with stage(place, step=batch.step, producer="orchestrator", extra=extra):
            pass
        self.batches.append(set(trained))
        if self.random.random() < 0.1:
            return self.crash()
        self.core.advance(batch, trained, filtered)

    def crash(self) -> None:
        self.crashes += 1
        self.journal.close()
        if self.random.random() < 0.3:  # both died
            incarnation, back_to = max(self.incarnations) + 1, self.random.choice(sorted(self.versions))
            self.incarnations[incarnation] = back_to
            self.versions = {version: made for version, made in self.versions.items() if version <= back_to}
        self.start()

    def forget(self, starts: list[Start]) -> None:
        for start in starts:
            del self.flying[start.episode]


WEIGHTS = {
    "land": 10,
    "verify": 2,
    "flush": 2,
    "train": 2,
    "serve": 3,
    "ship": 3,
    "invalidate": 0.3,
    "rewind": 0.3,
    "crash": 0.6,
}

worlds = st.builds(
    lambda group, groups, level, slack, concurrency, steps: Limits(group * groups, group, level, level + slack, concurrency, steps),
    st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.integers(0, 2), st.integers(1, 12), st.integers(1, 4),
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(worlds, st.integers(0, 2**32))
def test_crashes_at_any_event_lose_and_double_nothing(limits, seed):
    """All steps in order; every episode in at most one batch; at every event the scheduler's account is the ledger's, and both are conserved;
    at the end the ledger, opened once more, says of every episode how it ended."""
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory), limits, seed)
        world.run()
        assert len(world.batches) == limits.max_steps
        trained = [episode for batch in world.batches for episode in batch]
        assert len(trained) == len(set(trained)) == world.core.trained
        places = {episode.rpartition(".")[0] for episode in trained}
        assert len(places) == len(trained)  # no two attempts at one place
        world.core.abandon()
        world.journal.check(world.core)
        world.journal.ledger.trained_through(limits.max_steps)
        world.flush()
        world.journal.close()
        total = Journal(Path(directory), 0, resume_progress(Path(directory), None, recover=True)).ledger.account().total
        assert (total.in_flight, total.finished, total.batched) == (0, 0, 0)
        assert total.trained == len(trained)
        assert total.issued == total.trained + sum(total.dropped.values())


def test_open_groups_by_difficulty_have_the_same_tasks_where_there_is_no_ledger(tmp_path):
    """A checkpoint that was taken elsewhere: groups that were drawn from pools as they stood then, and what is drawn next, are the same."""

    def begin(directory: Path, progress: Progress) -> tuple[Core[EpisodeResult], Journal, Curriculum]:
        directory.mkdir()
        journal, pools = Journal(directory, 0, progress), Curriculum(TASKS, {"env": CurriculumConfig(easy_weight=3)}, 0)
        stream = task_stream(TASKS, {"env": 2.0, "other": 1.0}, 0, pools.pools)
        core = Core(Limits(2, 1, 9, 9, 40), journal.drawing(stream), step=progress.step, record=journal.ledger)
        journal.restore(core, progress.state, stream, 0, pools)
        return core, journal, pools

    core, journal, pools = begin(tmp_path / "here", Progress())
    for step in range(4):
        starts = [start for _ in range(5) if (start := core.next_start()) is not None]
        for start in starts[: 2 + step % 2]:
            core.finish(start.episode, EpisodeResult(start.episode, "env", "t", Outcome.OK, reward=start.group % 3 / 2))
        batch = core.ready_batch()
        assert batch is not None
        core.verify(batch.episodes)
        for group in batch.groups:
            pools.leave(group.number, group.task, [one.result.reward for one in group.finished])
        pools.cut()
        names = sorted(batch.episodes)
        extra = journal.extra(core, batch, Scored([], names, [], []), pools.state())
        core.advance(batch, names, [])
    state = State(**json.loads(json.dumps(extra["state"])))
    tasks = {number: journal.ledger.task_of(number) for number in state.open_groups}
    assert {task.env for task in tasks.values()} == {"env", "other"}
    there, elsewhere, same = begin(tmp_path / "there", Progress(4, 0, resumed=True, state=state))
    assert {number: elsewhere.ledger.task_of(number) for number in state.open_groups} == tasks
    assert same.state() == pools.state()
    assert [there._open(0.0).task for _ in range(30)] == [core._open(0.0).task for _ in range(30)]
    journal.close()
    elsewhere.close()
