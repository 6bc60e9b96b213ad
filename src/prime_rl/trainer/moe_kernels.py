"""Rows of tokens to their places among the experts' rows and back, as Triton kernels that read and write every row once.

`moe.py` has the same in torch, for other devices. Inductor's own gather computes the index anew for each element, and took five times as long as
memory allows. Letters as there: T tokens, K places of each, S = T·K, H columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 2048
"""Columns of a row that a program takes."""


# One program a token and so many columns. There may be more than 2^31 elements: addresses are int64.
@triton.jit
def _spread(
    rows: tl.tensor, places: tl.tensor, out: tl.tensor, H: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(rows + token * H + at, mask=at < H)
    for k in tl.static_range(K):
        place = tl.load(places + token * K + k).to(tl.int64)
        tl.store(out + place * H + at, row, mask=at < H)


@triton.jit
def _collect(
    rows: tl.tensor, places: tl.tensor, out: tl.tensor, H: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for k in tl.static_range(K):
        place = tl.load(places + token * K + k).to(tl.int64)
        total += tl.load(rows + place * H + at, mask=at < H, other=0.0).to(tl.float32)
    tl.store(out + token * H + at, total.to(out.dtype.element_ty), mask=at < H)


def spread(rows_TH: Tensor, place_TK: Tensor) -> Tensor:
    """Each token's row at its K places: [S, H]."""
    out_SH = rows_TH.new_empty(place_TK.numel(), rows_TH.shape[1])
    _launch(_spread, rows_TH, place_TK, out_SH)
    return out_SH


def collect(rows_SH: Tensor, place_TK: Tensor) -> Tensor:
    """The sum of the rows at each token's K places: [T, H], added in float32 in the order of K, and rounded once."""
    out_TH = rows_SH.new_empty(place_TK.shape[0], rows_SH.shape[1])
    _launch(_collect, rows_SH, place_TK, out_TH)
    return out_TH


def _launch(kernel: triton.JITFunction, rows: Tensor, place_TK: Tensor, out: Tensor) -> None:
    assert rows.is_contiguous()
    assert place_TK.is_contiguous()
    (tokens, k), width = place_TK.shape, rows.shape[1]
    with torch.cuda.device(rows.device):
        kernel[tokens, triton.cdiv(width, COLUMNS)](rows, place_TK, out, width, k, COLUMNS)
