"""Packed attention: which kernel is chosen and why, that each is given what it needs, and that compiled blocks serve every pack."""

import logging
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from prime_rl.errors import UserError
from prime_rl.trainer import attention, attention_kernels
from prime_rl.trainer.attention import Machine, Needs, choose, with_gradients
from prime_rl.trainer.attention_kernels import KERNELS, cudnn_plan, load
from prime_rl.trainer.parallel import World
from support import attention as support
from support import trainer

world = trainer.world

BF16 = Needs(torch.bfloat16, query_heads=16, key_heads=8, head_dim=128)
PACKS = [(1,), (9,), (5, 7, 1, 12), (1, 1, 1)]


def gpu(capability: tuple[int, int], **obstacles: str) -> Machine:
    return Machine("cuda", capability, obstacles.get)


HOPPER, AMPERE, VOLTA = (9, 0), (8, 0), (7, 0)
ABSENT = "is not installed"


@pytest.fixture(params=support.STAND_INS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """A GPU backend, its library replaced by a stand-in on the CPU."""
    with support.STAND_INS[request.param]():
        yield request.param


def qkv(tokens: int, heads: int = 4, key_heads: int = 2, size: int = 8) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of out, in float64."""
    draw = torch.Generator().manual_seed(tokens)
    shapes = (heads, key_heads, key_heads, heads)
    q, k, v, d_out = (torch.randn(tokens, h, size, generator=draw, dtype=torch.float64) for h in shapes)
    return q, k, v, d_out


def pack(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Boundaries, and the longest length."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), torch.tensor(max(lengths))


# Choosing


@pytest.mark.parametrize(
    ("machine", "needs", "line"),
    [
        (Machine("cpu"), BF16, "attention: sdpa"),
        (gpu(HOPPER), BF16, "attention: flash_attention_4"),
        (
            gpu(HOPPER, flash_attention_4=ABSENT),
            BF16,
            "attention: flash_attention_3 (flash_attention_4 is not installed)",
        ),
        (
            gpu(HOPPER, flash_attention_4=ABSENT, flash_attention_3=ABSENT, cudnn="fails here: no plan"),
            BF16,
            "attention: varlen (flash_attention_4 is not installed; flash_attention_3 is not installed; "
            "cudnn fails here: no plan)",
        ),
        (gpu(AMPERE), BF16, "attention: flash_attention_2"),
        (
            gpu((10, 0), flash_attention_4="fails here: no kernel", flash_attention_2=ABSENT),
            BF16,
            "attention: varlen (flash_attention_4 fails here: no kernel; flash_attention_2 is not installed)",
        ),
        (
            gpu(VOLTA),
            BF16,
            "attention: sdpa (flash_attention_2 needs compute capability 8.0 or more, not 7.0; "
            "varlen needs compute capability 8.0 or more, not 7.0)",
        ),
        (
            gpu(HOPPER),
            Needs(torch.float32, 16, 8, 128),
            "attention: sdpa (flash_attention_4 does not compute in float32; "
            "flash_attention_3 does not compute in float32; cudnn does not compute in float32; "
            "varlen does not compute in float32)",
        ),
        (
            gpu(AMPERE),
            Needs(torch.bfloat16, 8, 1, 512),
            "attention: sdpa (flash_attention_2 has no kernel for heads of size 512; "
            "varlen has no kernel for heads of size 512)",
        ),
    ],
)
def test_auto_takes_the_fastest_and_says_why(machine: Machine, needs: Needs, line: str) -> None:
    """`auto` passes a backend over only for a reason, and says it."""
    assert choose("auto", machine, needs)[1] == line


@pytest.mark.parametrize(
    ("wanted", "machine", "needs", "message"),
    [
        ("varlen", Machine("cpu"), BF16, "model.attention varlen needs a GPU"),
        (
            "flash_attention_3",
            gpu(AMPERE),
            BF16,
            "flash_attention_3 needs a Hopper GPU: compute capability 9.0, not 8.0",
        ),
        ("flash_attention_2", gpu(HOPPER, flash_attention_2=ABSENT), BF16, "flash_attention_2 is not installed"),
        ("cudnn", gpu(HOPPER), Needs(torch.bfloat16, 16, 8, 100), "cudnn has no kernel for heads of size 100"),
    ],
)
def test_a_named_backend_that_cannot_run_is_refused(wanted: str, machine: Machine, needs: Needs, message: str) -> None:
    """It is never replaced silently."""
    with pytest.raises(UserError, match=message) as caught:
        choose(wanted, machine, needs)
    assert "\n" not in str(caught.value)


def test_needs_come_from_the_model() -> None:
    """Heads that the config does not give are derived as transformers derives them; a window is one only where it is used."""
    config = Qwen3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    assert attention.needs_of(config, torch.bfloat16) == Needs(torch.bfloat16, 4, 2, 32, windows=False)
    assert not attention.needs_of(Qwen3Config(sliding_window=8), torch.bfloat16).windows
    assert attention.needs_of(Qwen3Config(sliding_window=8, use_sliding_window=True), torch.bfloat16).windows


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


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Adds files to a folder of packages that is searched first."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)

    def add(name: str, text: str = "") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return add


def test_a_library_that_fails_is_a_reason(site: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a crash, whatever it raises."""
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    site("flash_attn_interface.py", "import torch; torch.of_another_version")
    assert (load("flash_attention_3") or "").startswith("cannot be loaded: ")


def test_flash_attention_2_and_4_share_a_folder(site: Callable[[str, str], Path]) -> None:
    """One of them is no sign of the other."""
    site("flash_attn/cute/interface.py", "")
    assert "group `flash-attn-2`" in (load("flash_attention_2") or "")
    assert load("flash_attention_4") is None


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("flash_attention_3", "built from its source"),
        ("cudnn", "extra `cuda`"),
        ("flash_attention_4", "extra `fa`"),
        ("flash_attention_2", "group `flash-attn-2`"),
    ],
)
def test_what_is_absent_says_what_to_install(name: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason names the extra."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reason = load(name) or ""
    assert reason.startswith("is not installed: ")
    assert remedy in reason


# Trial


def test_the_trial_passes_a_kernel_that_is_right(backend: str) -> None:
    """Windows included."""
    needs = Needs(torch.bfloat16, 4, 2, 16, windows=True)
    assert attention.trial(backend, needs, torch.device("cpu")) is None


def test_the_trial_finds_a_kernel_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that ignores the window would train on the wrong model without an error."""
    real = support.dense_forward
    monkeypatch.setattr(support, "dense_forward", lambda *args: real(*args[:-1], -1))
    with support.varlen():
        assert attention.trial("varlen", BF16, torch.device("cpu")) is None
        with_windows = Needs(torch.bfloat16, 16, 8, 128, windows=True)
        assert "with a sliding window" in (attention.trial("varlen", with_windows, torch.device("cpu")) or "")


def test_the_trial_reports_what_a_library_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's own error is none of Python's usual ones, and is a reason all the same."""
    with support.cudnn():

        def refuse(*args: object) -> None:
            raise sys.modules["cudnn"].cudnnGraphNotSupportedError("no engine\nat all")

        monkeypatch.setattr(support, "dense_forward", refuse)
        reason = attention.trial("cudnn", BF16, torch.device("cpu"))
    assert reason == "fails here: cuDNN 91900 has no plan for this: no engine at all"
    assert "fails here" in (attention.trial("varlen", BF16, torch.device("cpu")) or "")  # no kernel on a CPU


# Numbers


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("lengths", PACKS)
def test_sdpa_equals_softmax_written_out(lengths: tuple[int, ...], window: int | None) -> None:
    """Document by document, and with the mask used while compiling, out and gradients equal the definition."""
    *inputs, d_out = qkv(sum(lengths))
    mask = *pack(lengths), 0.3, window

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
def test_each_kernel_gets_the_right_arguments(backend: str, lengths: tuple[int, ...], window: int | None) -> None:
    """Boundaries, scale and window mean to the library what they mean to us, forward and backward, with grouped heads."""
    *inputs, d_out = qkv(sum(lengths))
    mask = *pack(lengths), 0.3, window
    got = with_gradients(lambda *arguments: KERNELS[backend](*arguments)[0], inputs, d_out, *mask)
    for a, b in zip(got, with_gradients(attention.sdpa, inputs, d_out, *mask), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)  # the statistics are kept in float32


def test_windows_are_those_of_transformers() -> None:
    """A model with sliding layers gives the same hidden states as with transformers' own attention."""
    model = tiny_model(sliding_window=4, use_sliding_window=True, max_window_layers=1)
    assert model.config.layer_types == ["full_attention", "sliding_attention"]
    ids = torch.randint(0, 64, (1, 13), generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation("eager")
    want = model.model(input_ids=ids, use_cache=False).last_hidden_state
    attention.register("sdpa")
    model.set_attn_implementation(attention.NAME)
    mask = attention.boundaries(torch.tensor([0, 13], dtype=torch.int32), 13)
    got = model.model(input_ids=ids, use_cache=False, **mask).last_hidden_state
    torch.testing.assert_close(got, want)


def test_what_a_kernel_does_not_do_is_refused() -> None:
    """Dropout, soft-capping and sinks reach the attention function by keyword; ignoring them would train another model."""
    attention.register("sdpa")
    function = ALL_ATTENTION_FUNCTIONS[attention.NAME]
    q, k, v, _ = (x.transpose(0, 1)[None] for x in qkv(3))
    mask = attention.boundaries(torch.tensor([0, 3], dtype=torch.int32), 3)
    assert function(None, q, k, v, None, **mask)[0].shape == (1, 3, 4, 8)
    for extra in ({"dropout": 0.1}, {"softcap": 50.0}, {"s_aux": torch.zeros(4)}):
        with pytest.raises(UserError, match="not supported"):
            function(None, q, k, v, None, **mask, **extra)


def test_a_cudnn_plan_fits_its_pack() -> None:
    """It has room for the documents and the longest of them, is never longer than the tokens, and rounding never costs much memory."""
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


def test_operators_keep_the_rules_of_tracing(backend: str) -> None:
    """Shapes, strides and dtypes of the fake kernels are the real ones, and autograd traces with dynamic shapes."""
    q, k, v, _ = qkv(25)
    boundaries, longest = pack((5, 7, 1, 12))
    for x in (q, k, v):
        x.requires_grad_()
    # A view with other strides, as a model makes it, must come out dense all the same.
    strided = q.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    for query, window in ((q, None), (strided, 3)):
        torch.library.opcheck(KERNELS[backend], (query, k, v, boundaries, longest, 0.3, window))


def tiny_model(**settings: object) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    config = Qwen3Config(**shape, num_attention_heads=4, num_key_value_heads=2, **settings)
    return Qwen3ForCausalLM(config).train()


def random_pack(draw: random.Random, tokens: int) -> tuple[int, ...]:
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(draw.randint(1, min(left, draw.choice((3, 20, tokens)))))
    return tuple(lengths)


def hidden_and_gradient(model: Qwen3ForCausalLM, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    ids = torch.arange(sum(lengths))[None] * 7 % 64
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    model.zero_grad()
    mask = attention.boundaries(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), max(lengths))
    hidden = model.model(input_ids=ids, position_ids=positions, use_cache=False, **mask).last_hidden_state
    # Not the sum of squares: the last norm has made that the same for all weights.
    torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).mul(hidden).sum().backward()
    gradient = model.model.embed_tokens.weight.grad
    assert gradient is not None
    return hidden.detach(), gradient.clone()


@pytest.mark.parametrize("name", ["sdpa", "varlen", pytest.param("cudnn", marks=pytest.mark.slow)])
def test_a_compiled_block_serves_every_pack(name: str) -> None:
    """One graph without a break for all packs of so many tokens, however many documents they have and however long they are, and one more
    for all numbers of tokens; every layer shares them. The numbers are those of the uncompiled model."""
    draw = random.Random(0)
    fixed = [(64,), (1,) * 64, *(random_pack(draw, 64) for _ in range(8))]
    varying = [random_pack(draw, tokens) for tokens in (48, 80, 33, 64, 17, 100, 2, 66)]
    attention.register("sdpa")
    model = tiny_model(sliding_window=6, use_sliding_window=True, max_window_layers=0)
    model.set_attn_implementation(attention.NAME)
    want = [hidden_and_gradient(model, lengths) for lengths in fixed + varying]

    torch._dynamo.reset()
    counters.clear()
    with support.STAND_INS.get(name, nullcontext)():
        attention.register(name)
        for layer in model.model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
        graphs = []
        for lengths, expected in zip(fixed + varying, want, strict=True):
            for a, b in zip(hidden_and_gradient(model, lengths), expected, strict=True):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
            graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1] * len(fixed) + [2] * len(varying)
