"""The route that rollouts are sampled by: what it takes, what it answers. The engine itself: tests/integration/test_inference.py."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from renderers.client import _parse_completion_logprobs, parse_generate_response

from prime_rl.inference.routes import sample_answer
from prime_rl.inference.version_files import Rejected


@dataclass
class Output:
    token_ids: list[int]
    logprobs: Any
    finish_reason: str | None = "length"


def output(ids: list[int], logprobs: list[float], **changed: Any) -> Output:
    return Output(ids, SimpleNamespace(token_ids=list(ids), logprobs=logprobs), **changed)


def test_the_answer_is_read_as_vllms() -> None:
    """Contract: the reader of vLLM's token route gets the sampled ids and exactly their log-probabilities out of our answer. An output whose
    log-probabilities are not those of the sampled tokens is an error of the server."""
    logprobs = [-0.10000000149011612, -9.5, 0.0]
    found = parse_generate_response(sample_answer([1, 2], output([7, 8, 9], logprobs)))
    choice = found["choices"][0]
    assert (choice["token_ids"], choice["finish_reason"]) == ([7, 8, 9], "length")
    assert _parse_completion_logprobs(choice, choice["token_ids"]) == logprobs
    assert found["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    for others in (None, SimpleNamespace(token_ids=[7, 9], logprobs=[-1.0, -1.0])):
        with pytest.raises(Rejected) as refused:
            sample_answer([1], Output([7, 8], others))
        assert refused.value.status == 500
