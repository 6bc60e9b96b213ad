"""From episodes to samples: advantages by hand, the zero-advantage filter, exact tokens, which loss component each
token feeds; what a step reports; what is left out or rejected, each rule by hand; and settings that are refused."""

import math
import statistics
from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from prime_rl.config import OrchestratorConfig
from prime_rl.config.orchestrator import (  # fmt: skip
    GDPO,
    GRPO,
    OPD,
    OPSD,
    RAE,
    RLOO,
    SFT,
    AlgorithmConfig,
    CustomFilter,
    Echo,
    FilterConfig,
    TeacherConfig,
    TeacherServer,
)
from prime_rl.envs.protocol import ROLES, EpisodeResult, Outcome, Part, RoutedExperts, SampleTokens
from prime_rl.errors import UserError
from prime_rl.orchestrator.algorithms import user_function
from prime_rl.orchestrator.ledger import Counts
from prime_rl.orchestrator.metrics import Tally, step_extras, step_metrics
from prime_rl.orchestrator.samples import ScoredBatch, filter_reason, rejection_reason, score_batch, streams_of
from prime_rl.orchestrator.scheduler import Batch, Drop, Finished, Group, Start, Task
from prime_rl.transport.rollouts import write_batch
from support.samples import sample_tokens

TASK = Task("reverse-text", 3, "train/abc")


def settings(seq_len: int = 100, filter_zero_advantage: bool = True, **algorithms: AlgorithmConfig) -> Any:
    """The part of the orchestrator's configuration that scoring reads."""
    algorithm_of = {"reverse-text": GRPO(), **algorithms}.__getitem__
    return SimpleNamespace(seq_len=seq_len, filter_zero_advantage=filter_zero_advantage, algorithm_of=algorithm_of)


def tokens(sampled: int = 3, reward: float = 0.0, agent: str = "") -> SampleTokens:
    return sample_tokens([10, 11], range(12, 12 + sampled), [-0.5] * sampled, reward, agent=agent)


def episode(
    number: int, reward: float, first: int = 0, last: int = 0, samples: list[SampleTokens] | None = None, **fields: Any
) -> Finished[EpisodeResult]:
    result = EpisodeResult(
        "e", "reverse-text", "train/abc", Outcome.OK, reward=reward, samples=samples or [tokens()], **fields
    )
    return Finished(Start(7, number, 0, TASK, first), first, last, result)


def batch(*groups: list[Finished[EpisodeResult]], tasks: tuple[Task, ...] = ()) -> Batch[EpisodeResult]:
    """Groups 7, 8 … of step 5, about `tasks` (else all about `TASK`)."""
    return Batch(5, [
        Group(n, task, finished=[replace(one, start=replace(one.start, group=n, task=task)) for one in finished])
        for n, finished in enumerate(groups, start=7) for task in [tasks[n - 7] if tasks else TASK]
    ])  # fmt: skip


def score(groups: Batch[EpisodeResult], **changes: Any) -> ScoredBatch:
    return score_batch(groups, settings(**changes), {"reverse-text": 0.7}, {})


def test_a_sample_carries_its_lineage_and_its_advantage_on_sampled_tokens_only(tmp_path):
    """Ids, versions from the oldest to the newest, temperature, and the advantage on the loss mask."""
    scored = score(batch([episode(0, 1.0, 2, 4), episode(1, 0.0, 3, 3)]))
    first, second = scored.samples
    assert (first.sample_id, first.group_id, first.task_id, first.env) == ("7.0.0.0", "7", "train/abc", "reverse-text")
    assert (first.policy_versions, first.temperature) == ([2, 3, 4], 0.7)
    assert list(first.advantages) == [0.0, 0.0, 0.5, 0.5, 0.5]
    assert list(second.advantages) == [0.0, 0.0, -0.5, -0.5, -0.5]
    assert scored.trained == ["7.0.0", "7.1.0"]
    write_batch(tmp_path, 0, [first])  # its streams fit


@pytest.mark.parametrize("left_out", [True, False])
def test_attempts_without_signal_are_left_out_and_counted_or_kept(left_out):
    """Contract: attempts of advantage zero count in the loss's denominator only if they are kept in the batch."""
    groups = [[episode(0, first), episode(1, second)] for first, second in ((1.0, 0.0), (0.5, 0.5))]
    scored = score(batch(*groups), filter_zero_advantage=left_out)
    names = [sample.group_id for sample in scored.samples]
    assert names == (["7"] * 2 if left_out else ["7"] * 2 + ["8"] * 2)
    assert (len(scored.trained), len(scored.filtered)) == ((2, 2) if left_out else (4, 0))


