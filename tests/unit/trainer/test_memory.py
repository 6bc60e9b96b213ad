"""What a step takes, estimated: against measured peaks; what is chosen from it, and what is said."""

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from prime_rl.config.trainer import AdamW, Recompute, TrainerModel
from prime_rl.errors import UserError
from prime_rl.trainer import memory
from prime_rl.trainer.activations import LAG, LEVELS
from prime_rl.trainer.memory import GIB, Estimate, Job, MemoryPlan, Settings, Shape, choose, estimate
from prime_rl.trainer.parallel import World
from prime_rl.trainer.source import find_model


@pytest.fixture(scope="module")
def shapes():
    with torch.device("meta"):
        configs = {name: find_model(f"Qwen/Qwen3-{name}", random_weights=True).config for name in ("0.6B", "4B")}
        return {name: Shape.of(AutoModelForCausalLM.from_config(config)) for name, config in configs.items()}


def everywhere(shape: Shape, level: Recompute, chunk: int = 4096) -> Settings:
    """One level in all layers, nothing offloaded."""
    return Settings((level,) * shape.layers, chunk, reshard=False)


def chosen(shape: Shape, gib: float, tokens: int = 16384, host: float = 100 * GIB, **config: Any) -> Settings:
    return choose(TrainerModel(**config), shape, Job(tokens), gib * GIB, host)[0]


def fits(shape: Shape, job: Job, settings: Settings, gib: float) -> bool:
    return 1.03 * estimate(shape, job, settings).total <= gib * GIB


# Qwen3 on one H200, 16k tokens a document of 16k, 64k of sixteen of 4k, weights kept gathered, head in chunks of 4096
# tokens but in the fifth row: GiB at the peak (`max_memory_allocated`). From prototype-h200.md, rows "fsdp"; the
# prototype is ours, at the levels of the same names ("matmul": wide), with the kernels of FlashAttention 3.
MEASURED = [
    ("0.6B", 16, "none", 31.2),
    ("0.6B", 16, "attention", 14.5),
    ("0.6B", 16, "full", 12.8),
    ("0.6B", 64, "none", 89.5),
    ("0.6B", 16, "full, chunk 1024", 12.5),
    ("0.6B", 64, "attention", 24.4),
    ("4B", 16, "none", 131.7),
    ("4B", 16, "wide", 88.3),
    ("4B", 16, "attention", 78.7),
    ("4B", 16, "full", 74.2),
    ("4B", 64, "attention", 105.8),
]


def prototype_peak(shape: Shape, estimated: Estimate) -> float:
    """Return the peak with the prototype's second float32 gradient of the head's weight, which ours does not have."""
    extra = {"the head's gradient": 4 * shape.vocabulary * shape.hidden}
    return max(sum(parts.values()) + extra.get(moment, 0) for moment, parts in estimated.moments.items())


@pytest.mark.parametrize(("name", "thousands", "how", "gib"), MEASURED, ids=str)
def test_estimate_against_the_h200(name, thousands, how, gib, shapes):
    """Peaks within 2 % (the plan leaves 3 %)."""
    shape, level, chunk = shapes[name], how.split(",")[0], 1024 if "chunk" in how else 4096
    estimated = estimate(shape, Job(thousands * 1024), everywhere(shape, level, chunk))  # type: ignore[arg-type]
    assert prototype_peak(shape, estimated) / GIB == pytest.approx(gib, rel=0.02)


# Model, thousands of tokens, GiB; levels in layers, head chunk, whether weights are freed, layers offloaded. The rows
# are those of benchmarks/results/trainer_h200.json, suite `bars`, and the memory of an H100.
CHOICES: list[tuple[str, int, float, dict[str, int], int, bool, int]] = [
    ("0.6B", 64, 138, {"none": 28}, 8192, False, 0),
    ("0.6B", 16, 15, {"attention": 23, "wide": 5}, 4096, True, 0),
    ("4B", 16, 138, {"none": 36}, 8192, False, 0),
    ("4B", 16, 125, {"pointwise": 18, "none": 18}, 8192, False, 0),
    ("4B", 16, 80, {"wide": 27, "pointwise": 9}, 4096, True, 18),
    ("4B", 64, 138, {"wide": 17, "pointwise": 19}, 4096, True, 18),
    ("0.6B", 64, 77, {"pointwise": 16, "none": 12}, 8192, False, 0),
    ("4B", 16, 72, {"attention": 6, "wide": 30}, 4096, True, 23),
]


