"""Memory on a GPU that a process lends to others which use the same GPU (CUDA IPC): what they copy never leaves it.

The words are those of `shared.py`. The memory comes from the driver by itself: what torch's allocator gives out, in segments that can grow, cannot be lent.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from prime_rl.errors import UserError
from prime_rl.transport.line import Line, PairError
from prime_rl.transport.shared import CUDA_IPC as BACKEND
from prime_rl.transport.shared import Borrower, host_id

_HANDLE_BYTES = 64  # CUDA_IPC_HANDLE_SIZE; `runtime` shows a handle by its address only
_GRANULE = 2 << 20  # bytes that the driver hands out at least: a smaller piece is lent with what lies beside it


class DeviceCopy:
    """The lender's memory of so many bytes. It goes with the process: to free what another one may have open is undefined.

    Attributes:
        tensor: The bytes.
        described: By what a process that uses the same GPU finds them. Its `handle` opens them, to be read and written: only for who is trusted.

    Raises:
        UserError: the GPU has no room for them, or does not lend.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        from cuda.bindings import runtime  # comes with torch for GPUs

        with _on(device):
            torch.cuda.empty_cache()  # what the driver gives out is what torch does not hold
            room = max(-(-size // _GRANULE), 1) * _GRANULE
            gib = f"{room / 2**30:.2f} GiB of the GPU for the weights that servers read there"
            address = _done(runtime.cudaMalloc(room), f"there are no {gib}")
            handle = _done(runtime.cudaIpcGetMemHandle(address), "the GPU's memory cannot be lent")
        self.tensor = _tensor(int(address), size, device)
        opens = ctypes.string_at(handle.getPtr(), _HANDLE_BYTES).hex()
        self.described: dict[str, int | str] = {
            "boot": host_id(),
            "gpu": _uuid(device),
            "size": size,
            "handle": opens,
        }


class DeviceMemory:
    """The same as a borrower on `device`, a GPU, sees it."""

    def __init__(self, size: int, handle: str, device: torch.device) -> None:
        self._size, self._handle, self._device = size, handle, device
        self._address: int | None = None
        self._stream = torch.cuda.Stream(device)

    def open(self) -> str | None:
        """None, or why it cannot be had."""
        from cuda.bindings import runtime

        try:
            told = bytes.fromhex(self._handle)
        except ValueError:
            told = b""
        if len(told) != _HANDLE_BYTES:
            return "what it is opened by is malformed"
        handle = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(handle.getPtr(), told, _HANDLE_BYTES)
        with _on(self._device):
            failed, address = runtime.cudaIpcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)
        if failed:
            return str(failed.name)
        self._address = int(address)
        return None

    @property
    def tensor(self) -> Tensor:
        """The bytes, as long as it is open."""
        assert self._address is not None
        return _tensor(self._address, self._size, self._device)

    def fill(self, block: memoryview, at: int) -> None:
        """By way of the host."""
        self.copy_to(torch.frombuffer(block, dtype=torch.uint8), at)
        self.finish()

    def copy_to(self, data: Tensor, at: int) -> None:
        """Enqueue copying the bytes from `at` on, beside what the engine computes. Raises PairError where there are not so many."""
        if at + data.numel() > self._size:
            raise PairError("the sender's memory ends before what it says")
        assert self._address is not None
        if data.numel():
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                data.copy_(_tensor(self._address + at, data.numel(), self._device), non_blocking=True)

    def finish(self) -> None:
        """Until all is copied."""
        self._stream.synchronize()

    def close(self) -> None:
        address, self._address = self._address, None
        if address is not None:
            from cuda.bindings import runtime

            self.finish()
            with _on(self._device):
                runtime.cudaIpcCloseMemHandle(address)


class DeviceBorrower(Borrower):
    """The receiver's side."""

    backend = BACKEND

    def __init__(self, line: Line, memory: DeviceMemory, seconds: float) -> None:
        super().__init__(line, memory, seconds)
        self._on_device = memory

    def receive_there(self, data: Tensor, size: int, go_on: Callable[[], None]) -> None:
        """Fill memory of the GPU with the next bytes, `size` at a time. `go_on` may raise before each.

        Raises PairError as `receive` does.
        """
        at = self._begin()
        try:
            for block in data.split(size) if data.numel() else ():
                go_on()
                self._on_device.copy_to(block, at)
                at += block.numel()
        finally:
            self._on_device.finish()
        self._has_read(data.numel())


def size_of(described: Any, device: torch.device) -> int | None:
    """How much memory of this very GPU `DeviceCopy.described` tells of; None where it is none of it."""
    if not isinstance(described, Mapping) or described.get("boot") != host_id() or device.type != "cuda":
        return None
    size = described.get("size")
    return size if isinstance(size, int) and described.get("gpu") == _uuid(device) else None


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """For `runtime`, which has an idea of its own of what the device is, beside torch's."""
    from cuda.bindings import runtime

    with torch.cuda.device(device):
        runtime.cudaSetDevice(torch.cuda.current_device())
        yield


def _done(result: tuple[Any, ...], trouble: str) -> Any:
    failed, value = result
    if failed:
        raise UserError(f"{trouble} ({failed.name})")
    return value


class _Bytes:
    """What `torch.as_tensor` makes a tensor of, in place."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 2}


def _tensor(address: int, size: int, device: torch.device) -> Tensor:
    return torch.as_tensor(_Bytes(address, size), device=device)