def played(number: int, *players: tuple[str, float]) -> Finished[EpisodeResult]:
    """An episode of several parts, each (agent, reward)."""
    parts = [Part(agent, reward, {"win": reward}, {}, 1, False) for agent, reward in players]
    samples = [replace(tokens(reward=one.reward, agent=one.agent), part=i) for i, one in enumerate(parts)]
    return episode(number, statistics.fmean(one.reward for one in parts), samples=samples, parts=parts)


def test_parts_of_an_episode_are_attempts_of_their_own():
    """Of two players of a game the winner is drawn to what it did, by the rewards of single functions too; several
    conversations of one agent are all compared, each by its own reward."""
    games = batch([played(0, ("white", 1.0), ("black", -1.0)), played(1, ("white", -1.0), ("black", 1.0))])
    for algorithm in (GRPO(), GDPO()):
        rows = score(games, **{"reverse-text": algorithm}).samples
        assert [row.reward for row in rows] == [1.0, -1.0, -1.0, 1.0]
        assert all(row.advantages[-1] * row.reward > 0 for row in rows)
    scored = score(batch([played(0, ("s", 1.0), ("s", 0.0)), played(1, ("s", 0.0), ("s", 1.0))]))
    assert [float(row.advantages[-1]) for row in scored.samples] == [0.5, -0.5, -0.5, 0.5]
    assert scored.advantages == {"7.0.0": {0: 0.5, 1: -0.5}, "7.1.0": {0: -0.5, 1: 0.5}}


def test_samples_are_cut_to_seq_len_and_marked_truncated():
    """The trainer never meets a sample longer than its micro-batch; one without sampled tokens left is left out."""
    rows = score(batch([episode(0, 1.0), episode(1, 0.0)]), seq_len=4).samples
    assert [(len(row.input_ids), row.is_truncated) for row in rows] == [(4, True), (4, True)]
    scored = score(batch([episode(0, 1.0), episode(1, 1.0)]), seq_len=2)
    assert (scored.samples, scored.trained) == ([], [])
    assert scored.filtered == dict.fromkeys(["7.0.0", "7.1.0"], "beyond_seq_len")  # whatever their advantage is


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.logprobs.pop(),
        lambda s: s.logprobs.__setitem__(0, -1.0),
        lambda s: s.logprobs.__setitem__(3, 0.5),
        lambda s: s.logprobs.__setitem__(3, math.nan),
        lambda s: setattr(s, "loss_mask", s.loss_mask + b"\1"),
    ],
)
def test_inexact_tokens_stop_the_run(damage):
    """Tokens in, tokens out, checked for every sample; the error names environment and episode."""
    damaged = tokens()
    damage(damaged)
    with pytest.raises(UserError, match="environment 'reverse-text', episode 7.0.0: a "):
        score(batch([episode(0, 1.0, samples=[damaged]), episode(1, 0.0)]))


def test_every_environment_has_its_own_algorithm_and_its_state():
    """Contract: the environment's algorithm scores its groups; the new state is returned, the old one not changed."""
    groups = batch(
        [episode(0, 1.0), episode(1, 0.0), episode(2, 0.0)],
        [episode(0, 1.0), episode(1, 0.0)],
        tasks=(TASK, Task("poker", 0, "t")),
    )
    mixed = settings(**{"reverse-text": RLOO(), "poker": RAE(decay=0.5)})
    before = {"poker": {"": 1.0}}
    scored = score_batch(groups, mixed, {"reverse-text": 1.0, "poker": 1.0}, before)
    values = {sample.sample_id: float(sample.advantages.sum() / 3) for sample in scored.samples}
    # poker: 1 - 1 = 0, which is filtered; the average stays 1; then 0 - 1 = -1, and it falls to 0.5
    assert values == {"7.0.0.0": 1.0, "7.1.0.0": -0.5, "7.2.0.0": -0.5, "8.1.0.0": -1.0}
    assert scored.filtered == {"8.0.0": "zero_advantage"}
    assert (scored.state, before) == ({"poker": {"": 0.5}}, {"poker": {"": 1.0}})


TEACHER = TeacherConfig(base_url="http://teacher")
MASK = [False, False, False, True, False, False, True, False]


