"""Activation offload: what blocks keep really leaves, comes back unchanged, and its host memory goes round. On CPU, where copies are made at once."""

import gc
import weakref
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from prime_rl.trainer import offload
from prime_rl.trainer.offload import Host, offload_layers

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
    monkeypatch.setattr(offload, "SMALLEST", 0)
    monkeypatch.setattr(offload, "CHUNK", 1000)  # TOKENS · WIDTH · 4 = 4096 bytes: no whole number of chunks
    torch.manual_seed(0)
    Keeps.seen.clear()
    return offload_layers([Layer() for _ in range(LAYERS)], CPU)


def forward(layers: list[nn.Module], x: Tensor) -> Tensor:
    shift = torch.ones(TOKENS, WIDTH)
    for layer in layers:
        x = layer(x, shift=shift)
    return x


def host(layers: list[nn.Module]) -> Host:
    return layers[0].host  # type: ignore[return-value]


def away(layers: list[nn.Module]) -> list[bool]:
    """For each block, whether everything it kept has left."""
    blocks = [host(layers).blocks.get(i) for i in range(len(layers))]
    return [block is not None and all(s.device is None for s in block.storages.values()) for block in blocks]


def test_what_is_kept_leaves_and_comes_back(layers: list[nn.Module]) -> None:
    """After forward only the last two blocks hold what they kept; backward finds all of it, strides and aliases included."""
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    plain = [layer._checkpoint_wrapped_module for layer in layers]
    forward(plain, x).square().sum().backward()
    want = [x.grad, *(layer.weight.grad for layer in plain)]
    x.grad = None
    for layer in plain:
        layer.weight.grad = None

    Keeps.seen.clear()
    out = forward(layers, x)
    gc.collect()
    assert away(layers) == [True, True, True, False, False]
    assert [storage() is None for storage in Keeps.seen] == [True, True, True, False, False]
    out.square().sum().backward()
    for got, expected in zip([x.grad, *(layer.weight.grad for layer in plain)], want, strict=True):
        assert torch.equal(got, expected)


def test_host_memory_goes_round(layers: list[nn.Module]) -> None:
    """Steps use the same chunks again, and a pass without backward (an evaluation that crashed) loses none."""
    for _ in range(3):
        forward(layers, torch.randn(TOKENS, WIDTH)).sum().backward()
        assert host(layers).chunks == 5 * (LAYERS - 1)
        assert len(host(layers)._free) == host(layers).chunks
    forward(layers, torch.randn(TOKENS, WIDTH))
    forward(layers, torch.randn(TOKENS, WIDTH)).sum().backward()
    assert len(host(layers)._free) == host(layers).chunks == 5 * (LAYERS - 1)


def test_what_blocks_share_stays(layers: list[nn.Module]) -> None:
    """Neither weights nor what every block is given, and nothing small or without a backward pass to come."""
    forward(layers, torch.randn(TOKENS, WIDTH))
    assert all(len(block.storages) == 1 for block in host(layers).blocks.values())
    with torch.no_grad():
        host(layers).blocks.clear()
        forward(layers, torch.randn(TOKENS, WIDTH))
    assert not host(layers).blocks


def test_small_tensors_stay(layers: list[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALLEST", 4 * TOKENS * WIDTH + 1)
    forward(layers, torch.randn(TOKENS, WIDTH)).sum().backward()
    assert host(layers).chunks == 0


def test_a_second_backward_is_refused(layers: list[nn.Module]) -> None:
    """What was parked is given up when it has been asked for: a second pass must not read another's memory."""
    out = forward(layers, torch.randn(TOKENS, WIDTH)).sum()
    out.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="asked for once"):
        out.backward()
