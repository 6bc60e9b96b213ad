"""Classic verifiers environments (`load_environment(**args)`), as verifiers 0.3.1 runs them.

Imported in a worker whose Python environment holds it; what needs nothing of it is in `conversation`. Our own client
asks the model: what is trained on is what it sent and got, of those replies in the trajectory.

Rubrics score one episode. Functions that score a group (`states`, `completions`, …) are refused: the episodes of
a group may run at different times and in different workers. A function that raises scores 0, as in verifiers, if its
weight is 0, and else fails its episode.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from prime_rl.envs import ids
from prime_rl.envs.conversation import CallFailed, Conversation, ConversationEnv, arguments_of
from prime_rl.envs.convert import Message, Turn, text_of
from prime_rl.envs.protocol import EpisodeResult, Outcome, Run, Setup

# By name: verifiers 0.4, with which our own types are checked, does not have them.
errors, types = (importlib.import_module(f"verifiers.legacy.{name}") for name in ("errors", "types"))
ClassicClient: Any = importlib.import_module("verifiers.legacy.clients.client").Client
MultiTurnEnv: Any = importlib.import_module("verifiers.legacy.envs.multiturn_env").MultiTurnEnv

# What reward functions raised in the episode that is being scored.
_RAISED: ContextVar[list[str]] = ContextVar("raised")


class ClassicEnv(ConversationEnv):
    def __init__(self, setup: Setup) -> None:
        load = vars(ids.import_module(setup.env_id)).get("load_environment")
        if load is None:
            raise ids.LoadError(f"it is not classic: {ids.module_name(setup.env_id)} has no load_environment")
        args = dict(setup.args)
        split = "train" if "split" in inspect.signature(load).parameters else args.pop("split", "train")
        if split not in ("train", "eval"):
            raise ids.LoadError(f"argument split is {split!r}: 'train' or 'eval' is needed")
        ids.check_arguments(args, load)
        self._env = load(**args)
        if split == "eval":
            self._env.build_eval_dataset()
            if self._env.eval_dataset is None:  # verifiers would take the training tasks in their place
                raise ids.LoadError(
                    'it has no tasks of its own for evaluation (split = "eval"): leave the split out to be '
                    "evaluated on those that it is trained on, or name another environment"
                )
        self.tasks = self._env.get_eval_dataset() if split == "eval" else self._env.get_dataset()
        self.task_ids = ids.unique(f"{ids.module_name(setup.env_id)}/{number}" for number in self.tasks["example_id"])
        if not self.task_ids:
            raise ids.LoadError("it has no tasks")
        self._weights = _prepare_rubrics(self._env)
        nested = list(_nested(self._env, "envs"))
        self._shortened = False  # by `max_turns`, below what the environment itself allows
        for env in nested:
            if setup.max_turns and isinstance(env, MultiTurnEnv) and not 0 < env.max_turns <= setup.max_turns:
                env.max_turns, self._shortened = setup.max_turns, True
        # verifiers tears an environment down when the process exits.
        super().__init__(setup, tools=any(env.tool_defs for env in nested))

    async def converse(self, run: Run, conversation: Conversation, result: EpisodeResult) -> list[Turn]:
        client, raised = _Client(conversation), list[str]()
        _RAISED.set(raised)
        output = await self._env.run_rollout(self.tasks[run.task_index], client, self.engine.model, dict(run.sampling))
        metrics = {name: float(value) for name, value in (output["metrics"] or {}).items()}
        weighed = {name for name, weight in self._weights.items() if weight}
        result.rewards = {name: value * self._weights[name] for name, value in metrics.items() if name in weighed}
        result.metrics = {name: value for name, value in metrics.items() if name not in weighed}
        result.reward = float(output["reward"] or 0.0)
        result.prompt, result.completion = _text(output["prompt"]), _text(output["completion"])
        for ours, theirs in (("setup", "setup"), ("agent", "generation"), ("scoring", "scoring")):
            result.timing[ours] = float(output["timing"][theirs]["duration"])
        state = client.state
        at_limit = state.get("stop_condition") == "max_turns_reached"
        result.is_truncated = bool(state.get("is_truncated")) or (self._shortened and at_limit)
        # Any doubt about what verifiers made of the episode is the outcome.
        if (error := state.get("error")) is not None:
            result.outcome, result.message = Outcome.ERRORED, ids.report(error.__cause__ or error)
        elif state.get("timed_out"):
            result.outcome, result.message = Outcome.TIMEOUT, "time limit of the environment"
        elif raised:
            result.outcome, result.message = Outcome.ERRORED, raised[0]
        steps = state.get("trajectory", ())
        return [client.turns[step["response"].id] for step in steps] if result.ok else conversation.turns


class _Client(ClassicClient):  # type: ignore[misc, valid-type]
    """The client of one episode: our conversation as verifiers asks for replies."""

    def __init__(self, conversation: Conversation) -> None:
        super().__init__(conversation)
        self.turns: dict[str, Turn] = {}  # by the id of the response
        self.state: Mapping[str, Any] = {}

    def setup_client(self, config: Any) -> Any:
        raise NotImplementedError("it is made with its conversation")

    async def to_native_tool(self, tool: Any) -> dict[str, Any]:
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        strict = {} if tool.strict is None else {"strict": tool.strict}
        return {"type": "function", "function": {**function, **strict}}

    async def to_native_prompt(self, messages: Any) -> tuple[list[Message], dict[str, Any]]:
        return [_message(message) for message in messages], {}

    async def get_native_response(
        self, prompt: list[Message], model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
    ) -> Turn:
        self.state = kwargs.get("state") or self.state  # none where an environment asks on the side
        try:
            turn = await self.client.reply(prompt, tools)
        except CallFailed as error:
            raise errors.ModelError(str(error)) from error
        if turn is None:
            raise errors.OverlongPromptError("the model's context is full")
        return turn

    async def raise_from_native_response(self, response: Turn) -> None:
        pass  # an empty reply is the model's own

    async def from_native_response(self, response: Turn) -> Any:
        name = str(len(self.turns))
        self.turns[name] = response
        sent, sampled = len(response.prompt_ids), len(response.completion_ids)
        calls = [
            types.ToolCall(id=call.id, name=call.name, arguments=arguments_of(call))
            for call in response.tool_calls
            if call.name
        ]
        message = types.ResponseMessage(
            content=response.message["content"],
            reasoning_content=response.message.get("reasoning_content"),
            tool_calls=calls or None,
            finish_reason="length" if response.is_truncated else "tool_calls" if calls else "stop",
            is_truncated=response.is_truncated,
        )
        usage = types.Usage(
            prompt_tokens=sent, reasoning_tokens=0, completion_tokens=sampled, total_tokens=sent + sampled
        )
        return types.Response(id=name, created=0, model="", usage=usage, message=message)

    async def close(self) -> None:
        """The connections are the environment's."""


