"""A lean stand-in for the OpenAI SDK where renderers ask an engine for tokens: the two requests they make, over aiohttp.

The SDK and httpx took 37 % of a worker's CPU time per single-turn episode (`benchmarks/env_worker.py`). Imports no verifiers.
It knows the model's context: a reply gets the room that is left, and a prompt that leaves none is not sent.
"""

import contextlib
import json
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import aiohttp
import httpx
from openai import APIConnectionError, APIStatusError

CONNECT_SECONDS = 30.0
# `inference` closes an idle connection after 60 s: one that may be closing must not be used again.
KEEPALIVE_SECONDS = 30.0

_TOKEN_ROUTE, _SAMPLE_ROUTE = "/inference/v1/generate", "/v1/sample"
_SAMPLE_KEYS = {"model", "token_ids", "sampling_params", "cache_salt"}
_NOT_PASSED_ON = (401, 404, 405, 501)  # of a router that does not know our route, or drops the key on it
# What `config.shared.SamplingConfig` and the renderers send; an environment's own settings go by vLLM's route, which takes more.
_SAMPLE_PARAMS = {
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop_token_ids", "logprobs"),
    *("ignore_eos", "skip_special_tokens", "routed_experts_prompt_start"),
}

whole_reply: ContextVar[bool] = ContextVar("whole_reply", default=False)
"""Whether a prompt that leaves no room for a whole reply is refused, rather than the reply made shorter."""


@dataclass(frozen=True)
class EngineReply:
    content: bytes


class EngineConnection:
    """What `renderers.client.generate` needs of an AsyncOpenAI client: `base_url`, `get`, `post`, `close`.

    Raises the SDK's errors, because verifiers tells an engine that is down from one that refuses by them.
    """

    def __init__(self, base_url: str, api_key: str) -> None:
        self.base_url = base_url
        self._sampling = True  # by our own route
        self._context: int | None = None  # tokens, once the server has said it
        self._asked = False
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(  # bounded: by the episode's deadline, which cancels the request
                total=None, sock_connect=CONNECT_SECONDS
            ),
        )

    async def get(self, path: str, cast_to: Any = None) -> Any:
        try:
            reply = await self._request("GET", f"{self.base_url}{path}", None, {})
        except APIStatusError:
            self._asked = True  # it has nothing to say
            raise
        self._asked = True
        answer = json.loads(reply.content)
        # All names that a server gives its model, adapters too, are of the same context.
        lengths = [card.get("max_model_len") for card in answer.get("data") or []]
        self._context = next((length for length in lengths if isinstance(length, int) and length > 0), None)
        return answer

    async def post(self, url: str, *, cast_to: Any, body: dict[str, Any], options: Any = None) -> EngineReply:
        headers = (options or {}).get("headers", {})
        body = await self._fitted(body, url)
        plain = body.keys() <= _SAMPLE_KEYS and body["sampling_params"].keys() <= _SAMPLE_PARAMS
        # Else it asks for images, or what came of them, or by a setting of its own.
        sampling = url.endswith(_TOKEN_ROUTE) and plain and self._sampling
        if sampling:
            own = url.removesuffix(_TOKEN_ROUTE) + _SAMPLE_ROUTE
            # Of experts, which that route does not report.
            taken = {name: value for name, value in body["sampling_params"].items() if name != "routed_experts_prompt_start"}  # fmt: skip
            try:
                return await self._request("POST", own, _json({**body, "sampling_params": taken}), headers)
            except APIStatusError as error:
                if error.status_code not in _NOT_PASSED_ON:
                    raise
        reply = await self._request("POST", url, _json(body), headers)
        self._sampling = self._sampling and not sampling  # a router: it answered there, and not here
        return reply

    async def _fitted(self, body: dict[str, Any], url: str) -> dict[str, Any]:
        """The request with no more tokens asked for than there is room. Raises APIStatusError (400) when there is none."""
        if "content_parts" in body or "features" in body:  # only the server knows what images come to
            return body
        if not self._asked:
            with contextlib.suppress(APIStatusError, APIConnectionError):  # what is wrong shows when it is sampled
                await self.get("/models")
        if self._context is None:
            return body
        prompt, asked = len(body["token_ids"]), body["sampling_params"].get("max_tokens")
        room = self._context - prompt
        whole = whole_reply.get()  # bounded: of the context, waits for nothing
        wanted = min(asked or self._context // 4, self._context // 2) if whole else 1
        if room < wanted:
            message = f"the prompt of {prompt} tokens leaves no room for a reply in the maximum context length of {self._context} tokens"
            answer = httpx.Response(400, request=httpx.Request("POST", url))
            raise APIStatusError(message, response=answer, body=None)
        if asked is None or asked <= room:
            return body
        return {**body, "sampling_params": {**body["sampling_params"], "max_tokens": room}}

    async def close(self) -> None:
        await self._session.close()

    async def _request(self, method: str, url: str, data: bytes | None, headers: dict[str, str]) -> EngineReply:
        try:
            async with self._session.request(method, url, data=data, headers=headers) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            message = f"{type(error).__name__}: {error}"
            raise APIConnectionError(message=message, request=httpx.Request(method, url)) from error
        if not response.ok:
            answer = httpx.Response(response.status, content=content, request=httpx.Request(method, url))
            raise APIStatusError(content.decode(errors="replace")[:1000], response=answer, body=None)
        return EngineReply(content)


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
