"""Transfer of versions from the memory of trainer rank 0 to the workers of servers.

The trainer's `Publisher` holds one version, in a buffer on its GPU or host. Each worker's `Subscriber` connects to it
by TCP, gives the run's token, asks for a version, and receives its bytes by the fastest backend of the
two: CUDA IPC on the same GPU, NCCL between two GPUs, else the TCP connection itself. A group is the publisher and one
worker: a server that dies, hangs or joins affects no other.

What travels is neither encrypted nor signed, as in torch.distributed: workers compare checksums with the committed
manifest. Every wait has a deadline, and the death of a peer ends it at once. A connection that failed is not reused.
"""

import ctypes
import errno
import hmac
import json
import math
import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from itertools import accumulate
from operator import mul
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor

from prime_rl.errors import user_errors
from prime_rl.transport.commit import CommitError
from prime_rl.transport.weights import PublisherAddress, TensorEntry, WeightsManifest
from prime_rl.wait import in_thread

DTYPES = {  # by their names in safetensors
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
ALIGNMENT = 512  # bytes: every tensor begins at a multiple, as in torch's own allocator, and is padded with zeros
_COLUMNS = ALIGNMENT // 8
_CHUNK_ROWS = 1 << 17  # 64 MiB multiplied at once: the products take as much again
PROTOCOL = 5
TCP_BLOCK_BYTES = 32 << 20
NCCL_BLOCK_BYTES = 256 << 20
_BLOCKS_IN_FLIGHT = 3  # by NCCL
_CTAS = 4  # multiprocessors for a transfer: 100 GB/s between two H100s, and the engine keeps the other 128
_MESSAGE_BYTES = 1 << 16
_HELLO_SECONDS = 10.0  # from a connection to the token: a stranger who dribbles would keep a thread for ever
_POLL_SECONDS = 1e-3  # between two looks at whether a GPU is done
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
_CLOSED = "the other side has closed the connection"


class ExchangeError(Exception):
    """The other side holds another version, refuses, is silent or dead, as the message says. A retry may succeed."""


def layout(tensors: Mapping[str, TensorEntry]) -> tuple[dict[str, tuple[int, int]], int]:
    """Return the start and size of each tensor in the buffer, and the size of the buffer, in bytes. Raises CommitError
    for a tensor of an unknown type or an impossible shape."""
    ranges, at = {}, 0
    for name, entry in tensors.items():
        if entry.dtype not in DTYPES or any(length < 0 for length in entry.shape):
            raise CommitError(f"tensor {name} of type {entry.dtype} and shape {entry.shape} cannot be loaded")
        size = math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
        ranges[name] = at, size
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return ranges, at


def tensor_views(buffer: Tensor, tensors: Mapping[str, TensorEntry]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor as a view of the buffer, in the order of the manifest."""
    by_dtype = {dtype: buffer.view(DTYPES[dtype]) for dtype in {entry.dtype for entry in tensors.values()}}
    for name, (start, _) in layout(tensors)[0].items():
        entry, typed = tensors[name], by_dtype[tensors[name].dtype]
        strides = [*accumulate(reversed(entry.shape[1:]), mul, initial=1)][::-1] if entry.shape else []
        # One operation a tensor, since a worker shares its interpreter with the engine.
        yield name, typed.as_strided(entry.shape, strides, start // typed.itemsize)


# ---- the connection


class Channel:
    """Lines of JSON and raw bytes over TCP, each with a deadline of `seconds`."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._socket, self._reader, self.seconds = connection, connection.makefile("rb"), seconds
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:  # notices a host that vanishes
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, **message: object) -> None:
        self.send_bytes(memoryview(json.dumps(message).encode() + b"\n"))

    def send_bytes(self, data: memoryview) -> None:
        with self._deadline(self.seconds):
            self._socket.sendall(data)  # bounded: by the time-out just set

    def receive(self, *, no_deadline: bool = False) -> dict[str, Any]:
        """Return the next message. With `no_deadline`, keep-alive probes find out if the other side dies."""
        with self._deadline(None if no_deadline else self.seconds):
            line = self._reader.readline(_MESSAGE_BYTES)
        message = None
        with suppress(ValueError, RecursionError):
            message = json.loads(line)
        if not isinstance(message, dict):
            raise ExchangeError("the other side does not speak this protocol" if line else _CLOSED)
        if "error" in message:
            raise ExchangeError(str(message["error"]))
        return message

    def receive_bytes(self, data: memoryview) -> None:
        """Fill `data`. Some bytes must come within every `seconds`."""
        with self._deadline(self.seconds):
            if self._reader.readinto(data) < len(data):
                raise ExchangeError(_CLOSED)

    @contextmanager
    def _deadline(self, seconds: float | None) -> Iterator[None]:
        try:
            self._socket.settimeout(seconds)
            yield
        except TimeoutError as error:
            raise ExchangeError(f"the other side made no progress for {self.seconds:.0f} s") from error
        except OSError as error:
            raise ExchangeError(f"the other side is gone ({error.strerror or error})") from error

    def is_open(self) -> bool:
        """Whether the other side is connected, without blocking."""
        look = select.poll()  # not `select`, which is limited to descriptors below 1,024
        look.register(self._socket, select.POLLRDHUP)
        return not look.poll(0)

    def cut_off(self) -> None:
        """End the connection, whoever is using it."""
        with suppress(OSError):  # the other side was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut_off()
        self._reader.close()
        self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128)


