"""The copies that load staged tensors into a model: recorded with one version, tried with the next, then replayed.

vLLM's `load_weights` runs Python for every tensor, 40 ms for the 310 of Qwen3-0.6B, while generation is paused. Where
it only copies slices of the staged tensors into parameters, the same copies load every version of this layout.
"""

from collections import defaultdict
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Staged = list[tuple[str, Tensor]]  # views of one buffer
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SUM_ELEMENTS = 1 << 20  # as 64-bit integers 8 MiB, twice: beside a staged version little of the GPU is free
_CONSTANT = {torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}  # padding: the same for every version


class CopyPlan(TorchDispatchMode):
    """Loads a version through the model's `load_weights` when made, and later ones by `load` while `matches`. It is
    `exact` if the loaders only copy, as far as is known; otherwise `load` calls them for every version."""

    def __init__(self, model: Any, tensors: Staged) -> None:
        super().__init__()
        self._model, self._layout, self._addresses = model, _layout(tensors), _addresses(model)
        buffers = {_storage(tensor) for _, tensor in tensors}
        self._buffer, self._dtypes = min(buffers), {tensor.dtype for _, tensor in tensors}
        self._tracked = {self._buffer}  # storages of the staged tensors, and those they were copied into
        # Keyed by the target's address, shape and stride, so that the last copy into it counts. Target, then the
        # source's dtype, size, stride and offset. No two of these overlap: vLLM's loaders fill disjoint slices.
        self._copies: dict[object, tuple[Tensor, torch.dtype, torch.Size, tuple[int, ...], int]] = {}
        self.exact, self._tried = len(buffers) == 1, False
        with self:
            model.load_weights(iter(tensors))
        self.exact &= bool(self._copies) and self._addresses == _addresses(model)

    def matches(self, model: Any, tensors: Staged) -> bool:
        """Whether model and layout are the recorded ones, and no parameter has been made anew."""
        return model is self._model and self._layout == _layout(tensors) and self._addresses == _addresses(model)

    def load(self, tensors: Staged) -> None:
        """Load another version. The first time the loaders run after the copies: any change they make ends `exact`."""
        replayed = None
        if self.exact:
            self._replay(tensors)
            replayed = None if self._tried else self._sums()
        if not self.exact or not self._tried:
            self._model.load_weights(iter(tensors))
            self.exact, self._tried = self.exact and replayed == self._sums(), True

    def _replay(self, tensors: Staged) -> None:
        views = {tensor.dtype: tensor for _, tensor in tensors}  # `as_strided` reaches the whole buffer from any
        # A fused copy takes contiguous tensors of one type each; others would make it copy all of them one by one.
        groups: dict[object, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for target, dtype, size, stride, offset in self._copies.values():
            source = views[dtype].as_strided(size, stride, offset)
            targets, sources = groups[target.dtype, dtype, target.is_contiguous() and source.is_contiguous()]
            targets.append(target)
            sources.append(source)
        for targets, sources in groups.values():
            torch._foreach_copy_(targets, sources)

    def _sums(self) -> list[int]:
        """Return position-sensitive checksums of all parameters and buffers, by `SUM_ELEMENTS` to bound the memory."""
        sums = []
        for tensor in chain(self._model.parameters(), self._model.buffers()):
            bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.itemsize])
            for part in bits.split(SUM_ELEMENTS):
                sums.append((torch.arange(1, 1 + len(part), device=part.device) * part).sum())  # integers wrap
        return torch.stack(sums).tolist() if sums else []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and self._is_staged(args[1]) and not self._is_staged(args[0]):
            target, source = args[:2]
            self.exact &= target.shape == source.shape and source.dtype in self._dtypes  # nothing is broadcast
            self._tracked.add(_storage(target))
            place = target.data_ptr(), target.shape, target.stride()
            self._copies.pop(place, None)
            described = source.dtype, source.shape, source.stride(), source.storage_offset()
            self._copies[place] = target.detach(), *described
        elif func not in _CONSTANT or self._is_staged(args[0]):
            tracked = [leaf for leaf in tree_leaves((args, kwargs)) if self._is_tracked(leaf)]
            # Views are fine. What is computed from these tensors, or changed elsewhere, cannot be replayed.
            self.exact &= not func._schema.is_mutable
            self.exact &= not tracked or all(map(self._is_tracked, tree_leaves(result)))
        return result

    def _is_staged(self, value: object) -> bool:
        return isinstance(value, Tensor) and _storage(value) == self._buffer

    def _is_tracked(self, value: object) -> bool:
        return isinstance(value, Tensor) and _storage(value) in self._tracked


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _layout(tensors: Staged) -> list[tuple[object, ...]]:
    return [(name, each.dtype, each.shape, each.storage_offset(), each.device) for name, each in tensors]


def _addresses(model: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in chain(model.parameters(), model.buffers())]