def streams(
    config: AlgorithmConfig, advantage: float = 0.5, *, keep_zero: bool = False, cut: int = 8, mask: list[bool] = MASK
) -> Any:
    """Of user user | assistant: scaffold, sampled | tool tool | sampled | user; perhaps with a teacher's scores."""
    roles = ["user", "user", "assistant", "assistant", "tool", "tool", "assistant", "user"]
    logprobs = array("f", [-0.5 * sampled for sampled in MASK])
    made = SampleTokens(array("i", range(10, 18)), bytes(MASK), logprobs, 3, 0.0, roles=bytes(map(ROLES.index, roles)))
    made.ref_logprobs = array("f", [0.0, *[-0.25] * 7]) if config.component == "ref_kl" else None
    return streams_of(config, made, np.array(mask[:cut]), np.array(logprobs[:cut]), advantage, keep_zero)


def test_by_reward_and_echo():
    """Advantages on sampled tokens, nothing else; with echo cross-entropy on tool results after the first reply, not on
    what came before, nor on replies, also where the advantage is zero. A sample that teaches nothing is none."""
    made = streams(GRPO())
    assert made["advantages"].tolist() == [0.5 * sampled for sampled in MASK]
    assert made.keys() == {"loss_mask", "logprobs", "advantages"}
    assert streams(GRPO(), 0.0) is None
    assert streams(GRPO(), 0.0, keep_zero=True)
    made = streams(Echo(weights={"tool": 0.1, "user": 0.2, "assistant": 5.0}))
    assert made["ce_weight"].tolist() == pytest.approx([0, 0, 0, 0, 0.1, 0.1, 0, 0.2])
    assert "rl_weight" not in made
    later = [False] * 6 + [True, False]  # its first reply was trained with an earlier sequence
    weights = streams(Echo(weights={"tool": 0.1}), mask=later)["ce_weight"].tolist()
    assert weights == pytest.approx([0, 0, 0, 0, 0.1, 0.1, 0, 0])
    assert not streams(Echo(), 0.0)["rl_weight"].any()
    assert streams(Echo(), 0.0, cut=4) is None  # what is left of it has no such token


def test_distillation():
    """On-policy: the policy's tokens, each with what the teacher thinks of it; rewards do not matter. Off-policy: the
    teacher's tokens are on no mask, since they say nothing about how far policy and sampler are apart."""
    for config in (OPD(teacher=TEACHER), OPSD()):
        made = streams(config, 0.0, cut=7)
        assert made["loss_mask"].tolist() == MASK[:7]
        assert not made["rl_weight"].any()
        assert made["ref_kl_weight"].tolist() == [float(sampled) for sampled in MASK[:7]]
        assert made["ref_logprobs"].tolist() == [0.0, *[-0.25] * 6]
    made = streams(SFT(teacher=TeacherServer(base_url="http://teacher")), 0.0)
    assert not made["loss_mask"].any()
    assert not made["logprobs"].any()
    assert made["ce_weight"].tolist() == [float(sampled) for sampled in MASK]


def metrics_of(*groups: list[Finished[EpisodeResult]], envs: str = "", failures: tuple[Drop, ...] = ()) -> Any:
    """`envs`: of each group, a letter."""
    now = Counts(dropped={str(reason): failures.count(reason) for reason in failures})
    one = batch(*groups, tasks=tuple(Task(env, 0, "task") for env in envs.ljust(len(groups), "a")))
    names = sorted({group.task.env for group in one.groups})
    config = OrchestratorConfig(environments=[{"id": env} for env in names], batch_size=4, rollouts_per_example=2)
    scored = score_batch(one, config, dict.fromkeys(names, 1.0), {})
    return step_metrics(one, scored, Tally(), now, seconds=1.0, updates=(0.0, {}), several=len(names) > 1)


def rewarded(*rewards: float, sampled: int = 3, filtered: str = "") -> list[Finished[EpisodeResult]]:
    return [
        episode(number, reward, samples=[tokens(sampled)], filtered=filtered) for number, reward in enumerate(rewards)
    ]


def test_experts_reach_the_sample_and_are_counted():
    """Contract: a sample has the experts of its tokens but the last, of all if it is cut; their bytes are reported."""
    plain, chosen = tokens(3), tokens(3)  # five tokens
    chosen.experts = RoutedExperts(np.arange(4 * 6, dtype="<u2").tobytes(), 2, 3, 2)
    episodes = [episode(0, 1.0, samples=[chosen]), episode(1, 0.0, samples=[plain])]
    for seq_len, rows in ((100, 4), (4, 4), (3, 3)):
        samples = score(batch(episodes), seq_len=seq_len).samples
        assert samples[1].routed_experts is None
        assert samples[0].routed_experts is not None
        assert samples[0].routed_experts.tolist() == np.arange(24).reshape(4, 6)[:rows].tolist()
    metrics = metrics_of(episodes)
    assert (metrics["replay/mib"], metrics["replay/tokens"]) == (48 / 2**20, 4.0)
    assert "replay/mib" not in metrics_of(rewarded(1.0, 0.0))


