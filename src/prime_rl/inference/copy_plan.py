"""The copies that load staged tensors into a model, recorded with the first version and replayed for the next ones.

vLLM's `load_weights` runs Python for every tensor, 40 ms for the 310 of Qwen3-0.6B, while generation is paused. Where it
only copies slices of the staged tensors into parameters, the same copies load every version of this layout.
"""

from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Staged = list[tuple[str, Tensor]]  # views of one buffer
_CONSTANT = {torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}  # padding: the same for every version


class CopyPlan(TorchDispatchMode):
    """Loads a version through the model's `load_weights` when it is made, and later ones by `load` while `matches`.

    Attributes:
        exact: The loaders only copy. Otherwise `load` calls them for every version.
    """

    def __init__(self, model: Any, tensors: Staged) -> None:
        super().__init__()
        buffers = {_storage(tensor) for _, tensor in tensors}
        self.exact, self._buffer = len(buffers) == 1, buffers.pop()
        # By the place of the target, so that the last copy into it counts: target, dtype, size, stride and offset.
        self._copies: dict[object, tuple[Tensor, torch.dtype, torch.Size, tuple[int, ...], int]] = {}
        self._model, self._layout = model, _layout(tensors)
        with self:
            model.load_weights(iter(tensors))
        self.exact &= bool(self._copies)
        self._addresses = _addresses(model)

    def matches(self, tensors: Staged) -> bool:
        """Whether the layout is the recorded one, and the model's parameters have not been made anew."""
        return self._layout == _layout(tensors) and self._addresses == _addresses(self._model)

    def load(self, tensors: Staged) -> None:
        """Load another version."""
        if not self.exact:
            self._model.load_weights(iter(tensors))
            return
        views = {tensor.dtype: tensor for _, tensor in tensors}  # `as_strided` reaches the whole buffer from any
        copies = self._copies.values()
        sources = [views[dtype].as_strided(size, stride, offset) for _, dtype, size, stride, offset in copies]
        torch._foreach_copy_([target for target, *_ in copies], sources)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and self._is_staged(args[1]) and not self._is_staged(args[0]):
            target, source = args[:2]
            self.exact &= target.shape == source.shape  # the fused copy does not broadcast
            place = target.data_ptr(), target.shape, target.stride()
            self._copies.pop(place, None)
            described = source.dtype, source.shape, source.stride(), source.storage_offset()
            self._copies[place] = target.detach(), *described
        elif func not in _CONSTANT:
            used = any(map(self._is_staged, tree_leaves((args, kwargs))))
            # Views of staged tensors are fine. What is computed from them, or changed elsewhere, cannot be replayed.
            self.exact &= not func._schema.is_mutable
            self.exact &= not used or all(map(self._is_staged, tree_leaves(result)))
        return result

    def _is_staged(self, value: object) -> bool:
        return isinstance(value, Tensor) and _storage(value) == self._buffer


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _layout(tensors: Staged) -> list[tuple[object, ...]]:
    return [(name, each.dtype, each.shape, each.storage_offset(), each.device) for name, each in tensors]


def _addresses(model: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in chain(model.parameters(), model.buffers())]
