"""Memory on a GPU that a process lends to others which use the same GPU (CUDA IPC): what they copy never leaves it.

The words are those of `shared.py`. The memory comes from the driver by itself: what torch's allocator gives out, in segments that can grow, cannot be lent.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from prime_rl.errors import UserError
from prime_rl.transport.line import Line, PairError
from prime_rl.transport.shared import CUDA_IPC as BACKEND
from prime_rl.transport.shared import Borrower, host_id

_HANDLE_BYTES = 64  # CUDA_IPC_HANDLE_SIZE; `runtime` shows a handle by its address only


class DeviceCopy:
    """The lender's memory of so many bytes.

    Attributes:
        tensor: The bytes.
        described: By what a process that uses the same GPU finds them.

    Raises:
        UserError: the GPU has no room for it, or does not lend.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        from cuda.bindings import runtime  # comes with torch for GPUs

        self._device = device
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # a context, if there was none yet
            self._address = _done(
                runtime.cudaMalloc(size), f"{size / 2**30:.2f} GiB of the GPU for the weights that servers read there"
            )
            handle = _done(runtime.cudaIpcGetMemHandle(self._address), "a way for others to read the GPU's memory")
        self.tensor = _tensor(self._address, size, device)
        self.described: dict[str, int | str] = {
            "boot": host_id(), "gpu": _uuid(device), "handle": ctypes.string_at(handle.getPtr(), _HANDLE_BYTES).hex(), "size": size,
        }  # fmt: skip

    def close(self) -> None:
        """Give it back. Nobody may be copying into it any more."""
        from cuda.bindings import runtime

        self.tensor = self.tensor[:0]
        with torch.cuda.device(self._device):
            runtime.cudaFree(self._address)


class DeviceMemory:
    """The same as a borrower on `device`, a GPU, sees it."""

    backend = BACKEND

    def __init__(self, described: Any, device: torch.device) -> None:
        self._described, self._device = described, device
        self._address: int | None = None
        self._stream = torch.cuda.Stream(device)

    def open(self) -> bool:
        """Whether it could be had: not where it is another GPU's, or its owner is gone."""
        from cuda.bindings import runtime

        try:
            if not is_of(self._described, self._device):
                return False
            told, self._size = bytes.fromhex(self._described["handle"]), int(self._described["size"])
        except (KeyError, TypeError, ValueError):
            return False
        if len(told) != _HANDLE_BYTES:
            return False
        handle = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(handle.getPtr(), told, _HANDLE_BYTES)
        with torch.cuda.device(self._device):
            failed, address = runtime.cudaIpcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)
            if failed:
                runtime.cudaGetLastError()  # else the next call of torch's raises it
                return False
        self._address = int(address)
        return True

    def fill(self, block: memoryview, at: int) -> None:
        """By way of the host, for who has no room on the GPU."""
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
            with torch.cuda.device(self._device):
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


def is_of(described: Any, device: torch.device) -> bool:
    """Whether `DeviceCopy.described` tells of memory of this GPU."""
    return (
        isinstance(described, Mapping)
        and described.get("boot") == host_id()
        and device.type == "cuda"
        and described.get("gpu") == _uuid(device)
    )


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _done(result: tuple[Any, ...], what: str) -> Any:
    failed, value = result
    if failed:
        from cuda.bindings import runtime

        runtime.cudaGetLastError()
        raise UserError(f"there is not {what}: {failed.name}")
    return value


class _Bytes:
    """What `torch.as_tensor` makes a tensor of, in place."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 2}


def _tensor(address: int, size: int, device: torch.device) -> Tensor:
    return torch.as_tensor(_Bytes(address, size), device=device)