def own_address() -> str:
    """Return this host's address on its default route, else the loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737: an address that nobody has; nothing is sent, it is only routed
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


# ---- the trainer's side


class Publisher:
    """Sends the version in `buffer` to every worker that asks for it, in a thread per worker.

    Args:
        buffer: uint8 [B] on the trainer's GPU or host. `shared_buffer` makes one that CUDA IPC can share.
        handle: Opens the buffer in other processes on the same GPU (None: not shared).
        timeout: Seconds without progress after which a worker is cut off.
    """

    def __init__(self, buffer: Tensor, *, host: str, port: int, timeout: float, handle: str | None = None) -> None:
        self._buffer, self._handle, self._timeout = buffer, handle, timeout
        self._token = secrets.token_hex(16)
        self._current: tuple[int, int, str, int] | None = None  # version, incarnation, hash and size of what is offered
        self._readers: set[Channel] = set()  # of that version
        self._changed = threading.Condition()  # bounded: held briefly; `wait_for` releases it
        self._host = host
        where = f"weights cannot be published at {host}:{port} (trainer.weights.host and port)"
        with user_errors(where, OSError):
            self._socket = _listen(host, port)
        threading.Thread(target=self._accept, name="publisher", daemon=True).start()

    def address(self) -> PublisherAddress:
        """This publisher, as a version's manifest names it."""
        return PublisherAddress(self._host, self._socket.getsockname()[1], self._token, self._timeout)

    def offer(self, version: int, incarnation: int, digest: str, size: int) -> None:
        """Let workers ask for the version in the buffer, which must not change until `withdraw`."""
        with self._changed:
            self._current = version, incarnation, digest, size

    def withdraw(self) -> None:
        """Return once nobody reads the buffer. Workers that still do after `timeout` seconds are cut off."""
        with self._changed:
            self._current = None
            if not self._changed.wait_for(lambda: not self._readers, timeout=self._timeout):
                logger.warning("{} workers have not read a version in {:.0f} s", len(self._readers), self._timeout)
                for channel in self._readers:
                    channel.cut_off()
                self._readers.clear()

    def close(self) -> None:
        """Accept no more connections. Those that are open end with the process."""
        with self._changed:
            self._current = None
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._socket.close()

    def _accept(self) -> None:
        while True:  # bounded: it ends with the process, or when the socket is closed
            try:
                connection, address = self._socket.accept()  # bounded: as above
            except OSError as error:
                if self._socket.fileno() < 0 or error.errno == errno.EINVAL:  # closed, or about to be
                    return
                logger.warning("no worker can connect at the moment ({})", error.strerror)  # no descriptor is free
                time.sleep(1.0)
                continue
            threading.Thread(target=self._serve, args=(connection, address[0]), name="publish", daemon=True).start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        """Answer one worker until it leaves or something fails. Other workers and the trainer are not affected."""
        group: _NcclGroup | None = None
        try:
            channel = Channel(connection, self._timeout)
            backend, name = self._choose(channel), secrets.token_hex(16)
            store, port = self._store if backend == "nccl" else (None, 0)
            channel.send(protocol=PROTOCOL, backend=backend, handle=self._handle, store=[port, name])
            if store is not None:
                group = _NcclGroup(channel, dist.PrefixStore(name, store), 0, self._buffer.device)
            logger.info("a worker at {} gets weights by {}", address, backend)
            while True:  # ends when the worker closes the connection
                self._answer(channel, group, backend)
        except ExchangeError as error:
            logger.debug("publishing to {}: {}", address, error)
        except (OSError, RuntimeError) as error:  # torch's, of a GPU without memory for a group
            logger.warning("publishing to {}: {}", address, _brief(error))
        finally:
            if group is not None:
                group.abort()
            connection.close()

    def _choose(self, channel: Channel) -> str:
        """Return the fastest backend for a worker that knows the token. NCCL does not connect a GPU with itself."""
        cut_off = threading.Timer(_HELLO_SECONDS, channel.cut_off)
        cut_off.daemon = True
        cut_off.start()
        try:
            hello = channel.receive()
        finally:
            cut_off.cancel()
        if not hmac.compare_digest(str(hello.get("token")).encode(errors="replace"), self._token.encode()):
            channel.send(error="the publisher does not know this token: another run's trainer listens there")
            raise ExchangeError("somebody asked for weights without knowing the token")
        if hello.get("gpu") is None or not self._buffer.is_cuda:
            return "tcp"
        if hello["gpu"] != _uuid(self._buffer.device):
            return "nccl"
        return "cuda-ipc" if self._handle is not None and hello.get("ipc") is True else "tcp"

    @cached_property
    def _store(self) -> tuple[dist.TCPStore, int]:
        """Where the two ranks of a group meet, and its port."""
        listening, limit = _listen(self._host, 0), timedelta(seconds=self._timeout)
        port = int(listening.getsockname()[1])
        store = dist.TCPStore(
            self._host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listening.detach()
        )
        return store, port

    def _answer(self, channel: Channel, group: "_NcclGroup | None", backend: str) -> None:
        """Send the version that a worker asks for next, or say that it is superseded."""
        request = channel.receive(no_deadline=True)
        asked = tuple(request.get(key) for key in ("version", "incarnation", "hash"))
        with self._changed:
            current = self._current
            if match := current is not None and current[:3] == asked:
                self._readers.add(channel)
        if current is None or not match:
            held = "none" if current is None else f"version {current[0]} of incarnation {current[1]}"
            superseded = f"version {asked[0]} of incarnation {asked[1]} is superseded"
            channel.send(superseded=f"{superseded}: the trainer holds {held}")
            return
        size = current[3]
        try:
            channel.send(size=size)
            if backend == "cuda-ipc":
                channel.receive()  # that it has read it
            elif group is not None:
                group.transfer(self._buffer[:size])
            else:
                for block in self._buffer[:size].split(TCP_BLOCK_BYTES):
                    channel.send_bytes(block.cpu().numpy().data)
            with self._changed:
                if channel not in self._readers:
                    raise ExchangeError(f"version {current[0]} was withdrawn meanwhile")
        finally:
            with self._changed:
                self._readers.discard(channel)
                self._changed.notify_all()
        channel.send(done=True)


