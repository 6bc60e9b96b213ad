"""Two processes that pass bytes through a process group of their own: gloo between hosts' memories, NCCL between GPUs.

A *sender* listens, a *receiver* connects. They speak over a TCP connection, the line: the receiver proves that it knows the sender's token, both
make a group of two, and from then on every block of bytes is announced on the line before it goes through the group. So a sender that has nothing
more to give says why in place of a block, the group stays whole, and the end of either process is seen at once. Every wait has a deadline; a group
in which one has passed is not used again.

The token keeps strangers from asking. What goes through the group is neither encrypted nor signed, as everywhere in torch.distributed: what
arrives is to be hashed.
"""

import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Backend = Literal["gloo", "nccl"]

PROTOCOL = 1
BLOCK_BYTES = 16 << 20
AHEAD = 2  # blocks under way at the same time
_LINE_BYTES = 1 << 16
_LOOK_SECONDS = 2e-4  # between two looks at whether a GPU is done
_TCP_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
# NCCL's own watchdog would end the process, an engine or a training, for a peer that is gone: the deadlines here are what counts.
_NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_NCCL_SECONDS = 1e6  # of NCCL's own deadline: never
_making = threading.Lock()  # bounded: making a group object waits for nobody (NCCL), see `_nccl_group`


class PairError(Exception):
    """The other side is gone, silent, or refuses; the message says which, and why."""


