"""For optimizer tests: small models, gradients that are the same on any number of ranks, and steps on them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from prime_rl.config import TrainerConfig
from prime_rl.config.trainer import OptimConfig
from prime_rl.trainer import training_state
from prime_rl.trainer.optim import ShardedOptimizer, build_optimizer
from prime_rl.trainer.parallel import World, close_world, init_world

STEPS = 4


class Toy(nn.Module):
    """Every kind of parameter: embedding, matrices of several shapes, experts, norm, bias, head."""

    def __init__(self, width: int = 16, experts: int = 5, layers: int = 3) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(24, width)
        self.layers = nn.ModuleList(self._layer(width, experts) for _ in range(layers))
        self.lm_head = nn.Linear(width, 24, bias=False)

    @staticmethod
    def _layer(width: int, experts: int) -> nn.Module:
        stacks = {"gate_up_proj": (experts, width, width), "down_proj": (experts, width, width // 2)}
        return nn.ModuleDict(
            {
                "up": nn.Linear(width, 2 * width + 1, bias=False),
                "down": nn.Linear(2 * width + 1, width),
                "square": nn.Linear(width, width, bias=False),
                "small": nn.Linear(width, 3, bias=False),
                "norm": nn.LayerNorm(width),
                "experts": nn.ParameterDict(
                    {name: nn.Parameter(torch.randn(*shape)) for name, shape in stacks.items()}
                ),
            }
        )


def make_toy(width: int = 16, seed: int = 0) -> Toy:
    torch.manual_seed(seed)
    return Toy(width)


def optim_config(**settings: object) -> OptimConfig:
    return TrainerConfig.model_validate({"optim": settings}).optim


def set_gradients(model: nn.Module, step: int) -> None:
    """Standard normal ones that depend on the step alone."""
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in model.parameters():
        full = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        if isinstance(parameter, DTensor):
            full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = full


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, Tensor]:
    """The parameters after `steps`, whole and on the CPU."""
    for step in steps:
        set_gradients(model, step)
        optimizer.step()
    return parameters(model)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()
        for name, tensor in model.named_parameters()
    }


def start_and_gradients(steps: int = 4) -> Iterator[tuple[str, Tensor, list[Tensor]]]:
    """Name, first value and gradients of every parameter, in double precision."""
    model, gradients = make_toy(), []
    for step in range(steps):
        set_gradients(model, step)
        gradients.append([p.grad.double() for p in model.parameters() if p.grad is not None])
    for (name, parameter), of_steps in zip(model.named_parameters(), zip(*gradients, strict=True), strict=True):
        yield name, parameter.detach().double(), list(of_steps)


def adamw(value: Tensor, gradients: list[Tensor], lr: float, betas: tuple[float, float], decay: float) -> Tensor:
    """The formula."""
    mean, square = torch.zeros_like(value), torch.zeros_like(value)
    for t, gradient in enumerate(gradients, 1):
        mean = betas[0] * mean + (1 - betas[0]) * gradient
        square = betas[1] * square + (1 - betas[1]) * gradient**2
        step = (mean / (1 - betas[0] ** t)) / ((square / (1 - betas[1] ** t)) ** 0.5 + 1e-8)
        value = value * (1 - lr * decay) - lr * step
    return value


def save(model: nn.Module, optimizer: ShardedOptimizer, directory: Path, world: World) -> None:
    training_state.save(training_state.training_state(model, optimizer), directory, world)


def load(model: nn.Module, optimizer: ShardedOptimizer, directory: Path, world: World) -> None:
    training_state.load(training_state.training_state(model, optimizer), directory, world)


def run_rank(out: str, settings: dict[str, Any], replicate: int = 1, checkpoint: str | None = None) -> None:
    """Make four steps on sharded parameters (after a `checkpoint` the last two of them). The full parameters go to
    `out`/parameters.pt, a checkpoint to `out`/state."""
    torch.set_num_threads(1)
    world = init_world("cpu", 60, replicate)
    model = make_toy()
    fully_shard(model, mesh=world.mesh)
    optimizer = build_optimizer(model, optim_config(**settings))
    if checkpoint is not None:
        load(model, optimizer, Path(checkpoint), world)
    else:
        train(model, optimizer, range(STEPS // 2))
        save(model, optimizer, Path(out) / "state", world)
    result = train(model, optimizer, range(STEPS // 2, STEPS))
    if world.is_main:
        torch.save(result, Path(out) / "parameters.pt")
    close_world()
