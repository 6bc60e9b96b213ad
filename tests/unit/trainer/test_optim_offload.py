"""States in host memory: chunks, and the same bits as on the device."""

import pytest
import torch
from torch import nn

from prime_rl.config.trainer import SGD, AdamW, Muon, OptimConfig
from prime_rl.trainer import optim
from prime_rl.trainer.optim import build_optimizer, in_chunks
from support import optim as support


@pytest.mark.parametrize("config", [AdamW(lr=1e-2), SGD(lr=1e-2), Muon(lr=1e-2)], ids=lambda config: config.type)
def test_offload_changes_no_bit(config: OptimConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though chunks end within parameters and there are more of them than places on the device."""
    monkeypatch.setattr(optim, "CHUNK", 1024)
    results = []
    for offload in (False, True):
        model = support.make_toy(48)
        optimizer = build_optimizer(model, config.model_copy(update={"offload": offload}))
        results.append(support.train(model, optimizer, range(5)))
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_chunks_cover_every_element_once() -> None:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 700), (1,), (0, 4), (5000,), (1024,))]
    chunks = in_chunks(parameters, 2048)
    for parameter in parameters:
        ranges = sorted((start, end) for chunk in chunks for owner, start, end in chunk if owner is parameter)
        edges = [0, *(end for _, end in ranges)]
        assert [start for start, _ in ranges] == edges[:-1]
        assert edges[-1] == parameter.numel()
        assert all(start % 1024 == 0 for start, _ in ranges)
    assert len(chunks) == 5
    assert all(sum(end - start for _, start, end in chunk) <= 2048 for chunk in chunks)
