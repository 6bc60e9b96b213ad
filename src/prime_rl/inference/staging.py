"""Staging of a committed version beside generation, so that the engine pauses only to exchange parameters.

A worker reads the version's files, or receives its tensors from the trainer's publisher, into one buffer, and verifies
what it will load. The buffer is on the device if that has room beside the engine, else in the host's memory. A version
in files may also be kept nowhere: it is verified, and vLLM reads it during the pause.
"""

import os
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
import xxhash
from torch import Tensor

from prime_rl.errors import UserError
from prime_rl.host_memory import available_bytes
from prime_rl.inference.version_files import short_turns
from prime_rl.transport import weights
from prime_rl.transport.commit import CommitError, open_file
from prime_rl.transport.exchange import ExchangeError, Subscriber, checksums, layout, tensor_views
from prime_rl.transport.weights import WeightsManifest

Place = Literal["device", "host", "nowhere"]
Ranges = Mapping[str, tuple[int, int]]  # by tensor: its start in the buffer and its size, in bytes

THREADS = min(max(len(os.sched_getaffinity(0)) // 2, 4), 8)  # that read files; a worker shares its cores
SPARE = 2  # the host's free memory must be this many times the buffer: others need some, too
SPARE_BYTES = 1 << 30  # that must stay free on the device beside a buffer, or as much again if that is less


class DroppedError(Exception):
    """The version is not wanted any more."""


class Staging:
    """One version, staged by a thread that starts with the construction. Its memory is held until `drop`.

    Args:
        directory: A committed version.
        digest: The hash that it must have.
        device: The model's.
        subscriber: Receives versions that are in no file.
        keep: Keep the tensors in memory if there is room.
        on_device: The device's memory may be used.
        verify: Hash files that are kept nowhere. One worker of an engine does.
        sharing: Workers that share the host's memory.

    Attributes:
        tensors: The staged tensors in the order of the manifest; none if they are kept nowhere.
        place: Where they are kept.
        seconds: The time that staging took.
    """

    def __init__(
        self, directory: Path, digest: str, device: torch.device, subscriber: Subscriber, *,
        keep: bool = True, on_device: bool = True, verify: bool = True, sharing: int = 1,
    ) -> None:  # fmt: skip
        self.directory, self.digest = directory, digest
        self.place: Place = "nowhere"
        self.seconds = 0.0
        self._device, self._subscriber = device, subscriber
        self._keep, self._on_device, self._verify, self._sharing = keep, on_device, verify, sharing
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._dropped = threading.Event()
        self._blocks = 0  # a sign of progress; threads may lose counts of each other
        self.tensors: list[tuple[str, Tensor]] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="stage", daemon=True)
        self._thread.start()

    def answer(self, seconds: float = 0.0) -> dict[str, Any]:
        """The state after at most `seconds`: "reading" with `blocks`, "ready" with `place` and `seconds`, or "failed".

        A failure has `why` and `retry`: whether another attempt may succeed, since the exchange failed.
        """
        self._thread.join(seconds)
        if self._thread.is_alive():
            return {"state": "reading", "blocks": self._blocks}
        if (error := self._error) is not None:
            why = str(error) or type(error).__name__
            return {"state": "failed", "why": why, "retry": isinstance(error, ExchangeError)}
        return {"state": "ready", "place": self.place, "seconds": self.seconds}

    def wait(self, seconds: float) -> None:
        """Return once the version is staged. Raises UserError after `seconds`, or what staging failed with."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise UserError(f"{self.directory} could not be read within {seconds:.0f} s")
        if self._error is not None:
            raise self._error

    def drop(self) -> None:
        """Stop reading and free the memory, at once or after the present block."""
        self._dropped.set()
        self.tensors = []

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            with short_turns(), self._side_stream():
                self.tensors = self._stage()
        except Exception as error:  # noqa: BLE001 - raised by `wait`
            _clear_frames(error)
            self._error = error
        self.seconds = time.perf_counter() - began
        if self._dropped.is_set():  # meanwhile
            self.tensors = []

    def _stage(self) -> list[tuple[str, Tensor]]:
        manifest = weights.weights_manifest(self.directory)
        if manifest.hash != self.digest:
            raise CommitError(f"{self.directory} holds {manifest.hash[:12]}, not {self.digest[:12]}")
        weights.check_hash(manifest)
        ranges, size = layout(manifest.tensors)
        self.place = self._choose(size)
        if self.place == "nowhere":
            if manifest.publisher is not None:
                why = "there is no memory here to receive them" if self._keep else "inference.stage_weights is off"
                raise UserError(f"{weights.never_written(self.directory)}, and {why}")
            if self._verify:
                weights.check_tensors(manifest, weights.hash_directory(manifest.files, self._progress))
            return []
        buffer = self._allocate(size)
        if manifest.publisher is not None:
            self._receive(manifest, ranges, buffer)
        else:
            self._read(manifest, ranges, buffer)
        return list(tensor_views(buffer, manifest.tensors))

    def _choose(self, size: int) -> Place:
        if not self._keep:
            return "nowhere"
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

    def _receive(self, manifest: WeightsManifest, ranges: Ranges, buffer: Tensor) -> None:
        """Receive the version from the publisher, and verify its checksums."""
        self._subscriber.receive(manifest, buffer, self._progress)
        sums = checksums(buffer, ranges)
        for name, entry in manifest.tensors.items():
            if sums[name] != entry.checksum:
                twice, self._subscriber.spoilt = self._subscriber.spoilt == manifest.hash, manifest.hash
                raise (CommitError if twice else ExchangeError)(str(weights.other_tensor(manifest, name)))

    def _read(self, manifest: WeightsManifest, ranges: Ranges, buffer: Tensor) -> None:
        """Read and verify every tensor of the files: what is hashed is what is loaded."""
        paths = sorted(manifest.files.glob("*.safetensors"))
        stored = {name: tensor for path in paths for name, tensor in weights.read_header(path).items()}
        for name, tensor in stored.items():
            if name not in ranges or tensor.stop - tensor.start != ranges[name][1]:
                raise weights.other_tensor(manifest, name)
        with ExitStack() as stack:
            files = {path.name: stack.enter_context(open_file(path)) for path in paths}
            threads = ThreadPoolExecutor(THREADS, thread_name_prefix="stage")
            # Once the version is dropped, each thread stops at its next chunk.
            stack.callback(threads.shutdown, cancel_futures=True)

            def read(name: str, first: int, last: int) -> "Future[bytes]":
                (entry, offset, _), start = stored[name], ranges[name][0]
                target = buffer[start + first : start + last]
                return threads.submit(self._read_chunk, files[entry.file], offset + first, target)

            reading = {name: [read(name, *chunk) for chunk in weights.chunks(ranges[name][1])] for name in stored}
            hashed = {}
            for name, futures in reading.items():
                digests = [future.result() for future in futures]  # bounded: the service gives up on a read that hangs
                hashed[name] = replace(stored[name].entry, xxh3=weights.of_chunks(digests))
        weights.check_tensors(manifest, hashed)

    def _read_chunk(self, file: BinaryIO, offset: int, target: Tensor) -> bytes:
        """Read a range of a file into `target`; returns its hash."""
        self._progress()
        with self._side_stream():
            block = torch.empty(len(target), dtype=torch.uint8, pin_memory=True) if target.is_cuda else target
            data = block.numpy().data
            done = 0
            while done < len(target):
                count = os.preadv(file.fileno(), [data[done:]], offset + done)
                if not count:
                    raise CommitError(f"{file.name} ended while it was read")
                done += count
            if target.is_cuda:
                target.copy_(block)
            return xxhash.xxh3_128_digest(data)

    def _progress(self) -> None:
        if self._dropped.is_set():
            raise DroppedError(f"{self.directory} is not wanted any more")
        self._blocks += 1

    def _side_stream(self) -> AbstractContextManager[object]:
        """A context in which this thread's work on a GPU runs beside the engine's stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _clear_frames(error: BaseException | None) -> None:
    """Free the buffers that the frames of a failure refer to."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
