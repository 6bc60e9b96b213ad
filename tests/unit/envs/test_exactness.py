"""Token exactness: whatever is said, sampled, called, cut or branched, the samples are what the engine saw and gave.

The renderers, verifiers' client and graph, and our conversion are real; the engine is a script in this process.
"""

import asyncio
import base64
import io
import json
from array import array
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import verifiers.v1 as vf
from hypothesis import given, settings
from hypothesis import strategies as st
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.dialects.chat import parse_message, parse_tools
from verifiers.v1.graph import prepare_turn
from verifiers.v1.trace import AgentInfo, ModelCall, TimeSpan, Trace, TraceTask

from prime_rl.envs.conversation import Conversation, EngineClient
from prime_rl.envs.convert import samples_of, turns_of
from prime_rl.envs.protocol import ROLES, SampleTokens, Setup
from prime_rl.envs.renderer import choose, tokenizer_of
from prime_rl.envs.tools import MALFORMED_CALL, Toolbox
from prime_rl.envs.verifiers_v1 import ConversationClient
from prime_rl.inference.routes import routed_experts
from support.fake_engine import TEMPLATE, make_tokenizer

REPLAYED = {"routed_experts_prompt_start": 0}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Sum é.", "parameters": PARAMETERS}}]
CALLS = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    '<tool_call>{"name":"add","arguments":{"a": "é"}}</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"a": 1,}}\n</tool_call>',
    '<tool_call>\n{"name": "add"',
    "</tool_call><tool_call></tool_call>",
)

texts = st.text(max_size=12).filter(lambda text: "<|" not in text)
said = st.lists(st.sampled_from(CALLS) | texts, max_size=3).map("".join)
# What a model samples: text, or any bytes at all, which need not be letters; ended, or cut.
replies = st.tuples(said | st.lists(st.integers(3, 258), min_size=1, max_size=10), st.booleans())
# What comes between two replies, or where the conversation goes on from an earlier point, or without its oldest turns.
moves = st.sampled_from(["user", "system", "two users", "back", "forget", "again", "repeat"])
conversations = st.tuples(
    st.lists(texts, max_size=1),
    texts,
    st.lists(st.tuples(replies, moves, texts), min_size=1, max_size=5),
    st.booleans(),
)


@dataclass
class Script:
    """An engine that answers with the given ids."""

    base_url: str = "http://scripted/v1"
    next: list[int] = field(default_factory=list)
    stock: bool = False  # experts are encoded as by vLLM's own route
    exchanges: list[tuple[list[int], list[int], list[float]]] = field(default_factory=list)

    async def context(self) -> None:
        return None

    async def post(self, url: str, *, cast_to: Any, body: dict[str, Any], options: Any = None) -> SimpleNamespace:
        logprobs = [-0.25 - len(self.exchanges) - i / 64 for i in range(len(self.next))]
        self.exchanges.append((body["token_ids"], self.next, logprobs))
        content = [{"token": f"token_id:{t}", "logprob": lp} for t, lp in zip(self.next, logprobs, strict=True)]
        choice = {"finish_reason": "stop", "token_ids": self.next, "logprobs": {"content": content}}
        if (start := body["sampling_params"].get("routed_experts_prompt_start")) is not None:
            rows = experts_of_exchange(len(self.exchanges) - 1, len(body["token_ids"]) + len(self.next) - 1)[start:]
            choice["routed_experts"] = (
                numpy_file(rows) if self.stock else routed_experts(rows, start, start + len(rows))
            )
        return SimpleNamespace(content=json.dumps({"choices": [choice]}).encode())

    async def close(self) -> None: ...


