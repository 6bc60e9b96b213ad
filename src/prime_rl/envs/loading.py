"""What loading an environment's module takes, whatever it is written for."""

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from prime_rl.envs.adapter import LoadError
from prime_rl.envs.ids import describe, find, module_name


def import_module(env_id: str) -> ModuleType:
    """The module of an environment.

    Raises:
        LoadError: there is none, or it fails.
    """
    module = module_name(env_id)
    if find(env_id) is None:
        raise LoadError(f"environment {env_id!r} not found: there is no Python module {module!r}")
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise LoadError(f"environment {env_id!r} failed to import: {describe(error)}") from error


def keywords(function: Callable[..., Any]) -> list[str]:
    """Names of the keyword arguments that a function or class takes."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return sorted(name for name, one in inspect.signature(function).parameters.items() if one.kind in kinds)


def takes_any(function: Callable[..., Any]) -> bool:
    """Whether it has a `**kwargs`."""
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in inspect.signature(function).parameters.values())


def check_arguments(env_id: str, given: Iterable[str], accepted: Sequence[str]) -> None:
    """Raises LoadError for an argument that the environment does not take."""
    for name in given:
        if name not in accepted:
            near = difflib.get_close_matches(name, accepted, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            if name == "split":
                hint = ", by which the tasks for evaluation are asked for: name in [[eval.environments]] what is to be evaluated (under `rl`: [[orchestrator.eval.environments]]), or evaluate nothing (`--no-eval`)"
            listed = ", ".join(accepted) or "none"
            raise LoadError(f"environment {env_id!r} has no argument {name!r}{hint} (arguments: {listed})")
