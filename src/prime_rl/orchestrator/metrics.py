"""What the orchestrator reports about a step."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
    seconds_gated: float = 0.0

    @staticmethod
    def since(before: EnvAccount, now: EnvAccount) -> "Tally":
        """The counts that the ledger still tells of, between two states of its account with no batch committed in between.

        Tokens and seconds of an earlier life are not known.
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
) -> dict[str, float]:
    """Metrics of one step, before it is committed.

    Args:
        stale: Episodes dropped as stale over the whole run.
        seconds: Since the step before.
        updating: Seconds of these that the engines took to load weights, most of it while they went on generating.
        update_parts: Seconds of these in parts, as the servers told them (`time/update_pause`: nothing was generated), and `time/update_prove`, until the
            canary was scored.

    `reward/mean` is over all finished episodes of the batch, before the zero-advantage filter; `off_policy/*` counts, for the samples that
    are trained, the steps between this one and the oldest version that sampled one of their tokens.
    """
    episodes = [episode for group in batch.groups for episode in group.finished]
    results = [episode.result for episode in episodes]
    rewards = [result.reward for result in results]
    ages = [batch.step - min(sample.policy_versions) for sample in scored.samples]
    metrics = {
        "reward/mean": _mean(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "seq_len/mean": _mean([sum(len(sample.input_ids) for sample in result.samples) for result in results]),
        "num_output_tokens/mean": _mean([output_tokens(result) for result in results]),
        "num_turns/mean": _mean([result.num_turns for result in results]),
        "is_truncated/mean": _mean([result.is_truncated for result in results]),
        "errors/rate": sum(tally.failures.values()) / max(tally.outcomes, 1),
        "filtered/zero_advantage": (len(scored.filtered) - len(scored.details)) / len(episodes),
        "filtered/truncated": len(scored.truncated) / len(episodes),
        "off_policy/mean": _mean(ages),
        "off_policy/max": float(max(ages, default=0)),
        "off_policy/dropped": float(stale - tally.stale_before),
        "progress/samples": float(len(scored.samples)),
        "progress/tokens": float(sum(len(sample.input_ids) for sample in scored.samples)),
        "perf/throughput": tally.output_tokens / max(seconds, 1e-9),
        "time/step": seconds,
        "time/update_weights": updating,
        "time/wait_for_weights": tally.seconds_gated,
    }
    metrics |= {f"time/update_{part}": taken for part, taken in update_parts.items()}
    metrics |= {f"filtered/{why}": count / len(episodes) for why, count in Counter(scored.details.values()).items()}
    metrics |= {f"errors/{reason}": float(count) for reason, count in tally.failures.items()}
    metrics |= _solved(batch.groups)
    return metrics | _per_environment(batch.groups)


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


def _solved(groups: Sequence[Group[EpisodeResult]]) -> dict[str, float]:
    """Share of groups without spread: all at the group's best possible 1, none above 0."""
    rewards = [[episode.result.reward for episode in group.finished] for group in groups]
    return {
        "solved/all": _mean([min(values) >= 1.0 for values in rewards]),
        "solved/none": _mean([max(values) <= 0.0 for values in rewards]),
    }


def _per_environment(groups: Sequence[Group[EpisodeResult]]) -> dict[str, float]:
    """`reward/<env>/mean` where there are several environments, and every environment's own metrics."""
    by_env: dict[str, list[EpisodeResult]] = {}
    for group in groups:
        by_env.setdefault(group.task.env, []).extend(episode.result for episode in group.finished)
    metrics: dict[str, float] = {}
    for env, results in by_env.items():
        if len(by_env) > 1:
            metrics[f"reward/{env}/mean"] = _mean([result.reward for result in results])
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
