"""What a step reports: distributions against the standard library, per environment, and what was left out and why."""

import statistics

import pytest

from prime_rl.config import OrchestratorConfig
from prime_rl.envs.protocol import EpisodeResult, Outcome, SampleTokens
from prime_rl.orchestrator.ledger import Counts
from prime_rl.orchestrator.metrics import Tally, distribution, step_metrics
from prime_rl.orchestrator.samples import score_batch
from prime_rl.orchestrator.scheduler import Batch, Drop, Finished, Group, Start, Task


def group(number: int, env: str, rewards: list[float], tokens: int = 3, filtered: str = "") -> Group[EpisodeResult]:
    task = Task(env, 0, "task")
    sample = SampleTokens.of(range(2 + tokens), [False] * 2 + [True] * tokens, [0.0] * 2 + [-1.0] * tokens, 2, 0.0)
    results = [
        EpisodeResult("e", env, "task", Outcome.OK, reward=reward, samples=[sample], num_turns=1, filtered=filtered)
        for reward in rewards
    ]
    return Group(number, task, finished=[Finished(Start(number, i, 0, task, 0), 0, 0, one) for i, one in enumerate(results)])  # fmt: skip


def metrics_of(
    *groups: Group[EpisodeResult], others: tuple[str, ...] = (), failures: tuple[Drop, ...] = ()
) -> dict[str, float]:
    """`others`: environments of the run that the step has nothing of. `failures`: episodes that failed during the step."""
    now = Counts(dropped={str(reason): failures.count(reason) for reason in failures})
    batch = Batch(2, list(groups))
    envs = sorted({one.task.env for one in groups}.union(others))
    config = OrchestratorConfig(environments=[{"id": env} for env in envs], batch_size=4, rollouts_per_example=2)
    scored = score_batch(batch, config, dict.fromkeys(envs, 1.0), {})
    return step_metrics(batch, scored, Tally(), now, seconds=1.0, updating=0.0, update_parts={}, several=len(envs) > 1)


def test_distribution() -> None:
    values = [0.3, -1.0, 2.5, 0.0, 0.1, 7.0, 0.25, -0.5, 1.0, 1.5, 2.0]
    found = distribution(values)
    assert found["mean"] == pytest.approx(statistics.fmean(values))
    assert found["std"] == pytest.approx(statistics.pstdev(values))
    assert found["median"] == pytest.approx(statistics.median(values))
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    assert (found["p10"], found["p90"]) == pytest.approx((deciles[0], deciles[-1]))
    assert (found["min"], found["max"]) == (-1.0, 7.0)
    assert distribution([]) == {}


def test_a_step_of_one_environment() -> None:
    """Before any filter: what was not trained counts, and what was left out is named."""
    found = metrics_of(
        group(0, "a", [1.0, 0.0]), group(1, "a", [1.0, 1.0], tokens=5), group(2, "a", [0.5, 0.0], filtered="overlong")
    )
    assert found["reward/mean"] == pytest.approx(3.5 / 6)
    assert found["reward/p90"] == 1.0
    assert (found["advantage/min"], found["advantage/max"]) == (-0.5, 0.5)
    assert (found["num_output_tokens/max"], found["num_input_tokens/max"], found["num_total_tokens/max"]) == (5, 2, 7)
    assert found["filtered/zero_advantage"] == pytest.approx(2 / 6)
    assert found["filtered/overlong"] == pytest.approx(2 / 6)
    assert (found["solved_all"], found["solved_none"]) == (pytest.approx(1 / 3), 0.0)
    assert found["solved_some"] == pytest.approx(2 / 3)
    assert found["progress/samples"] == 2
    assert not any(name.startswith("reward/a/") for name in found)


def test_failed_episodes_are_counted_by_reason() -> None:
    found = metrics_of(group(0, "a", [1.0, 0.0]), failures=(Drop.ERRORED, Drop.ERRORED, Drop.TIMEOUT))
    assert (found["errors/errored"], found["errors/timeout"], found["errors/rate"]) == (2.0, 1.0, 1.0)


def test_several_environments_are_told_apart() -> None:
    found = metrics_of(group(0, "a", [1.0, 0.0]), group(1, "b", [0.0, 0.0]))
    assert found["reward/mean"] == 0.25
    assert (found["reward/a/mean"], found["reward/b/mean"]) == (0.5, 0.0)
    assert (found["solved_some/a"], found["solved_none/b"]) == (1.0, 1.0)
    assert found["advantage/a/std"] == 0.5
