"""Dry-run up to four tasks, before a server is up, to find environments that cannot work.

The trial takes the first two tasks, the middle one and the last, and canned replies. It runs in a forked process and
reports an error only if every reply to every task raises the same one, and `_is_certain` finds that it cannot depend on
the reply. It gives up and reports nothing if an episode succeeds, if it would open a connection, start a program or
write a file, or after `SECONDS`.
"""

import ast
import asyncio
import fcntl
import inspect
import linecache
import multiprocessing
import os
import re
import signal
import sys
import textwrap
import traceback
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

from prime_rl.envs import ids
from prime_rl.envs.protocol import Run, Setup
from prime_rl.wait import WaitTimeout, within

SECONDS = 5.0  # of the whole trial
_PLAIN_REPLY = "I have thought about it, and this is my reply: it depends."
_TAGGED_REPLY = "<think>It is so.</think>\n<answer>\\boxed{{{0}}}</answer>\n#### {0}\n```python\n{0}\n```"

_EFFECT_EVENTS = ("os.", "shutil.", "socket.", "subprocess.", "pty.", "sqlite3.")  # prefixes of audit events, except:
_ALLOWED_EVENTS = ("os.listdir", "os.scandir", "os.walk", "os.putenv", "os.unsetenv", "socket.__new__", "socket.bind")
_FIXED_FIELD_TYPES = ("prime_rl.envs.plain.Reply", "verifiers.v1.task.TaskData", "verifiers.v1.trace.Trace")
_FRAMEWORK = ("verifiers.", "prime_rl.", "asyncio.")
_STRAIGHT_LINE_NODES = (ast.expr, ast.Assign, ast.AnnAssign, ast.Expr, ast.Import, ast.ImportFrom)


async def find_fault(env: Any, setup: Setup) -> str:
    """Return the error that every episode of `env` (not yet entered as a context manager) would raise; "" if none."""
    if multiprocessing.active_children():  # the forked process would share locks with them
        return ""
    reading, writing = os.pipe()
    with open(reading, encoding="utf-8", errors="replace") as pipe, suppress(OSError, Warning, WaitTimeout):
        if not (pid := os.fork()):  # it warns in a process with threads, which `-W error` makes an exception
            try:
                _isolate(writing)
                asyncio.run(_try(env, setup, writing))
            finally:
                os._exit(0)
        os.close(writing)
        try:
            return await within(asyncio.to_thread(pipe.read), subject="end", owner="a trial", seconds=SECONDS)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)  # bounded: it is killed
    return ""


