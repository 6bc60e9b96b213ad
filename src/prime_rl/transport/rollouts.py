"""Batches of samples, from the orchestrator to the trainer: one Arrow IPC file a step, one row a sample.

The file is uncompressed, in record batches of a few rows, so that a rank reads only its rows, with `pread`: a memory
map over a file that is pruned on a network file system kills the process. pyarrow, pandas and DuckDB read it as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from prime_rl.transport.commit import CommitError, Manifest, stage, step_dir, verify

FILE = "samples.arrow"
_ROWS_PER_RECORD_BATCH = 8

_FLOATS = pa.list_(pa.float32())
_REQUIRED = {
    **dict.fromkeys(("sample_id", "group_id", "task_id", "env"), pa.string()),
    "policy_versions": pa.list_(pa.int64()),
    "input_ids": pa.list_(pa.int32()),
    "loss_mask": pa.list_(pa.bool_()),
    **dict.fromkeys(("logprobs", "advantages"), _FLOATS),
    "temperature": pa.float32(),
    "reward": pa.float64(),
    "is_truncated": pa.bool_(),
}
_OPTIONAL = dict.fromkeys(("rl_weight", "ce_weight", "ref_kl_weight", "ref_logprobs"), _FLOATS)
SCHEMA = pa.schema([pa.field(*each, nullable=False) for each in _REQUIRED.items()] + list(_OPTIONAL.items()))
# A column that exists only if a sample has experts: for its first N tokens, N ≤ T, the ids that the engine chose in
# each of the model's layers, list<fixed_size_list<uint8 or uint16>[layers · k]>.
EXPERTS = "routed_experts"
_STREAMS = tuple(field.name for field in SCHEMA if pa.types.is_list(field.type) and field.name != "policy_versions")


@dataclass
class Sample:
    """One trainable token sequence of T tokens, and where it came from. Streams are per token, of length T.

    `logprobs` are the sampler's, of the tokens where `loss_mask` is set, 0 elsewhere; `temperature` is the one actually
    used. Streams are numpy arrays once scored or read back. `routed_experts` [N, layers · k] are the first N tokens'.
    """

    sample_id: str
    group_id: str
    task_id: str
    env: str
    policy_versions: Sequence[int]
    input_ids: "Sequence[int] | npt.NDArray[np.integer[Any]]"
    loss_mask: "Sequence[bool] | npt.NDArray[np.bool_]"
    logprobs: "Sequence[float] | npt.NDArray[np.floating[Any]]"
    advantages: "Sequence[float] | npt.NDArray[np.floating[Any]]"
    temperature: float
    reward: float
    is_truncated: bool = False
    rl_weight: "Sequence[float] | npt.NDArray[np.floating[Any]] | None" = None
    ce_weight: "Sequence[float] | npt.NDArray[np.floating[Any]] | None" = None
    ref_kl_weight: "Sequence[float] | npt.NDArray[np.floating[Any]] | None" = None
    ref_logprobs: "Sequence[float] | npt.NDArray[np.floating[Any]] | None" = None
    routed_experts: "npt.NDArray[np.unsignedinteger[Any]] | None" = None


def as_array(values: "Sequence[Any] | npt.NDArray[Any]", dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return `values` as a flat array. A mask may be bytes. Raises TypeError if they are of another kind (floats for
    integers)."""
    array = np.frombuffer(values, dtype=np.uint8) if isinstance(values, bytes) else np.asarray(values)
    casting: Any = "unsafe" if dtype == np.bool_ or not array.size else "same_kind"
    return array.astype(dtype, casting=casting, copy=False)


def write_batch(root: Path, step: int, samples: Sequence[Sample], extra: dict[str, Any] | None = None) -> Path:
    """Commit the samples of one step under `root`.

    The manifest lists the sample ids, and each sample's length and number of loss tokens, so that packing need not
    open the file, and the entries of `extra`. Raises ValueError if a sample's streams do not fit its tokens,
    CommitError if the step is committed already, UserError if the disk is full.
    """
    columns = {field.name: [getattr(sample, field.name) for sample in samples] for field in SCHEMA}
    for name in (*_STREAMS, "policy_versions"):
        dtype = SCHEMA.field(name).type.value_type.to_pandas_dtype()
        columns[name] = [None if values is None else as_array(values, dtype) for values in columns[name]]
    _check_streams(columns)
    index = {
        "samples": columns["sample_id"],
        "lengths": list(map(len, columns["input_ids"])),
        "loss_tokens": [int(np.count_nonzero(mask)) for mask in columns["loss_mask"]],
    }
    record_batch = pa.record_batch(columns, schema=SCHEMA)
    if any(sample.routed_experts is not None for sample in samples):
        record_batch = record_batch.append_column(EXPERTS, _expert_column(samples))
    final = step_dir(root, step)
    with stage(final, step=step, producer="orchestrator", extra=index | (extra or {})) as directory:
        with pa.OSFile(str(directory / FILE), "wb") as sink, pa.ipc.new_file(sink, record_batch.schema) as writer:
            for first in range(0, len(samples), _ROWS_PER_RECORD_BATCH):
                writer.write_batch(record_batch.slice(first, _ROWS_PER_RECORD_BATCH))
    return final


