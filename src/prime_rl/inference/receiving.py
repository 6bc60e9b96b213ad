"""Receiving a version from the trainer's sender in place of reading its files: another source of bytes for the same memory (`staging.py`)."""

import math
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from loguru import logger

from prime_rl.errors import UserError
from prime_rl.inference import blocks
from prime_rl.inference.blocks import DTYPES, Part, Piece, Stretch
from prime_rl.transport.commit import CommitError
from prime_rl.transport.device_memory import DeviceBorrower, DeviceMemory, size_of
from prime_rl.transport.line import Line, PairError, introduce
from prime_rl.transport.pairs import Pair, join
from prime_rl.transport.shared import BACKEND as SHARED
from prime_rl.transport.shared import CUDA_IPC, Borrower, HostMemory, is_elsewhere
from prime_rl.transport.weights import SenderAddress, WeightsManifest

STREAMS = {CUDA_IPC: 1, SHARED: 8, "gloo": 4, "nccl": 2}
"""Parts at once. Every communicator of NCCL takes memory of the GPU, and two of them take all that the sender can copy to its own; one
thread keeps a GPU busy that copies from itself to itself."""


class Receiver:
    """Connections to senders. Those to the present one are kept for the next version, while both sides live.

    Args:
        device: Of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: list[tuple[Way, Pair | Borrower]] = []
        self._not_lent: SenderAddress | None = None  # whose GPU's memory cannot be had here
        self._lock = threading.Lock()  # bounded: held for a look at a list

    def source(self, manifest: WeightsManifest) -> "Sent":
        """A version that was never written, to be staged. Nobody is asked for anything yet.

        Raises:
            CommitError: the manifest describes a tensor that cannot be.
        """
        return Sent(self, manifest)

    def backend(self, sender: SenderAddress, *, on_device: bool = False) -> str:
        """How the two have come together; `on_device`: for memory of this GPU."""
        pair = self._take(Way(sender, on_device))
        self._put_back(Way(sender, on_device), pair)
        return pair.backend

    @contextmanager
    def part(
        self, manifest: WeightsManifest, start: int, size: int, *, on_device: bool = False
    ) -> Iterator[Pair | Borrower]:
        """Ask for so many bytes of a version, to be received block by block from the first to the last.

        Raises:
            PairError: the sender has this version no more, is gone, or is silent.
        """
        assert manifest.sender is not None
        seconds, way = manifest.sender.timeout, Way(manifest.sender, on_device)
        pair = self._take(way)
        try:
            pair.line.tell(
                seconds,
                version=manifest.version,
                life=manifest.incarnation,
                hash=manifest.hash,
                start=start,
                count=size,
                block=blocks.BLOCK_BYTES,
            )
            yield pair
            pair.end(size)
        except BaseException:
            pair.close()  # it may be anywhere within what it was asked for
            raise
        self._put_back(way, pair)

    def close(self) -> None:
        """Give all connections up that nobody uses at the moment."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, pair in idle:
            pair.close()

    def _put_back(self, way: "Way", pair: Pair | Borrower) -> None:
        with self._lock:
            self._idle.append((way, pair))

    def _take(self, way: "Way") -> Pair | Borrower:
        with self._lock:
            of_others = [pair for other, pair in self._idle if other != way]
            ours = [pair for other, pair in self._idle if other == way]
            while ours and not ours[-1].line.is_open():
                of_others.append(ours.pop())
            found = ours.pop() if ours else None
            self._idle = [(way, pair) for pair in ours]
        for pair in of_others:
            pair.close()
        return found or self._connect(way)

    def _connect(self, way: "Way") -> Pair | Borrower:
        if way.on_device and self._not_lent != way.sender:
            try:
                return connect(way.sender, self._device, on_device=True)
            except CannotBorrowError as error:
                logger.warning("{}: new weights come another way", error)
                self._not_lent = way.sender
        return connect(way.sender, self._device)


class Way(NamedTuple):
    """To a sender; `on_device`: for memory of this GPU, which may lie beside the sender's."""

    sender: SenderAddress
    on_device: bool


class CannotBorrowError(PairError):
    """The sender lends memory of this GPU, and it cannot be opened."""


