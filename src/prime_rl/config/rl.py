"""Settings of `rl`: a whole run, its processes, and what they share."""

import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationInfo, model_validator

from prime_rl.config.base import Checks, Problem, check, conflict, option
from prime_rl.config.inference import InferenceConfig
from prime_rl.config.loader import Entry, Table, from_files
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.config.share import share
from prime_rl.config.shared import ClientConfig, Device, ModelConfig, MonitorConfig, RecoverableRun, SlurmConfig
from prime_rl.config.trainer import TrainerConfig, serve_adapters


class RLConfig(RecoverableRun, MonitorConfig):
    """A whole run: trainer, orchestrator and inference server. Settings given here reach every process that needs them.
    `rl doctor RUN` tells from a run directory who waits for whom and why, `rl audit RUN` what became of every episode,
    `rl view RUN` shows it on a web page, `rl parity` before a run whether server and trainer compute the same"""

    model: ModelConfig = option(ModelConfig, "The model.")
    device: Device = option("auto", "Where to train and serve (auto: CUDA where there is a GPU).")
    seq_len: PositiveInt | None = option(None, "Most tokens of a sample (None: as the sections say).")
    slurm: SlurmConfig | None = option(None, "Submit the run as a SLURM job (None: run here).", mark="one_time")
    trainer_gpus: PositiveInt = option(1, "GPUs that train.")
    inference_gpus: PositiveInt | None = option(None, "GPUs that serve, by servers from server.port on (None: one's).")
    share_gpus: bool = option(False, "Train and serve on the same GPUs: gpu_memory_utilization splits them.")
    trainer_ranks: PositiveInt | None = option(None, "Processes that train (None: one per GPU, on CPU one).")
    nodes: PositiveInt = option(1, "Nodes of the run; the same command runs on each, with its node_rank.")
    node_rank: NonNegativeInt | None = option(None, "Which of several nodes this is, from 0 on.", mark="one_time")
    inference_nodes: PositiveInt = option(1, "Of several nodes, the first ones, which serve; the others train.")
    rendezvous: str | None = option(None, "HOST:PORT of the first node that trains, where several that train meet.")
    lost_node: Literal["wait", "end"] = option("wait", "Wait for a node that gives no sign of life, or end the run.")
    ready_timeout: PositiveFloat = option(1200.0, "Seconds until the inference server must be ready.")
    max_restarts: NonNegativeInt = option(3, "Restarts of a process in a row, while the run gets no further (0: none).")
    recovery_interval: PositiveInt | Literal["auto"] | None = option(
        "auto", "Steps between two recovery checkpoints; the newest is kept (auto: for 1 % of the time; None: none)."
    )
    heartbeat_timeout: PositiveFloat = option(60.0, "Seconds without a heartbeat after which a process is restarted.")
    stall_timeout: PositiveFloat = option(1800.0, "Seconds without progress after which a process is restarted.")
    trainer: TrainerConfig = option(TrainerConfig, "The trainer.")
    orchestrator: OrchestratorConfig = Field(description="The orchestrator.")
    inference: InferenceConfig | None = option(None, "The inference server (None: one that runs already).")

    share = staticmethod(share)

    @classmethod
    def from_toml(cls, *paths: str | Path, **values: Any) -> Self:
        """Return the run of TOML files and of `values`, which win: nested (`trainer={"optim": {"lr": 1e-5}}`) or by
        dotted key. Raises ConfigError with every mistake."""
        return from_files(cls, *paths, **values)

    @model_validator(mode="before")
    @classmethod
    def _share(cls, data: Any, info: ValidationInfo) -> Any:
        """Share settings of a configuration made directly as the loader does, whose context says that it has."""
        if info.context is not None or not isinstance(data, dict):
            return data
        parts = [name for name, value in data.items() if isinstance(value, BaseModel)]
        check(conflict(parts, f"settings of {', '.join(parts)} would not be shared: give a dict of them"))
        table = Table()
        table.add((), data, Entry())
        share(table)
        return table.tree()

    @model_validator(mode="before")
    @classmethod
    def _refuse_tenants(cls, data: Any) -> Any:
        trainer = data.get("trainer") if cls is not DeploymentConfig and isinstance(data, dict) else None
        if isinstance(trainer, dict) and trainer.get("tenants") is not None:
            check(Problem("<trainer.tenants> is for `rl tenants`, which starts the servers and the trainer alone"))
        return data

    def checks(self) -> Checks:
        trainer, orchestrator = self.trainer, self.orchestrator
        yield serve_adapters(self.inference, trainer.lora, "trainer.lora", trainer.tenants)
        resumes = self.ckpt is not None and self.ckpt.resume_step is not None
        both = "<recover> goes on from the newest state, <ckpt.resume_step> from a checkpoint: give one of them"
        yield conflict(self.recover and resumes and not self.clean, both)
        yield from self._check_nodes()
        if "orchestrator" not in self.model_fields_set:
            return
        alone = "`rl` starts a trainer of its own: leave <orchestrator.tenant> out"
        yield conflict(orchestrator.tenant, alone)
        reply, context = orchestrator.sampling.max_tokens, self.inference.max_model_len if self.inference else None
        room = f"<orchestrator.sampling.max_tokens> {reply} leaves no room for a prompt within"
        yield conflict(reply and context and reply >= context, f"{room} <inference.max_model_len> {context}")
        lengths = f"<orchestrator.seq_len> {orchestrator.seq_len} exceeds <trainer.seq_len> {trainer.seq_len}"
        yield conflict(orchestrator.seq_len > trainer.seq_len, f"{lengths}: samples would not fit a micro-batch")
        yield from orchestrator.check_loss(trainer.loss, "trainer.loss", "orchestrator.", self.bench)

    def _check_nodes(self) -> Checks:
        if self.nodes == 1:
            yield conflict(self.node_rank is not None, "<node_rank> is for several nodes: give <nodes>, too")
            return
        servers = 0 if self.inference is None else self.inference_nodes
        yield conflict(self.node_rank is None, "each of several <nodes> is given its <node_rank>, from 0 on")
        rank = self.node_rank or 0
        ranks = f"<node_rank> {rank}: the ranks of {self.nodes} <nodes> are 0 to {self.nodes - 1}"
        yield conflict(rank >= self.nodes, ranks)
        none = f"<inference_nodes> {servers} leaves none of {self.nodes} <nodes> to train on"
        yield conflict(servers >= self.nodes, none)
        meet = rank >= servers and self.nodes - servers > 1 and self.rendezvous is None
        yield conflict(meet, "several nodes that train need a <rendezvous>, HOST:PORT of the first of them")
        malformed = self.rendezvous is not None and not re.fullmatch(r"\S+:\d+", self.rendezvous)
        yield conflict(malformed, f"<rendezvous> {self.rendezvous}: give HOST:PORT")
        one = "each of <inference_nodes> runs one server: leave <inference_gpus> out"
        yield conflict(self.inference_gpus, one)
        for name in ("slurm", "share_gpus", "bench"):  # tenants: see `DeploymentConfig`
            yield conflict(getattr(self, name), f"<{name}> is for one node: leave it or <nodes> out")


