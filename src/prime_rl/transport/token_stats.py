"""What the trainer computed of each sampled token, to be looked at: `token_stats/step_n`, one Arrow IPC file a rank.

A row is a sample, its lists have one entry for each token of the loss mask, never for its first token. Nothing depends
on these files: one may be missing, and a step that is trained again replaces its own. They hold the policy's log ratio
to the sampler, not its log-probability: near 0 half precision keeps what differs between the two.
"""

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
    """Commit the samples of a rank, of so many `tokens` each; `values` [stats, all tokens]. Raises UserError or OSError
    if they cannot be written."""
    path = step_dir(run / "token_stats", step) / f"rank_{rank}.arrow"
    offsets = pa.array(np.cumsum([0, *tokens]), pa.int32())
    lists = [pa.ListArray.from_arrays(offsets, pa.array(row.astype(np.float16))) for row in values]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, _SCHEMA) as writer:
        writer.write_table(pa.table([pa.array(sample_ids, pa.string()), *lists], schema=_SCHEMA))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, sink.getvalue().to_pybytes())


def read_token_stats(run: Path, step: int, sample_ids: pa.Array) -> pa.Table:
    """Return the rows of these samples, in this order, with nulls for those that are not there."""
    tables = [_SCHEMA.empty_table()]
    paths = step_dir(run / "token_stats", step).glob("rank_*.arrow")
    # An earlier incarnation may have had more ranks: the first row of a sample is the newest.
    for path in sorted(paths, key=lambda path: (len(path.name), path.name)):
        with suppress(OSError, pa.ArrowInvalid), pa.OSFile(str(path)) as file:  # damaged: as if missing
            tables.append(pa.ipc.open_file(file).read_all())
    table = pa.concat_tables(tables)
    return table.take(pc.index_in(sample_ids, table["sample_id"]))
