"""Two processes that pass bytes through a process group of their own: gloo between hosts' memories, NCCL between GPUs.

The two speak over the line (`line.py`); both make a group of two, and from then on every block of bytes is announced on the line before it goes
through the group. So a sender that has nothing more to give says why in place of a block, the group stays whole, and the end of either process is seen
at once. Every wait has a deadline; a group in which one has passed is not used again.

What goes through the group is neither encrypted nor signed, as everywhere in torch.distributed: what arrives is to be hashed.
"""

import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from prime_rl.transport.line import BLOCK_BYTES, Line, PairError

Backend = Literal["gloo", "nccl"]
T = TypeVar("T")

AHEAD = 2  # blocks under way at the same time
_LOOK_SECONDS = 2e-4  # between two looks at whether a GPU is done
_GRACE_SECONDS = 1.0  # after a deadline of torch's, for it to be heard of
_WATCH_SECONDS = 0.05  # between two looks at whether the other side, which is to come, is still there
# NCCL's own watchdog would end the process, an engine or a training, for a peer that is gone: the deadlines here are what counts.
_NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_NCCL_SECONDS = 1e6  # of NCCL's own deadline: never
_making = threading.Lock()  # bounded: making a group object waits for nobody (NCCL), see `_nccl_group`


class Pair:
    """One side of a group of two: rank 0 sends, rank 1 receives. (`shared.py` has the same for one host.)

    Args:
        device: Where blocks lie while they travel: the CPU for gloo, a GPU for NCCL.
        seconds: That a block may take.
    """

    def __init__(self, line: Line, store: dist.Store, rank: int, backend: Backend, device: torch.device, seconds: float) -> None:  # fmt: skip
        self.line, self.backend, self._device, self._seconds = line, backend, device, seconds
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._chunks: list[Tensor] = []
        self._turn = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._met = backend == "gloo"  # NCCL's two sides meet with the first block
        self._closed = False
        try:
            self._group = _nccl_group(store, rank, device) if backend == "nccl" else watch(line, seconds, lambda: _gloo_group(store, rank, line.here, seconds))  # fmt: skip
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
            self._sent.append((self._begin(lambda: self._group.send([chunk], 1, 0)), chunk))

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
            self._finish(self._begin(lambda: self._group.recv([arriving], 0, 0)), arriving)  # bounded: `_finish`
            if chunk is not None:
                data.copy_(chunk)

    def receive_there(self, data: Tensor, size: int, go_on: Callable[[], None]) -> None:
        """NCCL: fill memory of the GPU `device` with the next blocks, each of `size` bytes but for the last. `go_on` may raise before each.
        Where this raises, `data` may be written to until `close`.

        Raises PairError as `receive` does.
        """
        arriving: deque[tuple[dist.Work, Tensor]] = deque()
        with self._on_device():
            for block in data.split(size) if data.numel() else ():
                go_on()
                self._expect("block", block.numel())
                arriving.append((self._begin(partial(self._group.recv, [block], 0, 0)), block))
                if len(arriving) >= AHEAD:
                    self._finish(*arriving.popleft())
            while arriving:
                self._finish(*arriving.popleft())

    def end(self, count: int) -> None:
        """After the last block: so many bytes were sent, and were what was asked for until they had gone. Raises PairError as `receive` does."""
        self._expect("done", count)

    def close(self) -> None:
        """Not to be used again."""
        self._closed = True
        self.line.close()
        if self._stream is not None:
            with suppress(RuntimeError):  # whatever NCCL finds wrong with what is left
                self._group.abort()

    def _expect(self, what: str, count: int) -> None:
        if (said := self.line.expect(what, self._seconds)) != count:
            raise PairError(f"the sender says {what} {said} where {count} was expected")

    def _begin(self, begin: Callable[[], dist.Work]) -> dist.Work:
        def meet() -> dist.Work:  # in another thread, where another stream is the current one
            with self._on_device():
                begun = begin()
            if self._closed:  # `close` found no communicator yet to abort
                self._group.abort()
            return begun

        try:
            work = begin() if self._met else watch(self.line, self._seconds, meet)
        except RuntimeError as error:
            raise PairError(f"the transfer failed ({_brief(error)})") from error
        self._met = True
        return work

    def _finish(self, work: dist.Work, data: Tensor) -> None:
        """Wait for a block; `data` is kept until then."""
        if self._stream is None:
            # gloo does not always see that the other side is gone, and a wait of its own that has run out ends the group.
            try:
                watch(self.line, self._seconds, partial(self._wait, work, data))
            except RuntimeError as error:
                raise PairError(f"the transfer failed ({_brief(error)})") from error.with_traceback(None)
            except PairError:
                # A wait that has run out ends the group, and with it the one that was left.
                with suppress(RuntimeError):
                    work.wait(timedelta(milliseconds=1))
                raise
            return
        until = time.monotonic() + self._seconds
        while not work.is_completed():  # bounded: by `until`
            if time.monotonic() > until:
                raise PairError(f"the transfer made no progress for {self._seconds:.0f} s")
            if not self.line.is_open():
                raise PairError("the other side has closed the connection")
            time.sleep(_LOOK_SECONDS)
        # It has ended: this raises what NCCL found wrong, if it says so; the hashes see the rest.
        try:
            self._wait(work, data)
        except RuntimeError as error:
            raise PairError(f"the transfer failed within NCCL ({_brief(error)})") from error

    def _wait(self, work: dist.Work, data: Tensor) -> None:
        """Who is left at it holds the group and `data`, which may still be written to."""
        work.wait(timedelta(seconds=self._seconds))

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


