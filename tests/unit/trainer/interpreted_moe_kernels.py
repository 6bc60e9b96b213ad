"""Run by `test_kernels.py` with TRITON_INTERPRET=1."""

from contextlib import nullcontext

import pytest
import torch

from prime_rl.trainer import moe, triton_kernels


@pytest.mark.parametrize(("tokens", "k", "width"), [(7, 3, 40), (5, 2, 2048), (4, 8, 2100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spread_and_collect(
    tokens: int, k: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows arrive where torch puts them, bit for bit; sums differ by the order of addition at most, whatever the width."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    torch.manual_seed(0)
    rows = torch.randn(tokens, width).to(dtype)
    place = torch.randperm(tokens * k).to(torch.int32).view(tokens, k)
    there = triton_kernels.spread(rows, place)
    assert torch.equal(there, moe.spread(rows, place))
    other = torch.randn(tokens * k, width).to(dtype)
    torch.testing.assert_close(triton_kernels.collect(other, place), moe.collect(other, place))
