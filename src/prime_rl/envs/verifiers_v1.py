"""verifiers v1 (0.4.x) behind our protocol: load a taskset, run one episode of one of its tasks.

A turn is one call within this process: verifiers' own plain harness starts a program per episode, about one a second.
Model calls go through verifiers' interception server, which writes the trace, to our own client, which sends and gets
tokens.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import random
import re
import sys
from array import array
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Self

import httpx
import verifiers.v1 as vf
from multidict import CIMultiDict
from pydantic import ValidationError
from pydantic._internal import _fields
from renderers.base import ParsedToolCall, ToolCallParseStatus
from verifiers.v1 import env as vf_env
from verifiers.v1 import runtimes
from verifiers.v1.clients import Client
from verifiers.v1.clients.client import SESSION_ID_HEADER
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.clients.train import response_from_generate, serialize_completion, tool_to_wire
from verifiers.v1.dialects import DIALECTS
from verifiers.v1.dialects.chat import ChatDialect, message_to_wire
from verifiers.v1.errors import ProviderError
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.utils.loaders import default_harness_id, taskset_class, taskset_config_type
from verifiers.v1.utils.version import verifiers_commit

from prime_rl.envs import ids
from prime_rl.envs.conversation import CallFailed, EngineClient, arguments_of, request_settings
from prime_rl.envs.convert import CONTEXT_FULL, Message, classify, convert, opening
from prime_rl.envs.ids import Broken, LoadError, check_arguments, find, import_module, module_name, unique
from prime_rl.envs.protocol import API_KEY_VAR, EpisodeResult, Outcome, Run, Setup
from prime_rl.envs.tools import MALFORMED_CALL, SERVER_SECONDS, Toolbox, ToolRuntime, check

HARNESS_ID = "prime_rl_chat"
# verifiers imports a harness by a top-level module name, and takes the one in its `__all__`; ours is in the package.
sys.modules[HARNESS_ID] = sys.modules[__name__]

__all__ = ["ChatHarness"]

ENDLESS_TASKS = 10_000  # of a taskset that never ends: its first ones
CHAT_TRIES = 8  # of an API that is asked by its chat route
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
LONGEST_REST_SECONDS = 120.0  # an API that asks for more is not waited for
_MAY_PASS = (408, 409, 425, 429, 500, 502, 503, 504, 529)
# An API may call a budget that is spent "too many requests".
_SPENT = re.compile(r"insufficient_quota|billing_hard_limit|credit balance", re.IGNORECASE)

interception: ContextVar[InterceptionServer] = ContextVar("interception")
"""verifiers' server of model calls for the environment whose episode runs. Unset under `vf-eval`: then HTTP is used."""

_CHAT = next(dialect for dialect in DIALECTS if isinstance(dialect, ChatDialect))

# pydantic parses the signature of `list` anew for every field of every object that verifiers constructs, a third of an
# episode's processor time. verifiers' table of runtimes has no place for another one.
_fields.takes_validated_data_argument = functools.cache(_fields.takes_validated_data_argument)  # type: ignore[assignment]
runtimes.SubprocessRuntime = ToolRuntime


def _with_place(record: Callable[..., vf.Error | None]) -> Callable[..., vf.Error | None]:
    """The same recorder of an error (its last argument), whose message says what `report` does of the error that the
    environment raised."""

    @functools.wraps(record)
    def recorded(*args: Any) -> vf.Error | None:
        made, error = record(*args), args[-1]
        kept = args[0].errors[-1] if made is None else made
        if not isinstance(error, vf.RolloutError):
            kept.message = ids.report(error)
        elif (cause := error.__cause__) and (text := f"{type(cause).__name__}: {cause}") in kept.message:
            kept.message = kept.message.replace(text, ids.report(cause))
        return made

    return recorded


vf.Trace.record_error = _with_place(vf.Trace.record_error)  # type: ignore[method-assign, assignment]
vf_env._as_error = _with_place(vf_env._as_error)  # type: ignore[assignment]


