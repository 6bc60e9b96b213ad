"""calculator: arithmetic word problems, and a tool that calculates. A verifiers (v1) environment package.

    uv run vf-eval calculator --no-push --model MODEL --client.base-url http://localhost:8000/v1

The package brings its environment and harness along, so that neither a sandbox nor a download is needed.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calculator.taskset import CalculatorEnv, CalculatorTaskset
    from prime_rl.envs.harness import ChatHarness

__all__ = ["CalculatorEnv", "CalculatorTaskset", "ChatHarness"]


def __getattr__(name: str) -> Any:
    # verifiers takes seconds to import: `calculator.data` and `calculator.arithmetic` must stay usable without it.
    if name == "ChatHarness":
        from prime_rl.envs.harness import ChatHarness

        return ChatHarness
    if name in __all__:
        from calculator import taskset

        return getattr(taskset, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
