"""Activation checkpointing and offload: which operators run again in backward, that no number changes, and that
what blocks keep really leaves, comes back, and its host memory goes round."""

import json
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from prime_rl.config.trainer import TrainerModel
from prime_rl.trainer import activations, memory
from prime_rl.trainer.activations import LAG, LEVELS, HostPool, checkpoint_layers, offload_layers
from prime_rl.trainer.model import build_policy
from prime_rl.trainer.parallel import World
from prime_rl.trainer.source import Source, find_model
from support import trainer as support

world, tied_model, quick_compiler = support.world, support.tied_model, support.quick_compiler

aten = torch.ops.aten
CPU = torch.device("cpu")
HIDDEN, FEED_FORWARD = 8, 24
TOKENS = 64
GROUPS = [support.random_documents(lengths) for lengths in ((17, 30), (25, 22))]
Plain = Callable[[bool], dict[str, Tensor]]


@torch.library.custom_op("prime_rl_test::attention", mutates_args=())
def attention(x: Tensor) -> Tensor:
    return x.tanh()


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


def _differentiate(ctx: Any, grad: Tensor) -> Tensor:
    x, out = ctx.saved_tensors
    return grad * (1 - x.tanh() * out)


attention.register_fake(torch.empty_like)
attention.register_autograd(_differentiate, setup_context=_save)


class Block(nn.Module):
    """A transformer block in small: one attention, two products of the hidden width, two wide ones and the one back."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(HIDDEN, FEED_FORWARD, bias=False) for _ in range(2))
        self.down = nn.Linear(FEED_FORWARD, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(torch.ops.prime_rl_test.attention(self.q(x)))
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Operators(TorchDispatchMode):
    """Counts what runs: the attention operator, forward products by the width of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prime_rl_test.attention.default:
            self.seen["attention"] += 1
        if func is aten.mm.default and args[0].shape[0] == TOKENS and args[1].stride() == (1, args[1].shape[0]):
            self.seen["wide" if args[1].shape[1] == FEED_FORWARD else "narrow"] += 1
        return func(*args, **(kwargs or {}))


def again(levels: list[str], compiled: bool) -> Counter[str]:
    """What a backward pass through blocks of these levels computes that forward had computed."""
    torch.manual_seed(0)
    kept = {torch.ops.prime_rl_test.attention.default}
    blocks = checkpoint_layers([Block() for _ in levels], levels, kept, {FEED_FORWARD})
    for block in blocks if compiled else ():
        block.compile(fullgraph=True, backend="aot_eager_decomp_partition")
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    for _ in range(2):  # the first time compiles
        y = x
        for block in blocks:
            y = block(y)
        with Operators() as operators:
            y.sum().backward()
    return operators.seen


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("none", {}),
        ("pointwise", {}),
        ("wide", {"wide": 2}),
        ("attention", {"wide": 2, "narrow": 2}),
        ("full", {"wide": 2, "narrow": 2, "attention": 1}),
    ],
)
def test_what_is_computed_again(level: str, expected: dict[str, int], compiled: bool) -> None:
    torch._dynamo.reset()
    assert dict(again([level], compiled)) == expected


def assert_near(got: dict[str, Tensor], want: dict[str, Tensor], relative: float) -> None:
    for name, gradient in want.items():
        error = (got[name] - gradient).norm() / gradient.norm()
        assert error <= relative, f"{name}: relative error {error:.1e}"


