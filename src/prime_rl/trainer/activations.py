"""What a block keeps for its backward pass: checkpointing (computed again) and offload (in host memory meanwhile).

Levels of checkpointing, from the fastest to the leanest, each keeping less than the one before:

    none        as autograd (compiled: as the partitioner) pleases
    pointwise   attention and every matrix product are kept; norms, rotary embedding and activation are computed again
    wide        the widest products too: those into the feed-forward layer
    attention   all but the attention kernel
    full        all of the block, attention too

Offload runs on one side stream beside the computation. After the forward of a block that offloads, its kept tensors are
copied to pinned host memory; when `LAG` more blocks have run, the copies on the device are released. In backward they
come back while the blocks after it still compute. On CPU the copies are made at once.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PretrainedConfig

from prime_rl.config.trainer import Recompute

CHUNK = 1 << 24  # bytes of a chunk of host memory: a power of two, to which the pinned allocator would round it up
SMALLEST = 1 << 20  # bytes below which a tensor stays on the device
LAG = 3  # blocks that run before the computation waits for a copy: out before memory is released, in before it is used


def offload_layers(layers: Sequence[nn.Module], device: torch.device, offloaded: Collection[int]) -> list[nn.Module]:
    """The layers; those in `offloaded` keep nothing on the device. The last `LAG` + 1 cannot be among them."""
    host = HostPool(device)
    return [
        # All others are wrapped: their backward passes fetch what is needed next. Nothing comes after the last one.
        layer if index == len(layers) - 1 else _OffloadedBlock(layer, host, index, index in offloaded)
        for index, layer in enumerate(layers)
    ]


@dataclass
class _Storage:
    """A storage that a block keeps tensors in. `tensors` of them are still to be asked for."""

    size: int
    device: Tensor | None  # its bytes
    chunks: list[Tensor] = field(default_factory=list)
    tensors: int = 0


@dataclass(frozen=True)
class _Kept:
    """A tensor that may be offloaded: how it lies in its storage."""

    index: int
    storage: _Storage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


@dataclass
class _Block:
    """What a block offloaded; the graph holds what else it keeps. `copied` is when the copies begun last are made."""

    offloaded: list[_Storage]
    copied: torch.cuda.Event | None = None
    arrived: bool = False

    def await_copy(self) -> None:
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)


class HostPool:
    """The host memory that the blocks of one policy offload to, in equal chunks that go round from block to block and
    step to step; `chunks` counts those ever allocated."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = torch.get_device_module(device)  # torch.cpu's streams do nothing
        self.stream = self.module.Stream(device)
        self.blocks: dict[int, _Block] = {}
        self.chunks = 0
        self._free: list[Tensor] = []

    def send(self, index: int, storages: list[_Storage]) -> None:
        """Block `index` has run: copy `storages` out, and release an earlier block's."""
        block = self.blocks[index] = _Block(storages)
        for storage in storages:
            storage.chunks = self._take(storage.size)
        block.copied = self._copy(storages, out=True)
        if (earlier := self.blocks.get(index - LAG)) is not None:
            earlier.await_copy()
            for storage in earlier.offloaded:
                storage.device = None

    def fetch(self, index: int) -> None:
        """Backward needs what block `index` kept: have it on the device, and begin to fetch the blocks before."""
        block = self.blocks[index]
        if block.arrived:
            return
        self._bring(block)
        block.await_copy()
        block.arrived = True
        for before in range(index - 1, max(index - LAG, 0) - 1, -1):
            self._bring(self.blocks[before])

    def _bring(self, block: _Block) -> None:
        away = [storage for storage in block.offloaded if storage.device is None and storage.tensors]
        for storage in away:  # before the side stream, which the allocator would otherwise take for the memory's owner
            storage.device = torch.empty(storage.size, dtype=torch.uint8, device=self.device)
        if away:
            block.copied = self._copy(away, out=False)
        for storage in away:
            self._give_back(storage)

    def _copy(self, storages: list[_Storage], *, out: bool) -> torch.cuda.Event | None:
        """Begin to copy between device and host: after what was computed so far, beside what is computed next."""
        if not storages:
            return None
        self.stream.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self.stream):
            for storage in storages:
                assert storage.device is not None
                for chunk, part in zip(storage.chunks, storage.device.split(CHUNK), strict=True):
                    host = chunk[: len(part)]
                    (host if out else part).copy_(part if out else host, non_blocking=True)
            return self.stream.record_event()

    def _take(self, size: int) -> list[Tensor]:
        """Chunks that hold `size` bytes."""
        wanted = -(-size // CHUNK)
        while len(self._free) < wanted:
            self._free.append(torch.empty(CHUNK, dtype=torch.uint8, pin_memory=self.device.type == "cuda"))
            self.chunks += 1
        taken, self._free = self._free[:wanted], self._free[wanted:]
        return taken

    def _give_back(self, storage: _Storage) -> None:
        """All copies run on one stream, so that a chunk may be taken again before its last copy has ended."""
        self._free += storage.chunks
        storage.chunks = []

    def unpack(self, kept: Tensor | _Kept) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        storage = kept.storage
        assert storage.tensors > 0, "an offloaded tensor is asked for once: no second backward pass through a graph"
        self.fetch(kept.index)
        assert storage.device is not None
        view = torch.empty(0, dtype=kept.dtype, device=self.device)
        view.set_(storage.device.untyped_storage(), kept.offset, kept.shape, kept.stride)  # type: ignore[call-overload]
        storage.tensors -= 1
        if storage.tensors == 0:
            storage.device = None  # from here on the graph holds it
            self._give_back(storage)
        return view


class _OffloadedBlock(ActivationWrapper):
    """A block whose kept tensors are in `host` until its backward pass, if it offloads them."""

    def __init__(self, block: nn.Module, host: HostPool, index: int, offloads: bool) -> None:
        super().__init__(block)
        self.host, self.index, self.offloads = host, index, offloads

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._checkpoint_wrapped_module(*args, **kwargs)
        kept: dict[int, _Storage] = {}  # by address
        # Weights, and what all blocks are given alike (rotary embeddings), stay.
        stay = (each for each in (*self.parameters(), *tree_leaves(kwargs)) if isinstance(each, Tensor))
        shared = {tensor.untyped_storage().data_ptr() for tensor in stay}

        def pack(tensor: Tensor) -> Tensor | _Kept:
            whole = tensor.untyped_storage()
            address = whole.data_ptr()
            if whole.nbytes() < SMALLEST or address in shared or tensor.device != self.host.device:
                return tensor
            data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(whole)  # type: ignore[call-overload]
            storage = kept.setdefault(address, _Storage(whole.nbytes(), data))
            storage.tensors += 1
            return _Kept(self.index, storage, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

        with saved_tensors_hooks(pack, self.host.unpack):
            out = self._checkpoint_wrapped_module(*args, **kwargs)
        self.host.send(self.index, list(kept.values()) if self.offloads else [])
        return out


LEVELS: tuple[Recompute, ...] = ("none", "pointwise", "wide", "attention", "full")

_aten = torch.ops.aten
# Where the second factor stands among the arguments. Linear layers arrive as these, eager or compiled.
_PRODUCTS: dict[Any, int] = {
    _aten.mm.default: 1,
    _aten.bmm.default: 1,
    _aten.addmm.default: 2,
    _aten.baddbmm.default: 2,
    _aten._grouped_mm.default: 1,
}


def checkpoint_layers(
    layers: Sequence[nn.Module],
    levels: "Sequence[Recompute]",
    kept: set[Any],
    wide: set[int],
    *,
    draws: bool = False,
) -> list[nn.Module]:
    """Each layer with its level. `kept` are operators whose output is kept, `wide` the widths of wide products.
    `draws`: layers draw random numbers, which must be the same when they are computed again."""
    # At every compilation torch warns that blocks with a policy must not work in place; ours do not.
    warning = "context_fn is passed to torch.utils.checkpoint"
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda record: warning not in record.getMessage())
    functions = {level: _checkpoint(level, kept, wide, draws) for level in set(levels)}
    return [
        layer if level == "none" else Checkpointed(layer, level, functions[level])
        for layer, level in zip(layers, levels, strict=True)
    ]


def wide_products(config: PretrainedConfig) -> set[int]:
    """Output widths of the products into the feed-forward layer, of one expert where there are several."""
    text = config.get_text_config()
    widths = {getattr(text, key, None) or 0 for key in ("intermediate_size", "moe_intermediate_size")} - {0}
    return {width for one in widths for width in (one, 2 * one)}  # gate and up may be one product or two


class Checkpointed(ActivationWrapper):
    """A block that keeps what `level` says; `checkpoint` is torch's function with that policy."""

    def __init__(self, block: nn.Module, level: Recompute, checkpoint: Callable[..., Any]) -> None:
        super().__init__(block)
        self.level, self.checkpoint = level, checkpoint

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # The compiler does not compare policies when it decides whether one layer's graph serves another, and both get
        # the first one's. It does compare a string that is read here.
        assert self.level != "none"
        return self.checkpoint(self._checkpoint_wrapped_module, *args, **kwargs)


def _checkpoint(level: Recompute, kept: set[Any], wide: set[int], draws: bool) -> Callable[..., Any]:
    plain = partial(checkpoint, use_reentrant=False, preserve_rng_state=draws)
    if level == "full":
        return plain
    products, recomputed = level != "attention", wide if level == "wide" else set()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = operator in kept
        if products and operator in _PRODUCTS:
            width = args[_PRODUCTS[operator]].shape[-1]  # perhaps symbolic, which no set can look up
            keep = all(width != one for one in recomputed)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(plain, context_fn=partial(create_selective_checkpoint_contexts, policy))
