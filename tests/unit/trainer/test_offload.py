"""Activation offload: what blocks keep really leaves, comes back unchanged, and its host memory goes round. On CPU, where copies are made at once."""

import gc
import math
import weakref
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from prime_rl.trainer import activations
from prime_rl.trainer.activations import HostPool, offload_layers, offloading_layers

CPU = torch.device("cpu")
TOKENS, WIDTH, LAYERS = 64, 16, 5


class Keeps(torch.autograd.Function):
    """x · weight + shift, keeping x, a transposed view of it, the weight, and the shift that all blocks share."""

    seen: ClassVar[list["weakref.ref[torch.UntypedStorage]"]] = []

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, shift: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        x = x.clone()
        Keeps.seen.append(weakref.ref(x.untyped_storage()))
        ctx.save_for_backward(x, x.t(), weight, shift)
        return x @ weight + shift

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def, override]
        x, flipped, weight, shift = ctx.saved_tensors
        assert x.stride() == (WIDTH, 1)
        assert flipped.stride() == (1, WIDTH)
        assert x.data_ptr() == flipped.data_ptr()
        assert shift.shape == grad.shape
        return grad @ weight.t(), flipped @ grad, grad


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return Keeps.apply(x, self.weight, shift)


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    monkeypatch.setattr(activations, "SMALLEST", 0)
    monkeypatch.setattr(activations, "CHUNK", 1000)  # TOKENS · WIDTH · 4 = 4096 bytes: no whole number of chunks
    torch.manual_seed(0)
    Keeps.seen.clear()
    return offload_layers([Layer() for _ in range(LAYERS)], CPU)


def forward(layers: list[nn.Module], x: Tensor) -> Tensor:
    shift = torch.ones(TOKENS, WIDTH)
    for layer in layers:
        x = layer(x, shift=shift)
    return x


def host(layers: list[nn.Module]) -> HostPool:
    return layers[0].host  # type: ignore[return-value]


def test_host_memory_goes_round(layers: list[nn.Module]) -> None:
    """Steps use the same chunks again, and a pass without backward (an evaluation that crashed) loses none."""
    for _ in range(3):
        forward(layers, torch.randn(TOKENS, WIDTH)).sum().backward()
        assert host(layers).chunks == 5 * (LAYERS - 2)
        assert len(host(layers)._free) == host(layers).chunks
    forward(layers, torch.randn(TOKENS, WIDTH))
    # Of what a block keeps neither its weight nor what all blocks are given.
    assert [len(block.offloaded) for block in host(layers).blocks.values()] == [1, 1, 1, 0]
    forward(layers, torch.randn(TOKENS, WIDTH)).sum().backward()
    assert len(host(layers)._free) == host(layers).chunks == 5 * (LAYERS - 2)
    with torch.no_grad():
        host(layers).blocks.clear()
        forward(layers, torch.randn(TOKENS, WIDTH))
    assert not host(layers).blocks


def test_a_second_backward_is_refused(layers: list[nn.Module]) -> None:
    """What was offloaded is released when it has been asked for: a second pass must not read another's memory."""
    out = forward(layers, torch.randn(TOKENS, WIDTH)).sum()
    out.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="asked for once"):
        out.backward()


# ---- as much as a budget allows


DEEP = 10
NARROW = 4 * TOKENS * WIDTH
"""Bytes of a block's input; it keeps three times as much inside."""


class Widening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Parameter(torch.randn(shape) / 8) for shape in ((WIDTH, 3 * WIDTH), (3 * WIDTH, WIDTH))
        )

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return torch.tanh(x @ self.up) @ self.down + shift


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
def test_a_budget_is_spent_over_the_blocks(budget: float, offloaded: list[list[int]], layers: list[nn.Module]) -> None:
    """Which tensors go out, in units of the smaller one; they leave the device, every chunk comes back, and the gradients are the same bits."""
    torch.manual_seed(0)
    plain = [Widening() for _ in range(DEEP)]
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    want = gradients(plain, x)
    offloading = offload_layers(plain, CPU, budget * NARROW)

    out = forward(offloading, x)
    blocks = [host(offloading).blocks[i] for i in range(DEEP - 1)]
    assert [[storage.size // NARROW for storage in block.offloaded] for block in blocks if block.offloaded] == [
        sizes for sizes in offloaded if sizes
    ]
    assert [[storage.size // NARROW for storage in block.offloaded] for block in blocks[: len(offloaded)]] == offloaded
    assert all(storage.device is None for block in blocks for storage in block.offloaded)
    del out

    for got, expected in zip(gradients(offloading, x), want, strict=True):
        assert torch.equal(got, expected)
    assert len(host(offloading)._free) == host(offloading).chunks > 0
    # 4,096 and 12,288 bytes in chunks of 1,000
    assert host(offloading).chunks == sum({1: 5, 3: 13}[size] for sizes in offloaded for size in sizes)


def test_what_stays_belongs_to_the_graph(layers: list[nn.Module]) -> None:
    """What a block does not offload is gone with the graph, although the block is remembered."""
    offloading = offload_layers([layer._checkpoint_wrapped_module for layer in layers], CPU, 1.0)
    out = forward(offloading, torch.randn(TOKENS, WIDTH, requires_grad=True))
    assert all(storage() is not None for storage in Keeps.seen)
    del out
    gc.collect()
    assert all(storage() is None for storage in Keeps.seen)


@pytest.mark.parametrize("budget", [NARROW, math.inf])
def test_a_block_is_fetched_while_the_one_after_it_is_at_work(budget: float, layers: list[nn.Module]) -> None:
    """Also the first that comes back, although those after it have offloaded nothing."""
    offloading = offload_layers([Widening() for _ in range(DEEP)], CPU, budget)
    blocks, came = host(offloading).blocks, []

    def look(index: int) -> None:
        """Backward is about to begin with block `index`."""
        came.append([bool(blocks[i].offloaded) and blocks[i].offloaded[0].device is not None for i in range(index + 1)])

    x, shift = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.ones(TOKENS, WIDTH)
    for index, layer in enumerate(offloading[:-1]):
        x = layer(x, shift=shift)
        x.register_hook(lambda _, index=index: look(index))
    offloading[-1](x, shift=shift).sum().backward()
    first = offloading_layers(DEEP, budget) - 1
    want = [[False] * index + [index <= first] for index in reversed(range(DEEP - 1))]
    assert came == want
