"""Run the first task before any server is up: an environment that cannot work is found in seconds.

A forked copy of the worker runs it, with a stand-in for the model. The copy is cut off: it ends, in silence, as soon as
it would connect to anything, start a program or write a file, so that no judge is asked and no sandbox paid. It ends,
too, when a second reply is wanted, a reply leads to a reward, or time is up. It reports what each of several replies
led to and no other could prevent. Episodes show what else there is.
"""

import ast
import asyncio
import copy
import ctypes
import fcntl
import inspect
import linecache
import os
import platform
import signal
import stat
import struct
import sys
import textwrap
import traceback
from contextlib import suppress
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

from renderers.base import RenderedTokens

from prime_rl.envs import ids
from prime_rl.envs.protocol import Run, Setup
from prime_rl.wait import WaitTimeout, within

SECONDS = 5.0  # for all replies
SENTENCE = "I have thought about it, and this is my reply: it depends."

_SYSTEM_CALLS = {"x86_64": (42, 59), "aarch64": (203, 221)}  # connect, execve
_OUTSIDE = ("os.", "shutil.", "socket.", "subprocess.", "pty.", "sqlite3.")  # audit events, but for:
_HARMLESS = ("os.listdir", "os.scandir", "os.walk", "os.putenv", "os.unsetenv", "socket.__new__", "socket.bind")
_FIXED = ("prime_rl.envs.plain.Reply", "verifiers.v1.task.TaskData", "verifiers.v1.trace.Trace")  # in their fields
_FRAMEWORK = ("verifiers.", "prime_rl.", "asyncio.")
_SIMPLE = (ast.expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Import, ast.ImportFrom)
_BRANCHES = (ast.IfExp, ast.BoolOp, ast.comprehension)


class TaskDict(dict[Any, Any]):
    """A dict of the task's own. Changed, it ends the trial: what is in it then might depend on a reply."""

    def __missing__(self, key: Any) -> Any:
        raise KeyError(key)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TaskDict":
        return TaskDict({key: copy.deepcopy(value, memo) for key, value in self.items()})

    __setitem__ = __ior__ = setdefault = update = lambda *_, **__: os._exit(0)  # type: ignore[assignment]


def marked(value: Any) -> Any:
    """The value with a `TaskDict` for every dict in it."""
    if type(value) is dict:
        return TaskDict({key: marked(each) for key, each in value.items()})
    return [marked(each) for each in value] if type(value) is list else value


class _StandIn:
    """An engine that has one reply."""

    branched, renderer = True, SimpleNamespace(bridge_to_next_turn=None)

    def __init__(self, model: str) -> None:
        self.model = model
        self.reply: str | None = None

    async def generate(self, *_: Any, **__: Any) -> dict[str, Any]:
        if self.reply is None:
            os._exit(0)
        content, self.reply = self.reply, None
        prompt = RenderedTokens(token_ids=[0], message_indices=[-1])
        return dict(
            prompt_ids=[0], prompt_attribution=prompt, completion_ids=[0], completion_logprobs=[0.0], content=content,
            reasoning_content=None, tool_calls=[], finish_reason="stop", routed_experts=None,
        )  # fmt: skip