def test_metrics_of_a_step():
    """Before any filter: what was not trained counts, and what was left out is named; so are failures, by reason."""
    failures = (Drop.ERRORED, Drop.ERRORED, Drop.TIMEOUT)
    groups = rewarded(1.0, 0.0), rewarded(1.0, 1.0, sampled=5), rewarded(0.5, 0.0, filtered="truncated")
    metrics = metrics_of(*groups, failures=failures)
    expected = {
        "reward/mean": 3.5 / 6, "reward/p90": 1.0, "advantage/min": -0.5, "advantage/max": 0.5,
        "num_output_tokens/max": 5, "num_input_tokens/max": 2, "num_total_tokens/max": 7,
        "filtered/zero_advantage": 2 / 6, "filtered/truncated": 2 / 6, "progress/samples": 2,
        "solved_all": 1 / 3, "solved_none": 0.0, "solved_some": 2 / 3,
        "errors/errored": 2.0, "errors/timeout": 1.0, "errors/rate": 1.0,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert not any(name.startswith("reward/a/") for name in metrics)
    metrics = metrics_of(rewarded(1.0, 0.0), rewarded(0.0, 0.0), envs="ab")
    expected = {"reward/mean": 0.25, "reward/a/mean": 0.5, "reward/b/mean": 0.0, "advantage/a/std": 0.5}
    expected |= {"solved_some/a": 1.0, "solved_none/b": 1.0}
    assert {name: metrics[name] for name in expected} == expected


def test_what_trackers_may_show():
    """Contract: a few rollouts from all over the batch, whatever its size, and values of all that finished."""
    for size in (1, 8, 9, 100):
        one = batch(rewarded(*(float(number % 2) for number in range(size))))
        extras = step_extras(one, score(one))
        rewards = [row[3] for row in extras.samples]
        assert 1 <= len(rewards) <= 8
        assert extras.samples[0][0] == one.finished[0].result.env
        assert len(extras.distributions["reward"]) == len(extras.distributions["num_turns"]) == size


def result(tokens: list[int], reward: float = 0.0, logprob: float = -0.5, **fields: object) -> EpisodeResult:
    """A prompt of two tokens, then `tokens`."""
    samples = [sample_tokens([1, 2], tokens, [logprob] * len(tokens), reward)]
    return EpisodeResult("e", "env", "task", Outcome.OK, reward=reward, samples=samples, **fields)


def group(*results: EpisodeResult) -> Group[EpisodeResult]:
    finished = [Finished(Start(0, i, 0, Task("env", 0, "task"), 0), 0, 0, one) for i, one in enumerate(results)]
    return Group(0, Task("env", 0, "task"), finished=finished)


def config(**settings: object) -> OrchestratorConfig:
    return OrchestratorConfig(**{"environment": {"id": "env"}, "batch_size": 4, "rollouts_per_example": 2} | settings)


ROUND, REPEATED = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("rule", "kept", "left_out"),
    [
        ({"truncated": {}}, result([5]), result([5], is_truncated=True)),
        # of 8 tokens 7 pairs, of which the repeated ones have 4 different: 3 of 7 repeat
        ({"repetition": {"ngram": 2, "max_share": 0.4, "min_tokens": 4}}, result(ROUND), result(REPEATED)),
        ({"repetition": {"ngram": 2, "max_share": 0.4, "min_tokens": 9}}, result(REPEATED), None),
        # what a prompt repeats is not the policy's doing
        ({"repetition": {"ngram": 1, "max_share": 0.0, "min_tokens": 1}}, result([1]), None),
        ({"gibberish": {"min_token_id": 100, "max_logprob": -9}}, result([100], 0, -8.9), result([100], 0, -9.1)),
        ({"gibberish": {"min_token_id": 100, "max_logprob": -9}}, result([99], 0, -20.0), None),
        ({"custom": {"path": f"{__file__}:shorter_than", "args": {"tokens": 2}}}, result([5, 6]), result([5])),
    ],
)
def test_rules_about_an_episode(rule, kept, left_out):
    (name,) = rule
    assert filter_reason(FilterConfig(**rule), kept, 100) == ""
    assert left_out is None or filter_reason(FilterConfig(**rule), left_out, 100) == name


def test_what_is_left_out_still_counts_in_the_baseline():
    """Contract: one that a filter leaves out is not trained and is named; others are compared with it."""
    one = group(result([5, 6], 1.0), result([5], 0.0), result([6], 0.5, filtered="truncated"))
    scored = score_batch(Batch(3, [one]), config(filters={"truncated": {}}), {"env": 1.0}, {})
    assert [float(sample.advantages[-1]) for sample in scored.samples] == [0.5, -0.5]
    assert (scored.trained, scored.filtered) == (["0.0.0", "0.1.0"], {"0.2.0": "truncated"})


