"""Settings of the RL trainer, most of which SFT has as well: optimizers, losses, model, adapters, weights."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from prime_rl.config.base import Checks, Problem, Section, conflict, option
from prime_rl.config.inference import ADAPTER_RANKS, AdaptersConfig, InferenceConfig
from prime_rl.config.shared import (
    Device,
    Fraction,
    Length,
    ModelConfig,
    MonitorConfig,
    RecoverableRun,
    RunConfig,
    TenantsConfig,
)


class _Optimizer(Section):
    """What every optimizer has."""

    type: str = Field(description="Kind of optimizer.")
    lr: NonNegativeFloat = option(1e-6, "Learning rate.")
    weight_decay: NonNegativeFloat = option(0.01, "Decoupled weight decay.")
    max_norm: PositiveFloat | None = option(1.0, "Gradient norm that is clipped to (None: not clipped).")
    offload: bool = option(False, "Keep the optimizer's states in host memory between steps.")


class AdamW(_Optimizer):
    """AdamW."""

    type: Literal["adamw"] = option("adamw", "Kind of optimizer.")
    betas1: float = option(0.9, "Decay of the running mean of the gradient.", ge=0, lt=1)
    betas2: float = option(0.999, "Decay of the running mean of its square.", ge=0, lt=1)


class Muon(_Optimizer):
    """Muon for the matrices of the layers; embeddings, head, norms and biases are updated by AdamW."""

    type: Literal["muon"] = option("muon", "Kind of optimizer.")
    momentum: float = option(0.95, "Decay of the running mean of the gradient.", ge=0, lt=1)


OptimConfig = AdamW | Muon


class ConstantScheduler(Section):
    """Warm-up, then constant."""

    type: Literal["constant"] = option("constant", "Kind of schedule.")
    warmup_steps: NonNegativeInt = option(0, "Steps over which the learning rate rises.")


class LinearScheduler(Section):
    """Warm-up, constant, then a linear decay that ends at max_steps."""

    type: Literal["linear"] = option("linear", "Kind of schedule.")
    warmup_steps: NonNegativeInt = option(10, "Steps over which the learning rate rises.")
    decay_steps: NonNegativeInt = option(10, "Last steps, over which it falls.")
    min_lr: NonNegativeFloat = option(0.0, "Learning rate at the end.")


class CosineScheduler(Section):
    """Warm-up, then half a cosine that ends at max_steps."""

    type: Literal["cosine"] = option("cosine", "Kind of schedule.")
    warmup_steps: NonNegativeInt = option(10, "Steps over which the learning rate rises.")
    min_lr: NonNegativeFloat = option(0.0, "Learning rate at the end.")


SchedulerConfig = ConstantScheduler | LinearScheduler | CosineScheduler


def check_schedule(scheduler: SchedulerConfig, limit: int | None, section: str) -> Problem | None:
    """Return what contradicts between the schedule, whose path is `section`, and `max_steps`."""
    if limit is None:
        endless = f"<{section}.type> '{scheduler.type}' needs <max_steps>, to end at"
        return conflict(scheduler.type != "constant", endless)
    decay = scheduler.decay_steps if isinstance(scheduler, LinearScheduler) else 0
    parts = f"<{section}.warmup_steps> {scheduler.warmup_steps}"
    parts += f" + <{section}.decay_steps> {decay}" if decay else ""
    return conflict(scheduler.warmup_steps + decay > limit, f"{parts} exceeds <max_steps> {limit}")


Level = Literal["token", "sequence", "geometric"]
Estimator = Literal["k1", "k2", "k3"]
Normalization = Literal["token", "sequence", "group", "fixed"]
_WEIGHS_THE_SAME = (
    "What weighs the same: tokens, sequences, or groups; or a token weighs 1 / fixed_length of its sequence."
)


class PolicyLoss(Section):
    """What all losses have beside their policy gradient."""

    normalization: Normalization = option("token", _WEIGHS_THE_SAME)
    fixed_length: PositiveInt | None = option(None, "Tokens that every sequence is divided by (normalization fixed).")
    kl_coef: NonNegativeFloat = option(0.0, "Weight of the divergence from orchestrator.reference.")
    kl_estimator: Estimator | None = option(None, "How that divergence is estimated (None: k3).")
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.")

    def checks(self) -> Checks:
        fixed = self.fixed_length
        needs = "<normalization> fixed needs fixed_length, the tokens that every sequence is divided by"
        message = needs if fixed is None else f"<fixed_length> has no effect: <normalization> is {self.normalization}"
        yield conflict((self.normalization == "fixed") != (fixed is not None), message)


class DefaultLoss(PolicyLoss):
    """Importance-weighted policy gradient: tokens whose probability moved too far are masked."""

    type: Literal["default"] = option("default", "Kind of loss.")
    mask_low: NonNegativeFloat = option(0.2, "Largest fall in probability of a token that is trained.")
    mask_high: NonNegativeFloat = option(0.2, "Largest rise in probability of a token that is trained.")
    adv_tau: NonNegativeFloat = option(1.0, "Weight of the advantage.")
    kl_tau: NonNegativeFloat = option(1e-3, "Weight of the penalty for moving away from the sampler.")


class IPOLoss(PolicyLoss):
    """As the default loss, with one bound on the change of probability whatever the advantage."""

    type: Literal["ipo"] = option("ipo", "Kind of loss.")
    threshold: NonNegativeFloat = option(0.1, "Largest change in probability of a token that is trained.")
    adv_tau: NonNegativeFloat = option(1.0, "Weight of the advantage.")
    kl_tau: NonNegativeFloat = option(1e-3, "Weight of the penalty for moving away from the sampler.")


class GRPOLoss(PolicyLoss):
    """Clipped ratio as in PPO and GRPO; a larger clip_high is DAPO's."""

    type: Literal["grpo"] = option("grpo", "Kind of loss.")
    clip_low: Fraction = option(0.2, "The ratio is clipped below 1 - clip_low.")
    clip_high: NonNegativeFloat = option(0.2, "The ratio is clipped above 1 + clip_high.")