class VerifiersEnv:
    """`async with VerifiersEnv(setup) as env: await env.run(…)`. Constructing it loads everything, as
    `worker.load` does."""

    def __init__(self, setup: Setup) -> None:
        setup = replace(setup, env_id=_import(setup.env_id))
        self._name = setup.name
        self._model = setup.sampled_by or setup.model
        config = _env_config(setup)
        self._branched = setup.trajectories == "branched"
        taskset = taskset_class(setup.env_id)
        tools = taskset.toolsets(config.taskset) or taskset.task_type().toolsets(config.taskset.task)
        self.engine = None if setup.chat_timeout else EngineClient(setup, bool(tools))
        by_tokens: Any = vf.TrainClientConfig(api_key_var=API_KEY_VAR)
        self._client = chat_config(setup.chat_timeout) if setup.chat_timeout else by_tokens
        self._env = vf.load_environment(config)
        random.seed(0)  # of an endless taskset every worker is to draw the same first tasks
        self.bounded: bool = self._env.taskset.bounded
        self.tasks = list(itertools.islice(self._env.taskset, None if self.bounded else ENDLESS_TASKS))
        random.seed()
        if not self.tasks:
            raise LoadError("it has no tasks")
        self.task_ids = unique(task.key for task in self.tasks)
        shows = self.engine.renderer if self.engine and setup.demonstration else None
        self._show = functools.partial(_hint, shows, setup)
        self._show(self.tasks[0])  # an environment whose first task has none is not one to start with
        verifiers_commit()  # which runs git, and is cached
        self._exit_stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Raises LoadError: a tool server does not start."""
        try:
            async with asyncio.timeout(SERVER_SECONDS):
                await self._exit_stack.enter_async_context(self._env.serving())
            await check(self._env._shared_tools)
        except (vf.ToolsetError, TimeoutError) as error:
            await self._exit_stack.aclose()
            raise LoadError(f"environment {self._name!r}: its tools failed to start: {ids.describe(error)}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exit_stack.aclose()
        if self.engine is not None:
            await self.engine.close()

    async def run(self, run: Run) -> EpisodeResult:
        """One episode to its end. Failures of the environment or the engine are outcomes, not exceptions."""
        task = self.tasks[run.task_index]
        try:
            hint = self._show(task)
        except ValueError as error:
            return EpisodeResult(run.episode_id, self._name, run.task_id, Outcome.INVALID, str(error))
        (slot,) = self._env.slots(task)
        values = run.sampling if self.engine is None else request_settings(run.sampling, run.policy_version)
        client, server = self._client.model_copy(update={"base_url": run.base_url}), self._env._interception
        if (key := client.model_dump_json()) not in server.clients:  # ours in place of its own; it closes them
            engine = self.engine
            made: Client = PatientClient(client) if engine is None else ConversationClient(engine, run.base_url)
            server.clients[key] = made
            server.stack.push_async_callback(made.close)
        context = vf.ModelContext(model=self._model, client=client, sampling=vf.SamplingConfig(**values))
        interception.set(server)
        episode = await self._env.run_slot(slot, context)
        result = EpisodeResult(run.episode_id, self._name, run.task_id, Outcome.OK)
        convert(result, episode, tokens=self.engine is not None, branched=self._branched)
        for sample in result.samples:
            sample.hint = hint
        of_tools = any(error.type == "ToolsetError" for trace in episode.traces for error in trace.errors)
        try:
            await check(self._env._shared_tools if of_tools else {})
        except vf.ToolsetError as error:
            raise Broken(str(error)) from error
        return result


def _env_config(setup: Setup) -> Any:
    check_arguments(setup.args, taskset_config_type(setup.env_id).model_fields.keys() - {"id"})
    taskset = {"id": setup.env_id, **setup.args}
    try:
        bare = vf.resolve_env_config({"taskset": taskset})
        agents = {name: _agent_overrides(setup, agent) for name, agent in bare if isinstance(agent, vf.AgentConfig)}
        server = {"type": "server"}  # one, hence one client and one connection pool
        return vf.resolve_env_config({"taskset": taskset, "interception": server, **agents})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "taskset")
        raise LoadError(f"argument {where}: {first['msg']}") from error


def _agent_overrides(setup: Setup, agent: Any) -> dict[str, Any]:
    """Our harness and a local runtime wherever the environment does not insist on its own. verifiers' defaults are a
    shell that the model drives, in a paid remote sandbox."""
    data: dict[str, Any] = {}  # merged onto the agent's declared defaults by verifiers
    own = default_harness_id(setup.env_id) if agent.harness is None else agent.harness.id
    if agent.harness is None or own in ("bash", "null"):  # "null": verifiers' plain chat loop, a process an episode
        data["harness"] = {"id": HARNESS_ID if own in ("bash", "null") else own}
    if "runtime" not in agent.model_fields_set:
        data["runtime"] = {"type": "subprocess"}
    if setup.max_turns:
        data["max_turns"] = min(setup.max_turns, agent.max_turns or setup.max_turns)
    return data


def _import(env_id: str) -> str:
    """Import the package and its taskset. Returns the id by which verifiers finds it. Raises LoadError with the real
    cause: verifiers says "not found" of any."""
    module, alias = module_name(env_id), env_id
    if find(env_id) is not None:
        imported = import_module(env_id)
        if "." in module:  # verifiers looks for its own tasksets behind dots
            alias = module.replace(".", "_")
            sys.modules[alias] = imported
    try:
        taskset_class(alias)
    except ModuleNotFoundError as error:
        raise LoadError(
            f"not found: there is no Python module {module!r} "
            f"(install it with `prime env install owner/{env_id.rsplit('/', 1)[-1]}` or `uv add`)"
        ) from error
    except (AttributeError, TypeError, ValueError) as error:
        raise LoadError(f"it is not usable: {ids.describe(error)}") from error
    return alias


def _hint(renderer: Any, setup: Setup, task: Any) -> "array[int] | None":
    """The tokens that show a task's demonstration to who scores its episodes: a system message in front. Raises
    ValueError: the task has no such field, or nothing in it."""
    if renderer is None:
        return None
    fields = task.data.model_dump()
    shown = fields.get(setup.demonstration)
    if shown in (None, [], {}) or not str(shown).strip():  # 0 and False are answers
        names = ", ".join(sorted(fields))
        raise ValueError(f"task {task.key} has nothing in its field {setup.demonstration!r} to show (fields: {names})")
    text = setup.template.replace("{demonstration}", str(shown))
    return array("i", renderer.render([{"role": "system", "content": text}]).token_ids)


class _InterceptedRequest(dict[str, Any]):
    """What the interception server reads of an aiohttp request: HTTP took a sixth of an episode's processor time."""

    path = "/v1/chat/completions"

    def __init__(self, headers: CIMultiDict[str], body: bytes) -> None:
        super().__init__()
        self.headers = headers
        self._body = body

    async def read(self) -> bytes:
        return self._body


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def session(self, *args: Any, **kwargs: Any) -> "ChatSession":
        return ChatSession(self, *args, **kwargs)

    async def launch(self, *args: Any, **kwargs: Any) -> vf.ProgramResult:
        raise NotImplementedError("its conversations are sessions")


