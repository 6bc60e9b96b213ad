"""The optimizer that a config asks for, gradient clipping, and the learning rate as a pure function of the step.

One optimizer for groups of parameters, each with a rule of its own; every rank updates its own rows. States lie one
behind the other in flat buffers, on the device or in pinned host memory. Those in host memory visit the device in
chunks while the update runs: one chunk comes in, one is in use, one goes out, on streams of their own.

Muon (Jordan et al. 2024) is steepest descent for matrices under the spectral norm, on momentum orthogonalized as
a whole. Rows of a matrix lie on several ranks, so matrices of one shape are batched: every rank sends its rows of each
to its owner, owners orthogonalize, and the rows go back. While a batch is orthogonalized the next one travels.
Experts [E, rows, columns] are whole on their rank.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from prime_rl.config.trainer import OptimConfig, SchedulerConfig
from prime_rl.errors import UserError
from prime_rl.trainer.parallel import SHARD, local_part, page_lock, rows_of_ranks

CHUNK = 1 << 24  # elements of the parameters whose states visit the device together: 64 MiB of each float32 state
_UNDER_WAY = 3
_ALIGNED = 1024  # elements: where a parameter's states begin, so that kernels read them in wide words
_TOGETHER = 1 << 24  # elements that one rank orthogonalizes at a time
_A, _B, _C = 3.4445, -4.7750, 2.0315  # Jordan's quintic: singular values in (0, 1] end up between about 0.7 and 1.2

Settings = Mapping[str, Any]
Steps = Mapping[nn.Parameter, Tensor]


class Elements(NamedTuple):
    """Elements [start, end) of this rank's part of a parameter or its gradient, counted row by row: views, flat."""

    parameter: nn.Parameter
    start: int
    end: int

    def value(self) -> Tensor:
        return local_part(self.parameter).view(-1)[self.start : self.end]

    def grad(self) -> Tensor:
        assert self.parameter.grad is not None, "every parameter has a gradient"
        return local_part(self.parameter.grad).reshape(-1)[self.start : self.end]


# Elements and their states, flat, on the device: what is written into them is kept.
Chunk = list[tuple[Elements, list[Tensor]]]


def in_chunks(parameters: Sequence[nn.Parameter], size: int) -> list[list[Elements]]:
    """All parameters in chunks of about `size` elements, which may begin and end within a parameter."""
    chunks: list[list[Elements]] = [[]]
    room = size
    for parameter in parameters:
        start, total = 0, local_part(parameter).numel()
        while start < total:
            end = min(start + room, total)
            chunks[-1].append(Elements(parameter, start, end))
            room -= _aligned(end - start)
            start = end
            if room <= 0:
                chunks.append([])
                room = size
    return [chunk for chunk in chunks if chunk]


