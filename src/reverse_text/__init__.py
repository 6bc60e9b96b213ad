"""reverse-text: reverse a short text character by character. A verifiers (v1) environment package."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reverse_text.taskset import ReverseTextTaskset

__all__ = ["ReverseTextTaskset"]


def __getattr__(name: str) -> Any:
    # verifiers takes seconds to import: `reverse_text.data` must stay usable without it.
    if name == "ReverseTextTaskset":
        from reverse_text.taskset import ReverseTextTaskset

        return ReverseTextTaskset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
