"""What a trainer that publishes its weights from memory has: a buffer, its publisher, and a run directory. Tensors are the test's own."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from prime_rl.transport.checksum import checksums
from prime_rl.transport.commit import stage
from prime_rl.transport.exchange import DTYPES, Publisher, layout, shared_buffer, tensor_views
from prime_rl.transport.weights import PublisherAddress, TensorEntry, manifest_extra, version_dir

NAMES = {dtype: name for name, dtype in DTYPES.items()}


class PublishingTrainer:
    """Publishes one version after the other, of at most `size` bytes each.

    Attributes:
        incarnation: Of the versions that follow.
    """

    def __init__(self, root: Path, size: int, timeout: float, *, device: str = "cpu", port: int = 0) -> None:
        self.root, self.incarnation = root, 0
        self.buffer, handle = torch.zeros(size, dtype=torch.uint8), None
        if device != "cpu":
            self.buffer, handle = shared_buffer(size, torch.device(device))
        self.publisher = Publisher(self.buffer, host="127.0.0.1", port=port, timeout=timeout, handle=handle)

    def publish(
        self, version: int, tensors: Mapping[str, torch.Tensor], *, config: Path | None = None, address: PublisherAddress | None = None, spoil: bool = False
    ) -> Path:  # fmt: skip
        """Offer a version, and commit its manifest with a copy of `config`. `spoil`: other bytes than it says."""
        self.publisher.withdraw()
        entries = {name: TensorEntry("", NAMES[tensor.dtype], list(tensor.shape), "") for name, tensor in tensors.items()}  # fmt: skip
        ranges, size = layout(entries)
        buffer = self.buffer[:size].zero_()
        for name, view in tensor_views(buffer, entries):
            view.copy_(tensors[name])
        found = checksums(buffer, ranges)
        if spoil:
            buffer[ranges[next(reversed(ranges))][0]] ^= 1
        if buffer.is_cuda:
            torch.cuda.synchronize()
        address = address or self.publisher.address(fallback=False)
        entries = {name: TensorEntry("", entry.dtype, entry.shape, "", found[name]) for name, entry in entries.items()}
        extra = manifest_extra(version, self.incarnation, entries, publisher=address)
        self.publisher.offer(version, self.incarnation, extra["hash"], size)
        final = version_dir(self.root, version)
        with stage(final, step=version, producer="trainer", extra=extra) as tmp:
            if config is not None:
                shutil.copyfile(config, tmp / "config.json")
        return final

    def close(self) -> None:
        self.publisher.close()
