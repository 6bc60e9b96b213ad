"""Small ledgers for tests."""

import sqlite3
from pathlib import Path

from prime_rl.envs.protocol import EpisodeResult, Outcome, SampleTokens
from prime_rl.orchestrator.ledger import Ledger, episode_id
from prime_rl.transport.rollouts import Sample, write_batch


def result(reward: float = 0.5, sampled: int = 3, prompt: int = 2) -> EpisodeResult:
    tokens = SampleTokens.of(
        input_ids=list(range(10, 10 + prompt + sampled)),
        loss_mask=[False] * prompt + [True] * sampled,
        logprobs=[0.0] * prompt + [-0.25 * (i + 1) for i in range(sampled)],
        prompt_len=prompt,
        reward=reward,
    )
    return EpisodeResult("e", "reverse-text", "t", Outcome.OK, reward=reward, samples=[tokens], metrics={"m": 1.0})


def open_group(ledger: Ledger, number: int, size: int = 2, env: str = "reverse-text") -> list[str]:
    """A group with all its episodes in flight, on version 0 of incarnation 0."""
    ledger.opened(number, env, number + 100, f"task-{number}")
    names = [episode_id(number, i, 0) for i in range(size)]
    for name in names:
        ledger.issued(name, 0, 0)
    return names


def finish_group(ledger: Ledger, number: int, size: int = 2, env: str = "reverse-text") -> list[str]:
    """A group with all its episodes finished."""
    names = open_group(ledger, number, size, env)
    for i, name in enumerate(names):
        ledger.finished(name, 0, 0, 0, result(i / size))
    return names


def commit(
    ledger: Ledger, rollouts: Path, step: int, trained: list[str], filtered: list[str], groups: list[int]
) -> None:
    """Commit a batch of the ledger's episodes without telling the ledger: what a crash right after the rename leaves."""
    extra = ledger.batch_extra(step, trained, filtered, [], groups)
    samples = [
        Sample(f"{name}.0", "g", "t", "reverse-text", [0], [1, 2], [False, True], [0.0, -1.0], [0.0, 1.0], 1.0, 0.5)
        for name in trained
    ]
    write_batch(rollouts, step, samples, extra)


def dump(path: Path) -> list[tuple[object, ...]]:
    """Everything a ledger holds, in a fixed order."""
    db = sqlite3.connect(path)
    try:
        tables = ("meta", "issued", "carried", "groups", "episodes", "results")
        return [(table, *row) for table in tables for row in sorted(db.execute(f"SELECT * FROM {table}"), key=repr)]
    finally:
        db.close()