# ---- the server's side


class Subscriber:
    """Receives versions for one worker of a server. The connection is kept for the next version."""

    def __init__(self) -> None:
        self._channel: Channel | None = None
        self._key: tuple[PublisherAddress, bool] | None = None  # of the connection: for buffers on a GPU or not
        self._group: _NcclGroup | None = None
        self._backend = self._handle = ""

    def receive(self, manifest: WeightsManifest, buffer: Tensor, progress: Callable[[], None] = lambda: None) -> str:
        """Fill `buffer` with a version and return the backend.

        Raises ExchangeError if the publisher holds another version, is unreachable, refuses, or misses its deadline.

        Args:
            buffer: uint8 [B] laid out by `layout`, on a CPU or a GPU; written by work on the current stream, which is
                complete at return.
            progress: Called between blocks; what it raises ends the transfer.
        """
        assert manifest.publisher is not None
        channel, key = self._channel, (manifest.publisher, buffer.is_cuda)
        try:
            if channel is None or self._key != key or not channel.is_open():
                self.close()
                channel = self._connect(manifest.publisher, buffer)
                self._key = key
            channel.send(version=manifest.version, incarnation=manifest.incarnation, hash=manifest.hash)
            answer = channel.receive()
            if "superseded" not in answer:
                if (size := answer.get("size")) != buffer.numel():
                    version = f"{size} bytes of version {manifest.version}"
                    raise ExchangeError(f"the publisher has {version}, not {buffer.numel()}")
                self._fill(channel, buffer, progress)
                channel.receive()  # that it was all
        except BaseException:
            self.close()
            raise
        if "superseded" in answer:  # the connection is still usable
            raise ExchangeError(str(answer["superseded"]))
        return self._backend

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
        if self._channel is not None:
            self._channel.close()
        self._group = self._channel = None

    def _connect(self, address: PublisherAddress, buffer: Tensor) -> Channel:
        host, port = address.host, address.port
        try:
            channel = self._channel = Channel(socket.create_connection((host, port), address.timeout), address.timeout)
        except OSError as error:
            why = error.strerror or error
            raise ExchangeError(
                f"{socket.gethostname()} does not reach the trainer's publisher at {host}:{port} ({why}): "
                'set trainer.weights.host, or trainer.weights.transport to "filesystem"'
            ) from error
        try:
            gpu = _uuid(buffer.device) if buffer.is_cuda else None
            channel.send(token=address.token, gpu=gpu, ipc=not _ipc_failed)
            answer = channel.receive()
            if answer.get("protocol") != PROTOCOL:
                raise ExchangeError(f"what answers at {host}:{port} is not a publisher of this release")
            self._backend, self._handle = str(answer.get("backend")), str(answer.get("handle"))
            if self._backend == "nccl":
                store_port, name = answer["store"]
                limit = timedelta(seconds=address.timeout)
                store = dist.TCPStore(host, int(store_port), is_master=False, wait_for_workers=False, timeout=limit)
                self._group = _NcclGroup(channel, dist.PrefixStore(str(name), store), 1, buffer.device)
        except (RuntimeError, TypeError, ValueError, KeyError) as error:  # torch's, if the store cannot be reached
            raise ExchangeError(f"no group with the publisher at {host}:{port} ({_brief(error)})") from error
        return channel

    def _fill(self, channel: Channel, buffer: Tensor, progress: Callable[[], None]) -> None:
        # A snapshot: a thread for the next version may reconnect while this one still runs.
        backend, group = self._backend, self._group
        if backend == "nccl" and group is None:
            raise ExchangeError(_CLOSED)
        if backend == "cuda-ipc":
            progress()
            with opened(self._handle, buffer.numel(), buffer.device) as shared:
                buffer.copy_(shared)
                torch.cuda.current_stream(buffer.device).synchronize()
            channel.send(read=True)
        elif group is not None:
            group.transfer(buffer, progress)
        else:
            host = torch.empty(TCP_BLOCK_BYTES, dtype=torch.uint8, pin_memory=buffer.is_cuda)
            for block in buffer.split(TCP_BLOCK_BYTES):
                progress()
                received = host[: len(block)]
                channel.receive_bytes(received.numpy().data)
                block.copy_(received)


