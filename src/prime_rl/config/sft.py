"""Settings of supervised fine-tuning."""

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from prime_rl.config.base import Problem, Section
from prime_rl.config.eval import Measure
from prime_rl.config.inference import InferenceConfig
from prime_rl.config.share import share_eval_server, without_address
from prime_rl.config.shared import Length
from prime_rl.config.trainer import ExportConfig, TrainingConfig


class LossMask(Section):
    """Messages whose tokens are trained on."""

    system: bool = Field(default=False, description="Train on system messages.")
    user: bool = Field(default=False, description="Train on user messages.")
    assistant: bool = Field(default=True, description="Train on assistant messages.")
    tool: bool = Field(default=False, description="Train on tool messages.")


class FakeSFTData(Section):
    """Random tokens in place of a dataset."""

    type: Literal["fixed", "variable", "lognormal"] = Field(
        default="fixed", description="Lengths of samples: seq_len each, random up to it, or spread as rollouts are."
    )


class SFTData(Section):
    """A dataset of prompts and completions, or of messages."""

    name: str = Field(
        default="PrimeIntellect/Reverse-Text-SFT", description="Hub name, or local path: jsonl, parquet, saved dataset."
    )
    split: str = Field(default="train", description="Split of a hub or saved dataset.")
    subset: str | None = Field(default=None, description="Subset of a hub dataset (None: its default).")
    shuffle: bool = Field(default=True, description="Shuffle before every epoch.")
    seq_len: Length = Field(default=2048, description="Tokens of a packed row; longer samples are dropped.")
    batch_size: PositiveInt = Field(default=128, description="Packed rows per step.")
    micro_batch_size: PositiveInt = Field(default=1, description="Packed rows per forward pass of one process.")
    loss_mask: LossMask = Field(default_factory=LossMask, description="Messages whose tokens are trained on.")
    fake: FakeSFTData | None = Field(default=None, description="Random tokens in place of a dataset.")

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> Self:
        if self.batch_size % self.micro_batch_size:
            raise Problem(
                f"micro_batch_size {self.micro_batch_size} does not divide batch_size {self.batch_size}",
                "micro_batch_size",
                "batch_size",
            )
        return self


class SFTEval(Measure):
    """Evaluation of versions while the training goes on: an `eval` of its own follows it."""

    interval: PositiveInt | None = Field(
        default=None, description="Steps between two evaluations; their weights are exported (None: none in between)."
    )
    at_start: bool = Field(default=True, description="Evaluate the base model first. The last weights always are.")

    @model_validator(mode="after")
    def _has_environments(self) -> Self:
        if not self.environments:
            raise Problem("no environment to evaluate: give [eval.environment] with an `id`", "environment")
        return self


class SFTConfig(TrainingConfig):
    """Supervised fine-tuning."""

    data: SFTData = Field(default_factory=SFTData, description="What is trained on.")
    weights: ExportConfig = Field(default_factory=ExportConfig, description="The exported weights.")
    eval: SFTEval | None = Field(default=None, description="Evaluation while training.")
    inference: InferenceConfig | None = Field(
        default=None, description="The server for evaluations, started beside (None: one that runs already)."
    )

    as_given = staticmethod(without_address)
    share = staticmethod(share_eval_server)

    @model_validator(mode="after")
    def _has_use_for_a_server(self) -> Self:
        if self.inference is not None and self.eval is None:
            raise Problem("inference starts a server for evaluations, and there is no [eval]", "inference", "eval")
        return self