class Line:
    """Messages between the two: a JSON object a line."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._read = connection, b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _TCP_KEEPALIVE:  # a host that vanishes says nothing
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    @property
    def here(self) -> str:
        """The address that the other side reaches this one by."""
        return str(self._socket.getsockname()[0])

    def tell(self, seconds: float, **message: object) -> None:
        """Raises PairError where it cannot be sent within so many seconds."""
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(json.dumps(message).encode() + b"\n")  # bounded: by the time-out just set
        except OSError as error:
            raise PairError(f"the other side is gone ({error.strerror or error})") from error

    def hear(self, seconds: float | None) -> dict[str, Any]:
        """The next message. None waits until there is one or the other side is gone, which keep-alive probes find out.

        Raises:
            PairError: there is none in time, or what came is none of ours.
        """
        until = None if seconds is None else time.monotonic() + seconds
        try:
            while b"\n" not in self._read:
                self._socket.settimeout(None if until is None else max(until - time.monotonic(), 1e-3))
                data = self._socket.recv(4096)  # bounded: by the time-out just set, or by the other side's end
                if not data:
                    raise PairError("the other side has closed the connection")
                self._read += data
                if len(self._read) > _LINE_BYTES:
                    raise PairError("the other side does not speak this protocol")
            line, _, self._read = self._read.partition(b"\n")
            message = json.loads(line)
        except TimeoutError as error:
            raise PairError(f"the other side said nothing for {seconds:.0f} s") from error
        except OSError as error:
            raise PairError(f"the other side is gone ({error.strerror or error})") from error
        except (ValueError, RecursionError) as error:
            raise PairError("the other side does not speak this protocol") from error
        if not isinstance(message, dict):
            raise PairError("the other side does not speak this protocol")
        return message

    def is_open(self) -> bool:
        """Whether the other side is there, as far as can be seen at once."""
        look = select.poll()  # not `select`, which knows no descriptors above 1,023
        look.register(self._socket, select.POLLIN)
        if self._read or not look.poll(0):
            return True
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))  # bounded: there is something to be read, or the end
        except OSError:
            return False

    def close(self) -> None:
        with suppress(OSError):  # the other side was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Pair:
    """One side of a group of two: rank 0 sends, rank 1 receives.

    Args:
        device: Where blocks lie while they travel: the CPU for gloo, a GPU for NCCL.
        seconds: That a block may take.
    """

    def __init__(self, line: Line, store: dist.Store, rank: int, backend: Backend, device: torch.device, seconds: float) -> None:  # fmt: skip
        self.line, self._device, self._seconds = line, device, seconds
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._chunks: list[Tensor] = []
        self._turn = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        try:
            self._group = _nccl_group(store, rank, device) if backend == "nccl" else _gloo_group(store, rank, line.here, seconds)  # fmt: skip
        except RuntimeError as error:  # whatever torch.distributed raises
            raise PairError(
                f"no {backend} group with the other side within {seconds:.0f} s ({_brief(error)})"
            ) from error

    def send(self, data: Tensor) -> None:
        """Announce and send a block of bytes, at most `AHEAD` of them before the first has gone. `data` must stay as it is until `flush`."""
        while len(self._sent) >= AHEAD:
            self._finish(*self._sent.popleft())
        self.line.tell(self._seconds, block=data.numel())
        with self._on_device():
            chunk = self._chunk(data.numel())
            if chunk is None:
                chunk = data
            else:
                chunk.copy_(data, non_blocking=True)
            self._sent.append((self._try(lambda: self._group.send([chunk], 1, 0)), chunk))

    def flush(self) -> None:
        """Until all has gone."""
        while self._sent:
            self._finish(*self._sent.popleft())

    def receive(self, block: memoryview) -> None:
        """Fill `block` with the next block, which must be of its size.

        Raises:
            PairError: the sender ends the transfer, with its reason; or it is gone, or silent.
        """
        self._expect("block", len(block))
        data = torch.frombuffer(block, dtype=torch.uint8)
        with self._on_device():
            chunk = self._chunk(len(block))
            arriving = data if chunk is None else chunk
            self._finish(self._try(lambda: self._group.recv([arriving], 0, 0)), arriving)  # bounded: `_finish`
            if chunk is not None:
                data.copy_(chunk)

    def end(self, count: int) -> None:
        """After the last block: so many bytes were sent, and were what was asked for until they had gone. Raises PairError as `receive` does."""
        self._expect("done", count)

    def close(self) -> None:
        """Not to be used again."""
        self.line.close()
        if self._stream is not None:
            with suppress(RuntimeError):  # whatever NCCL finds wrong with what is left
                self._group.abort()

    def _expect(self, what: str, count: int) -> None:
        message = self.line.hear(self._seconds)
        if "error" in message:
            raise PairError(str(message["error"]))
        if message.get(what) != count:
            raise PairError(f"the sender says {message} where {what} {count} was expected")

    def _try(self, begin: Any) -> dist.Work:
        try:
            work: dist.Work = begin()
        except RuntimeError as error:
            raise PairError(f"the transfer failed ({_brief(error)})") from error
        return work

    def _finish(self, work: dist.Work, data: Tensor) -> None:
        """Wait for a block; `data` is kept until then."""
        if self._stream is None:
            try:
                work.wait(timedelta(seconds=self._seconds))
            except RuntimeError as error:
                raise PairError(f"the transfer failed ({_brief(error)})") from error
            return
        until = time.monotonic() + self._seconds
        while not work.is_completed():  # bounded: by `until`
            if time.monotonic() > until:
                raise PairError(f"the transfer made no progress for {self._seconds:.0f} s")
            if not self.line.is_open():
                raise PairError("the other side has closed the connection")
            time.sleep(_LOOK_SECONDS)
        try:
            work.wait(
                timedelta(seconds=self._seconds)
            )  # it has ended: this raises what NCCL found wrong, if it says so; the hashes see the rest
        except RuntimeError as error:
            raise PairError(f"the transfer failed within NCCL ({_brief(error)})") from error

    def _chunk(self, size: int) -> Tensor | None:
        """On a GPU, memory there for one block, by turns."""
        if self._stream is None:
            return None
        if not self._chunks:
            self._chunks = [torch.empty(BLOCK_BYTES, dtype=torch.uint8, device=self._device) for _ in range(AHEAD)]
        self._turn = (self._turn + 1) % AHEAD
        return self._chunks[self._turn][:size]

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """On a stream of its own: not behind what the engine or the training computes."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield


