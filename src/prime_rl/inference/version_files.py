"""Check the version that a request names: its place, whether it is the model's; a hanging mount blocks nothing else."""

import asyncio
import json
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

from prime_rl import faults
from prime_rl.transport.commit import MANIFEST, CommitError, read_manifest, verify
from prime_rl.transport.weights import INDEX, TensorEntry, WeightsManifest, version_hash, weights_manifest
from prime_rl.wait import in_thread

MESSAGE_CHARACTERS = 8192  # it may quote what a request or a manifest says
STALL_SECONDS = 45.0  # of a read, without progress; shorter than a weight change waits for another one
TURN_SECONDS = 1e-4  # for `sys.setswitchinterval`: by default a thread waits 5 ms, longer than reading a block

T = TypeVar("T")


class Rejected(Exception):
    """A request that was not carried out; what was served before is still served. `status` is an HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MESSAGE_CHARACTERS else f"{message[:MESSAGE_CHARACTERS]}…"


def check_version(root: Path | None, weight_dir: str, version: int) -> WeightsManifest:
    """Check everything of a version except the tensors' bytes. Rejected if it lies outside `root` (403; None: any place
    that this host sees), or is not `version`, or not whole (400)."""
    directory = resolve(root, weight_dir)
    faults.point(f"update-read:v{version}")
    try:
        _check_files(root, directory, [MANIFEST])
        committed = read_manifest(directory)
        _check_files(root, directory, committed.files)
        manifest = weights_manifest(directory, committed)
        if manifest.version != version:
            raise Rejected(400, f"{directory} holds version {manifest.version}, not {version}")
        if manifest.base is None:
            listed = {name: entry.file for name, entry in manifest.tensors.items()}
            verify(directory, unhashed=set(listed.values()), manifest=committed)
            # vLLM reads only the files that an index names, and silently keeps the old weights of others.
            index = directory / INDEX
            if index.exists() and json.loads(index.read_bytes())["weight_map"] != listed:
                raise CommitError(f"{index} does not list the tensors of the files beside it")
    except (CommitError, OSError, TypeError, ValueError, KeyError, RecursionError) as error:
        raise Rejected(400, str(error)) from error  # manifest and index may say anything
    return manifest


def resolve(root: Path | None, weight_dir: str) -> Path:
    """The committed directory that `weight_dir` names, symbolic links resolved; raises as `check_version`. `root` is a
    real path: where a link in it leads is outside."""
    try:
        path = Path(weight_dir).expanduser().resolve()
    except (ValueError, RuntimeError, OSError) as error:  # a NUL byte, a loop of links, an unknown user
        raise Rejected(400, f"weight_dir {weight_dir!r} is no path: {error}") from error
    if root is not None and not path.is_relative_to(root):
        where = f"is outside the weights root {root}: start the server with another --weights-root, or without"
        raise Rejected(403, f"weight_dir {weight_dir} {where}; a tenant's versions lie in its own run directory")
    if not os.path.isfile(path / MANIFEST):  # False where it may not even look
        both = "trainer and server need one file system, under the same path"
        raise Rejected(400, f"the server's host sees no committed version in {weight_dir}: {both}")
    return path


def _check_files(root: Path | None, directory: Path, names: Iterable[str]) -> None:
    """Check that these files, and those that are read for their names, lie in `directory`. A link may lead anywhere
    below the root, or, without a root, into `directory`."""
    allowed = root or directory
    for name in {*names, INDEX, *(path.name for path in directory.glob("*.safetensors"))}:
        path = directory / name
        real_path = Path(os.path.realpath(path))  # no error where links lead in a circle: opening it is one
        inside = path.parent == directory and name not in ("", "..")
        if not inside or not real_path.is_relative_to(allowed):
            raise Rejected(403, f"{path} is outside {directory if root is None else f'the weights root {root}'}")


class Adapters(NamedTuple):
    """The adapters that a server can hold."""

    max_rank: int
    modules: Collection[str]  # that they may be for, by the last parts of their names


def check_adapter(manifest: WeightsManifest, base: dict[str, TensorEntry], served: Adapters | None) -> None:
    """Reject full weights where adapters are served and adapters elsewhere, one that is too large, one of another base
    model, and one for layers that the model has not."""
    if manifest.adapter is None and served is None:
        return
    if manifest.adapter is None:
        raise Rejected(400, "the version is full weights, and this server serves adapters: start it without [lora]")
    rank = manifest.adapter.config["r"]
    if served is None or rank > served.max_rank:
        raise Rejected(400, f"the version is an adapter of rank {rank}: start the server with --lora.max-rank {rank}")
    if manifest.adapter.base != version_hash(base):
        raise Rejected(400, f"{manifest.directory} is an adapter of another base model than this server's")
    for name, entry in manifest.tensors.items():
        layer, _, letter = name.removesuffix(".weight").removeprefix("base_model.model.").rpartition(".lora_")
        weight, side = base.get(f"{layer}.weight"), "BA".find(letter)
        if weight is None or side < 0 or (entry.shape[side], entry.shape[1 - side]) != (weight.shape[side], rank):
            raise Rejected(400, f"tensor {name} with shape {entry.shape} fits no layer of the model")
        module = "experts" if ".experts." in layer else layer.rpartition(".")[2]
        if module not in served.modules:
            raise Rejected(400, f"vLLM serves no adapters for {module} here: train with --lora.serve merged")


def check_fit(tensors: dict[str, TensorEntry], base: dict[str, TensorEntry], tied: bool) -> None:
    """Reject a version whose tensors have other names or shapes than the base model's; dtypes may differ."""
    optional = {"lm_head.weight"} if tied else set()
    for name in sorted((base.keys() ^ tensors.keys()) - optional):
        raise Rejected(400, f"tensor {name} is {'missing' if name in base else 'not part of the model'}")
    for name in sorted(base.keys() & tensors.keys()):
        if tensors[name].shape != base[name].shape:
            raise Rejected(400, f"tensor {name} has shape {tensors[name].shape}, the model's is {base[name].shape}")


async def read(function: Callable[[], T], subject: Path | str, seconds: float) -> T:
    """Return `function()` from a daemon thread, since a file system may hang. Rejected (503) after `seconds`."""
    future = asyncio.wrap_future(in_thread(function, "read"))
    done, _ = await asyncio.wait({future}, timeout=seconds)
    if not done:
        raise Rejected(503, f"{subject} could not be read within {seconds:.0f} s")
    return await future  # bounded: it is done
