"""Imports: of large packages, and of the user's own functions, named in a config by import path."""

import functools
import gc
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from prime_rl.errors import UserError


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import large packages without the garbage collector, which takes a quarter of their time and finds nothing."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def load_function(
    path: str, args: Mapping[str, Any], positional: int, key: str, offered: Collection[str] = ()
) -> Callable[..., Any]:
    """Return the function at `path`: `module:name`, or `file.py:name`.
    Raises UserError: there is none, or it does not take these arguments.

    Args:
        positional: How many positional arguments it will be called with, beside `args`.
        key: The setting that names it, for errors.
        offered: More keyword arguments, which it is called with if it takes them.
    """
    where, _, name = path.rpartition(":")
    look_here()
    try:
        module = _file(Path(where).resolve()) if where.endswith(".py") else importlib.import_module(where)
        function: Callable[..., Any] = getattr(module, name)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise UserError(
            f"{key}: {path!r} (module:name or file.py:name) cannot be imported: {type(error).__name__}: {error}"
        ) from error
    try:
        signature = inspect.signature(function)
        signature.bind(*range(positional), **{name: None for name in offered if name in signature.parameters}, **args)
    except (TypeError, ValueError) as error:  # ValueError: of one that is not written in Python
        raise UserError(f"{key}: {path!r} does not take its arguments: {error}") from error
    return function


def look_here() -> None:
    """Find modules in the working directory, as `python -m …` does and a console script such as `rl` does not."""
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append(str(Path.cwd()))


@functools.cache
def _file(file: Path) -> ModuleType:
    """Return a file's module, run once however many settings name it, under a name that no other file's has."""
    name = re.sub(r"\W", "_", str(file))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses of it look there
    spec.loader.exec_module(module)
    return module
