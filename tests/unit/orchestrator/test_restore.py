"""Scheduler and ledger together, through crashes at any moment: what an orchestrator that died left is gone on with, nothing is lost or doubled."""

import random
import tempfile
from dataclasses import asdict
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.envs.protocol import EpisodeResult, Outcome, SampleTokens
from prime_rl.orchestrator.checkpoint import OrchestratorState, resume_point
from prime_rl.orchestrator.ledger import Ledger, batch_extra, open_ledger, restore, total
from prime_rl.orchestrator.scheduler import Drop, Limits, Scheduler, Start, Task
from prime_rl.orchestrator.tasks import Curriculum, task_stream
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
        progress = resume_point(self.directory, None, recover=self.crashes > 0)
        self.ledger = open_ledger(self.directory, 0, progress)
        stream = task_stream(TASKS, {"env": 2.0, "other": 1.0}, 0)
        newest = newest_version(self.versions, self.incarnations)
        self.scheduler: Scheduler[EpisodeResult] = Scheduler(
            self.limits, stream, step=progress.step, version=newest, incarnation=max(self.incarnations), emit=self.ledger.record
        )  # fmt: skip
        restore(
            self.scheduler, self.ledger, self.directory / "rollouts", progress, stream, newest, Curriculum({}, {}, 0)
        )
        self.scheduler.begin_incarnation(max(self.incarnations), self.incarnations)
        self.check()
        self.flying: dict[str, Start] = {}

    def check(self) -> None:
        self.ledger.flush()
        self.ledger.check(self.scheduler.held)

    def run(self) -> None:
        for _ in range(5_000):
            if self.scheduler.done:
                return
            while (start := self.scheduler.next_start()) is not None:
                assert start.episode not in self.flying
                self.flying[start.episode] = start
            self.random.choices([getattr(self, name) for name in WEIGHTS], list(WEIGHTS.values()))[0]()
            if self.random.random() < 0.3:  # what is not written when it crashes is lost
                self.check()
        raise AssertionError("the run did not end: it is stuck")

    def land(self) -> None:
        if not self.flying:
            return
        episode = self.random.choice(sorted(self.flying))
        self.flying.pop(episode)
        if self.random.random() < 0.2:
            self.scheduler.fail(episode, Drop.ERRORED, retry=self.random.random() < 0.5)
        else:
            tokens = SampleTokens.of([1, 2], [False, True], [0.0, -1.0], 1, 0.0)
            self.scheduler.finish(episode, EpisodeResult(episode, "env", "t", Outcome.OK, reward=0.5, samples=[tokens]))

    def prove(self) -> None:
        self.scheduler.verify(self.scheduler.unverified())

    def doubt(self) -> None:
        self.forget(self.scheduler.invalidate("scripted", self.scheduler.running_or_unverified()))

    def flush(self) -> None:
        self.ledger.flush()

    def train(self) -> None:
        """The trainer commits a version, if there is a batch for it."""
        newest = newest_version(self.versions, self.incarnations)
        if newest < len(self.batches):
            self.versions[newest + 1] = max(self.incarnations)

    def serve(self) -> None:
        newest = newest_version(self.versions, self.incarnations)
        self.ledger.trained_through(newest)
        if newest > self.scheduler.version and not self.scheduler.must_go_back:
            self.forget(self.scheduler.serve(newest))

    def rewind(self) -> None:
        """The trainer dies and goes on from an earlier version; the orchestrator notices."""
        incarnation, back_to = max(self.incarnations) + 1, self.random.choice(sorted(self.versions))
        self.incarnations[incarnation] = back_to
        self.versions = {version: made for version, made in self.versions.items() if version <= back_to}
        self.forget(self.scheduler.begin_incarnation(incarnation, self.incarnations))
        self.ledger.rewound(back_to)
        if self.scheduler.must_go_back:
            self.scheduler.go_back(back_to)

    def ship(self) -> None:
        """Cut a batch and commit it; a crash may come at any point of that."""
        batch = self.scheduler.ready_batch()
        if batch is None:
            return
        self.prove()
        names = sorted(batch.episodes)
        filtered = names[: self.random.randint(0, len(names) - 1)]
        trained = names[len(filtered) :]
        if self.random.random() < 0.1:
            return self.crash()
        self.ledger.flush()
        if self.random.random() < 0.1:
            return self.crash()
        batched = batch.committed(trained, filtered)
        state = OrchestratorState(batch.step + 1, groups_opened=self.scheduler.groups_opened)
        extra = batch_extra(batched, batch.groups, self.ledger.counts()) | {"state": asdict(state)}
        place = self.directory / "rollouts" / f"step_{batch.step}"
        with stage(place, step=batch.step, producer="orchestrator", extra=extra):
            pass
        self.batches.append(set(trained))
        if self.random.random() < 0.1:
            return self.crash()
        self.scheduler.advance(batched)

    def crash(self) -> None:
        self.crashes += 1
        self.ledger.close()
        if self.random.random() < 0.1:  # somebody removed a damaged ledger
            self.ledger.path.unlink()
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
    "prove": 2,
    "flush": 2,
    "train": 2,
    "serve": 3,
    "ship": 3,
    "doubt": 0.3,
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
    """All steps in order; every episode in at most one batch; after every restart, and at random moments between, the scheduler holds what the ledger
    says, and the ledger is conserved; at the end the ledger, opened once more, says of every episode how it ended."""
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory), limits, seed)
        world.run()
        assert len(world.batches) == limits.max_steps
        trained = [episode for batch in world.batches for episode in batch]
        assert len(trained) == len(set(trained))
        places = {episode.rpartition(".")[0] for episode in trained}
        assert len(places) == len(trained)  # no two attempts at one place
        world.scheduler.abandon()
        world.check()
        world.ledger.trained_through(limits.max_steps)
        world.flush()
        world.ledger.close()
        found = total(Ledger(Path(directory) / "ledger.sqlite").counts())
        assert (found.in_flight, found.finished, found.batched) == (0, 0, 0)
        assert found.trained == len(trained)
        assert found.issued == found.trained + sum(found.dropped.values())
