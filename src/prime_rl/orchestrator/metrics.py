"""What the orchestrator reports about a step."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from prime_rl.envs.protocol import EpisodeResult
from prime_rl.orchestrator.account import EnvAccount
from prime_rl.orchestrator.core import Batch, Drop, Group
from prime_rl.orchestrator.samples import Scored, output_tokens


@dataclass
class Tally:
    """Counts since the last committed batch."""

    outcomes: int = 0
    failures: dict[Drop, int] = field(default_factory=dict)
    output_tokens: int = 0
    stale_before: int = 0  # dropped as stale when the counting began
    seconds_idle: float = 0.0  # nothing was in flight

    @staticmethod
    def since(before: EnvAccount, now: EnvAccount) -> "Tally":
        """The counts that the ledger still tells of, between two states of its account with no batch committed in between.

        Tokens and seconds of an earlier incarnation are not known.
        """

        def more(reason: Drop) -> int:
            return now.dropped.get(reason, 0) - before.dropped.get(reason, 0)

        failures = {reason: count for reason in (Drop.ERRORED, Drop.TIMEOUT) if (count := more(reason)) > 0}
        unused = max(more(Drop.FILTERED) + more(Drop.TRUNCATED), 0)
        finished = max(now.finished - before.finished, 0) + unused
        return Tally(
            outcomes=finished + sum(failures.values()),
            failures=failures,
            stale_before=before.dropped.get(Drop.STALE, 0),
        )

    def fail(self, reason: Drop) -> None:
        self.outcomes += 1
        self.failures[reason] = self.failures.get(reason, 0) + 1

    def finish(self, result: EpisodeResult) -> None:
        self.outcomes += 1
        self.output_tokens += output_tokens(result)


def step_metrics(
    batch: Batch[EpisodeResult],
    scored: Scored,
    tally: Tally,
    *,
    stale: int,
    seconds: float,
    updating: float,
    update_parts: Mapping[str, float],
    several: bool,
) -> dict[str, float]:
    """Metrics of one step, before it is committed.

    Args:
        stale: Episodes dropped as stale over the whole run.
        seconds: Since the step before.
        updating: Seconds of these that the engines took to load weights, most of it while they went on generating.
        update_parts: Seconds of these in parts, as the servers told them (`time/update_pause`: nothing was generated), and `time/update_prove`, until the
            canary was scored.
        several: Whether the run trains on several environments: then each one that has finished episodes has distributions of its own.

    Distributions (`distribution`) of reward, advantage, lengths and turns are over all finished episodes of the batch, before any filter;
    `off_policy/*` counts, for the samples that are trained, the steps between this one and the oldest version that sampled one of their tokens.
    """
    ages = [batch.step - min(sample.policy_versions) for sample in scored.samples]
    episodes = len(batch.episodes)
    metrics = {
        "is_truncated/mean": _mean(
            [episode.result.is_truncated for group in batch.groups for episode in group.finished]
        ),
        "errors/rate": sum(tally.failures.values()) / max(tally.outcomes, 1),
        "filtered/zero_advantage": (len(scored.filtered) - len(scored.details)) / episodes,
        "filtered/beyond_seq_len": len(scored.truncated) / episodes,
        "off_policy/mean": _mean(ages),
        "off_policy/max": float(max(ages, default=0)),
        "off_policy/dropped": float(stale - tally.stale_before),
        "progress/samples": float(len(scored.samples)),
        "progress/tokens": float(sum(len(sample.input_ids) for sample in scored.samples)),
        "perf/throughput": tally.output_tokens / max(seconds, 1e-9),
        "time/step": seconds,
        "time/update_weights": updating,
        "time/idle": tally.seconds_idle,
    }
    metrics |= {f"time/update_{part}": taken for part, taken in update_parts.items()}
    metrics |= {f"filtered/{why}": count / episodes for why, count in Counter(scored.details.values()).items()}
    metrics |= {f"errors/{reason}": float(count) for reason, count in tally.failures.items()}
    return metrics | _distributions(batch.groups, scored) | _per_environment(batch.groups, scored, several)


def bench_table(rows: list[dict[str, float]]) -> str:
    """Throughput of generation: the mean over steps but the first, which warms the engine up."""
    timed = rows[1:] or rows
    seconds = sum(row["time/step"] for row in timed) / len(timed)
    tokens = sum(row["perf/throughput"] * row["time/step"] for row in timed) / len(timed)
    rollouts = sum(row["progress/samples"] for row in timed) / len(timed)
    return (
        f"{'steps':>8}{'rollouts/s':>14}{'tokens/s':>12}{'step time s':>14}\n"
        f"{len(timed):>8}{rollouts / seconds:>14.1f}{tokens / seconds:>12.0f}{seconds:>14.3f}"
    )


def _distributions(groups: Sequence[Group[EpisodeResult]], scored: Scored, env: str = "") -> dict[str, float]:
    """`<quantity>/<statistic>` over all finished episodes of these groups, or `<quantity>/<env>/<statistic>`, and which share of groups was solved."""
    episodes = [episode for group in groups for episode in group.finished]
    results = [episode.result for episode in episodes]
    tokens = [sum(len(sample.input_ids) for sample in result.samples) for result in results]
    sampled = [output_tokens(result) for result in results]
    quantities: dict[str, Sequence[float]] = {
        "reward": [result.reward for result in results],
        "advantage": [value for episode in episodes for value in scored.worth.get(episode.start.episode, {}).values()],
        "num_total_tokens": tokens,
        "num_output_tokens": sampled,
        "num_input_tokens": [total - output for total, output in zip(tokens, sampled, strict=True)],
        "num_turns": [result.num_turns for result in results],
    }
    place = f"{env}/" if env else ""
    metrics = {
        f"{name}/{place}{statistic}": value
        for name, values in quantities.items()
        for statistic, value in distribution(values).items()
    }
    rewards = [[episode.result.reward for episode in group.finished] for group in groups]
    return metrics | {f"solved_{which}/{env}".rstrip("/"): share for which, share in _solved(rewards).items()}


def group_rewards(rewards: Sequence[Sequence[float]], prefix: str) -> dict[str, float]:
    """Of groups with these rewards: the distribution of rewards, and which share of groups was solved."""
    every = [value for group in rewards for value in group]
    metrics = {f"{prefix}reward/{statistic}": value for statistic, value in distribution(every).items()}
    return metrics | {f"{prefix}solved_{which}": share for which, share in _solved(rewards).items()}


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Mean, population standard deviation, extremes and percentiles (linear between neighbours) of finite values; nothing of none."""
    if not values:
        return {}
    given = np.asarray(values, dtype=np.float64)
    p10, median, p90 = np.percentile(given, [10, 50, 90])
    found = {"mean": given.mean(), "std": given.std(), "min": given.min(), "max": given.max()}
    return {name: float(value) for name, value in {**found, "p10": p10, "median": median, "p90": p90}.items()}


