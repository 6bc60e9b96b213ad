"""The GPU's attention kernels compute what `sdpa` computes in float32, document by document, eager and compiled, with
and without windows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from prime_rl.trainer import attention
from prime_rl.trainer.attention_kernels import EXPLICIT, KERNELS
from prime_rl.trainer.attention_needs import Needs
from support import attention as support
from support.attention import with_gradients

GPU = torch.device("cuda")
HEAD_DIM = 128
LENGTHS = (700, 1, 1347)
# bfloat16 in and out, sums in float32: the kernels' own rounding is 2e-3 to 3e-3.
TOLERANCE = 5e-3


def relative_error(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖."""
    return ((got.to(want.dtype) - want).norm() / want.norm()).item()


@pytest.fixture(params=KERNELS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that this machine has."""
    reason = attention.why_not(request.param, attention.capability_of(GPU), torch.bfloat16, Needs(HEAD_DIM))
    if reason is not None:
        assert not reason.startswith("cannot be loaded"), reason  # what is installed must work
        pytest.skip(f"{request.param} {reason}")
    return request.param


def qkv(lengths: tuple[int, ...], heads: int, key_heads: int) -> list[Tensor]:
    """q, k, v and the gradient of out as transformers has them: [1, H, T, D], views of [T, H, D]."""
    draw = torch.Generator(GPU).manual_seed(0)
    shapes = (heads, key_heads, key_heads, heads)
    made = [torch.randn(1, sum(lengths), h, HEAD_DIM, device=GPU, generator=draw).bfloat16() for h in shapes]
    return [*(x.transpose(1, 2) for x in made[:3]), made[3]]


def called(backend: str, lengths: tuple[int, ...], window: int | None, compiled: bool = False) -> Callable[..., Tensor]:
    """What transformers would call, as a function of q, k and v."""
    attention.register(backend)
    function, mask = ALL_ATTENTION_FUNCTIONS[attention.NAME], support.boundaries(lengths, "cuda")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function(None, q, k, v, None, sliding_window=window, **mask)[0]

    torch._dynamo.reset()  # what is compiled for one case does not count against the next
    return torch.compile(attend, fullgraph=True) if compiled else attend


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("window", [None, 1, 256])
@pytest.mark.parametrize("heads", [(16, 8), (32, 8)], ids=str)
def test_out_and_gradients(backend: str, heads: tuple[int, int], window: int | None, compiled: bool) -> None:
    """Out, dq, dk and dv against `sdpa` in float32, over a long, a one-token and a longer document, grouped heads."""
    *inputs, d_out = qkv(LENGTHS, *heads)
    got = with_gradients(called(backend, LENGTHS, window, compiled), inputs, d_out)
    reference = called("sdpa", LENGTHS, window)
    want = with_gradients(reference, [x.float() for x in inputs], d_out.float())
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert a.shape == b.shape
        assert a.isfinite().all(), name
        if window == 1 and name in ("dq", "dk"):
            assert a.abs().max() < 1e-2, name  # a token that sees itself alone: its scores do not matter
        else:
            assert relative_error(a, b) < TOLERANCE, name


@pytest.mark.parametrize("changed", ["sinks", "smaller values"])
def test_changed_scores(backend: str, changed: str) -> None:
    """Sinks, and values that are smaller than keys, against the written-out operations in float32."""
    q, k, v, d_out = qkv(LENGTHS, 16, 8)
    inputs = [q, k, v[..., :64] if changed == "smaller values" else v]
    sinks = torch.linspace(-2, 3, 16, device=GPU) if changed == "sinks" else None
    d_out = d_out[..., : inputs[2].shape[-1]]
    attention.register(backend)
    function, mask = ALL_ATTENTION_FUNCTIONS[attention.NAME], support.boundaries(LENGTHS, "cuda")

    def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plain = (x[0].transpose(0, 1) for x in (q, k, v))
        arguments = *support.pack(LENGTHS, "cuda"), HEAD_DIM**-0.5, None, None, sinks
        return EXPLICIT(*plain, *arguments)[0][None]

    got = with_gradients(lambda *qkv: function(None, *qkv, None, s_aux=sinks, **mask)[0], inputs, d_out)
    want = with_gradients(written_out, [x.float() for x in inputs], d_out.float())
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert relative_error(a, b) < TOLERANCE, name


def test_compiled_blocks_serve_every_pack(backend: str) -> None:
    """A block compiles for the first number of tokens and once more, for any documents. Numbers: float32's `sdpa`."""
    packs = [(512,), (100, 1, 411), (8,) * 64, (300, 212), (500, *(1,) * 12), (384,), (200, 184), (640,), (1,) * 640]
    shape = {"size": 256, "head_dim": HEAD_DIM, "vocabulary": 512}
    settings = {**shape, "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}
    attention.register("sdpa")
    exact = support.make_model(**settings).to(GPU)
    want = [support.hidden_and_gradient(exact, lengths, "cuda") for lengths in packs]

    torch._dynamo.reset()
    counters.clear()
    attention.register(backend)
    lm = support.make_model(**settings).to(GPU)
    for parameter in lm.parameters():  # not the buffers: rotary frequencies must not be rounded
        parameter.data = parameter.data.bfloat16()
    for layer in lm.model.layers:
        layer.compile(fullgraph=True)
    graphs = []
    for lengths, expected in zip(packs, want, strict=True):
        got = support.hidden_and_gradient(lm, lengths, "cuda")
        hidden, gradient = (relative_error(a.float(), b) for a, b in zip(got, expected, strict=True))
        # The whole model is in bfloat16, and so is the sum over the many tokens of an id: its embedding's gradient.
        assert hidden < 2e-2
        assert gradient < 3e-2
        graphs.append(counters["stats"]["unique_graphs"])
    # Two kinds of layer, with a window and without.
    assert graphs == [2] * 5 + [4] * 4
