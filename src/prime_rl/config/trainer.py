"""Settings of the RL trainer, most of which SFT has as well."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from prime_rl.config.base import BaseConfig, Problem, Section, check
from prime_rl.config.losses import DefaultLoss, LossConfig
from prime_rl.config.optim import AdamW, ConstantScheduler, OptimConfig, SchedulerConfig, schedule_within
from prime_rl.config.shared import CkptConfig, Device, Length, ModelConfig, MonitorConfig, nothing_to_clean

Attention = Literal["auto", "flash_attention_4", "flash_attention_3", "cudnn", "flash_attention_2", "varlen", "sdpa"]
Recompute = Literal["none", "pointwise", "wide", "attention", "full"]
DType = Literal["auto", "float32", "bfloat16"]


class TrainerModel(ModelConfig):
    """The model and how it is computed."""

    attention: Attention = Field(default="auto", description="Attention kernel (auto: the fastest that is there).")
    compile: bool | None = Field(default=None, description="Compile each block (None: on CUDA only).")
    activation_checkpointing: Literal["auto"] | Recompute = Field(
        default="auto",
        description="What backward computes again rather than keeps (auto: the least that fits into memory).",
    )
    checkpointed_layers: PositiveInt | None = Field(
        default=None, description="Layers, the first ones, that do so; the others keep all (None: every layer)."
    )
    activation_offload: bool | None = Field(
        default=None,
        description="Park what blocks keep for backward in host memory meanwhile (None: a part or all, where that pays or has to be).",
    )
    memory_limit: PositiveFloat | None = Field(
        default=None, description="GiB of a GPU that auto plans with (None: what is free)."
    )
    dtype: DType = Field(
        default="auto", description="Type that is computed in (auto: bfloat16 on CUDA, float32 on CPU)."
    )
    head_chunk: PositiveInt | None = Field(
        default=None,
        description="Tokens whose logits exist at the same time (None: as memory allows; where a level is named, fewer).",
    )
    reshard_after_forward: bool | None = Field(
        default=None,
        description="Free gathered parameters between forward and backward (None: as memory asks for, or a level is named).",
    )
    dp_replicate: PositiveInt = Field(
        default=1, description="Groups of ranks (HSDP): each shards a whole copy of the state among its members."
    )
    layers: PositiveInt | None = Field(
        default=None, description="Layers of a model with random weights (None: its own number)."
    )

    @model_validator(mode="after")
    def _has_layers_to_checkpoint(self) -> Self:
        if self.checkpointed_layers is not None and self.activation_checkpointing == "none":
            raise Problem(
                f"checkpointed_layers {self.checkpointed_layers} has no effect: activation_checkpointing 'none' checkpoints no layer",
                "checkpointed_layers",
                "activation_checkpointing",
            )
        return self


class ExportConfig(Section):
    """The exported weights."""

    dtype: DType = Field(
        default="auto", description="Type of the exported weights (auto: that of the model's own files)."
    )


class WeightsConfig(ExportConfig):
    """The exported weights, one version per step."""

    keep: NonNegativeInt | None = Field(
        default=0, description="Versions kept beyond those that running processes and checkpoints need (None: all)."
    )
    save_interval: PositiveInt | None = Field(
        default=None, description="Steps between two versions that are written to disk and kept for good (None: none)."
    )
    canary: bool = Field(
        default=True, description="Score a fixed prompt for every version, by which servers are checked (one forward)."
    )
    transport: Literal["auto", "filesystem", "memory"] = Field(
        default="auto",
        description="How servers get a version: files, or the trainer's memory (auto: memory from a GPU, else files).",
    )
    tmpfs: Path | None = Field(
        default=None,
        description="Directory in memory, such as /dev/shm, for files that need not outlive this host (None: the disk).",
    )
    host: str | None = Field(
        default=None,
        description="Address of the trainer's host that servers reach, for memory (None: the one on its default route).",
    )
    port: NonNegativeInt = Field(default=0, description="Port there that servers ask at, for memory (0: any).")
    timeout: PositiveFloat = Field(
        default=30.0, description="Seconds without progress after which a transfer from memory fails."
    )
    shares_gpu: bool = Field(
        default=False, description="A server on the trainer's GPU keeps a copy there, too (rl --share-gpus says so)."
    )

    @field_validator("transport", mode="before")
    @classmethod
    def _not_a_section(cls, value: object) -> object:
        if isinstance(value, Mapping):
            raise Problem(
                'weights.transport is "auto", "filesystem" or "memory" (formerly type = "process-group"), no section any more; tmpfs, host, port and '
                "timeout stand in [weights], and backend, device_copy and filesystem-delta are gone",
                "",
            )
        return value

    @model_validator(mode="after")
    def _tmpfs_holds_files(self) -> Self:
        if self.keep is None and self.tmpfs is not None:
            raise Problem(
                f"keep None keeps all versions, which {self.tmpfs} has no room for: say how many", "keep", "tmpfs"
            )
        if self.transport == "memory" and self.tmpfs is not None:
            raise Problem("tmpfs is for files, and transport memory writes none for servers", "tmpfs", "transport")
        return self


class FakeData(Section):
    """Random samples in place of an orchestrator's."""

    lengths: Literal["fixed", "lognormal"] = Field(
        default="fixed",
        description="Lengths: seq_len each, or spread as rollouts are (median 600, many short, few long).",
    )
    batch_size: PositiveInt = Field(default=128, description="Samples per step.")
    micro_batch_size: PositiveInt = Field(
        default=8, description="Samples in one micro-batch (lognormal: as many as fit)."
    )
    seq_len: Length | None = Field(
        default=None, description="Tokens per sample (None: as many as fit); lognormal: the most (None: 4096)."
    )