# ---- NCCL

# NCCL's own watchdog would end the process, an engine or a trainer, if a peer dies: the deadlines here replace it.
_NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
# A group object is created eagerly; NCCL connects on the first block.
_making = threading.Lock()  # bounded: held while a group object is created


class _NcclGroup:
    """A group of two ranks on a stream of its own: rank 0 sends blocks, rank 1 receives them in the same order."""

    def __init__(self, channel: Channel, store: dist.Store, rank: int, device: torch.device) -> None:
        self._channel, self._rank, self._device = channel, rank, device
        self._under_way: deque[tuple[dist.Work, Tensor]] = deque()
        self._stream = torch.cuda.Stream(device)
        self._connected = self._aborted = False
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=1e6)  # never: see `_NCCL_ENVIRONMENT`
        options.config.min_ctas, options.config.max_ctas = 1, _CTAS
        with _making, torch.cuda.device(device):
            before = {name: os.environ.get(name) for name in _NCCL_ENVIRONMENT}
            os.environ.update(_NCCL_ENVIRONMENT)  # read while the group is made; there is no other way to set them
            try:
                self._group: Any = dist.ProcessGroupNCCL(store, rank, 2, options)
            finally:
                for name, value in before.items():
                    os.environ.pop(name, None)
                    if value is not None:
                        os.environ[name] = value

    def transfer(self, buffer: Tensor, progress: Callable[[], None] = lambda: None) -> None:
        """Send or receive a buffer, a few blocks of it at a time. `progress` is called before each."""
        for block in buffer.split(NCCL_BLOCK_BYTES):
            progress()
            while len(self._under_way) >= _BLOCKS_IN_FLIGHT:
                self._finish(*self._under_way.popleft())
            try:
                work = self._begin(block) if self._connected else self._begin_first(block)
            except RuntimeError as error:
                raise ExchangeError(f"NCCL failed ({_brief(error)})") from error
            self._connected = True
            self._under_way.append((work, block))
        while self._under_way:
            self._finish(*self._under_way.popleft())

    def abort(self) -> None:
        self._aborted = True
        with suppress(RuntimeError):  # of unfinished blocks
            self._group.abort()

    def _begin(self, block: Tensor) -> dist.Work:
        begin = self._group.send if self._rank == 0 else self._group.recv
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            work = begin([block], 1 - self._rank, 0)
        if self._aborted:  # `abort` found no communicator yet
            self._group.abort()
        return work

    def _begin_first(self, block: Tensor) -> dist.Work:
        """Begin in a thread that can be abandoned: the first call waits for the peer and does not notice its death."""
        begun = in_thread(lambda: self._begin(block), "nccl")
        self._wait(begun.done, "the other side did not join the NCCL group")
        return begun.result(timeout=0)

    def _finish(self, work: dist.Work, block: Tensor) -> None:
        """Wait for a block, whose memory is kept until then."""
        self._wait(work.is_completed, "the transfer made no progress")
        try:
            work.wait(timedelta(seconds=self._channel.seconds))  # done: raises what NCCL found wrong
        except RuntimeError as error:
            raise ExchangeError(f"the transfer failed within NCCL ({_brief(error)})") from error

    def _wait(self, is_done: Callable[[], bool], failure: str) -> None:
        """Return once it is done. Raises ExchangeError after the deadline, or as soon as the other side is gone."""
        until = time.monotonic() + self._channel.seconds
        while not is_done():  # bounded: by `until`
            if not self._channel.is_open():
                raise ExchangeError(_CLOSED)
            if time.monotonic() > until:
                raise ExchangeError(f"{failure} within {self._channel.seconds:.0f} s")
            time.sleep(_POLL_SECONDS)


