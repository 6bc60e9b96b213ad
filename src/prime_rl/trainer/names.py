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
# Parameters that hold a matrix of every expert, and the names of their parts in the files, one below the other.
_FUSED = {"experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",)}


@dataclass(frozen=True)
class Expert:
    """Where a stored tensor lies in a fused parameter [E, rows, columns] that is named `fused`."""

    fused: str
    index: int
    rows: slice


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a model's files, of `shape`, and the parameter that holds it: the whole of it, or with `expert` that part."""

    name: str
    shape: list[int]
    parameter: nn.Parameter
    expert: Expert | None = None

    def local(self, world: World) -> tuple[Tensor, int]:
        """This rank's rows of it (a view of the parameter, perhaps without rows), and the index of their first row."""
        local, first = local_rows(self.parameter, world)
        if self.expert is None:
            return local, first
        place = self.expert.index - first  # fused parameters are sharded by experts: a rank has all of one, or nothing
        if 0 <= place < local.shape[0]:
            return local[place, self.expert.rows], 0
        return local.new_empty(0, *self.shape[1:]), 0


def named_parameters(policy: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters under transformers' names; a tied head appears once, as the embedding."""
    assert isinstance(policy.lm, nn.Module)
    for name, parameter in policy.lm.named_parameters():
        yield name.replace(_WRAPPED, ""), parameter


def stored_tensors(policy: nn.Module) -> Iterator[StoredTensor]:
    """What the model's files hold, in the order of the parameters."""
    for name, parameter in named_parameters(policy):
        parts = next((parts for end, parts in _FUSED.items() if name.endswith(end)), None)
        if parts is None:
            yield StoredTensor(name, list(parameter.shape), parameter)
            continue
        experts, rows, columns = parameter.shape
        rows //= len(parts)
        prefix = name.rpartition(".")[0]
        for index in range(experts):
            for i, part in enumerate(parts):
                expert = Expert(name, index, slice(i * rows, (i + 1) * rows))
                yield StoredTensor(f"{prefix}.{index}.{part}.weight", [rows, columns], parameter, expert)


def local_rows(parameter: Tensor, world: World) -> tuple[Tensor, int]:
    """This rank's rows of a parameter, and the index of their first row."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), 0
    return parameter.to_local().detach(), rows_of_rank(parameter.shape[0], world)[0]
