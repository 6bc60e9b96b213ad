"""aime25: another name of `aime2025`."""

from aime2025 import Aime2025Taskset

__all__ = ["Aime2025Taskset"]