def _expert_column(samples: Sequence[Sample]) -> pa.Array:
    """Raises ValueError: of more tokens than a sample has, or not of one model."""
    rows = [sample.routed_experts for sample in samples]
    kinds = {(part.dtype.str, part.shape[1:]) for part in rows if part is not None}
    if len(kinds) > 1:
        raise ValueError(f"samples have {EXPERTS} of several models: {sorted(kinds)}")
    for sample, part in zip(samples, rows, strict=True):
        if part is not None and len(part) > len(sample.input_ids):
            raise ValueError(f"sample {sample.sample_id}: {EXPERTS} of {len(part)} of {len(sample.input_ids)} tokens")
    present = [part for part in rows if part is not None]
    tokens = pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate(present).reshape(-1)), present[0].shape[1])
    offsets = np.cumsum([0, *(0 if part is None else len(part) for part in rows)], dtype=np.int32)
    absent = pa.array([part is None for part in rows])
    return pa.ListArray.from_arrays(pa.array(offsets), tokens, mask=absent)


def _check_streams(columns: Mapping[str, list[Any]]) -> None:
    """Raise ValueError unless streams have one entry per token; logprobs and advantages: finite, 0 off the mask."""
    lengths = list(map(len, columns["input_ids"]))
    for name in _STREAMS:
        for sample, stream, tokens in zip(columns["sample_id"], columns[name], lengths, strict=True):
            if stream is not None and len(stream) != tokens:
                raise ValueError(f"sample {sample}: {name} has {len(stream)} entries for {tokens} tokens")
    for name in ("logprobs", "advantages"):
        for sample, stream, mask in zip(columns["sample_id"], columns[name], columns["loss_mask"], strict=True):
            if not np.isfinite(stream).all():
                raise ValueError(f"sample {sample}: {name} is not finite")
            if stream[~mask].any():
                raise ValueError(f"sample {sample}: {name} is not zero off the loss mask")


def _value(scalar: pa.Scalar) -> Any:
    """Return a scalar as a Python object, a list as an array (integers as int64)."""
    if not (isinstance(scalar, pa.ListScalar) and scalar.is_valid):
        return scalar.as_py()
    if pa.types.is_fixed_size_list(scalar.values.type):
        width = scalar.values.type.list_size
        return scalar.values.flatten().to_numpy().reshape(-1, width).copy()
    array = scalar.values.to_numpy(zero_copy_only=False)
    return array.astype(np.int64) if array.dtype.kind == "i" else array.copy()


class RolloutBatch:
    """A committed batch. `lengths` [samples], in tokens, come from the manifest; rows are read when asked for."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory, self.manifest, self.step = directory, manifest, manifest.step
        self.lengths = np.asarray(manifest.extra["lengths"], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def columns(self, *names: str) -> dict[str, list[Any]]:
        """Return these columns, with a value for each sample; reads no others."""
        options = pa.ipc.IpcReadOptions(included_fields=[SCHEMA.get_field_index(name) for name in names])
        with pa.OSFile(str(self.directory / FILE)) as file:
            return dict(pa.ipc.open_file(file, options=options).read_all().to_pydict())

    def rows(self, indices: Sequence[int]) -> list[Sample]:
        """Read the samples at `indices`, in that order, their streams as numpy arrays."""
        samples: dict[int, Sample] = {}
        with pa.OSFile(str(self.directory / FILE)) as file:
            reader = pa.ipc.open_file(file)
            names = [*SCHEMA.names, *({EXPERTS} & {*reader.schema.names})]
            for number in sorted({int(i) // _ROWS_PER_RECORD_BATCH for i in indices}):
                record_batch = reader.get_batch(number)
                for row in range(record_batch.num_rows):
                    values = {name: _value(record_batch.column(name)[row]) for name in names}
                    samples[number * _ROWS_PER_RECORD_BATCH + row] = Sample(**values)
        return [samples[int(i)] for i in indices]


def open_batch(directory: Path, *, check_bytes: bool = True) -> RolloutBatch:
    """Open a committed batch. Raises CommitError if it is not committed or its file differs from the manifest. With
    `check_bytes` in the file's hash: one reader per host is enough; the others check the size only."""
    manifest = verify(directory, unhashed=() if check_bytes else (FILE,))
    if FILE not in manifest.files:
        raise CommitError(f"{directory} is committed, but not as a batch: it has no {FILE}")
    return RolloutBatch(directory, manifest)
