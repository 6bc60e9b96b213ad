"""Settings of evaluations on their own."""

from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from prime_rl.config.base import BaseConfig, Checks, conflict, option
from prime_rl.config.shared import (
    ClientConfig,
    EnvConfig,
    Environments,
    Examples,
    Fraction,
    ModelConfig,
    MonitorConfig,
    SamplingConfig,
    SlurmConfig,
)


class EvalClientConfig(ClientConfig):
    """The server, or the API, to talk to."""

    type: Literal["auto", "tokens", "chat"] = option(
        "auto",
        "By tokens, as `inference` is asked, or by the chat route of any OpenAI-compatible API (auto: it tells).",
    )


class EvalEnv(EnvConfig):
    """An environment that is evaluated."""

    num_examples: Examples | None = option(None, "Tasks of it (-1: all; None: as above).")
    rollouts_per_example: PositiveInt | None = option(None, "Attempts at one task of it (None: as above).")


class Measure(Environments[EvalEnv]):
    """What an evaluation runs, how, and on which server."""

    client: EvalClientConfig = option(EvalClientConfig, "The server, or the API, to talk to.")
    num_examples: Examples = option(-1, "Tasks per environment (-1: all).")
    rollouts_per_example: PositiveInt = option(1, "Attempts at one task.")
    sampling: SamplingConfig = option(SamplingConfig, "How tokens are sampled.")
    seq_len: PositiveInt = option(2048, "Most tokens of prompt and reply.")
    max_concurrent: PositiveInt = option(64, "Most episodes in flight, of all environments.")
    rollout_timeout: PositiveFloat = option(300.0, "Seconds that one episode may take.")
    renderer: str = option("auto", "Renderer of chats: auto, default, chatml, or a name that renderers has.")


class EvalConfig(BaseConfig, Measure):
    """Evaluation of a model that a server holds, or of the versions that it is given."""

    model: ModelConfig = option(ModelConfig, "The model.")
    weights_dir: Path | None = option(None, "Directory of versions to evaluate, loaded one after the other.")
    steps: list[NonNegativeInt] = option(list, "Versions of weights_dir to evaluate (none given: all).")
    interval: PositiveInt | None = option(None, "Evaluate only versions that are multiples of this (None: all).")
    eval_base: bool = option(True, "Evaluate the base model too, before the versions.")
    follow: bool = option(False, "Evaluate each version as it is committed, until the run that writes them has ended.")
    logprob_check: bool = option(True, "Check after every load that the server computes what the trainer computed.")
    solved_at: float = option(1.0, "Reward from which a task counts as solved, for pass@k.")
    max_error_rate: Fraction = option(0.1, "Share of failed attempts beyond which the exit status is 1.")
    clean: bool = option(False, "Remove earlier results rather than go on with them.", mark="one_time")
    monitor: MonitorConfig = option(MonitorConfig, "Where metrics go, beside metrics/*.jsonl.")
    slurm: SlurmConfig | None = option(None, "Submit it as a SLURM job (None: run here).", mark="one_time")

    def checks(self) -> Checks:
        without, client, chat = self.weights_dir is None, self.client, self.client.type == "chat"
        for key in ("steps", "interval", "follow", "eval_base"):
            chosen = getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True)
            yield conflict(without and chosen, f"<{key}> is about versions: give weights_dir too")
        chooses = "follow" if self.follow else "interval" if self.interval is not None else ""
        both = f"<steps> names the versions and <{chooses}> chooses them: give one of them"
        yield conflict(self.steps and chooses, both)
        several = len(client.base_urls) != 1 or client.admin_base_url is not None
        keys = ("weights_dir", "client.type")
        yield conflict(chat and not without, "an API by its chat route takes no weights", *keys)
        yield conflict(chat and several, "the chat route is asked at one address", "client.base_url", "client.type")
