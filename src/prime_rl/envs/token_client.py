"""Tokens in, tokens out, for environments that are not written for verifiers v1: what the engine is sent and what it samples.

Imports neither verifiers nor torch. A conversation that goes on extends the ids already there, as the renderer can; what is trained on is what
the engine was sent and sampled, and every sampled token is trained on once.
"""

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from openai import APIConnectionError, APIStatusError
from renderers import MalformedGenerateResponseError, OverlongPromptError
from renderers.base import ParsedToolCall, RenderedTokens
from renderers.client import generate

from prime_rl.envs import renderer
from prime_rl.envs.convert import classify
from prime_rl.envs.engine import EngineConnection, whole_reply
from prime_rl.envs.ids import LoadError
from prime_rl.envs.messages import Message, parsed_json, without_oldest
from prime_rl.envs.protocol import API_KEY_VAR, ROLES, EpisodeResult, Outcome, SampleTokens, Setup

if TYPE_CHECKING:
    from prime_rl.envs.chat import ChatRoute

# Sent with every request, so that training and evaluation sample alike whatever the model's generation_config says.
PINNED_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
_ASSISTANT = ROLES.index("assistant")


class Failed(Exception):
    """The episode cannot go on; the outcome is the conversation's `failure`."""


class ContextFull(Exception):
    """The conversation is longer than the model's context."""


@dataclass
class _Fault:
    """An error of the engine in the shape that `convert.classify` judges."""

    type: str
    message: str
    status_code: int | None = None


@dataclass
class Turn:
    """One reply. P tokens were sent, C sampled."""

    prompt_ids: list[int]  # (P,)
    roles: bytes  # (P,) whose message each token sent belongs to: places in `ROLES`; of no account in what an earlier turn has
    completion_ids: list[int]  # (C,)
    logprobs: list[float]  # (C,)
    text: str
    reasoning: str
    tool_calls: list[ParsedToolCall]  # malformed attempts too, as their `status` says
    is_truncated: bool
    history: list[str] = field(repr=False)  # the messages sent and the reply, comparable
    replied: int = 0  # tokens sent before the first reply that is repeated in them; P where there is none
    counted: tuple[int, int] = (0, 0)  # tokens sent and sampled, by an API that does not tell them

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.completion_ids

    def message(self) -> Message:
        """The reply as the next prompt has it."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if calls := [call for call in self.tool_calls if call.name]:  # whether its arguments are any good or not
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_of(call)}}
                for call in calls
            ]
        return message


class Client:
    """Connections to the engine's servers, and the renderer of its model. `async with` in a running event loop."""

    def __init__(self, setup: Setup, tools: bool = False) -> None:
        """`tools`: conversations have some. Raises LoadError: no renderer fits the model."""
        self.model = setup.sampled_by or setup.model
        self.renderer: Any = None
        self.renderer_name = "none: the chat route"
        self.api = _chat_route(setup) if setup.chat else None
        self._api_key = os.environ.get(API_KEY_VAR) or "EMPTY"
        self._connections: dict[str, EngineConnection] = {}
        if self.api is not None:
            return
        try:
            choice = renderer.choose(setup.model, setup.renderer, tools=tools)
        except renderer.RendererError as error:
            raise LoadError(f"environment {setup.env_id!r}: {error}") from error
        self.renderer, self.renderer_name = choice.renderer, choice.name

    def connection(self, base_url: str) -> EngineConnection:
        if base_url not in self._connections:
            self._connections[base_url] = EngineConnection(base_url, self._api_key)
        return self._connections[base_url]

    async def close(self) -> None:
        for connection in self._connections.values():
            await connection.close()
        self._connections.clear()
        if self.api is not None:
            await self.api.close()


