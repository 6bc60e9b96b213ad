"""A trainer that lends servers on its GPU what it sends. The GPU's memory is another process's, as nobody can borrow from himself."""

import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from prime_rl.transport.device_memory import DeviceCopy

from support.sending import SendingTrainer


class LendingTrainer(SendingTrainer):
    """Attributes: `owner`, the process that the memory on the GPU belongs to, and how that is `described`."""

    def __init__(self, root: Path, size: int, timeout: float, device: str, backends: Sequence[str]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._line, there = spawn.Pipe()
        self.owner = spawn.Process(target=_own, args=(there, 2 * size, device), daemon=True)
        self.owner.start()
        there.close()
        self._seconds = timeout
        self.described: dict[str, int | str] = self._ask(None)
        super().__init__(root, size, timeout, backends=backends, device=device, lent=lambda _: self.described)

    def staged(self, start: int, size: int) -> None:
        self._ask((f"/proc/{os.getpid()}/fd/{self.memory}", start, size))

    def close(self) -> None:
        super().close()
        self.owner.kill()
        self.owner.join(self._seconds)

    def _ask(self, what: Any) -> Any:
        self._line.send(what)
        assert self._line.poll(self._seconds), "the owner of the GPU's memory says nothing"
        return self._line.recv()


def _own(line: Connection, size: int, device: str) -> None:
    """In the process: copy what it is told to from a file to the GPU."""
    copy = DeviceCopy(size, torch.device(device))
    while True:  # ends with the other side
        asked = line.recv()
        if asked is not None:
            path, start, count = asked
            with open(path, "rb") as file:
                file.seek(start)
                copy.tensor[start : start + count].copy_(
                    torch.frombuffer(bytearray(file.read(count)), dtype=torch.uint8)
                )
            torch.cuda.synchronize()
        line.send(copy.described)
