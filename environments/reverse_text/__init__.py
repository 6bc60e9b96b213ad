"""reverse-text: reverse a short text character by character. A verifiers (v1) environment package.

    uv run vf-eval reverse-text --no-push --model MODEL --client.base-url http://localhost:8000/v1

Its environment asks for this project's harness and a local runtime, so that neither a sandbox nor a download is needed.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reverse_text.taskset import ReverseTextEnv, ReverseTextTaskset

__all__ = ["ReverseTextEnv", "ReverseTextTaskset"]


def __getattr__(name: str) -> Any:
    # verifiers takes seconds to import: `reverse_text.data` must stay usable without it.
    if name in __all__:
        from reverse_text import taskset

        return getattr(taskset, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
