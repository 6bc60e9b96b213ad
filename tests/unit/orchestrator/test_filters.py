"""What is left out of training, what is turned away (each rule by hand, and in a batch), and settings that are refused."""

import math

import pytest
from pydantic import ValidationError

from prime_rl.config import OrchestratorConfig
from prime_rl.config.orchestrator import CustomFilter, FilterConfig
from prime_rl.envs.protocol import EpisodeResult, Outcome, SampleTokens
from prime_rl.errors import UserError
from prime_rl.orchestrator.algorithms import own_function
from prime_rl.orchestrator.samples import filter_reason, score_batch, turned_away
from prime_rl.orchestrator.scheduler import Batch, Finished, Group, Start, Task

TASK = Task("env", 0, "task")


def result(tokens: list[int], reward: float = 0.0, logprob: float = -0.5, **fields: object) -> EpisodeResult:
    """A prompt of two tokens, then `tokens`."""
    mask = [False, False, *[True] * len(tokens)]
    sample = SampleTokens.of([1, 2, *tokens], mask, [logprob * sampled for sampled in mask], 2, reward)
    return EpisodeResult("e", "env", "task", Outcome.OK, reward=reward, samples=[sample], **fields)


def group(*results: EpisodeResult) -> Group[EpisodeResult]:
    finished = [Finished(Start(0, i, 0, TASK, 0), 0, 0, one) for i, one in enumerate(results)]
    return Group(0, TASK, finished=finished)


def config(**settings: object) -> OrchestratorConfig:
    return OrchestratorConfig(**{"environment": {"id": "env"}, "batch_size": 4, "rollouts_per_example": 2} | settings)


ROUND, REPEATED = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("rule", "kept", "left_out"),
    [
        ({"truncated": {}}, result([5]), result([5], is_truncated=True)),
        ({"overlong": {"max_tokens": 3}}, result([5, 6, 7]), result([5, 6, 7, 8])),
        # of 8 tokens 7 pairs, of which the repeated ones have 4 different: 3 of 7 repeat
        ({"repetition": {"ngram": 2, "max_share": 0.4, "min_tokens": 4}}, result(ROUND), result(REPEATED)),
        ({"repetition": {"ngram": 2, "max_share": 0.4, "min_tokens": 9}}, result(REPEATED), None),
        ({"gibberish": {"min_token_id": 100, "max_logprob": -9}}, result([100], 0, -8.9), result([100], 0, -9.1)),
        ({"gibberish": {"min_token_id": 100, "max_logprob": -9}}, result([99], 0, -20.0), None),
        ({"custom": {"path": f"{__file__}:shorter_than", "args": {"tokens": 2}}}, result([5, 6]), result([5])),
    ],
)
def test_rules_about_an_episode(rule: dict, kept: EpisodeResult, left_out: EpisodeResult | None) -> None:
    (name,) = rule
    assert filter_reason(FilterConfig(**rule), kept, 100) == ""
    assert left_out is None or filter_reason(FilterConfig(**rule), left_out, 100) == name


def test_prompts_do_not_count() -> None:
    """Contract: what is repeated, long or improbable in a prompt is not the policy's doing."""
    sample = SampleTokens.of([7] * 100 + [1], [False] * 100 + [True], [0.0] * 100 + [-0.1], 100, 0.0)
    repetition, gibberish = {"ngram": 1, "max_share": 0.0, "min_tokens": 1}, {"min_token_id": 0}
    rules = FilterConfig(overlong={"max_tokens": 1}, repetition=repetition, gibberish=gibberish)
    assert filter_reason(rules, EpisodeResult("e", "env", "task", Outcome.OK, samples=[sample]), 1000) == ""


def test_what_is_left_out_still_counts_in_the_baseline() -> None:
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
def test_groups_that_are_turned_away(settings: dict, rewards: tuple[float, ...], why: str | None) -> None:
    """One of which the filters leave nothing does not take a place in a batch, either."""
    both = group(*(result([5], reward) for reward in rewards))
    assert turned_away(both, config(**settings)) == why
    both.finished[0].result.filtered = "overlong"
    assert turned_away(both, config(**settings)) == why
    both.finished[1].result.filtered = "repetition"
    assert turned_away(both, config(**settings)) == "overlong+repetition"


def shorter_than(episode: EpisodeResult, tokens: int) -> bool:
    return episode.samples[0].loss_mask.count(1) < tokens


def wordy(episode: EpisodeResult) -> str:
    return "too long"


def careless(episode: EpisodeResult) -> bool:
    return episode.metrics["nothing"] > 0


def test_a_filter_of_ones_own_says_yes_or_no() -> None:
    for function, message in (
        ("wordy", "gave 'too long': True"),
        ("careless", r"raised KeyError\(.nothing.\) of episode e"),
    ):
        with pytest.raises(UserError, match=message):
            filter_reason(FilterConfig(custom={"path": f"{__file__}:{function}"}), result([5]), 100)
    with pytest.raises(UserError, match=r"^filters\.custom\.path: .* does not take its arguments: .*'tokens'"):
        own_function(CustomFilter(path=f"{__file__}:shorter_than"), "filters.custom")


def algorithm(kind: str, **settings: object) -> dict[str, dict[str, object]]:
    return {"algorithm": {"type": kind, **settings}}


TEACHER, ALONE = {"base_url": "http://teacher"}, {"rollouts_per_example": 1}


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
        (algorithm("grpo", teacher=TEACHER), "teacher"),
        (algorithm("sft", teacher=TEACHER | {"timeout": 3}), "timeout"),
        (algorithm("echo", weights={"judge": 1.0}), "no message has the role 'judge'"),
        (algorithm("echo", weights={"tool": -1.0}), "tool is below zero"),
        (algorithm("opsd", template="look"), r"template has no \{demonstration\}"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict, message: str) -> None:
    """Contract: one clear line before anything starts."""
    with pytest.raises(ValidationError, match=message):
        config(**settings)