class ChatSession(vf.HarnessSession):
    """The messages and tools of one agent's conversation, kept from segment to segment."""

    harness: ChatHarness

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._toolbox = Toolbox()
        self._messages: list[Message] = []

    async def _run(self, messages: vf.Messages | None) -> vf.ProgramResult:
        """Ask for replies until one calls no tool. Raises vf.ToolsetError."""
        if self.mcp_urls and not self._toolbox.definitions:
            await self._toolbox.open(self.mcp_urls)
        if not self._messages:
            system, prompt = self.harness.resolve_prompt(self.data)
            first = prompt if messages is None else []
            self._messages += opening(
                system, first if isinstance(first, str) else [message_to_wire(one) for one in first or []]
            )
        self._messages += [message_to_wire(message) for message in messages or []]
        while True:  # bounded: by the turns of the rollout and the model's context
            tools = {"tools": self._toolbox.definitions} if self._toolbox.definitions else {}
            status, reply = await self._post({"model": self.ctx.model, "messages": self._messages, **tools})
            if status != 200:
                if self.trace.stop_condition is not None:  # where verifiers ended the rollout it refuses the call
                    return vf.ProgramResult(0, "", reply)
                if self.trace.num_turns and classify("ProviderError", reply, status)[0] is Outcome.PROMPT_TOO_LONG:
                    self.trace.stop(CONTEXT_FULL)
                    return vf.ProgramResult(0, "", "")
                # verifiers replaces the failure of a non-zero exit by the model call's own error.
                return vf.ProgramResult(1, "", reply)
            choice = reply["choices"][0]
            # What a server adds to its replies beyond that need not be taken back by it.
            message = {key: value for key, value in choice["message"].items() if value or key == "content"}
            self._messages.append(message)
            # A reply that was cut is the last: what it would have called is anybody's guess.
            if not message.get("tool_calls") or choice["finish_reason"] == "length":
                return vf.ProgramResult(0, "", "")
            for call in message["tool_calls"]:
                name = call["function"]["name"]
                answer = await self._toolbox.call(name, call["function"]["arguments"])
                self._messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": answer})

    async def close(self) -> None:
        if not self._closed and self._toolbox.definitions:
            self.trace.record_metrics(self._toolbox.metrics)
        await super().close()
        await self._toolbox.close()

    async def _post(self, content: dict[str, Any]) -> tuple[int, Any]:
        body = json.dumps(content).encode()
        headers = CIMultiDict({"Authorization": f"Bearer {self.secret}"})
        if (server := interception.get(None)) is not None:  # bounded: of the context, waits for nothing
            return await _served(server, _InterceptedRequest(headers, body))
        headers["Content-Type"] = "application/json"
        url = f"{self.endpoint}/chat/completions"
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:  # bounded: by the episode's deadline
            answer = await client.post(url, content=body, headers=headers)
        return answer.status_code, answer.json() if answer.is_success else answer.text


