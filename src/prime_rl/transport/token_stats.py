"""Statistics of sampled tokens, from the trainer: `token_stats/step_n` has one Arrow IPC file a rank, one row a sample.
Lists have one entry per token with `loss_mask` set, except the sample's first token, which has no prediction. Nothing
depends on these files: one may be missing, and a step that is trained again replaces its own. They hold log ratios of
the policy to the sampler and not log-probabilities, as half precision is finest near 0."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from prime_rl.transport.commit import step_dir, write_atomically

STATS = ("log_ratios", "entropies")
_SCHEMA = pa.schema([("sample_id", pa.string()), *((name, pa.list_(pa.float16())) for name in STATS)])


def write_token_stats(
    run: Path, step: int, rank: int, sample_ids: Sequence[str], tokens: Sequence[int], values: npt.NDArray[Any]
) -> None:
    """Commit the statistics of a rank's samples, of `tokens` tokens each; `values` [len(STATS), sum(tokens)].
    Raises UserError or OSError if they cannot be written."""
    path = step_dir(run / "token_stats", step) / f"rank_{rank}.arrow"
    offsets = pa.array(np.cumsum([0, *tokens]), pa.int32())
    lists = [pa.ListArray.from_arrays(offsets, pa.array(row.astype(np.float16))) for row in values]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, _SCHEMA) as writer:
        writer.write_table(pa.table([pa.array(sample_ids, pa.string()), *lists], schema=_SCHEMA))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, sink.getvalue().to_pybytes())


def read_token_stats(run: Path, step: int, sample_ids: pa.Array | pa.ChunkedArray | Sequence[str]) -> pa.Table:
    """Return a row for each of `sample_ids`, in this order: `sample_id`, `log_ratios` and `entropies` (lists of half
    precision, in nats). All three are null for a sample that no file has."""
    tables = [_SCHEMA.empty_table()]
    paths = step_dir(run / "token_stats", step).glob("rank_*.arrow")
    # Only ranks above the current count can be left over from an earlier incarnation: the first match is current
    for path in sorted(paths, key=lambda path: (len(path.name), path.name)):
        with suppress(OSError, ValueError), pa.OSFile(str(path)) as file:  # a damaged file counts as missing
            rows = pa.ipc.open_file(file).read_all()
            rows.validate(full=True)
            tables += [rows] if rows.schema.equals(_SCHEMA) else []
    table = pa.concat_tables(tables)
    return table.take(pc.index_in(sample_ids, table["sample_id"]))