class PPOClipLoss(GRPOLoss):
    """Clipped ratio with a second clip, which bounds what a token of negative advantage can do."""

    type: Literal["ppo_clip"] = option("ppo_clip", "Kind of loss.")  # type: ignore[assignment]
    dual_clip: float = option(3.0, "Ratio that a negative advantage is clipped at.", gt=1)

    def checks(self) -> Checks:
        message = f"<dual_clip> {self.dual_clip} is not above 1 + <clip_high> {self.clip_high}"
        yield conflict(self.dual_clip <= 1 + self.clip_high, message)


class GSPOLoss(PolicyLoss):
    """Clipped ratio of whole sequences: the geometric mean of their tokens' ratios."""

    type: Literal["gspo"] = option("gspo", "Kind of loss.")
    normalization: Normalization = option("sequence", _WEIGHS_THE_SAME)
    clip_low: Fraction = option(3e-4, "The ratio is clipped below 1 - clip_low.")
    clip_high: NonNegativeFloat = option(4e-4, "The ratio is clipped above 1 + clip_high.")


class CISPOLoss(PolicyLoss):
    """Policy gradient weighted by the clipped ratio: every token keeps its gradient."""

    type: Literal["cispo"] = option("cispo", "Kind of loss.")
    clip_low: Fraction = option(1.0, "The weight is at least 1 - clip_low (1: no bound).")
    clip_high: NonNegativeFloat = option(4.0, "The weight is at most 1 + clip_high.")


