"""wordle: find a word of five letters from the marks that each guess gets. A verifiers (v1) environment package.

    uv run vf-eval wordle --no-push --model MODEL --client.base-url http://localhost:8000/v1

Its environment asks for this project's harness and a local runtime, so that neither a sandbox nor a download is needed.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wordle.taskset import WordleEnv, WordleTaskset

__all__ = ["WordleEnv", "WordleTaskset"]


def __getattr__(name: str) -> Any:
    # verifiers takes seconds to import: `wordle.data` and `wordle.game` must stay usable without it.
    if name in __all__:
        from wordle import taskset

        return getattr(taskset, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
