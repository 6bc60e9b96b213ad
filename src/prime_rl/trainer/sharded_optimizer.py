"""One optimizer for the parts of a model, each with a rule of its own; every rank updates its own rows.

States lie one behind the other in flat buffers, on the device or in page-locked host memory. Those in host memory visit the device in chunks while
the update runs: three chunks are under way at a time, one coming in, one in use, one going out, on streams of their own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from prime_rl.errors import UserError
from prime_rl.trainer.parallel import page_lock

CHUNK = 1 << 24  # elements of the parameters whose states visit the device together: 64 MiB of each float32 state
_UNDER_WAY = 3
_ALIGNED = 1024  # elements: where a parameter's states begin, so that kernels read them in wide words


class Piece(NamedTuple):
    """Elements [start, end) of this rank's part of a parameter, counted row by row."""

    parameter: nn.Parameter
    start: int
    end: int

    def value(self) -> Tensor:
        """A view of the parameter, [end - start]."""
        return local_part(self.parameter).view(-1)[self.start : self.end]

    def grad(self) -> Tensor:
        """Of its gradient, [end - start]."""
        assert self.parameter.grad is not None
        return local_part(self.parameter.grad).reshape(-1)[self.start : self.end]


class Item(NamedTuple):
    """A piece and its states, flat, on the device. What is written into them is kept."""

    piece: Piece
    states: list[Tensor]


Chunk = list[Item]


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def plain_chunks(parameters: Sequence[nn.Parameter], *, host: bool) -> list[list[Piece]]:
    """How parameters are updated each element by itself: all at once, or, where states come from host memory, chunk by chunk."""
    if host:
        return in_chunks(parameters, CHUNK)
    whole = [Piece(parameter, 0, local_part(parameter).numel()) for parameter in parameters]
    return [[piece for piece in whole if piece.end]]


def in_chunks(parameters: Sequence[nn.Parameter], elements: int) -> list[list[Piece]]:
    """All parameters in chunks of about `elements`, which may begin and end within a parameter."""
    chunks: list[list[Piece]] = [[]]
    room = elements
    for parameter in parameters:
        start, total = 0, local_part(parameter).numel()
        while start < total:
            end = min(start + room, total)
            chunks[-1].append(Piece(parameter, start, end))
            room -= _aligned(end - start)
            start = end
            if room <= 0:
                chunks.append([])
                room = elements
    return [chunk for chunk in chunks if chunk]


