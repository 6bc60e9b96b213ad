"""The optimizer that a config asks for, gradient clipping, and the learning rate as a pure function of the step.

Muon (Jordan et al. 2024) is steepest descent for matrices under the spectral norm, on momentum that is orthogonalized as a whole. Rows of a matrix
lie on several ranks, so matrices of one shape are batched: every rank sends its rows of each to the rank that owns it, owners orthogonalize, and the
rows go back. While a batch is orthogonalized the next one travels. Experts [E, rows, columns] are whole on their rank.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from prime_rl.trainer.parallel import SHARD
from prime_rl.trainer.sharded_optimizer import (
    Chunk,
    Part,
    Piece,
    Settings,
    ShardedOptimizer,
    Steps,
    adamw,
    has_grad,
    local_part,
    sgd,
)

if TYPE_CHECKING:
    from prime_rl.config.trainer import SGD, AdamW, Muon, OptimConfig, SchedulerConfig


STATES = ("momentum_buffer",)
_TOGETHER = 1 << 24  # elements that one rank orthogonalizes at a time
_ITERATIONS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315  # Jordan's quintic: singular values in (0, 1] end up between about 0.7 and 1.2
_SMALLEST_NORM = 1e-30


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon's own rule updates a parameter: a matrix, or a stack of experts' matrices, that is neither embedding nor head."""
    if "embed" in name or "lm_head" in name:
        return False
    return parameter.ndim == 2 or (parameter.ndim == 3 and "experts" in name)


def muon_part(named: Iterable[tuple[str, nn.Parameter]], settings: dict[str, float | bool]) -> Part:
    """The part of an optimizer that updates the hidden matrices `named`.

    Args:
        settings: lr, weight_decay, momentum.
    """
    matrices: dict[torch.Size, list[nn.Parameter]] = {}
    experts, halves = [], set()
    for name, parameter in named:
        if parameter.ndim == 2:
            matrices.setdefault(parameter.shape, []).append(parameter)
        else:
            experts.append(parameter)
            if "gate_up" in name:
                halves.add(parameter)
    batches = list(_deal(matrices))
    chunks: list[list[Piece]] = [[_whole(parameter) for parameter in batch.parameters] for batch in batches]
    chunks += [[piece] for parameter in experts for piece in _by_expert(parameter)]
    parameters = [parameter for batch in batches for parameter in batch.parameters] + experts

    def rule(settings: Settings, items: Iterable[Chunk], steps: Steps) -> None:
        walk = iter(items)
        _update_matrices(settings, walk, batches)
        for chunk in walk:
            for piece, (momentum,) in chunk:
                if has_grad(piece.parameter):
                    _update_experts(settings, piece, momentum, 2 if piece.parameter in halves else 1)

    return Part(parameters, dict(settings), STATES, rule, chunks)


def orthogonalize(x_BRC: Tensor) -> Tensor:
    """Roughly U Vᵀ of each matrix's singular value decomposition U S Vᵀ, by Newton–Schulz iterations in the type of the input.

    The result's singular values are within about [0.7, 1.2] where those of the input are above a hundredth of its Frobenius norm; smaller ones
    grow by 3.4 an iteration. A zero matrix stays zero. Costs 5 · (4 s² l + 2 s³) floating-point operations for sides s <= l.
    """
    tall = x_BRC.shape[-2] > x_BRC.shape[-1]
    x_BSL = x_BRC.mT if tall else x_BRC
    exact = torch.promote_types(x_BSL.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x_BSL, dim=(-2, -1), keepdim=True, dtype=exact)
    x_BSL = x_BSL * norm.clamp(min=_SMALLEST_NORM).reciprocal().to(x_BSL.dtype)
    for _ in range(_ITERATIONS):
        gram_BSS = x_BSL @ x_BSL.mT
        polynomial_BSS = torch.baddbmm(gram_BSS, gram_BSS, gram_BSS, beta=_B, alpha=_C)
        x_BSL = torch.baddbmm(x_BSL, polynomial_BSS, x_BSL, beta=_A)
    return x_BSL.mT if tall else x_BSL


def update_scale(rows: int, columns: int) -> float:
    """What an orthogonalized update is multiplied by, beside the learning rate.

    0.2 sqrt(max(rows, columns)): the root mean square is then that of a typical AdamW update (Liu et al. 2025), whose
    learning rates serve.
    """
    return 0.2 * math.sqrt(max(rows, columns))


