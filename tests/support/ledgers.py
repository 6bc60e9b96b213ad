"""Small ledgers for tests."""

import sqlite3
from contextlib import closing
from pathlib import Path

from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.orchestrator.audit import audit
from prime_rl.orchestrator.ledger import Counts, Ledger, batch_extra
from prime_rl.orchestrator.scheduler import Batched, Discarded, Drop, Dropped, Finished, Issued, Start, Task
from prime_rl.transport.rollouts import Sample, write_batch
from support.samples import sample_tokens


def an_episode(reward: float = 0.5, sampled: int = 3) -> EpisodeResult:
    tokens = sample_tokens([10, 11], range(12, 12 + sampled), [-0.25 * (i + 1) for i in range(sampled)], reward)
    return EpisodeResult("e", "reverse-text", "t", Outcome.OK, reward=reward, samples=[tokens], metrics={"m": 1.0})


class ScriptedLedger(Ledger):
    """A ledger that is told of episodes by name. `counts` flushes before."""

    def issued(self, episode: str, version: int = 0, incarnation: int = 0, env: str = "reverse-text") -> None:
        self.record(Issued(start_of(episode, env, version), incarnation))

    def finished(
        self, episode: str, first: int = 0, last: int = 0, incarnation: int = 0, result: EpisodeResult | None = None
    ) -> None:
        self.record(Finished(start_of(episode), first, last, result or an_episode(), incarnation))

    def dropped(self, episode: str, reason: str, detail: str = "", retried: bool = False) -> None:
        self.record(Dropped(start_of(episode), Drop(reason), detail, retried))

    def discarded(self, group: int) -> None:
        self.record(Discarded(group, Drop.FILTERED, ""))

    def batched(self, step: int, trained: list[str], filtered: list[str], groups: list[int]) -> None:
        self.record(Batched(step, tasks(groups), trained, filtered))

    def counts(self) -> Counts:
        self.flush()
        return super().counts()

    def reopened(self) -> "ScriptedLedger":
        """The ledger as the next incarnation finds it; what was not flushed is lost."""
        self.close()
        return ScriptedLedger(self.path)


def task(group: int, env: str) -> Task:
    return Task(env, group + 100, f"task-{group}")


def tasks(groups: list[int]) -> dict[int, Task]:
    return {group: task(group, "reverse-text") for group in groups}


def start_of(episode: str, env: str = "reverse-text", version: int = 0) -> Start:
    group, number, attempt = map(int, episode.split("."))
    return Start(group, number, attempt, task(group, env), version)


def open_group(ledger: ScriptedLedger, number: int, size: int = 2, env: str = "reverse-text") -> list[str]:
    """A group with all its episodes in flight, on version 0 of incarnation 0."""
    names = [f"{number}.{i}.0" for i in range(size)]
    for name in names:
        ledger.issued(name, env=env)
    return names


def finish_group(ledger: ScriptedLedger, number: int, size: int = 2, env: str = "reverse-text") -> list[str]:
    """A group with all its episodes finished."""
    names = open_group(ledger, number, size, env)
    for i, name in enumerate(names):
        ledger.finished(name, result=an_episode(i / size))
    return names


def execute(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(statement)


def commit(rollouts: Path, step: int, trained: list[str], filtered: list[str], groups: list[int]) -> None:
    """Commit a batch of the ledger's episodes unknown to the ledger: what a crash right after the rename leaves."""
    event = Batched(step, tasks(groups), trained, filtered)
    samples = [
        Sample(f"{name}.0", "g", "t", "reverse-text", [0], [1, 2], [False, True], [0.0, -1.0], [0.0, 1.0], 1.0, 0.5)
        for name in trained
    ]
    write_batch(rollouts, step, samples, batch_extra(event))


def stored_counts(path: Path) -> Counts:
    with closing(Ledger(path)) as ledger:
        return ledger.counts()


def conserved(output_dir: Path) -> Counts:
    """The counts of a run, whose ledger must not contradict itself."""
    assert audit(output_dir)[1] == []
    return stored_counts(output_dir / "ledger.sqlite")
