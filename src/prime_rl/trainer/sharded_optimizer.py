"""One optimizer for the parts of a model, each with a rule of its own; every rank updates its own rows."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prime_rl.trainer.optim_states import Chunk, Piece, States, StateSpec, local_part, plain_chunks

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
    states: tuple[StateSpec, ...]
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
