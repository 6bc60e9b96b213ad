#!/usr/bin/env python3
"""Refuse waits without a bound in src/: every wait has a subject, an owner and a deadline (`prime_rl/wait.py`).

    python scripts/check_waits.py                  # what src/ does, one line a finding; exit status 1 if there is any
    python scripts/check_waits.py --exemptions     # the waits that are exempt, and why
    python scripts/check_waits.py FILE_OR_DIRECTORY…

Judged from the syntax tree alone. Accepted are: `prime_rl.wait` (`wait`, `wait_async`, `within`), a timeout that is not None, an `await` inside
`async with asyncio.timeout(…)`, and a line (of the wait, the head of its loop, or where its lock is made) that says why it ends:

    while not self._stopped.wait(1.0):  # bounded: a daemon thread, it ends with the process

Collectives of torch.distributed end by the timeout of their process group, which is why making a group without one is refused.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
THE_PRIMITIVE = "prime_rl/wait.py"
_EXEMPT = re.compile(r"#\s*bounded:?(.*)")

# Callables that take a timeout, by full name: the index it has as a positional argument, None where it is a keyword only.
TAKES_TIMEOUT: dict[str, int | None] = {
    **dict.fromkeys((f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output")), None),
    **dict.fromkeys((f"requests.{name}" for name in ("request", "get", "post", "put", "delete", "head")), None),
    **dict.fromkeys((f"torch.distributed.{name}" for name in ("init_process_group", "new_group")), None),
    "torch.distributed.monitored_barrier": 1,
    "torch.distributed.TCPStore": None,
    "urllib.request.urlopen": 2,
    "socket.create_connection": 1,
    "http.client.HTTPConnection": 2,
    "http.client.HTTPSConnection": None,
    "select.select": 3,
    "concurrent.futures.wait": 1,
    "concurrent.futures.as_completed": 1,
    "asyncio.wait_for": 1,
    "asyncio.wait": None,
    "asyncio.as_completed": None,
    "aiohttp.ClientTimeout": 0,
}
TIMEOUT_NAMES = {"timeout", "total", "seconds"}
ENDLESS = {
    "os.system",
    "os.popen",
    "os.wait",
    "os.wait3",
    "signal.pause",
    "signal.sigwait",
    "signal.sigwaitinfo",
    "input",
}
ENDLESS_ITERATORS = {"itertools.count", "itertools.repeat", "itertools.cycle", "iter"}
ENDLESS |= {"subprocess.getoutput", "subprocess.getstatusoutput", "os.read", "asyncio.open_connection"}
# Calls that end at once when told so by one of these words among their arguments.
UNLESS = {"fcntl.flock": ("LOCK_NB", "LOCK_UN"), "fcntl.lockf": ("LOCK_NB", "LOCK_UN"), "os.waitpid": ("WNOHANG",)}
# Methods, by name alone: the index of the timeout among the positional arguments. Without any argument they wait for ever.
METHODS: dict[str, int | None] = {"wait": 0, "join": 0, "get": 1, "acquire": 1, "select": 0, "communicate": None}
TIMED = {"wait", "join", "acquire", "get", "poll", "select"}
SEND = re.compile(r"send(_\w+|all|msg)?")
NO_WAIT = "NOBLOCK|DONTWAIT"
RECEIVE = re.compile(r"recv(_\w+|from\w*|msg\w*)?|accept")
AWAITABLE_MAKERS = {
    "asyncio.create_task",
    "asyncio.ensure_future",
    "asyncio.shield",
    "asyncio.gather",
    "asyncio.wait_for",
    "within",
}
LIMITS = {"asyncio.timeout", "asyncio.timeout_at"}
JOINS = {"asyncio.gather", "asyncio.shield", "asyncio.wrap_future"}
SLEEPS = {"time.sleep", "asyncio.sleep"}
LOCKS = {f"{module}.{kind}" for module in ("threading", "asyncio", "multiprocessing") for kind in ("Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore")}  # fmt: skip
TASKS = {"asyncio.Task", "asyncio.Future", "asyncio.create_task", "asyncio.ensure_future"}  # asking these never waits
QUEUES = {"queue.Queue", "queue.LifoQueue", "queue.PriorityQueue", "asyncio.Queue", "multiprocessing.Queue"}
POLLERS = {"select.poll", "select.epoll", "zmq.Poller", "zmq.asyncio.Poller"}
OPENERS = {"urllib.request.build_opener"}
POOLS = {"concurrent.futures.ThreadPoolExecutor", "concurrent.futures.ProcessPoolExecutor", "multiprocessing.Pool"}

USE_WAIT = "use prime_rl.wait (wait, wait_async, within)"
GIVE_TIMEOUT = f"give it a timeout, or {USE_WAIT}"


@dataclass(frozen=True, order=True)
class Finding:
    """A wait that nothing ends. `lines` are those on which an exemption counts."""

    path: str
    line: int
    what: str
    mend: str
    lines: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}: {self.mend}"


class Made(NamedTuple):
    """What made an object (full name), on which line, and whether a queue was given a size."""

    by: str | None
    line: int
    sized: bool


NOTHING = Made(None, 0, False)


@dataclass(frozen=True, order=True)
class Exemption:
    path: str
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.why}"


def check(
    source: str, path: str = "<source>", locks: AbstractSet[str] = frozenset()
) -> tuple[list[Finding], list[Exemption]]:
    """What one module does wrong, and what it was excused for. `locks`: attributes that are locks made in other modules.

    Raises:
        SyntaxError: it is no Python.
    """
    comments = _exemptions(source, path)
    if path.endswith(THE_PRIMITIVE):
        return [], sorted(comments.values())
    checker = _Checker(ast.parse(source), path, locks)
    open_findings: list[Finding] = []
    used = {line for line in checker.lock_attributes().values() if line in comments and comments[line].why}
    for finding in checker.findings:
        excuses = [line for line in finding.lines if line in comments and comments[line].why]
        used |= set(excuses)
        if not excuses:
            open_findings.append(finding)
    for line in sorted(comments.keys() - used):
        if not comments[line].why:
            open_findings.append(
                Finding(path, line, "an exemption without a reason", "say after `# bounded:` why it ends")
            )
        else:
            open_findings.append(
                Finding(path, line, "an exemption of nothing", "remove it, or put it on the line of the wait")
            )
    return sorted(set(open_findings)), [comments[line] for line in sorted(used)]


def _exemptions(source: str, path: str) -> dict[int, Exemption]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        token.start[0]: Exemption(path, token.start[0], match[1].strip())
        for token in tokens
        if token.type == tokenize.COMMENT and (match := _EXEMPT.match(token.string))
    }


class _Checker(ast.NodeVisitor):
    """Walks one module. `_limited`: inside `asyncio.timeout`, which ends awaits but no blocking call."""

    def __init__(self, tree: ast.Module, path: str, locks: AbstractSet[str] = frozenset()) -> None:
        self.findings: list[Finding] = []
        self._path = path
        self._locks = locks
        self._names = _imports(tree)
        self._made = self._constructed(tree)
        self._limited = False
        self._awaited: set[int] = set()
        self._function: ast.AST = tree
        self.visit(tree)

    # ---- where we are

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
            self._entering(item.context_expr, isinstance(node, ast.AsyncWith))
            self.visit(item)
        for statement in node.body:
            self.visit(statement)
        self._limited = before

    visit_AsyncWith = visit_With

    def _entering(self, what: ast.expr, asynchronous: bool) -> None:
        called = self._name(what.func) if isinstance(what, ast.Call) else None
        if called in LIMITS and isinstance(what, ast.Call) and what.args and not _is_none(what.args[0]):
            self._limited = True
        elif called in POOLS:
            self._report(what, f"leaving `with {called}` waits for its work", "shut it down with wait=False")
        elif called == "subprocess.Popen":
            self._report(what, "leaving `with Popen` waits for the process", "wait with a timeout, then kill it")
        elif not (asynchronous and self._limited):
            lock = self._made.get(ast.unparse(what), NOTHING)
            if lock.by in LOCKS or (isinstance(what, ast.Attribute) and what.attr in self._locks and not lock.by):
                self._report(what, f"`with {ast.unparse(what)}` waits for a lock", GIVE_TIMEOUT, lock.line)

    # ---- loops

    def visit_While(self, node: ast.While) -> None:
        gives_way = any(isinstance(part, ast.Await) for part in ast.walk(node.test))
        if not gives_way and all(isinstance(statement, ast.Pass | ast.Continue) for statement in node.body):
            self._report(node.test, "a loop that spins", USE_WAIT)
        self._pieces([node.test, *node.body], node)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        if isinstance(node.iter, ast.Call) and self._name(node.iter.func) in ENDLESS_ITERATORS:
            self._pieces(node.body, node)
        if _is_pipe(node.iter):
            self._report(node.iter, "reads a pipe until its other end is closed", GIVE_TIMEOUT)
        self.generic_visit(node)

    def _pieces(self, body: Iterable[ast.AST], loop: ast.While | ast.For) -> None:
        """A loop that waits piece by piece waits for ever."""
        for node in _own_nodes(body):
            name = self._name(node.func) if isinstance(node, ast.Call) else None
            if name in SLEEPS:
                self._report(loop, f"a loop that sleeps (line {node.lineno})", USE_WAIT, node.lineno)  # type: ignore[attr-defined]
                return
            if isinstance(node, ast.Call) and (self._timed_wait(node, name) or name in LIMITS):
                what = f"a loop around a wait with a timeout (line {node.lineno})"
                self._report(loop, what, f"{USE_WAIT}, or say what ends the loop", node.lineno)
                return

    def _timed_wait(self, call: ast.Call, name: str | None) -> bool:
        if name in ("asyncio.wait", "select.select"):
            return True
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in TIMED:
            return False
        one_argument = call.func.attr == "wait" and len(call.args) == 1
        return one_argument or bool(set(_keywords(call)) & TIMEOUT_NAMES)

    # ---- awaits and calls

    def visit_Await(self, node: ast.Await) -> None:
        value = node.value
        running = isinstance(value, ast.Name | ast.Attribute | ast.Subscript)
        if isinstance(value, ast.Call) and self._name(value.func) in JOINS:
            running = any(not _makes_coroutine(argument) for argument in value.args)
        if self._limited:
            self._awaited.add(id(value))
        elif running:
            what = f"`await {ast.unparse(value)[:60]}` of what runs already has no limit"
            self._report(node, what, "await it within(…), or inside asyncio.timeout")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = self._name(node.func)
        if name in AWAITABLE_MAKERS or (name or "").endswith("wait.within"):
            bounded = name not in ("asyncio.shield", "asyncio.gather") or id(node) in self._awaited
            self._awaited |= {id(argument) for argument in node.args} if bounded else set()
        if id(node) not in self._awaited or name == "asyncio.wait_for":
            self._judge(node, name)
        self.generic_visit(node)

    def _judge(self, call: ast.Call, name: str | None) -> None:
        shown = f"`{ast.unparse(call.func)}(…)`"
        if name in TAKES_TIMEOUT:
            if not _has_timeout(call, TAKES_TIMEOUT[name]):
                self._report(call, f"{shown} without a timeout", "give it a timeout")
        elif name in ENDLESS:
            self._report(call, f"{shown} may wait for ever", USE_WAIT)
        elif name in UNLESS:
            if not any(word in ast.unparse(call) for word in UNLESS[name]):
                self._report(call, f"{shown} waits", f"pass {UNLESS[name][0]} and {USE_WAIT}")
        elif name is not None and name.startswith("httpx."):
            first = call.args[0] if call.args and name == "httpx.Timeout" else None
            if _is_none(_keywords(call).get("timeout")) or _is_none(first):
                self._report(call, f"{shown} without a timeout", "give it a timeout")
        elif isinstance(call.func, ast.Attribute):
            self._judge_method(call, call.func, shown)

    def _judge_method(self, call: ast.Call, func: ast.Attribute, shown: str) -> None:
        method, made = func.attr, self._made.get(ast.unparse(func.value), NOTHING)
        asks = method in ("result", "exception") and not call.args and not call.keywords
        if method in METHODS and _waits_without_limit(call, METHODS[method]):
            self._report(call, f"{shown} without a timeout", GIVE_TIMEOUT)
        elif RECEIVE.fullmatch(method) and not re.search(NO_WAIT, ast.unparse(call)):
            self._report(call, f"{shown} waits for a message", GIVE_TIMEOUT)
        elif (
            SEND.fullmatch(method) and "socket" in ast.unparse(func.value) and not re.search(NO_WAIT, ast.unparse(call))
        ):
            self._report(call, f"{shown} waits for room at the other side", GIVE_TIMEOUT)
        elif asks and made.by not in TASKS and not self._asked_whether_done(func.value):
            self._report(call, f"{shown} may wait for its future", f"ask .done() in this function, or {GIVE_TIMEOUT}")
        elif method == "poll" and not call.args and (made.by in POLLERS or "socket" in ast.unparse(func.value)):
            self._report(call, f"{shown} without a timeout", "give it a timeout")
        elif made.by in OPENERS and method == "open" and "timeout" not in _keywords(call):
            self._report(call, f"{shown} of a URL without a timeout", "give it a timeout")
        elif made.by in QUEUES and method == "put" and made.sized and _waits_without_limit(call, 2, least=1):
            self._report(call, f"{shown} waits for room in the queue", GIVE_TIMEOUT)
        elif made.by in POOLS and method == "shutdown" and not _is_false(_keywords(call).get("wait")):
            self._report(call, f"{shown} waits for its work", "shut it down with wait=False")
        elif method in ("read", "readline", "readlines") and _is_pipe(func.value):
            self._report(call, f"{shown} reads a pipe until its other end writes or closes", GIVE_TIMEOUT)

    def _asked_whether_done(self, future: ast.expr) -> bool:
        asked = f"{ast.unparse(future)}.done()"
        return any(isinstance(node, ast.Call) and ast.unparse(node) == asked for node in ast.walk(self._function))

    # ---- names

    def _name(self, func: ast.expr) -> str | None:
        """The full name of a called function, imports resolved; None for a method of some object."""
        parts: list[str] = []
        while isinstance(func, ast.Attribute):
            parts.append(func.attr)
            func = func.value
        if not isinstance(func, ast.Name):
            return None
        return ".".join([self._names.get(func.id, func.id), *reversed(parts)])

    def _constructed(self, tree: ast.Module) -> dict[str, Made]:
        """Names and attributes of this module by what made them, or what they are annotated as: `self._lock`, threading.Lock."""
        made: dict[str, Made] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.arg) and node.annotation is not None:
                annotation = node.annotation.value if isinstance(node.annotation, ast.Subscript) else node.annotation
                made.setdefault(node.arg, Made(self._name(annotation), node.lineno, True))
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
                call = node.value
                sized = bool(call.args) or "maxsize" in _keywords(call)
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    made[ast.unparse(target)] = Made(self._name(call.func), node.lineno, sized)
        return made

    def lock_attributes(self) -> dict[str, int]:
        """Attributes that this module makes locks of, and on which line."""
        made = {name: how for name, how in self._made.items() if how.by in LOCKS and "." in name}
        return {name.rpartition(".")[2]: how.line for name, how in made.items()}

    def _report(self, node: ast.AST, what: str, mend: str, *also: int) -> None:
        loop = isinstance(node, ast.While | ast.For)
        first = node.lineno  # type: ignore[attr-defined]
        last = max(first, node.body[0].lineno - 1) if loop else node.end_lineno  # type: ignore[attr-defined]
        self.findings.append(Finding(self._path, first, what, mend, (*range(first, last + 1), *also)))


def _imports(tree: ast.Module) -> dict[str, str]:
    """Local names of imported modules and functions, also of imports inside functions."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                names[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _own_nodes(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes below, without those of functions that are only defined here."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield node
        yield from _own_nodes(ast.iter_child_nodes(node))