class DeploymentConfig(RLConfig):
    """Start the servers and the trainer of a deployment, which go on until they are stopped. Orchestrators join as its
    tenants, each with an adapter of its own: `orchestrator @ tenant.toml --tenant.join RUN`. Takes what `rl` takes"""

    orchestrator: OrchestratorConfig = option(OrchestratorConfig.model_construct, "Not used.", mark="one_time")

    def checks(self) -> Checks:
        tenants = "a deployment trains tenants' adapters: give [<trainer.tenants>] and [trainer.lora]"
        yield conflict(self.trainer.tenants is None, tenants)
        kept = "<clean> would not remove runs of tenants: leave it out; `orchestrator --clean` starts one over"
        yield conflict(self.clean, kept)
        self.recover = True
        one = "tenants share a trainer of one process: leave <trainer_gpus> and <trainer_ranks> out"
        yield conflict(self.trainer_gpus > 1 or (self.trainer_ranks or 1) > 1, one)
        yield conflict(self.nodes > 1, "a deployment is on one node: leave <nodes> out")
        yield conflict(self.slurm, "a deployment is not submitted: leave <slurm> out, and start it in a job of yours")


class ParityConfig(RLConfig):
    """Compare the log-probabilities that a server and the trainer compute of the same tokens, and say whether RL on
    this model is sound. Takes what `rl` takes, so the file of a run, too, and uses its server, trainer and loss"""

    orchestrator: OrchestratorConfig = option(OrchestratorConfig.model_construct, "Not used.")
    client: ClientConfig | None = option(None, "A server that runs already (None: start one, and stop it to score).")
    replies: PositiveInt = option(16, "Replies that the server samples.")
    reply_tokens: PositiveInt = option(128, "Most tokens of a reply.")
    layers: bool = option(False, "Show, layer by layer, where the trainer begins to differ from transformers.")
