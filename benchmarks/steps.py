"""Whole steps of the trainer on real shapes with random weights and fake data: what a case is, what a run of it gives.

From the next step's data to the committed version everything is the trainer's own code, here called in the order of the
trainer's loop, with marks in between.
"""

import copy
import math
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Lfm2Config,
    PretrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from prime_rl.config import SFTConfig, TrainerConfig
from prime_rl.config.trainer import WeightsConfig
from prime_rl.monitor import Extras, log
from prime_rl.trainer import attention, memory, moe, perf, router_replay, routing
from prime_rl.trainer.model import build_policy, compute_dtype
from prime_rl.trainer.optim import build_optimizer, learning_rate
from prime_rl.trainer.packing import Document
from prime_rl.trainer.parallel import close_world, gather, init_world, now
from prime_rl.trainer.reference_scorer import ReferenceScorer
from prime_rl.trainer.report import MetricRows, Report, StepMetrics, sum_on_device
from prime_rl.trainer.rl import train as rl
from prime_rl.trainer.rl.data import FakeSamples
from prime_rl.trainer.sft import train as sft
from prime_rl.trainer.source import Source, attention_heads, find_model
from prime_rl.trainer.training_loop import forward_backward, optimizer_step
from prime_rl.trainer.weight_publisher import WeightPublisher, published_bytes

_SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "tie_word_embeddings": True,
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TINY = {"tiny": Qwen3Config(**_SMALL), "tiny-moe": Qwen3MoeConfig(**_SMALL, **_EXPERTS)}
# Published shapes of hybrids, which `find_model` does not know: gated delta rules, short convolutions.
SHAPES = {
    "Qwen3.5-0.8B": Qwen3_5TextConfig(
        vocab_size=248320, hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=8,
        num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16,
        linear_key_head_dim=128, linear_value_head_dim=128, tie_word_embeddings=True,
    ),
    "LFM2-1.2B": Lfm2Config(
        vocab_size=65536, hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        layer_types=["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
    ),
}  # fmt: skip
TOKENIZER = Path(__file__).parent.parent / "assets" / "tiny-reverse"
SAMPLES = 128  # of a step whose lengths are spread as rollouts are, per rank: about seven micro-batches of 16k tokens


@dataclass(frozen=True)
class Case:
    """One row of a table.

    Args:
        model: 0.6B, 1.7B, 4B, 8B, 30B-A3B, one of `SHAPES`, tiny or tiny-moe; random weights.
        documents: Of a micro-batch: `16x4096` (number x tokens), or `lognormal:16384` (128 samples a step and rank, as
            long as rollouts, in as many micro-batches of so many tokens as they need).
        loss: `rl` or `sft`.
        layers: The model's first layers alone.
        micro_batches: Per rank and step.
        warm: Steps that are not measured.
        limit: Seconds for the whole case.
        export: Publish the weights after every step: RL's on a GPU from memory, else as files.
        logprob_check: Score the fixed prompt of every version, as RL runs do.
        replay: Each token's experts come with the data, as with `router_replay`.
        settings: Options of the trainer's `model` section; none is a user's run without any option.
        optim: Options of its `optim` section.
        objective: Options of its `loss` section (`loss.type=gspo`).
        lora: Options of its `lora` section (`lora.rank=16`); none: all weights are trained.
        bar: Tokens per second per rank to reach; `mfu_bar` the same in per cent of the peak, `within` the GiB allowed.
        peer: What the peer reaches.
    """

    name: str
    model: str = "0.6B"
    documents: str = "1x16384"
    loss: str = "rl"
    layers: int | None = None
    ranks: int = 1
    micro_batches: int = 2
    warm: int = 3
    steps: int = 6
    limit: float = 150.0
    export: bool = True
    logprob_check: bool = True
    replay: bool = False
    settings: dict[str, object] = field(default_factory=dict)
    optim: dict[str, object] = field(default_factory=dict)
    objective: dict[str, object] = field(default_factory=dict)
    lora: dict[str, object] = field(default_factory=dict)
    bar: float | None = None
    mfu_bar: float | None = None
    within: float | None = None
    peer: float | None = None

    @property
    def tokens(self) -> int:
        """Most tokens of a micro-batch."""
        kind, _, tokens = self.documents.partition(":")
        return int(tokens) if tokens else math.prod(map(int, kind.split("x")))


_KINDS: dict[str, Any] = {
    **dict.fromkeys(("layers", "ranks", "micro_batches", "warm", "steps"), int),
    **dict.fromkeys(("limit", "bar", "mfu_bar", "within", "peer"), float),
    "loss": str,
    **dict.fromkeys(("export", "logprob_check", "replay"), lambda text: text == "true"),
}
_SECTIONS = {"": "settings", "optim": "optim", "loss": "objective", "lora": "lora"}  # of options: their field


def parse_case(text: str) -> Case:
    """Parse `MODEL DOCUMENTS [key=value …]`: keys of `Case`, `optim.key`, `loss.key`, `lora.key`, or of the trainer's
    `model`."""
    model, documents, *rest = text.split()
    given: dict[str, Any] = {}
    options: dict[str, Any] = {name: {} for name in _SECTIONS.values()}
    for key, _, value in (item.partition("=") for item in rest):
        if key in _KINDS:
            given[key] = _KINDS[key](value)
        else:
            section, _, option = key.rpartition(".")
            options[_SECTIONS[section]][option] = value
    return Case(text, model, documents, **options, **given)


def model_source(model: str, layers: int | None = None) -> Source:
    """Random weights of a model's shape, or of its first layers."""
    if model in TINY or model in SHAPES:
        return Source(model, copy.deepcopy({**TINY, **SHAPES}[model]), None)
    source = find_model(f"Qwen/Qwen3-{model}", random_weights=True)
    if layers is not None:
        source.config.num_hidden_layers = layers
        if kinds := getattr(source.config, "layer_types", None):
            source.config.layer_types = kinds[:layers]
    return source


def write_random_model(
    directory: Path, model: str, layers: int | None = None, logits: float | None = None, choices: float | None = None
) -> None:
    """Random weights of a model's shape in bfloat16, with the bundled tokenizer: alike for the trainer and servers.

    Args:
        logits: Their standard deviation (None: what transformers draws, by which all tokens are equally likely).
        choices: The same of the routers' scores.
    """
    config = model_source(model, layers).config
    config.dtype = torch.bfloat16
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # a CPU takes 45 s for 0.6B
        lm = AutoModelForCausalLM.from_config(config)
    routers = [router for block in lm.model.layers for _, router, _ in moe.moe_blocks(block)]
    wide = [(lm.lm_head, logits), *((router, choices) for router in routers)]
    with torch.no_grad():
        for module, spread in wide:
            if spread is not None:  # of a normed hidden state
                module.weight.normal_(std=spread / config.hidden_size**0.5)
    lm.save_pretrained(directory)
    for path in (*TOKENIZER.glob("tokenizer*"), *TOKENIZER.glob("*.jinja")):
        shutil.copy(path, directory)


def model_bytes(case: Case) -> int:
    """Bytes of a case's exported weights, in bfloat16."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(model_source(case.model, case.layers).config)
    return 2 * sum(parameter.numel() for parameter in lm.parameters())


def make_config(case: Case, device: str, scratch: Path) -> TrainerConfig | SFTConfig:
    """The settings of the trainer that runs `case`, on fake data."""
    name = case.model if case.model in TINY else f"Qwen/Qwen3-{case.model}"
    shared = {
        "output_dir": scratch,
        "device": device,
        "dist_timeout": case.limit,
        "model": {"name": name, **case.settings},
        "optim": {"type": "adamw", **case.optim},
        "lora": case.lora or None,
    }
    kind, _, tokens = case.documents.partition(":")
    steps = case.micro_batches * case.ranks
    if case.loss == "rl":
        count, length = (1, None) if tokens else map(int, kind.split("x"))
        fake = {"lengths": "lognormal", "batch_size": SAMPLES * case.ranks}
        if not tokens:
            fake = {"micro_batch_size": count, "batch_size": count * steps, "seq_len": length}
        objective = {"type": "default", **case.objective}
        return TrainerConfig.model_validate(
            {**shared, "seq_len": case.tokens, "data": {"fake": fake}, "loss": objective}
        )
    if tokens:
        data = {"seq_len": case.tokens, "batch_size": steps, "micro_batch_size": 1, "fake": {"type": "lognormal"}}
    else:
        count, length = map(int, kind.split("x"))
        data = {"seq_len": length, "batch_size": count * steps, "micro_batch_size": count, "fake": {"type": "fixed"}}
    return SFTConfig.model_validate({**shared, "data": data})


class Recorder(Report):
    """The trainer's report, which keeps what it is told."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.told: dict[int, dict[str, float]] = {}

    def more_metrics(self, step: int, metrics: Mapping[str, float], extras: Callable[[], Extras] = Extras) -> None:
        self.told.setdefault(step, {}).update(metrics)
        super().more_metrics(step, metrics, extras)


class Bench:
    """The trainer of one case. Every rank makes one and calls the same; exiting its context ends the process group."""

    def __init__(self, case: Case, device: str, scratch: Path) -> None:
        log.setup("info", case.model)
        self.case = case
        self.config = config = make_config(case, device, scratch)
        self.world = world = init_world(device, config.dist_timeout)
        self.report = Recorder(config, "trainer" if case.loss == "rl" else "sft", world)
        torch.manual_seed(config.seed)
        source = model_source(case.model, case.layers)
        self.shape = source.config
        # As in a run whose versions are served.
        published = partial(published_bytes, config, source, world) if isinstance(config, TrainerConfig) else None
        self.policy = build_policy(
            source, config.model, world, config.seed,
            tokens=case.tokens, optim=config.optim, published=published, lora=config.lora,
        )  # fmt: skip
        self.optimizer = build_optimizer(self.policy, config.optim)
        self.costs = perf.step_costs(self.policy.lm, self.shape)
        self.recipe = rl.make_recipe(config) if isinstance(config, TrainerConfig) else sft.make_recipe(config)
        self.data = self.recipe.open_data(world, source)
        if case.replay:
            self.replay()
        self.data.start(self.costs, 0)
        serve = None if config.lora is None else config.lora.serve
        computed = compute_dtype(config.model.dtype, world.device)
        exported = computed if serve == "adapter" else torch.bfloat16
        scorer = None
        if case.logprob_check and case.loss == "rl":
            scorer = ReferenceScorer(self.policy, world, source.config.vocab_size, computed, exported, serve)
        self.versions = WeightPublisher(
            config.output_dir,
            self.policy,
            source,
            world,
            exported,
            timeout=config.dist_timeout,
            scorer=scorer,
            weights=WeightsConfig(host="127.0.0.1"),
            memory=world.device.type == "cuda" and case.loss == "rl",  # as `trainer.weights.transport = "auto"` does
            gpu=case.loss == "rl",
            async_level=1,
            lora=config.lora,
            on_committed=lambda version, times: self.report.more_metrics(version - 1, times),
        )
        self.versions.open(0)
        self.rows = MetricRows(self.report, world.device)
        self.number = 0
        self.lengths: list[list[int]] = []

    def replay(self) -> None:
        """Give every fake document random experts: a token's K are different ones, and all are chosen equally often."""
        assert isinstance(self.data, FakeSamples)
        self.data.routers = routers = router_replay.set_up(self.policy.lm.model.layers, self.case.model)
        size = (len(routers.sparse), self.case.tokens, routers.experts)
        chosen_MTK = np.random.default_rng(0).random(size, dtype=np.float32).argpartition(routers.k)[..., : routers.k]
        make = self.data._document

        def with_experts(step: int, index: int, tokens: int) -> Document:
            moved = (chosen_MTK[:, : tokens - 1] + 97 * step + 31 * index) % routers.experts
            return replace(make(step, index, tokens), experts=moved.astype(np.int16))

        self.data._document = with_experts  # type: ignore[method-assign]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.data.close()
        if error is None:
            self.drain()
            self.versions.close()
            close_world()

    def chosen(self) -> str:
        """The settings that were chosen, in short."""
        config = self.config.model
        capability, dtype = attention.capability_of(self.world.device), compute_dtype(config.dtype, self.world.device)
        backend, _ = attention.choose(
            config.attention, capability, dtype, attention.Needs(attention_heads(self.shape)[2])
        )
        return f"{backend}, {self.policy.memory.settings}"

    def estimated_gib(self) -> float | None:
        """The peak that the choice was based on; None where nothing was planned."""
        estimated = self.policy.memory.estimated
        return None if estimated is None else estimated.total / perf.GIB

    def step(self) -> None:
        """One whole step, in the order of the trainer's loop.

        Raises:
            UserError: the GPU's memory does not suffice.
        """
        with memory.watched(self.policy.memory):
            self._step()

    def _step(self) -> None:
        config, world, step = self.config, self.world, self.number
        self.report.status.step(step)
        started = time.perf_counter()
        if not (self.data.arrived(step) and self.data.wait(step, lambda: False, self.report.status.waiting)):
            raise RuntimeError("fake data never ends")
        batch = self.data.read(step)
        waited = time.perf_counter() - started

        lr = learning_rate(config.scheduler, config.optim.lr, step, None)
        begun = now(world.device)
        sums = forward_backward(self.policy, batch.batches, self.recipe.loss, world)
        graded = now(world.device)
        self.rows.flush()
        norm = optimizer_step(self.policy, self.optimizer, lr, config.optim.max_norm)
        moments = begun, graded, now(world.device)
        ideal = perf.ideal_seconds(self.costs.of(batch.lengths).sum(), world)
        known, sums_norm = {"time/wait_for_batch": waited}, sum_on_device(world, sums, norm)
        names = partial(routing.step_metrics, self.policy.sparse, self.recipe.names)
        row = StepMetrics(step, sums_norm, moments, names, known, batch.tokens, ideal, Extras)
        self.rows.put(row)
        if self.case.export:
            self.versions.publish(step + 1, row.read)
        self.lengths.append(batch.lengths)
        self.number += 1

    def finish_steps(self) -> None:
        """Wait until the device has done every step, and their rows are written. What is being exported goes on."""
        self.rows.flush()
        if self.world.device.type == "cuda":
            # Not the stream that exports: it has the next step's time.
            torch.cuda.current_stream(self.world.device).synchronize()

    def drain(self) -> None:
        """The same, and wait for the export."""
        self.finish_steps()
        self.versions.settle()


def measure(case: Case, device: str, scratch: Path) -> dict[str, Any]:
    """Run a case: the warm-up and the measured steps. The row of a table."""
    with Bench(case, device, scratch) as bench:
        begun = [time.perf_counter()]
        for _ in range(case.warm):
            bench.step()
            bench.finish_steps()
            begun.append(time.perf_counter())
        perf.reset_peak_memory(bench.world.device)
        started = time.perf_counter()
        for _ in range(case.steps):
            bench.step()
        bench.finish_steps()
        seconds = time.perf_counter() - started
        here = list(perf.peak_memory_gib(bench.world.device))
        peaks = [max(values) for values in zip(*gather(bench.world, here), strict=True)]
        bench.drain()
        return _row(bench, seconds, begun, peaks)


def _row(bench: Bench, seconds: float, begun: list[float], peaks: list[float]) -> dict[str, Any]:
    case, world, told = bench.case, bench.world, bench.report.told
    numbers = range(case.warm, case.warm + case.steps)
    steps = [told[number] for number in numbers]
    lengths = [length for number in numbers for length in bench.lengths[number]]

    def median(key: str) -> float | None:
        values = [step[key] for step in steps if key in step]
        return 1e3 * statistics.median(values) if values else None

    times = [1e3 * step["time/step"] for step in steps]
    peak = perf.peak_flops(world.device)
    rate = 100 / (seconds * world.size * peak) if peak else None
    parts = {
        "data": "wait_for_batch",
        "forward_backward": "forward_backward",
        "optimizer": "optimizer",
        "export_wait": "export",
    }
    export = ("copy", "checksum", "write", "hash", "commit")
    return {
        "case": asdict(case),
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
        "tokens_per_second": sum(lengths) / seconds / world.size,
        "tokens_per_step": sum(lengths) / len(steps),
        "step_ms": {
            "median": statistics.median(times),
            "min": min(times),
            "max": max(times),
            "mean": 1e3 * seconds / len(steps),
        },
        "parts_ms": {name: median(f"time/{key}") for name, key in parts.items()},
        "export_ms": {name: median(f"time/export_{name}") for name in export},
        "mfu": rate and rate * float(bench.costs.of(lengths).sum()),
        "peer_mfu": None  # which counts a gradient of every weight
        if case.lora
        else rate
        and rate * peer_flops(perf.matmul_parameters(bench.policy.lm), bench.shape, sum(lengths), case.tokens),
        "estimated_gib": bench.estimated_gib(),
        "allocated_gib": peaks[0],
        "reserved_gib": peaks[1],
        "compile_s": begun[2] - begun[0] - 2e-3 * statistics.median(times) if case.warm > 1 else None,
        "first": {"loss": told[0]["loss/mean"], "norm": told[0]["optim/grad_norm"]},
        "last": {"loss": steps[-1]["loss/mean"], "norm": steps[-1]["optim/grad_norm"]},
        "chosen": bench.chosen(),
    }


def peer_flops(matmul: int, config: PretrainedConfig, tokens: int, micro_batch: int) -> float:
    """PRIME-RL's count for `tokens` tokens: 6 · matmul + 12 · layers · hidden size · micro_batch a token.

    Every token attends to the whole micro-batch, past, future and other documents alike, through heads of hidden size /
    heads. Only for comparison with figures that were counted so.
    """
    text = config.get_text_config()
    return tokens * (6.0 * matmul + 12.0 * text.num_hidden_layers * text.hidden_size * micro_batch)
