"""Rows of weights on their way into files."""

import json
import mmap
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import xxhash

from prime_rl.errors import UserError
from prime_rl.trainer.row_files import (
    Held,
    Holding,
    Range,
    Row,
    WriterProcess,
    copy_rows,
    hash_ranges,
    write_held_rows,
    write_rows,
)
from prime_rl.transport.delta import apply_delta

DATA = os.urandom(50_000)
FILES = {"b": [Row("x", 0, 20_000, 100), Row("y", 20_000, 10, 20_100)], "a": [Row("z", 30_000, 20_000, 0)]}
EVERYTHING = 1 << 40


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where the files are, as long as they are to be."""
    for name, size in (("a", 20_000), ("b", 20_110)):
        (tmp_path / name).write_bytes(bytes(size))
    return tmp_path


@pytest.fixture
def writer() -> Iterator[WriterProcess]:
    memory = os.memfd_create("test")
    os.ftruncate(memory, len(DATA))
    with mmap.mmap(memory, len(DATA)) as mapped, closing(WriterProcess(memory, len(DATA))) as made:
        mapped[:] = DATA
        yield made
    os.close(memory)


def check(directory: Path, hashes: dict[str, str]) -> None:
    assert (directory / "a").read_bytes() == DATA[30_000:]
    assert (directory / "b").read_bytes() == bytes(100) + DATA[:20_010]
    assert hashes == {
        row.tensor: xxhash.xxh3_128(DATA[row.start : row.start + row.size]).hexdigest()
        for rows in FILES.values()
        for row in rows
    }


def test_rows_arrive_at_their_places(directory: Path, writer: WriterProcess) -> None:
    """Threads and the process write and hash the same bytes; read back, whole tensors have those hashes."""
    hashes = write_rows(memoryview(DATA), directory, FILES, lambda end: None, hashing=True)
    check(directory, hashes)
    for name, size in (("a", 20_000), ("b", 20_110)):
        (directory / name).write_bytes(bytes(size))
    check(directory, writer.write_rows(directory, FILES, lambda: iter([10, 20_000, EVERYTHING]), hashing=True))
    assert writer.write_rows(directory, FILES, lambda: iter([EVERYTHING]), hashing=False) == {}
    ranges = [Range("x", "b", 100, 20_000), Range("z", "a", 0, 20_000)]
    assert writer.hash_ranges(directory, ranges) == {name: hashes[name] for name in ("x", "z")}


def test_rows_are_copied_to_their_places(writer: WriterProcess) -> None:
    """Into other memory, by threads and by the process: nothing else of it changes."""
    rows = [Row("x", 0, 20_000, 1_000), Row("y", 30_000, 20_000, 25_000), Row("none", 0, 0, 0)]
    expected = bytes(1_000) + DATA[:20_000] + bytes(4_000) + DATA[30_000:]
    other = os.memfd_create("other")
    os.ftruncate(other, len(expected))
    with mmap.mmap(other, len(expected)) as mapped:
        writer.copy_rows(f"/proc/{os.getpid()}/fd/{other}", len(expected), rows, lambda: iter([20_000, EVERYTHING]))
        assert bytes(mapped) == expected
        mapped[:] = bytes(len(expected))
        writer.copy_rows(
            f"/proc/{os.getpid()}/fd/{other}", len(expected), rows, lambda: iter([EVERYTHING])
        )  # once more
        assert bytes(mapped) == expected
    os.close(other)
    threads = bytearray(len(expected))
    copy_rows(memoryview(DATA), memoryview(threads), rows, lambda end: None)
    assert bytes(threads) == expected
    with pytest.raises(FileNotFoundError):
        writer.copy_rows("/proc/self/fd/1000", 10, rows, lambda: iter([EVERYTHING]))


def test_what_is_held_is_no_more_than_where_the_rows_are(directory: Path) -> None:
    """Of several ranks each writes a share of one buffer: all of them together hold it once."""
    files, held = {"a": FILES["a"]}, Held()
    hashes = write_held_rows(memoryview(DATA), directory, files, lambda end: None, held, Holding("first", None, 2))
    assert (directory / "a").read_bytes() == DATA[30_000:]
    assert len(held._bytes) == 20_000
    changed = bytearray(DATA)
    changed[40_000] ^= 1
    told = write_held_rows(memoryview(changed), directory, files, lambda end: None, held, Holding("second", "first", 2))
    assert told == {"z": xxhash.xxh3_128(changed[30_000:]).hexdigest()} != hashes
    before = np.frombuffer(DATA[30_000:], np.uint8).copy()
    apply_delta(directory / "a.delta", before, {"z": (0, 20_000)})
    assert before.tobytes() == changed[30_000:]
    assert (directory / "a.delta").stat().st_size < 200


def test_nothing_is_written_before_it_has_arrived(directory: Path, writer: WriterProcess) -> None:
    """Rows beyond what has arrived stay unwritten until it has."""
    seen = []

    def arrivals() -> Iterator[int]:
        yield 20_000
        deadline = time.monotonic() + 30
        while (directory / "b").read_bytes()[100:20_100] != DATA[:20_000] and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append((directory / "a").read_bytes() == bytes(20_000))
        yield EVERYTHING

    check(directory, writer.write_rows(directory, FILES, arrivals, hashing=True))
    assert seen == [True]


def test_a_killed_process_begins_again(directory: Path, writer: WriterProcess) -> None:
    """The process may be killed at any time: another one writes all of it. Killed once more, the version is given up, and the next one is not."""
    lives = []

    def killing(times: int) -> Iterator[int]:
        process = writer.start()
        if len(lives) < times:
            lives.append(process.pid)
            process.send_signal(signal.SIGKILL)
            process.wait(60)
        yield EVERYTHING

    check(directory, writer.write_rows(directory, FILES, lambda: killing(1), hashing=True))
    with pytest.raises(UserError, match="has ended .killed by SIGKILL and killed by SIGKILL."):
        writer.write_rows(directory, FILES, lambda: killing(3), hashing=True)
    assert len(set(lives)) == 3
    check(directory, writer.write_rows(directory, FILES, lambda: killing(0), hashing=True))


def test_whoever_waits_is_told_when_it_is_abandoned(directory: Path, writer: WriterProcess) -> None:
    """A process that answers no more, stopped by a signal: `abandon` ends the wait for it, and no other takes its place."""
    with ThreadPoolExecutor(1) as thread:
        process = writer.start()
        process.send_signal(signal.SIGSTOP)
        waiting = thread.submit(writer.write_rows, directory, FILES, lambda: iter([EVERYTHING]), True)
        assert not wait([waiting], timeout=0.5).done
        writer.abandon()
        with pytest.raises(UserError, match="killed by SIGKILL"):
            waiting.result(timeout=30)
    assert (directory / "a").read_bytes() == bytes(20_000)


def test_a_given_up_order_is_never_answered(directory: Path, writer: WriterProcess) -> None:
    """What fails while data arrives ends the order: a later one gets the answer to itself, and the first writes nothing any more."""

    def failing() -> Iterator[int]:
        yield 10
        raise RuntimeError("the device is lost")

    with pytest.raises(RuntimeError, match="the device is lost"):
        writer.write_rows(directory, FILES, failing, hashing=True)
    ranges = [Range("x", "b", 0, 20_110)]
    assert writer.hash_ranges(directory, ranges) == {"x": xxhash.xxh3_128(bytes(20_110)).hexdigest()}
    check(directory, writer.write_rows(directory, FILES, lambda: iter([EVERYTHING]), hashing=True))


def test_a_file_that_ends_early(directory: Path, writer: WriterProcess) -> None:
    """Bytes that are not there have no hash."""
    for hashing in (writer.hash_ranges, hash_ranges):
        with pytest.raises(OSError, match="ends at byte 20000 of 20001"):
            hashing(directory, [Range("z", "a", 0, 20_001)])


def test_what_is_imported_may_print_or_fail(
    directory: Path, writer: WriterProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Standard output is not where answers are expected. What fails at start says how it ended; modules of the working directory are not taken."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('hello')")
    (tmp_path / "xxhash.py").write_text("raise ImportError('not this one')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path)
    check(directory, writer.write_rows(directory, FILES, lambda: iter([EVERYTHING]), hashing=True))
    writer.start().kill()
    (tmp_path / "site" / "xxhash.py").write_text("raise ImportError('nor this')")
    with pytest.raises(UserError, match="killed by SIGKILL and exit status 1"):
        writer.write_rows(directory, FILES, lambda: iter([EVERYTHING]), hashing=True)


def test_errors_of_the_disk_come_back(directory: Path, writer: WriterProcess) -> None:
    """What the process cannot write is an OSError here, with the file's path; it goes on serving."""
    (directory / "a").unlink()
    for write in (
        lambda: writer.write_rows(directory, FILES, lambda: iter([EVERYTHING]), hashing=True),
        lambda: write_rows(memoryview(DATA), directory, FILES, lambda end: None, hashing=True),
    ):
        with pytest.raises(FileNotFoundError) as caught:
            write()
        assert caught.value.filename == str(directory / "a")
    (directory / "a").write_bytes(bytes(20_000))
    check(directory, writer.write_rows(directory, FILES, lambda: iter([EVERYTHING]), hashing=True))


def test_the_process_ends_with_its_parent(directory: Path, writer: WriterProcess) -> None:
    """Nobody to give orders: it ends, also while it waits for what never arrives. Signals that a terminal sends to all do not end it."""
    process = writer.start()
    assert process.stdin is not None
    order = {"order": 1, "write": FILES, "first": 0, "directory": str(directory), "hashing": False}
    process.stdin.write(json.dumps(order).encode() + b"\n")
    process.stdin.flush()
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline and not _ignores(process.pid, signal.SIGTERM):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    assert process.poll() is None
    process.stdin.close()
    assert process.wait(60) == 0


def _ignores(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn"))
    return bool(ignored >> (number - 1) & 1)
