"""aime25: another name of `aime2025`."""

from aime2025 import Aime2025Taskset
from benchmark_tasks.local import LocalEnv

__all__ = ["Aime2025Taskset", "LocalEnv"]
