"""Activation checkpointing and offload: which operators run again in backward, that no number changes, and that
what blocks keep really leaves, comes back, and its host memory goes round."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from prime_rl.config.trainer import TrainerModel
from prime_rl.trainer import activations, memory
from prime_rl.trainer.activations import LAG, LEVELS, offload_layers
from prime_rl.trainer.loss import cross_entropy
from prime_rl.trainer.model import build_policy
from prime_rl.trainer.packing import collate, to_device
from prime_rl.trainer.source import find_model
from support import trainer as support

world, tied_model, quick_compiler = support.world, support.tied_model, support.quick_compiler

aten = torch.ops.aten
CPU = torch.device("cpu")
FEED_FORWARD = 96
TOKENS = 64
GROUPS = [support.random_documents(lengths) for lengths in ((17, 30), (25, 22))]
Plain = Callable[[bool], dict[str, Tensor]]


class Operators(TorchDispatchMode):
    """Counts what runs: attention, forward products by the width of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Of compiled blocks the written-out one.
        if func in (aten._scaled_dot_product_flash_attention_for_cpu.default, torch.ops.prime_rl.explicit.default):
            self.seen["attention"] += 1
        if func is aten.mm.default and args[1].stride() == (1, args[1].shape[0]) and args[0].shape[0] == TOKENS:
            self.seen["wide" if args[1].shape[1] == FEED_FORWARD else "narrow"] += 1
        return func(*args, **(kwargs or {}))


def assert_near(got: dict[str, Tensor], want: dict[str, Tensor], relative: float) -> None:
    for name, gradient in want.items():
        error = (got[name] - gradient).norm() / gradient.norm()
        assert error <= relative, f"{name}: relative error {error:.1e}"


@pytest.fixture
def shape(tied_model, tmp_path):
    """The tiny model with four layers and widths that differ."""
    config = json.loads((tied_model / "config.json").read_text())
    config |= {"num_hidden_layers": 4, "intermediate_size": FEED_FORWARD, "layer_types": ["full_attention"] * 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return find_model(str(tmp_path), random_weights=True)


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("none", {}),
        ("pointwise", {}),
        ("wide", {"wide": 2}),
        ("attention", {"wide": 2, "narrow": 4}),
        ("full", {"wide": 2, "narrow": 4, "attention": 1}),
    ],
)
def test_what_is_computed_again(level, expected, compiled, world, shape):
    """In backward, in each of four layers."""
    config = TrainerModel(activation_checkpointing=level, activation_offload=False, compile=compiled)
    policy = build_policy(shape, config, world)
    batch = to_device(collate(support.random_documents((TOKENS,)), 1), CPU)
    for _ in range(2):  # the first time compiles
        loss, _ = policy(batch, cross_entropy)
        with Operators() as operators:
            loss.backward()
    assert operators.seen == {name: 4 * count for name, count in expected.items()}


_plain: dict[bool, dict[str, Tensor]] = {}


@pytest.fixture
def plain(world, shape):
    """Gradients without any of it, eager or compiled, computed once."""

    def get(compiled: bool) -> dict[str, Tensor]:
        if compiled not in _plain:
            config = TrainerModel(activation_checkpointing="none", activation_offload=False, compile=compiled)
            _plain[compiled] = support.gradients(build_policy(shape, config, world), GROUPS)
        return _plain[compiled]

    return get


ONE_LEVEL = [{"activation_checkpointing": level} for level in LEVELS]
OFFLOAD = [{**levels, "activation_offload": True} for levels in ONE_LEVEL]
# Offloaded tensors outlive the weights that were gathered when they were made.
OFFLOAD += [{"activation_offload": True, "reshard_after_forward": True}]
COMPILED = [{**settings, "compile": True} for settings in (*ONE_LEVEL[1:], OFFLOAD[0], *OFFLOAD[-2:])]


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize(
    "settings", [*ONE_LEVEL[1:], *OFFLOAD, *COMPILED], ids=lambda s: "-".join(map(str, s.values()))
)
def test_gradients_are_those_of_plain_blocks(settings, world, shape, plain, monkeypatch):
    """At every level, with and without offload (of two of the four layers), eager and compiled, under FSDP2."""
    monkeypatch.setattr(activations, "SMALLEST", 0)
    for module in (activations, memory):
        monkeypatch.setattr(module, "LAG", 1)
    want = plain(settings.get("compile", False))
    policy = build_policy(shape, TrainerModel(**settings), world)
    assert len(policy.memory.settings.offloaded) == (2 if settings.get("activation_offload") else 0)
    assert_near(support.gradients(policy, GROUPS), want, 1e-6)


WIDTH, LAYERS = 16, 10
NARROW = 4 * TOKENS * WIDTH
"""Bytes of a block's input; it keeps three times as much inside."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) + shift * x


def forward(layers: list[nn.Module], x: Tensor) -> Tensor:
    shift = torch.ones(TOKENS, WIDTH)
    for layer in layers:
        x = layer(x, shift=shift)
    return x


def gradients(layers: list[nn.Module], x: Tensor) -> list[Tensor]:
    """Of two micro-batches in a row, and of what comes in."""
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    for tensor in (x, *parameters):
        tensor.grad = None
    for scale in (1.0, 2.0):
        forward(layers, scale * x).square().sum().backward()
    return [tensor.grad.clone() for tensor in (x, *parameters) if tensor.grad is not None]


@pytest.mark.parametrize("offloaded", [(0, 2, 5), range(LAYERS - 1 - LAG)], ids=["some", "all"])
def test_offloaded_layers(offloaded, monkeypatch):
    """All that layers keep leaves the device, but no weights or shared inputs; the same gradients; chunks return."""
    monkeypatch.setattr(activations, "SMALLEST", 0)
    monkeypatch.setattr(activations, "CHUNK", 1000)  # NARROW is no whole number of chunks
    torch.manual_seed(0)
    layers = offload_layers([Layer() for _ in range(LAYERS)], CPU, offloaded)
    host: Any = layers[0].host
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    want = gradients([getattr(layer, "_checkpoint_wrapped_module", layer) for layer in layers], x)
    out = forward(layers, x)
    sent = [host.blocks[i].offloaded for i in range(LAYERS - 1)]
    sizes = [sorted(storage.size // NARROW for storage in storages) for storages in sent]
    assert sizes == [[1, 3] if i in offloaded else [] for i in range(LAYERS - 1)]
    assert all(storage.device is None for storages in sent for storage in storages)
    out.sum().backward()
    assert all(map(torch.equal, gradients(layers, x), want))
    # 4,096 and 12,288 bytes in chunks of 1,000
    assert len(host._free) == host.chunks == (5 + 13) * len(offloaded)
    host.blocks.clear()
    with torch.no_grad():
        forward(layers, x)
    assert not host.blocks
