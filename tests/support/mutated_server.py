"""`inference` with a worker that skips what makes reloads right on CPU: `python -m support.mutated_server @ inference.toml`.

The file that `$TEST_SKIPPED_FUNCTIONS` leads to names functions of `prime_rl.inference.compat` that do nothing while it names them. The engine
must be forked (`cpu.fork_engine`), so that it has them from here.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from prime_rl.entrypoints import inference
from prime_rl.inference import compat

SKIP = "TEST_SKIPPED_FUNCTIONS"


def skippable(function: Callable[[torch.nn.Module], None], file: Path) -> Callable[[torch.nn.Module], None]:
    """`function`, or nothing while the file names it."""

    def run(model: torch.nn.Module) -> None:
        if function.__name__ not in file.read_text().split():
            function(model)

    return run


if __name__ == "__main__":
    skip = Path(os.environ[SKIP])
    compat.repack_tied_heads = skippable(compat.repack_tied_heads, skip)
    compat.forget_packed_experts = skippable(compat.forget_packed_experts, skip)
    inference.main()
