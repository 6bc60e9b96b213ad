"""Call an environment's metrics and rewards once before any server is up: one that cannot work is found in seconds.

There is no model yet. So only what no reply could have prevented is reported: an exception before anything of the
rollout was read, or a name, a module, or a field of the task or of a module that does not exist. Episodes show what
else there is.
"""

import inspect
from types import ModuleType
from typing import Any, ClassVar

import verifiers.v1 as vf

from prime_rl.envs.ids import report


class _TaskPassed(Exception):
    """Raised where an environment would run an agent, with the task that it gives to it."""


class _Agents:
    """Stands in for the agents of an episode, and for each of them."""

    def __getattr__(self, name: str) -> "_Agents":
        return self

    async def run(self, task: vf.Task, *_: Any, **__: Any) -> None:
        raise _TaskPassed(task)


class _WatchedTrace(vf.Trace):
    was_read: ClassVar[bool] = False  # set for each instance; not a field of the model

    def __getattribute__(self, name: str) -> Any:
        if name not in ("__class__", "was_read"):
            object.__setattr__(self, "was_read", True)
        return super().__getattribute__(name)


async def broken_reward(env: Any, task: vf.Task) -> str:
    """Call the metrics and rewards of the first task that an episode of `task` gives to an agent, with a reply made up.

    Returns which one raises whatever the reply, and what; else "". Functions that need a runtime are left out, as are
    tasks with a setup, an end or a score of their own. Raises anything where an episode cannot be begun in this way.
    """
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
        object.__setattr__(trace, "was_read", False)  # its constructor has read it
        try:
            result = 0.0 if "runtime" in names else function(**{name: values[name] for name in names if name in values})
            if inspect.isawaitable(result):
                await result  # bounded: by the caller
        except Exception as error:  # noqa: BLE001  whatever it is, it is judged
            if _for_any_reply(error, trace.was_read):
                return f"{function.__name__!r}, which scores its episodes, raises whatever the reply: {report(error)}"
    return ""


def _for_any_reply(error: Exception, was_read: bool) -> bool:
    if not was_read:  # errors of the system and of libraries may be transient
        return type(error).__module__ == "builtins" and not isinstance(error, OSError)
    if isinstance(error, AttributeError):
        return isinstance(error.obj, vf.Task | vf.TaskData | ModuleType)
    return type(error) in (NameError, ModuleNotFoundError)  # UnboundLocalError may come of a loop over no reply
