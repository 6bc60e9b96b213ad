"""What a trainer that publishes from memory has: a buffer, a publisher, a run directory. Tensors are the test's own."""

import shutil
import time
from collections.abc import Mapping
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from prime_rl.transport import exchange
from prime_rl.transport.commit import stage, step_dir
from prime_rl.transport.exchange import DTYPES, Publisher, Subscriber, checksums, layout, shared_buffer, tensor_views
from prime_rl.transport.weights import PublisherAddress, TensorEntry, WeightsManifest, manifest_extra

SIZE = 2 << 20
SHAPES = {"embed": [500, 300], "empty": [0, 7], "w": [123, 457], "norm": [1001], "scalar": []}
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
        self, version: int, tensors: Mapping[str, torch.Tensor], *, config: Path | None = None,
        address: PublisherAddress | None = None, spoil: bool = False,
    ) -> Path:  # fmt: skip
        """Offer a version, and commit its manifest with a copy of `config`. `spoil`: other bytes than it says."""
        self.publisher.withdraw()
        entries = {name: TensorEntry("", NAMES[x.dtype], list(x.shape), "") for name, x in tensors.items()}
        ranges, size = layout(entries)
        buffer = self.buffer[:size].zero_()
        for name, view in tensor_views(buffer, entries):
            view.copy_(tensors[name])
        found = checksums(buffer, ranges)
        if spoil:
            buffer[ranges[next(reversed(ranges))][0]] ^= 1
        if buffer.is_cuda:
            torch.cuda.synchronize()
        address = address or self.publisher.address()
        entries = {name: TensorEntry("", entry.dtype, entry.shape, "", found[name]) for name, entry in entries.items()}
        extra = manifest_extra(version, self.incarnation, entries, publisher=address)
        self.publisher.offer(version, self.incarnation, extra["hash"], size)
        final = step_dir(self.root, version)
        with stage(final, step=version, producer="trainer", extra=extra) as tmp:
            if config is not None:
                shutil.copyfile(config, tmp / "config.json")
        return final

    def close(self) -> None:
        self.publisher.close()


def tensors(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    dtypes = {"w": torch.bfloat16, "norm": torch.uint8}
    return {
        name: (100 * torch.rand(shape, generator=generator)).to(dtypes.get(name, torch.float32))
        for name, shape in SHAPES.items()
    }


def received(manifest: WeightsManifest) -> dict[str, torch.Tensor]:
    """What a worker on a CPU gets: it has the manifest's checksums."""
    ranges, size = layout(manifest.tensors)
    buffer = torch.zeros(size, dtype=torch.uint8)
    with closing(Subscriber()) as subscriber:
        assert subscriber.receive(manifest, buffer) == "tcp"
    assert checksums(buffer, ranges) == {name: entry.checksum for name, entry in manifest.tensors.items()}
    return dict(tensor_views(buffer, manifest.tensors))


def publish_slowly(root: Path, timeout: float, line: Connection) -> None:
    """Publish, in a process, each version asked for, block by block so slowly that the socket never holds the rest."""
    exchange.TCP_BLOCK_BYTES, send = 51_200, exchange.Channel.send_bytes

    def send_slowly(channel: exchange.Channel, data: memoryview) -> None:
        time.sleep(0.1)
        send(channel, data)

    exchange.Channel.send_bytes = send_slowly  # type: ignore[method-assign]
    trainer = PublishingTrainer(root, SIZE, timeout)
    for version in iter(line.recv, None):
        line.send(trainer.publish(version, tensors(version)))
