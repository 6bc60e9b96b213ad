"""Imports: of large packages, and of the user's own functions, named in a config by import path, with arguments in TOML."""

import ast
import difflib
import functools
import gc
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from prime_rl.errors import UserError


@contextmanager
def quick_imports() -> Iterator[None]:
    """Keep the garbage collector from running while large packages are imported, which takes a tenth of their time.

    Hardly any of what they make is garbage; the collector passes it over from then on.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def load_function(
    path: str, args: Mapping[str, Any], given: int, key: str, offered: Collection[str] = ()
) -> Callable[..., Any]:
    """The function at `path`: `module:name`, or `file.py:name`.

    Args:
        args: Keyword arguments that it will be called with.
        given: Positional arguments that it will be called with.
        key: The setting that names it, for errors.
        offered: More keyword arguments, which it is called with if it takes them.

    Raises:
        UserError: there is none, or it does not take these arguments.
    """
    where, name = find_module(path, key)
    try:
        found = getattr(_module(where), name)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise UserError(f"{key}: {path!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise UserError(f"{key}: {path!r} is a {type(found).__name__}, not a function")
    try:
        inspect.signature(found).bind_partial(*range(given), **args)
        missing = _missing(found, given, {*args, *offered})
    except TypeError as error:
        raise UserError(f"{key}: {path!r} does not take its arguments: {error}") from error
    except ValueError as error:  # of one that is not written in Python
        raise UserError(f"{key}: {path!r} does not tell its parameters: call it from a function of your own") from error
    if missing:
        raise UserError(f"{key}: {path!r} needs arguments that are not given: {', '.join(missing)}")
    function: Callable[..., Any] = found
    return function


def find_module(path: str, key: str) -> tuple[str, str]:
    """The parts of `path`, whose module is not imported yet: it may need torch, or a GPU.

    Raises:
        UserError: there is no such module, or its text defines no such name.
    """
    where, colon, name = path.rpartition(":")
    if not colon or not where or not name:
        raise UserError(f"{key}: {path!r} is not of the form module:name or file.py:name")
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise UserError(f"{key}: there is no file {where}")
        _check_defined(Path(where), name, path, key)
        return where, name
    look_here()
    try:
        found = importlib.util.find_spec(where)
    except (ImportError, ValueError):  # a package above it is missing
        found = None
    if found is None:
        raise UserError(f"{key}: there is no module {where}")
    if found.origin is not None and found.origin.endswith(".py"):
        _check_defined(Path(found.origin), name, path, key)
    return where, name


def _check_defined(file: Path, name: str, path: str, key: str) -> None:
    """As far as the text of a module tells, which is not run.

    Raises:
        UserError: it is no Python, or defines no such name.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{key}: {file} is no Python: {error}") from error
    names = {bound for node in ast.walk(tree) for bound in _bound(node)}
    if names.isdisjoint({name, "*", "__getattr__"}):
        near = difflib.get_close_matches(name, names, 1)
        raise UserError(f"{key}: {path!r}: {file} defines no {name}" + (f"; did you mean {near[0]}?" if near else ""))


def _bound(node: ast.AST) -> list[str]:
    """Names that a piece of a module may give a meaning."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Import() | ast.ImportFrom():
            return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
        case ast.Name(ctx=ast.Store()):
            return [node.id]
    return []


def look_here() -> None:
    """Find modules in the working directory: `python -m …`, as `rl` starts its processes, does; a console script such as `rl` itself does not."""
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append(str(Path.cwd()))


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether the function has a parameter of that name."""
    return name in inspect.signature(function).parameters


def _missing(function: Callable[..., Any], given: int, named: Collection[str]) -> list[str]:
    """Parameters without a default that nothing is given for."""
    parameters = list(inspect.signature(function).parameters.values())
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = [parameter.name for parameter in parameters if parameter.kind in plain][:given]
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        and parameter.name not in {*taken, *named}
    ]


def _module(where: str) -> ModuleType:
    return _file(Path(where).resolve()) if where.endswith(".py") else importlib.import_module(where)


@functools.cache
def _file(file: Path) -> ModuleType:
    """The module that a file is, run once however many settings name it. Its name is its own, whatever other files are called."""
    name = f"prime_rl_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses of it look there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