class ParameterGroup:
    """Parameters on one device that one rule updates, and their float32 states `names`, zero at first.

    `settings` are the numbers of the rule, which updates chunks in place, given the updates counted for each parameter
    (this one included) as [] on its device. `chunks`: what is updated together, in the order of `parameters` (None:
    elements may be updated one by one). With `host` the states lie in pinned host memory, and are on the device only
    while they are updated. Raises UserError if there is not as much.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        settings: dict[str, Any],
        names: Sequence[str],
        rule: Callable[[Settings, Iterable[Chunk], Steps], None],
        chunks: list[list[Elements]] | None = None,
        *,
        host: bool,
    ) -> None:
        self.parameters, self.settings, self.rule = parameters, settings, rule
        self._names, self._host = names, host
        self.chunks = chunks or in_chunks(parameters, CHUNK if host else 1 << 62)
        self._offsets, total = dict[nn.Parameter, int](), 0
        for parameter in parameters:
            self._offsets[parameter] = total
            total += _aligned(local_part(parameter).numel())
        self._device = local_part(parameters[0]).device
        self._buffers = [torch.zeros(total, device="cpu" if host else self._device) for _ in names]
        if not host:
            self._resident = [self._items(chunk, self._kept(chunk)) for chunk in self.chunks]
            return
        self._module = torch.get_device_module(self._device)  # torch.cpu's streams do nothing
        self._inbound, self._outbound = self._module.Stream(self._device), self._module.Stream(self._device)
        if self._device.type == "cuda":
            for buffer in self._buffers:
                if page_lock(buffer, owner=self):
                    raise UserError(
                        f"optim.offload: {buffer.nbytes / 2**30:.1f} GiB of host memory cannot be pinned: free "
                        "some, raise `ulimit -l`, or leave it out"
                    )

    def of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The states of this rank's rows by name: views of the buffers, to be used after `settle`."""
        local, offset = local_part(parameter), self._offsets[parameter]
        views = (buffer[offset : offset + local.numel()].view(local.shape) for buffer in self._buffers)
        return dict(zip(self._names, views, strict=True))

    def walk(self) -> Iterator[Chunk]:
        """Yield the chunks in order, each to be updated by the current stream before the next one is asked for."""
        if not self._host:
            yield from self._resident
            return
        computing = self._module.current_stream(self._device)
        self._inbound.wait_stream(computing)  # which used the slots' memory until now
        self._inbound.wait_stream(self._outbound)  # what left in the last step has arrived before it comes back
        slots = [self._slot() for _ in self.chunks[:_UNDER_WAY]]
        arrived = [self._bring(*visit) for visit in zip(self.chunks, slots, strict=False)]
        for i, chunk in enumerate(self.chunks):
            slot = slots[i % _UNDER_WAY]
            computing.wait_event(arrived[i])
            yield self._items(chunk, slot)
            self._outbound.wait_stream(computing)
            with self._module.stream(self._outbound):
                for inside, outside in zip(slot, self._kept(chunk), strict=True):
                    outside.copy_(inside[: len(outside)], non_blocking=True)
            if i + _UNDER_WAY < len(self.chunks):
                self._inbound.wait_stream(self._outbound)
                arrived.append(self._bring(self.chunks[i + _UNDER_WAY], slot))

    def settle(self) -> None:
        """Wait until states that are on their way to host memory have arrived there."""
        if self._host and self._device.type == "cuda":
            self._outbound.synchronize()

    def _items(self, chunk: list[Elements], states: list[Tensor]) -> Chunk:
        """A chunk's parameters, each with its own part of the chunk's `states`."""
        items, begin = Chunk(), self._offsets[chunk[0].parameter] + chunk[0].start
        for elements in chunk:
            start, end = (self._offsets[elements.parameter] + edge - begin for edge in (elements.start, elements.end))
            items.append((elements, [state[start:end] for state in states]))
        return items

    def _kept(self, chunk: list[Elements]) -> list[Tensor]:
        """A chunk's states in the buffers, where they lie together."""
        first, last = chunk[0], chunk[-1]
        kept = slice(self._offsets[first.parameter] + first.start, self._offsets[last.parameter] + last.end)
        return [buffer[kept] for buffer in self._buffers]

    def _slot(self) -> list[Tensor]:
        """Room on the device for the longest chunk."""
        longest = max(len(self._kept(chunk)[0]) for chunk in self.chunks)
        slot = [torch.empty(longest, device=self._device) for _ in self._names]
        for tensor in slot if self._device.type == "cuda" else ():
            tensor.record_stream(self._inbound)
            tensor.record_stream(self._outbound)
        return slot

    def _bring(self, chunk: list[Elements], slot: list[Tensor]) -> Any:
        """Begin to copy a chunk's states into `slot`; return the event of their arrival."""
        with self._module.stream(self._inbound):
            for inside, outside in zip(slot, self._kept(chunk), strict=True):
                inside[: len(outside)].copy_(outside, non_blocking=True)
        return self._inbound.record_event()


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNED) * _ALIGNED


