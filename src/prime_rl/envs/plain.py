"""Environments in plain Python (`adapter = "python"`): a module with `tasks` and `rollout`, and no library to learn.

docs/guides/environments.md, "Plain Python", says what the two take and give.
"""

import contextlib
import copy
import hashlib
import inspect
import itertools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from prime_rl.envs import ids
from prime_rl.envs.conversation import Conversation, ConversationEnv, arguments_of
from prime_rl.envs.convert import Message, Turn, opening, parsed_json, text_of
from prime_rl.envs.protocol import EpisodeResult, Run, Setup

MAX_TASKS = 5_000_000


@dataclass(frozen=True)
class ToolCall:
    """A call that the model made. `problem`: what is wrong with its form ("": nothing); then `arguments` is empty."""

    id: str
    name: str
    arguments: dict[str, Any]
    problem: str = ""


@dataclass(frozen=True)
class Reply:
    text: str
    reasoning: str
    tool_calls: list[ToolCall]
    is_truncated: bool  # cut by max_tokens or the end of the context


class Chat:
    """One conversation with the model."""

    def __init__(self, conversation: Conversation, task: Mapping[str, Any], max_turns: int, tools: Any) -> None:
        """`max_turns`: replies (0: any number)."""
        self.messages: list[Message] = opening(task.get("system_prompt"), task.get("prompt"))
        self.replies: list[Reply] = []
        self.metrics: dict[str, float] = {}
        self.tools: list[dict[str, Any]] | None = tools
        self.over = False
        self._conversation = conversation
        self._max_turns = max_turns

    async def __call__(self, said: str | list[Message] | None = None) -> Reply | None:
        """The model's reply to the conversation with what is `said`; None when it is over.
        Raises CallFailed: the engine does not answer. The episode ends with that, whatever `rollout` makes of it."""
        new = [] if said is None else [{"role": "user", "content": said}] if isinstance(said, str) else said
        self.messages = [*self.messages, *new]
        if not self.messages:
            raise ValueError("nothing has been said: the task has no prompt, and `chat` was called without text")
        self.over = self.over or bool(self._max_turns and len(self.replies) >= self._max_turns)
        turn = None if self.over else await self._conversation.reply(self.messages, self.tools)
        if turn is None:
            self.over = True
            return None
        self.messages = [*self.messages, turn.message]
        self.replies.append(_reply(turn))
        return self.replies[-1]


class PlainEnv(ConversationEnv):
    def __init__(self, setup: Setup) -> None:
        module = vars(ids.import_module(setup.env_id))
        self._rollout, self.tasks = _parts(module, setup)
        self.task_ids = ids.unique(str(task["id"]) if "id" in task else _key(setup.env_id, task) for task in self.tasks)
        self._tools = module.get("tools")
        super().__init__(setup, tools=bool(self._tools))

    async def converse(self, run: Run, conversation: Conversation, result: EpisodeResult) -> list[Turn]:
        task = copy.deepcopy(self.tasks[run.task_index])
        chat = Chat(conversation, task, self.setup.max_turns, self._tools)
        first, begun = len(chat.messages), time.monotonic()
        try:
            returned = await self._rollout(task, chat)
        finally:
            result.timing = {"agent": time.monotonic() - begun}
            result.is_truncated = chat.over
            result.prompt, result.completion = text_of(chat.messages[:first]), text_of(chat.messages[first:])
        rewards = dict(returned) if isinstance(returned, Mapping) else {"reward": returned}
        for what, numbers in (("reward", rewards), ("metric", chat.metrics)):
            for name, value in numbers.items():
                if not isinstance(value, Real):
                    raise TypeError(f"{what} {name!r} is a {type(value).__name__}, not a number")
        if not rewards:
            raise ValueError("rollout returned no reward")
        result.rewards = {str(name): float(value) for name, value in rewards.items()}
        result.metrics = {str(name): float(value) for name, value in chat.metrics.items()}
        result.reward = sum(result.rewards.values())
        return conversation.turns


def _parts(module: Mapping[str, Any], setup: Setup) -> tuple[Callable[..., Any], list[dict[str, Any]]]:
    """The `rollout` of a module, and its tasks. Raises LoadError."""
    rollout, tasks = module.get("rollout"), module.get("tasks")
    ids.check_arguments(setup.args, tasks if callable(tasks) else ())
    if not inspect.iscoroutinefunction(rollout):
        raise ids.LoadError("it needs `async def rollout(task, chat)`")
    loaded = list(itertools.islice(tasks(**setup.args) if callable(tasks) else tasks or (), MAX_TASKS + 1))
    if not 0 < len(loaded) <= MAX_TASKS:
        raise ids.LoadError(f"it has {f'more than {MAX_TASKS}' if loaded else 'no'} tasks")
    for number, task in enumerate(loaded):
        if not isinstance(task, dict):
            raise ids.LoadError(f"task {number} is a {type(task).__name__}, not a dict")
        prompt = task.get("prompt")
        listed = isinstance(prompt, list) and all(isinstance(one, dict) and "role" in one for one in prompt)
        if not (prompt is None or isinstance(prompt, str) or listed):
            raise ids.LoadError(f"the prompt of task {number} is neither text nor a list of messages")
    return rollout, loaded


def _key(env_id: str, task: Mapping[str, Any]) -> str:
    content = json.dumps(task, sort_keys=True, default=str, ensure_ascii=False)
    return f"{ids.module_name(env_id)}/{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def _reply(turn: Turn) -> Reply:
    calls = []
    for call in turn.tool_calls:
        arguments: Any = None
        with contextlib.suppress(ValueError):
            arguments = parsed_json(arguments_of(call)) if call.status == "ok" else None
        problem = str(call.status) if call.status != "ok" else "" if isinstance(arguments, dict) else "invalid_json"
        calls.append(ToolCall(call.id or "", call.name or "", {} if problem else arguments, problem))
    return Reply(turn.message["content"], turn.message.get("reasoning_content", ""), calls, turn.is_truncated)