@dataclass(frozen=True)
class _Batch:
    """Matrices of one shape, in the order of their `owners`: places among the `ranks` that share them."""

    parameters: list[nn.Parameter]
    owners: list[int]
    ranks: int

    @property
    def counts(self) -> list[int]:
        """Matrices of each owner."""
        return [self.owners.count(rank) for rank in range(self.ranks)]

    def live(self) -> "_Batch":
        """Those that have a gradient, which every rank agrees on."""
        pairs = [pair for pair in zip(self.parameters, self.owners, strict=True) if has_grad(pair[0])]
        return _Batch([parameter for parameter, _ in pairs], [owner for _, owner in pairs], self.ranks)


@dataclass(frozen=True)
class _Sent:
    """A batch on its way to the owners: `inbox` is complete once `arrival` is."""

    batch: _Batch
    inbox: Tensor
    arrival: dist.Work | None


def _deal(matrices: dict[torch.Size, list[nn.Parameter]]) -> Iterator[_Batch]:
    """Every rank owns as many matrices of a batch as the others; those that are left over go where least was to do so far."""
    loads: list[float] = []
    for shape in sorted(matrices, key=_cost, reverse=True):
        group = matrices[shape]
        ranks = _ranks(group[0])
        loads = loads or [0.0] * ranks
        together = ranks * max(1, _TOGETHER // shape.numel())
        for start in range(0, len(group), together):
            run = group[start : start + together]
            idlest = sorted(range(ranks), key=loads.__getitem__)
            owners = sorted(idlest[i % ranks] for i in range(len(run)))
            for owner in owners:
                loads[owner] += _cost(shape)
            yield _Batch(run, owners, ranks)


def _cost(shape: torch.Size) -> float:
    short, long = sorted(shape)
    return 4.0 * short**2 * long + 2.0 * short**3


def _update_matrices(settings: Settings, walk: Iterator[Chunk], batches: list[_Batch]) -> None:
    """One batch travels while the one before it is orthogonalized."""
    ahead: _Sent | None = None
    for batch in batches:
        chunk, live = next(walk), batch.live()
        sent = (
            _send(settings, live, [item for item in chunk if has_grad(item.piece.parameter)]) if live.owners else None
        )
        if ahead is not None:
            _finish(settings, ahead)
        ahead = sent
    if ahead is not None:
        _finish(settings, ahead)


def _send(settings: Settings, batch: _Batch, chunk: Chunk) -> _Sent:
    grads = [piece.grad() for piece, _ in chunk]
    outbox = torch.cat(_directions(settings, grads, [states[0] for _, states in chunk]))
    if batch.ranks == 1:
        return _Sent(batch, outbox, None)
    group, rank = _group(batch.parameters[0])
    rows, columns = batch.parameters[0].shape
    mine = batch.counts[rank] * columns
    inbox = outbox.new_empty(mine * rows)
    arrival = dist.all_to_all_single(
        inbox,
        outbox,
        [mine * (end - start) for start, end in _rows(rows, batch.ranks)],
        [count * (outbox.numel() // len(batch.parameters)) for count in batch.counts],
        group=group,
        async_op=True,
    )
    return _Sent(batch, inbox, arrival)


def _finish(settings: Settings, sent: _Sent) -> None:
    batch, inbox = sent.batch, sent.inbox
    rows, columns = batch.parameters[0].shape
    locals_ = [local_part(parameter) for parameter in batch.parameters]
    if sent.arrival is None:
        update = orthogonalize(inbox.view(-1, rows, columns))
    else:
        sent.arrival.wait()  # bounded: by the process group's timeout; on CUDA the stream waits, not the host
        update = _exchange_back(batch, inbox, locals_[0].shape[0])
    scale = settings["lr"] * update_scale(rows, columns)
    torch._foreach_mul_(locals_, 1 - settings["lr"] * settings["weight_decay"])
    torch._foreach_add_(
        locals_, list(update.to(torch.float32, memory_format=torch.contiguous_format).unbind()), alpha=-scale
    )


def _exchange_back(batch: _Batch, inbox: Tensor, local_rows: int) -> Tensor:
    """Orthogonalize what this rank owns, and get this rank's rows of all: [matrices, local_rows, columns]."""
    group, rank = _group(batch.parameters[0])
    rows, columns = batch.parameters[0].shape
    spans, count = _rows(rows, batch.ranks), batch.counts[rank]
    sizes = [count * (end - start) * columns for start, end in spans]
    parts = [part.view(count, -1, columns) if count else part for part in inbox.split(sizes)]
    if count:
        full = orthogonalize(torch.cat(parts, dim=1))
        outbox = torch.cat([full[:, start:end].reshape(-1) for start, end in spans])
    else:
        outbox = inbox
    update = inbox.new_empty(len(batch.parameters), local_rows, columns)
    dist.all_to_all_single(
        update.view(-1), outbox, [other * local_rows * columns for other in batch.counts], sizes, group=group
    )
    return update


def _update_experts(settings: Settings, piece: Piece, momentum: Tensor, parts: int) -> None:
    """Of consecutive experts; the rows of each are `parts` matrices of equal size (gate and up in one)."""
    _, rows, columns = piece.parameter.shape
    value = piece.value()
    (direction,) = _directions(settings, [piece.grad()], [momentum])
    update = orthogonalize(direction.view(-1, rows // parts, columns))
    scale = settings["lr"] * update_scale(rows // parts, columns)
    value.mul_(1 - settings["lr"] * settings["weight_decay"])
    value.add_(update.reshape(-1), alpha=-scale)


def _directions(settings: Settings, grads: list[Tensor], momenta: list[Tensor]) -> list[Tensor]:
    """Bring the momenta up to date; the directions to orthogonalize, in the type that is computed in."""
    torch._foreach_lerp_(momenta, grads, 1 - settings["momentum"])
    ahead = torch._foreach_lerp(grads, momenta, settings["momentum"])
    dtype = torch.bfloat16 if momenta[0].is_cuda else torch.float32
    return [direction.to(dtype) for direction in ahead]


def _whole(parameter: nn.Parameter) -> Piece:
    return Piece(parameter, 0, local_part(parameter).numel())


def _by_expert(parameter: nn.Parameter) -> Iterator[Piece]:
    """This rank's experts, in runs that are orthogonalized at a time."""
    local = local_part(parameter)
    one = parameter.shape[1] * parameter.shape[2]
    run = one * max(1, _TOGETHER // one)
    for start in range(0, local.numel(), run):
        yield Piece(parameter, start, min(start + run, local.numel()))


def _shard_dimension(parameter: nn.Parameter) -> int | None:
    """The dimension of the mesh over which a parameter's rows are divided among several ranks."""
    if not isinstance(parameter, DTensor):
        return None
    sharded = [i for i, placement in enumerate(parameter.placements) if placement.is_shard()]
    assert all(parameter.placements[i] == Shard(0) for i in sharded), "Muon expects rows to be sharded"
    several = [i for i in sharded if parameter.device_mesh.size(i) > 1]
    assert len(several) <= 1, "Muon expects rows to be sharded over one dimension of the mesh"
    return several[0] if several else None


def _ranks(parameter: nn.Parameter) -> int:
    dimension = _shard_dimension(parameter)
    return 1 if dimension is None else parameter.device_mesh.size(dimension)  # type: ignore[attr-defined]


def _group(parameter: nn.Parameter) -> tuple[dist.ProcessGroup, int]:
    """The ranks that share a parameter's rows, and this one's place among them."""
    dimension = _shard_dimension(parameter)
    assert isinstance(parameter, DTensor)
    assert dimension is not None
    return parameter.device_mesh.get_group(dimension), parameter.device_mesh.get_local_rank(dimension)


def _rows(rows: int, ranks: int) -> list[tuple[int, int]]:
    """The rows [start, end) of each rank, as FSDP2 divides them: equal runs, the last ones short or empty."""
    run = -(-rows // ranks)
    return [(min(rank * run, rows), min((rank + 1) * run, rows)) for rank in range(ranks)]


_EPS = 1e-8
_MEANS = "exp_avg", "exp_avg_sq"


def build_optimizer(model: nn.Module, config: "OptimConfig") -> ShardedOptimizer:
    """The optimizer of a model's float32 masters.

    They must be float32: at reinforcement-learning rates (1e-6) more than 95 % of bfloat16 weights would not move at all.

    Raises:
        UserError: the host has not enough memory.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if config.type == "adamw":
        parts = [Part([parameter for _, parameter in named], _adamw_settings(config), _MEANS, adamw)]
    elif config.type == "sgd":
        parts = [_sgd_part([parameter for _, parameter in named], config)]
    else:
        parts = _muon_parts(named, config)
    return ShardedOptimizer(parts, offload=config.offload)


def _adamw_settings(config: "AdamW | Muon") -> dict[str, Any]:
    betas = config.betas1, config.betas2
    return {"lr": config.lr, "betas": betas, "eps": _EPS, "weight_decay": config.weight_decay}


def _sgd_part(parameters: list[nn.Parameter], config: "SGD") -> Part:
    settings = config.model_dump(include={"lr", "weight_decay", "momentum", "nesterov"})
    return Part(parameters, settings, STATES if config.momentum else (), sgd)


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