class TokenConversation:
    """The model calls of one episode, all to one server."""

    def __init__(
        self,
        client: Client,
        base_url: str,
        sampling: Mapping[str, Any],
        policy_version: int,
        setup: Setup,
    ) -> None:
        """Of `setup` it takes `turn_timeout`, `overflow` and `trajectories`."""
        self.turns: list[Turn] = []
        self.failure: tuple[Outcome, str] | None = None
        self._client = client
        self._base_url = base_url
        pinned = PINNED_SAMPLING if client.api is None else {}
        self._sampling = {name: value for name, value in {**pinned, **sampling}.items() if value is not None}
        # Keeps the engine from reusing cached prefixes that an older policy computed.
        self._salt = f"v{policy_version}"
        self._turn_timeout = setup.turn_timeout
        self._overflow = setup.overflow
        self._branched = setup.trajectories == "branched"

    async def reply(self, messages: Sequence[Message], tools: list[Any] | None = None) -> Turn:
        """The model's reply to the messages.

        Raises:
            ContextFull: they are longer than the model's context.
            Failed: the engine does not answer, refuses, or takes too long; also ever after.
        """
        if self.failure is not None:
            raise Failed(self.failure[1])
        history = [_comparable(message) for message in messages]
        try:
            async with asyncio.timeout(self._turn_timeout or None):
                turn = await self._turn(messages, history, tools)
        except TimeoutError as error:
            self.failure = Outcome.TIMEOUT, f"turn {len(self.turns) + 1}: no reply within {self._turn_timeout:g} s"
            raise Failed(self.failure[1]) from error
        for number, call in enumerate(turn.tool_calls):
            call.id = call.id or f"call_{len(self.turns)}_{number}"
        turn.history = [*history, _comparable(turn.message())]
        self.turns.append(turn)
        return turn

    async def _turn(self, messages: Sequence[Message], history: list[str], tools: list[Any] | None) -> Turn:
        if self._client.api is not None:
            return await self._asked(self._client.api, messages, history, tools)
        prompt = None if self._branched else self._extended(messages, history, tools)
        answer = await self._generate(messages, prompt, tools)
        return _turn(answer, history, {turn.history[-1] for turn in self.turns} if prompt is None else set())

    async def _asked(
        self, api: "ChatRoute", messages: Sequence[Message], history: list[str], tools: list[Any] | None
    ) -> Turn:
        try:
            answer = await api.ask(self._base_url, self._client.model, messages, tools, self._sampling)
        except api.error as error:
            raise self._failed(_Fault("ProviderError", str(error), error.status_code)) from error
        text, reasoning, calls = answer.text, answer.reasoning, answer.tool_calls
        counted = answer.sent, answer.sampled
        return Turn([], b"", [], [], text, reasoning, calls, answer.is_truncated, history, counted=counted)

    async def _generate(
        self, messages: Sequence[Message], prompt: RenderedTokens | None, tools: list[Any] | None
    ) -> dict[str, Any]:
        try:
            return await generate(
                client=self._client.connection(self._base_url),  # type: ignore[arg-type]
                renderer=self._client.renderer,
                messages=list(messages),  # type: ignore[arg-type]
                model=self._client.model,
                prompt_ids=None if prompt is None else prompt.token_ids,
                prompt_attribution=prompt,
                tools=tools,
                sampling_params=self._sampling,
                cache_salt=self._salt,
            )
        except OverlongPromptError as error:
            raise ContextFull(str(error)) from error
        except MalformedGenerateResponseError as error:
            fault = _Fault("MalformedGenerateResponseError", str(error))
        except APIStatusError as error:
            fault = _Fault("ProviderError", str(error), error.status_code)
        except APIConnectionError as error:
            fault = _Fault("ProviderError", str(error), 503)
        raise self._failed(fault)

    def _failed(self, fault: _Fault) -> Exception:
        outcome, message = classify(fault)
        if outcome is Outcome.PROMPT_TOO_LONG:
            return ContextFull(message)
        self.failure = outcome, message
        return Failed(message)

    def _extended(
        self, messages: Sequence[Message], history: list[str], tools: list[Any] | None
    ) -> RenderedTokens | None:
        """The ids of the longest earlier turn that these messages go on from, and the new messages'; None to render it all."""
        for turn in sorted(self.turns, key=lambda turn: len(turn.history), reverse=True):
            known = len(turn.history)
            if known < len(history) and history[:known] == turn.history:
                tail = list(messages[known:])
                bridge = self._client.renderer.bridge_to_next_turn
                return bridge(turn.prompt_ids, turn.completion_ids, tail, tools=tools)
        return None

    async def reply_within(self, messages: list[Message], tools: list[Any] | None) -> tuple[Turn, list[Message]]:
        """`reply`, and the messages it is to: where the context is full and `overflow` is "truncate", without the oldest.

        Raises:
            ContextFull: it is full, and may be ("stop").
            Failed: as `reply`; and the context is full, and must not be ("refuse"), or what is said first fills it.
        """
        whole = self._overflow == "truncate"
        while True:  # each time round forgets a turn, or asks for a short reply
            whole_reply.set(whole)
            try:
                return await self.reply(messages, tools), messages
            except ContextFull as error:
                rest = without_oldest(messages) if whole else None
                if whole:
                    whole = rest is not None  # nothing left to forget: a short reply, then, if there is room for one
                    messages = rest or messages
                elif self.turns and self._overflow != "refuse":
                    raise
                else:
                    self.failure = Outcome.PROMPT_TOO_LONG, str(error)
                    raise Failed(str(error)) from error

    def samples(self, turns: Sequence[Turn] | None = None) -> list[SampleTokens]:
        """One sample per sequence that no other turn extends, in the order of their last turns; branched: per turn. Rewards are 0."""
        chosen = self.turns if turns is None else list(turns)
        parents = [None if self._branched else _parent(chosen[:number], turn) for number, turn in enumerate(chosen)]
        extended = {parent for parent in parents if parent is not None}
        used: set[int] = set()
        samples = []
        for number in range(len(chosen)):
            if number in extended:
                continue
            path, node = [], number
            while True:  # a parent comes before its child
                path.append(node)
                parent = parents[node]
                if parent is None:
                    break
                node = parent
            samples.append(
                _sample([chosen[node] for node in reversed(path)], [node in used for node in reversed(path)])
            )
            used |= set(path)
        return [sample for sample in samples if any(sample.loss_mask)]

    def describe(self, result: EpisodeResult) -> None:
        """Put what the turns say about the episode into its result; what failed is the cause, whatever the environment made of it."""
        if self.failure is not None:
            result.outcome, result.message = self.failure
        if result.outcome is Outcome.PROMPT_TOO_LONG:
            result.message = f"task {result.task_id}: {result.message}"
        result.num_turns = len(self.turns)
        result.is_truncated = any(turn.is_truncated for turn in self.turns)
        result.input_tokens = sum(len(turn.prompt_ids) + turn.counted[0] for turn in self.turns)
        result.output_tokens = sum(len(turn.completion_ids) + turn.counted[1] for turn in self.turns)


