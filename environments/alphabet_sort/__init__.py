"""alphabet-sort: sort people by first or last name, then again with more people. A verifiers (v1) environment package.

    uv run vf-eval alphabet-sort --no-push --model MODEL --client.base-url http://localhost:8000/v1

Its environment asks for this project's harness and a local runtime, so that neither a sandbox nor a download is needed.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alphabet_sort.taskset import AlphabetSortEnv, AlphabetSortTaskset

__all__ = ["AlphabetSortEnv", "AlphabetSortTaskset"]


def __getattr__(name: str) -> Any:
    # verifiers takes seconds to import: `alphabet_sort.data` must stay usable without it.
    if name in __all__:
        from alphabet_sort import taskset

        return getattr(taskset, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
