"""Packed attention: which kernel is chosen and why, that each is given what it needs, and that compiled blocks serve
every pack."""

import logging
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from prime_rl.errors import UserError
from prime_rl.trainer import attention, attention_kernels
from prime_rl.trainer.attention import choose
from prime_rl.trainer.attention_kernels import KERNELS, cudnn_plan, load
from prime_rl.trainer.parallel import World
from support import attention as support
from support.attention import with_gradients

BF16 = torch.bfloat16, 128
PACKS = [(1,), (9,), (5, 7, 1, 12), (1, 1, 1)]


CPU, BLACKWELL, HOPPER, AMPERE, VOLTA = None, (10, 0), (9, 0), (8, 0), (7, 0)
FA4, FA3 = "flash_attention_4", "flash_attention_3"


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Of the libraries of kernels, all but these are installed."""

    def lack(names: tuple[str, ...]) -> None:
        monkeypatch.setattr(attention, "load", lambda name: "is not installed" if name in names else None)

    return lack


def qkv(tokens: int, heads: int = 4, key_heads: int = 2, size: int = 8) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of out, in float64."""
    draw = torch.Generator().manual_seed(tokens)
    shapes = (heads, key_heads, key_heads, heads)
    q, k, v, d_out = (torch.randn(tokens, h, size, generator=draw, dtype=torch.float64) for h in shapes)
    return q, k, v, d_out


# Choosing


@pytest.mark.parametrize(
    ("capability", "absent", "needs", "line"),
    [
        (CPU, (), BF16, "attention: sdpa"),
        (HOPPER, (), BF16, "attention: flash_attention_4"),
        (
            HOPPER,
            (FA4, FA3, "cudnn"),
            BF16,
            "attention: varlen (flash_attention_4 is not installed; flash_attention_3 is not installed; "
            "cudnn is not installed)",
        ),
        (
            BLACKWELL,
            (),
            (torch.bfloat16, 256),
            "attention: varlen (flash_attention_4 may have no kernel for heads of size 256; flash_attention_3 needs a "
            "Hopper GPU: compute capability 9.0, not 10.0; cudnn may have no kernel for heads of size 256)",
        ),
    ],
)
def test_auto_takes_the_fastest_and_says_why(
    capability: tuple[int, int] | None,
    absent: tuple[str, ...],
    needs: tuple[torch.dtype, int],
    line: str,
    lacking: Callable[..., None],
) -> None:
    """`auto` passes a backend over only for a reason, and says it."""
    lacking(absent)
    assert choose("auto", capability, *needs)[1] == line


@pytest.mark.parametrize(
    ("wanted", "capability", "needs", "message"),
    [
        ("varlen", CPU, BF16, "model.attention varlen needs a GPU"),
        (FA3, AMPERE, BF16, "flash_attention_3 needs a Hopper GPU: compute .* 9.0, not 8.0"),
        ("cudnn", HOPPER, (torch.float32, 128), "cudnn does not compute in float32"),
        (FA4, HOPPER, BF16, "flash_attention_4 is not installed"),
        ("varlen", VOLTA, BF16, "varlen needs compute capability 8.0 or more, not 7.0"),
        ("cudnn", HOPPER, (torch.bfloat16, 100), "cudnn has no kernel for heads of size 100"),
        ("varlen", HOPPER, (torch.bfloat16, 512), "varlen has no kernel for heads of size 512"),
    ],
)
def test_a_named_backend_that_cannot_run_is_refused(
    wanted: str,
    capability: tuple[int, int] | None,
    needs: tuple[torch.dtype, int],
    message: str,
    lacking: Callable[..., None],
) -> None:
    """It is never replaced silently."""
    lacking((FA4,))
    with pytest.raises(UserError, match=message) as caught:
        choose(wanted, capability, *needs)
    assert "\n" not in str(caught.value)


