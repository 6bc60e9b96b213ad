"""Batches of samples, from the orchestrator to the trainer: one Arrow IPC file a step, one row a sample.

The file is written uncompressed in record batches of a few rows, so that a rank reads only its own rows, with `pread`: a memory map over a
file that is pruned on a network file system kills the process. pyarrow, pandas and DuckDB read it as it is.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from prime_rl.transport.commit import CommitError, Manifest, read_manifest, stage, verify

FILE = "samples.arrow"
_ROWS_PER_BATCH = 8

_FLOATS = pa.list_(pa.float32())
SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("task_id", pa.string(), nullable=False),
        pa.field("env", pa.string(), nullable=False),
        pa.field("policy_versions", pa.list_(pa.int64()), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("logprobs", _FLOATS, nullable=False),
        pa.field("advantages", _FLOATS, nullable=False),
        pa.field("temperature", pa.float32(), nullable=False),
        pa.field("reward", pa.float64(), nullable=False),
        pa.field("is_truncated", pa.bool_(), nullable=False),
        pa.field("rl_weight", _FLOATS),
        pa.field("ce_weight", _FLOATS),
        pa.field("ref_kl_weight", _FLOATS),
        pa.field("ref_logprobs", _FLOATS),
    ]
)
_STREAMS = ("loss_mask", "logprobs", "advantages")
_OPTIONAL_STREAMS = ("rl_weight", "ce_weight", "ref_kl_weight", "ref_logprobs")
_DTYPES = {"input_ids": np.int64, "loss_mask": np.bool_, "policy_versions": np.int64}
_WRITTEN = {
    "policy_versions": np.int64,
    "input_ids": np.int32,
    "loss_mask": np.bool_,
}  # in the file; other streams are float32
_CODES = {np.dtype(kind): kind for kind in "iqfd"}


@dataclass
class Sample:
    """One trainable token sequence of T tokens with its lineage. Streams are per token, of length T.

    `logprobs` are the sampler's, of the tokens where `loss_mask` is set, 0 elsewhere; `temperature` is the one actually used.
    Scored by the orchestrator, or read back from a batch, the streams are numpy arrays.
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

    def check(self) -> None:
        """Raise `ValueError` unless every stream has one entry per token and off-mask entries are zero."""
        _Columns([self])


