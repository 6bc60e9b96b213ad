"""The weights of a single rank that keeps them gathered, without FSDP: its hooks and copies at every layer would hold up the host."""

from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from prime_rl.trainer.optim_states import local_part


class SingleRankUnit:
    """All parameters of `model`, with the methods of an FSDP unit that the trainer calls, and the bits that FSDP would compute.

    Masters are float32 DTensors, as FSDP has them: optimizers, checkpoints and exports see the same as on several ranks. While they are gathered
    the modules hold copies in the compute dtype instead. As soon as backward has the gradient of a copy, it is added to the master's, in float32.

    Args:
        model: On the meta device; its parameters become the masters.
        dtype: The compute dtype.
        exact: Parameters that are computed in float32, whatever the dtype.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, exact: Collection[nn.Parameter]) -> None:
        masters: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter not in masters:  # tied ones come twice
                    rows = DTensor.from_local(parameter.detach(), mesh, [Shard(0)], run_check=False)
                    masters[parameter] = nn.Parameter(rows, requires_grad=parameter.requires_grad)
                setattr(module, name, masters[parameter])
        self._model, self._dtype, self._exact = model, dtype, {masters[parameter] for parameter in exact}
        self._places: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []  # module, name, master, copy
        self._rows: list[Tensor] = []  # of the masters that are copied, and their copies
        self._copies: list[Tensor] = []
        self._gathered = self._in_backward = False
        self._reshard_after_backward = True

    @torch.no_grad()
    def unshard(self) -> None:
        """Give the modules weights to compute with."""
        if self._gathered:
            return
        if not self._places:
            self._make_copies()
        if self._copies:
            torch._foreach_copy_(self._copies, self._rows)
        for module, name, _, copy in self._places:
            module._parameters[name] = copy
        self._gathered = True

    def reshard(self) -> None:
        """Give the modules their masters again. The copies keep their memory."""
        for module, name, master, _ in self._places:
            module._parameters[name] = master
        self._gathered = False

    def set_reshard_after_backward(self, reshard: bool, *, recurse: bool = True) -> None:
        """Whether the next backward pass is the last one for these weights."""
        self._reshard_after_backward = reshard

    def set_requires_all_reduce(self, required: bool, *, recurse: bool = True) -> None:
        """There are no replicas."""

    def _make_copies(self) -> None:
        """Once the masters have their memory. Those that are computed as they are share it."""
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for module in self._model.modules():
            for name, master in module.named_parameters(recurse=False):
                if master not in copies:
                    rows = local_part(master)
                    dtype = rows.dtype if master in self._exact else self._dtype
                    copies[master] = copy = nn.Parameter(rows.to(dtype), requires_grad=master.requires_grad)
                    if copy.dtype != rows.dtype:
                        self._rows.append(rows)
                        self._copies.append(copy)
                    if copy.requires_grad:
                        copy.register_post_accumulate_grad_hook(partial(self._add, master))
                self._places.append((module, name, master, copies[master]))

    def _add(self, master: nn.Parameter, copy: Tensor) -> None:
        grad, copy.grad = copy.grad, None
        assert grad is not None
        assert isinstance(master, DTensor)
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._end_backward)
        if master.grad is None:
            # What `DTensor.from_local` does, without its checks: they would take longer than the addition.
            master.grad = DTensor(grad.float(), master._spec, requires_grad=False)
        else:
            local_part(master.grad).add_(grad)

    def _end_backward(self) -> None:
        self._in_backward = False
        if self._reshard_after_backward:
            self.reshard()