async def _served(server: InterceptionServer, request: Any) -> tuple[int, Any]:
    """Status and body of verifiers' answer to a model call."""
    # A task of its own, as aiohttp's: verifiers cancels the one that serves a session when that is over.
    handler = asyncio.create_task(server.handle_request(request, _CHAT))
    try:
        response: Any = await handler  # bounded: by the turn's timeout and the episode's deadline, which cancel it
    except asyncio.CancelledError:
        if handler.cancelled() and not ((task := asyncio.current_task()) and task.cancelling()):
            return 499, "the rollout is over"
        raise
    return response.status, json.loads(response.body) if response.status == 200 else response.text


class ConversationClient(Client):
    """The model calls of verifiers' conversations with one server, by token ids."""

    def __init__(self, engine: EngineClient, base_url: str) -> None:
        self._engine = engine
        self._base_url = base_url

    async def get_response(
        self, dialect: Any, body: dict[str, Any], sampling: Any, session_id: str | None = None, turn: Any = None,
        headers: Any = None,
    ) -> Any:  # fmt: skip
        settings = sampling.model_dump(exclude_none=True)
        if not isinstance(dialect, ChatDialect):
            raise ProviderError("a policy is sampled by chat completions alone", status_code=400)
        if "chat_template_kwargs" in settings:
            raise ProviderError("chat_template_kwargs cannot be set: prompts are the renderer's", status_code=400)
        messages = [message_to_wire(message) for message in turn.prompt]
        tools = [tool_to_wire(tool) for tool in turn.tools or ()] or None
        before = None if self._engine.branched else turn.previous_renderer_token_ids()
        bridge, new = self._engine.renderer.bridge_to_next_turn, messages[turn.tail_start :]
        prompt = None if before is None else bridge(*before, new, tools=tools)
        computed = 0 if before is None or prompt is None else sum(len(ids) for ids in before)
        options = {"model": body["model"], "extra_headers": {SESSION_ID_HEADER: session_id} if session_id else None}
        try:
            answer = await self._engine.generate(self._base_url, messages, tools, prompt, settings, computed, **options)
        except CallFailed as error:
            raise ProviderError(str(error), status_code=error.status) from error
        if tools and (calls := answer["tool_calls"]):
            # verifiers leaves out the calls that a renderer could not read: the model would never learn of them.
            answer["tool_calls"] = [_readable(call) for call in calls]
            if answer["finish_reason"] == "stop":
                answer["finish_reason"] = "tool_calls"
        response = response_from_generate(answer, body["model"], None if prompt is None else turn)
        response.raw = serialize_completion(response, body["model"])
        return response


