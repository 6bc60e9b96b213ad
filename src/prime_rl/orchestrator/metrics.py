"""What the orchestrator reports about a step."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from prime_rl.envs.protocol import EpisodeResult
from prime_rl.monitor import Extras
from prime_rl.orchestrator.ledger import Counts
from prime_rl.orchestrator.samples import ScoredBatch, output_tokens
from prime_rl.orchestrator.scheduler import Batch, Drop, Group

SAMPLES_SHOWN = 8  # of a step


@dataclass
class Tally:
    """What happened since the last committed batch."""

    before: Counts = field(default_factory=Counts)  # before that batch was committed
    turned_away: list[tuple[Group[EpisodeResult], str]] = field(default_factory=list)  # complete groups, and why
    finished: int = 0  # episodes with a result
    output_tokens: int = 0  # of these
    seconds_idle: float = 0.0  # nothing was in flight


def step_metrics(
    batch: Batch[EpisodeResult],
    scored: ScoredBatch,
    tally: Tally,
    now: Counts,
    *,
    seconds: float,
    updates: tuple[float, Mapping[str, float]],
    several: bool,
) -> dict[str, float]:
    """Metrics of one step, before it is committed.

    Args:
        now: Without this batch.
        seconds: Since the step before.
        updates: Seconds of these that the engines took to load weights, most of it while they went on generating; and
            by phase, as the servers report them (`time/update_pause`: nothing was generated).
        several: Whether the run trains on several environments: then each that has finished episodes has distributions
            of its own.

    `made/…` is of all complete groups since the step before. Distributions (`distribution`) of reward, advantage,
    lengths and turns are over all finished episodes of the batch, before any filter; `off_policy/*` counts, for the
    samples that are trained, the steps between this one and the oldest version that sampled one of their tokens.
    """
    dropped = {reason: max(0, now.dropped.get(reason, 0) - tally.before.dropped.get(reason, 0)) for reason in Drop}
    failures = {reason: dropped[reason] for reason in (Drop.ERRORED, Drop.TIMEOUT) if dropped[reason]}
    failed = sum(failures.values())
    ages = [batch.step - min(sample.policy_versions) for sample in scored.samples]
    episodes = len(batch.finished)
    rewards = [rewards_of(group) for group in [*batch.groups, *(group for group, _ in tally.turned_away)]]
    metrics = {
        "is_truncated/mean": _mean([episode.result.is_truncated for episode in batch.finished]),
        "errors/rate": failed / max(tally.finished + failed, 1),
        "filtered/zero_advantage": 0.0,
        "filtered/beyond_seq_len": 0.0,
        "off_policy/mean": _mean(ages),
        "off_policy/max": float(max(ages, default=0)),
        "off_policy/dropped": float(dropped[Drop.STALE]),
        "progress/samples": float(len(scored.samples)),
        "progress/tokens": float(sum(len(sample.input_ids) for sample in scored.samples)),
        "perf/throughput": tally.output_tokens / max(seconds, 1e-9),
        "time/step": seconds,
        "time/update_weights": updates[0],
        "time/idle": tally.seconds_idle,
    }
    chosen = [sample.routed_experts for sample in scored.samples if sample.routed_experts is not None]
    if chosen:
        metrics["replay/mib"] = sum(rows.nbytes for rows in chosen) / 2**20
        metrics["replay/tokens"] = float(sum(map(len, chosen)))
    metrics |= {f"time/update_{phase}": taken for phase, taken in updates[1].items()}
    metrics |= {f"filtered/{why}": count / episodes for why, count in Counter(scored.filtered.values()).items()}
    metrics |= {f"errors/{reason}": float(count) for reason, count in failures.items()}
    turned_away = Counter(reason for _, reason in tally.turned_away)
    metrics |= {f"turned_away/{reason}": float(count) for reason, count in sorted(turned_away.items())}
    metrics |= {f"made/{name}": share for name, share in _solved(rewards).items()}
    metrics["made/reward/mean"] = _mean([reward for group in rewards for reward in group])
    metrics |= _distributions(batch.groups, scored)
    by_env = defaultdict[str, list[Group[EpisodeResult]]](list)
    for group in batch.groups:
        by_env[group.task.env].append(group)
    for env, groups in by_env.items():
        metrics |= (_distributions(groups, scored, f"/{env}") if several else {}) | _own_metrics(groups, env)
    return metrics


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Mean, population standard deviation, extremes and percentiles of finite values; nothing of none."""
    if not values:
        return {}
    array = np.asarray(values, dtype=np.float64)
    p10, median, p90 = np.percentile(array, [10, 50, 90])
    moments = {"mean": array.mean(), "std": array.std(), "min": array.min(), "max": array.max()}
    return {name: float(value) for name, value in {**moments, "p10": p10, "median": median, "p90": p90}.items()}


