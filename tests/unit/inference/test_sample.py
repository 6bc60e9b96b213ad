"""The route that rollouts are sampled by: what it takes and answers. The engine: integration/test_inference.py."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from renderers.client import _parse_completion_logprobs, parse_generate_response

from prime_rl.envs.conversation import experts_of
from prime_rl.inference.routes import sample_answer, sampling_params
from prime_rl.inference.service import Rejected


@dataclass
class Output:
    token_ids: list[int]
    logprobs: Any
    finish_reason: str | None = "length"
    routed_experts: Any = None


def output(ids: list[int], logprobs: list[float], **changed: Any) -> Output:
    return Output(ids, SimpleNamespace(token_ids=list(ids), logprobs=logprobs), **changed)


def test_the_answer_is_read_as_vllms() -> None:
    """Contract: the reader of vLLM's token route gets the sampled ids and exactly their log-probabilities out of our
    answer. An output with log-probabilities of other tokens is an error of the server."""
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


def test_experts_are_answered_where_they_are_asked_for() -> None:
    """Contract: an answer has the engine's choice for every token from the one asked for to the last but one, readable
    by renderers and verifiers; a choice for another number of tokens, or none, is an error."""
    # 2 + 3 tokens, the last of which was not computed.
    chosen = np.arange(1, 1 + 4 * 2 * 3, dtype=np.uint8).reshape(4, 2, 3)
    made = output([7, 8, 9], [-1.0, -1.0, -1.0])
    made.routed_experts = chosen[1:]
    answer = parse_generate_response(sample_answer([1, 2], made, 1))["choices"][0]["routed_experts"]
    found = experts_of(answer)
    assert found is not None
    assert (found.layers, found.k, found.itemsize, found.start, found.end) == (2, 3, 1, 1, 4)
    assert found.rows == chosen[1:].tobytes()
    assert "routed_experts" not in parse_generate_response(sample_answer([1, 2], made))["choices"][0]
    for wrong, status in ((None, 409), (chosen[2:], 422), (np.zeros_like(chosen[1:]), 422)):
        made.routed_experts = wrong
        with pytest.raises(Rejected) as refused:
            sample_answer([1, 2], made, 1)
        assert refused.value.status == status


@pytest.mark.parametrize("first", [-1, 3, 4, "1", 0.0])
def test_the_first_token_with_experts_is_one_of_the_prompt(first: Any) -> None:
    """Contract: a number that an engine would die of is refused."""
    with pytest.raises(Rejected, match="routed_experts_prompt_start") as refused:
        sampling_params({"routed_experts_prompt_start": first}, 3, 10)
    assert refused.value.status == 400
