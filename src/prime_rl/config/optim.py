"""Optimizers, and schedules of their learning rate."""

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from prime_rl.config.base import Problem, Section


class _Optimizer(Section):
    """What every optimizer has."""

    type: str = Field(description="Kind of optimizer.")
    lr: NonNegativeFloat = Field(default=1e-6, description="Learning rate.")
    weight_decay: NonNegativeFloat = Field(default=0.01, description="Decoupled weight decay.")
    max_norm: PositiveFloat | None = Field(
        default=1.0, description="Gradient norm that is clipped to (None: not clipped)."
    )
    offload: bool = Field(default=False, description="Keep the optimizer's states in host memory between steps.")


class AdamW(_Optimizer):
    """AdamW."""

    type: Literal["adamw"] = Field(default="adamw", description="Kind of optimizer.")
    betas1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the running mean of the gradient.")
    betas2: float = Field(default=0.999, ge=0, lt=1, description="Decay of the running mean of its square.")
    state: Literal["float32", "int8"] = Field(
        default="float32", description="Type of the running means (int8: a quarter of the memory; needs torchao)."
    )


class SGD(_Optimizer):
    """Stochastic gradient descent with momentum."""

    type: Literal["sgd"] = Field(default="sgd", description="Kind of optimizer.")
    weight_decay: NonNegativeFloat = Field(default=0.01, description="Weight decay, added to the gradient.")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="Decay of the running sum of gradients (0: none).")
    nesterov: bool = Field(default=True, description="Look ahead along the momentum (Nesterov).")

    @model_validator(mode="after")
    def _has_states_to_offload(self) -> Self:
        if self.offload and self.momentum == 0:
            raise Problem(
                "offload has no effect: without momentum there are no states to keep elsewhere", "offload", "momentum"
            )
        return self


class Muon(_Optimizer):
    """Muon for the matrices of the layers; embeddings, head, norms and biases are updated by AdamW."""

    type: Literal["muon"] = Field(default="muon", description="Kind of optimizer.")
    momentum: float = Field(default=0.95, ge=0, lt=1, description="Decay of the running mean of the gradient.")
    nesterov: bool = Field(default=True, description="Look ahead along the momentum (Nesterov).")
    match_rms: bool = Field(
        default=True, description="Scale updates to the size of AdamW's, so that its learning rates serve."
    )
    adamw_lr_ratio: PositiveFloat = Field(
        default=1.0, description="Learning rate of what AdamW updates, relative to lr."
    )
    betas1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's decay of the mean of the gradient.")
    betas2: float = Field(default=0.95, ge=0, lt=1, description="AdamW's decay of the mean of its square.")


OptimConfig = AdamW | SGD | Muon


class ConstantScheduler(Section):
    """Warm-up, then constant."""

    type: Literal["constant"] = Field(default="constant", description="Kind of schedule.")
    warmup_steps: NonNegativeInt = Field(default=0, description="Steps over which the learning rate rises.")


class LinearScheduler(Section):
    """Warm-up, constant, then linear decay that ends at max_steps."""

    type: Literal["linear"] = Field(default="linear", description="Kind of schedule.")
    warmup_steps: NonNegativeInt = Field(default=10, description="Steps over which the learning rate rises.")
    decay_steps: NonNegativeInt = Field(default=10, description="Last steps, over which it falls.")
    min_lr: NonNegativeFloat = Field(default=0.0, description="Learning rate at the end.")


class CosineScheduler(Section):
    """Warm-up, then half a cosine that ends at max_steps."""

    type: Literal["cosine"] = Field(default="cosine", description="Kind of schedule.")
    warmup_steps: NonNegativeInt = Field(default=10, description="Steps over which the learning rate rises.")
    min_lr: NonNegativeFloat = Field(default=0.0, description="Learning rate at the end.")


class WSDScheduler(Section):
    """Warm-up, stable, then a decay of the given shape that ends at max_steps."""

    type: Literal["wsd"] = Field(default="wsd", description="Kind of schedule.")
    warmup_steps: NonNegativeInt = Field(default=10, description="Steps over which the learning rate rises.")
    decay_steps: NonNegativeInt = Field(default=10, description="Last steps, over which it falls.")
    shape: Literal["linear", "sqrt", "cosine"] = Field(
        default="sqrt", description="How it falls: linear, sqrt (1 - sqrt of the progress), or half a cosine."
    )
    min_lr: NonNegativeFloat = Field(default=0.0, description="Learning rate at the end.")


SchedulerConfig = ConstantScheduler | LinearScheduler | CosineScheduler | WSDScheduler


def schedule_within(max_steps: int | None, scheduler: SchedulerConfig) -> Problem | None:
    """Warm-up and decay fit into the run, a decay has an end to be counted back from, and a rate that it falls to steps to fall over."""
    if max_steps is None:
        if scheduler.type == "constant":
            return None
        return Problem(f"scheduler.type '{scheduler.type}' needs max_steps, to end at", "scheduler.type", "max_steps")
    decay = scheduler.decay_steps if isinstance(scheduler, LinearScheduler | WSDScheduler) else 0
    if scheduler.warmup_steps + decay <= max_steps:
        return _falls(max_steps, scheduler)
    parts = f"scheduler.warmup_steps {scheduler.warmup_steps}" + (f" + scheduler.decay_steps {decay}" if decay else "")
    return Problem(
        f"{parts} exceeds max_steps {max_steps}", "scheduler.warmup_steps", "scheduler.decay_steps", "max_steps"
    )


def _falls(max_steps: int, scheduler: SchedulerConfig) -> Problem | None:
    if scheduler.type == "constant" or not scheduler.min_lr:
        return None
    if scheduler.type == "cosine":
        steps, reason = max_steps - scheduler.warmup_steps, "scheduler.warmup_steps"
    else:
        steps, reason = scheduler.decay_steps, "scheduler.decay_steps"
    if steps:
        return None
    return Problem(
        f"scheduler.min_lr {scheduler.min_lr} has no effect: {reason} leaves no steps to fall over",
        "scheduler.min_lr",
        reason,
    )
