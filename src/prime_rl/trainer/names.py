"""Parameters under their Hugging Face names, and which rows of them lie on which rank.

transformers holds some tensors in another form than the files do. `stored_tensors` says, for every tensor of the files, which part of which
parameter it is; loading and exporting both follow it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from prime_rl.trainer.parallel import World, rows_of_rank

_WRAPPED = "_checkpoint_wrapped_module."


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a model's files, of `shape`, and the parameter that holds it."""

    name: str
    shape: list[int]
    parameter: nn.Parameter

    def local(self, world: World) -> tuple[Tensor, int]:
        """This rank's rows of it (a view of the parameter, perhaps without rows), and the index of their first row."""
        return local_rows(self.parameter, world)


def named_parameters(policy: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters under transformers' names; a tied head appears once, as the embedding."""
    assert isinstance(policy.lm, nn.Module)
    for name, parameter in policy.lm.named_parameters():
        yield name.replace(_WRAPPED, ""), parameter


def stored_tensors(policy: nn.Module) -> Iterator[StoredTensor]:
    """What the model's files hold, in the order of the parameters."""
    for name, parameter in named_parameters(policy):
        yield StoredTensor(name, list(parameter.shape), parameter)


def local_rows(parameter: Tensor, world: World) -> tuple[Tensor, int]:
    """This rank's rows of a parameter, and the index of their first row."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), 0
    return parameter.to_local().detach(), rows_of_rank(parameter.shape[0], world)[0]