def _keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def _has_timeout(call: ast.Call, index: int | None) -> bool:
    given = [value for name, value in _keywords(call).items() if name in TIMEOUT_NAMES]
    if index is not None and len(call.args) > index:
        given.append(call.args[index])
    return bool(given) and not any(_is_none(value) for value in given)


def _waits_without_limit(call: ast.Call, index: int | None, least: int = 0) -> bool:
    """A method such as `get(block, timeout)`: no timeout, or None, and not told to return at once. Other arguments mean another method."""
    keywords = _keywords(call)
    if any(_is_false(value) for value in [*call.args, *keywords.values()]):
        return False
    if _has_timeout(call, index):
        return False
    flags = [value for value in call.args[least:] if not (_is_none(value) or _is_true(value))]
    return not flags and (len(call.args) >= least) and set(keywords) <= TIMEOUT_NAMES | {"block", "blocking", "input"}


def _makes_coroutine(argument: ast.expr) -> bool:
    """A direct call, or a comprehension of calls, starts here what it gives: its own waits are judged where they stand."""
    if isinstance(argument, ast.Starred):
        argument = argument.value
    if isinstance(argument, ast.GeneratorExp | ast.ListComp):
        argument = argument.elt
    return isinstance(argument, ast.Call)


def _is_pipe(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("stdout", "stderr", "stdin")


def _is_none(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def check_files(places: Iterable[Path]) -> tuple[list[Finding], list[Exemption]]:
    """All modules at or below `places`."""
    findings: list[Finding] = []
    exemptions: list[Exemption] = []
    files = [file for place in places for file in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]
    sources = {file: file.read_text(encoding="utf-8") for file in files}
    locks = {name for source in sources.values() for name in unexplained_locks(source)}
    for file, source in sources.items():
        shown = file.resolve().relative_to(ROOT) if file.resolve().is_relative_to(ROOT) else file
        found, excused = check(source, shown.as_posix(), locks)
        findings += found
        exemptions += excused
    return findings, exemptions


def unexplained_locks(source: str) -> list[str]:
    """Attributes that are locks without a word, where they are made, on why waiting for them ends."""
    made = _Checker(ast.parse(source), "").lock_attributes()
    explained = _exemptions(source, "")
    return [name for name, line in made.items() if line not in explained]


def main() -> None:
    parser = argparse.ArgumentParser(description="Refuse waits without a bound.")
    parser.add_argument("places", nargs="*", type=Path, default=[ROOT / "src", ROOT / "environments"])
    parser.add_argument("--exemptions", action="store_true", help="list the waits that are exempt, and why")
    arguments = parser.parse_args()
    findings, exemptions = check_files(arguments.places)
    for row in exemptions if arguments.exemptions else findings:
        print(row)
    if not arguments.exemptions:
        sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