class States:
    """The states `names` of `parameters`, zero at first; all are float32, and parameters are on one device.

    Args:
        chunks: What is updated together; their pieces follow the order of `parameters`.
        host: Whether they lie in host memory.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        chunks: list[list[Piece]],
        *,
        host: bool,
    ) -> None:
        self.chunks, self._parameters, self._names, self._host = chunks, list(parameters), names, host
        self._offsets, total = dict[nn.Parameter, int](), 0
        for parameter in self._parameters:
            self._offsets[parameter] = total
            total += _aligned(local_part(parameter).numel())
        self._device = local_part(self._parameters[0]).device
        place = torch.device("cpu") if host else self._device
        self._buffers = [torch.zeros(total, device=place) for _ in names]
        self._resident = [] if host else [self._items(pieces, self._buffers, 0) for pieces in chunks]
        self._inbound: torch.cuda.Stream | None = None
        self._outbound: torch.cuda.Stream | None = None
        if host and self._device.type == "cuda":
            for buffer in self._buffers:
                if page_lock(buffer, owner=self):
                    size = buffer.numel() * buffer.element_size()
                    raise UserError(
                        f"optim.offload: {size / 2**30:.1f} GiB of host memory cannot be page-locked: free some, raise `ulimit -l`, or leave it out"
                    )
            self._inbound, self._outbound = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)

    def of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """A parameter's states by name, sharded as it is: views of the buffers. Call `settle` before reading them on the host."""
        local, offset = local_part(parameter), self._offsets[parameter]
        views = (buffer[offset : offset + local.numel()].view(local.shape) for buffer in self._buffers)
        return {name: _sharded_as(parameter, view) for name, view in zip(self._names, views, strict=True)}

    def walk(self) -> Iterator[Chunk]:
        """The chunks in order, each to be updated by the current stream before the next one is asked for."""
        if not self._host:
            yield from self._resident
            return
        self._follow(self._inbound, self._computing())  # which used the slots' memory until now
        self._follow(self._inbound, self._outbound)  # what left in the last step has arrived before it comes back
        slots = [self._slot() for _ in self.chunks[:_UNDER_WAY]]
        arrived = [self._bring(*visit) for visit in zip(self.chunks, slots, strict=False)]
        for i, pieces in enumerate(self.chunks):
            slot, event = slots[i % _UNDER_WAY], arrived[i]
            if event is not None:
                torch.cuda.current_stream(self._device).wait_event(event)
            yield self._items(pieces, slot, self._range(pieces)[0])
            self._take_back(pieces, slot)
            if i + _UNDER_WAY < len(self.chunks):
                self._follow(self._inbound, self._outbound)
                arrived.append(self._bring(self.chunks[i + _UNDER_WAY], slot))

    def settle(self) -> None:
        """Wait until states that are on their way to host memory have arrived there."""
        if self._outbound is not None:
            self._outbound.synchronize()

    def _items(self, pieces: list[Piece], buffers: list[Tensor], begin: int) -> Chunk:
        """`buffers` hold what stands from element `begin` on."""
        items = []
        for piece in pieces:
            start, end = (self._offsets[piece.parameter] + edge - begin for edge in (piece.start, piece.end))
            items.append(Item(piece, [buffer[start:end] for buffer in buffers]))
        return items

    def _range(self, pieces: list[Piece]) -> tuple[int, int]:
        first, last = pieces[0], pieces[-1]
        return self._offsets[first.parameter] + first.start, self._offsets[last.parameter] + last.end

    def _slot(self) -> list[Tensor]:
        """Room on the device for the longest chunk."""
        longest = max(end - begin for begin, end in map(self._range, self.chunks))
        slot = [torch.empty(longest, device=self._device) for _ in self._names]
        for stream in (self._inbound, self._outbound):
            for tensor in slot:
                if stream is not None:
                    tensor.record_stream(stream)
        return slot

    def _bring(self, pieces: list[Piece], slot: list[Tensor]) -> torch.cuda.Event | None:
        with _on(self._inbound):
            for inside, outside in self._pairs(pieces, slot):
                inside.copy_(outside, non_blocking=True)
        return None if self._inbound is None else self._inbound.record_event()

    def _take_back(self, pieces: list[Piece], slot: list[Tensor]) -> None:
        self._follow(self._outbound, self._computing())
        with _on(self._outbound):
            for inside, outside in self._pairs(pieces, slot):
                outside.copy_(inside, non_blocking=True)

    def _pairs(self, pieces: list[Piece], slot: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        begin, end = self._range(pieces)
        for inside, buffer in zip(slot, self._buffers, strict=True):
            outside = buffer[begin:end]
            yield inside[: outside.numel()], outside

    def _computing(self) -> torch.cuda.Stream | None:
        return None if self._inbound is None else torch.cuda.current_stream(self._device)

    @staticmethod
    def _follow(stream: torch.cuda.Stream | None, other: torch.cuda.Stream | None) -> None:
        if stream is not None and other is not None:
            stream.wait_stream(other)


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNED) * _ALIGNED


