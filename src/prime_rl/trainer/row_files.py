"""Writing rows of weights into many files side by side, or into other memory, and hashing them.

Beside a GPU, and where several ranks put their rows together, a process of its own does it, which sees the memory that the weights are copied into. The loop hands the GPU operator after operator and
needs the interpreter for each; threads that write thousands of tensors would keep taking it away: with 16 of them forward and backward of the
experts' row of `benchmarks/README.md` took 1,083 ms instead of 814. Else threads do.

Imports neither torch nor anything that does: the process starts in a moment.
"""

import errno
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import xxhash

from prime_rl.errors import UserError
from prime_rl.host_memory import local_ranks
from prime_rl.lifeline import wake_without_parent
from prime_rl.transport.delta import delta_file, encode, write_delta
from prime_rl.transport.tensor_hash import chunks, of_tensors, stretches

THREADS = 16  # at most
_BLOCK = 1 << 24  # bytes read at once
_PATIENCE = 5.0  # seconds for a killed process to end

T = TypeVar("T")
Arrived = Callable[[int], object]
"""Waits until the buffer holds what it is to hold up to this byte."""


class Row(NamedTuple):
    """Rows of a tensor: where they are in the buffer, how many bytes, and where they belong in the file."""

    tensor: str
    start: int
    size: int
    offset: int


class Range(NamedTuple):
    """The bytes of a whole tensor in a file."""

    tensor: str
    file: str
    start: int
    size: int


class NotHeld(Exception):
    """The rows that changes are to be told of are not in memory (any more)."""


class Holding(NamedTuple):
    """What is to be remembered of rows that are written, so that the next ones can be told by what has changed.

    Attributes:
        rows: Names the rows that are written now.
        since: Names those that are remembered, to write no more than what has changed since (None: write them in full).
        word_bytes: Of the tensors' type.
    """

    rows: str
    since: str | None
    word_bytes: int


class Held:
    """The rows that were written last, a copy of the part of the buffer where they lie, and their name. One writer at a time."""

    def __init__(self) -> None:
        self.rows: str | None = None
        self._bytes = np.empty(0, np.uint8)

    @contextmanager
    def exchange(self, holding: Holding, size: int) -> Iterator["np.ndarray[Any, np.dtype[np.uint8]]"]:
        """The bytes of those that are held, to be replaced by those that are written. What fails between leaves nothing held.

        Raises:
            NotHeld: they are not `holding.since`.
        """
        if holding.since is not None and holding.since != self.rows:
            raise NotHeld(holding.since)
        self.rows = None
        if len(self._bytes) != size:
            self._bytes = np.empty(size, np.uint8)
        yield self._bytes
        self.rows = holding.rows


def threads_here() -> int:
    """Threads for this rank: as many as it has cores, some of which the loop and its data need."""
    cores = (os.cpu_count() or 1) // local_ranks()
    return min(max(cores - 4, 2), THREADS)


def write_rows(
    buffer: memoryview, directory: Path, files: Mapping[str, Sequence[Row]], arrived: Arrived, hashing: bool
) -> dict[str, str]:
    """Write rows into files that are there already, in the order of `files`, and have them on the disk.

    Returns:
        With `hashing` the hash of each tensor's rows.

    Raises:
        OSError: with the path of the file.
    """

    def write(file: str) -> None:
        path = os.fspath(directory / file)
        try:
            descriptor = os.open(path, os.O_WRONLY)
            try:
                for row in files[file]:
                    arrived(row.start + row.size)
                    _pwrite(descriptor, buffer[row.start : row.start + row.size], row.offset)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from error

    rows = [row for of_file in files.values() for row in of_file] if hashing else []
    return _hash_beside([partial(write, file) for file in files], buffer, rows, arrived)


