"""The trainer's half of `rl parity`: score the server's samples by the trainer and by transformers' forward; judge."""

import json
from base64 import b64decode
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from prime_rl.config import InferenceConfig
from prime_rl.config.rl import ParityConfig
from prime_rl.errors import say
from prime_rl.fleet.logprob_check import ENGINES, ROUNDED, ROUNDING_FACTOR, SERVED, TRAINED, judge
from prime_rl.trainer.loss import STREAMS, SequenceLoss, describe, make_loss, mismatch_kl
from prime_rl.trainer.model import build_policy, compute_dtype
from prime_rl.trainer.packing import Document, MicroBatch, collate, pads_to, to_device
from prime_rl.trainer.parallel import close_world, init_world
from prime_rl.trainer.router_replay import chosen_experts, set_up
from prime_rl.trainer.source import locate_model
from prime_rl.trainer.weight_publisher import export_dtype

OWN_CHOICE = "server - trainer, no replay"  # with router replay: what it is for
LEAST_LAYER = 1e-4  # of a layer's output; in float32 on both sides the difference is 1e-6


def gap(first: Tensor, second: Tensor) -> dict[str, float]:
    """|Δ| in nats, and KL(first ‖ second) estimated from tokens of the first. NaN is never within a bound."""
    ratio = second - first
    values = ratio.abs().mean(), ratio.abs().quantile(0.99), ratio.abs().max(), -ratio.mean(), mismatch_kl(ratio).mean()
    return dict(zip(("mean", "p99", "largest", "k1", "k3"), map(float, values), strict=True))


@torch.no_grad()
def score(config: ParityConfig, directory: Path) -> bool:
    """Print the comparison, write `parity.json`; return the verdict. Raises as `locate_model`, `build_policy`."""
    samples, served = json.loads((directory / "samples.json").read_text()), config.inference or InferenceConfig()
    documents, settings, loss = [_document(*each[:3]) for each in samples], config.trainer.model, config.trainer.loss
    world = init_world(config.trainer.device, config.trainer.dist_timeout)
    source, computed = locate_model(settings, world, random_weights=False), compute_dtype(settings.dtype, world.device)
    settings = settings.model_copy(update={"compile": False}) if config.layers else settings  # hooks do not compile
    batch = collate(documents, len(STREAMS), pads_to(world.device))
    policy, trained = build_policy(source, settings, world, tokens=len(batch.input_ids)), list[Tensor]()
    _record(policy.lm.model.layers if config.layers else (), trained)
    pairs = dict[str, tuple[Tensor, Tensor]]()
    say("scoring by the trainer")
    old = torch.from_numpy(np.concatenate([np.array(logprobs, dtype=np.float32) for _, _, logprobs, *_ in samples]))
    if config.router_replay:
        pairs[OWN_CHOICE] = old, policy(to_device(batch, world.device))[0].cpu()
        routers, trained[:] = set_up(policy.lm.model.layers, source.name), []
        for number, (*_, encoded) in enumerate(samples):  # as the server's route has them
            rows = np.frombuffer(b64decode(encoded["data"]), encoded["dtype"]).reshape(encoded["shape"][0], -1)
            documents[number] = replace(documents[number], experts=chosen_experts(rows, routers, f"{number}"))
        batch = collate(documents, len(STREAMS), pads_to(world.device), routers)
    new, entropy = (each.cpu() for each in policy(to_device(batch, world.device)))
    del policy

    def own(dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """By transformers, one document at a time, with logits and its own attention; and the outputs of layers."""
        say(f"scoring by transformers' own forward in {dtype}")
        more: Any = {"attn_implementation": "eager", "trust_remote_code": source.trust_remote_code}
        lm = AutoModelForCausalLM.from_pretrained(source.directory, dtype=dtype, **more).to(world.device).eval()
        logprobs, outputs = list[Tensor](), list[Tensor]()
        _record(lm.model.layers if config.layers else (), outputs)
        for document in documents:
            ids = torch.from_numpy(document.input_ids).to(world.device)
            log_p = lm(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
            logprobs.append(log_p.gather(1, ids[1:, None]).cpu()[document.loss_mask[1:], 0])
        count = len(outputs) // len(documents)
        return torch.cat(logprobs), [torch.cat(outputs[layer::count], 1).float() for layer in range(count)]

    exact, layers = own(torch.float32)
    in_float32 = world.device.type == "cpu" and served.model.dtype == "auto"
    low = computed if computed != torch.float32 or in_float32 else export_dtype(served.model.dtype, source)
    rounded, alike = (exact, layers) if low == torch.float32 else own(low)
    close_world()
    pairs |= {ENGINES: (old, new), SERVED: (old, exact), TRAINED: (new, exact), ROUNDED: (rounded, exact)}
    gaps, dropped = {name: gap(*pair) for name, pair in pairs.items()}, dropped_share(loss, new, entropy, batch)
    bound, reasons = judge(gaps, dropped, loss.type, served.quantization is not None)
    head = f"{config.model.name}: {len(samples)} replies, {len(old)} tokens; the trainer computes in {computed}"
    lines = [head, f"{'nats':<32}{'mean |Δ|':>10}{'p99 |Δ|':>10}{'max |Δ|':>10}{'KL k1':>10}{'KL k3':>10}"]
    lines += [f"{name:<32}" + "".join(f"{value:>10.1e}" for value in each.values()) for name, each in gaps.items()]
    for n, right in enumerate(layers):
        off, alone = (float((x[n][:, : right.shape[1]] - right).norm() / right.norm()) for x in (trained, alike))
        wrong = "" if off <= max(LEAST_LAYER, ROUNDING_FACTOR * alone) else ": wrong"
        lines.append(f"layer {n}: the trainer is {off:.1e} of its output off, rounding alone {alone:.1e}{wrong}")
    sound = f"sound: within the tolerance of {bound}; loss.type {loss.type} drops or clips {dropped:.2%} of the tokens"
    lines.append(f"not sound: {'; '.join(reasons)}" if reasons else sound)
    result = {"sound": not reasons, "lines": lines, "gaps": gaps, "tokens": len(old), "dropped": dropped}
    (directory / "parity.json").write_text(json.dumps(result, indent=1))
    say("\n".join(lines))
    return not reasons


def _document(prompt: list[int], reply: list[int], logprobs: list[float]) -> Document:
    ids, streams = np.array(prompt + reply), np.zeros((len(STREAMS), len(prompt + reply)), dtype=np.float32)
    streams[STREAMS.index("logprobs"), len(prompt) :] = np.array(logprobs, dtype=np.float32)  # JSON's null is NaN
    streams[[STREAMS.index("mask"), STREAMS.index("rl_scale")]] = 1
    return Document(ids, np.arange(len(ids)) >= len(prompt), 1.0, streams)


def dropped_share(config: Any, logprob: Tensor, entropy: Tensor, batch: MicroBatch) -> float:
    """The share of tokens that the loss drops or clips though nothing is learned: of advantages 1 and -1 the larger."""
    loss, shares = make_loss(config), []
    for advantage in (1.0, -1.0):
        batch.streams[STREAMS.index("advantages")] = advantage
        _, sums = loss(logprob, entropy, batch.streams, *(batch.documents() if isinstance(loss, SequenceLoss) else ()))
        shares.append(describe(sums.tolist()).get("is_masked/mean", 0.0))
    return max(shares)


def _record(layers: Any, outputs: list[Tensor]) -> None:
    """Append each layer's output [1, T, H], call after call."""
    for layer in layers:
        layer.register_forward_hook(lambda _, args, out: outputs.append(out[0] if isinstance(out, tuple) else out))
