"""calculator: arithmetic word problems, and a tool that calculates. A verifiers (v1) environment package.

    uv run vf-eval calculator --no-push --model MODEL --client.base-url http://localhost:8000/v1

Its environment asks for this project's harness and a local runtime, so that neither a sandbox nor a download is needed.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calculator.taskset import CalculatorEnv, CalculatorTaskset

__all__ = ["CalculatorEnv", "CalculatorTaskset"]


def __getattr__(name: str) -> Any:
    # verifiers takes seconds to import: `calculator.data` and `calculator.arithmetic` must stay usable without it.
    if name in __all__:
        from calculator import taskset

        return getattr(taskset, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
