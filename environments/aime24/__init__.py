"""aime24: another name of `aime2024`."""

from aime2024 import Aime2024Taskset
from benchmark_tasks.local import LocalEnv

__all__ = ["Aime2024Taskset", "LocalEnv"]
