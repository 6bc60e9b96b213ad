"""What a trainer that sends its weights has: memory that it shares with a sender, and a run directory. Tensors are the test's own."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from prime_rl.trainer.sender import Offer, Sender

from prime_rl.inference.blocks import DTYPES
from prime_rl.transport.commit import stage
from prime_rl.transport.tensor_hash import hash_tensor
from prime_rl.transport.weights import SenderAddress, TensorEntry, manifest_extra, version_dir

NAMES = {dtype: name for name, dtype in DTYPES.items()}

Files = dict[str, dict[str, torch.Tensor]]


class SendingTrainer:
    """Sends the last two versions of at most `size` bytes each."""

    def __init__(
        self, root: Path, size: int, timeout: float, port: int = 0, backends: Sequence[str] = ("gloo",), device: str = "cpu",
        lent: Callable[[int], Mapping[str, object]] | None = None,
    ) -> None:  # fmt: skip
        self.root, self.size, self.life = root, size, 0
        self.memory = os.memfd_create("test")
        os.ftruncate(self.memory, 2 * size)
        self.sender = Sender(
            self.memory, 2 * size, host="127.0.0.1", port=port, backends=backends, device=device, timeout=timeout,
            lent=None if lent is None else lent(self.memory),
        )  # fmt: skip

    def send(
        self, version: int, files: Files, *, config: Path | None = None, address: SenderAddress | None = None, spoil: bool = False
    ) -> Path:  # fmt: skip
        """Offer a version, and commit what describes it, with a copy of `config`. `spoil`: other bytes than it says."""
        start, at = version % 2 * self.size, 0
        tensors: dict[str, TensorEntry] = {}
        self.sender.retire(start)
        for file, held in files.items():
            for name, tensor in held.items():
                data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
                os.pwrite(self.memory, data, start + at)
                digest = hash_tensor(data)
                tensors[name] = TensorEntry(file, NAMES[tensor.dtype], list(tensor.shape), digest)
                at += len(data)
        assert at <= self.size
        if spoil:
            os.pwrite(self.memory, b"x", start + at - 10)
        self.staged(start, at)
        extra = manifest_extra(version, self.life, tensors, sender=address or self.sender.address)
        self.sender.offer(Offer(version, self.life, extra["hash"], start, at))
        final = version_dir(self.root, version)
        with stage(final, step=version, producer="trainer", extra=extra) as tmp:
            if config is not None:
                (tmp / "config.json").write_bytes(config.read_bytes())
        return final

    def staged(self, start: int, size: int) -> None:
        """All is there, so many bytes."""

    def close(self) -> None:
        self.sender.close()
        os.close(self.memory)
