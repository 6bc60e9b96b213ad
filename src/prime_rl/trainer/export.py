"""The way of the weights from the device to the disk, beside the steps that follow.

Nothing is gathered. A safetensors file is a header and byte ranges, and a tensor sharded by rows is one contiguous range per rank. Each rank casts
its own rows on the device and copies them to the host on a stream of its own (`staging.py`); what has arrived is written at its place, several files
at once (`row_files.py`), and the ranks share the hashing (`write_version`); rank 0 commits.
"""

import secrets
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prime_rl.trainer.model_files import DTYPE_NAMES, allocate, copy_model_files, file_hashes, write_index
from prime_rl.trainer.parallel import World, agree, broadcast, gather, on_main
from prime_rl.trainer.row_files import Holding, NotHeld, joined
from prime_rl.trainer.source import Source
from prime_rl.trainer.staging import Copy, Staging, Written
from prime_rl.transport.canary import Canary
from prime_rl.transport.commit import Stage, disk_errors, prune
from prime_rl.transport.delta import WORD_BYTES
from prime_rl.transport.memory import in_memory
from prime_rl.transport.weights import BuildsOn, TensorEntry, manifest_extra


def write_version(
    staging: Staging,
    copied: Copy,
    source: Source,
    world: World,
    final: Path,
    *,
    version: int,
    incarnation: int,
    canary: Canary | None = None,
    memory: Path | None = None,
    anchor_every: int | None = None,
    full: bool = True,
    send: bool = False,
) -> dict[str, float]:
    """Commit what is staged as `final`, with config and tokenizer of the source. Every rank calls it, perhaps in a thread.

    Args:
        copied: The copy that staged it, which may still be going on: what has arrived is written meanwhile.
        world: The ranks, with the group that the calling thread may use.
        memory: Where in memory the tensors are committed, before `final` which then only names that place (None: they lie in `final`).
        anchor_every: Hold the rows, and tell what has changed since the version before: at least one version in so many is there in full. For
            whole tensors (None: every version is there in full, nothing is held).
        full: This one must be.
        send: Servers ask the sender for the tensors, which are not written.

    Returns:
        Seconds of writing (and of waiting for what is written; `send` where it is offered to be sent instead), hashing and committing.

    Raises:
        UserError: the disk is full (on any rank); nothing is left under the final name.
        CommitError: `final` is committed already.
    """
    nonce = broadcast(world, secrets.token_hex(8))
    stage = agree(world, lambda: Stage(final, nonce))
    tensor_stage = stage if memory is None else agree(world, lambda: Stage(memory, nonce))
    directory = tensor_stage.path
    before, staging.written = staging.written, None
    if full or anchor_every is None or before is None or before.changes + 1 >= anchor_every:
        before = None
    try:
        began = time.perf_counter()
        if staging.assembles:
            agree(world, lambda: staging.assemble(copied))
        how = None if anchor_every is None else Holding(nonce, None, WORD_BYTES[DTYPE_NAMES[staging.dtype]])
        written = None
        if how is not None and before is not None:
            written = _write_changes(staging, copied, world, directory, how._replace(since=before.rows))
        if written is None:
            before = None
            if send:
                written = joined(gather(world, agree(world, lambda: _hash_staged(staging, copied, directory))))
            else:
                written = _write_rows(staging, copied, world, directory, how)
        wrote = time.perf_counter()
        hashes = _read_back(staging, world, directory) if staging.whole is None else written
        hashed = time.perf_counter()
        on_main(world, lambda: copy_model_files(source, stage.path, staging.dtype))
        slots, dtype = staging.slots, DTYPE_NAMES[staging.dtype]
        tensors = {name: TensorEntry(slot.file, dtype, slot.shape, hashes[name]) for name, slot in slots.items()}
        on = BuildsOn(None, None) if before is None else BuildsOn(before.version, before.hash)
        delta = None if how is None else on
        address = staging.sender.address if send and staging.sender is not None else None
        extra = manifest_extra(version, incarnation, tensors, canary=canary, delta=delta, sender=address)
        known = {} if send else file_hashes(tensors)
        if send:  # before anybody knows of it
            on_main(world, lambda: staging.offer(copied, version, incarnation, extra["hash"]))
        on_main(world, lambda: _commit(stage, tensor_stage, version, extra, known))
        if how is not None:
            staging.written = Written(version, extra["hash"], nonce, 0 if before is None else before.changes + 1)
    except BaseException:
        stage.abort()
        tensor_stage.abort()
        raise
    return {"send" if send else "write": wrote - began, "hash": hashed - wrote, "commit": time.perf_counter() - hashed}


def _commit(stage: Stage, tensor_stage: Stage, version: int, extra: dict[str, Any], known: dict[str, str]) -> None:
    """Tensors in memory first: where they are not, no version names them."""
    if tensor_stage is stage:
        stage.commit(step=version, producer="trainer", extra=extra, hashes=known)
        return
    tensor_stage.commit(step=version, producer="trainer", hashes=known)
    extra["memory"] = asdict(in_memory(tensor_stage.final, tensor_stage.nonce))
    try:
        stage.commit(step=version, producer="trainer", extra=extra)
    except BaseException:
        if not stage.final.is_dir():
            prune(tensor_stage.final)
        raise


def _write_rows(staging: Staging, copied: Copy, world: World, directory: Path, how: Holding | None) -> dict[str, str]:
    """Every rank's part of all files, and the index. Returns the hashes, where the ranks have whole tensors."""

    def write() -> dict[str, str]:
        with disk_errors(directory):
            return staging.write(copied, directory, how)

    on_main(world, lambda: allocate(directory, staging.headers, staging.slots))
    written = gather(world, agree(world, write))
    on_main(world, lambda: write_index(directory, staging.slots))
    return joined(written)


def write_staged(staging: Staging, copied: Copy, directory: Path) -> None:
    """The files of a version that was sent, while nothing else was copied where it is staged. Rank 0 does it alone.

    Raises:
        UserError: the disk is full.
    """
    with disk_errors(directory):
        allocate(directory, staging.headers, staging.slots)
        staging.write_whole(copied, directory)
        write_index(directory, staging.slots)


def _write_changes(
    staging: Staging, copied: Copy, world: World, directory: Path, how: Holding
) -> dict[str, str] | None:
    """What has changed since the version that is held; None, and no file, where a rank does not know that, or it is no less than the whole."""

    def write() -> dict[str, str] | None:
        try:
            with disk_errors(directory):
                return staging.write(copied, directory, how)
        except NotHeld:
            return None

    def is_less() -> bool:
        return sum(path.stat().st_size for path in directory.iterdir()) < staging.file_bytes

    def remove() -> None:
        for path in directory.iterdir():  # perhaps of a process that was killed at it
            path.unlink()

    parts = gather(world, agree(world, write))
    written = [part for part in parts if part is not None]
    if len(written) == len(parts) and on_main(world, is_less):
        return joined(written)
    on_main(world, remove)
    return None


def _hash_staged(staging: Staging, copied: Copy, directory: Path) -> dict[str, str]:
    with disk_errors(directory):
        return staging.hash_staged(copied)


def _read_back(staging: Staging, world: World, directory: Path) -> dict[str, str]:
    """The hashes of all tensors as they lie there, a share of them read by each rank: this shows that every rank's bytes have arrived."""
    share = list(staging.slots)[world.rank :: world.size]

    def hash_share() -> dict[str, str]:
        with disk_errors(directory):
            return staging.hash_files(directory, share)

    return joined(gather(world, agree(world, hash_share)))