# Least and largest ratio by level. Over a thousand tokens the product is rarely near 1, the geometric mean rarely far
# from it. Tokens: IcePop's (Ling team 2025, arXiv:2510.18855). Sequences: only an upper bound, as in "When Speed Kills
# Stability" (Liu et al. 2025, blog): a lower one would drop most long ones, of little weight anyway. Geometric: ours.
_MASK_BOUNDS: dict[Level, tuple[float, float]] = {
    "token": (0.5, 5.0),
    "sequence": (0.0, 2.0),
    "geometric": (0.99, 1.01),
}
# Tokens and sequences: TIS's ("Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", a blog post by
# Yao et al. 2025). A geometric mean never comes near 2, so its bound is the one of masking.
_TRUNCATE_BOUNDS: dict[Level, float] = {"token": 2.0, "sequence": 2.0, "geometric": 1.01}


class ReinforceLoss(PolicyLoss):
    """Policy gradient with an importance weight that corrects for sampling with other weights or another engine."""

    type: Literal["reinforce"] = option("reinforce", "Kind of loss.")
    importance: Literal["none", "truncate", "mask"] = option(
        "truncate", "Weight: 1, the ratio cut off at `high` (TIS), or 0 outside of low … high (MIS, IcePop)."
    )
    level: Level = option("token", "The ratio of a token, of its sequence (product), or that one's geometric mean.")
    low: NonNegativeFloat | None = option(None, "Least ratio for mask (None: 0.5; sequence 0, geometric 0.99).")
    high: PositiveFloat | None = option(None, "Largest ratio (None: 2; mask by token 5; geometric 1.01).")

    @property
    def least(self) -> float:
        """`low`, or the default of the level."""
        return self.low if self.low is not None else _MASK_BOUNDS[self.level][0]

    @property
    def most(self) -> float:
        """`high`, or the default of the level."""
        if self.high is not None:
            return self.high
        return _MASK_BOUNDS[self.level][1] if self.importance == "mask" else _TRUNCATE_BOUNDS[self.level]

    def checks(self) -> Checks:
        unused = f"has no effect: <importance> is {self.importance}"
        mask, none = self.importance == "mask", self.importance == "none"
        yield conflict(mask and self.least >= self.most, f"<low> {self.least} is not below <high> {self.most}")
        yield conflict(not mask and self.low is not None, f"<low> {unused}")
        yield conflict(none and self.high is not None, f"<high> {unused}")
        yield conflict(none and self.level != "token", f"<level> {self.level} {unused}")


class CustomLoss(PolicyLoss):
    """A policy loss of your own."""

    type: Literal["custom"] = option("custom", "Kind of loss.")
    path: str = Field(description="Function: module:name.")
    args: dict[str, Any] = option(dict, "Its keyword arguments.")


LossConfig = DefaultLoss | IPOLoss | GRPOLoss | PPOClipLoss | GSPOLoss | CISPOLoss | ReinforceLoss | CustomLoss


Attention = Literal["auto", "flash_attention_4", "flash_attention_3", "cudnn", "varlen", "sdpa"]
Recompute = Literal["none", "pointwise", "wide", "attention", "full"]
DType = Literal["auto", "float32", "bfloat16"]


class TrainerModel(ModelConfig):
    """The model and how it is computed."""

    attention: Attention = option("auto", "Attention kernel (auto: the fastest that is there).")
    compile: bool | None = option(None, "Compile each block (None: on CUDA only).")
    activation_checkpointing: Literal["auto"] | Recompute = option(
        "auto", "What backward computes again rather than keeps (auto: the least that fits into memory)."
    )
    activation_offload: bool | None = option(None, "Keep activations in host memory meanwhile (None: where it pays).")
    memory_limit: PositiveFloat | None = option(None, "GiB of a GPU that auto plans with (None: what is free).")
    dtype: DType = option("auto", "Type that is computed in (auto: bfloat16 on CUDA, float32 on CPU).")
    head_chunk: PositiveInt | None = option(None, "Tokens whose logits exist at the same time (None: as many as fit).")
    reshard_after_forward: bool | None = option(None, "Free gathered parameters until backward (None: as memory asks).")
    dp_replicate: PositiveInt = option(1, "Groups of ranks, each of which shards a whole copy (HSDP).")
    moe_aux_loss: NonNegativeFloat = option(0.0, "Weight of the loss that balances the experts' load (0: none).")
    moe_bias_update: NonNegativeFloat = option(0.0, "Step of routers' correction biases to the mean load (0: none).")