class ShardedOptimizer(torch.optim.Optimizer):
    """Update this rank's rows of float32 parameters, all of which have gradients. States exist from the start."""

    def __init__(self, groups: Sequence[ParameterGroup]) -> None:
        super().__init__([{"params": group.parameters, **group.settings} for group in groups], {})
        self._groups = groups
        for group in groups:
            for parameter in group.parameters:
                self.state[parameter] = {"step": torch.zeros((), device=parameter.device), **group.of(parameter)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter. Every rank calls it; waits for nothing on the host."""
        for group, settings in zip(self._groups, self.param_groups, strict=True):
            steps = {parameter: self.state[parameter]["step"] for parameter in group.parameters}
            torch._foreach_add_(list(steps.values()), 1)
            group.rule(settings, group.walk(), steps)

    def settle(self) -> None:
        """Wait until the host may read and write all states in `state`."""
        for group in self._groups:
            group.settle()


def build_optimizer(model: nn.Module, config: OptimConfig) -> ShardedOptimizer:
    """Build the optimizer of a model's masters, which must be float32: at reinforcement-learning rates (1e-6) over 95 %
    of bfloat16 weights would not move at all. Raises UserError if the host has not enough memory."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    settings, groups = {"lr": config.lr, "weight_decay": config.weight_decay}, list[ParameterGroup]()
    beta1, beta2 = (config.betas1, config.betas2) if config.type == "adamw" else (0.9, 0.95)
    if config.type == "muon":
        if hidden := [(name, parameter) for name, parameter in named if is_hidden_matrix(name, parameter)]:
            groups.append(muon_group(hidden, {**settings, "momentum": config.momentum}, config.offload))
        named = [(name, parameter) for name, parameter in named if not is_hidden_matrix(name, parameter)]
    if others := [parameter for _, parameter in named]:
        settings |= {"beta1": beta1, "beta2": beta2, "eps": 1e-8}
        groups.append(ParameterGroup(others, settings, ("exp_avg", "exp_avg_sq"), adamw, host=config.offload))
    return ShardedOptimizer(groups)


def adamw(settings: Settings, chunks: Iterable[Chunk], steps: Steps) -> None:
    """AdamW (Loshchilov and Hutter 2019) on the states exp_avg and exp_avg_sq, by PyTorch's fused kernel."""
    numbers = {name: settings[name] for name in ("lr", "beta1", "beta2", "weight_decay", "eps")}
    for chunk in chunks:
        torch._fused_adamw_(
            [elements.value() for elements, _ in chunk],
            [elements.grad() for elements, _ in chunk],
            [mean for _, (mean, _) in chunk],
            [square for _, (_, square) in chunk],
            [],
            [steps[elements.parameter] for elements, _ in chunk],
            **numbers,
            amsgrad=False,
            maximize=False,
        )


# ---- Muon


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon's own rule updates a parameter: a matrix, or a stack of experts, neither embedding nor head."""
    if "embed" in name or "lm_head" in name or name.endswith("_bias"):
        return False
    return parameter.ndim == 2 or (parameter.ndim == 3 and "experts" in name)


def muon_group(named: Iterable[tuple[str, nn.Parameter]], settings: dict[str, float], offload: bool) -> ParameterGroup:
    """The hidden matrices `named`; `settings`: lr, weight_decay, momentum."""
    matrices: dict[torch.Size, list[nn.Parameter]] = {}
    experts: dict[nn.Parameter, int] = {}  # and the matrices that the rows of each consist of
    for name, parameter in named:
        if parameter.ndim == 2:
            matrices.setdefault(parameter.shape, []).append(parameter)
        else:
            experts[parameter] = 2 if "gate_up" in name else 1
    batches = [*_deal(matrices.values())]
    for parameter, parts in experts.items():  # whole on their rank
        _, rows, columns = parameter.shape
        total, size = local_part(parameter).numel(), rows * columns * max(1, _TOGETHER // (rows * columns))
        for start in range(0, total, size):
            batches.append(_Batch([Elements(parameter, start, min(start + size, total))], rows // parts, columns))
    parameters = [parameter for of_shape in matrices.values() for parameter in of_shape] + list(experts)
    rule, chunks = partial(_update_matrices, batches), [batch.elements for batch in batches]
    return ParameterGroup(parameters, settings, ["momentum_buffer"], rule, chunks, host=offload)


def orthogonalize(x_BRC: Tensor) -> Tensor:
    """Roughly U Vᵀ of each matrix's singular value decomposition U S Vᵀ, by Newton–Schulz iterations in its dtype.

    The result's singular values are within about [0.7, 1.2] where those of the input are above a hundredth of its
    Frobenius norm; smaller ones grow by 3.4 an iteration. A zero matrix stays zero. Costs 5 · (4 s² l + 2 s³)
    floating-point operations for sides s <= l.
    """
    tall = x_BRC.shape[-2] > x_BRC.shape[-1]
    x_BSL = x_BRC.mT if tall else x_BRC
    exact = torch.promote_types(x_BSL.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x_BSL, dim=(-2, -1), keepdim=True, dtype=exact)
    x_BSL = x_BSL * norm.clamp(min=1e-30).reciprocal().to(x_BSL.dtype)
    for _ in range(5):
        gram_BSS = x_BSL @ x_BSL.mT
        polynomial_BSS = torch.baddbmm(gram_BSS, gram_BSS, gram_BSS, beta=_B, alpha=_C)
        x_BSL = torch.baddbmm(x_BSL, polynomial_BSS, x_BSL, beta=_A)
    return x_BSL.mT if tall else x_BSL


@dataclass(frozen=True)
class _Batch:
    """Matrices [rows, columns] that are orthogonalized together."""

    elements: list[Elements]  # this rank's rows of each matrix; experts are whole on their rank, and in one
    rows: int
    columns: int
    group: dist.ProcessGroup | None = None  # the ranks that share the rows; None if this one has them all
    owners: Sequence[int] = ()  # the rank of the group that orthogonalizes each matrix, in ascending order


def _deal(matrices: Iterable[list[nn.Parameter]]) -> Iterator[_Batch]:
    """Batches of matrices of one shape; every rank in turn owns the next matrix."""
    first = 0
    for of_shape in matrices:
        (rows, columns), example, group = of_shape[0].shape, of_shape[0], None
        if isinstance(example, DTensor) and example.device_mesh.get_group(SHARD).size() > 1:
            assert example.placements[-1] == Shard(0), "Muon expects rows to be sharded"
            group = example.device_mesh.get_group(SHARD)
        ranks = 1 if group is None else group.size()
        together = ranks * max(1, _TOGETHER // (rows * columns))
        for start in range(0, len(of_shape), together):
            elements = [Elements(each, 0, local_part(each).numel()) for each in of_shape[start : start + together]]
            owners = sorted((first + i) % ranks for i in range(len(elements)))
            yield _Batch(elements, rows, columns, group, owners)
            first += len(elements)


def _update_matrices(batches: list[_Batch], settings: Settings, chunks: Iterable[Chunk], steps: Steps) -> None:
    """One batch travels while the one before it is orthogonalized."""
    ahead: Iterator[None] = iter(())
    for batch, chunk in zip(batches, chunks, strict=True):
        sent = _update_batch(settings, batch, chunk)
        next(sent)
        next(ahead, None)
        ahead = sent
    next(ahead, None)


def _update_batch(settings: Settings, batch: _Batch, chunk: Chunk) -> Iterator[None]:
    """Begin to send the rows of each matrix to its owner and yield; then orthogonalize, exchange back and update."""
    rows, columns, group = batch.rows, batch.columns, batch.group
    values = [elements.value() for elements, _ in chunk]
    grads, momenta = [elements.grad() for elements, _ in chunk], [states[0] for _, states in chunk]
    torch._foreach_lerp_(momenta, grads, 1 - settings["momentum"])
    ahead = torch._foreach_lerp(grads, momenta, settings["momentum"])
    outbox = torch.cat([each.to(torch.bfloat16 if each.is_cuda else torch.float32) for each in ahead])
    if group is None:
        yield
        update = orthogonalize(outbox.view(-1, rows, columns))
        update = update.to(torch.float32, memory_format=torch.contiguous_format).reshape(-1)
    else:
        counts = [batch.owners.count(rank) for rank in range(group.size())]
        spans, count = rows_of_ranks(rows, group.size()), counts[group.rank()]
        # Elements exchanged with each rank: rows of the matrices that it owns, its rows of those owned here.
        theirs = [other * values[0].numel() for other in counts]
        ours = [count * (end - start) * columns for start, end in spans]
        inbox = outbox.new_empty(count * rows * columns)
        arrival = dist.all_to_all_single(inbox, outbox, ours, theirs, group=group, async_op=True)
        yield
        arrival.wait()  # bounded: by the process group's timeout; on CUDA the stream waits, not the host
        update, outbox = torch.empty_like(outbox), inbox
        if count:
            full = orthogonalize(torch.cat([part.view(count, -1, columns) for part in inbox.split(ours)], dim=1))
            outbox = torch.cat([full[:, start:end].reshape(-1) for start, end in spans])
        dist.all_to_all_single(update, outbox, theirs, ours, group=group)
    torch._foreach_mul_(values, 1 - settings["lr"] * settings["weight_decay"])
    updates = update.float().split([value.numel() for value in values])
    # The root mean square is then that of a typical AdamW update (Liu et al. 2025), whose learning rates serve.
    torch._foreach_add_(values, updates, alpha=-settings["lr"] * 0.2 * math.sqrt(max(rows, columns)))


def learning_rate(config: SchedulerConfig, lr: float, step: int, max_steps: int | None) -> float:
    """Return the learning rate of step `step` (0-based).

    Warm-up rises linearly and reaches `lr` at step `warmup_steps` - 1 (its first step is lr / warmup_steps, not zero).
    All but `constant` end: where they have steps to fall over, the last one, max_steps - 1, runs at `min_lr`, so that
    they need `max_steps` (checked by the config). The share of the way from `min_lr` to `lr`, as a function of the
    decay's progress t in [0, 1]: 1 - t (linear) or (1 + cos πt) / 2 (cosine).
    """
    if step < config.warmup_steps:
        return lr * (step + 1) / config.warmup_steps
    if config.type == "constant":
        return lr
    assert max_steps is not None
    decay_steps = max_steps - config.warmup_steps if config.type == "cosine" else config.decay_steps
    progress = min(max((step + 1 - (max_steps - decay_steps)) / max(decay_steps, 1), 0.0), 1.0)
    weight = 0.5 * (1 + math.cos(math.pi * progress)) if config.type == "cosine" else 1 - progress
    return config.min_lr + (lr - config.min_lr) * weight


@torch.no_grad()  # with gradients enabled, `to_local` is an autograd function of its own
def clip_gradients(model: nn.Module, max_norm: float | None) -> Tensor:
    """Scale all gradients so that their joint 2-norm is at most `max_norm`; return the norm before, [] on the device.

    Reads nothing back. Works on what each rank holds: one operator after the other on sharded tensors would cost the
    host more than all of this costs the device.
    """
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    local = [local_part(grad) for grad in grads]
    norm = torch.nn.utils.get_total_norm(local, foreach=True)
    if grads and isinstance(grads[0], DTensor):
        squared = norm.square()
        dist.all_reduce(squared, group=grads[0].device_mesh.get_group(SHARD))
        norm = squared.sqrt()
    if max_norm is not None:
        torch._foreach_mul_(local, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