def write_held_rows(
    buffer: memoryview, directory: Path, files: Mapping[str, Sequence[Row]], arrived: Arrived, held: Held, how: Holding
) -> dict[str, str]:
    """As `write_rows`, with hashes, of whole tensors; or, where `how` says since when, write files of changes. Then these rows are held.

    Raises:
        NotHeld: nothing is written.
        OSError: with the path of the file.
    """
    first = min((row.start for rows in files.values() for row in rows), default=0)
    end = max((row.start + row.size for rows in files.values() for row in rows), default=0)
    with held.exchange(how, end - first) as before:
        if how.since is None:
            hashes = write_rows(buffer, directory, files, arrived, hashing=True)
            before[:] = np.frombuffer(buffer[first:end], np.uint8)
            return hashes

        def write(file: str) -> None:
            told = {}
            for row in files[file]:
                arrived(row.start + row.size)
                data = np.frombuffer(buffer[row.start : row.start + row.size], np.uint8)
                place = before[row.start - first : row.start - first + row.size]
                told[row.tensor] = encode(place, data, how.word_bytes)
                place[:] = data
            path = directory / delta_file(file)
            try:
                write_delta(path, told)
            except OSError as error:
                raise OSError(error.errno, error.strerror, os.fspath(path)) from error

        rows = [row for of_file in files.values() for row in of_file]
        return _hash_beside([partial(write, file) for file in files], buffer, rows, arrived)


def copy_rows(buffer: memoryview, into: memoryview, rows: Sequence[Row], arrived: Arrived) -> None:
    """Copy each tensor's rows to its `offset` there. Through a mapping: of those who write to one file the kernel lets one in at a time."""

    def copy_one(row: Row) -> None:
        arrived(row.start + row.size)
        there = np.frombuffer(into[row.offset : row.offset + row.size], np.uint8)
        np.copyto(there, np.frombuffer(buffer[row.start : row.start + row.size], np.uint8))

    _side_by_side([partial(copy_one, row) for row in rows])


def hash_rows(buffer: memoryview, rows: Sequence[Row], arrived: Arrived) -> dict[str, str]:
    """The hash of each tensor's rows as they lie in the buffer, which nobody writes."""
    return _hash_beside([], buffer, rows, arrived)


def hash_ranges(directory: Path, ranges: Sequence[Range]) -> dict[str, str]:
    """The hashes of tensors as they lie there."""

    def hash_chunk(one: Range, first: int, last: int) -> list[bytes]:
        digest = xxhash.xxh3_128()
        with open(directory / one.file, "rb") as file:
            at, end = one.start + first, one.start + last
            while at < end:
                data = os.pread(file.fileno(), min(_BLOCK, end - at), at)
                if not data:
                    raise OSError(errno.EIO, f"it ends at byte {at} of {end}", os.fspath(directory / one.file))
                digest.update(data)
                at += len(data)
        return [digest.digest()]

    tasks = [partial(hash_chunk, one, *chunk) for one in ranges for chunk in chunks(one.size)]
    return _hashes(ranges, _side_by_side(tasks))


def joined(parts: Iterable[dict[str, str]]) -> dict[str, str]:
    """All of them as one."""
    return dict(chain.from_iterable(part.items() for part in parts))


def _hash_beside(
    writing: Sequence[Callable[[], None]], buffer: memoryview, rows: Sequence[Row], arrived: Arrived
) -> dict[str, str]:
    """The rows' hashes, which other threads make than those that write them: of those who write to one file the kernel lets one in at a time."""

    def hash_chunks(first: int, last: int) -> list[bytes]:
        digests = []
        for start, end in pieces[first:last]:
            arrived(end)
            digests.append(xxhash.xxh3_128_digest(buffer[start:end]))
        return digests

    pieces = [(row.start + start, row.start + end) for row in rows for start, end in chunks(row.size)]
    tasks: list[Callable[[], list[bytes] | None]] = [*writing]
    tasks += [partial(hash_chunks, *stretch) for stretch in stretches([end - start for start, end in pieces])]
    return _hashes(rows, [digests for digests in _side_by_side(tasks) if digests is not None])


def _hashes(tensors: Sequence[Row | Range], digests: Iterable[list[bytes]]) -> dict[str, str]:
    """The tensors' hashes from those of their chunks."""
    hashes = of_tensors((tensor.size for tensor in tensors), chain.from_iterable(digests))
    return {tensor.tensor: value for tensor, value in zip(tensors, hashes, strict=True)}


