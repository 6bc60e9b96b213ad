"""What a worker may not tell us: each is an `invalid` result with a reason, and nothing of it reaches training."""

import math
from array import array
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.envs.pool import vetted
from prime_rl.envs.protocol import EpisodeResult, Outcome, Part, ProtocolError, Result, SampleTokens, decode, encode
from prime_rl.orchestrator.samples import exact_streams

IDS = {"episode_id": "1.0.0", "env": "env", "task_id": "task"}
ASKED: dict[str, Any] = {**IDS, "tokens": True}


def sample(**fields: Any) -> SampleTokens:
    return replace(SampleTokens.of([1, 2, 3], [False, True, True], [0.0, -0.5, -1.0], 1, 0.5), **fields)


def result(**fields: Any) -> EpisodeResult:
    return EpisodeResult(**{**IDS, "outcome": Outcome.OK, "reward": 1.0, "samples": [sample()], **fields})


def test_what_is_right_stays_as_it_is() -> None:
    """The very same object, also one of several parts, with hints and a teacher's values."""
    parts = [Part("a", 0.5, {"x": 0.5}, {"m": 1}, 1, False)]
    rich = sample(hint=array("i", [7]), ref_logprobs=array("f", [0.0, -1.0]), roles=bytes([1, 3, 3]))
    for one, tokens in ((result(), True), (result(parts=parts, samples=[rich]), True), (result(samples=[]), False)):
        before = replace(one)
        assert vetted(one, **{**ASKED, "tokens": tokens}) is one
        assert one == before


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"episode_id": "1.0.1"}, "it is of episode '1.0.1'"),
        ({"env": "other"}, "of 'other'"),
        ({"task_id": "x" * 10**6}, "it is of episode"),
        ({"reward": math.nan}, "reward is nan"),
        ({"reward": -math.inf}, "reward is -inf"),
        ({"reward": 1e300}, "reward is beyond 32 bits"),
        ({"reward": -1e38}, "reward is -1e+38: beyond 1e+37"),
        ({"rewards": {"a": 1e38}}, "rewards['a'] is 1e+38"),
        ({"samples": []}, "no samples"),
        ({"rewards": {"a": math.nan}}, "rewards['a'] is nan"),
        ({"rewards": {"a": "high"}}, "rewards['a'] is a str"),
        ({"metrics": {"a": None}}, "metrics['a'] is a NoneType"),
        ({"metrics": {1: 1.0}}, "metrics has a name that is a int"),
        ({"timing": {"a": []}}, "timing['a'] is a list"),
        ({"num_turns": -1}, "num_turns is -1"),
        ({"output_tokens": 1 << 63}, "output_tokens is"),
        ({"filtered": "zero_advantage"}, "filter"),
        ({"parts": [Part("", math.nan, {}, {}, 1, False)]}, "a part's reward is nan"),
        ({"parts": [Part("", 0.0, {"a": True}, {}, 1, False)]}, "a part's rewards['a'] is a bool"),
        ({"samples": [sample(reward=math.inf)]}, "a sample's reward is inf"),
        ({"samples": [sample(prompt_len=4)]}, "a prompt of 4"),
        ({"samples": [sample(input_ids=array("i", [1, -2, 3]))]}, "token -2"),
        ({"samples": [sample(logprobs=array("f", [0.0, 0.5, -1.0]))]}, "log-probability"),
        ({"samples": [sample(logprobs=array("f", [0.0, math.nan, -1.0]))]}, "log-probability"),
        ({"samples": [sample(logprobs=array("f", [-1.0, -0.5, -1.0]))]}, "not sampled"),
        ({"samples": [sample(hint=array("i", [-1]))]}, "hint"),
        ({"samples": [sample(ref_logprobs=array("f", [math.nan]))]}, "teacher"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], fault: str) -> None:
    """Identity, numbers, tables, streams."""
    bad = vetted(result(**fields), **ASKED)
    assert (bad.outcome, bad.samples, bad.reward) == (Outcome.INVALID, [], 0.0)
    assert (bad.episode_id, bad.env, bad.task_id) == ("1.0.0", "env", "task")
    assert fault in bad.message
    assert len(bad.message) < 1000


def test_a_failure_keeps_its_cause() -> None:
    """Whatever else is in it."""
    bad = vetted(result(outcome=Outcome.ERRORED, message="x" * 10_000, reward=math.nan), **ASKED)
    assert (bad.outcome, bad.samples, bad.reward) == (Outcome.ERRORED, [], 0.0)
    assert bad.message == "x" * 2000


def test_metrics_that_are_no_number_are_left_out() -> None:
    """An average of nothing costs no episode, and no mean over the batch."""
    good = vetted(result(metrics={"a": math.nan, "b": 1.0}), **ASKED)
    assert (good.outcome, good.metrics) == (Outcome.OK, {"b": 1.0})


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
FIELDS = sorted({"request", *vars(result())} | {f"samples.{name}" for name in vars(sample())})


@given(st.dictionaries(st.sampled_from(FIELDS), anything, min_size=1, max_size=3))
def test_no_message_raises_anything_else(changes: dict[str, Any]) -> None:
    """Whatever stands in a result's fields: it is refused on the wire, or judged here; what passes can be trained on."""
    data = msgpack.unpackb(encode(Result(1, result())))
    for name, value in changes.items():
        if name == "request":
            data["request"] = value
        elif name.startswith("samples."):
            if isinstance(data["episode"]["samples"], list) and data["episode"]["samples"]:
                first = data["episode"]["samples"][0]
                if isinstance(first, dict):
                    first[name.removeprefix("samples.")] = value
        else:
            data["episode"][name] = value
    try:
        message = decode(msgpack.packb(data))
    except ProtocolError:
        return
    assert isinstance(message, Result)
    judged = vetted(message.episode, **ASKED)
    for one in judged.samples:
        exact_streams(one)