async def find_fault(env: Any, setup: Setup) -> str:
    """Describe the exception that every episode of an adapter, not yet entered, would end with; "": none is known."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        try:
            _cut_off(writing)
            asyncio.run(_try(env, setup, writing))
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        try:
            ended = asyncio.to_thread(pipe.read)
            return (await within(ended, subject="end", owner="the first task's trial", seconds=SECONDS)).decode()
        except WaitTimeout:
            return ""
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _cut_off(pipe: int) -> None:
    """Leave this process its memory, and files to read. Raises where the kernel does not do what it is asked."""
    sys.dont_write_bytecode = True
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the listing's own
            to_read = stat.S_ISREG(os.fstat(number).st_mode) and not fcntl.fcntl(number, fcntl.F_GETFL) & 3
            if number not in (1, 2, pipe, null) and not to_read:
                os.dup2(null, number)
    libc, (connect, execute) = ctypes.CDLL(None, use_errno=True), _SYSTEM_CALLS[platform.machine()]
    # Load the number of a system call; end the process if it is one of these; else allow it.
    steps = [(0x20, 0, 0, 0), (0x15, 1, 0, connect), (0x15, 0, 1, execute), (6, 0, 0, 1 << 31), (6, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, struct.pack("HP", len(steps), ctypes.addressof(code)), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")

    def end_outside(event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(args[2], int) and args[2] & 3
        if writes or (event.startswith(_OUTSIDE) and event not in _HARMLESS):
            os._exit(0)

    sys.addaudithook(end_outside)


async def _try(env: Any, setup: Setup, pipe: int) -> None:
    """Run an episode per reply, and write what all of them end with, if anything, into the pipe."""
    raised: list[BaseException] = []
    noting: list[tuple[Any, str]] = [(ids, "describe")]
    if v1 := sys.modules.get("verifiers.v1.rollout"):
        noting += [(v1.Rollout, "fail"), (sys.modules["verifiers.v1.env"], "_as_error")]
    for owner, name in noting:
        call = getattr(owner, name)
        setattr(owner, name, lambda *args, call=call: (raised.append(args[-1]), call(*args))[1])
    answer, faults = env.mark_first_task(marked), set[str]()
    env.engine = engine = _StandIn(setup.model)
    async with env:
        for reply in dict.fromkeys((str(answer or SENTENCE), SENTENCE, "")):
            engine.reply = reply
            raised.clear()
            result = await env.run(Run(0, "trial", 0, env.task_ids[0], {}, 0, "http://trial/v1", SECONDS))
            if result.ok or not raised:
                os._exit(0)
            error = raised[0]
            while error.__cause__ is not None and type(error).__module__.startswith("verifiers."):
                error = error.__cause__
            certain = _is_certain(error)
            faults.add(ids.report(error))
            if len(faults) > 1 or not certain:
                os._exit(0)
        os.write(pipe, "".join(faults).encode()[:4096])
        os._exit(0)


def _is_certain(error: BaseException) -> bool:
    """Whether no other reply could prevent it: a name, a module, a field of the task or an argument is missing, or it
    is raised on the way of every episode. Parsers raise the rest."""
    if isinstance(error, ImportError):
        return isinstance(error, ModuleNotFoundError) or "cannot import name" in str(error)
    last = error.__traceback__
    assert last is not None
    while last.tb_next is not None and last.tb_next.tb_frame.f_code is not TaskDict.__missing__.__code__:
        last = last.tb_next
    in_task, last.tb_next = last.tb_next is not None, None  # what is reported is where it was looked up
    if isinstance(error, NameError | AttributeError):
        thing, file = getattr(error, "obj", None), last.tb_frame.f_code.co_filename
        if any(f"{kind.__module__}.{kind.__name__}" in _FIXED for kind in type(thing).__mro__):
            return True
        if isinstance(thing, ModuleType) or "is not defined" in str(error):
            lines = linecache.getlines(getattr(thing, "__file__", file) or "")
            made = any("global " in line and str(error.name) in line for line in lines)  # some time
            return not made and not file.startswith("<")  # a reply that is run as code
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [frame for frame, _ in frames if not frame.f_globals.get("__name__", "").startswith(_FRAMEWORK)]
    if not own:
        return isinstance(error, TypeError) and " missing " in str(error) and " required " in str(error)
    if own != [frames[-1][0]] or (statement := _on_the_way(own[0].f_code, last.tb_lineno)) is None:
        return False
    nodes = list(ast.walk(statement))
    if in_task:
        keys = [node.slice for node in nodes if isinstance(node, ast.Subscript)]
        return any(isinstance(key, ast.Constant) and key.value == error.args[0] for key in keys)
    return isinstance(statement, ast.Raise) or not any(isinstance(node, ast.Name | ast.Attribute) for node in nodes)


def _on_the_way(code: CodeType, line: int) -> ast.AST | None:
    """The statement of a function at a line, or the condition of its `if`; None where what is before it, or in it, may
    lead elsewhere."""
    source, first = inspect.getsourcelines(code)
    (function,) = ast.parse(textwrap.dedent("".join(source))).body
    for statement in getattr(function, "body", ()):
        part = statement.test if isinstance(statement, ast.If) else statement
        if part.lineno <= line - first + 1 <= part.end_lineno:
            whole = isinstance(part, (*_SIMPLE, ast.Return, ast.Raise))
            return part if whole and not any(isinstance(node, _BRANCHES) for node in ast.walk(part)) else None
        if not isinstance(statement, _SIMPLE):
            return None
    return None
