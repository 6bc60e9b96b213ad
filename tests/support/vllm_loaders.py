"""Whether a `CopyPlan` loads what vLLM's own weight loaders do: run by tests/unit/inference/test_copy_plan.py in a process of its own."""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model

from conftest import make_tiny_model
from prime_rl.inference.copy_plan import CopyPlan, Staged
from prime_rl.transport.exchange import ALIGNMENT


def staged(shapes: dict[str, torch.Size], seed: int) -> Staged:
    """Random tensors in one buffer, as a worker stages them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {name: -(-shape.numel() * 2 // ALIGNMENT) * ALIGNMENT for name, shape in shapes.items()}
    ranges = torch.zeros(sum(sizes.values()), dtype=torch.uint8).split([*sizes.values()])
    found = []
    for (name, shape), memory in zip(shapes.items(), ranges, strict=True):
        tensor = memory[: shape.numel() * 2].view(torch.bfloat16).view(shape)
        found.append((name, tensor.copy_(torch.randn(shape, generator=generator))))
    return found


def check(directory: Path, first: bool) -> None:
    shapes = {
        name: tensor.shape for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    config = EngineArgs(model=str(directory), dtype="bfloat16", max_model_len=128).create_engine_config()
    with set_current_vllm_config(config), torch.no_grad():
        if first:
            init_distributed_environment(1, 0, f"file://{directory / 'store'}", 0, "gloo")
            initialize_model_parallel(1, 1)
        model: Any = initialize_model(config)
        plan = CopyPlan(model, staged(shapes, 1))
        plan.load(staged(shapes, 2))
        assert plan.exact, "a weight loader does more than copy"
        plan.load(staged(shapes, 3))
        replayed = {name: parameter.clone() for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            parameter.data.fill_(7)
        model.load_weights(iter(staged(shapes, 3)))
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, replayed[name]), name


if __name__ == "__main__":
    root = Path(sys.argv[1])
    # In this order: vLLM makes the group of experts' ranks only if the first model has experts.
    check(make_tiny_model(root / "experts", experts=4, tied=False), first=True)
    check(make_tiny_model(root / "dense"), first=False)
