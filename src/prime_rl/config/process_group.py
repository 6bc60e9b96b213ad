"""Settings of weights that are sent to servers."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from prime_rl.config.base import Section


class ProcessGroupTransport(Section):
    """Servers get each version from the trainer's memory; only what has to outlive the trainer is written."""

    type: Literal["process-group"] = Field(default="process-group", description="How servers get the weights.")
    backend: Literal["auto", "cuda-ipc", "shared-memory", "gloo", "nccl"] = Field(
        default="auto",
        description="How (auto: shared-memory on one host, else nccl from a GPU, gloo from a CPU; cuda-ipc: one GPU for both).",
    )
    device_copy: bool = Field(
        default=False,
        description="Hash and send from a copy on the trainer's GPU (nccl): sooner, for two bytes a parameter.",
    )
    host: str | None = Field(
        default=None,
        description="Address of the trainer's host that servers reach (None: the one on its default route).",
    )
    port: NonNegativeInt = Field(default=0, description="Port there that servers ask at (0: any that is free).")
    timeout: PositiveFloat = Field(
        default=30.0, description="Seconds without progress after which either side gives a transfer up."
    )