def watch(line: Line, seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns: something of torch.distributed's that waits for the other side and does not see its end. Given up, it is left to a thread.

    Args:
        seconds: The deadline of `work` itself, or what stands in for one: it has a moment more to say what is wrong.

    Raises:
        PairError: the other side is gone, or the time has passed.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            done.set_exception(error.with_traceback(None))  # its frames hold what it was at, and `done` holds it

    threading.Thread(target=run, name="pair", daemon=True).start()
    until = time.monotonic() + seconds + _GRACE_SECONDS
    while not wait_for_futures([done], timeout=_WATCH_SECONDS).done:
        if not line.is_open():
            raise PairError("the other side has closed the connection")
        if time.monotonic() > until:
            raise PairError(f"nothing came from the other side within {seconds:.0f} s")
    return done.result(timeout=0)


def accept(line: Line, store: dist.Store, store_port: int, *, backend: Backend, device: torch.device, seconds: float) -> Pair:  # fmt: skip
    """The sender's side of a group with a receiver that was welcomed (`line.welcome`). Raises PairError where there is none within `seconds`."""
    name = secrets.token_hex(16)
    line.tell(seconds, store={"port": store_port, "group": name})
    return Pair(line, dist.PrefixStore(name, store), 0, backend, device, seconds)


def join(line: Line, host: str, *, backend: Backend, device: torch.device, seconds: float) -> Pair:
    """The receiver's side, once it is introduced (`line.introduce`). `device` is the model's. Raises PairError as `accept` does."""
    there = line.expect("store", seconds)
    try:
        port, group, limit = int(there["port"]), str(there["group"]), timedelta(seconds=seconds)
        store = watch(line, seconds, lambda: dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit))  # fmt: skip
    except (KeyError, TypeError, ValueError, RuntimeError) as error:  # the last: whatever the store raises
        raise PairError(f"the sender's store at {host} cannot be used ({_brief(error)})") from error
    place = device if backend == "nccl" else torch.device("cpu")
    return Pair(line, dist.PrefixStore(group, store), 1, backend, place, seconds)


def open_store(host: str, seconds: float) -> tuple[dist.TCPStore, int]:
    """The sender's store, by which the two find each other's place in a group, and its port. It listens at `host` only."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family)
    port = int(listening.getsockname()[1])
    store = dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=seconds), master_listen_fd=listening.detach()
    )  # fmt: skip
    return store, port


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