def _sharded_as(parameter: nn.Parameter, local: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        _mesh_on(parameter.device_mesh, local.device.type),
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _mesh_on(mesh: DeviceMesh, kind: str) -> DeviceMesh:
    """The same ranks for tensors on devices of `kind`: `from_local` would move a tensor to its mesh's device."""
    if mesh.device_type == kind:
        return mesh
    groups = [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
    return DeviceMesh.from_group(groups, kind, mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)


Settings = Mapping[str, Any]
Steps = Mapping[nn.Parameter, Tensor]
Rule = Callable[[Settings, Iterable[Chunk], Steps], None]


@dataclass(frozen=True)
class Part:
    """Parameters that are updated by one rule.

    Args:
        settings: The rule's numbers, `lr` among them. They are saved in checkpoints, but it is the config's that count.
        rule: Updates chunks of them in place, given the updates counted for each parameter (this one included) as [] on its device.
        chunks: What is updated together (None: each element may be by itself).
    """

    parameters: list[nn.Parameter]
    settings: dict[str, Any]
    states: tuple[str, ...]
    rule: Rule
    chunks: list[list[Piece]] | None = None


class ShardedOptimizer(torch.optim.Optimizer):
    """Updates this rank's rows of float32 parameters. States exist from the start.

    Args:
        offload: States lie in page-locked host memory, and are on the device only while they are updated.

    Raises:
        UserError: there is not as much host memory.
    """

    def __init__(self, parts: Iterable[Part], *, offload: bool = False) -> None:
        self._parts = [part for part in parts if part.parameters]
        super().__init__([{"params": part.parameters, **part.settings} for part in self._parts], {})
        self._states = []
        for part in self._parts:
            chunks = plain_chunks(part.parameters, host=offload) if part.chunks is None else part.chunks
            states = States(part.parameters, part.states, chunks, host=offload)
            self._states.append(states)
            for parameter in part.parameters:
                self.state[parameter] = {"step": torch.zeros((), device=parameter.device), **states.of(parameter)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Every rank calls it; waits for nothing on the host."""
        for part, group, states in zip(self._parts, self.param_groups, self._states, strict=True):
            steps = {parameter: self.state[parameter]["step"] for parameter in part.parameters if has_grad(parameter)}
            if steps:
                torch._foreach_add_(list(steps.values()), 1)
                part.rule(group, states.walk(), steps)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, of states that may be read on the host."""
        for states in self._states:
            states.settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy saved values into the states that are there, in whatever memory they lie. Settings stay the config's."""
        saved = [name for group in state_dict["param_groups"] for name in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for states in self._states:
            states.settle()
        for name, parameter in zip(saved, parameters, strict=True):
            for key, state in self.state[parameter].items():
                local_part(state).copy_(local_part(state_dict["state"][name][key]))


def has_grad(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None


def adamw(settings: Settings, chunks: Iterable[Chunk], steps: Steps) -> None:
    """AdamW (Loshchilov and Hutter 2019) on the states exp_avg and exp_avg_sq, by PyTorch's fused kernel."""
    beta1, beta2 = settings["betas"]
    for chunk in chunks:
        items = [item for item in chunk if has_grad(item.piece.parameter)]
        if items:
            torch._fused_adamw_(
                [item.piece.value() for item in items],
                [item.piece.grad() for item in items],
                [item.states[0] for item in items],
                [item.states[1] for item in items],
                [],
                [steps[item.piece.parameter] for item in items],
                lr=settings["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=settings["weight_decay"],
                eps=settings["eps"],
                amsgrad=False,
                maximize=False,
            )


def sgd(settings: Settings, chunks: Iterable[Chunk], steps: Steps) -> None:
    """SGD with (Nesterov) momentum as PyTorch defines it, by its fused kernel. Without momentum there is no state."""
    for chunk in chunks:
        items = [item for item in chunk if has_grad(item.piece.parameter)]
        if items:
            torch._fused_sgd_(
                [item.piece.value() for item in items],
                [item.piece.grad() for item in items],
                [state for item in items for state in item.states],
                weight_decay=settings["weight_decay"],
                momentum=settings["momentum"],
                lr=settings["lr"],
                dampening=0.0,
                nesterov=settings["nesterov"] and settings["momentum"] > 0,
                maximize=False,
                is_first_step=False,  # momentum begins with zeros
            )