def _chat_route(setup: Setup) -> "ChatRoute":
    try:
        from prime_rl.envs.chat import ChatRoute
    except ImportError as error:
        raise LoadError(
            f"environment {setup.env_id!r}: an API is asked through verifiers, which cannot be imported here ({error}): add verifiers==0.4.0 to its "
            "`requirements`"
        ) from error
    return ChatRoute(setup.request_timeout)


def _turn(answer: Mapping[str, Any], history: list[str], replies: AbstractSet[str]) -> Turn:
    """`replies`: of the turns before, where this prompt was rendered without them."""
    leads_to, roles = _speakers(answer["prompt_attribution"])
    repeats = [place for place, message in enumerate(history) if message in replies]
    repeated = repeats[-1] if repeats else -1  # up to there it repeats what an earlier turn has
    replied = next(
        (place for place, message in enumerate(leads_to) if repeats and message >= repeats[0]), len(leads_to)
    )
    return Turn(
        prompt_ids=answer["prompt_ids"],
        roles=bytes(0 if message <= repeated else roles[message] for message in leads_to),
        completion_ids=answer["completion_ids"],
        logprobs=answer["completion_logprobs"],
        text=answer["content"] or "",
        reasoning=answer["reasoning_content"] or "",
        tool_calls=list(answer["tool_calls"] or []),
        is_truncated=answer["finish_reason"] == "length",
        history=history,
        replied=replied,
    )


def _speakers(rendered: RenderedTokens) -> tuple[list[int], list[int]]:
    """The message of each token of a prompt, and the roles of the messages and of the reply; what lies between two messages belongs to the one that it
    leads to."""
    roles = [ROLES.index(role) if role in ROLES else 0 for role in rendered.message_roles]
    leads_to, message = [0] * len(rendered.token_ids), len(roles)
    for place in range(len(leads_to) - 1, -1, -1):
        if rendered.message_indices[place] >= 0:
            message = rendered.message_indices[place]
        leads_to[place] = message
    return leads_to, [*roles, _ASSISTANT]


def _parent(earlier: Sequence[Turn], turn: Turn) -> int | None:
    """The place of the longest earlier turn whose tokens this one's prompt begins with."""
    best, length = None, 0
    for place, other in enumerate(earlier):
        size = len(other.prompt_ids) + len(other.completion_ids)
        if length < size <= len(turn.prompt_ids) and turn.prompt_ids[:size] == other.ids:
            best, length = place, size
    return best


def _sample(path: Sequence[Turn], used: Sequence[bool]) -> SampleTokens:
    """The sequence of the last turn of a path, in which each turn extends the one before; what is `used` is not trained on again."""
    ids = path[-1].ids
    mask, logprobs, roles = bytearray(len(ids)), [0.0] * len(ids), bytearray(len(ids))
    begin = 0
    for turn, old in zip(path, used, strict=True):
        start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.completion_ids)
        if not old:
            mask[start:end] = b"\1" * (end - start)
            logprobs[start:end] = turn.logprobs
            roles[begin:start] = turn.roles[begin:start]
            roles[start:end] = bytes([_ASSISTANT]) * (end - start)
        begin = end
    return SampleTokens.of(ids, map(bool, mask), logprobs, path[0].replied, reward=0.0, roles=roles)


def _comparable(message: Message) -> str:
    """A message without what may differ although it is the same: an absent and an empty content, how arguments are spelled."""
    calls = [
        [call["function"]["name"], _parsed(call["function"]["arguments"])] for call in message.get("tool_calls") or []
    ]
    said = message.get("content") or ""
    return json.dumps([message["role"], said, calls, message.get("tool_call_id")], sort_keys=True, default=str)


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return parsed_json(arguments)
    except ValueError:
        return arguments


def arguments_of(call: ParsedToolCall) -> str:
    """The arguments of a tool call as JSON text."""
    return call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments or {})