def as_array(values: "Sequence[Any] | npt.NDArray[Any]", dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """`values` as a flat array, of a mask in bytes too. A list of Python numbers is read by `struct` or `bytes`, ten times as fast as by numpy.

    Raises:
        ValueError: a number of a list is too large, or of another kind (a float for an integer).
        TypeError: an array is of another kind.
    """
    wanted = np.dtype(dtype)
    if isinstance(values, bytes):
        values = np.frombuffer(values, dtype=np.uint8)
    if not isinstance(values, list):
        found = np.asarray(values)
        return found.astype(
            wanted, casting="unsafe" if wanted == np.bool_ or not found.size else "same_kind", copy=False
        )
    if wanted == np.bool_:
        try:
            return np.frombuffer(bytes(values), dtype=np.uint8) != 0
        except (TypeError, ValueError):  # numpy's booleans
            return np.asarray(values, dtype=np.bool_)
    try:
        return np.frombuffer(struct.pack(f"{len(values)}{_CODES[wanted]}", *values), dtype=wanted)
    except (struct.error, OverflowError, TypeError) as error:
        raise ValueError(f"a list of {len(values)} numbers does not fit {wanted}: {error}") from error


def step_dir(root: Path, step: int) -> Path:
    """The final place of step `step`'s batch under the rollouts root."""
    return root / f"step_{step}"


def write_batch(
    root: Path,
    step: int,
    samples: Sequence[Sample],
    extra: dict[str, Any] | None = None,
    environments: Sequence[str] = (),
) -> Path:
    """Commit the samples of one step under `root`.

    The manifest lists the sample ids, each sample's length and loss-token count, so that packing needs no look into the file, and the environments.

    Args:
        extra: What else the manifest says.
        environments: Names of those that the run trains on, in the same order in every step, whether this step has samples of them or not.

    Raises:
        ValueError: a sample's streams do not fit its tokens.
        CommitError: the step is committed already.
        UserError: the disk is full.
    """
    columns = _Columns(samples)
    index = {
        "samples": [sample.sample_id for sample in samples],
        "lengths": columns.lengths.tolist(),
        "loss_tokens": columns.loss_tokens().tolist(),
        "environments": [*environments, *sorted({sample.env for sample in samples}.difference(environments))],
    }
    final = step_dir(root, step)
    with stage(final, step=step, producer="orchestrator", extra=index | (extra or {})) as directory:
        with pa.OSFile(str(directory / FILE), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
            for first in range(0, len(samples), _ROWS_PER_BATCH):
                writer.write_batch(columns.rows(first, first + _ROWS_PER_BATCH))
    return final


class _Columns:
    """The samples of a batch, column by column: each stream is one flat array, checked and handed to Arrow without a Python object per token.

    Raises:
        ValueError: a sample's streams do not fit its tokens.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples
        self.lengths = np.array([len(sample.input_ids) for sample in samples], dtype=np.int64)
        for name in _STREAMS + _OPTIONAL_STREAMS:
            self._check_lengths(name)
        self.ends = {name: self._ends(name) for name in ("policy_versions", "input_ids")}
        self.flat = {name: self._flat(name) for name in ("policy_versions", "input_ids", *_STREAMS)}
        for name in ("logprobs", "advantages"):
            self._check_values(name)

    def loss_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens on the mask of each sample, shape [samples]."""
        return np.diff(np.concatenate([[0], np.cumsum(self.flat["loss_mask"])])[self.ends["input_ids"]])

    def rows(self, first: int, last: int) -> pa.RecordBatch:
        """The record batch of samples `first` … `last` - 1, or to the end."""
        chosen = self.samples[first:last]
        return pa.record_batch([self._column(field, first, chosen) for field in SCHEMA], schema=SCHEMA)

    def _column(self, field: pa.Field, first: int, chosen: Sequence[Sample]) -> pa.Array:
        values = [getattr(sample, field.name) for sample in chosen]
        if field.name in self.flat:
            ends = self.ends.get(field.name, self.ends["input_ids"])[first : first + len(chosen) + 1]
            return _lists(field.type, ends - ends[0], self.flat[field.name][ends[0] : ends[-1]])
        if field.name in _OPTIONAL_STREAMS:
            arrays = [np.empty(0, np.float32) if value is None else as_array(value, np.float32) for value in values]
            ends = np.cumsum([0, *map(len, arrays)])
            return _lists(field.type, ends, np.concatenate(arrays), np.array([value is not None for value in values]))
        if pa.types.is_string(field.type):
            texts = [value.encode() for value in values]
            ends = np.cumsum([0, *map(len, texts)]).astype(np.int32)
            return pa.Array.from_buffers(
                field.type, len(texts), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(texts))]
            )
        return _numbers(field.type, np.array(values, dtype=field.type.to_pandas_dtype()))

    def _ends(self, name: str) -> npt.NDArray[np.int64]:
        """Where each sample's entries end in the flat stream, after a 0, shape [samples + 1]."""
        return np.cumsum([0, *(len(getattr(sample, name)) for sample in self.samples)], dtype=np.int64)

    def _flat(self, name: str) -> npt.NDArray[Any]:
        dtype = _WRITTEN.get(name, np.float32)
        return np.concatenate(
            [np.empty(0, dtype), *(as_array(getattr(sample, name), dtype) for sample in self.samples)]
        )

    def _check_lengths(self, name: str) -> None:
        for sample, tokens in zip(self.samples, self.lengths, strict=True):
            stream = getattr(sample, name)
            if stream is not None and len(stream) != tokens:
                raise ValueError(f"sample {sample.sample_id}: {name} has {len(stream)} entries for {tokens} tokens")

    def _check_values(self, name: str) -> None:
        values = self.flat[name]
        if not (finite := np.isfinite(values)).all():
            raise ValueError(f"sample {self._owner(~finite)}: {name} is not finite")
        if (stray := (values != 0) & ~self.flat["loss_mask"]).any():
            raise ValueError(f"sample {self._owner(stray)}: {name} is not zero off the loss mask")

    def _owner(self, wrong: npt.NDArray[np.bool_]) -> str:
        """The sample that the first wrong token belongs to."""
        row = int(np.searchsorted(self.ends["input_ids"], int(np.argmax(wrong)), side="right")) - 1
        return self.samples[row].sample_id


# Arrow arrays are made from buffers: `pa.array` would import pandas first, which takes a second and 50 MiB.


def _numbers(kind: pa.DataType, values: npt.NDArray[Any]) -> pa.Array:
    """A flat array without nulls."""
    data = np.packbits(values, bitorder="little") if values.dtype == np.bool_ else np.ascontiguousarray(values)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(data)])


