"""Packed attention: which kernel is chosen and why, that each is given what it needs, and that compiled blocks serve
every pack."""

import logging
import random
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from prime_rl.errors import UserError
from prime_rl.trainer import attention, attention_kernels
from prime_rl.trainer.attention import choose
from prime_rl.trainer.attention_kernels import EXPLICIT, KERNELS, cudnn_plan, load
from prime_rl.trainer.attention_needs import Needs, examine
from support import attention as support
from support.architectures import VARIANTS, compare, tiny_config, variants
from support.attention import with_gradients

BF16 = torch.bfloat16, Needs(128)
PACKS = [(1,), (9,), (5, 7, 1, 12), (1, 1, 1)]


CPU, BLACKWELL, HOPPER, AMPERE, VOLTA = None, (10, 0), (9, 0), (8, 0), (7, 0)
FA4, FA3 = "flash_attention_4", "flash_attention_3"


def qkv(tokens: int, heads: int = 4, key_heads: int = 2, size: int = 8, value_size: int = 8) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of out, in float64."""
    draw = torch.Generator().manual_seed(tokens)
    shapes = (heads, size), (key_heads, size), (key_heads, value_size), (heads, value_size)
    return tuple(torch.randn(tokens, *shape, generator=draw, dtype=torch.float64) for shape in shapes)


def meta_model(model_type: str, **settings: object) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(model_type, **settings), dtype=torch.float32)


# Choosing


@pytest.mark.parametrize(
    ("wanted", "capability", "absent", "needs", "says"),
    [
        ("auto", CPU, (), BF16, "sdpa"),
        ("auto", HOPPER, (), BF16, "flash_attention_4"),
        (
            "auto",
            HOPPER,
            (FA4, FA3, "cudnn"),
            BF16,
            "varlen (flash_attention_4 is not installed; flash_attention_3 is not installed; cudnn is not installed)",
        ),
        (
            "auto",
            BLACKWELL,
            (),
            (torch.bfloat16, Needs(256)),
            "varlen (flash_attention_4 may have no kernel for heads of size 256; flash_attention_3 needs a "
            "Hopper GPU: compute capability 9.0, not 10.0; cudnn may have no kernel for heads of size 256)",
        ),
        ("auto", CPU, (), (torch.float32, Needs(64, sinks=True)), "explicit (sdpa has no attention sinks)"),
        ("auto", HOPPER, (), (torch.bfloat16, Needs(64, sinks=True)), "flash_attention_4"),
        (
            "auto",
            BLACKWELL,
            ("cudnn",),
            (torch.bfloat16, Needs(128, softcap=True)),
            "explicit (flash_attention_4 caps no scores; flash_attention_3 needs a Hopper GPU: compute "
            "capability 9.0, not 10.0; cudnn caps no scores; varlen caps no scores; sdpa caps no scores)",
        ),
        ("varlen", CPU, (), BF16, "model.attention varlen needs a GPU"),
        (FA3, AMPERE, (), BF16, "flash_attention_3 needs a Hopper GPU: compute .* 9.0, not 8.0"),
        ("cudnn", HOPPER, (), (torch.float32, Needs(128)), "cudnn does not compute in float32"),
        (FA4, HOPPER, (FA4,), BF16, "flash_attention_4 is not installed"),
        ("varlen", VOLTA, (), BF16, "varlen needs compute capability 8.0 or more, not 7.0"),
        ("cudnn", HOPPER, (), (torch.bfloat16, Needs(100)), "cudnn has no kernel for heads of size 100"),
        ("varlen", HOPPER, (), (torch.bfloat16, Needs(512)), "varlen has no kernel for heads of size 512"),
        ("cudnn", HOPPER, (), (torch.bfloat16, Needs(128, softcap=True)), "cudnn caps no scores"),
        ("sdpa", CPU, (), (torch.float32, Needs(8, softcap=True)), "sdpa caps no scores"),
    ],
)
def test_which_backend_is_chosen(wanted, capability, absent, needs, says, monkeypatch):
    """`auto` passes a backend over only for a reason, and says it. One that is named is never replaced: if it
    cannot run it is refused in one line."""
    monkeypatch.setattr(attention, "load", lambda name: "is not installed" if name in absent else None)
    if wanted == "auto":
        assert choose(wanted, capability, *needs)[1] == f"attention: {says}"
        return
    with pytest.raises(UserError, match=says) as caught:
        choose(wanted, capability, *needs)
    assert "\n" not in str(caught.value)


def test_every_rank_takes_what_the_first_chose(world, caplog):
    """The choice is said once, and a backend that cannot run here is refused before a model is built."""
    caplog.set_level(logging.INFO, "prime_rl")
    kept = attention.set_up("auto", Needs(16), torch.float32, world)
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default in kept
    assert [record.message for record in caplog.records] == ["attention: sdpa"]
    with pytest.raises(UserError, match="cudnn needs a GPU"):
        attention.set_up("cudnn", Needs(16), torch.bfloat16, world)


# Loading libraries


def test_a_library_that_fails_is_a_reason(tmp_path, monkeypatch):
    """Not a crash, whatever it raises."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] in ("flash_attn", "flash_attn_interface")]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "interface.py").touch()
    (tmp_path / "flash_attn_interface.py").write_text("import torch; torch.of_another_version")
    assert (load("flash_attention_3") or "").startswith("cannot be loaded: ")
    assert load("flash_attention_4") is None


