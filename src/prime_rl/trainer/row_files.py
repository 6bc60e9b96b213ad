"""Writing rows of weights into many files side by side, and hashing them.

Beside a GPU a process of its own does it, which sees the memory that the weights are copied into. The loop hands the GPU operator after operator and
needs the interpreter for each; threads that write thousands of tensors would keep taking it away: with 16 of them forward and backward of the
experts' row of `benchmarks/README.md` took 1,083 ms instead of 814. On a CPU threads do.

Imports neither torch nor anything that does: the process starts in a moment.
"""

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
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import xxhash

from prime_rl.errors import UserError

THREADS = 16  # at most
_BLOCK = 1 << 24  # bytes read at once

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


def threads_here() -> int:
    """Threads for this rank: as many as it has cores, some of which the loop and its data need."""
    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
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

    def write(file: str) -> dict[str, str]:
        path, hashes = os.fspath(directory / file), {}
        try:
            descriptor = os.open(path, os.O_WRONLY)
            try:
                for row in files[file]:
                    arrived(row.start + row.size)
                    data = buffer[row.start : row.start + row.size]
                    _pwrite(descriptor, data, row.offset)
                    if hashing:
                        hashes[row.tensor] = xxhash.xxh3_128(data).hexdigest()
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from error
        return hashes

    return _joined(_side_by_side(write, list(files)))


def hash_ranges(directory: Path, ranges: Sequence[Range]) -> dict[str, str]:
    """The hashes of tensors as they lie there."""

    def hash_one(one: Range) -> dict[str, str]:
        digest = xxhash.xxh3_128()
        with open(directory / one.file, "rb") as file:
            for offset in range(one.start, one.start + one.size, _BLOCK):
                digest.update(os.pread(file.fileno(), min(_BLOCK, one.start + one.size - offset), offset))
        return {one.tensor: digest.hexdigest()}

    return _joined(_side_by_side(hash_one, ranges))


def _joined(parts: Iterable[dict[str, str]]) -> dict[str, str]:
    return dict(chain.from_iterable(part.items() for part in parts))


def _side_by_side(work: Callable[[T], dict[str, str]], items: Sequence[T]) -> list[dict[str, str]]:
    at_once = min(threads_here(), len(items))
    if at_once < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(at_once, thread_name_prefix="export") as threads:  # bounded: by the disk, as one would be
        return list(threads.map(work, items))


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

    def start(self) -> "subprocess.Popen[bytes]":
        """Have it running; it need not be called."""
        if self._process is None:
            command = [sys.executable, "-m", __name__, str(self._memory), str(self._size)]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=[self._memory])
        return self._process

    def write_rows(
        self,
        directory: Path,
        files: Mapping[str, Sequence[Row]],
        arrivals: Callable[[], Iterator[int]],
        hashing: bool,
    ) -> dict[str, str]:
        """As the function above. `arrivals` waits for what is copied into the memory, and yields up to where it is there."""
        return self._call({"write": dict(files), "directory": str(directory), "hashing": hashing}, arrivals)

    def hash_ranges(self, directory: Path, ranges: Sequence[Range]) -> dict[str, str]:
        """As the function above."""
        return self._call({"hash": ranges, "directory": str(directory)}, lambda: iter(()))

    def close(self) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()  # bounded: it is killed
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):  # what it was not told is lost
                    pipe.close()

    def _call(self, order: dict[str, Any], arrivals: Callable[[], Iterator[int]]) -> dict[str, str]:
        answer = self._ask(order, arrivals) or self._ask(order, arrivals)  # somebody may have killed it: once more
        if answer is None:
            raise UserError(
                "the process that writes the weights was killed twice: nothing of this version is committed"
            )
        if "hashes" in answer:
            return answer["hashes"]
        raise OSError(*answer["error"])

    def _ask(self, order: dict[str, Any], arrivals: Callable[[], Iterator[int]]) -> dict[str, Any] | None:
        """Its answer; None where it ended instead."""
        process = self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _tell(process.stdin, order)
            for end in arrivals():
                _tell(process.stdin, end)
            answer = process.stdout.readline()  # bounded: by the disk, and by whoever waits for this version
        except BrokenPipeError:
            answer = b""
        if not answer.endswith(b"\n"):
            self.close()
            return None
        return json.loads(answer)


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


def _serve(memory: int, size: int) -> None:
    """Carry out one order after the other. The process ends as soon as nobody can give any."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes: it is the trainer that decides what is still written
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.excepthook = _end
    buffer = memoryview(mmap.mmap(memory, size, prot=mmap.PROT_READ))
    arrivals = _Arrivals()
    for line in sys.stdin.buffer:
        message = json.loads(line)
        if isinstance(message, int):
            arrivals.set(message)
        else:
            arrivals.set(0)
            threading.Thread(target=_carry_out, args=(message, buffer, arrivals), daemon=True).start()
    os._exit(0)


def _carry_out(order: dict[str, Any], buffer: memoryview, arrivals: _Arrivals) -> None:
    directory = Path(order["directory"])
    answer: dict[str, Any]
    try:
        if "write" in order:
            files = {file: [Row(*row) for row in rows] for file, rows in order["write"].items()}
            hashes = write_rows(buffer, directory, files, arrivals.wait, order["hashing"])
        else:
            hashes = hash_ranges(directory, [Range(*one) for one in order["hash"]])
        answer = {"hashes": hashes}
    except OSError as error:
        answer = {"error": [error.errno, error.strerror, error.filename]}
    _tell(sys.stdout.buffer, answer)


def _end(failure: threading.ExceptHookArgs) -> None:
    """No answer is better than a wait for one."""
    traceback.print_exception(failure.exc_value)
    os._exit(1)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
