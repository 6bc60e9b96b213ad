"""Committing policy versions: `weights/step_v`, a Hugging Face directory that transformers and vLLM load.

Nothing is gathered. A safetensors file is a header and byte ranges, and a parameter sharded by rows is one contiguous range per rank, so
every rank writes its own rows at their place and hashes its share of the tensors; rank 0 writes the header and commits.
"""

import json
import math
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
import xxhash

from prime_rl import faults
from prime_rl.errors import UserError
from prime_rl.monitor import log
from prime_rl.trainer.model import Policy
from prime_rl.trainer.names import stored_tensors
from prime_rl.trainer.parallel import World, agree, broadcast, gather, on_main
from prime_rl.trainer.source import Source
from prime_rl.transport.commit import Stage, clean_stages, disk_errors, give_up, list_steps, prune
from prime_rl.transport.lives import Seen, next_life, open_life, read_lease, read_lives, read_versions, sparing_lives
from prime_rl.transport.protocol import prunable, spared, to_set_aside
from prime_rl.transport.weights import (
    TensorEntry,
    manifest_extra,
    version_dir,
    version_hash,
    write_base_version,
)

logger = log.get(__name__)

FILE = "model.safetensors"
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
_NOT_COPIED = {
    "manifest.json",
    "model.safetensors.index.json",
}  # the first is ours when the source is a committed version itself
_BLOCK = 1 << 24


def export_dtype(config_dtype: str, source: Source) -> torch.dtype:
    """The dtype of exported weights: `auto` is the source checkpoint's."""
    if config_dtype != "auto":
        return getattr(torch, config_dtype)
    return source.config.dtype if source.config.dtype in _NAMES else torch.bfloat16


@dataclass(frozen=True)
class Slot:
    """A tensor's place in the file: the first byte, and how many."""

    shape: list[int]
    start: int
    size: int


def export(
    policy: Policy,
    source: Source,
    world: World,
    final: Path,
    *,
    version: int,
    incarnation: int,
    dtype: torch.dtype,
) -> None:
    """Commit the current weights as `final`, in `dtype`, with config and tokenizer of the source. Every rank calls it.

    Raises:
        UserError: the disk is full (on any rank); nothing is left under the final name.
        CommitError: `final` is committed already.
    """
    nonce = broadcast(world, secrets.token_hex(8))
    stage = agree(world, lambda: Stage(final, nonce))
    path = stage.path / FILE
    try:
        header, slots = _layout(policy, dtype)
        on_main(world, lambda: _allocate(path, header, slots))
        agree(world, lambda: _write_rows(policy, world, path, slots, dtype))
        tensors = _hash_tensors(world, path, slots, dtype)
        on_main(world, lambda: _copy_model_files(source, stage.path, dtype))
        extra = manifest_extra(version, incarnation, tensors)
        hashes = {FILE: version_hash(tensors)}
        on_main(world, lambda: stage.commit(step=version, producer="trainer", extra=extra, hashes=hashes).step)
    except BaseException:
        stage.abort()
        raise


