"""Time of one trainer step on random weights and fake data: whole steps, compile excluded, without export and checkpoint.

    python benchmarks/trainer_step.py --case 1x16384 none --case 16x4096 attention      (documents x tokens, activation checkpointing)

Needs neither the config package nor a model on disk, so that it runs on a bare GPU host with `src` on PYTHONPATH. `--check` first compares
log-probabilities and gradients of a small model in the device's compute dtype with float32 on the CPU.
"""

import argparse
import time
from types import SimpleNamespace

import numpy as np
import torch
from transformers import Qwen3Config

from prime_rl.trainer import perf
from prime_rl.trainer.batch import to_device
from prime_rl.trainer.loss import STREAMS, make_token_loss
from prime_rl.trainer.model import build_policy
from prime_rl.trainer.names import named_parameters
from prime_rl.trainer.optim import build_optimizer
from prime_rl.trainer.packing import Document, HostBatch, collate
from prime_rl.trainer.parallel import World, close_world, init_world
from prime_rl.trainer.source import Source, find_model
from prime_rl.trainer.step import forward_backward, optimizer_step, read_sums

OPTIM = SimpleNamespace(lr=1e-6, betas1=0.9, betas2=0.999, weight_decay=0.01)
LOSS = make_token_loss(SimpleNamespace(type="default", mask_low=0.2, mask_high=0.2, adv_tau=1.0, kl_tau=1e-3))  # type: ignore[arg-type]


def settings(**changes: object) -> SimpleNamespace:
    base = {"attention": "auto", "compile": None, "activation_checkpointing": "none", "dtype": "auto"}
    return SimpleNamespace(
        **{
            **base,
            "head_chunk": 4096,
            "reshard_after_forward": False,
            "checkpointed_layers": None,
            "activation_offload": False,
            **changes,
        }
    )


def batch(vocabulary: int, lengths: list[int], scale: float, multiple_of: int) -> HostBatch:
    rng = np.random.default_rng(len(lengths))
    rows = {"mask": 1.0, "logprobs": -np.log(vocabulary), "advantages": 1.0, "rl_scale": scale}
    documents = [
        Document(
            rng.integers(0, vocabulary, n),
            np.ones(n, dtype=bool),
            1.0,
            np.stack([np.full(n, rows.get(name, 0.0), dtype=np.float32) for name in STREAMS]),
        )
        for n in lengths
    ]
    return collate(documents, len(STREAMS), multiple_of)


def check(world: World) -> None:
    """Largest relative error of log-probability and gradients against float32 on the CPU, on a small model with grouped heads."""
    config = Qwen3Config(
        vocab_size=1000, hidden_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=128,
        intermediate_size=512, tie_word_embeddings=True,
    )  # fmt: skip
    host = batch(1000, [130, 1, 77, 300], 1 / 504, 128)
    results = {}
    for name, where, changes in (
        ("cpu", CPU, {"dtype": "float32", "compile": False}),
        ("here", world, {"head_chunk": 96}),
    ):
        policy = build_policy(Source("small", config, None), settings(**changes), where)  # type: ignore[arg-type]
        if name == "cpu":
            reference = {n: p.full_tensor().clone() for n, p in named_parameters(policy)}
        for n, p in named_parameters(policy):  # random numbers differ between devices
            p.to_local().detach().copy_(reference[n])
        logprob, _ = policy(to_device(host, where.device))
        forward_backward(policy, [host], LOSS, where)
        results[name] = [logprob.detach().cpu()] + [p.grad.full_tensor().cpu() for _, p in named_parameters(policy)]
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(results["here"], results["cpu"], strict=True)]
    print(f"check: relative error of logprob {errors[0]:.1e}, of gradients at most {max(errors[1:]):.1e}")


def measure(world: World, model: str, documents: int, tokens: int, checkpointing: str, steps: int, micro: int) -> None:
    source = find_model(model, random_weights=True)
    torch.cuda.empty_cache()
    perf.reset_peak_memory(world.device)
    policy = build_policy(source, settings(activation_checkpointing=checkpointing), world)  # type: ignore[arg-type]
    optimizer = build_optimizer(policy, OPTIM)  # type: ignore[arg-type]
    lengths = [tokens] * documents
    scale = 1 / (micro * documents * (tokens - 1) * world.size)
    hosts = [batch(source.config.vocab_size, lengths, scale, 128) for _ in range(micro)]
    times = []
    for _ in range(steps + 2):
        started = time.perf_counter()
        sums = forward_backward(policy, hosts, LOSS, world)
        norm = optimizer_step(policy, optimizer, 1e-6, 1.0)
        values, _ = read_sums(world, sums, norm)
        times.append(time.perf_counter() - started)
    step = sorted(times[2:])[steps // 2]
    done = perf.flops(perf.matmul_parameters(policy.lm), perf.attention_width(source.config), lengths * micro)
    peak = perf.peak_flops(world.device)
    mfu = f"{100 * done / step / peak:5.1f} % MFU" if peak else ""
    print(
        f"{model} {micro} x ({documents} x {tokens}) {checkpointing:<10} {1e3 * step:8.1f} ms "
        f"({1e3 * min(times[2:]):.1f}-{1e3 * max(times[2:]):.1f}) {micro * documents * tokens / step:9,.0f} tok/s/rank {mfu} "
        f"{perf.peak_memory_gib(world.device):6.1f} GiB  loss {values[0]:.4f} entropy {values[1] / (micro * documents * (tokens - 1) * world.size):.3f}",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--case", nargs=2, action="append", default=[], metavar=("DOCSxTOKENS", "CHECKPOINTING"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    here = init_world(args.device, 600)
    if args.check:
        from torch.distributed.device_mesh import init_device_mesh

        CPU = World(0, 1, torch.device("cpu"), init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))
        check(here)
    for shape, level in args.case:
        count, length = map(int, shape.split("x"))
        measure(here, args.model, count, length, level, args.steps, args.micro_batches)
    close_world()
