"""Activation offload: what blocks keep really leaves, comes back unchanged, and its host memory goes round. On CPU, where copies are made at once."""

import gc
import math
import weakref
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from prime_rl.trainer import activations
from prime_rl.trainer.activations import HostPool, offload_layers, offloading_layers

TOKENS, WIDTH, LAYERS = 64, 16, 10
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


Make = Callable[[float], tuple[list[nn.Module], HostPool]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """The same layers, which may offload so many inputs' bytes each, and their host memory."""
    monkeypatch.setattr(activations, "SMALLEST", 0)
    monkeypatch.setattr(activations, "CHUNK", 1000)  # NARROW is no whole number of chunks
    Keeps.seen.clear()

    def make(budget: float) -> tuple[list[nn.Module], HostPool]:
        torch.manual_seed(0)
        layers = offload_layers([Layer() for _ in range(LAYERS)], torch.device("cpu"), budget * NARROW)
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


@pytest.mark.parametrize(
    ("budget", "offloaded"),
    [
        (0.5, [[], [1], [], [1], [], [1]]),
        (2, [[1], [3], [1], [3], [1], [3]]),  # a tensor larger than the budget goes in every second block
        (3, [[3], [3], [3], [3], [3], [3]]),
        (3.9, [[3], [3, 1], [3, 1], [3, 1], [3, 1], [3, 1]]),
        (9, [[3, 1]] * 6),
        (math.inf, [[3, 1]] * 8),
    ],
)
def test_a_budget_is_spent_over_the_blocks(budget: float, offloaded: list[list[int]], make: Make) -> None:
    """Which tensors go out, in units of the smaller one, neither weights nor what all blocks are given; they leave the
    device, the gradients are the same bits, every chunk comes back (also after a pass without backward)."""
    layers, host = make(budget)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    want = gradients([layer._checkpoint_wrapped_module for layer in layers], x)
    forward(layers, x)
    sent = [host.blocks[i].offloaded for i in range(LAYERS - 1)]
    sizes = [[storage.size // NARROW for storage in storages] for storages in sent]
    assert sizes == offloaded + [[]] * (LAYERS - 1 - len(offloaded))
    assert all(storage.device is None for storages in sent for storage in storages)
    assert all(map(torch.equal, gradients(layers, x), want))
    # 4,096 and 12,288 bytes in chunks of 1,000
    assert len(host._free) == host.chunks == sum({1: 5, 3: 13}[size] for sizes in offloaded for size in sizes)
    host.blocks.clear()
    with torch.no_grad():
        forward(layers, x)
    assert not host.blocks


def test_a_second_backward_is_refused(make: Make) -> None:
    """What was offloaded is released when it has been asked for: a second pass must not read another's memory."""
    out = forward(make(math.inf)[0], torch.randn(TOKENS, WIDTH, requires_grad=True)).sum()
    out.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="asked for once"):
        out.backward()


def test_what_stays_belongs_to_the_graph(make: Make) -> None:
    """What a block does not offload is gone with the graph, although the block is remembered."""
    out = forward(make(1e-6)[0], torch.randn(TOKENS, WIDTH, requires_grad=True))
    assert all(storage() is not None for storage in Keeps.seen)
    del out
    gc.collect()
    assert all(storage() is None for storage in Keeps.seen)


@pytest.mark.parametrize("budget", [1, math.inf])
def test_a_block_is_fetched_while_the_one_after_it_is_at_work(budget: float, make: Make) -> None:
    """Also the first that comes back, although those after it have offloaded nothing."""
    (layers, host), came = make(budget), []

    def look(index: int) -> None:
        """Backward is about to begin with block `index`."""
        sent = [host.blocks[i].offloaded for i in range(index + 1)]
        came.append([bool(storages) and storages[0].device is not None for storages in sent])

    x, shift = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.ones(TOKENS, WIDTH)
    for index, layer in enumerate(layers[:-1]):
        x = layer(x, shift=shift)
        x.register_hook(lambda _, index=index: look(index))
    layers[-1](x, shift=shift).sum().backward()
    first = offloading_layers(LAYERS, budget) - 1
    assert came == [[False] * index + [index <= first] for index in reversed(range(LAYERS - 1))]
