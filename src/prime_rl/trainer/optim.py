"""The optimizer that a config asks for, gradient clipping, and the learning rate as a pure function of the step."""

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from prime_rl.trainer import optim_int8
from prime_rl.trainer.muon import is_hidden_matrix, muon_part
from prime_rl.trainer.optim_states import StateSpec
from prime_rl.trainer.parallel import SHARD
from prime_rl.trainer.sharded_optimizer import Part, ShardedOptimizer, adamw, sgd

if TYPE_CHECKING:
    from prime_rl.config.trainer import SGD, AdamW, Muon, OptimConfig, SchedulerConfig

_EPS = 1e-8
_MEANS = StateSpec("exp_avg"), StateSpec("exp_avg_sq")


def build_optimizer(model: nn.Module, config: "OptimConfig") -> ShardedOptimizer:
    """The optimizer of a model's float32 masters.

    They must be float32: at reinforcement-learning rates (1e-6) more than 95 % of bfloat16 weights would not move at all.

    Raises:
        UserError: a package that the config needs is missing, or the host has not enough memory.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if config.type == "adamw":
        parts = _adamw_parts([parameter for _, parameter in named], config)
    elif config.type == "sgd":
        parts = [_sgd_part([parameter for _, parameter in named], config)]
    else:
        parts = _muon_parts(named, config)
    return ShardedOptimizer(parts, offload=config.offload)


def state_bytes_per_parameter(config: "OptimConfig", hidden: float = 0.0) -> float:
    """Bytes of optimizer states on the device for each parameter, between steps.

    Args:
        hidden: Share of the parameters that lie in hidden matrices (`muon.is_hidden_matrix`); with 0 the figure is an upper bound for Muon.
    """
    if config.offload:
        return 0.0
    if config.type == "sgd":
        return 4.0 if config.momentum else 0.0
    if config.type == "muon":
        return 4.0 * hidden + 8.0 * (1 - hidden)
    return 2 * (1 + 4 / optim_int8.BLOCK) if config.state == "int8" else 8.0


def _adamw_settings(config: "AdamW | Muon") -> dict[str, Any]:
    betas = config.betas1, config.betas2
    return {"lr": config.lr, "betas": betas, "eps": _EPS, "weight_decay": config.weight_decay}


def _adamw_parts(parameters: list[nn.Parameter], config: "AdamW") -> list[Part]:
    settings = _adamw_settings(config)
    if config.state == "float32":
        return [Part(parameters, settings, _MEANS, adamw)]
    optim_int8.check_installed()
    quantized = [parameter for parameter in parameters if optim_int8.quantizable(parameter)]
    exact = [parameter for parameter in parameters if not optim_int8.quantizable(parameter)]
    return [
        Part(quantized, settings, optim_int8.STATES, optim_int8.adamw_int8),
        Part(exact, settings, _MEANS, adamw),
    ]


def _sgd_part(parameters: list[nn.Parameter], config: "SGD") -> Part:
    settings = config.model_dump(include={"lr", "weight_decay", "momentum", "nesterov"})
    return Part(parameters, settings, (StateSpec("momentum_buffer"),) if config.momentum else (), sgd)


def _muon_parts(named: list[tuple[str, nn.Parameter]], config: "Muon") -> list[Part]:
    settings = config.model_dump(include={"lr", "weight_decay", "momentum"})
    hidden = [(name, parameter) for name, parameter in named if is_hidden_matrix(name, parameter)]
    others = [parameter for name, parameter in named if not is_hidden_matrix(name, parameter)]
    return [
        muon_part(hidden, settings),
        Part(others, _adamw_settings(config), _MEANS, adamw),
    ]


def learning_rate(config: "SchedulerConfig", lr: float, step: int, max_steps: int | None) -> float:
    """The learning rate of step `step` (0-based).

    Warm-up rises linearly and reaches `lr` at step `warmup_steps` - 1 (its first step is lr / warmup_steps, never zero). All but `constant` end:
    where they have steps to fall over, the last one, max_steps - 1, runs at `min_lr`, so that they need `max_steps` (the config checks it). The share of the way from `min_lr` to
    `lr`, as a function of the decay's progress t in [0, 1]: 1 - t (linear), 1 - sqrt(t) (Hägele et al. 2024), or (1 + cos πt) / 2.
    """
    if step < config.warmup_steps:
        return lr * (step + 1) / config.warmup_steps
    if config.type == "constant":
        return lr
    assert max_steps is not None
    decay_steps = max_steps - config.warmup_steps if config.type == "cosine" else config.decay_steps
    progress = min(max((step + 1 - (max_steps - decay_steps)) / max(decay_steps, 1), 0.0), 1.0)
    shape = config.shape if config.type == "wsd" else config.type
    weight = {
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }[shape]
    return config.min_lr + (lr - config.min_lr) * weight


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Every part's learning rate for the next update."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(model: nn.Module, max_norm: float | None) -> Tensor:
    """Scale all gradients so that their joint 2-norm is at most `max_norm`. Returns the norm before, [] on the device; reads nothing back.

    Works on what each rank holds: operators on sharded tensors cost the host more, one by one, than all of this costs the device.
    """
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    norm = torch.nn.utils.get_total_norm(local, foreach=True)
    if grads and isinstance(grads[0], DTensor):
        squared = norm.square()
        dist.all_reduce(squared, group=grads[0].device_mesh.get_group(SHARD))
        norm = squared.sqrt()
    if max_norm is not None:
        torch._foreach_mul_(local, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