def _isolate(pipe: int) -> None:
    """Redirect every descriptor but `pipe` to /dev/null, or open its file anew if it is read: a fork shares the place
    in it. Add the audit hook."""
    sys.dont_write_bytecode = True
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # closed since it was listed
            to_read = os.path.isfile(f"/proc/self/fd/{number}") and not fcntl.fcntl(number, fcntl.F_GETFL) & 3
            if number not in (pipe, null):
                copy = os.open(f"/proc/self/fd/{number}", os.O_RDONLY) if to_read else null
                if to_read:
                    os.lseek(copy, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
                os.dup2(copy, number)
    sys.addaudithook(_exit_on_side_effect)


def _exit_on_side_effect(event: str, arguments: tuple[Any, ...]) -> None:
    """End this process before Python connects, starts a program or changes a file. C libraries raise no events."""
    changes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & changes
    binds = event == "socket.bind" and isinstance(arguments[1], str | bytes)  # a file
    if writes or binds or (event.startswith(_EFFECT_EVENTS) and event not in _ALLOWED_EVENTS):
        os._exit(0)


async def _try(env: Any, setup: Setup, pipe: int) -> None:
    """Run an episode for each task and reply; write the error that all of them end with, if any, into the pipe."""
    from renderers.base import RenderedTokens

    raised: Any = list[BaseException]()
    if not isinstance(env.tasks[0], dict):  # of verifiers.v1: tool servers are subprocesses, which it may not start
        type(env.tasks[0]).toolsets = type(env._env.taskset).toolsets = lambda *_: []
    describe = ids.describe  # called with every exception
    ids.describe = lambda error: (raised.append(error), describe(error))[1]
    text, turns, faults = "", 0, set[str]()

    async def generate(*_: Any, **__: Any) -> dict[str, Any]:
        nonlocal turns
        if (turns := turns + 1) > 20:
            os._exit(0)
        return {
            "prompt_ids": [0], "prompt_attribution": RenderedTokens(token_ids=[0], message_indices=[-1]),
            "completion_ids": [0], "completion_logprobs": [0.0], "content": text, "reasoning_content": None,
            "tool_calls": [], "finish_reason": "stop", "routed_experts": None,
        }  # fmt: skip

    renderer = SimpleNamespace(bridge_to_next_turn=None)
    env.engine = SimpleNamespace(branched=True, model=setup.model, renderer=renderer, generate=generate)
    async with env:
        last = len(env.task_ids) - 1
        for index in {0, min(1, last), last // 2, last}:
            data = task if isinstance(task := env.tasks[index], dict) else dict(task.data)
            before = repr(data)
            answer = str(data.get("answer", _PLAIN_REPLY))
            for reply in (answer, _TAGGED_REPLY.format(answer), _PLAIN_REPLY, ""):
                text, turns, raised[:] = reply, 0, []
                result = await env.run(Run(0, "trial", index, env.task_ids[index], {}, 0, "http://trial/v1", SECONDS))
                if result.ok or not raised:
                    os._exit(0)
                faults.add(describe(raised[0]))
                if len(faults) > 1 or not _is_certain(raised[0], turns, before):
                    os._exit(0)
        os.write(pipe, "".join(faults).encode(errors="replace"))
        os._exit(0)


def _is_certain(error: BaseException, turns: int, task: str) -> bool:
    """Return whether the error cannot depend on the reply: a missing name, module, argument or task field, or an
    unconditional raise or constant return in a top-level statement reached without a branch. Anything else may come
    from parsing the reply. `task`: the `repr` of the task before the episode."""
    if isinstance(error, ImportError):
        return isinstance(error, ModuleNotFoundError) or "cannot import name" in str(error)
    frames = list(traceback.walk_tb(error.__traceback__))
    last, line = frames[-1]
    if isinstance(error, NameError | AttributeError):
        thing, file = getattr(error, "obj", None), last.f_code.co_filename
        if any(f"{kind.__module__}.{kind.__name__}" in _FIXED_FIELD_TYPES for kind in type(thing).__mro__):
            return True
        if isinstance(thing, ModuleType) or "is not defined" in str(error):
            lines = linecache.getlines(getattr(thing, "__file__", file) or "")
            assigned = any("global " in text and str(error.name) in text for text in lines)  # perhaps later
            return not assigned and not file.startswith("<")  # "<…>": a reply that is run as code
    own = [frame for frame, _ in frames if not frame.f_globals.get("__name__", "").startswith(_FRAMEWORK)]
    if not own:
        return isinstance(error, TypeError) and " missing " in str(error) and " required " in str(error)
    if isinstance(error, KeyError):
        text = linecache.getline(last.f_code.co_filename, line).replace('"', "'")
        match = re.search(rf"(?<![\w.])(\w+)([\w.\[\]']*)\[{re.escape(repr(error.args[0]))}\]", text)
        owner: Any = {**last.f_globals, **last.f_locals}.get(match[1]) if match and last in own else None
        for name, key in re.findall(r"\.(\w+)|\['(.*?)'\]", match[2] if match else ""):
            owner = getattr(owner, name, None) if name else owner.get(key) if isinstance(owner, dict) else None
        return isinstance(owner, dict) and owner != {} and error.args[0] not in owner and repr(owner) in task
    if turns > 1 or own != [last] or last.f_code.co_name == "env_response":  # not every reply leads to it
        return False
    source, first = inspect.getsourcelines(last.f_code)
    function: Any = ast.parse(textwrap.dedent("".join(source))).body[0]
    before = [node for node in function.body if first + node.end_lineno <= line]
    faulty, straight = function.body[len(before)], all(isinstance(node, _STRAIGHT_LINE_NODES) for node in before)
    constant = isinstance(faulty, ast.Return) and not any(isinstance(node, ast.Name) for node in ast.walk(faulty))
    return straight and (isinstance(faulty, ast.Raise) or constant)