def _side_by_side(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """They are begun in their order."""
    at_once = min(threads_here(), len(tasks))
    if at_once < 2:
        return [task() for task in tasks]
    with ThreadPoolExecutor(at_once, thread_name_prefix="export") as threads:  # bounded: by the disk, as one would be
        return list(threads.map(lambda task: task(), tasks))


def _pwrite(descriptor: int, data: memoryview, offset: int) -> None:
    while data:  # one call writes at most 2 GiB
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


# ---- in a process of its own


class WriterProcess:
    """A process that writes and hashes out of shared memory. It ends with this one, however this one ends.

    Args:
        memory: A file descriptor of the memory (`os.memfd_create`), of `size` bytes.
    """

    def __init__(self, memory: int, size: int) -> None:
        self._memory, self._size = memory, size
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: BinaryIO | None = None
        self._orders = 0
        self._closed = False
        self._ends: list[str] = []  # how those ended that were not asked to

    def start(self) -> "subprocess.Popen[bytes]":
        """Have it running; it need not be called.

        Raises:
            UserError: no process can be started.
        """
        if self._process is None:
            answers, answering = os.pipe()  # no standard output: whatever is imported may print there
            # -P: modules of the working directory are none of its own.
            command = [sys.executable, "-P", "-m", __name__, str(self._memory), str(self._size), str(answering)]
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, pass_fds=[self._memory, answering], env=_environment()
                )
            except OSError as error:
                os.close(answers)
                raise UserError(f"no process that writes the weights can be started ({error.strerror})") from error
            finally:
                os.close(answering)
            self._answers = os.fdopen(answers, "rb")
        return self._process

    def write_rows(
        self,
        directory: Path,
        files: Mapping[str, Sequence[Row]],
        arrivals: Callable[[], Iterator[int]],
        hashing: bool,
        *,
        first: int = 0,
        how: Holding | None = None,
    ) -> dict[str, str]:
        """As the functions above. `arrivals` waits for what is copied into the memory, and yields up to where it is there.

        Args:
            first: The byte of the memory at which the buffer begins.
            how: What is held of the rows, by the process, while it lives.

        Raises:
            NotHeld, OSError: as above.
            UserError: the process ended, and so did the one that took its place.
        """
        order = {"write": dict(files), "first": first, "directory": str(directory), "hashing": hashing, "how": how}
        return self._call(order, arrivals)

    def copy_rows(
        self, memory: str, size: int, rows: Sequence[Row], arrivals: Callable[[], Iterator[int]], *, first: int = 0
    ) -> None:
        """As the function above, into other memory of that size, which can be opened by this path, and as `write_rows`."""
        self._call({"copy": rows, "first": first, "directory": "", "memory": memory, "size": size}, arrivals)

    def hash_rows(
        self, rows: Sequence[Row], arrivals: Callable[[], Iterator[int]], *, first: int = 0
    ) -> dict[str, str]:
        """As the function above, and as `write_rows`."""
        return self._call({"rows": rows, "first": first, "directory": ""}, arrivals)

    def hash_ranges(self, directory: Path, ranges: Sequence[Range]) -> dict[str, str]:
        """As the function above, and as `write_rows`."""
        return self._call({"hash": ranges, "directory": str(directory)}, lambda: iter(()))

    def abandon(self) -> None:
        """End it for good, whatever it is at and whoever waits for its answer: there will be none."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """The same where nobody waits, and give back what it was spoken to with."""
        self.abandon()
        if self._process is not None:
            self._give_up()

    def _call(self, order: dict[str, Any], arrivals: Callable[[], Iterator[int]]) -> dict[str, str]:
        answer = self._ask(order, arrivals) or self._ask(order, arrivals)  # somebody may have killed it: once more
        if answer is None:
            ends = " and ".join(self._ends[-2:]) or "given up"
            raise UserError(
                f"the process that writes the weights has ended ({ends}): nothing of this version is committed"
            )
        if "hashes" in answer:
            return answer["hashes"]
        if "unheld" in answer:
            raise NotHeld(answer["unheld"])
        raise OSError(*answer["error"])

    def _ask(self, order: dict[str, Any], arrivals: Callable[[], Iterator[int]]) -> dict[str, Any] | None:
        """Its answer; None where it ended instead, or was abandoned."""
        if self._closed:
            return None
        process = self.start()
        assert process.stdin is not None
        assert self._answers is not None
        self._orders += 1
        answer = b""
        try:
            with suppress(BrokenPipeError):
                _tell(process.stdin, {"order": self._orders, **order})
                for end in arrivals():
                    _tell(process.stdin, end)
                answer = self._answers.readline()  # `abandon` ends the process, and this wait with it
        finally:
            # Anything but an answer, or what stopped the arrivals: it may still be at this order, and must not go on with it.
            if not answer.endswith(b"\n"):
                self._give_up()
        if not answer.endswith(b"\n"):
            return None
        found = json.loads(answer)
        assert found.pop("order") == self._orders, "an answer to another order"
        return found

    def _give_up(self) -> None:
        """End the process, so that the next order starts another."""
        process, self._process = self._process, None
        assert process is not None
        assert process.stdin is not None
        assert self._answers is not None
        process.kill()
        with suppress(BrokenPipeError):  # what it was not told is lost
            process.stdin.close()
        self._answers.close()
        with suppress(subprocess.TimeoutExpired):  # one that waits for a dead disk ends when that answers
            status = process.wait(_PATIENCE)
            self._ends.append(f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}")


def _environment() -> dict[str, str]:
    """This process's. What of it is imported must be what is running here, wherever that was found."""
    package = str(Path(__file__).parents[2])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))}


