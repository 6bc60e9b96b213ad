"""prime-rl: asynchronous reinforcement learning for language models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prime_rl.api import RLConfig, evaluate, open_run, run, serve

__all__ = ["RLConfig", "evaluate", "open_run", "run", "serve"]


def __getattr__(name: str) -> Any:
    """Import the API when it is used: workers with a Python of their own import this package, too."""
    if name not in __all__:
        raise AttributeError(f"module 'prime_rl' has no attribute {name!r}")
    return getattr(import_module("prime_rl.api"), name)
