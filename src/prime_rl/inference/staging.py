"""Worker side of a weight update: stage a committed version beside generation, then load it.

A worker reads the version's files, or receives its tensors from the trainer's publisher, into one buffer, and verifies
what it will load. The buffer is on the device if that has room beside the engine, else in the host's memory. A version
in files may also be kept nowhere: it is verified, and vLLM reads it during the pause.
"""

import logging
import os
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from prime_rl import faults
from prime_rl.errors import UserError
from prime_rl.host_memory import available_bytes
from prime_rl.inference import compat
from prime_rl.inference.copy_plan import CopyPlan
from prime_rl.processes import follow
from prime_rl.transport import weights
from prime_rl.transport.exchange import ExchangeError, Subscriber, checksums, layout, tensor_views
from prime_rl.transport.weights import (
    PublisherAddress,
    TensorEntry,
    WeightsManifest,
    no_tensors_message,
    weights_manifest,
)

Place = Literal["device", "host", "nowhere"]
Ranges = Mapping[str, tuple[int, int]]  # by tensor: its start in the buffer and its size, in bytes
Identity = dict[str, Any]  # {"version", "hash", "weight_dir"}, of an adapter "adapter", too: its PEFT config

THREADS = min(max(len(os.sched_getaffinity(0)) // 2, 4), 8)  # that read a version's files; a worker shares its cores
SPARE = 2  # the host's free memory must be this many times the buffer: others need some, too
SPARE_BYTES = 1 << 30  # that must stay free on the device beside a buffer, or as much again if that is less


class DroppedError(Exception):
    """The version is not wanted any more."""


@dataclass
class Memory:
    """A buffer, and the tensors in it, in the order of their version's manifest."""

    buffer: Tensor
    ranges: Ranges
    entries: Mapping[str, TensorEntry]
    tensors: list[tuple[str, Tensor]]
    place: Place
    stream: "torch.cuda.Stream | None"  # that fills it: torch keeps free memory by stream


class Staging:
    """One version, staged by a thread that starts with the construction. Its memory is held until `drop`.

    Args:
        directory: A committed version, with the hash `digest`.
        device: The model's.
        subscriber: Receives versions that are in no file.
        on_device: The device's memory may be used.
        verify: Hash files that are kept nowhere. One worker of an engine does.
        sharing: Workers that share the host's memory.
        refill: The memory of a loaded version with the same tensors, and a manifest without tensors that says where to
            receive this one from: reading its own takes as long as all the rest.
    """

    def __init__(
        self, directory: Path, digest: str, device: torch.device, subscriber: Subscriber, *,
        on_device: bool = True, verify: bool = True, sharing: int = 1,
        refill: tuple[Memory, WeightsManifest] | None = None,
    ) -> None:  # fmt: skip
        self.directory, self.digest = directory, digest
        self.memory: Memory | None = None  # where the tensors are
        self.place: Place = "nowhere"
        self.seconds = 0.0  # that staging took
        self._device, self._subscriber = device, subscriber
        self._on_device, self._verify, self._sharing = on_device, verify, sharing
        self._refill, self._stream = refill, None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device) if refill is None else refill[0].stream
        self._dropped = threading.Event()
        self._blocks = 0  # a sign of progress; threads may lose counts of each other
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="stage", daemon=True)
        self._thread.start()

    def answer(self, seconds: float = 0.0) -> dict[str, Any]:
        """The state, awaited for at most `seconds`: "reading" with `blocks`, "ready" with `place` and `seconds`, or
        "failed" with `why` and `retry`: whether another attempt may succeed, as the exchange failed or files moved."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            return {"state": "reading", "blocks": self._blocks}
        if (error := self._error) is not None:
            why = str(error) or type(error).__name__
            return {"state": "failed", "why": why, "retry": isinstance(error, ExchangeError | OSError)}
        return {"state": "ready", "place": self.place, "seconds": self.seconds}

    def drop(self) -> None:
        """Stop reading and free the memory, at once or after the present block."""
        self._dropped.set()
        self.memory = None

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            with self._side_stream():
                self.memory = self._stage()
        except Exception as error:  # noqa: BLE001 - in `answer`
            traceback.clear_frames(error.__traceback__)  # they refer to the buffer, as those of its causes do
            for cause in (error.__cause__, error.__context__):
                traceback.clear_frames(cause.__traceback__ if cause is not None else None)
            self._error = error.with_traceback(None)
        self.seconds = time.perf_counter() - began
        if self._dropped.is_set():  # meanwhile
            self.memory = None

    def manifest(self) -> WeightsManifest:
        """The version's manifest. Raises ExchangeError if it was committed anew, CommitError if it is gone."""
        manifest = weights_manifest(self.directory)
        if manifest.hash != self.digest:
            raise ExchangeError(f"{self.directory} was committed anew: {manifest.hash[:12]}, not {self.digest[:12]}")
        return manifest

    @property
    def tensors(self) -> list[tuple[str, Tensor]]:
        """In the order of the manifest; none if they are kept nowhere."""
        return [] if self.memory is None else self.memory.tensors

    def _stage(self) -> Memory | None:
        if self._refill is not None:
            # Other tensors, wrong bytes, no publisher: begin again with the version's own manifest, which says which.
            memory, source = self._refill
            with suppress(ExchangeError):
                self._receive(source, memory.entries, memory.ranges, memory.buffer)
                self.place = memory.place
                return memory
            self._refill = None
        manifest = self.manifest()
        weights.check_hash(manifest)
        ranges, size = layout(manifest.tensors)
        self.place = self._choose(size)
        if self.place == "nowhere":
            if manifest.adapter is not None:
                raise UserError(f"{self.directory}: there is no memory here for an adapter of {size:,} bytes")
            if manifest.publisher is not None:
                raise UserError(f"{no_tensors_message(self.directory)}, and there is no memory here to receive them")
            if self._verify:
                weights.check_tensors(manifest, weights.hash_directory(manifest.files, self._progress))
            return None
        buffer = self._allocate(size)
        if manifest.publisher is None:
            self._read(manifest, ranges, buffer)
        else:
            self._receive(manifest, manifest.tensors, ranges, buffer)
        views = list(tensor_views(buffer, manifest.tensors))
        return Memory(buffer, ranges, manifest.tensors, views, self.place, self._stream)

    def _choose(self, size: int) -> Place:
        use_device = self._on_device and self._device.type == "cuda"
        if use_device and size + min(size, SPARE_BYTES) <= torch.cuda.mem_get_info(self._device)[0]:
            return "device"
        return "host" if SPARE * size * self._sharing <= available_bytes() else "nowhere"

    def _allocate(self, size: int) -> Tensor:
        """A buffer of zeros: uint8 [size]."""
        if self.place == "device":
            try:
                buffer = torch.zeros(size, dtype=torch.uint8, device=self._device)
                torch.cuda.current_stream(self._device).synchronize()  # others' streams write to it, too
                return buffer
            except torch.OutOfMemoryError:  # taken by another process meanwhile
                self.place = "host"
        return torch.from_numpy(np.zeros(size, np.uint8))  # the system provides pages only as they are written to

    def _receive(
        self, source: WeightsManifest, entries: Mapping[str, TensorEntry], ranges: Ranges, buffer: Tensor
    ) -> None:
        """Receive the version from the publisher, and verify it: the checksums of what has arrived make its hash."""
        self._subscriber.receive(source, buffer, self._progress)
        sums = checksums(buffer, ranges)
        received = {name: replace(entry, checksum=sums[name]) for name, entry in entries.items()}
        if weights.version_hash(received) != self.digest:
            raise ExchangeError(f"what was received is not {self.directory}")

    def _read(self, manifest: WeightsManifest, ranges: Ranges, buffer: Tensor) -> None:
        """Read and verify every tensor of the files: what is hashed is what is loaded."""

        def store(name: str, at: int, block: memoryview) -> None:
            start, size = ranges.get(name, (0, 0))
            if at + len(block) > size:
                raise weights.tensor_mismatch(manifest, name)
            if block:
                with self._side_stream():
                    buffer[start + at : start + at + len(block)].copy_(torch.frombuffer(block, dtype=torch.uint8))

        paths = sorted(manifest.files.glob("*.safetensors"))
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="stage")
        with pool as threads:  # bounded: once the version is dropped each stops at its next block
            files = threads.map(lambda path: weights.hash_tensors(path, self._progress, store), paths)
            weights.check_tensors(manifest, {name: entry for file in files for name, entry in file.items()})

    def _progress(self) -> None:
        if self._dropped.is_set():
            raise DroppedError(f"{self.directory} is not wanted any more")
        self._blocks += 1

    def _side_stream(self) -> AbstractContextManager[object]:
        """A context in which this thread's work on a GPU runs beside the engine's stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


@dataclass
class Held:
    """What a worker has under one number: the adapter's, or 1 for full weights."""

    identity: Identity | None = None  # what is served; None or empty: the weights that it was started with
    staging: Staging | None = None
    subscriber: Subscriber = field(default_factory=Subscriber)
    memory: Memory | None = None  # of an adapter that was loaded in place: the next one may be received into it
    slot: compat.AdapterSlot | None = None  # versions are adapters: vLLM cannot load full weights beside them