class LoRAConfig(Section):
    """Low-rank adapters beside the linear layers, which are trained in place of the model's own weights."""

    rank: PositiveInt = option(16, "Rank of the adapters.")
    alpha: PositiveFloat = option(32.0, "What an adapter adds is scaled by alpha / rank.")
    dropout: float = option(0.0, "Share of an adapter's inputs that a step leaves out.", ge=0, lt=1)
    target_modules: Literal["all-linear"] | list[str] = option(
        "all-linear", "Linear layers with an adapter, by the last parts of their names (all-linear: all in the blocks)."
    )
    experts: bool = option(False, "Adapters for each expert of a mixture, too.")
    modules_to_save: list[str] = option(list, "Modules trained whole beside the adapters (needs serve merged).")
    adapter: Path | None = option(None, "Directory of an adapter to start from, in PEFT's format.")
    serve: Literal["adapter", "merged"] = option(
        "adapter", "Versions are adapters, or merged: full weights, for engines that cannot serve adapters."
    )

    def checks(self) -> Checks:
        adapts = self.serve == "adapter"
        whole = "<modules_to_save> are no part of an adapter that vLLM serves: set <serve> = merged"
        most = f"<rank> {self.rank} exceeds {ADAPTER_RANKS[-1]}, the most that vLLM serves: set <serve> = merged"
        nothing = not (self.target_modules or self.experts or self.modules_to_save)
        yield conflict(nothing, "<target_modules> is empty: nothing would be trained")
        yield conflict(adapts and self.modules_to_save, whole)
        yield conflict(adapts and self.rank > ADAPTER_RANKS[-1], most)

    def describe(self) -> str:
        """Say what is trained and made of it."""
        merged = "" if self.serve == "adapter" else "merged "
        begin = "" if self.adapter is None else f" that begin as {self.adapter}"
        return f"{merged}adapters of rank {self.rank}{begin}"


def serve_adapters(
    server: InferenceConfig | None, lora: LoRAConfig | None, section: str, tenants: TenantsConfig | None = None
) -> Problem | None:
    """Have the server of a run make room for its adapters, unless that is set already; return what contradicts them.
    `section` is the path of `lora`."""
    if server is None:
        return None
    if lora is None or lora.serve == "merged":
        full = (
            f"<inference.lora> serves adapters alone, and versions are full weights: leave it out, or give <{section}>"
        )
        return conflict(server.lora is not None, f"{full}{'' if lora is None else '.serve = adapter'}")
    server.lora = server.lora or AdaptersConfig(max_rank=lora.rank)
    server.lora.tenants = server.lora.tenants or tenants
    if server.lora.tenants != tenants:
        return Problem("<inference.lora.tenants> is not <trainer.tenants>: give the latter alone")
    room = f"<inference.lora.max_rank> {server.lora.max_rank} is too small for <{section}.rank> {lora.rank}"
    return conflict(server.lora.max_rank < lora.rank, room)


class ExportConfig(Section):
    """The exported weights."""

    dtype: DType = option("auto", "Type of the exported weights (auto: that of the model's own files).")


class WeightsConfig(ExportConfig):
    """The exported weights, one version per step."""

    keep: NonNegativeInt | None = option(0, "Versions kept beyond those that are needed (None: all).")
    save_interval: PositiveInt | None = option(None, "Steps between two versions kept on disk for good (None: none).")
    transport: Literal["auto", "filesystem", "memory"] = option(
        "auto", "How servers get a version: files, or the trainer's memory (auto: memory from a GPU, else files)."
    )
    host: str | None = option(None, "Address that servers reach the trainer at (None: its default route).")
    port: NonNegativeInt = option(0, "Port there that servers ask at, for memory (0: any).")
    timeout: PositiveFloat = option(30.0, "Seconds without progress after which a transfer from memory fails.")
    shares_gpu: bool = option(False, "A server on the trainer's GPU keeps a copy there, too (rl --share-gpus says so).")