def _readable(call: ParsedToolCall) -> ParsedToolCall:
    """A call that has a name and arguments, whatever the model wrote."""
    if call.status in (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL) and call.name:
        return ParsedToolCall(raw=call.raw, name=call.name, arguments=arguments_of(call), id=call.id)
    # As a string: verifiers reads arguments to compare messages, and what is nested too deep would not come to its end.
    return ParsedToolCall(raw=call.raw, name=MALFORMED_CALL, arguments=json.dumps(call.raw), id=call.id)


def chat_config(request_timeout: float) -> vf.EvalClientConfig:
    """verifiers' settings of a `PatientClient`. `request_timeout`: seconds without a byte of an answer."""
    timeout = {"connect": 30.0, "read": request_timeout, "write": request_timeout}
    return vf.EvalClientConfig.model_validate({"api_key_var": API_KEY_VAR, "timeout": timeout})


class PatientClient(EvalClient):
    """verifiers' client of the chat route of any OpenAI-compatible API, made patient. Needs a running event loop.

    What may pass (too many requests, a server's own trouble, a lost connection) is asked again after growing pauses, at
    least as long as the API says. An error that stays is verifiers' `ProviderError` with the API's status; a budget
    that is spent is a 402.
    """

    _limit_name = "max_tokens"

    async def _request(
        self, url: str, body: dict[str, Any], headers: httpx.Headers, *, stream: bool = False
    ) -> httpx.Response:
        failures = 0
        while True:  # bounded: by CHAT_TRIES
            if "max_tokens" in body:
                body[self._limit_name] = body.pop("max_tokens")
            try:
                return await super()._request(url, body, headers, stream=stream)
            except ProviderError as error:
                if error.status_code == 400 and "max_tokens" in body and "max_completion_tokens" in str(error):
                    self._limit_name = "max_completion_tokens"  # OpenAI's newer name
                    continue
                if error.status_code == 429 and _SPENT.search(str(error)):
                    raise ProviderError(str(error), status_code=402) from error
                failures += 1
                cause = error.__cause__
                said = cause.response.headers.get("retry-after", "") if isinstance(cause, httpx.HTTPStatusError) else ""
                rest = float(said) if re.fullmatch(r"\d+(\.\d+)?", said) else 0.0  # it does not say, or says a date
                if error.status_code not in _MAY_PASS or failures >= CHAT_TRIES or rest > LONGEST_REST_SECONDS:
                    raise
            # Not the same for all that failed together.
            longest = min(FIRST_PAUSE_SECONDS * 2.0 ** (failures - 1), LONGEST_PAUSE_SECONDS)
            await asyncio.sleep(max(rest, random.uniform(longest / 2, longest)))