def _brief(error: BaseException) -> str:
    """The first line of torch's message, without the place in its own source."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line.partition("] ")[2] if line.startswith("[") and "] " in line else line


# ---- CUDA IPC

_HANDLE_BYTES = 64  # CUDA_IPC_HANDLE_SIZE; the bindings give a handle's address only
_GRANULARITY = 2 << 20  # bytes, of allocations: a handle exports the whole one, neighbours of a small buffer too
_ipc_failed: list[str] = []  # why this process cannot open memory of other processes: it does not try again


def shared_buffer(size: int, device: torch.device) -> tuple[Tensor, str | None]:
    """A buffer on a GPU, for as long as the process lives, and the handle that opens it in others on the same GPU.

    The driver allocates the memory: segments of torch's allocator, which can grow, cannot be shared. If the driver does
    not share memory (in some containers), the handle is None.
    """
    with _current_device(device) as runtime:
        torch.cuda.empty_cache()  # give torch's cached blocks back to the driver
        failed, address = runtime.cudaMalloc(max(-(-size // _GRANULARITY), 1) * _GRANULARITY)
        if failed:
            raise torch.OutOfMemoryError(f"no {size / 2**30:.2f} GiB of the GPU for the published weights")
        failed, handle = runtime.cudaIpcGetMemHandle(address)
    buffer = _tensor(int(address), size, device).zero_()
    return buffer, None if failed else ctypes.string_at(handle.getPtr(), _HANDLE_BYTES).hex()


@contextmanager
def opened(handle: str, size: int, device: torch.device) -> Iterator[Tensor]:
    """Memory that another process on this GPU shares. It is unmapped at once: a mapping outlives a dead trainer."""
    with _current_device(device) as runtime:
        native = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(native.getPtr(), bytes.fromhex(handle).ljust(_HANDLE_BYTES, b"\0"), _HANDLE_BYTES)
        failed, address = runtime.cudaIpcOpenMemHandle(native, runtime.cudaIpcMemLazyEnablePeerAccess)
    if failed:
        _ipc_failed.append(str(failed.name))
        raise ExchangeError(f"the trainer's memory on this GPU cannot be opened ({failed.name}): TCP is taken instead")
    try:
        yield _tensor(int(address), size, device)
    finally:
        with _current_device(device):
            runtime.cudaIpcCloseMemHandle(int(address))


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


@contextmanager
def _current_device(device: torch.device) -> Iterator[Any]:
    """Make a device the current one of torch and of CUDA's bindings, which keep one each. Yields these bindings."""
    from cuda.bindings import runtime  # comes with torch for GPUs

    with torch.cuda.device(device):
        runtime.cudaSetDevice(torch.cuda.current_device())
        yield runtime


