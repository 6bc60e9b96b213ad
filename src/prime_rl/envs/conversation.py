"""The model calls of one episode, by token ids to an engine.

Imports neither verifiers nor torch: plain environments run without them. A conversation that goes on extends the ids
already there, as the renderer can: what the engine was sent and sampled is what is trained on.
"""

import ast
import json
import os
from binascii import a2b_base64, b2a_base64
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import aiohttp
from renderers import MalformedGenerateResponseError
from renderers.base import ParsedToolCall, RenderedTokens
from renderers.client import generate

from prime_rl.envs.convert import ASSISTANT, Message, Turn, classify, finish, role_index, samples_of
from prime_rl.envs.ids import report
from prime_rl.envs.protocol import API_KEY_VAR, EpisodeResult, Outcome, RoutedExperts, Run, Setup
from prime_rl.envs.renderer import choose

CONNECT_SECONDS = 30.0
# `inference` closes an idle connection after 60 s: one that may be closing must not be used again.
KEEPALIVE_SECONDS = 30.0

_TOKEN_ROUTE, _SAMPLE_ROUTE = "/inference/v1/generate", "/v1/sample"
_NOT_PASSED_ON = (401, 404, 405, 501)  # of a router that does not know our route, or drops the key on it
# What our configuration and the renderers send; an environment's own settings go by vLLM's route, which takes more.
_SAMPLE_PARAMS = {
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop_token_ids", "logprobs"),
    *("ignore_eos", "skip_special_tokens", "routed_experts_prompt_start"),
}
_EXPERTS = "routed_experts_prompt_start"  # the first token of the prompt whose experts are asked for
_ITEM_BYTES = {"uint8": 1, "uint16": 2}


def request_settings(sampling: Mapping[str, Any], policy_version: int) -> dict[str, Any]:
    """What is said with every model call of an episode, beside the prompt."""
    # The salt keeps the engine from reusing cached prefixes that an older policy computed.
    return {"cache_salt": f"v{policy_version}", **sampling}


