"""Settings of supervised fine-tuning."""

from typing import Literal

from pydantic import PositiveInt

from prime_rl.config.base import Checks, Section, conflict, option
from prime_rl.config.eval import Measure
from prime_rl.config.inference import InferenceConfig
from prime_rl.config.share import share_eval_server
from prime_rl.config.shared import Length, SlurmConfig
from prime_rl.config.trainer import ExportConfig, TrainingConfig, serve_adapters


class LossMask(Section):
    """Messages whose tokens are trained on."""

    system: bool = option(False, "Train on system messages.")
    user: bool = option(False, "Train on user messages.")
    assistant: bool = option(True, "Train on assistant messages.")
    tool: bool = option(False, "Train on tool messages.")


class FakeSFTData(Section):
    """Random tokens in place of a dataset."""

    type: Literal["fixed", "variable", "lognormal"] = option(
        "fixed", "Lengths of samples: seq_len each, random up to it, or spread as rollouts are."
    )


class SFTData(Section):
    """A dataset of prompts and completions, or of messages."""

    name: str = option("PrimeIntellect/Reverse-Text-SFT", "Hub name, or local path: jsonl, parquet, saved dataset.")
    split: str = option("train", "Split of a hub or saved dataset.")
    subset: str | None = option(None, "Subset of a hub dataset (None: its default).")
    shuffle: bool = option(True, "Shuffle before every epoch.")
    seq_len: Length = option(2048, "Tokens of a packed row; longer samples are dropped.")
    batch_size: PositiveInt = option(128, "Packed rows per step.")
    micro_batch_size: PositiveInt = option(1, "Packed rows per forward pass of one process.")
    loss_mask: LossMask = option(LossMask, "Messages whose tokens are trained on.")
    fake: FakeSFTData | None = option(None, "Random tokens in place of a dataset.")

    def checks(self) -> Checks:
        sizes = f"<micro_batch_size> {self.micro_batch_size} does not divide <batch_size> {self.batch_size}"
        yield conflict(self.batch_size % self.micro_batch_size, sizes)


class SFTEval(Measure):
    """Evaluation of versions while the training goes on: an `eval` of its own follows it."""

    interval: PositiveInt | None = option(None, "Steps between two evaluations and their exports (None: none).")
    at_start: bool = option(True, "Evaluate the base model first. The last weights always are.")

    def checks(self) -> Checks:
        message = "no environment to evaluate: give [eval.environment] with an `id`"
        yield conflict(not self.environments, message, "environment")


class SFTConfig(TrainingConfig):
    """Supervised fine-tuning."""

    data: SFTData = option(SFTData, "What is trained on.")
    weights: ExportConfig = option(ExportConfig, "The exported weights.")
    eval: SFTEval | None = option(None, "Evaluation while training.")
    inference: InferenceConfig | None = option(None, "The server for evaluations (None: one that runs already).")
    slurm: SlurmConfig | None = option(None, "Submit it as a SLURM job (None: run here).", mark="one_time")

    share = staticmethod(share_eval_server)

    def checks(self) -> Checks:
        yield serve_adapters(self.inference, self.lora, "lora")
        unused = self.inference is not None and self.eval is None
        yield conflict(unused, "<inference> starts a server for evaluations, and there is no [eval]")
