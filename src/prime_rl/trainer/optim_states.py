"""Where an optimizer's states lie: one behind the other in flat buffers, on the device or in page-locked host memory.

States in host memory visit the device in chunks while the update runs: three chunks are under way at a time, one coming in, one in use, one going
out, on streams of their own.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from prime_rl.errors import UserError

CHUNK = 1 << 24  # elements of the parameters whose states visit the device together: 64 MiB of each float32 state
_UNDER_WAY = 3
_ALIGNED = 1024  # elements: where a parameter's states begin, so that kernels read them in wide words and blocks never straddle


class StateSpec(NamedTuple):
    """A state that has one entry for every `block` elements along the last dimension of a parameter."""

    name: str
    dtype: torch.dtype = torch.float32
    block: int = 1


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
    """All parameters in chunks of about `elements` (a multiple of every block), which may begin and end within a parameter."""
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
    """The states `specs`, zero at first, of `parameters`, which are float32 and on one device.

    Args:
        chunks: What is updated together; their pieces follow the order of `parameters`.
        host: Whether they lie in host memory.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        specs: Sequence[StateSpec],
        chunks: list[list[Piece]],
        *,
        host: bool,
    ) -> None:
        self.chunks, self._parameters, self._specs, self._host = chunks, list(parameters), specs, host
        self._offsets, total = dict[nn.Parameter, int](), 0
        for parameter in self._parameters:
            self._offsets[parameter] = total
            total += _aligned(local_part(parameter).numel())
        self._device = local_part(self._parameters[0]).device
        place = torch.device("cpu") if host else self._device
        self._buffers = [torch.zeros(total // spec.block, dtype=spec.dtype, device=place) for spec in specs]
        self._resident = [] if host else [self._items(pieces, self._buffers, 0) for pieces in chunks]
        self._inbound: torch.cuda.Stream | None = None
        self._outbound: torch.cuda.Stream | None = None
        if host and self._device.type == "cuda":
            for buffer in self._buffers:
                _page_lock(buffer, owner=self)
            self._inbound, self._outbound = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)

    def of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """A parameter's states by name, sharded as it is: views of the buffers. Call `settle` before reading them on the host."""
        local, offset, states = local_part(parameter), self._offsets[parameter], {}
        for spec, buffer in zip(self._specs, self._buffers, strict=True):
            flat = buffer[offset // spec.block : (offset + local.numel()) // spec.block]
            states[spec.name] = _sharded_as(parameter, flat.view(_per_block(local.shape, spec.block)), spec.block)
        return states

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
            views = zip(self._specs, buffers, strict=True)
            items.append(Item(piece, [buffer[start // spec.block : end // spec.block] for spec, buffer in views]))
        return items

    def _range(self, pieces: list[Piece]) -> tuple[int, int]:
        first, last = pieces[0], pieces[-1]
        return self._offsets[first.parameter] + first.start, self._offsets[last.parameter] + last.end

    def _slot(self) -> list[Tensor]:
        """Room on the device for the longest chunk."""
        longest = max(end - begin for begin, end in map(self._range, self.chunks))
        slot = [torch.empty(longest // spec.block, dtype=spec.dtype, device=self._device) for spec in self._specs]
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
        for spec, inside, buffer in zip(self._specs, slot, self._buffers, strict=True):
            outside = buffer[begin // spec.block : end // spec.block]
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


def _per_block(shape: Sequence[int], block: int) -> list[int]:
    return [*shape[:-1], shape[-1] // block] if block > 1 else list(shape)


def _sharded_as(parameter: nn.Parameter, local: Tensor, block: int) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    shape = torch.Size(_per_block(parameter.shape, block))
    return DTensor.from_local(
        local,
        _mesh_on(parameter.device_mesh, local.device.type),
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def _mesh_on(mesh: DeviceMesh, kind: str) -> DeviceMesh:
    """The same ranks for tensors on devices of `kind`: `from_local` would move a tensor to its mesh's device."""
    if mesh.device_type == kind:
        return mesh
    groups = [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
    return DeviceMesh.from_group(groups, kind, mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)


def _page_lock(buffer: Tensor, owner: object) -> None:
    """Page-lock a buffer for as long as `owner` lives. (torch's own allocator of such memory rounds up to a power of two.)"""
    runtime, size = torch.cuda.cudart(), buffer.numel() * buffer.element_size()
    if size == 0:
        return
    if int(runtime.cudaHostRegister(buffer.data_ptr(), size, 0)) != 0:
        raise UserError(
            f"optim.offload: {size / 2**30:.1f} GiB of host memory cannot be page-locked: free some, raise `ulimit -l`, or leave it out"
        )
    weakref.finalize(owner, runtime.cudaHostUnregister, buffer.data_ptr()).atexit = False