@pytest.fixture
def shape(tied_model: Path, tmp_path: Path) -> Source:
    """The tiny model with four layers and widths that differ."""
    config = json.loads((tied_model / "config.json").read_text())
    config |= {"num_hidden_layers": 4, "intermediate_size": 96, "layer_types": ["full_attention"] * 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return find_model(str(tmp_path), random_weights=True)


_plain: dict[bool, dict[str, Tensor]] = {}


@pytest.fixture
def plain(world: World, shape: Source) -> Plain:
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
def test_gradients_are_those_of_plain_blocks(
    settings: dict[str, Any],
    world: World,
    shape: Source,
    plain: Plain,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At every level, with and without offload (of two of the four layers), eager and compiled, under FSDP2."""
    monkeypatch.setattr(activations, "SMALLEST", 0)
    for module in (activations, memory):
        monkeypatch.setattr(module, "LAG", 1)
    want = plain(settings.get("compile", False))
    policy = build_policy(shape, TrainerModel(**settings), world)
    assert len(policy.memory.settings.offloaded) == (2 if settings.get("activation_offload") else 0)
    assert_near(support.gradients(policy, GROUPS), want, 1e-6)


# ---- offload, on CPU, where copies are made at once

WIDTH, LAYERS = 16, 10
NARROW = 4 * TOKENS * WIDTH
"""Bytes of a block's input; it keeps three times as much inside."""


class Keeps(torch.autograd.Function):
    """x · weight, keeping x, a transposed view of it, the weight, and what all blocks are given alike."""

    seen: ClassVar[list["weakref.ref[torch.UntypedStorage]"]] = []

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, shift: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        x = x.clone()
        Keeps.seen.append(weakref.ref(x.untyped_storage()))
        ctx.save_for_backward(x, x.t(), weight, shift)
        return x @ weight

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def, override]
        x, flipped, weight, shift = ctx.saved_tensors
        assert (x.stride(), flipped.stride()) == ((WIDTH, 1), (1, WIDTH))
        assert x.data_ptr() == flipped.data_ptr()
        assert shift.shape == x.shape
        return grad @ weight.t(), flipped @ grad, None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return torch.tanh(Keeps.apply(x, self.up, shift)) @ self.down + shift


Make = Callable[[Sequence[int]], tuple[list[nn.Module], HostPool]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """The same layers, some of which offload, and their host memory."""
    monkeypatch.setattr(activations, "SMALLEST", 0)
    monkeypatch.setattr(activations, "CHUNK", 1000)  # NARROW is no whole number of chunks
    Keeps.seen.clear()

    def make(offloaded: Sequence[int]) -> tuple[list[nn.Module], HostPool]:
        torch.manual_seed(0)
        layers = offload_layers([Layer() for _ in range(LAYERS)], CPU, offloaded)
        return layers, layers[0].host  # type: ignore[return-value]

    return make


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
def test_offloaded_layers(offloaded: Sequence[int], make: Make) -> None:
    """All that these layers keep goes out, neither weights nor what all blocks are given; it leaves the device, the
    gradients are the same bits, every chunk comes back (also after a pass without backward)."""
    layers, host = make(offloaded)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    want = gradients([getattr(layer, "_checkpoint_wrapped_module", layer) for layer in layers], x)
    forward(layers, x)
    sent = [host.blocks[i].offloaded for i in range(LAYERS - 1)]
    sizes = [sorted(storage.size // NARROW for storage in storages) for storages in sent]
    assert sizes == [[1, 3] if i in offloaded else [] for i in range(LAYERS - 1)]
    assert all(storage.device is None for storages in sent for storage in storages)
    assert all(map(torch.equal, gradients(layers, x), want))
    # 4,096 and 12,288 bytes in chunks of 1,000
    assert len(host._free) == host.chunks == (5 + 13) * len(offloaded)
    host.blocks.clear()
    with torch.no_grad():
        forward(layers, x)
    assert not host.blocks


def test_blocks_are_fetched_while_those_after_them_are_at_work(make: Make) -> None:
    """`LAG` blocks ahead, also the first that comes back, although those after it have offloaded nothing."""
    first = LAYERS - 2 - LAG
    (layers, host), came = make(range(first + 1)), []

    def look(index: int) -> None:
        """Backward is about to begin with block `index`."""
        sent = [host.blocks[i].offloaded for i in range(index + 1)]
        came.append([bool(storages) and storages[0].device is not None for storages in sent])

    x, shift = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.ones(TOKENS, WIDTH)
    for index, layer in enumerate(layers[:-1]):
        x = layer(x, shift=shift)
        x.register_hook(lambda _, index=index: look(index))
    layers[-1](x, shift=shift).sum().backward()
    assert not any(came[0])  # nothing comes before the first of these blocks is at work
    for index, arrived in zip(reversed(range(LAYERS - 2)), came[1:], strict=True):
        assert arrived == [index - LAG < i <= first for i in range(index + 1)]
