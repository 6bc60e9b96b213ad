"""kuhn-poker: two agents play Kuhn poker, and both learn. A verifiers (v1) environment package.

    uv run vf-eval kuhn-poker --no-push --model MODEL --client.base-url http://localhost:8000/v1

Its environment asks for this project's harness and a local runtime, so that neither a sandbox nor a download is needed.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kuhn_poker.taskset import KuhnPokerEnv, KuhnPokerTaskset

__all__ = ["KuhnPokerEnv", "KuhnPokerTaskset"]


def __getattr__(name: str) -> Any:
    # verifiers takes seconds to import: `kuhn_poker.game` must stay usable without it.
    if name in __all__:
        from kuhn_poker import taskset

        return getattr(taskset, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