def connect(sender: SenderAddress, device: torch.device, *, on_device: bool = False) -> Pair | Borrower:
    """Come together with a sender: by its memory where the sender allows it, on this GPU if it is asked for, or on this host; else in a process group.

    Args:
        device: The model's.

    Raises:
        CannotBorrowError: the sender's memory of this GPU cannot be opened.
        PairError: nobody is there, the sender refuses, or is silent.
        UserError: it has no backend that could ever be used here.
    """
    host, port, seconds = sender.host, sender.port, sender.timeout
    try:
        line = Line(socket.create_connection((host, port), seconds))
    except OSError as error:
        raise PairError(f"no sender of weights answers at {host}:{port} ({error.strerror or error})") from error
    memory: HostMemory | None = None
    there: int | None = None  # bytes of this GPU

    def choose(hello: Mapping[str, Any]) -> str:
        nonlocal memory, there
        offered = hello.get("backends")
        offered = offered if isinstance(offered, list) else []
        if on_device and CUDA_IPC in offered and (there := size_of(hello.get("gpu"), device)) is not None:
            return CUDA_IPC
        if SHARED in offered and not is_elsewhere(hello.get("memory")):
            memory = HostMemory(hello["memory"])
            if memory.open() is None:
                memory.close()
                return SHARED
        for backend in ("nccl", "gloo"):
            if backend in offered and (backend == "gloo" or device.type == "cuda"):
                return backend
        trouble = f"the sender at {host}:{port} offers {' and '.join(map(str, offered)) or 'nothing'}, which cannot be used here: set trainer.weights.transport.backend"  # fmt: skip
        if memory is not None:
            raise PairError(trouble)  # the sender may have died just now
        raise UserError(trouble)

    try:
        backend = introduce(line, token=sender.token, choose=choose, seconds=seconds)
        if backend == CUDA_IPC and there is not None:
            lent = DeviceMemory(there, str(line.expect("welcome", seconds)), device)
            if (why := lent.open()) is not None:
                raise CannotBorrowError(f"the trainer's copy of the weights on this GPU cannot be opened ({why})")
            lent.close()
            return DeviceBorrower(line, lent, seconds)
        if backend == SHARED and memory is not None:
            line.expect("welcome", seconds)
            return Borrower(line, memory, seconds)
        return join(line, host, backend="nccl" if backend == "nccl" else "gloo", device=device, seconds=seconds)
    except BaseException:
        line.close()
        raise


class Sent:
    """The tensors of a version that lies with its sender: `parts`. `meet` comes first.

    Attributes:
        at_once: Of how many parts, or stretches of them, to ask for at a time.
        from_gpu: Whether they come from GPU to GPU, or from one memory of a GPU to another.
    """

    def __init__(self, receiver: Receiver, manifest: WeightsManifest) -> None:
        self.parts = sent_parts(manifest)
        self._receiver, self._manifest = receiver, manifest

    def meet(self, *, on_device: bool) -> None:
        """Come together with the sender. `on_device`: there is memory of this GPU for them.

        Raises:
            PairError: there is no sender, it refuses, or is silent.
        """
        assert self._manifest.sender is not None
        backend = self._receiver.backend(self._manifest.sender, on_device=on_device)
        self.at_once, self.from_gpu = STREAMS[backend], on_device and backend in ("nccl", CUDA_IPC)
        self._ask = partial(self._receiver.part, self._manifest, on_device=on_device)

    def source(self, part: Part, stretch: Stretch) -> "_OfSender":
        """A stretch of a part, which is asked for when this is entered."""
        return _OfSender(self._ask(part.offset + stretch.start, stretch.end - stretch.start))

    def groups(self, buffers: Sequence[torch.Tensor]) -> list[list[tuple[Part, torch.Tensor]]]:
        """The parts, with memory of the GPU for each, that are asked for in one go: all where one thread does it, else each by itself."""
        each = list(zip(self.parts, buffers, strict=True))
        return [each] if self.at_once == 1 else [[one] for one in each]

    def receive_on_gpu(self, group: Sequence[tuple[Part, torch.Tensor]], go_on: Callable[[], None]) -> None:
        """All of these parts into memory of the GPU. `go_on` may raise between two blocks."""
        (first, _), (last, _) = group[0], group[-1]
        with self._ask(first.offset, last.offset + last.size - first.offset) as pair:
            if not (isinstance(pair, DeviceBorrower) or (isinstance(pair, Pair) and pair.backend == "nccl")):
                raise PairError("the sender is reached in another way than a moment ago")
            for _, buffer in group:
                pair.receive_there(buffer, blocks.BLOCK_BYTES, go_on)


class _OfSender:
    def __init__(self, asked: AbstractContextManager[Pair | Borrower]) -> None:
        self._asked = asked

    def __enter__(self) -> None:
        self._pair = self._asked.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._asked.__exit__(*exc)

    def fill(self, block: memoryview, at: int) -> None:
        self._pair.receive(block)


def sent_parts(manifest: WeightsManifest) -> list[Part]:
    """What lies where in the sender's memory, cut as its files would be: `offset` is a part's place there.

    Raises:
        CommitError: the manifest describes a tensor that cannot be.
    """
    files: dict[str, list[Piece]] = {}
    for name, entry in manifest.tensors.items():
        pieces = files.setdefault(entry.file, [])
        if entry.dtype not in DTYPES:
            raise CommitError(f"{manifest.directory}: tensor {name} is of type {entry.dtype}, which cannot be loaded")
        start, size = pieces[-1].end if pieces else 0, math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
        pieces.append(Piece(name, entry.dtype, entry.shape, start, start + size))
    parts, offset = [], 0
    for file, pieces in files.items():
        parts.append(Part(Path(manifest.directory / file), offset, pieces[-1].end, pieces))
        offset += pieces[-1].end
    return parts