def _layout(policy: Policy, dtype: torch.dtype) -> tuple[bytes, dict[str, Slot]]:
    """The safetensors header with its length, and the place of every tensor in the file."""
    described: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    tensors = list(stored_tensors(policy))
    sizes = [math.prod(tensor.shape) * dtype.itemsize for tensor in tensors]
    ends = list(accumulate(sizes))
    for tensor, size, end in zip(tensors, sizes, ends, strict=True):
        described[tensor.name] = {"dtype": _NAMES[dtype], "shape": tensor.shape, "data_offsets": [end - size, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    slots = {
        tensor.name: Slot(tensor.shape, len(header) + end - size, size)
        for tensor, size, end in zip(tensors, sizes, ends, strict=True)
    }
    return header, slots


def _allocate(path: Path, header: bytes, slots: dict[str, Slot]) -> None:
    with disk_errors(path), open(path, "wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(slot.size for slot in slots.values()))


def _write_rows(policy: Policy, world: World, path: Path, slots: dict[str, Slot], dtype: torch.dtype) -> None:
    """Write this rank's rows of every tensor at their place."""
    with disk_errors(path):
        descriptor = os.open(path, os.O_WRONLY)
        try:
            for tensor in stored_tensors(policy):
                local, first = tensor.local(world)
                if local.numel():
                    data = local.to(dtype).cpu().contiguous().view(torch.uint8).numpy().reshape(-1)
                    slot = slots[tensor.name]
                    _pwrite(descriptor, data.data, slot.start + first * (slot.size // slot.shape[0]))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _pwrite(descriptor: int, data: memoryview, offset: int) -> None:
    while data:  # one call writes at most 2 GiB
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _hash_tensors(world: World, path: Path, slots: dict[str, Slot], dtype: torch.dtype) -> dict[str, TensorEntry]:
    """Hash the file's tensors, a share of them on each rank. Reading them back shows that every rank's bytes have arrived."""
    share = {}
    with open(path, "rb") as file:
        for name, slot in list(slots.items())[world.rank :: world.size]:
            share[name] = _hash_range(file.fileno(), slot.start, slot.size)
    hashes = {name: value for part in gather(world, share) for name, value in part.items()}
    return {name: TensorEntry(path.name, _NAMES[dtype], slot.shape, hashes[name]) for name, slot in slots.items()}


def _hash_range(descriptor: int, start: int, size: int) -> str:
    digest = xxhash.xxh3_128()
    for offset in range(start, start + size, _BLOCK):
        digest.update(os.pread(descriptor, min(_BLOCK, start + size - offset), offset))
    return digest.hexdigest()


def _copy_model_files(source: Source, directory: Path, dtype: torch.dtype) -> None:
    """Config, generation config and tokenizer beside the tensors."""
    with disk_errors(directory):
        if source.directory is not None:
            for pattern in _COPIED:
                for path in source.directory.glob(pattern):
                    if path.name not in _NOT_COPIED:
                        shutil.copyfile(path, directory / path.name)
        else:
            source.config.save_pretrained(directory)
        config = directory / "config.json"
        described = json.loads(config.read_text())
        described.pop("torch_dtype", None)  # the older spelling
        described["dtype"] = str(dtype).removeprefix("torch.")
        config.write_text(json.dumps(described, indent=2) + "\n")


def refuse_outlived(output_dir: Path, life: int) -> None:
    """Raise UserError where a later life than `life` was opened: two trainers must not write one history."""
    newest = max(read_lives(output_dir), default=life)
    if newest > life:
        raise UserError(
            f"another trainer has gone on with the run in {output_dir} (life {newest}; this one is {life}): this one ends and commits no more"
        )


class Versions:
    """The policy versions of one life of the trainer, in `output_dir/weights`. Every rank calls every method."""

    def __init__(self, output_dir: Path, policy: Policy, source: Source, world: World, dtype: torch.dtype) -> None:
        self.output_dir, self.root = output_dir, output_dir / "weights"
        self.policy, self.source, self.world, self.dtype = policy, source, world, dtype
        self.life = 0
        self._seen: Seen = {}

    def open(self, start: int, *, spares: bool = False, saved_by: Collection[int] = ()) -> tuple[int, str | None]:
        """Begin a life that starts from step `start`, with that version committed: the base model's manifest for 0.

        The life is committed first: from then on nobody counts versions beyond `start` that earlier lives made. They are removed next.

        Args:
            spares: Keep the newest of them as `given_up_<life>_step_v`.
            saved_by: The lives that saved the training states. Rank 0's counts.

        Returns:
            The life's number, and the base model's hash (None: random weights).
        """
        self.life, base = on_main(self.world, lambda: self._open(start, spares, saved_by))
        if start > 0:
            self.ensure(start)
        return self.life, base

    def ensure(self, version: int) -> None:
        """Commit the policy's weights as `version`, unless this history has that version already."""
        if version not in on_main(self.world, lambda: list_steps(self.root)):
            self.commit(version)

    def commit(self, version: int) -> None:
        """Commit the policy's weights as `version`.

        Raises:
            UserError: another trainer has gone on with the run.
        """
        on_main(self.world, lambda: refuse_outlived(self.output_dir, self.life))
        export(
            self.policy,
            self.source,
            self.world,
            version_dir(self.root, version),
            version=version,
            incarnation=self.life,
            dtype=self.dtype,
        )

    def prune(self, async_level: int, keep: int | None, checkpoints: Callable[[], Collection[int]]) -> None:
        """Remove the versions that no reader, no sampling ahead and none of the `checkpoints` needs any more (`protocol.prunable`)."""
        if keep is not None:
            on_main(self.world, lambda: self._prune(async_level, keep, checkpoints()))

    def _prune(self, async_level: int, keep: int, checkpoints: Collection[int]) -> None:
        versions, lives, lease = (
            read_versions(self.root, self._seen),
            read_lives(self.output_dir),
            read_lease(self.output_dir),
        )
        superfluous = prunable(
            versions, lives, lease=lease, async_level=async_level, keep=keep, checkpoints=checkpoints
        )
        for version in superfluous:
            prune(version_dir(self.root, version))

    def _open(self, start: int, spares: bool, saved_by: Collection[int]) -> tuple[int, str | None]:
        self.root.mkdir(parents=True, exist_ok=True)
        clean_stages(self.root)
        directory = self.source.directory
        base = None if directory is None else write_base_version(self.root, directory).hash
        faults.point(f"life:{next_life(self.output_dir, saved_by)}")
        life = open_life(self.output_dir, start, spares=spares, saved_by=saved_by)
        self._set_aside(life)
        return life, base

    def _set_aside(self, life: int) -> None:
        versions = read_versions(self.root)
        given_up = to_set_aside(versions, read_lives(self.output_dir))
        kept = spared({version: versions[version] for version in given_up}, sparing_lives(self.output_dir))
        for version in given_up:  # ascending, so that after a crash the newest is still there to be kept
            if version != kept:
                prune(version_dir(self.root, version))
            elif (aside := give_up(version_dir(self.root, version), life)) is not None:
                logger.warning("version %d is given up; it lies in %s now", version, aside)