class CallFailed(Exception):
    """A model call gave no reply: no connection (503), the status of a refusal, or a prompt that was not sent (400)."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
        self.outcome, self.message = classify("ProviderError", message, status)


class Conversation:
    """The turns of one conversation with the model, all sampled by the server at `base_url`."""

    def __init__(self, engine: "EngineClient", base_url: str, sampling: Mapping[str, Any]) -> None:
        self.turns: list[Turn] = []
        self.failure: CallFailed | None = None
        self._engine, self._base_url, self._sampling = engine, base_url, sampling

    async def reply(self, messages: list[Message], tools: list[Any] | None) -> Turn | None:
        """Return the model's reply; None where the conversation exceeds the model's context, and may end there. Raises
        CallFailed, also ever after: the engine does not answer, or refuses, or the first prompt fills the context."""
        if self.failure is not None:
            raise self.failure
        history = [_comparable(message) for message in messages]
        prompt = extended = None
        # The longest earlier turn that these messages continue is extended by the new ones.
        for turn in sorted(self.turns, key=lambda turn: len(turn.history), reverse=True):
            known = len(turn.history)
            if not self._engine.branched and known < len(history) and history[:known] == turn.history:
                bridge = self._engine.renderer.bridge_to_next_turn
                prompt = bridge(turn.prompt_ids, turn.completion_ids, messages[known:], tools=tools)
                extended = None if prompt is None else turn
                break
        known = 0 if extended is None else len(extended.ids)
        try:
            answer = await self._engine.generate(self._base_url, messages, tools, prompt, self._sampling, known)
        except CallFailed as error:
            if error.outcome is Outcome.PROMPT_TOO_LONG and self.turns:
                return None
            self.failure = error
            raise
        calls = list(answer["tool_calls"] or [])
        for number, call in enumerate(calls):
            call.id = call.id or f"call_{len(self.turns)}_{number}"
        # The reply as the next prompt has it.
        message: Message = {"role": "assistant", "content": answer["content"] or ""}
        if answer["reasoning_content"]:
            message["reasoning_content"] = answer["reasoning_content"]
        if named := [call for call in calls if call.name]:  # whether its arguments are any good or not
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_of(call)}}
                for call in named
            ]
        tokens = answer["prompt_ids"], answer["completion_ids"], answer["completion_logprobs"]
        roles, is_truncated = _roles(answer["prompt_attribution"], messages), answer["finish_reason"] == "length"
        turn = Turn(*tokens, roles, [*history, _comparable(message)], message, calls, is_truncated)
        turn.experts, turn.extended = experts_of(answer["routed_experts"]), extended
        self.turns.append(turn)
        return turn


class ConversationEnv:
    """An environment, each episode of which is a conversation with the model that is kept here. `async with
    ConversationEnv(…) as env: await env.run(…)`. Constructing one loads everything, as `worker.load` does."""

    bounded = True
    task_ids: list[str]

    def __init__(self, setup: Setup, tools: bool) -> None:
        self.setup, self.engine = setup, EngineClient(setup, tools)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()

    async def converse(self, run: Run, conversation: Conversation, result: EpisodeResult) -> Sequence[Turn]:
        """Run an episode, and put what the environment says of it into its result. Returns the turns to train on."""
        raise NotImplementedError

    async def run(self, run: Run) -> EpisodeResult:
        """One episode to its end. Failures of the environment or the engine are outcomes, not exceptions."""
        conversation = Conversation(self.engine, run.base_url, request_settings(run.sampling, run.policy_version))
        result = EpisodeResult(run.episode_id, self.setup.name, run.task_id, Outcome.OK)
        used: Sequence[Turn] = conversation.turns
        try:
            used = await self.converse(run, conversation, result)
        except Exception as error:  # noqa: BLE001 - an episode's failure must stay an outcome of that episode
            over = " (after the conversation was over: see max_turns and the model's context)"
            result.outcome, result.message = Outcome.ERRORED, report(error) + (over if result.is_truncated else "")
        if (failure := conversation.failure) is not None:  # whatever the environment made of it
            result.outcome, result.message = failure.outcome, failure.message
        result.num_turns = len(used)
        result.is_truncated = result.is_truncated or any(turn.is_truncated for turn in conversation.turns)
        result.input_tokens = sum(len(turn.prompt_ids) for turn in conversation.turns)
        result.output_tokens = sum(len(turn.completion_ids) for turn in conversation.turns)
        finish(result, partial(samples_of, used, self.engine.branched))
        for sample in result.samples:
            sample.reward = result.reward
        return result


class EngineClient:
    """Connections to the engine's servers, and the renderer of its model. `generate` needs a running event loop."""

    def __init__(self, setup: Setup, tools: bool) -> None:
        """`tools`: conversations have some. Raises RendererError: no renderer fits the model."""
        self.model = setup.sampled_by or setup.model
        self.branched = setup.trajectories == "branched"
        self._connections: dict[str, EngineConnection] = {}
        self.renderer = choose(setup.model, setup.renderer, tools)

    async def close(self) -> None:
        for connection in self._connections.values():
            await connection.close()

    async def generate(
        self,
        base_url: str,
        messages: Sequence[Message],
        tools: list[Any] | None,
        prompt: RenderedTokens | None,
        sampling: Mapping[str, Any],
        computed: int = 0,
        **options: Any,
    ) -> dict[str, Any]:
        """Call the model with the ids of `prompt`, or else of the rendered messages. Raises CallFailed.

        Returns what `renderers.client.generate` does. A reply gets the room that is left in the model's context. Where
        `sampling` asks for the experts that the engine chose, they come from the last of the `computed` tokens on (an
        earlier turn's, which the engine had computed).
        """
        if base_url not in self._connections:
            self._connections[base_url] = EngineConnection(base_url, os.environ.get(API_KEY_VAR) or "EMPTY")
        connection = self._connections[base_url]
        if prompt is None:
            prompt = self.renderer.render(list(messages), tools=tools, add_generation_prompt=True)
        if (images := prompt.multi_modal_data) is not None and not images.is_empty():
            raise CallFailed("the prompt has images or other media: models are trained on text alone", 400)
        params, sent = {name: value for name, value in sampling.items() if name != "cache_salt"}, len(prompt.token_ids)
        if (context := await connection.context()) is not None:
            if sent >= context:
                room = f"leaves no room for a reply in the maximum context length of {context}"
                raise CallFailed(f"the prompt of {sent} tokens {room}", 400)
            if "max_tokens" in params:
                params["max_tokens"] = min(params["max_tokens"], context - sent)
        replayed = params.get(_EXPERTS) is not None
        if replayed:
            params[_EXPERTS] = max(computed - 1, 0)
        try:
            answer = await generate(
                client=connection,  # type: ignore[arg-type]
                renderer=self.renderer,
                messages=list(messages),  # type: ignore[arg-type]
                prompt_ids=prompt.token_ids,
                prompt_attribution=prompt,
                max_prompt_len=sent,
                tools=tools,
                sampling_params=params,
                cache_salt=sampling.get("cache_salt"),
                **{"model": self.model, **options},
            )
        except MalformedGenerateResponseError as error:
            raise CallFailed(f"{error}", 422) from error  # as a refusal: another attempt gives the same
        if not replayed:
            answer["routed_experts"] = None  # vLLM's own route adds them unasked
        elif isinstance(encoded := answer["routed_experts"], str):
            answer["routed_experts"] = _as_our_route(encoded, params[_EXPERTS])
        elif encoded is None:
            raise CallFailed("the server does not return the experts that it chose (router_replay)", 422)
        return answer


