"""Does an optimization change a number? Twenty steps with it against twenty steps on the plain path, from the same weights on the same data.

    python benchmarks/neutrality.py --json benchmarks/results/neutrality_h200.json          # four layers as wide as Qwen3-0.6B, bfloat16
    python benchmarks/neutrality.py --model tiny --device cpu                               # float32, no GPU

Plain is masked attention, eager, nothing recomputed, all logits at once, parameters never freed. Every row changes one thing. Where the compute
type is bfloat16 a float32 run shows how large its rounding is: a row is neutral when it is no further from float32 than plain is.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from attention_rates import BACKENDS
from forked import run_forked
from machine import describe_gpus, describe_machine
from pydantic import TypeAdapter
from steps import model_source

from prime_rl.config.trainer import DefaultLoss, OptimConfig, TrainerModel
from prime_rl.errors import UserError
from prime_rl.trainer.lm_head import TokenLoss
from prime_rl.trainer.loss import STREAMS, cross_entropy, make_loss
from prime_rl.trainer.model import build_policy
from prime_rl.trainer.optim import build_optimizer
from prime_rl.trainer.packing import Document, HostBatch, collate
from prime_rl.trainer.parallel import init_world
from prime_rl.trainer.report import sum_on_device
from prime_rl.trainer.training_loop import forward_backward, optimizer_step

ALL_AT_ONCE = 1 << 20
PLAIN: dict[str, object] = {
    "attention": "sdpa",
    "compile": False,
    "activation_checkpointing": "none",
    "head_chunk": ALL_AT_ONCE,
    "reshard_after_forward": False,
}
LOSSES = ("sft", "rl")


@dataclass(frozen=True)
class Row:
    """One change against the plain path."""

    name: str
    model: dict[str, object] = field(default_factory=dict)
    optim: dict[str, object] = field(default_factory=dict)
    ranks: int = 1
    packed: bool = True
    plain: bool = True  # False: nothing is set but what `model` says, as a user runs it


PLAIN_ROW = Row("plain")
FLOAT32 = Row("plain in float32", {"dtype": "float32"})
ROWS = (
    PLAIN_ROW,
    FLOAT32,
    *(Row(f"attention {name}", {"attention": name}) for name in BACKENDS if name != "sdpa"),
    Row("one document a micro-batch", packed=False),
    Row("compiled blocks", {"compile": True}),
    *(
        Row(f"recompute {level}", {"activation_checkpointing": level})
        for level in ("pointwise", "wide", "attention", "full")
    ),
    Row("activations in host memory", {"activation_offload": True}),
    Row("head in chunks of 16", {"head_chunk": 16}),
    Row("head in chunks of 1024", {"head_chunk": 1024}),
    Row("parameters freed after forward", {"reshard_after_forward": True}),
    Row("optimizer states in host memory", optim={"offload": True}),
    Row("2 ranks", ranks=2),
    Row("2 ranks, parameters freed", {"reshard_after_forward": True}, ranks=2),
    Row("2 ranks, replicated", {"dp_replicate": 2}, ranks=2),
    Row("as it runs without any option", plain=False),
)


@dataclass(frozen=True)
class Curve:
    """Loss and gradient norm of every step."""

    loss: list[float]
    norm: list[float]


def documents(vocabulary: int, lengths: Sequence[int], loss: str) -> list[Document]:
    """Random documents, half of whose tokens are trained, at several temperatures; their weights add up to one."""
    rng = np.random.default_rng(11)
    masks = [rng.uniform(size=n) < 0.5 for n in lengths]
    trained = sum(int(mask[1:].sum()) for mask in masks)
    made = []
    for n, mask in zip(lengths, masks, strict=True):
        ones = np.ones(n, dtype=np.float32)
        rows = {
            "mask": mask.astype(np.float32),
            "logprobs": (0.1 * rng.standard_normal(n) - np.log(vocabulary)).astype(np.float32),
            "advantages": float(rng.standard_normal()) * ones,
            "rl_scale": ones / trained,
        }
        streams = [rows.get(name, 0 * ones) for name in STREAMS] if loss == "rl" else [ones / trained]
        temperature = float(rng.uniform(0.7, 1.3))
        made.append(Document(rng.integers(0, vocabulary, n), mask, temperature, np.stack(streams)))
    return made


def micro_batches(made: list[Document], packed: bool, multiple_of: int) -> list[HostBatch]:
    """Two micro-batches, or one for every document. Their number is even: two ranks share them."""
    groups = [made[0::2], made[1::2]] if packed else [[document] for document in made]
    return [collate(group, made[0].streams.shape[0], multiple_of) for group in groups]


def curves(
    row: Row, model: str, layers: int | None, device: str, lengths: Sequence[int], steps: int, lr: float
) -> dict:
    """The curve of each loss; `absent` says why where the option is not available here."""
    world = init_world(device, 120)
    source = model_source(model, layers)
    vocabulary = source.config.get_text_config().vocab_size
    settings = {**(PLAIN if row.plain else {}), **row.model}
    config = TrainerModel.model_validate(settings)
    optim = TypeAdapter(OptimConfig).validate_python({"type": "adamw", "lr": lr, **row.optim})
    found: dict[str, object] = {}
    for loss in LOSSES:
        token_loss: TokenLoss = cross_entropy if loss == "sft" else make_loss(DefaultLoss())
        made = documents(vocabulary, lengths, loss)
        batches = micro_batches(made, row.packed, 128 if device == "cuda" else 1)[world.rank :: world.size]
        try:
            policy = build_policy(source, config, world, seed=5, tokens=sum(lengths), optim=optim)
            optimizer = build_optimizer(policy, optim)
        except UserError as error:
            return {"absent": str(error)}
        values, norms = [], []
        for _ in range(steps):
            sums = forward_backward(policy, batches, token_loss, world)
            norm = optimizer_step(policy, optimizer, lr, optim.max_norm)
            value, *_, norm_value = sum_on_device(world, sums, norm).read().tolist()
            values.append(value)
            norms.append(norm_value)
        found[loss] = {"loss": values, "norm": norms}
        del policy, optimizer
    return found


def difference(ours: Curve, reference: Curve) -> tuple[float, float]:
    """Largest difference of the loss, relative to the reference's largest; and of the gradient norm, relative to the step's."""
    a, b = np.array(ours.loss), np.array(reference.loss)
    m, n = np.array(ours.norm), np.array(reference.norm)
    return float(np.abs(a - b).max() / np.abs(b).max()), float((np.abs(m - n) / n).max())


def compared(found: dict, reference: dict) -> dict[str, float]:
    """Differences for both losses."""
    result: dict[str, float] = {}
    for loss in LOSSES:
        loss_difference, norm_difference = difference(Curve(**found[loss]), Curve(**reference[loss]))
        result |= {f"{loss}_loss": loss_difference, f"{loss}_norm": norm_difference}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6B", help="0.6B, 4B, tiny … (0.6B)")
    parser.add_argument("--layers", type=int, help="layers of it (4; tiny: its own)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--gpus", type=int, help="GPUs that may be used (all)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--only", action="append", help="rows whose name contains this; plain is always run")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one row (240)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "neutrality.log")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    tiny = arguments.model.startswith("tiny")
    layers = arguments.layers or (None if tiny else 4)
    lengths = (5, 17, 2, 40, 9, 23) if tiny else (1500, 700, 1, 2040, 300, 555)
    gpus = len(describe_gpus()) if arguments.gpus is None else arguments.gpus
    wanted = [
        row
        for row in ROWS
        if row is PLAIN_ROW or not arguments.only or any(part in row.name for part in arguments.only)
    ]
    if arguments.device == "cpu":
        wanted = [row for row in wanted if row is not FLOAT32]
    results: dict[str, dict] = {}
    print(f"{'':<40}{'SFT loss':>10}{'norm':>10}{'RL loss':>10}{'norm':>10}   largest relative difference from plain")
    for row in wanted:
        if row.ranks > 1 and arguments.device == "cuda" and row.ranks > gpus:
            results[row.name] = {"absent": f"needs {row.ranks} GPUs"}
        else:
            job = partial(
                curves, row, arguments.model, layers, arguments.device, lengths, arguments.steps, arguments.lr
            )
            outcome = run_forked(job, limit=arguments.limit, log=arguments.log, ranks=row.ranks)
            results[row.name] = outcome.value if outcome.error is None else {"failed": outcome.error}
        plain = results[PLAIN_ROW.name]
        if "sft" not in plain:
            sys.exit(f"the plain path failed: {plain}")
        print(line(row.name, results[row.name], plain), flush=True)
        if arguments.json is not None:
            setting = {"model": arguments.model, "layers": layers, "steps": arguments.steps, "lr": arguments.lr}
            head = {**describe_machine(), "gpus": describe_gpus(), "device": arguments.device, **setting}
            rows = {name: summary(found, results) for name, found in results.items()}
            arguments.json.write_text(json.dumps({**head, "rows": rows, "curves": results}, indent=1) + "\n")


def summary(found: dict, results: dict[str, dict]) -> dict:
    """A row's differences from plain, and from float32 where that was run."""
    if "sft" not in found:
        return found
    row: dict[str, object] = {"plain": compared(found, results[PLAIN_ROW.name])}
    exact = results.get(FLOAT32.name, {})
    return {**row, "float32": compared(found, exact)} if "sft" in exact else row


def line(name: str, found: dict, plain: dict) -> str:
    if "sft" not in found:
        return f"{name:<40}  {found.get('absent') or found.get('failed')}"
    return f"{name:<40}" + "".join(f"{value:>10.1e}" for value in compared(found, plain).values())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