def accept(line: Line, store: dist.Store, store_port: int, *, token: str, backend: Backend, device: torch.device, seconds: float) -> Pair:  # fmt: skip
    """The sender's side of the beginning.

    Raises:
        PairError: the other side does not know the token, cannot use this backend, or is silent.
    """
    challenge, name = secrets.token_hex(16), secrets.token_hex(16)
    line.tell(seconds, protocol=PROTOCOL, challenge=challenge, backend=backend)
    answer = line.hear(seconds)
    if not hmac.compare_digest(str(answer.get("proof")).encode(errors="replace"), _proof(token, challenge).encode()):
        line.tell(seconds, error="the sender does not know this token")
        raise PairError("somebody asked for weights without knowing the token")
    line.tell(seconds, store=store_port, group=name)
    return Pair(line, dist.PrefixStore(name, store), 0, backend, device, seconds)


def connect(host: str, port: int, *, token: str, device: torch.device, seconds: float) -> Pair:
    """The receiver's side of the beginning. `device` is the model's.

    Raises:
        PairError: nobody is there, the sender refuses, or is silent.
    """
    try:
        line = Line(socket.create_connection((host, port), seconds))
    except OSError as error:
        raise PairError(f"no sender of weights answers at {host}:{port} ({error.strerror or error})") from error
    try:
        hello = line.hear(seconds)
        if hello.get("protocol") != PROTOCOL:
            raise PairError(f"what answers at {host}:{port} speaks another protocol ({hello.get('protocol')}, not {PROTOCOL})")  # fmt: skip
        backend = hello.get("backend")
        if backend not in ("gloo", "nccl") or (backend == "nccl" and device.type != "cuda"):
            raise PairError(
                f"the sender uses {backend}, which cannot be used here: set trainer.weights.transport.backend"
            )
        line.tell(seconds, proof=_proof(token, str(hello.get("challenge"))))
        granted = line.hear(seconds)
        if "error" in granted:
            raise PairError(str(granted["error"]))
        limit = timedelta(seconds=seconds)
        store = dist.TCPStore(host, int(granted["store"]), is_master=False, wait_for_workers=False, timeout=limit)
        place = device if backend == "nccl" else torch.device("cpu")
        return Pair(line, dist.PrefixStore(str(granted["group"]), store), 1, backend, place, seconds)
    except (PairError, KeyError, ValueError, RuntimeError) as error:  # the last: whatever the store raises
        line.close()
        if isinstance(error, PairError):
            raise
        raise PairError(f"the sender at {host}:{port} cannot be used ({_brief(error)})") from error


def open_store(host: str, seconds: float) -> tuple[dist.TCPStore, int]:
    """The sender's store, by which the two find each other's place in a group, and its port. It listens at `host` only."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family)
    port = int(listening.getsockname()[1])
    store = dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=seconds), master_listen_fd=listening.detach()
    )  # fmt: skip
    return store, port


def _proof(token: str, challenge: str) -> str:
    return hmac.new(token.encode(), f"receiver {challenge}".encode(), hashlib.sha256).hexdigest()


def _gloo_group(store: dist.Store, rank: int, host: str, seconds: float) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs call it Options, which it is not
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=seconds)
    return dist.ProcessGroupGloo(store, rank, 2, options)


def _nccl_group(store: dist.Store, rank: int, device: torch.device) -> Any:
    """The communicator itself is made with the first block; until then nobody is waited for."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=_NCCL_SECONDS)
    with _making, torch.cuda.device(device):
        before = {name: os.environ.get(name) for name in _NCCL_ENVIRONMENT}
        os.environ.update(_NCCL_ENVIRONMENT)  # read while the group is made, and not told otherwise
        try:
            return dist.ProcessGroupNCCL(store, rank, 2, options)
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def _brief(error: Exception) -> str:
    """The first line of what torch says, without where in its own source that is."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line.partition("] ")[2] if line.startswith("[") and "] " in line else line
