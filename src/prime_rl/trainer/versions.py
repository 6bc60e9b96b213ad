"""The versions that a run's settings ask for (`weights.Versions`)."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from prime_rl.config.process_group import ProcessGroupTransport
from prime_rl.errors import UserError
from prime_rl.trainer.canary import CanaryScorer
from prime_rl.trainer.model import Policy, compute_dtype
from prime_rl.trainer.model_files import DTYPE_NAMES
from prime_rl.trainer.parallel import World
from prime_rl.trainer.source import Source
from prime_rl.trainer.weights import InTmpfs, Times, Versions, on_device
from prime_rl.transport.shared import CUDA_IPC

if TYPE_CHECKING:
    from prime_rl.config import SFTConfig, TrainerConfig


def export_dtype(config_dtype: str, source: Source) -> torch.dtype:
    """The dtype of exported weights: `auto` is the source checkpoint's."""
    if config_dtype != "auto":
        return getattr(torch, config_dtype)
    return source.config.dtype if source.config.dtype in DTYPE_NAMES else torch.bfloat16


def in_tmpfs(config: "TrainerConfig") -> InTmpfs | None:
    """What the settings ask for. One version more than is kept (`protocol.prunable`) is there while it is being written."""
    tmpfs, keep = config.weights.tmpfs, config.weights.keep
    if tmpfs is None or keep is None:
        return None
    arithmetic = f"the newest, async_level {config.async_level}, keep {keep}, and one that is being written"
    kept = config.async_level + keep + 1
    if (every := anchor_every(config)) is not None:
        full = 2 + -(-kept // every)
        return InTmpfs(tmpfs, full, f"those that are there in full of {arithmetic}, with anchor_every {every}")
    return InTmpfs(tmpfs, kept + 1, arithmetic)


def anchor_every(config: "TrainerConfig") -> int | None:
    """What the settings ask for."""
    transport = config.weights.transport
    return transport.anchor_every if transport.type == "filesystem-delta" else None


def lent_bytes(config: "TrainerConfig", source: Source, world: World) -> int:
    """Bytes per parameter that exported weights take on the trainer's GPU: a copy that is sent from or lent, and, where the server is on this GPU, too, twice
    as much for its own, which it wants to find free (`inference.staging.SPARE`). 0 where that is not asked for.

    Raises:
        UserError: it is, and the trainer is on no GPU, or on several.
    """
    transport = config.weights.transport
    if not isinstance(transport, ProcessGroupTransport) or not on_device(transport):
        return 0
    lends = transport.backend == CUDA_IPC
    if world.device.type != "cuda" or world.size > 1:
        where = "one rank on the GPU of its server" if lends else "one rank on a GPU"
        key, instead = ("backend cuda-ipc", "auto") if lends else ("device_copy", "false")
        raise UserError(
            f"trainer.weights.transport.{key} needs a trainer of {where}, not {world.size} on {world.device.type}: leave it at {instead}"
        )
    return (3 if lends else 1) * export_dtype(config.weights.dtype, source).itemsize


def make_versions(
    config: "TrainerConfig | SFTConfig",
    policy: Policy,
    source: Source,
    world: World,
    tell: Callable[[int, Times], None],
    *,
    overlapping: bool,
    canary: bool = False,
    memory: InTmpfs | None = None,
    anchor_every: int | None = None,
    transport: ProcessGroupTransport | None = None,
) -> Versions:
    """The versions of a run. `tell` gets the step that made a version, and the times that committing it took. With `canary` each carries one."""
    dtype = export_dtype(config.weights.dtype, source)
    scorer = None
    if canary:
        vocabulary, computed = (
            source.config.get_text_config().vocab_size,
            compute_dtype(config.model.dtype, world.device),
        )
        scorer = CanaryScorer(policy, world, vocabulary, computed, dtype)
    return Versions(
        config.output_dir,
        policy,
        source,
        world,
        dtype,
        timeout=config.dist_timeout,
        overlapping=overlapping,
        canary=scorer,
        memory=memory,
        anchor_every=anchor_every,
        transport=transport,
        on_committed=lambda version, times: tell(version - 1, times),
    )