def _tell(pipe: Any, message: object) -> None:
    pipe.write(json.dumps(message).encode() + b"\n")
    pipe.flush()


class _Arrivals:
    """How far the memory is filled."""

    def __init__(self) -> None:
        self._end, self._changed = 0, threading.Condition()

    def set(self, end: int) -> None:
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def wait(self, end: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._end >= end)


def _serve(memory: int, size: int, answering: int) -> None:
    """Carry out one order after the other. The process ends as soon as nobody can give any."""
    wake_without_parent()  # one that is stopped could not see that
    # Ctrl-C reaches all processes: it is the trainer that decides what is still written.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.excepthook = _end
    buffer = memoryview(mmap.mmap(memory, size, prot=mmap.PROT_READ))
    arrivals, answers, held, others = _Arrivals(), os.fdopen(answering, "wb"), Held(), _Others()
    for line in sys.stdin.buffer:
        message = json.loads(line)
        if isinstance(message, int):
            arrivals.set(message)
        else:
            arrivals.set(0)
            threading.Thread(
                target=_carry_out, args=(message, buffer, arrivals, answers, held, others), daemon=True
            ).start()
    os._exit(0)


class _Others:
    """Other memory, mapped once: touching it for the first time costs as much as copying."""

    def __init__(self) -> None:
        self._mapped: dict[str, memoryview] = {}

    def open(self, path: str, size: int) -> memoryview:
        if path not in self._mapped:
            with open(path, "r+b", buffering=0) as file:
                self._mapped[path] = memoryview(mmap.mmap(file.fileno(), size))
        return self._mapped[path]


def _carry_out(
    order: dict[str, Any], buffer: memoryview, arrivals: _Arrivals, answers: BinaryIO, held: Held, others: _Others
) -> None:
    directory = Path(order["directory"])
    answer: dict[str, Any]
    try:
        if "write" in order:
            files = {file: [Row(*row) for row in rows] for file, rows in order["write"].items()}
            rows = buffer[order["first"] :]
            if order.get("how") is None:
                hashes = write_rows(rows, directory, files, arrivals.wait, order["hashing"])
            else:
                hashes = write_held_rows(rows, directory, files, arrivals.wait, held, Holding(*order["how"]))
        elif "copy" in order:
            into = others.open(order["memory"], order["size"])
            copy_rows(buffer[order["first"] :], into, [Row(*row) for row in order["copy"]], arrivals.wait)
            hashes = {}
        elif "rows" in order:
            hashes = hash_rows(buffer[order["first"] :], [Row(*row) for row in order["rows"]], arrivals.wait)
        else:
            hashes = hash_ranges(directory, [Range(*one) for one in order["hash"]])
        answer = {"hashes": hashes}
    except NotHeld as error:
        answer = {"unheld": str(error)}
    except OSError as error:
        answer = {"error": [error.errno, error.strerror, error.filename]}
    _tell(answers, {"order": order["order"], **answer})


def _end(failure: threading.ExceptHookArgs) -> None:
    """No answer is better than a wait for one."""
    traceback.print_exception(failure.exc_value)
    os._exit(1)


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