def _solved(rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """Shares of groups: all at 1 or above, all at 0 or below, and the rest, which can teach something."""
    solved = _mean([min(values) >= 1.0 for values in rewards])
    unsolved = _mean([max(values) <= 0.0 for values in rewards])
    return {"all": solved, "none": unsolved, "some": 1.0 - solved - unsolved}


def _per_environment(groups: Sequence[Group[EpisodeResult]], scored: Scored, several: bool) -> dict[str, float]:
    """The same distributions for each environment, where the run has several, and every environment's own metrics."""
    by_env: dict[str, list[Group[EpisodeResult]]] = {}
    for group in groups:
        by_env.setdefault(group.task.env, []).append(group)
    metrics: dict[str, float] = {}
    for env, its in by_env.items():
        if several:
            metrics |= _distributions(its, scored, env)
        results = [episode.result for group in its for episode in group.finished]
        parts = [part for result in results for part in result.parts]
        for agent in sorted({part.agent for part in parts}):
            its_rewards = [part.reward for part in parts if part.agent == agent]
            metrics |= {f"{env}/{agent}/reward/{name}": value for name, value in distribution(its_rewards).items()}
        for kind, values in (
            ("rewards", [result.rewards for result in results]),
            ("metrics", [result.metrics for result in results]),
        ):
            for name in sorted({name for one in values for name in one}):
                found = [value for one in values if (value := one.get(name)) is not None]
                if found:
                    metrics[f"{env}/{kind}/{name}/mean"] = _mean(found)
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
