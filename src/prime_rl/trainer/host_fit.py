"""Whether training on a CPU fits into the host's memory, before anything is built: the kernel ends a process that takes too much without a word."""

from typing import TYPE_CHECKING

import torch
from loguru import logger
from transformers import AutoModelForCausalLM

from prime_rl.errors import UserError
from prime_rl.host_memory import available_bytes, local_ranks
from prime_rl.trainer.footprint import Estimate, Job, estimate, state_bytes
from prime_rl.trainer.memory import GIB, listed, plan_memory
from prime_rl.trainer.model import compute_dtype
from prime_rl.trainer.parallel import World, agree
from prime_rl.trainer.source import Source

if TYPE_CHECKING:
    from prime_rl.config.trainer import TrainingConfig

LOGITS = 4
"""Copies of a chunk's logits at a time on a CPU (compiled for a GPU: one): Qwen3-0.6B's shape with 4 layers peaked at 5.7 GiB with 256 tokens and at
11.6 with 2,048, of which some 0.5 are the program itself; estimated are 5.4 and 10.4."""


def check_host_memory(config: "TrainingConfig", source: Source, world: World, tokens: int, small: str) -> None:
    """On a CPU, compare what a step is estimated to take with what there is; a run is warned, since the estimate may be wrong.

    Args:
        tokens: Most tokens of a micro-batch.
        small: A command of a benchmark that fits nearly everywhere.

    Raises:
        UserError: a benchmark does not fit, on every rank.
    """
    if world.device.type != "cpu":
        return

    def check() -> None:
        estimated = host_estimate(config, source, world, tokens)
        available = available_bytes() / local_ranks()  # the ranks of a host begin together
        if estimated is None or estimated.total <= available:
            return
        text = shortage(estimated, available, source.name, tokens)
        if config.bench:
            raise UserError(f"{text}. Take a smaller model or fewer tokens, for example: {small}")
        if world.is_main:
            logger.warning("{}: the kernel may end this process without a word", text)

    agree(world, check)


def host_estimate(config: "TrainingConfig", source: Source, world: World, tokens: int) -> Estimate | None:
    """Bytes that a step takes on this rank; None for a model that cannot be trained, which is refused when it is built."""
    compiled = bool(config.model.compile)
    itemsize = compute_dtype(config.model.dtype, world.device).itemsize
    try:
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(source.config, trust_remote_code=source.trust_remote_code)
        plan = plan_memory(
            config.model, lm, world, compiled=compiled, itemsize=itemsize, tokens=None, optim=config.optim
        )
    except (ValueError, AttributeError):  # no language model, or none of blocks
        return None
    states = state_bytes(config.optim.model_copy(update={"offload": False}), plan.shape)  # it is all host memory
    job = Job(tokens, itemsize, world.shards, world.size, states, compiled)
    moments = estimate(plan.shape, job, plan.settings).moments
    logits = min(plan.settings.head_chunk, tokens) * plan.shape.vocabulary * itemsize
    head = moments["the head"]
    return Estimate(moments | {"the head": head | {"head": head["head"] + (LOGITS - 1) * logits}})


def shortage(estimated: Estimate, available: float, model: str, tokens: int) -> str:
    """What is needed, and for what, beside what there is."""
    return (
        f"training {model} on this CPU with {tokens:,} tokens a micro-batch takes about {estimated.total / GIB:.1f} GiB of host memory "
        f"({listed(estimated.parts)}), and there are {available / GIB:.1f}"
    )