def experts_of_exchange(number: int, tokens: int) -> np.ndarray:
    """Return [tokens, layers 2, k 2]: the engine's choice in one exchange, no two rows alike: its number and place."""
    place = np.arange(tokens)
    return (
        np.stack([np.full(tokens, 1 + number), place // 256, place % 256, place * 0 + 7], -1)
        .reshape(-1, 2, 2)
        .astype(np.uint8)
    )


def numpy_file(rows: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, rows, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], tuple[EngineClient, Any]]:
    """By name of the case and whether branched: a client and its tokenizer, with Qwen3's tags as tokens if needed."""
    root = tmp_path_factory.mktemp("exact")
    plain = str(make_tokenizer(root / "plain", TEMPLATE))
    tags = str(make_tokenizer(root / "tags", TEMPLATE, tags=True))
    clients = {}
    for name, model in {"chatml": plain, "chatml, tags as tokens": tags, "default": plain, "qwen3": tags}.items():
        renderer, tokenizer = choose(model, name.partition(",")[0], name != "default"), tokenizer_of(model)
        for branched, trajectories in ((False, "interleaved"), (True, "branched")):
            setup = Setup("e", "e", {}, model, "default", "info", trajectories=trajectories)
            client = EngineClient(setup, tools=False)
            client.renderer = renderer
            clients[name, branched] = client, tokenizer
    return clients


@pytest.mark.parametrize("by_verifiers", [True, False])
@pytest.mark.parametrize("branched", [False, True])
@pytest.mark.parametrize("name", ["chatml", "chatml, tags as tokens", "default", "qwen3"])
@settings(max_examples=40, deadline=None)
@given(conversation=conversations, stock=st.booleans())
def test_samples_are_what_the_engine_saw(clients, name, branched, by_verifiers, conversation, stock):
    """Every sample is one exchange of the engine; each sampled token has its loss and log-probability once.
    Each token but the last has the experts of an exchange that computed it; where the next token is trained, of the one
    that sampled that.

    Of verifiers' conversations, and of those of classic and plain environments, which our own client keeps.
    """
    engine, trace, tools = Script(stock=stock), _trace(), TOOLS if name != "default" else None
    client, tokenizer = clients[name, branched]
    client._connections["u"] = engine  # type: ignore[assignment]
    talk = Conversation(client, "u", REPLAYED)

    async def converse() -> None:
        system, opening, turns, few_shot = conversation
        messages: list[dict[str, Any]] = [{"role": "system", "content": text} for text in system]
        messages += [{"role": "user", "content": opening}]
        if few_shot:  # a reply that the task made up
            messages += [{"role": "assistant", "content": "made up"}, {"role": "user", "content": "go on"}]
        first = len(messages)
        for (reply, ended), move, text in turns:
            engine.next = _ids(client.renderer, tokenizer, reply, ended)
            if by_verifiers:
                message = await _turn(client, trace, messages, tools, REPLAYED)
            else:
                turn = await talk.reply(messages, tools)
                assert turn is not None
                message = turn.message
            messages = _next([*messages, message], first, move, text)

    asyncio.run(converse())
    samples = samples_of(turns_of(trace) if by_verifiers else talk.turns, branched)
    _compare(engine, samples, branched)
    for sample in samples:
        _compare_experts(engine, sample)


async def test_a_call_that_nests_without_end(clients):
    """Deeper than Python reads JSON: a broken call like others, which the model is told of."""
    engine, trace, (client, tokenizer) = Script(), _trace(), clients["chatml", False]
    client._connections["u"] = engine  # type: ignore[assignment]
    text = '<tool_call>\n{"name": "add", "arguments": ' + "[" * 3000 + "]" * 3000 + "}\n</tool_call>"
    engine.next = _ids(client.renderer, tokenizer, text, True)
    message = await _turn(client, trace, [{"role": "user", "content": "a"}], TOOLS)
    function = message["tool_calls"][0]["function"]
    assert function["name"] == MALFORMED_CALL
    toolbox = Toolbox()
    for called, arguments in ((function["name"], function["arguments"]), ("add", "[" * 3000 + "]" * 3000)):
        assert (await toolbox.call(called, arguments)).startswith("Error: the call cannot be made")
    assert toolbox.metrics["malformed_tool_calls"] == 2


def _compare(engine: Script, samples: list[SampleTokens], branched: bool) -> None:
    if branched:
        assert len(samples) == len(engine.exchanges)
    seen = Counter((*prompt, *completion) for prompt, completion, _ in engine.exchanges)
    assert all(tuple(one.input_ids) in seen for one in samples)
    given = Counter(
        (place, token, logprob)
        for prompt, completion, logprobs in engine.exchanges
        for place, (token, logprob) in enumerate(zip(completion, array("f", logprobs), strict=True), len(prompt))
    )
    trained = Counter(
        (place, token, logprob)
        for one in samples
        for place, (token, mask, logprob) in enumerate(zip(one.input_ids, one.loss_mask, one.logprobs, strict=True))
        if mask
    )
    assert trained == given
    assert all(
        logprob == 0.0 for one in samples for mask, logprob in zip(one.loss_mask, one.logprobs, strict=True) if not mask
    )
    for one in samples:
        assert len(one.roles or b"") == len(one.input_ids)
        assert {ROLES[role] for role, mask in zip(one.roles or b"", one.loss_mask, strict=True) if mask} == {
            "assistant"
        }


def _compare_experts(engine: Script, sample: SampleTokens) -> None:
    assert sample.experts is not None
    assert (sample.experts.layers, sample.experts.k, sample.experts.end) == (2, 2, len(sample.input_ids) - 1)
    rows = np.frombuffer(sample.experts.rows, dtype=np.uint8).reshape(-1, 2, 2)
    for place, row in enumerate(rows):
        number = int(row[0, 0]) - 1
        prompt, completion, logprobs = engine.exchanges[number]
        assert [*prompt, *completion][: place + 1] == list(sample.input_ids[: place + 1])
        assert (row == experts_of_exchange(number, place + 1)[place]).all()
        if sample.loss_mask[place + 1]:
            assert place + 1 >= len(prompt)
            assert array("f", [logprobs[place + 1 - len(prompt)]])[0] == sample.logprobs[place + 1]


def _next(messages: list[dict[str, Any]], first: int, move: str, text: str) -> list[dict[str, Any]]:
    """The conversation with what comes before the next reply: the results of calls, or else as `move` says."""
    if calls := messages[-1].get("tool_calls"):
        results = [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]
        return [*messages, *results, *([{"role": "user", "content": "and"}] if move == "user" else [])]
    user = {"role": "user", "content": text}
    match move:
        case "system":
            return [*messages, {"role": "system", "content": text}, user]
        case "two users":
            return [*messages, user, user]
        case "back":  # another answer to the same question
            return messages[:-1]
        case "repeat":  # the environment says once more what the model has said, as its words
            return [*messages, user, {"role": "assistant", "content": messages[-1]["content"]}, user]
        case "forget":
            return [*(message for message in messages[:1] if message["role"] == "system"), *messages[first:], user]
        case "again":  # the whole question once more, in another context
            return [*messages[:first], user]
    return [*messages, user]


async def _turn(
    client: EngineClient, trace: Any, messages: list[dict[str, Any]], tools: Any, sampling: Any = None
) -> dict[str, Any]:
    """One model call, as verifiers' interception server makes it."""
    body = {"model": "m", "messages": messages, **({"tools": tools} if tools else {})}
    turn = prepare_turn(trace, [parse_message(message) for message in messages], parse_tools(tools))
    response = await ConversationClient(client, "u").get_response(
        ChatDialect(), body, vf.SamplingConfig(**(sampling or {})), turn=turn
    )
    node = turn.commit(response)
    trace.calls.append(ModelCall(node=node, usage=response.usage, model="m", time=TimeSpan(start=0.0, end=0.0)))
    message: dict[str, Any] = response.raw["choices"][0]["message"]
    return message


def _trace() -> Any:
    task = TraceTask(type="Task", data=vf.TaskData(prompt="x"), key="k", hash="h")
    return Trace(task=task, state=vf.State(), agent=AgentInfo(config=vf.AgentConfig()))


def _ids(renderer: Any, tokenizer: Any, reply: str | list[int], ended: bool) -> list[int]:
    ids = reply if isinstance(reply, list) else tokenizer.encode(reply, add_special_tokens=False)
    end = renderer.get_stop_token_ids()[0]
    return [token for token in ids if token not in renderer.get_stop_token_ids()] + ([end] if ended or not ids else [])