DYNAMIC = {"filters": {"dynamic_sampling": True}}


@pytest.mark.parametrize(
    ("settings", "rewards", "why"),
    [
        ({}, (0.5, 0.5), None),
        (DYNAMIC, (0.5, 0.5), "dynamic_sampling"),
        (DYNAMIC, (0.5, 0.6), None),
        (DYNAMIC | {"algorithm": {"type": "reinforce_pp", "group_baseline": True}}, (0.5, 0.5), "dynamic_sampling"),
        ({"filters": {"difficulty": {}}}, (0.0, 0.0), "difficulty"),
        ({"filters": {"difficulty": {}}}, (1.0, 1.0), "difficulty"),
        ({"filters": {"difficulty": {}}}, (1.0, 0.0), None),
        ({"filters": {"difficulty": {"low": 0.5, "high": 0.9}}}, (0.9, 0.1), "difficulty"),
    ],
)
def test_groups_that_are_rejected(settings, rewards, why):
    """One of which the filters leave nothing does not take a place in a batch, either."""
    both = group(*(result([5], reward) for reward in rewards))
    assert rejection_reason(both, config(**settings)) == why
    both.finished[0].result.filtered = "gibberish"
    assert rejection_reason(both, config(**settings)) == why
    both.finished[1].result.filtered = "repetition"
    assert rejection_reason(both, config(**settings)) == "gibberish+repetition"


def shorter_than(episode: EpisodeResult, tokens: int) -> bool:
    return episode.samples[0].loss_mask.count(1) < tokens


def wordy(episode: EpisodeResult) -> str:
    return "too long"


def careless(episode: EpisodeResult) -> bool:
    return episode.metrics["nothing"] > 0


def test_a_filter_of_ones_own_says_yes_or_no():
    for function, message in (
        ("wordy", "gave 'too long': True"),
        ("careless", r"raised KeyError\(.nothing.\) of episode e"),
    ):
        with pytest.raises(UserError, match=message):
            filter_reason(FilterConfig(custom={"path": f"{__file__}:{function}"}), result([5]), 100)
    with pytest.raises(UserError, match=r"^filters\.custom\.path: .* does not take its arguments: .*'tokens'"):
        user_function(CustomFilter(path=f"{__file__}:shorter_than"), "filters.custom")


def algorithm(kind: str, **settings: object) -> dict[str, dict[str, object]]:
    return {"algorithm": {"type": kind, **settings}}


SERVER, ALONE = {"base_url": "http://teacher"}, {"rollouts_per_example": 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            (algorithm(kind) | ALONE, f"{kind} compares attempts at one task")
            for kind in ("grpo", "rloo", "opo", "max_rl", "gdpo")
        ),
        (algorithm("reinforce_pp", group_baseline=True) | ALONE, "reinforce_pp compares attempts at one task"),
        ({"environment": {"id": "env", **algorithm("grpo")}} | ALONE, "grpo compares attempts at one task"),
        (algorithm("reinforce_pp") | ALONE | {"batch_size": 1}, "compares the episodes of a batch: with batch_size 1"),
        (algorithm("gdpo", length_penalty={"type": "linear"}), "length_penalty has no effect"),
        (algorithm("gdpo", weights={"a": 0.0}), "weights are all zero, and so would be every"),
        (
            algorithm("grpo", length_penalty={"type": "overlong", "max_tokens": 10, "cache": 20}),
            "cache 20 is more than max_tokens 10",
        ),
        ({"filters": {"difficulty": {"low": 0.9, "high": 0.1}}}, r"low 0\.9 is not below high 0\.1"),
        ({"filters": {"difficulty": {"low": math.nan}}}, "low"),
        ({"curriculum": {"hard": 0.9}}, r"hard 0\.9 is not below easy 0\.8"),
        (algorithm("opd"), r"opd needs a teacher: give teacher\.base_url"),
        (algorithm("grpo", teacher=SERVER), "teacher"),
        (algorithm("sft", teacher=SERVER | {"timeout": 3}), "timeout"),
        (algorithm("echo", weights={"judge": 1.0}), "no message has the role 'judge'"),
        (algorithm("echo", weights={"tool": -1.0}), "tool is below zero"),
        (algorithm("opsd", template="look"), r"template has no \{demonstration\}"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    """Contract: one clear line before anything starts."""
    with pytest.raises(ValidationError, match=message):
        config(**settings)
