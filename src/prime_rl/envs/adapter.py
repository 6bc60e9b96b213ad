"""What a worker asks of an environment, whatever it is written for, and which kind of package it is.

Standard library only: a worker imports what an environment needs when it is loaded, in a Python environment of its own where it has one.
"""

import importlib.metadata
import importlib.util
from typing import Protocol, Self

from prime_rl.envs.ids import LoadError, check_version, find, kind_of
from prime_rl.envs.protocol import EpisodeResult, Run, Setup

VERSIONS = "classic environments run with verifiers 0.1.11 to 0.3.1, those of verifiers.v1 with 0.4.0 alone"
CLASSIC = (
    'is written for the classic verifiers API (load_environment): give it `adapter = "classic"` and `requirements`, the packages of a Python '
    "environment of its own with verifiers 0.1.11 to 0.3.1"
)


class Adapter(Protocol):
    """A loaded environment. It serves between `__aenter__` and `__aexit__`."""

    task_ids: list[str]
    """Durable and unique, in the environment's own order."""
    bounded: bool
    """Whether these are all the tasks there are."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_: object) -> None: ...
    async def run(self, run: Run) -> EpisodeResult:
        """One episode to its end, all of it sampled by the server at `run.base_url`. Failures of the environment or the engine are outcomes, not exceptions.

        Raises:
            Broken: this episode failed of something that every later one would fail of.
        """


def load(setup: Setup) -> Adapter:
    """The environment of a setup, loaded.

    Raises:
        LoadError: it is not there, or cannot be used as it is set up.
    """
    check_version(setup.env_id)
    kind = kind_of(setup.env_id) if setup.adapter == "auto" else setup.adapter
    if kind != "verifiers" and (setup.demonstration or setup.chat):
        wish = "demonstrated to a teacher" if setup.demonstration else "evaluated on APIs by their chat route"
        raise LoadError(f"environment {setup.env_id!r}: tasks of {kind} environments cannot be {wish}")
    if kind == "python":
        from prime_rl.envs.plain import PlainEnv

        return PlainEnv(setup)
    if kind == "classic":
        if not any(importlib.util.find_spec(f"verifiers.{name}") for name in ("legacy", "clients")):
            raise LoadError(f"environment {setup.env_id!r} {CLASSIC}")
        from prime_rl.envs.classic import ClassicEnv

        return ClassicEnv(setup)
    installed = importlib.metadata.version("verifiers")
    if not installed.startswith("0.4."):
        fault = "not found" if find(setup.env_id) is None else "is written for verifiers.v1"
        raise LoadError(
            f"environment {setup.env_id!r} {fault}: its Python environment has verifiers {installed}; {VERSIONS}"
        )
    from prime_rl.envs.verifiers_v1 import VerifiersEnv

    return VerifiersEnv(setup)
