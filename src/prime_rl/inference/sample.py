"""Tokens in, tokens out, and no more than that: the route that rollouts are sampled by.

    POST /v1/sample {"token_ids", "sampling_params", "cache_salt", "model"} -> vLLM's answer of /inference/v1/generate

vLLM's own token route can do more, and pays for it with every token (0.26 makes an output for each of them, all releases detokenize and build
two objects a log-probability). Here one output is made, when the last token is there; no text is made, unless stop strings need it; and the answer
holds the sampled ids and their log-probabilities under the distribution that was sampled from. What this route does not do it refuses.
"""

import asyncio
import json
import secrets
from collections.abc import Coroutine, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from prime_rl.inference.version_files import Rejected

SAMPLE_ROUTE = "/v1/sample"
# Under /v1, which vLLM guards with the API key.
router = APIRouter()

_TAKEN = {
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids", "bad_words"),
    *("logprobs", "skip_special_tokens", "detokenize"),
}  # fmt: skip


class SampleBody(BaseModel):
    """A request. `sampling_params` are vLLM's; those of `_TAKEN` are taken."""

    model_config = ConfigDict(extra="forbid")

    token_ids: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    sampling_params: dict[str, Any]
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    model: str | None = None


@router.post(SAMPLE_ROUTE)
async def sample(body: SampleBody, raw_request: Request) -> Response:
    """Sample one reply. Ends when the client goes away.

    Raises:
        Rejected: 400 or 404 for what this route does not do, 500 when the engine fails.
        ValueError: from vLLM, for a prompt that it does not take; its own handler makes 400 of it.
    """
    state = raw_request.app.state
    if body.model is not None and body.model not in state.prime_models:
        raise Rejected(404, f"the model {body.model!r} is not served; this server has {', '.join(state.prime_models)}")
    params = sampling_params(body.sampling_params, len(body.token_ids), state.engine_client.model_config.max_model_len)
    work = _sample(state.engine_client, body, params)
    output = await _while_wanted(raw_request, work)
    if output is None:
        return Response(status_code=499)  # nobody reads it
    if output.finish_reason == "error":
        raise Rejected(500, "the engine failed while it sampled")
    return Response(answer(body.token_ids, output), media_type="application/json")


def sampling_params(given: dict[str, Any], prompt: int, most: int) -> Any:
    """vLLM's parameters for one output with the log-probabilities of the sampled tokens, in flat lists, without text.

    Args:
        prompt: Tokens of the prompt.
        most: Tokens of prompt and reply; the reply's bound where none is given.

    Raises:
        Rejected: a parameter that this route does not take, or a value that vLLM does not take (400).
    """
    import msgspec
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    if unknown := sorted(given.keys() - _TAKEN):
        raise Rejected(400, f"sampling_params.{unknown[0]} is not taken by {SAMPLE_ROUTE}")
    if (asked := given.get("logprobs")) not in (None, 0, 1):
        raise Rejected(400, f"{SAMPLE_ROUTE} answers with the log-probability of each sampled token, not with {asked}")
    chosen = {"max_tokens": max(most - prompt, 1), **{key: value for key, value in given.items() if value is not None}}
    chosen |= {"logprobs": 0, "flat_logprobs": True, "detokenize": bool(given.get("stop"))}
    chosen["output_kind"] = RequestOutputKind.FINAL_ONLY.value
    try:
        params = msgspec.convert(chosen, SamplingParams)
        msgspec.msgpack.encode(
            params
        )  # as it goes to the engine: vLLM would forget to clean up after a number that is too large
    except (msgspec.ValidationError, OverflowError, TypeError, ValueError) as error:
        raise Rejected(400, f"sampling_params: {error}") from error
    return params


async def _sample(engine: Any, body: SampleBody, params: Any) -> Any:
    from vllm.inputs import tokens_input

    prompt = tokens_input(body.token_ids, cache_salt=body.cache_salt)
    outputs = [output async for output in engine.generate(prompt, params, f"sample-{secrets.token_hex(16)}")]
    return outputs[-1].outputs[0]  # the only one


async def _while_wanted(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """The result, or None once the client has gone away: vLLM drops a request whose generator is cancelled."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)  # bounded: by the client's patience
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def answer(prompt: Sequence[int], output: Any) -> bytes:
    """The JSON of vLLM's token route for one finished output with flat log-probabilities; without what a rollout does not read.

    Raises:
        Rejected: the log-probabilities are not those of the sampled tokens (500).
    """
    ids, logprobs = list(output.token_ids), output.logprobs
    if logprobs is None or list(logprobs.token_ids) != ids:
        raise Rejected(500, "the engine gave log-probabilities of other tokens than it sampled")
    pairs = zip(ids, logprobs.logprobs, strict=True)
    content = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]
    choice = {"index": 0, "finish_reason": output.finish_reason or "stop", "token_ids": ids, "logprobs": {"content": content}}  # fmt: skip
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ids),
        "total_tokens": len(prompt) + len(ids),
    }
    return json.dumps({"request_id": "", "choices": [choice], "usage": usage}, separators=(",", ":")).encode()