def _tensor(address: int, size: int, device: torch.device) -> Tensor:
    """View memory on a GPU as a tensor, in place."""
    interface = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 2}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device)


def checksums(buffer: Tensor, ranges: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """Return a checksum of every tensor in a buffer, as 16 hex digits: the same on every device.

    The words of a tensor (64 bits each) are multiplied by odd numbers that depend on their places, and summed modulo
    2^64. Integers wrap the same way on every device and in every order, so the result is exact. One changed word always
    changes the sum; other damage (exchanged tensors, a missing block) is missed with a probability of about 2^-64. It
    guards against accidents, not against forgery.

    Args:
        buffer: uint8 [B], on any device, with zeros between two tensors.
        ranges: The start of each tensor, a multiple of `ALIGNMENT`, and its size, both in bytes.
    """
    device = buffer.device
    starts = torch.tensor([start // ALIGNMENT for start, _ in ranges.values()], device=device)
    stops = torch.tensor([-(-(start + size) // ALIGNMENT) for start, size in ranges.values()], device=device)
    words = buffer.view(torch.int64).view(-1, _COLUMNS)
    columns = _odd(torch.arange(_COLUMNS, device=device) + 1)
    rows = torch.cat([(chunk * columns).sum(1) for chunk in words.split(_CHUNK_ROWS)])
    place = torch.arange(len(rows), device=device)
    # Counted from the tensor's own beginning, so that its checksum does not depend on what lies before it.
    tensor = (torch.searchsorted(starts, place, right=True) - 1).clamp_(min=0)
    weighted = rows * _odd(_mix(place - starts[tensor] + 1))
    total = torch.cat([weighted.new_zeros(1), weighted.cumsum(0)])
    sums = (total[stops] - total[starts]).tolist()
    return {name: f"{value % (1 << 64):016x}" for name, value in zip(ranges, sums, strict=True)}


def _mix(values: Tensor) -> Tensor:
    """Spread small integers over 64 bits: the finalizer of splitmix64 (Steele, Lea, Flood 2014), with signed shifts."""
    values = values * -7046029254386353131
    values = (values ^ (values >> 30)) * -4658895280553007687
    values = (values ^ (values >> 27)) * -7723592293110705685
    return values ^ (values >> 31)


def _odd(values: Tensor) -> Tensor:
    return _mix(values) | 1
