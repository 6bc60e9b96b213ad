"""Run the first tasks before any server is up: an environment that cannot work is found in seconds.

A forked copy of the worker runs them, with a stand-in for the model. It ends, in silence, as soon as it would connect
to anything, start a program or write a file (no judge is asked, no sandbox paid), a reply leads to a reward, or time is
up. It reports what several replies led to and no other could prevent. Episodes show the rest.
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

SECONDS = 5.0  # for all replies
SENTENCE = "I have thought about it, and this is my reply: it depends."
TAGGED = "<think>It is so.</think>\n<answer>\\boxed{{{}}}</answer>"

_OUTSIDE = ("os.", "shutil.", "socket.", "subprocess.", "pty.", "sqlite3.")  # audit events, but for:
_HARMLESS = ("os.listdir", "os.scandir", "os.walk", "os.putenv", "os.unsetenv", "socket.__new__", "socket.bind")
_FIXED = ("prime_rl.envs.plain.Reply", "verifiers.v1.task.TaskData", "verifiers.v1.trace.Trace")  # in their fields
_FRAMEWORK = ("verifiers.", "prime_rl.", "asyncio.")
_SIMPLE = (ast.expr, ast.Assign, ast.AnnAssign, ast.Expr, ast.Import, ast.ImportFrom)


async def find_fault(env: Any, setup: Setup) -> str:
    """Describe the exception that every episode of an adapter, not yet entered, would end with; "": none is known."""
    if multiprocessing.active_children():  # with which a copy would share locks
        return ""
    reading, writing = os.pipe()
    with open(reading, encoding="utf-8", errors="replace") as pipe, suppress(OSError, Warning, WaitTimeout):
        if not (pid := os.fork()):
            try:
                _cut_off(writing)
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


def _cut_off(pipe: int) -> None:
    """Leave this process its memory, and files to read."""
    sys.dont_write_bytecode = True
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the listing's own
            to_read = os.path.isfile(f"/proc/self/fd/{number}") and not fcntl.fcntl(number, fcntl.F_GETFL) & 3
            if number not in (pipe, null) and not to_read:
                os.dup2(null, number)
    sys.addaudithook(_end_if_it_leaves)


def _end_if_it_leaves(event: str, arguments: tuple[Any, ...]) -> None:
    """End this process before Python connects, starts a program, or changes a file; C libraries are not seen."""
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if writes or (event.startswith(_OUTSIDE) and event not in _HARMLESS):
        os._exit(0)


async def _try(env: Any, setup: Setup, pipe: int) -> None:
    """Run an episode of a few tasks per reply, and write what all of them end with, if anything, into the pipe."""
    from renderers.base import RenderedTokens

    raised: Any = []
    noted: list[tuple[Any, str]] = [(ids, "describe")]
    if not isinstance(env.tasks[0], dict):  # of verifiers.v1
        noted += [(sys.modules["verifiers.v1.rollout"].Rollout, "fail"), (sys.modules["verifiers.v1.env"], "_as_error")]
        type(env.tasks[0]).toolsets = type(env._env.taskset).toolsets = lambda *_: []  # they are programs
    for owner, name in noted:  # all are called with an exception, last
        call = getattr(owner, name)
        setattr(owner, name, lambda *args, call=call: (raised.append(args[-1]), call(*args))[1])
    text, turns, faults = "", 0, set[str]()

    async def generate(*_: Any, **__: Any) -> dict[str, Any]:
        nonlocal turns
        turns += 1
        if turns > 20:
            os._exit(0)
        return {
            "prompt_ids": [0], "prompt_attribution": RenderedTokens(token_ids=[0], message_indices=[-1]),
            "completion_ids": [0], "completion_logprobs": [0.0], "content": text, "reasoning_content": None,
            "tool_calls": [], "finish_reason": "stop", "routed_experts": None,
        }  # fmt: skip

    renderer = SimpleNamespace(bridge_to_next_turn=None)
    env.engine = SimpleNamespace(branched=True, model=setup.model, renderer=renderer, generate=generate)
    async with env:
        for index in {0, len(env.task_ids) // 2, len(env.task_ids) - 1}:  # one of many may be bad
            task = env.tasks[index]
            data = task if isinstance(task, dict) else dict(task.data)
            before = repr(data)
            for reply in (answer := str(data.get("answer", SENTENCE)), TAGGED.format(answer), SENTENCE, ""):
                text, turns, raised[:] = reply, 0, []
                result = await env.run(Run(0, "trial", index, env.task_ids[index], {}, 0, "http://trial/v1", SECONDS))
                if result.ok or not raised:
                    os._exit(0)
                error = raised[0]
                while error.__cause__ is not None and type(error).__module__.startswith("verifiers."):
                    error = error.__cause__
                faults.add(ids.describe(error))
                if len(faults) > 1 or not _is_certain(error, turns, before):
                    os._exit(0)
        os.write(pipe, "".join(faults).encode(errors="replace"))
        os._exit(0)


def _is_certain(error: BaseException, turns: int, task: str) -> bool:
    """Whether no other reply could prevent it: a name, a module, an argument or a field of the `task` is missing, or it
    is raised on the way of every episode of one turn. Parsers raise the rest. `task`: its `repr` before the episode."""
    if isinstance(error, ImportError):
        return isinstance(error, ModuleNotFoundError) or "cannot import name" in str(error)
    frames = list(traceback.walk_tb(error.__traceback__))
    last, line = frames[-1]
    if isinstance(error, NameError | AttributeError):
        thing, file = getattr(error, "obj", None), last.f_code.co_filename
        if any(f"{kind.__module__}.{kind.__name__}" in _FIXED for kind in type(thing).__mro__):
            return True
        if isinstance(thing, ModuleType) or "is not defined" in str(error):
            lines = linecache.getlines(getattr(thing, "__file__", file) or "")
            made = any("global " in each and str(error.name) in each for each in lines)  # some time
            return not made and not file.startswith("<")  # a reply that is run as code
    own = [frame for frame, _ in frames if not frame.f_globals.get("__name__", "").startswith(_FRAMEWORK)]
    if not own:
        return isinstance(error, TypeError) and " missing " in str(error) and " required " in str(error)
    if isinstance(error, KeyError):
        text = linecache.getline(last.f_code.co_filename, line).replace('"', "'")
        match = re.search(rf"(?<![\w.])(\w[\w.\[\]']*)\[{re.escape(repr(error.args[0]))}\]", text)
        owner = eval(match[1], last.f_globals, last.f_locals) if match and last in own else None
        return isinstance(owner, dict) and error.args[0] not in owner and repr(owner) in task
    if turns > 1 or own != [last] or last.f_code.co_name == "env_response":  # which some replies make needless
        return False
    source, first = inspect.getsourcelines(last.f_code)
    function: Any = ast.parse(textwrap.dedent("".join(source))).body[0]
    before = [each for each in function.body if first + each.end_lineno <= line]
    part: Any = function.body[len(before)]
    part = part.test if isinstance(part, ast.If) else part
    straight = first + part.end_lineno > line and all(isinstance(each, _SIMPLE) for each in before)
    constant = isinstance(part, ast.Return) and not any(isinstance(node, ast.Name) for node in ast.walk(part))
    return straight and (isinstance(part, ast.Raise) or constant)
