"""What a worker asks of an environment, whatever it is written for, and which kind of package it is.

Standard library only: a worker imports what an environment needs after its hello, in a Python environment of its own where it has one.
"""

import difflib
import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType, TracebackType
from typing import Any, Protocol, Self

from prime_rl.envs.ids import WrongVersion, check_version, describe, find, kind_of, module_name
from prime_rl.envs.protocol import EpisodeResult, Setup
from prime_rl.importing import quick_imports

VERSIONS = "classic environments run with verifiers 0.1.11 to 0.3.1, those of verifiers.v1 with 0.4.0 alone"
CLASSIC = (
    'is written for the classic verifiers API (load_environment): give it `adapter = "classic"` and `requirements`, the packages of a Python '
    "environment of its own with verifiers 0.1.11 to 0.3.1"
)


class LoadError(Exception):
    """The environment cannot be loaded; the message is one line that names the cause."""


class Adapter(Protocol):
    """A loaded environment. It serves between `__aenter__` and `__aexit__`."""

    renderer: str
    """How its conversations become tokens, for people."""
    arguments: list[str]
    """Names that `args` accepts."""
    task_ids: list[str]
    """Durable and unique, in the environment's own order. Empty where it is endless."""
    stream: str
    """Name of an endless environment's tasks, before their index ("": they are listed)."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    async def run(
        self, task_index: int, sampling: dict[str, Any], policy_version: int, episode_id: str, base_url: str
    ) -> EpisodeResult:
        """One episode to its end, all of it sampled by the server at `base_url`. Failures of the environment or the engine are outcomes, not exceptions."""


def load(setup: Setup) -> Adapter:
    """The environment of a setup, loaded.

    Raises:
        LoadError: it is not there, or cannot be used as it is set up.
    """
    try:
        check_version(setup.env_id)
    except WrongVersion as error:
        raise LoadError(str(error)) from error
    kind = kind_of(setup.env_id) if setup.adapter == "auto" else setup.adapter
    if kind == "python":
        with quick_imports():
            from prime_rl.envs.plain import PlainEnv

        return PlainEnv(setup)
    if kind == "classic":
        if not any(importlib.util.find_spec(f"verifiers.{name}") for name in ("legacy", "clients")):
            raise LoadError(f"environment {setup.env_id!r} {CLASSIC}")
        with quick_imports():
            from prime_rl.envs.classic import ClassicEnv

        return ClassicEnv(setup)
    installed = importlib.metadata.version("verifiers")
    if not installed.startswith("0.4."):
        fault = "not found" if find(setup.env_id) is None else "is written for verifiers.v1"
        raise LoadError(
            f"environment {setup.env_id!r} {fault}: its Python environment has verifiers {installed}; {VERSIONS}"
        )
    with quick_imports():
        from prime_rl.envs.verifiers_v1 import VerifiersEnv

    return VerifiersEnv(setup)


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
