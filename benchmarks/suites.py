"""Which cases are measured: the rows of the tables, with what they are held against."""

from dataclasses import replace

from steps import Case, parse_case

# The bars of one H200, in the order in which scarce time is spent on them.
BARS = (
    Case("Qwen3-0.6B, one 16k document", "0.6B", "1x16384", bar=53_000, peer=38_500, steps=10),
    Case(
        "Qwen3-0.6B, one 16k document, ≤ 15 GiB",
        "0.6B",
        "1x16384",
        settings={"memory_limit": 15},
        bar=49_000,
        peer=32_900,
        within=15,
        steps=10,
    ),
    Case("Qwen3-0.6B, 64k packed from 4k documents", "0.6B", "16x4096", bar=97_000, steps=6),
    Case("Qwen3-0.6B, 16k packed from real RL lengths", "0.6B", "lognormal:16384", bar=95_000, steps=5),
    Case("Qwen3-0.6B, one 64k document", "0.6B", "1x65536", bar=19_900, peer=17_800, steps=3, warm=2),
    Case(
        "SFT Qwen3-0.6B, one 16k document",
        "0.6B",
        "1x16384",
        loss="sft",
        export=False,
        bar=53_000,
        peer=41_100,
        steps=10,
    ),
    Case(
        "Qwen3-4B, one 16k document, ≤ 125 GiB",
        "4B",
        "1x16384",
        settings={"memory_limit": 125},
        bar=13_800,
        peer=12_500,
        within=125,
        steps=4,
    ),
    Case(
        "Qwen3-4B, one 16k document, ≤ 80 GiB",
        "4B",
        "1x16384",
        settings={"memory_limit": 80},
        bar=12_500,
        peer=10_300,
        within=80,
        steps=4,
    ),
    Case("Qwen3-4B, 64k packed from 4k documents", "4B", "16x4096", bar=18_500, steps=3, warm=2),
    Case(
        "Qwen3-30B-A3B, 8 of 48 layers, 32k packed", "30B-A3B", "8x4096", layers=8, mfu_bar=40.0, warm=6, steps=10
    ),
    parse_case("30B-A3B 8x4096 layers=8 micro_batches=4 warm=4 steps=5"),
    # With Triton 3.7.1 and the extra `fla`; else one document at a time, at a hundredth of the speed.
    Case("Qwen3.5-0.8B, 16k packed from 4k documents", "Qwen3.5-0.8B", "4x4096", mfu_bar=35.0, warm=4, steps=10),
    Case("Qwen3.5-0.8B, one 16k document", "Qwen3.5-0.8B", "1x16384", mfu_bar=35.0, warm=4, steps=6),
    Case("Qwen3-4B, one 64k document", "4B", "1x65536", bar=5_600, steps=2, warm=2, limit=240),
)  # fmt: skip


_ONE = Case("0.6B, one 16k document a micro-batch, 1 rank", "0.6B", "1x16384", steps=8)
_FOUR = Case("4B, one 16k document a micro-batch, 1 rank", "4B", "1x16384", steps=3)
# Two micro-batches on every rank: the same work for each, however many there are.
RANKS = tuple(
    replace(case, name=case.name.replace("1 rank", "2 ranks") if ranks == 2 else case.name, ranks=ranks)
    for case in (_ONE, _FOUR)
    for ranks in (1, 2)
) + tuple(
    replace(case, name=case.name.replace("1 rank", "2 ranks, replicas"), ranks=2, settings={"dp_replicate": 2})
    for case in (_ONE, _FOUR)
)

OPTIM = tuple(
    parse_case(text)
    for text in (
        "0.6B 1x16384 optim.type=muon steps=6",
        "0.6B 1x16384 optim.offload=true steps=6",
        "4B 1x16384 optim.type=muon steps=3 export=false",
        "4B 1x16384 optim.offload=true steps=3 export=false",
    )
)


def _adapted(case: Case) -> Case:
    """The same with adapters in place of all weights."""
    return replace(case, name=f"{case.name}, LoRA", lora={"rank": 16})


def _packed(case: Case) -> Case:
    return replace(case, name=case.name.replace("one 16k document", "four 4k documents"), documents="4x4096")


_FULL: dict[str, object] = {"activation_checkpointing": "full"}
_HALF = Case("Qwen3-8B, 18 of 36 layers, one 16k document", "8B", "1x16384", layers=18, steps=4)
_WHOLE = Case("Qwen3-8B, one 16k document, ≤ 76 GiB", "8B", "1x16384", settings={"memory_limit": 76}, steps=4)
_LARGE = Case("Qwen3-32B, 8k tokens, recompute full", "32B", "1x8192", settings=_FULL, warm=2, steps=3, limit=200)
_SMALL = Case("Qwen3-0.6B, one 16k document", "0.6B", "1x16384", steps=10)
# Adapters, each held against the MFU of the same shape when all weights are trained. Half the layers of 8B stand for
# all, which do not fit beside their optimizer's states. 76 GiB are what a GPU of 80 GB leaves to torch.
LORA = (
    _HALF,
    _adapted(_WHOLE),
    _adapted(_LARGE),
    _adapted(replace(_LARGE, name=f"{_LARGE.name}, 2 ranks", ranks=2)),
    _adapted(_HALF),
    _SMALL,
    _adapted(_SMALL),
    _packed(_HALF),
    _adapted(_packed(_WHOLE)),
    _adapted(_packed(_HALF)),
)

TINY = (
    Case("tiny, packed", "tiny", "4x64", steps=2, warm=2, bar=1.0),
    Case("tiny experts", "tiny-moe", "8x32", steps=2, warm=2, mfu_bar=40.0),
    Case("tiny, SFT", "tiny", "2x64", loss="sft", export=False, steps=2, warm=2),
    Case("tiny, LoRA", "tiny", "4x64", lora={"rank": 8}, steps=2, warm=2),
)

# What losses of whole sequences cost, which go through the head twice. The second clips nothing: a step in which all
# tokens are clipped is faster, as the products of zeros take less power.
LOSSES = tuple(
    parse_case(f"{shape} {loss}".strip())
    for shape in ("0.6B 1x16384 steps=10", "0.6B lognormal:16384 steps=8")
    for loss in (
        "",
        "loss.type=gspo loss.clip_low=1.0 loss.clip_high=1e9",
        "loss.type=reinforce loss.level=geometric",
    )
)

SUITES = {
    "bars": BARS,
    "ranks": RANKS,
    "optim": OPTIM,
    "losses": LOSSES,
    "lora": LORA,
    "tiny": TINY,
}
