"""Call an environment's reward functions once before any server is up: one that cannot work is found in seconds.

Without a model, hence reported is only what no reply could have prevented: an exception before anything of the rollout
was read, or a name, a module, or a field of the task that does not exist. Episodes show what else there is.
"""

import inspect
from types import ModuleType
from typing import Any, ClassVar

import verifiers.v1 as vf

from prime_rl.envs.ids import report


class _TaskPassed(Exception):
    """An environment runs an agent on the task in `args`."""


class _Agents:
    """Stands in for the agents of an episode, and for each of them."""

    def __getattr__(self, name: str) -> "_Agents":
        return self

    async def run(self, task: vf.Task, *_: Any, **__: Any) -> None:
        raise _TaskPassed(task)


class _WatchedTrace(vf.Trace):
    was_read: ClassVar[bool] = False  # of an instance

    def __getattribute__(self, name: str) -> Any:
        if name not in ("__class__", "was_read"):
            object.__setattr__(self, "was_read", True)
        return super().__getattribute__(name)


async def broken_reward(env: Any, task: vf.Task) -> str:
    """Call the functions that score the first task which an episode of `task` gives to an agent, without a runtime.
    Returns which one raises whatever the reply, and what; else "". Raises anything where this cannot be tried."""
    try:
        await env.run(task, _Agents())  # bounded: by the caller
        return ""
    except _TaskPassed as passed:
        task = passed.args[0]
    own = [name for name in ("setup", "finalize", "score") if getattr(type(task), name) is not getattr(vf.Task, name)]
    reply = vf.AssistantMessage(content=str(getattr(task.data, "answer", None) or ""))
    parts = {"task": vf.TraceTask(type="", data=task.data), "agent": vf.AgentInfo(config=vf.AgentConfig())}
    for function in [] if own or task.scoring_deferred else [*task.hooks("metric"), *task.hooks("reward")]:
        trace = _WatchedTrace(nodes=[vf.MessageNode(message=reply, sampled=True)], **parts)
        names = inspect.signature(function).parameters
        values = {"task": task.data, "trace": trace}
        object.__setattr__(trace, "was_read", False)  # by its own constructor
        try:
            result = 0.0 if "runtime" in names else function(**{name: values[name] for name in names if name in values})
            if inspect.isawaitable(result):
                await result  # bounded: by the caller
        except Exception as error:  # noqa: BLE001  whatever it is, it is judged
            if _for_any_reply(error, trace.was_read):
                return f"{function.__name__!r}, which scores its episodes, raises whatever the reply: {report(error)}"
    return ""


def _for_any_reply(error: Exception, was_read: bool) -> bool:
    if not was_read:  # errors of the system and of libraries may pass
        return type(error).__module__ == "builtins" and not isinstance(error, OSError)
    if isinstance(error, AttributeError):
        return isinstance(error.obj, vf.Task | vf.TaskData | ModuleType)
    return type(error) in (NameError, ModuleNotFoundError)  # not UnboundLocalError: a loop over nothing
