#!/usr/bin/env python3
"""Refuse waits without a bound in src/: every wait has a subject, an owner and a deadline (`prime_rl/wait.py`).

    python scripts/check_waits.py                  # one line a finding; exit status 1 if there is any
    python scripts/check_waits.py --exemptions     # the waits that are exempt, and why
    python scripts/check_waits.py FILE_OR_DIRECTORY…

Judged from the syntax tree alone, by names. Accepted are `prime_rl.wait` (`wait`, `wait_async`, `within`), a timeout
that is not None, an `await` inside `async with asyncio.timeout(…)`, and a line of the wait that says why it ends:

    while not self._stopped.wait(1.0):  # bounded: a daemon thread, it ends with the process

A lock says it where it is made. Collectives of torch.distributed end by the timeout of their process group, which is
why making a group without one is refused.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
THE_PRIMITIVE = "prime_rl/wait.py"
EXEMPT = re.compile(r"#\s*bounded:?(.*)")

# Functions that take a timeout: its index among the positional arguments, None where it is a keyword only.
FUNCTIONS: dict[str, int | None] = {
    **dict.fromkeys((f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output")), None),
    **dict.fromkeys((f"torch.distributed.{name}" for name in ("init_process_group", "new_group", "TCPStore")), None),
    "urllib.request.urlopen": 2,
    "socket.create_connection": 1,
    "select.select": 3,
    "concurrent.futures.wait": 1,
    "asyncio.wait_for": 1,
    "asyncio.wait": None,
}
# Methods that take one. Without any argument they wait for ever; with others they are another method (`str.join`).
METHODS: dict[str, int | None] = {
    "wait": 0, "join": 0, "get": 1, "acquire": 1, "select": 0, "communicate": None, "result": 0,
}  # fmt: skip
TIMEOUTS = {"timeout", "total", "seconds"}
ENDLESS = {
    "os.system", "os.popen", "os.wait", "os.read", "signal.pause", "signal.sigwait", "input", "asyncio.open_connection"
}  # fmt: skip
# Calls that end at once if one of these words is among their arguments.
UNLESS = {"fcntl.flock": "LOCK_NB|LOCK_UN", "fcntl.lockf": "LOCK_NB|LOCK_UN", "os.waitpid": "WNOHANG"}
MESSAGES = re.compile(r"recv(_\w+|from\w*|msg\w*)?|accept")
LOCKS = re.compile(r"(threading|asyncio|multiprocessing)\.(R?Lock|Condition|(Bounded)?Semaphore)|queue\.Queue")
POOLS = {"concurrent.futures.ThreadPoolExecutor", "concurrent.futures.ProcessPoolExecutor", "multiprocessing.Pool"}
SLEEPS = {"time.sleep", "asyncio.sleep"}
LIMITS = {"asyncio.timeout", "asyncio.timeout_at"}
# What their arguments wait for is their own wait, or a task.
WRAPPERS = {"asyncio.create_task", "asyncio.ensure_future", "asyncio.wait_for"}
JOINS = {"asyncio.gather", "asyncio.shield", "asyncio.wrap_future"}

USE_WAIT = "use prime_rl.wait (wait, wait_async, within)"
GIVE_TIMEOUT = f"give it a timeout, or {USE_WAIT}"


class Finding(NamedTuple):
    """A wait that nothing ends. `lines` are those on which an exemption counts."""

    path: str
    line: int
    what: str
    advice: str
    lines: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}: {self.advice}"


def check(source: str, path: str = "<source>") -> tuple[list[Finding], list[str]]:
    """Return what one module does wrong, and what it was excused for."""
    if path.endswith(THE_PRIMITIVE):
        return [], []
    comments = {
        token.start[0]: match[1].strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and (match := EXEMPT.match(token.string))
    }
    findings, excused = [], set()
    for finding in Checker(ast.parse(source), path).findings:
        reasons = {line for line in finding.lines if comments.get(line)}
        excused |= reasons
        if not reasons:
            findings.append(finding)
    return sorted(findings), [f"{path}:{line}: {comments[line]}" for line in sorted(excused)]


class Checker(ast.NodeVisitor):
    """Walks one module. `_limited`: inside `asyncio.timeout`, which ends awaits but no blocking call."""

    def __init__(self, tree: ast.Module, path: str) -> None:
        self.findings: list[Finding] = []
        self._path = path
        self._imports = dict(imported_names(tree))
        self._limited = False
        self._awaited: set[int] = set()
        self._function: ast.AST = tree
        self.visit(tree)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        before = self._limited, self._function
        self._limited, self._function = False, node
        self.generic_visit(node)
        self._limited, self._function = before

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        before = self._limited
        for item in node.items:
            self.visit(item)
            called = self._name(item.context_expr)
            if called in LIMITS and not is_constant(item.context_expr.args[0], None):  # type: ignore[attr-defined]
                self._limited = True
            elif called in POOLS or called == "subprocess.Popen":
                self._report(item.context_expr, f"leaving `with {called}` waits for it", "end it with a timeout")
        for statement in node.body:
            self.visit(statement)
        self._limited = before

    visit_AsyncWith = visit_With

    def visit_While(self, node: ast.While) -> None:
        spins = all(isinstance(statement, ast.Pass | ast.Continue) for statement in node.body)
        if spins and not any(isinstance(part, ast.Await) for part in ast.walk(node.test)):
            self._report(node.test, "a loop that spins", USE_WAIT)
        self._check_loop(node, [node.test, *node.body])
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        if self._name(node.iter) in ("itertools.count", "itertools.repeat", "iter"):
            self._check_loop(node, node.body)
        if is_pipe(node.iter):
            self._report(node.iter, "reads a pipe until its other end is closed", GIVE_TIMEOUT)
        self.generic_visit(node)

    def _check_loop(self, loop: ast.While | ast.For, body: Iterable[ast.AST]) -> None:
        """Refuse a loop around a sleep, or around a wait with a timeout: it has no end of its own."""
        for node in nodes_of(body):
            if not isinstance(node, ast.Call):
                continue
            name, method = self._name(node), node.func.attr if isinstance(node.func, ast.Attribute) else ""
            timed = method in METHODS and (
                TIMEOUTS & keywords(node).keys() or (method == "wait" and len(node.args) == 1)
            )
            if timed or name in SLEEPS | LIMITS or name in ("asyncio.wait", "select.select"):
                what = f"a loop around a wait or sleep (line {node.lineno})"
                self._report(loop, what, f"{USE_WAIT}, or say what ends the loop", node.lineno)
                return

    def visit_Await(self, node: ast.Await) -> None:
        value = node.value
        running = isinstance(value, ast.Name | ast.Attribute | ast.Subscript)
        if isinstance(value, ast.Call) and self._name(value) in JOINS:
            running = not all(makes_coroutine(argument) for argument in value.args)
        if self._limited:
            self._awaited.add(id(value))
        elif running:
            what = f"`await {ast.unparse(value)[:60]}` of what runs already has no limit"
            self._report(node, what, "await it within(…), or inside asyncio.timeout")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = self._name(node) or ""
        if name in WRAPPERS or name.endswith("wait.within") or (name in JOINS and id(node) in self._awaited):
            self._awaited |= {id(argument) for argument in node.args}
        if (id(node) not in self._awaited or name == "asyncio.wait_for") and (advice := self._judge(node, name)):
            self._report(node, f"`{ast.unparse(node.func)}(…)` may wait for ever", advice)
        self.generic_visit(node)

    def _judge(self, call: ast.Call, name: str) -> str | None:
        """Return what to do about a call that may wait for ever."""
        if name in FUNCTIONS:
            return None if has_timeout(call, FUNCTIONS[name]) else "give it a timeout"
        if name in UNLESS:
            return None if re.search(UNLESS[name], ast.unparse(call)) else f"pass {UNLESS[name]}, and {USE_WAIT}"
        if name in ENDLESS:
            return USE_WAIT
        if LOCKS.fullmatch(name) and (name != "queue.Queue" or call.args):
            return "say after `# bounded:` why waiting for it ends"
        if name.startswith(("httpx.", "aiohttp.ClientTimeout")):
            return "give it a timeout" if any(is_constant(value, None) for value in timeouts(call)) else None
        return self._judge_method(call, call.func) if isinstance(call.func, ast.Attribute) else None

    def _judge_method(self, call: ast.Call, function: ast.Attribute) -> str | None:
        method, owner, text = function.attr, ast.unparse(function.value), ast.unparse(call)
        if method == "result" and f"{owner}.done()" in ast.unparse(self._function):
            return None
        if method in METHODS:
            return GIVE_TIMEOUT if waits_without_limit(call, METHODS[method]) else None
        sends = method.startswith("send") and "socket" in owner
        if (MESSAGES.fullmatch(method) or sends) and not re.search("NOBLOCK|DONTWAIT", text):
            return GIVE_TIMEOUT
        if method == "shutdown" and re.search("pool|executor", owner) and "wait=False" not in text:
            return "shut it down with wait=False"
        if method == "poll" and re.search("poll|socket", owner) and not call.args:
            return GIVE_TIMEOUT
        if method in ("read", "readline", "readlines") and is_pipe(function.value):
            return GIVE_TIMEOUT
        return None

    def _name(self, node: ast.expr) -> str | None:
        """Return the full name of the called function, imports resolved; None for a method of some object."""
        function = node.func if isinstance(node, ast.Call) else ast.Constant(None)
        first, *rest = ast.unparse(function).split(".")
        return ".".join([self._imports.get(first, first), *rest]) if first.isidentifier() else None

    def _report(self, node: ast.AST, what: str, advice: str, *also: int) -> None:
        first: int = node.lineno  # type: ignore[attr-defined]
        loop = isinstance(node, ast.While | ast.For)
        last = max(first, node.body[0].lineno - 1) if loop else node.end_lineno  # type: ignore[attr-defined]
        self.findings.append(Finding(self._path, first, what, advice, (*range(first, last + 1), *also)))


def imported_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield local names of imported modules and functions with their full names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.asname, alias.name) for alias in node.names if alias.asname)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def nodes_of(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes below, without those of functions that are only defined here."""
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from nodes_of(ast.iter_child_nodes(node))


def keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def timeouts(call: ast.Call, index: int | None = None) -> list[ast.expr]:
    by_position = call.args[index : index + 1] if index is not None else []
    return [*by_position, *(value for name, value in keywords(call).items() if name in TIMEOUTS)]


def has_timeout(call: ast.Call, index: int | None) -> bool:
    values = timeouts(call, index)
    return bool(values) and not any(is_constant(value, None) for value in values)


def waits_without_limit(call: ast.Call, index: int | None) -> bool:
    """Judge a method such as `get(block, timeout)`. Arguments other than its own mean another method."""
    values = [*call.args, *keywords(call).values()]
    if has_timeout(call, index) or any(is_constant(value, False) for value in values):
        return False
    own = keywords(call).keys() <= TIMEOUTS | {"block", "blocking", "input"}
    return own and all(is_constant(value, None) or is_constant(value, True) for value in call.args)


def makes_coroutine(argument: ast.expr) -> bool:
    """Say whether the argument is a call, or a comprehension of calls, whose own waits are judged where they are."""
    if isinstance(argument, ast.Starred):
        argument = argument.value
    if isinstance(argument, ast.GeneratorExp | ast.ListComp):
        argument = argument.elt
    return isinstance(argument, ast.Call)


def is_pipe(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("stdout", "stderr", "stdin")


def is_constant(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def main() -> None:
    parser = argparse.ArgumentParser(description="Refuse waits without a bound.")
    parser.add_argument("places", nargs="*", type=Path, default=[ROOT / "src", ROOT / "environments"])
    parser.add_argument("--exemptions", action="store_true", help="list the waits that are exempt, and why")
    arguments = parser.parse_args()
    found = False
    for place in arguments.places:
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            shown = file.resolve().relative_to(ROOT) if file.resolve().is_relative_to(ROOT) else file
            findings, exemptions = check(file.read_text(encoding="utf-8"), shown.as_posix())
            found |= bool(findings)
            for row in exemptions if arguments.exemptions else findings:
                print(row)
    sys.exit(found and not arguments.exemptions)


if __name__ == "__main__":
    main()