class FakeData(Section):
    """Random samples in place of an orchestrator's."""

    lengths: Literal["fixed", "lognormal"] = option("fixed", "Lengths: seq_len each, or as of rollouts.")
    batch_size: PositiveInt = option(128, "Samples per step.")
    micro_batch_size: PositiveInt = option(8, "Samples in one micro-batch (lognormal: as many as fit).")
    seq_len: Length | None = option(None, "Tokens per sample (None: as many as fit; lognormal: at most 4096).")


class TrainerData(Section):
    """What is trained on."""

    fake: FakeData | None = option(None, "Random samples in place of an orchestrator's.")


class TrainingConfig(RunConfig):
    """What RL and SFT training have in common."""

    model: TrainerModel = option(TrainerModel, "The model and how it is computed.")
    lora: LoRAConfig | None = option(None, "Train adapters (None: all weights).")
    device: Device = option("auto", "Where to train (auto: CUDA where there is a GPU).")
    optim: OptimConfig = option(AdamW, "The optimizer.", discriminator="type")
    scheduler: SchedulerConfig = option(ConstantScheduler, "Schedule of the learning rate.", discriminator="type")
    monitor: MonitorConfig = option(MonitorConfig, "Where metrics go, beside metrics/*.jsonl.")
    dist_timeout: PositiveFloat = option(600.0, "Seconds that a collective may take.")

    def checks(self) -> Checks:
        biases = "<model.moe_bias_update> changes weights, and <lora> trains adapters alone: leave one of them out"
        yield conflict(self.lora is not None and self.model.moe_bias_update, biases)
        yield check_schedule(self.scheduler, self.max_steps, "scheduler")


class TrainerConfig(TrainingConfig, RecoverableRun):
    """The RL trainer."""

    seq_len: Length = option(2048, "Tokens of a packed micro-batch.")
    loss: LossConfig = option(DefaultLoss, "The loss of a token.", discriminator="type")
    data: TrainerData = option(TrainerData, "What is trained on.")
    weights: WeightsConfig = option(WeightsConfig, "The exported weights, one version per step.")
    recovery_interval: PositiveInt | Literal["auto"] | None = option(
        None, "Steps between two recovery checkpoints; the newest is kept (auto: for 1 % of the time; None: none)."
    )
    rollout_timeout: PositiveFloat = option(3600.0, "Seconds to wait for a batch of rollouts.")
    tenants: TenantsConfig | None = option(None, "Train an adapter for each orchestrator that joins (None: for one).")

    def checks(self) -> Checks:
        fake, lora = self.data.fake, self.lora
        if self.tenants is not None:
            adapts = "<tenants> share a model by adapters"
            yield conflict(lora is None or lora.serve != "adapter", f"{adapts}: give <lora>, with serve = adapter")
            yield conflict(lora and lora.experts, f"{adapts} of linear layers: leave <lora.experts> out")
            yield conflict(lora and lora.dropout, "<lora.dropout> draws from one generator for all <tenants>: set 0")
            yield conflict(self.model.moe_aux_loss, "<model.moe_aux_loss> has no effect with <tenants>: leave it out")
            yield conflict(lora and lora.adapter, "<tenants> begin with new adapters: leave <lora.adapter> out")
            yield conflict(fake or self.bench, "<tenants> bring rollouts: leave data.fake and bench out", "data.fake")
            yield conflict(self.ckpt, "<tenants> have checkpoints of their own: leave <ckpt> out")
            yield conflict(self.max_steps, "<tenants> have steps of their own: leave <max_steps> out")
        if fake is not None and fake.seq_len is not None and fake.seq_len > self.seq_len:
            yield Problem(f"<data.fake.seq_len> {fake.seq_len} exceeds <seq_len> {self.seq_len}")