def _distributions(groups: Sequence[Group[EpisodeResult]], scored: ScoredBatch, env: str = "") -> dict[str, float]:
    """`<quantity><env>/<statistic>` over all finished episodes of these groups, and which share of them was solved."""
    metrics = {f"{name}{env}": share for name, share in _solved([rewards_of(group) for group in groups]).items()}
    for name, values in _quantities(groups, scored).items():
        metrics |= {f"{name}{env}/{statistic}": value for statistic, value in distribution(values).items()}
    return metrics


def step_extras(batch: Batch[EpisodeResult], scored: ScoredBatch) -> Extras:
    """Return what trackers may show of a batch: a few rollouts, from all over it, and distributions."""
    rows = []
    for episode in batch.finished[:: -(-len(batch.finished) // SAMPLES_SHOWN) or 1]:
        result, advantages = episode.result, scored.advantages.get(episode.start.episode, {})
        rows.append((result.env, result.prompt, result.completion, result.reward, _mean([*advantages.values()])))
    return Extras(rows, _quantities(batch.groups, scored))


def _quantities(groups: Sequence[Group[EpisodeResult]], scored: ScoredBatch) -> dict[str, Sequence[float]]:
    """Values of all finished episodes of these groups, of which metrics have the distribution."""
    episodes = [episode for group in groups for episode in group.finished]
    results = [episode.result for episode in episodes]
    tokens = [sum(len(sample.input_ids) for sample in result.samples) for result in results]
    sampled = [output_tokens(result) for result in results]
    return {
        "reward": [result.reward for result in results],
        "advantage": [
            value for episode in episodes for value in scored.advantages.get(episode.start.episode, {}).values()
        ],
        "num_total_tokens": tokens,
        "num_output_tokens": sampled,
        "num_input_tokens": [total - output for total, output in zip(tokens, sampled, strict=True)],
        "num_turns": [result.num_turns for result in results],
    }


def _own_metrics(groups: Sequence[Group[EpisodeResult]], env: str) -> dict[str, float]:
    """What an environment itself reports: rewards of its agents, of its reward functions, and its metrics."""
    own = defaultdict[str, list[float]](list)
    for result in (episode.result for group in groups for episode in group.finished):
        for part in result.parts:
            own[f"{env}/{part.agent}/reward/mean"].append(part.reward)
        for kind, values in (("rewards", result.rewards), ("metrics", result.metrics)):
            for name, value in values.items():
                own[f"{env}/{kind}/{name}/mean"].append(value)
    return {name: _mean(values) for name, values in sorted(own.items())}


def rewards_of(group: Group[EpisodeResult]) -> list[float]:
    return [episode.result.reward for episode in group.finished]


def _solved(rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """Shares of groups: all at 1 or above, all at 0 or below, and the rest, which can teach something."""
    solved = _mean([min(values) >= 1.0 for values in rewards])
    unsolved = _mean([max(values) <= 0.0 for values in rewards])
    return {"solved_all": solved, "solved_none": unsolved, "solved_some": 1.0 - solved - unsolved}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