def test_every_rank_takes_what_the_first_chose(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """The choice is said once, and a backend that cannot run here is refused before a model is built."""
    caplog.set_level(logging.INFO, "prime_rl")
    config = Qwen3Config(hidden_size=64, num_attention_heads=4)
    kept = attention.set_up("auto", config, torch.float32, world)
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default in kept
    assert [record.message for record in caplog.records] == ["attention: sdpa"]
    with pytest.raises(UserError, match="cudnn needs a GPU"):
        attention.set_up("cudnn", config, torch.bfloat16, world)


# Loading libraries


def test_a_library_that_fails_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a crash, whatever it raises."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] in ("flash_attn", "flash_attn_interface")]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "interface.py").touch()
    (tmp_path / "flash_attn_interface.py").write_text("import torch; torch.of_another_version")
    assert (load("flash_attention_3") or "").startswith("cannot be loaded: ")
    assert load("flash_attention_4") is None


def test_what_is_absent_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason names the extra."""
    for name, remedy in {
        "flash_attention_3": "built from its source",
        "cudnn": "extra `cuda`",
        "flash_attention_4": "extra `fa`",
    }.items():
        monkeypatch.setitem(sys.modules, attention_kernels._LIBRARIES[name][0], None)
        assert (load(name) or "").startswith("is not installed: "), name
        assert remedy in (load(name) or "")


def test_a_kernel_that_fails_is_one_line() -> None:
    """Contract: it says which, and the option that takes another."""
    q, k, v, _ = (x.bfloat16() for x in qkv(3))
    with pytest.raises(
        UserError, match=r"attention varlen fails here: .*: choose another with model\.attention"
    ) as caught:
        KERNELS["varlen"](q, k, v, *support.pack([3]), 0.3, None)  # there is none on a CPU
    assert "\n" not in str(caught.value)


# Numbers


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("lengths", PACKS)
def test_sdpa_equals_softmax_written_out(lengths: tuple[int, ...], window: int | None) -> None:
    """Document by document, and with the mask used while compiling, out and gradients equal the definition."""
    *inputs, d_out = qkv(sum(lengths))
    mask = *support.pack(lengths), 0.3, window

    def written_out(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
        return support.explicit(q, k, v, lengths, 0.3, window)

    want = with_gradients(written_out, inputs, d_out)
    torch._dynamo.reset()
    compiled = torch.compile(attention.sdpa, backend="eager", fullgraph=True)
    for kernel in (attention.sdpa, compiled):
        for a, b in zip(with_gradients(kernel, inputs, d_out, *mask), want, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("lengths", PACKS)
def test_a_kernel_gets_the_right_arguments(lengths: tuple[int, ...], window: int | None) -> None:
    """Boundaries, scale and window mean to the library what they mean to us, forward and backward, with grouped
    heads."""
    *inputs, d_out = qkv(sum(lengths))
    mask = *support.pack(lengths), 0.3, window
    got = with_gradients(lambda *arguments: support.STAND_IN(*arguments)[0], inputs, d_out, *mask)
    for a, b in zip(got, with_gradients(attention.sdpa, inputs, d_out, *mask), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)  # the statistics are kept in float32


def test_what_a_kernel_does_not_do_is_refused() -> None:
    """Dropout, soft-capping and sinks reach the attention function by keyword; ignoring them would train another
    model."""
    attention.register("sdpa")
    function = ALL_ATTENTION_FUNCTIONS[attention.NAME]
    q, k, v, _ = (x.transpose(0, 1)[None] for x in qkv(3))
    mask = support.boundaries([3])
    assert function(None, q, k, v, None, **mask)[0].shape == (1, 3, 4, 8)
    for extra in ({"dropout": 0.1}, {"softcap": 50.0}, {"s_aux": torch.zeros(4)}):
        with pytest.raises(UserError, match="not supported"):
            function(None, q, k, v, None, **mask, **extra)


def test_a_cudnn_plan_fits_its_pack() -> None:
    """It has room for the documents and the longest of them, is never longer than the tokens, and rounding never costs
    much memory."""
    draw = random.Random(0)
    for _ in range(2000):
        tokens, heads = 128 * draw.choice((1, 2, 3, 100, 128, 500, 1024)), draw.choice((1, 16, 64))
        documents = draw.randint(1, min(tokens, draw.choice((1, 10, 5000))))
        shortest = -(-tokens // documents)
        longest = draw.choice((shortest, tokens - documents + 1, draw.randint(shortest, tokens - documents + 1)))
        number, length = cudnn_plan(documents, longest, tokens, heads)
        assert number >= documents
        assert longest <= length <= tokens
        size = 4 * heads * number * length
        assert size <= max(attention_kernels.CUDNN_LSE_BYTES, 4 * heads * documents * (longest + 127))


# Tracing


def random_pack(draw: random.Random, tokens: int) -> tuple[int, ...]:
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(draw.randint(1, min(left, draw.choice((3, 20, tokens)))))
    return tuple(lengths)


@pytest.mark.parametrize("name", ["sdpa", "stand_in"])
def test_a_compiled_block_serves_every_pack(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph without a break for all packs of so many tokens, however many documents they have and however long they
    are, and one more for all numbers of tokens; every layer shares them. The numbers are those of the uncompiled
    model."""
    draw = random.Random(0)
    fixed = [(64,), (1,) * 64, *(random_pack(draw, 64) for _ in range(8))]
    varying = [random_pack(draw, tokens) for tokens in (48, 80, 33, 64, 17, 100, 2, 66)]
    attention.register("sdpa")
    model = support.make_model(sliding_window=6, use_sliding_window=True, max_window_layers=0)
    want = [support.hidden_and_gradient(model, lengths) for lengths in fixed + varying]

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setitem(KERNELS, "stand_in", support.STAND_IN)
    attention.register(name)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    graphs = []
    for lengths, expected in zip(fixed + varying, want, strict=True):
        for a, b in zip(support.hidden_and_gradient(model, lengths), expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1] * len(fixed) + [2] * len(varying)
