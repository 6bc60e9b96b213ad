"""Receiving a version from the trainer's sender in place of reading its files: another source of bytes for the same memory (`staging.py`)."""

import math
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from prime_rl.errors import UserError
from prime_rl.inference import blocks
from prime_rl.inference.blocks import DTYPES, Part, Piece, Stretch
from prime_rl.transport.commit import CommitError
from prime_rl.transport.device_memory import DeviceBorrower, DeviceMemory, is_of
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
        self._idle: list[tuple[SenderAddress, Pair | Borrower]] = []
        self._lock = threading.Lock()  # bounded: held for a look at a list

    def source(self, manifest: WeightsManifest) -> "Sent":
        """A version that was never written, to be staged. Nothing of it is asked for yet.

        Raises:
            CommitError: the manifest describes a tensor that cannot be.
            PairError: there is no sender, it refuses, or is silent.
        """
        return Sent(self, manifest)

    def backend(self, sender: SenderAddress) -> str:
        """How the two have come together."""
        pair = self._take(sender)
        self._put_back(sender, pair)
        return pair.backend

    @contextmanager
    def part(self, manifest: WeightsManifest, start: int, size: int) -> Iterator[Pair | Borrower]:
        """Ask for so many bytes of a version, to be received block by block from the first to the last.

        Raises:
            PairError: the sender has this version no more, is gone, or is silent.
        """
        assert manifest.sender is not None
        seconds = manifest.sender.timeout
        pair = self._take(manifest.sender)
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
        self._put_back(manifest.sender, pair)

    def close(self) -> None:
        """Give all connections up that nobody uses at the moment."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, pair in idle:
            pair.close()

    def _put_back(self, sender: SenderAddress, pair: Pair | Borrower) -> None:
        with self._lock:
            self._idle.append((sender, pair))

    def _take(self, sender: SenderAddress) -> Pair | Borrower:
        with self._lock:
            of_others = [pair for address, pair in self._idle if address != sender]
            ours = [pair for address, pair in self._idle if address == sender]
            self._idle = []
            while ours and not ours[-1].line.is_open():
                of_others.append(ours.pop())
            found = ours.pop() if ours else None
            self._idle = [(sender, pair) for pair in ours]
        for pair in of_others:
            pair.close()
        return found or connect(sender, self._device)


def connect(sender: SenderAddress, device: torch.device) -> Pair | Borrower:
    """Come together with a sender: by its memory where that is on this GPU or this host and the sender allows it, else in a process group. `device` is the model's.

    Raises:
        PairError: nobody is there, the sender refuses, or is silent.
        UserError: it has no backend that could ever be used here.
    """
    host, port, seconds = sender.host, sender.port, sender.timeout
    try:
        line = Line(socket.create_connection((host, port), seconds))
    except OSError as error:
        raise PairError(f"no sender of weights answers at {host}:{port} ({error.strerror or error})") from error
    lent: DeviceMemory | HostMemory | None = None

    def choose(hello: Mapping[str, Any]) -> str:
        nonlocal lent
        offered, described = hello.get("backends"), hello.get("memory")
        offered = offered if isinstance(offered, list) else []
        if CUDA_IPC in offered and is_of(described, device):
            lent = DeviceMemory(described, device)
        elif SHARED in offered and not is_elsewhere(described):
            lent = HostMemory(described)
        if lent is not None and lent.open():
            lent.close()
            return lent.backend
        for backend in ("nccl", "gloo"):
            if backend in offered and (backend == "gloo" or device.type == "cuda"):
                return backend
        trouble = f"the sender at {host}:{port} offers {' and '.join(map(str, offered)) or 'nothing'}, which cannot be used here: set trainer.weights.transport.backend"  # fmt: skip
        if lent is not None:
            raise PairError(trouble)  # the sender may have died just now
        raise UserError(trouble)

    try:
        backend = introduce(line, token=sender.token, choose=choose, seconds=seconds)
        if lent is not None and backend == lent.backend:
            line.expect("welcome", seconds)
            return DeviceBorrower(line, lent, seconds) if isinstance(lent, DeviceMemory) else Borrower(line, lent, seconds)  # fmt: skip
        return join(line, host, backend="nccl" if backend == "nccl" else "gloo", device=device, seconds=seconds)
    except (PairError, UserError):
        line.close()
        raise


class Sent:
    """The tensors of a version that lies with its sender: `parts`, of which so many are asked for `at_once`.

    Attributes:
        from_gpu: Whether they come from GPU to GPU, or from one memory of a GPU to another.
    """

    def __init__(self, receiver: Receiver, manifest: WeightsManifest) -> None:
        assert manifest.sender is not None
        self.parts = sent_parts(manifest)
        backend = receiver.backend(manifest.sender)
        self.at_once, self.from_gpu = STREAMS[backend], backend in ("nccl", CUDA_IPC)
        self._ask = partial(receiver.part, manifest)

    def source(self, part: Part, stretch: Stretch) -> "_OfSender":
        """A stretch of a part, which is asked for when this is entered."""
        return _OfSender(self._ask(part.offset + stretch.start, stretch.end - stretch.start))

    def receive_on_gpu(self, part: Part, buffer: torch.Tensor, go_on: Callable[[], None]) -> None:
        """All of a part into memory of the GPU. `go_on` may raise between two blocks."""
        with self._ask(part.offset, part.size) as pair:
            if not (isinstance(pair, DeviceBorrower) or (isinstance(pair, Pair) and pair.backend == "nccl")):
                raise PairError("the sender is reached in another way than a moment ago")
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
