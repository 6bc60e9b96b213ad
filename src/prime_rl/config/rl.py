"""Settings of `rl`: a whole run, its processes, and what they share."""

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from prime_rl.config.base import BaseConfig, Problem, check, option
from prime_rl.config.inference import InferenceConfig
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.config.share import share, without_copies
from prime_rl.config.shared import CkptConfig, Device, ModelConfig, WandbConfig, nothing_to_clean
from prime_rl.config.trainer import TrainerConfig


class RLConfig(BaseConfig):
    """A whole run: trainer, orchestrator and inference server. Settings given here reach every process that needs them.
    `rl doctor RUN` tells from a run directory who waits for whom and why, `rl audit RUN` what became of every episode"""

    model: ModelConfig = option(ModelConfig, "The model.")
    device: Device = option("auto", "Where to train and serve (auto: CUDA where there is a GPU).")
    max_steps: PositiveInt | None = option(None, "Steps to train (None: until stopped).")
    async_level: NonNegativeInt = option(1, "Steps that sampling may run ahead of training.")
    seq_len: PositiveInt | None = option(None, "Most tokens of a sample (None: as the sections say).")
    ckpt: CkptConfig | None = option(None, "Checkpoints of the full training state.")
    wandb: WandbConfig | None = option(None, "Weights & Biases.")
    bench: bool = option(
        False, "Measure trainer and orchestrator, each by itself, over a few steps. Writes to output_dir/bench."
    )
    clean: bool = option(
        False, "Remove what an earlier run left in output_dir first.", json_schema_extra={"one_time": True}
    )
    trainer_gpus: PositiveInt = option(1, "GPUs that train.")
    inference_gpus: PositiveInt | None = option(None, "GPUs that serve (None: as many as the servers need).")
    inference_servers: PositiveInt | None = option(
        None,
        "Servers to start, on ports from server.port on (None: as many as fit inference_gpus, two a GPU for small models).",
    )
    share_gpus: bool = option(
        False, "Train and serve on the same GPUs: inference.gpu_memory_utilization splits their memory."
    )
    trainer_ranks: PositiveInt | None = option(None, "Processes that train (None: one per GPU, on CPU one).")
    ready_timeout: PositiveFloat = option(1200.0, "Seconds until the inference server must be ready.")
    recover: bool = option(
        False,
        "Go on from whatever an interrupted run has committed in output_dir.",
        json_schema_extra={"one_time": True},
    )
    max_restarts: NonNegativeInt = option(
        3, "Restarts of one process within an hour, or without getting further (0: the first crash ends the run)."
    )
    restart_backoff: PositiveFloat = option(
        1.0, "Seconds before the first restart of a process; doubled with each further one."
    )
    recovery_interval: PositiveInt | Literal["auto"] | None = option(
        "auto", "Steps between two recovery checkpoints; the newest is kept (auto: for 1 % of the time; None: none)."
    )
    heartbeat_timeout: PositiveFloat = option(
        60.0, "Seconds without a sign of life after which a process is started again."
    )
    stall_timeout: PositiveFloat = option(
        1800.0, "Seconds without progress after which a process that waits for nobody is started again."
    )
    trainer: TrainerConfig = option(TrainerConfig, "The trainer.")
    orchestrator: OrchestratorConfig = Field(description="The orchestrator.")
    inference: InferenceConfig | None = option(None, "The inference server (None: one that runs already).")

    as_given = staticmethod(without_copies)
    share = staticmethod(share)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        check(
            self._samples_fit(),
            self._nothing_to_resume(),
            self._weights_can_be_staged(),
            self._has_what_the_loss_needs(),
            self._trains_what_is_penalized(),
        )
        return self

    def _has_what_the_loss_needs(self) -> Problem | None:
        loss = self.trainer.loss
        if (loss.kl_coef or loss.entropy_coef) and all(
            one.component != "rl" for one, _ in self.orchestrator.algorithms()
        ):
            name = "kl_coef" if loss.kl_coef else "entropy_coef"
            message = f"{name} has no effect: nothing is trained by reward"
            return Problem(message, f"trainer.loss.{name}", "orchestrator.algorithm.type")
        if self.trainer.loss.kl_coef == 0 and self.orchestrator.reference is not None:
            message = "a reference model has no effect where the loss does not ask for it: give trainer.loss.kl_coef"
            return Problem(message, "orchestrator.reference", "trainer.loss.kl_coef")
        if self.trainer.loss.kl_coef == 0 or self.orchestrator.reference is not None or self.bench:
            return None
        message = "the divergence from a reference model needs one: give orchestrator.reference.base_url"
        return Problem(message, "trainer.loss.kl_coef", "orchestrator.reference")

    def _trains_what_is_penalized(self) -> Problem | None:
        """A penalty or bonus is meant for all that the policy says, not only where rewards differ. Refused rather than switched: what is left out of a
        batch is the orchestrator's, and stays what its own settings say."""
        loss = self.trainer.loss
        if not self.orchestrator.filter_zero_advantage or (loss.kl_coef == 0 and loss.entropy_coef == 0):
            return None
        name = "kl_coef" if loss.kl_coef else "entropy_coef"
        message = f"{name} would not reach samples of advantage zero, which are left out: set orchestrator.filter_zero_advantage = false"
        return Problem(message, f"trainer.loss.{name}", "orchestrator.filter_zero_advantage")

    def _samples_fit(self) -> Problem | None:
        longest, room = self.orchestrator.seq_len, self.trainer.seq_len
        if longest <= room:
            return None
        message = f"orchestrator.seq_len {longest} exceeds trainer.seq_len {room}: samples would not fit a micro-batch"
        return Problem(message, "orchestrator.seq_len", "trainer.seq_len")

    def _weights_can_be_staged(self) -> Problem | None:
        if self.trainer.weights.transport != "memory" or self.inference is None or self.inference.stage_weights:
            return None
        message = "trainer.weights.transport memory needs servers that stage weights"
        return Problem(message, "trainer.weights.transport", "inference.stage_weights")

    def _nothing_to_resume(self) -> Problem | None:
        resumes = self.ckpt is not None and self.ckpt.resume_step is not None
        if problem := nothing_to_clean(self.clean, self.recover, self.ckpt):
            return problem
        if self.recover and resumes:
            message = "recover goes on from the newest state, ckpt.resume_step from a checkpoint: give one of them"
            return Problem(message, "recover", "ckpt.resume_step")
        return None
