"""Memory on the GPU: the estimate against what is really allocated, offload against none, and running out."""

from collections.abc import Iterator

import pytest
import torch

from prime_rl.config.optim import AdamW
from prime_rl.config.trainer import TrainerModel
from prime_rl.errors import UserError
from prime_rl.trainer import memory
from prime_rl.trainer.activations import LEVELS
from prime_rl.trainer.footprint import estimate
from prime_rl.trainer.loss import cross_entropy
from prime_rl.trainer.memory import GIB
from prime_rl.trainer.model import Policy, build_policy
from prime_rl.trainer.optim import build_optimizer
from prime_rl.trainer.packing import Document, HostBatch, collate
from prime_rl.trainer.parallel import World, close_world, init_world
from prime_rl.trainer.source import Source, find_model
from prime_rl.trainer.step import forward_backward, optimizer_step

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu

TOKENS = 16_384
"""A micro-batch: enough that activations at `full` still make the peak, rather than the head's gradients."""


@pytest.fixture
def world() -> Iterator[World]:
    yield init_world("cuda", 60)
    close_world()


@pytest.fixture(scope="module")
def source() -> Source:
    """Four layers of Qwen3-4B."""
    known = find_model("Qwen/Qwen3-4B", random_weights=True)
    known.config.num_hidden_layers = 4
    known.config.layer_types = known.config.layer_types[:4]
    return known


def batches(tokens: int = TOKENS) -> list[HostBatch]:
    """Two micro-batches of four documents, every token but the first trained on; streams of one whole step."""
    draw = torch.Generator().manual_seed(0)

    def document(length: int) -> Document:
        ids = torch.randint(0, 151_936, (length,), generator=draw).numpy()
        mask, stream = torch.ones(length, dtype=torch.bool).numpy(), torch.full((1, length), 0.5 / tokens).numpy()
        return Document(ids, mask, 1.0, stream)

    return [collate([document(tokens // 4) for _ in range(4)], 1) for _ in range(2)]


def train(policy: Policy, world: World, tokens: int = TOKENS, steps: int = 2) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step; the peak is that of the last."""
    optimizer, results = build_optimizer(policy, AdamW()), []
    for _ in range(steps):
        torch.cuda.reset_peak_memory_stats()
        sums = forward_backward(policy, batches(tokens), cross_entropy, world)
        norm = optimizer_step(policy, optimizer, 1e-5, 1.0)
        results.append((sums[0].item(), norm.item()))
    return results


def build(source: Source, world: World, tokens: int = TOKENS, **settings: object) -> Policy:
    return build_policy(source, TrainerModel.model_validate(settings), world, tokens=tokens, optim=AdamW())


def test_estimate_of_every_level(source: Source, world: World) -> None:
    """What is allocated at most is within 10 % of the estimate, and each level takes less than the one before; no level changes a number."""
    peaks, results = [], []
    for level in LEVELS:
        policy = build(source, world, activation_checkpointing=level, activation_offload=False)
        results.append(train(policy, world))
        peaks.append(torch.cuda.max_memory_allocated() / GIB)
        plan = policy.memory
        assert plan.job is not None
        expected = estimate(plan.shape, plan.job, plan.settings)
        print(f"{level:10} {peaks[-1]:6.2f} GiB, estimated {expected.total / GIB:6.2f} in {expected.moment}")
        assert expected.total / GIB == pytest.approx(peaks[-1], rel=0.1)
        del policy
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(LEVELS)
    for result in results[1:]:
        assert_near(result, results[0])


def assert_near(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> None:
    """Equal but for bfloat16: what is computed again may be rounded at other places, and attention's backward adds in any order."""
    for (loss, norm), (expected_loss, expected_norm) in zip(a, b, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-3)
        assert norm == pytest.approx(expected_norm, rel=5e-3)


@pytest.mark.parametrize("level", ["none", "attention"])
def test_offload_changes_no_number_and_frees(level: str, source: Source, world: World) -> None:
    """Loss and gradient norm of two steps; the peak falls, and the host's memory goes round."""
    results, peaks = [], []
    for offloaded in (False, True):
        policy = build(source, world, activation_checkpointing=level, activation_offload=offloaded)
        results.append(train(policy, world, steps=3))
        peaks.append(torch.cuda.max_memory_allocated() / GIB)
        if offloaded:
            host = policy.lm.model.layers[0].host
            assert 0 < host.chunks == len(host._free)
        del policy
    print(f"{level}: {peaks[0]:.2f} GiB, offloaded {peaks[1]:.2f}")
    assert_near(results[0], results[1])
    assert peaks[1] < peaks[0]


def test_out_of_memory_is_explained(source: Source, world: World) -> None:
    """A step that finds too little memory ends in one line that says what took it and what would help."""
    policy = build(source, world, activation_checkpointing="none", activation_offload=False)
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    # Room for the optimizer's states, the gathered weights and the first blocks' activations.
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 11 * GIB) / total)
    try:
        with pytest.raises(UserError) as caught:
            with memory.watched(policy.memory, world.device):
                train(policy, world)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    print(caught.value)
    for part in ("the GPU is out of memory", "were asked for", "activations", "what would help most"):
        assert part in str(caught.value)


def test_automatic_settings_keep_a_limit(source: Source, world: World) -> None:
    """The fastest setting for the memory there is, then one for 20 GiB, which must be kept."""
    free = build(source, world)
    assert set(free.memory.settings.levels) == {"none"}
    del free
    policy = build(source, world, memory_limit=20)
    train(policy, world)
    peak = torch.cuda.max_memory_allocated() / GIB
    print(f"{peak:.2f} GiB of 20: {policy.memory.settings}")
    assert policy.memory.settings.levels != ("none",) * 4
    assert peak <= 20