class TrainerData(Section):
    """What is trained on."""

    fake: FakeData | None = Field(default=None, description="Random samples in place of an orchestrator's.")


class TrainingConfig(BaseConfig):
    """What RL and SFT training have in common."""

    model: TrainerModel = Field(default_factory=TrainerModel, description="The model and how it is computed.")
    device: Device = Field(default="auto", description="Where to train (auto: CUDA where there is a GPU).")
    max_steps: PositiveInt | None = Field(default=None, description="Steps to train (None: until stopped).")
    optim: OptimConfig = Field(default_factory=AdamW, discriminator="type", description="The optimizer.")
    scheduler: SchedulerConfig = Field(
        default_factory=ConstantScheduler, discriminator="type", description="Schedule of the learning rate."
    )
    ckpt: CkptConfig | None = Field(default=None, description="Checkpoints of the full training state.")
    monitor: MonitorConfig = Field(
        default_factory=MonitorConfig, description="Where metrics go, beside metrics/*.jsonl."
    )
    bench: bool = Field(
        default=False, description="Measure a few steps: speed, MFU, memory. Writes to output_dir/bench."
    )
    clean: bool = Field(
        default=False,
        json_schema_extra={"one_time": True},
        description="Remove what an earlier run left in output_dir first, unless another process of this run is up already.",
    )
    dist_timeout: PositiveFloat = Field(default=600.0, description="Seconds that a collective may take.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        check(
            resume_within(self.max_steps, self.ckpt),
            nothing_to_clean(self.clean, False, self.ckpt),
            schedule_within(self.max_steps, self.scheduler),
            self._kernel_has_a_gpu(),
        )
        return self

    def _kernel_has_a_gpu(self) -> Problem | None:
        attention = self.model.attention
        if self.device != "cpu" or attention in ("auto", "sdpa"):
            return None
        message = f"model.attention {attention} needs a GPU; `auto` takes the fastest that runs here"
        return Problem(message, "model.attention", "device")


class TrainerConfig(TrainingConfig):
    """The RL trainer."""

    seq_len: Length = Field(default=2048, description="Tokens of a packed micro-batch.")
    async_level: NonNegativeInt = Field(default=1, description="Steps that sampling may run ahead of training.")
    loss: LossConfig = Field(default_factory=DefaultLoss, discriminator="type", description="The loss of a token.")
    data: TrainerData = Field(default_factory=TrainerData, description="What is trained on.")
    weights: WeightsConfig = Field(
        default_factory=WeightsConfig, description="The exported weights, one version per step."
    )
    recover: bool = Field(
        default=False,
        json_schema_extra={"one_time": True},
        description="Go on from the newest state committed in output_dir: a recovery checkpoint, a checkpoint, or the start.",
    )
    recovery_interval: PositiveInt | Literal["auto"] | None = Field(
        default=None,
        description="Steps between two recovery checkpoints; the newest is kept (auto: for 1 % of the time; None: none).",
    )
    rollout_timeout: PositiveFloat = Field(default=3600.0, description="Seconds to wait for a batch of rollouts.")
    log_samples_interval: PositiveInt | None = Field(
        default=10, description="Steps between two logged rollouts (None: never)."
    )

    @model_validator(mode="after")
    def _fake_fits(self) -> Self:
        check(nothing_to_clean(self.clean, self.recover, None))
        fake = self.data.fake
        if fake is not None and fake.seq_len is not None and fake.seq_len > self.seq_len:
            raise Problem(
                f"data.fake.seq_len {fake.seq_len} exceeds seq_len {self.seq_len}", "data.fake.seq_len", "seq_len"
            )
        return self


def resume_within(max_steps: int | None, ckpt: CkptConfig | None) -> Problem | None:
    """A run cannot resume beyond its own end."""
    if max_steps is None or ckpt is None or ckpt.resume_step is None or max_steps >= ckpt.resume_step:
        return None
    return Problem(
        f"max_steps {max_steps} is below ckpt.resume_step {ckpt.resume_step}", "max_steps", "ckpt.resume_step"
    )
