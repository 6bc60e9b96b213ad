"""What workers print is kept to a size, the newest of it, in order."""

import os
import tempfile
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from prime_rl.envs.output import Log, Output


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(1, 25))
def test_a_log_is_bounded_and_ends_with_the_newest(pieces: list[bytes], limit: int) -> None:
    """Both files within the limit, together a suffix of what was written, and the present one complete."""
    with tempfile.TemporaryDirectory() as directory:
        log = Log(Path(directory) / "deep" / "env.log", limit)
        for piece in pieces:
            log.write(piece)
        now = log.path.read_bytes() if log.path.exists() else b""
        former = log.former.read_bytes() if log.former.exists() else b""
        written = b"".join(pieces)
        assert len(now) <= limit
        assert len(former) <= limit
        assert written.endswith(former + now)
        assert len(former + now) >= min(len(written), limit)


def test_a_later_pool_appends(tmp_path: Path) -> None:
    """A run that goes on keeps what there is, and counts it."""
    Log(tmp_path / "env.log", 10).write(b"12345678")
    Log(tmp_path / "env.log", 10).write(b"abcd")
    assert (tmp_path / "env.log.1").read_bytes() == b"12345678ab"
    assert (tmp_path / "env.log").read_bytes() == b"cd"


def test_the_tail_reaches_into_the_former_log(tmp_path: Path) -> None:
    """Last words are shown also when the log has just been begun anew."""
    log = Log(tmp_path / "env.log", 12)
    log.write(b"first\nsecond\nthird\n")
    assert log.tail(2) == "  | second\n  | third"
    assert Log(tmp_path / "none.log").tail() == ""


def test_a_full_disk_stops_nobody(tmp_path: Path) -> None:
    """What cannot be written is lost."""
    (tmp_path / "file").write_text("")
    Log(tmp_path / "file" / "env.log").write(b"x")


def test_a_pipe_is_emptied_to_its_end(tmp_path: Path) -> None:
    """More than a pipe holds goes through; then it has ended."""
    log = Log(tmp_path / "env.log")
    output = Output(log)
    writer = os.dup(output.writer)
    output.begin()
    for number in range(200):
        os.write(writer, b"%04d" % number * 10_000)
    assert not output.ended
    os.close(writer)
    begin = time.monotonic()
    while not output.ended and time.monotonic() - begin < 60:
        time.sleep(0.01)
    assert output.ended
    assert log.path.stat().st_size == 200 * 40_000