class Stall:
    """The time from now on in which the engine cannot compute; on a GPU not before the step ends that it computes."""

    def __init__(self, device: torch.device) -> None:
        self._began = time.perf_counter()
        self._computed = self._event() if device.type == "cuda" else None

    def seconds(self) -> float:
        if self._computed is None:
            return time.perf_counter() - self._began
        end = self._event()
        end.synchronize()
        return self._computed.elapsed_time(end) / 1e3

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class WeightsExtension:
    """vLLM's worker extension, which it mixes into its worker: all names begin with `prime_`, as none may exist there.

    Every rank runs the same call; the server (`service.py`) pauses generation from the load until every rank has
    loaded. Weights are loaded in place if the model allows it, else through vLLM's own reload.
    """

    # Provided by vLLM's worker.
    device: torch.device
    model_runner: Any
    model_config: Any
    vllm_config: Any
    rank: int

    prime_copies: CopyPlan | None = None
    prime_plain: bool | None = None  # not known yet
    prime_kept: compat.KeptChoices | None = None  # on a CPU, with router replay
    prime_whole = True  # every reload of vLLM's has finished: only another reload repairs one that has not

    @cached_property
    def prime_held(self) -> defaultdict[int, Held]:
        return defaultdict(Held)

    def prime_call(self, method: str, args: Sequence[Any]) -> dict[str, Any]:
        """Call one of the methods below. Returns its "answer", or the "error" that it raised.

        vLLM stops reading a call's answers at the first rank that raises; later calls would get the others' answers.
        """
        try:
            return {"answer": getattr(self, method)(*args)}
        except Exception as error:  # raised by `compat.AllEngines`
            logging.getLogger(__name__).exception("%s failed", method)
            return {"error": str(error) or type(error).__name__}

    def prime_stage(
        self, number: int, directory: str, digest: str, servers_on_host: int, on_device: bool, seconds: float = 0.0,
        source: Sequence[Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Begin to stage a committed version with this hash (see `Staging`), and return the progress after `seconds`.

        Args:
            servers_on_host: Engines that do so at the same time; those of a dense model do not know of each other.
            source: Of an adapter in the trainer's memory: version, incarnation, and what a `PublisherAddress` holds.
        """
        self.prime_unstage(number)
        sharing = servers_on_host * self.vllm_config.parallel_config.world_size
        held = self.prime_held[number]
        memory, held.memory = held.memory, None  # taken away: a thread that hangs may still write to it later
        refill = None
        if source is not None and memory is not None:
            version, incarnation, *address = source
            publisher, at = PublisherAddress(*address), Path(directory)
            refill = memory, WeightsManifest(version, incarnation, digest, {}, None, at, publisher=publisher)
        held.staging = Staging(
            Path(directory), digest, self.device, held.subscriber,
            on_device=on_device, verify=self.rank == 0, sharing=sharing, refill=refill,
        )  # fmt: skip
        return held.staging.answer(seconds)

    def prime_staged(self, number: int) -> dict[str, Any]:
        staging = self.prime_held[number].staging
        return {"state": "failed", "why": "nothing is staged", "retry": False} if staging is None else staging.answer()

    def prime_unstage(self, number: int) -> None:
        held = self.prime_held[number]
        if held.staging is not None:
            held.staging.drop()
            held.staging = None
            if self.device.type == "cuda" and held.memory is None:
                torch.cuda.empty_cache()  # for other processes

    def prime_load(self, number: int, directory: str, identity: Identity, stage: Sequence[Any] = ()) -> dict[str, Any]:
        """Load the staged version, or if none is staged the base model in `directory`, and serve it as `identity`
        (empty: as the weights that it was started with). `stage`: stage it first, with these options of `prime_stage`.
        Beside adapters the base model stays loaded: for it, the adapter is set to zeros.

        Returns the state "loaded" and the weights `served`; or the progress of staging, not "ready": nothing was
        changed. `blocked`: seconds that the engine could not compute.

        After a failure on any rank the model is unusable until all have loaded another version. The adapter of a rank
        that failed is zeros, those of others may be the new one.
        """
        stall, progress = Stall(self.device), dict[str, Any]()
        if stage:
            progress = self.prime_stage(number, directory, identity["hash"], *stage)
            if progress["state"] != "ready":
                return progress | {"blocked": stall.seconds()}
        held = self.prime_held[number]
        staging, slot = held.staging, held.slot
        if slot is not None and "adapter" not in identity:
            slot.clear()
            held.memory = None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        elif staging is None:
            self.prime_reload(Path(directory))
        elif (str(staging.directory), staging.digest) != (directory, identity["hash"]):
            raise RuntimeError(f"{staging.directory} was staged, not {directory}")
        elif staging.answer()["state"] != "ready":
            raise RuntimeError(f"{directory} is not staged")
        elif staging.place == "nowhere":
            self.prime_reload(staging.manifest().files)
            staging.manifest()  # else it was committed anew while it was read
        else:
            try:
                tensors = self.prime_tensors(staging, identity)
                if slot is not None:
                    in_place = slot.load(dict(tensors), identity["adapter"])  # else vLLM may keep the tensors
                    # It is filled again by versions that are staged here and come from a publisher.
                    held.memory = staging.memory if in_place and stage and stage[-1] is not None else None
                else:
                    self.prime_reload(tensors)
            except Exception:
                if slot is not None:
                    slot.clear()
                raise
            finally:  # the staged memory is freed or filled again next
                if self.device.type == "cuda":
                    torch.cuda.current_stream(self.device).synchronize()
        self.prime_unstage(number)
        held.identity = identity
        return progress | {"state": "loaded", "served": identity, "blocked": stall.seconds()}

    def prime_served(self, number: int = compat.ADAPTER) -> Identity | None:
        """The weights that this rank serves under a number; None for those it was started with."""
        return self.prime_held[number].identity

    def prime_choices(self, request: str) -> tuple[bytes, tuple[int, ...]]:
        """The experts of a request's tokens. They are kept from the first call on."""
        self.prime_kept = self.prime_kept or compat.KeptChoices(self.model_runner)
        return self.prime_kept.take(request)

    def prime_follow(self, server: int) -> bool:
        """End with the server process, even if that is killed. The first call that a worker gets."""
        faults.arm("inference")  # the server arms its own process
        sys.setswitchinterval(compat.SWITCH_SECONDS)
        if (lora := self.vllm_config.lora_config) is not None:
            if self.device.type == "cpu":
                compat.use_whole_products(self.model_runner)
            for number in range(compat.ADAPTER, compat.ADAPTER + lora.max_cpu_loras):
                self.prime_held[number].slot = compat.AdapterSlot(self.model_runner, number)
        return follow(server)

    def prime_tensors(self, staging: Staging, identity: Identity) -> Iterable[tuple[str, Tensor]]:
        for name, tensor in staging.tensors:
            yield name, tensor
            # Where vLLM reloads: in the middle of a layer, which it assembles from several tensors.
            if name.endswith("layers.0.self_attn.k_proj.weight"):
                faults.point(f"loading:v{identity['version']}")

    def prime_is_plain(self, model: Any) -> bool:
        """Return whether the model computes with weights as loaded, never changed: then vLLM need not reload them."""
        if self.prime_plain is None:
            config = self.vllm_config
            # Scales of a quantized cache are made anew by a reload.
            plain = "fp8" not in str(config.cache_config.cache_dtype)
            plain &= config.offload_config.prefetch.offload_group_size == 0  # else each forward fills parameters anew
            self.prime_plain = self.device.type == "cuda" and plain and compat.keeps_as_loaded(model)
        return self.prime_plain

    def prime_reload(self, source: Path | Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors, or a directory's files: into the parameters as they are, or through vLLM's own reload."""
        from vllm.config import set_current_vllm_config

        model = self.model_runner.get_model()
        # 0.26's own `reload_weights` does not set the config that its layers look up.
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            if self.device.type == "cpu":
                compat.forget_packed_experts(model)
            if not self.prime_whole:
                # Else the next reload would take half a layer of the last one for its own.
                compat.settle_reload(model, self.model_config)
            elif not isinstance(source, Path) and self.prime_is_plain(model):
                tensors = list(source)
                if self.prime_copies is not None and self.prime_copies.matches(model, tensors):
                    self.prime_copies.load(tensors)
                else:
                    self.prime_copies = CopyPlan(model, tensors)
                compat.finish_load(model, self.model_config)
                return
            self.prime_whole = False
            name = "weights_path" if isinstance(source, Path) else "weights_iterator"
            with compat.complete_reload(model):
                self.model_runner.reload_weights(**{name: str(source) if isinstance(source, Path) else source})
            self.prime_whole = True
            if self.device.type == "cpu":
                compat.repack(model)