def experts_of(encoded: Mapping[str, Any] | None) -> RoutedExperts | None:
    """The experts of an answer, as our route has them; None where it has none."""
    if encoded is None:
        return None
    layers, k = encoded["shape"][1:]
    return RoutedExperts(a2b_base64(encoded["data"]), layers, k, _ITEM_BYTES[encoded["dtype"]], encoded["start"])


def _as_our_route(encoded: str, start: int) -> dict[str, Any]:
    """What vLLM's own route says in base64: a file of numpy's, version 1, whose header is a Python literal."""
    file = a2b_base64(encoded)
    end = 10 + int.from_bytes(file[8:10], "little")
    header = ast.literal_eval(file[10:end].decode())
    dtype, data = {"|u1": "uint8", "<u2": "uint16"}[header["descr"]], b2a_base64(file[end:], newline=False)
    return {"data": data, "dtype": dtype, "shape": list(header["shape"]), "start": start}


def arguments_of(call: ParsedToolCall) -> str:
    """The arguments of a tool call as JSON text."""
    return call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments or {})


def _roles(rendered: RenderedTokens, messages: Sequence[Message]) -> bytes:
    """Return (P,) roles: whose message each token of a prompt, or of a bridge's part of it, belongs or leads to."""
    bridged = len(messages) - len(rendered.message_roles)
    roles, role = bytearray(len(rendered.token_ids)), ASSISTANT
    for place in reversed(range(len(roles))):
        if (message := rendered.message_indices[place]) >= 0:
            role = role_index(messages[bridged + message]["role"])
        roles[place] = role
    return bytes(roles)


def _comparable(message: Message) -> str:
    """A message by which equal ones are recognized, however absent content is spelled."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or []]
    said = message.get("content") or ""
    return json.dumps([message["role"], said, calls, message.get("tool_call_id")], sort_keys=True, default=str)


class EngineConnection:
    """What `renderers.client.generate` needs of an AsyncOpenAI client (`base_url`, `post`), over aiohttp. The SDK and
    httpx took 37 % of a worker's CPU time per single-turn episode (`benchmarks/env_worker.py`). Raises CallFailed."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.base_url = base_url
        self._own_route = True
        self._context: int | None = None  # 0: it does not say
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(  # bounded: by the episode's deadline, which cancels the request
                total=None, sock_connect=CONNECT_SECONDS
            ),
        )

    async def context(self) -> int | None:
        """Tokens of the model's context; None where the server does not say."""
        if self._context is None:
            try:
                answer = json.loads((await self._request("GET", f"{self.base_url}/models")).content)
            except CallFailed as error:
                if error.status == 503:
                    return None
                answer = {}
            # All names that a server gives its model, adapters too, are of the same context.
            self._context = max((card.get("max_model_len") or 0 for card in answer.get("data") or []), default=0)
        return self._context or None

    async def post(self, url: str, *, cast_to: Any, body: dict[str, Any], options: Any = None) -> SimpleNamespace:
        headers = (options or {}).get("headers")
        if self._own_route and body["sampling_params"].keys() <= _SAMPLE_PARAMS:
            try:
                return await self._request("POST", url.removesuffix(_TOKEN_ROUTE) + _SAMPLE_ROUTE, body, headers)
            except CallFailed as error:
                if error.status not in _NOT_PASSED_ON:
                    raise
                self._own_route = False  # a router
        return await self._request("POST", url, body, headers)

    async def close(self) -> None:
        await self._session.close()

    async def _request(self, method: str, url: str, body: Any = None, headers: Any = None) -> SimpleNamespace:
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        try:
            async with self._session.request(method, url, data=data, headers=headers) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise CallFailed(f"{type(error).__name__}: {error}", 503) from error
        if not response.ok:
            raise CallFailed(content.decode(errors="replace")[:1000], response.status)
        return SimpleNamespace(content=content)