def _message(message: Any) -> Message:
    """A message of verifiers' as renderers take it."""
    data: Message = message.model_dump(exclude_none=True)
    if calls := data.get("tool_calls"):
        data["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in calls
        ]
    if data["role"] == "text":
        data["role"] = "user"
    return data


def _text(messages: Any) -> str:
    return text_of([one if isinstance(one, dict) else one.model_dump() for one in messages or []])


def _nested(whole: Any, parts: str) -> Iterator[Any]:
    """An environment or rubric, and those that it is made of: `parts` names the attribute."""
    yield whole
    for part in list(vars(whole).get(parts, ())):
        yield from _nested(part, parts)


def _prepare_rubrics(env: Any) -> dict[str, float]:
    """Have reward functions say when they raise. Returns their weights. Raises LoadError: one scores a group."""
    weights: dict[str, float] = {}
    for rubric in [rubric for one in _nested(env, "envs") for rubric in _nested(one.rubric, "rubrics")]:
        for func, weight in zip(rubric.funcs, rubric.weights, strict=True):
            if rubric._is_group_func(func):
                raise ids.LoadError(
                    f"its reward function {func.__name__!r} scores a group of episodes together, which cannot be had "
                    "here: score each episode alone, or let an algorithm compare those of a group"
                )
            weights[func.__name__] = weight
        rubric.funcs = [
            _watched(func) if weight else func for func, weight in zip(rubric.funcs, rubric.weights, strict=True)
        ]
    return weights


def _watched(func: Callable[..., Any]) -> Callable[..., Any]:
    """The same function; what it raises is noted before verifiers takes it for a 0."""

    @functools.wraps(func)
    async def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            value = func(*args, **kwargs)
            return float(await value if inspect.isawaitable(value) else value)  # bounded: by the episode's deadline
        except Exception as error:
            message = f"reward function {func.__name__!r}: {ids.report(error)}"
            _RAISED.get().append(message)  # bounded: of the context, waits for nothing
            raise

    return watched
