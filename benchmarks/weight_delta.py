"""What is left of a version of weights where only changes are told: bf16 copies of fp32 weights after real AdamW steps.

    uv run --group cpu python benchmarks/weight_delta.py --json benchmarks/results/weight_delta_cpu.json
    uv run --group cpu python benchmarks/trainer.py --table                                       # then show it in README.md

The tiny model of the tests learns random tokens; a matrix learns a random linear map. Each step's weights, rounded to bf16, are told by what has
changed since the step before, built again, and compared bit by bit. On a CPU, one thread.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe_machine
from torch import Tensor
from transformers import AutoModelForCausalLM

from prime_rl.transport.delta import Bytes, apply, encode

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from conftest import make_tiny_model

STEPS = 10
RATES = (1e-6, 1e-5)
WORD_BYTES = 2
Weights = list[Tensor]


def tiny_model(rate: float) -> Iterator[Weights]:
    """The tests' Qwen3 of some 100 k parameters, on random tokens."""
    with tempfile.TemporaryDirectory() as scratch:
        model = AutoModelForCausalLM.from_pretrained(make_tiny_model(Path(scratch)), dtype=torch.float32)
    parameters = list(model.parameters())
    tokens = torch.Generator().manual_seed(0)

    def loss() -> Tensor:
        ids = torch.randint(0, model.config.vocab_size, (4, 64), generator=tokens)
        return model(input_ids=ids, labels=ids).loss

    yield from train(parameters, loss, rate)


def matrix(size: int, rate: float) -> Iterator[Weights]:
    """`size` x `size` with a spread of 0.02, as projections have it."""
    rng = torch.Generator().manual_seed(0)
    weight = (0.02 * torch.randn(size, size, generator=rng)).requires_grad_()
    goal = 0.02 * torch.randn(size, size, generator=rng)

    def loss() -> Tensor:
        given = torch.randn(64, size, generator=rng)
        return (given @ weight - given @ goal).square().mean()

    yield from train([weight], loss, rate)


def train(parameters: list[Any], loss: Callable[[], Tensor], rate: float) -> Iterator[Weights]:
    """The weights before the first step, and after each."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)
    yield [parameter.detach().bfloat16() for parameter in parameters]
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        yield [parameter.detach().bfloat16() for parameter in parameters]


def measure(weights: Iterator[Weights]) -> dict[str, float]:
    """Medians over the steps: the share of words that change, of bytes that are told, and CPU seconds a GB of encoding and applying."""
    rows: list[tuple[float, float, float, float]] = []
    before = [raw(tensor) for tensor in next(weights)]
    for step in weights:
        after = [raw(tensor) for tensor in step]
        size = sum(len(each) for each in after)
        changed = sum(np.count_nonzero(a.view("<u2") != b.view("<u2")) for a, b in zip(before, after, strict=True))
        began = time.process_time()
        told = [encode(a, b, WORD_BYTES) for a, b in zip(before, after, strict=True)]
        encoded = time.process_time()
        for data, change in zip(before, told, strict=True):
            apply(data, change)
        applied = time.process_time()
        assert all((a == b).all() for a, b in zip(before, after, strict=True))
        shares = changed * WORD_BYTES / size, sum(map(len, told)) / size
        rows.append((*shares, (encoded - began) / size * 1e9, (applied - encoded) / size * 1e9))
        before = after
    names = ("changed", "told", "encode_seconds_per_gb", "apply_seconds_per_gb")
    return {"bytes": size, **{name: statistics.median(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}}  # fmt: skip


def raw(tensor: Tensor) -> Bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().copy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2048, help="rows and columns of the matrix (2048)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = {}
    for rate in RATES:
        rows[f"tiny model, lr {rate:g}"] = measure(tiny_model(rate))
        rows[f"matrix {arguments.size} x {arguments.size}, lr {rate:g}"] = measure(matrix(arguments.size, rate))
    for name, row in rows.items():
        print(f"{name:<32}" + "  ".join(f"{key} {value:.4g}" for key, value in row.items()))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**describe_machine(), "steps": STEPS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