def test_what_is_absent_says_what_to_install(monkeypatch):
    """The reason names the extra."""
    for name, remedy in {
        "flash_attention_3": "built from its source",
        "cudnn": "extra `cuda`",
        "flash_attention_4": "extra `fa`",
    }.items():
        monkeypatch.setitem(sys.modules, attention_kernels._LIBRARIES[name][0], None)
        assert (load(name) or "").startswith("is not installed: "), name
        assert remedy in (load(name) or "")


def test_a_kernel_that_fails_is_one_line():
    """Contract: it says which, and the option that takes another."""
    q, k, v, _ = (x.bfloat16() for x in qkv(3))
    with pytest.raises(
        UserError, match=r"attention varlen fails here: .*: choose another with model\.attention"
    ) as caught:
        KERNELS["varlen"](q, k, v, *support.pack([3]), 0.3, None)  # there is none on a CPU
    assert "\n" not in str(caught.value)


# Numbers


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("lengths", PACKS)
def test_kernels_equal_softmax_written_out(lengths, window, with_sinks, softcap, monkeypatch):
    """Out and gradients, of sinks too, with grouped heads and values smaller than keys: of our own operations, in
    blocks of four rows; of a kernel without sinks, to which boundaries, scale and window mean what they mean to us; and
    of sdpa."""
    monkeypatch.setattr(attention_kernels, "EXPLICIT_ROWS", 4)
    *inputs, d_out = qkv(sum(lengths), value_size=6)
    sinks = [torch.linspace(-2, 3, 4, dtype=torch.float64)] if with_sinks else []

    def call(operator: Callable[..., Tensor], *arguments: object) -> tuple[Tensor, ...]:
        def attend(q: Tensor, k: Tensor, v: Tensor, *sink: Tensor) -> Tensor:
            return operator(q, k, v, *arguments, 0.7, window, softcap, *sink)

        return with_gradients(attend, [*inputs, *sinks], d_out)

    want = call(support.explicit, lengths)
    mask = support.pack(lengths)
    for operator in (EXPLICIT, support.STAND_IN) if softcap is None else (EXPLICIT,):
        got = call(lambda *arguments: operator(*arguments)[0], *mask)  # noqa: B023 called at once
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)  # the statistics are kept in float32
    if softcap is None and not with_sinks:
        for a, b in zip(with_gradients(attention.sdpa, inputs, d_out, mask[0], 0.7, window), want, strict=True):
            torch.testing.assert_close(a, b)