def _lists(
    kind: pa.DataType, ends: npt.NDArray[Any], flat: npt.NDArray[Any], valid: npt.NDArray[np.bool_] | None = None
) -> pa.Array:
    """An array of lists that end at `ends` (after a leading 0) in `flat`; where `valid` is false there is none."""
    nulls = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    buffers = [nulls, pa.py_buffer(ends.astype(np.int32))]
    return pa.Array.from_buffers(kind, len(ends) - 1, buffers, children=[_numbers(kind.value_type, flat)])


class RolloutBatch:
    """A committed batch. Lengths come from the manifest; rows are read when asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest: Manifest = read_manifest(directory)
        file = directory / FILE
        size = self.manifest.files.get(FILE, {}).get("size")
        if size is None or not file.is_file() or file.stat().st_size != size:
            raise CommitError(f"{file} is not what its manifest says")
        self.step = self.manifest.step

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample, shape [samples]."""
        return np.asarray(self.manifest.extra["lengths"], dtype=np.int64)

    @cached_property
    def loss_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens on the loss mask of each sample, shape [samples]."""
        return np.asarray(self.manifest.extra["loss_tokens"], dtype=np.int64)

    @cached_property
    def environments(self) -> list[str]:
        """Names of the run's environments, each once, in the same order in every step; of the samples if the manifest has none."""
        names = self.manifest.extra.get("environments")
        return sorted(set(self._column("env"))) if names is None else list(names)

    def group_ids(self) -> list[str]:
        """Return the group of each sample."""
        return self._column("group_id")

    def _column(self, name: str) -> list[Any]:
        """Read one column, and no other."""
        options = pa.ipc.IpcReadOptions(included_fields=[SCHEMA.get_field_index(name)])
        with self._reader(options) as reader:
            batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
            return [value for batch in batches for value in batch.column(0).to_pylist()]

    @contextmanager
    def _reader(self, options: pa.ipc.IpcReadOptions | None = None) -> Iterator[pa.ipc.RecordBatchFileReader]:
        with open(self.directory / FILE, "rb") as file:
            source = _Pread(file.fileno(), os.fstat(file.fileno()).st_size)
            yield pa.ipc.open_file(source, options=options)

    def rows(self, indices: Sequence[int]) -> list[Sample]:
        """Read the samples at `indices`, in that order, their streams as numpy arrays."""
        wanted = sorted({int(i) // _ROWS_PER_BATCH for i in indices})
        samples: dict[int, Sample] = {}
        with self._reader() as reader:
            for number in wanted:
                first = number * _ROWS_PER_BATCH
                batch = reader.get_batch(number)
                samples |= {first + i: _sample(batch, i) for i in range(batch.num_rows)}
        return [samples[int(i)] for i in indices]


def open_batch(directory: Path, *, check_bytes: bool = True) -> RolloutBatch:
    """Open a committed batch.

    Args:
        check_bytes: Hash the file and compare with the manifest. One reader of a host is enough; the others look at the size only.

    Raises:
        CommitError: it is not committed or its file differs from the manifest.
    """
    if check_bytes:
        verify(directory)
    return RolloutBatch(directory)


def _sample(batch: pa.RecordBatch, row: int) -> Sample:
    values: dict[str, Any] = {}
    for name in SCHEMA.names:
        scalar = batch.column(name)[row]
        if isinstance(scalar, pa.ListScalar) and scalar.is_valid:
            values[name] = _from_arrow(scalar.values, _WRITTEN.get(name, np.float32)).astype(
                _DTYPES.get(name, np.float32)
            )
        else:
            values[name] = scalar.as_py()
    return Sample(**values)


def _from_arrow(values: pa.Array, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A flat array without nulls, as numpy; like the writer's half, without pandas."""
    if not len(values):
        return np.empty(0, dtype)
    data, first, last = values.buffers()[1], values.offset, values.offset + len(values)
    if dtype == np.bool_:
        return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[first:last]
    return np.frombuffer(data, dtype)[first:last]


class _Pread:
    """A read-only file object over `pread`, for pyarrow: no shared position, no memory map."""

    closed = False

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size, self.position = descriptor, size, 0

    def read(self, count: int = -1) -> bytes:
        count = self.size - self.position if count < 0 else count
        data = os.pread(self.descriptor, count, self.position)
        self.position += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size}[whence]
        return self.position

    def tell(self) -> int:
        return self.position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def close(self) -> None:
        """The caller owns the descriptor."""
