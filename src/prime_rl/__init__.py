"""prime-rl: asynchronous reinforcement learning for language models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prime_rl.api import Run, Server, evaluate, open_run, run, serve
    from prime_rl.config import RLConfig

__all__ = ["RLConfig", "Run", "Server", "evaluate", "open_run", "run", "serve"]


def __getattr__(name: str) -> Any:
    """Import the API when it is used: workers with an environment of their own import this package, too."""
    if name not in __all__:
        raise AttributeError(f"module 'prime_rl' has no attribute {name!r}")
    from prime_rl import api

    return getattr(api, name)