def test_a_kernel_gets_heads_of_one_size(monkeypatch):
    """Where keys and values differ, zeros make up for it, and change nothing."""
    sizes = list[tuple[int, ...]]()

    def stand_in(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        sizes.append((q.shape[2], k.shape[2], v.shape[2]))
        return support.STAND_IN(q, k, v, *rest)

    monkeypatch.setitem(KERNELS, "stand_in", stand_in)
    monkeypatch.setattr(torch.ops.prime_rl, "stand_in", torch.ops.prime_rl.stand_in, raising=False)
    for size, value_size in ((8, 6), (6, 8)):
        *inputs, d_out = (x.transpose(0, 1)[None] for x in qkv(9, size=size, value_size=value_size))
        results = []
        for backend in ("sdpa", "stand_in"):
            attention.register(backend)
            function = ALL_ATTENTION_FUNCTIONS[attention.NAME]
            attend = partial(function, None, attention_mask=None, **support.boundaries([4, 5]))
            results.append(
                with_gradients(lambda q, k, v: attend(query=q, key=k, value=v)[0], inputs, d_out.transpose(1, 2))  # noqa: B023
            )
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert set(sizes) == {(8, 8, 8)}


def test_a_kernel_never_ignores_a_cap():
    """Contract: one that cannot cap scores fails when it is asked to, rather than train another model."""
    q, k, v, _ = qkv(3)
    with pytest.raises(AssertionError, match="stand_in does not cap scores"):
        support.STAND_IN(q, k, v, *support.pack([3]), 0.3, None, 50.0)
    attention.register("sdpa")
    heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    with pytest.raises(AssertionError, match="sdpa has neither"):
        ALL_ATTENTION_FUNCTIONS[attention.NAME](None, *heads, None, **support.boundaries([3]), softcap=50.0)


def test_a_cudnn_plan_fits_its_pack():
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
def test_a_compiled_block_serves_every_pack(name, monkeypatch):
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


# Models


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("llama", {"is_causal": False}, "its LlamaAttention has a mask that is neither causal"),
        ("qwen2_moe", dict(variants(tiny_config("qwen2_moe")))["sliding window"], "has a mask that is neither"),
    ],
)
def test_what_is_not_computed_is_refused(model_type, settings, message):
    """Before anything is loaded, by name, in one line."""
    with pytest.raises(UserError, match=message) as caught:
        examine(meta_model(model_type, **settings), "tiny")
    assert "model tiny" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_dropout_of_a_config_is_not_applied(world, tmp_path, caplog):
    """Trained is the policy that engines sample from, and that is said."""
    caplog.set_level(logging.INFO, "prime_rl")
    assert compare("llama", {"attention_dropout": 0.5}, tmp_path, world).logprob < 1e-5
    assert f"attention_dropout 0.5 in the config of {tmp_path} is not applied" in caplog.messages


def test_what_a_module_asks_for_is_refused():
    """Dropout that no config turns off."""
    lm = meta_model("llama").train()
    assert examine(lm, "tiny") == Needs(16)
    lm.model.layers[1].self_attn.attention_dropout = 0.1
    with pytest.raises(UserError, match="LlamaAttention depends on dropout"):
        examine(lm, "tiny")


@pytest.mark.parametrize(
    ("name", "limit", "reason"),
    [
        ("longrope", 100, "LlamaRotaryEmbedding depends on the pack in rows of over 100 tokens"),
        ("dynamic", 128, "LlamaRotaryEmbedding depends on the pack in rows of over 128 tokens"),
        (
            "llama4 chunks",
            80,
            "Llama4TextAttention has a mask that is neither causal nor its window in rows of 81 tokens",
        ),
        ("llama4 chunks", 8191, "Llama4TextAttention depends on the pack in rows of over 8191 tokens"),
        ("yarn", None, ""),
        ("mistral", None, ""),
    ],
)
def test_rows_beyond_which_a_document_depends_on_the_pack(name, limit, reason):
    """Micro-batches may be as long as frequencies, chunks and temperatures do not depend on what is packed."""
    model_type, settings = VARIANTS.get(name, (name, {}))
    if limit == 8191:
        settings = {**settings, "attention_chunk_size": 1 << 20}
    lm = meta_model(model_type, **settings)
    examine(lm, "tiny", limit or 1 << 20)
    if limit is not None:
        with pytest.raises(UserError, match=reason):
            examine(lm, "tiny", limit + 1)