@pytest.mark.parametrize(("name", "thousands", "gib", "levels", "chunk", "reshard", "offloaded"), CHOICES, ids=str)
def test_choice(name, thousands, gib, levels, chunk, reshard, offloaded, shapes):
    """No more is recomputed than the memory asks for, the leaner level first. Layers offload where one computes long
    enough to hide it; none if it is forbidden or the host has no room."""
    shape, job = shapes[name], Job(thousands * 1024)
    settings, plain = (chosen(shape, gib, job.tokens, activation_offload=offloads) for offloads in (None, False))
    assert (Counter(settings.levels), settings.head_chunk, settings.reshard) == (levels, chunk, reshard)
    assert len(settings.offloaded) == offloaded
    assert fits(shape, job, settings, gib)
    assert fits(shape, job, plain, gib)
    order = [LEVELS.index(level) for level in settings.levels]
    assert order == sorted(order, reverse=True)
    assert not plain.offloaded
    assert chosen(shape, gib, job.tokens, host=0) == plain


def test_the_user_has_the_last_word(shapes):
    """What is set stays, whether it fits or not; what is left open is fitted around it."""
    settings = chosen(shapes["4B"], 80, activation_checkpointing="full", head_chunk=777)
    assert (set(settings.levels), settings.head_chunk) == ({"full"}, 777)
    settings = chosen(shapes["4B"], 138, activation_offload=True, reshard_after_forward=True)
    assert (settings.offloaded, settings.reshard) == (tuple(range(36 - 1 - LAG)), True)
    settings = chosen(shapes["4B"], 1, activation_offload=False, reshard_after_forward=False)
    assert (settings.offloaded, settings.reshard) == ((), False)


@pytest.fixture
def planned(monkeypatch):
    """The plan on a GPU with so many GiB free, one of them torch's; each of 4 ranks has so many of host memory."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: GIB)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(find_model("Qwen/Qwen3-4B", random_weights=True).config)

    def plan(free: float, tokens: int | None = 16384, host: float = 1000, device: str = "cuda") -> MemoryPlan:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int((free - 1) * GIB), 141 * GIB))
        monkeypatch.setattr(memory, "available_bytes", lambda: 4 * host * GIB)
        world = World(0, 1, torch.device(device), None)  # type: ignore[arg-type]
        return memory.plan_memory(TrainerModel(), lm, world, itemsize=2, tokens=tokens, optim=AdamW())

    return plan


def test_plan(planned, caplog):
    """It is for the free memory less what libraries will take beside torch, and is logged in one line: the choice, the
    estimate by parts, what is offloaded, and a warning with remedies where even the leanest way does not fit. Nothing
    is planned on a CPU or without a size."""
    caplog.set_level("INFO", "prime_rl")
    plan = planned(128)
    count = plan.settings.levels.count("pointwise")
    planned(138, 65536, host=170)
    planned(40)
    tight, offloading, none_fits = caplog.records
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "WARNING"]
    for record, words in (
        (tight, "of 125.0 GiB (free) for 16,384 tokens a micro-batch"),
        (tight, f"recompute pointwise in {count} layers, none in {36 - count} layers, head in chunks of"),
        (tight, "optimizer states 30.0, fp32 weights 15.0, gradients 15.0"),
        (offloading, "GiB of activations offloaded to host memory"),
        (none_fits, memory.REMEDIES),
    ):
        assert words in record.message
        assert "\n" not in record.message
    for nothing in (planned(128, device="cpu"), planned(20, None)):
        assert nothing.settings == Settings(("none",) * 36, 4096, reshard=False)
        assert nothing.estimated is None


def test_host_memory_of_offloading(planned):
    """At most half of this rank's part of what the host has beside two copies of the weights (15 GiB)."""
    plan = planned(139, 65536, host=80)
    assert plan.settings.levels.count("wide") > 17
    assert plan.estimated is not None
    assert plan.estimated.offloaded / GIB <= (80 - 15 / 4) / 2
    assert not planned(139, 65536, host=3).settings.offloaded


def test_out_of_memory_in_words(shapes):
    """One line: what torch says, what is taken by the estimate, the largest part first, and what takes less."""
    settings = everywhere(shapes["4B"], "none")
    plan = MemoryPlan(settings, estimate(shapes["4B"], Job(16384), settings))
    with pytest.raises(UserError) as caught, memory.watched(plan):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.\nGPU 0 has …")
    text = str(caught.value)
    assert text.startswith("the GPU is out of memory: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has …; ")
    assert (
        "activations 60.4, optimizer states 30.0, fp32 weights 15.0, gradients 15.0, gathered weights 7.5, head" in text
    )
    assert text.endswith(memory.REMEDIES)
    assert "\n" not in text
