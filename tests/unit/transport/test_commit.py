"""The commit contract: under a final name everything is complete; everything else never happened."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from prime_rl.errors import UserError
from prime_rl.transport import commit
from prime_rl.transport.commit import (
    CommitError,
    Stage,
    clean_stages,
    give_up,
    list_steps,
    prune,
    stage,
    verify,
    wait_for,
    write_atomically,
)
from prime_rl.wait import WaitTimeout


def publish(final, text="hello"):
    with stage(final, step=3, producer="test", extra={"a": 1}) as path:
        (path / "sub").mkdir()
        (path / "sub" / "data.txt").write_text(text)
    return final


def test_a_committed_directory_verifies_and_says_who_made_it(tmp_path):
    """Manifest: format, step, producer, nonce, per-file size and hash, extra."""
    manifest = verify(publish(tmp_path / "step_3"))
    assert (manifest.step, manifest.producer, manifest.extra) == (3, "test", {"a": 1})
    assert manifest.files["sub/data.txt"]["size"] == 5
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]


def test_an_exception_leaves_nothing_behind(tmp_path):
    """A writer that fails half-way leaves neither the final name nor its stage."""
    with pytest.raises(RuntimeError), stage(tmp_path / "step_0", step=0, producer="test") as path:  # noqa: PT012
        (path / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_the_final_name_appears_only_after_everything_is_written(tmp_path, monkeypatch):
    """Order of the commit: data and manifest exist in the stage before the rename makes them visible."""
    seen = []
    rename = os.rename

    def watching(source, target):
        seen.append((sorted(os.listdir(source)), os.path.exists(target)))
        rename(source, target)

    monkeypatch.setattr(commit.os, "rename", watching)
    publish(tmp_path / "step_3")
    assert seen == [(["manifest.json", "sub"], False)]


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM, errno.EROFS]
)
def test_a_disk_that_is_full_or_fails_is_one_clear_error_and_commits_nothing(tmp_path, monkeypatch, number):
    """Whatever the file system answers: a UserError with the place, its own words, and what is safe; nothing is left behind."""

    def failing(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(commit.os, "fsync", failing)
    full = number in (errno.ENOSPC, errno.EDQUOT)
    message = (
        "disk full while writing .*step_3" if full else rf"step_3\S* .*{os.strerror(number)}\): nothing was committed"
    )
    with pytest.raises(UserError, match=message):
        publish(tmp_path / "step_3")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("directory", [True, False])
def test_a_disk_that_fails_after_the_rename_is_told_as_such(tmp_path, monkeypatch, directory):
    """What stands under its final name is not said to be uncommitted."""
    fsync = os.fsync

    def failing(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path):
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(commit.os, "fsync", failing)
    with pytest.raises(UserError, match="it is committed, but a power cut may undo that"):
        publish(tmp_path / "step_3") if directory else write_atomically(tmp_path / "step_3", b"x")
    assert os.listdir(tmp_path) == ["step_3"]
    if directory:
        verify(tmp_path / "step_3")


@pytest.mark.parametrize("change", [prune, lambda directory: give_up(directory, 1)], ids=["prune", "give up"])
def test_a_disk_that_fails_while_a_directory_is_renamed_away(tmp_path, monkeypatch, change):
    """It stays, and that is said."""
    directory = publish(tmp_path / "step_3")

    def failing(source, target):
        raise OSError(errno.EIO, "Input/output error", str(source))

    monkeypatch.setattr(commit.os, "rename", failing)
    with pytest.raises(UserError, match=r"fails at .*step_3 \(Input/output error\): it stays as it is"):
        change(directory)
    verify(directory)


@pytest.mark.parametrize(
    "error", [FileNotFoundError, ConnectionResetError, TimeoutError, InterruptedError, BlockingIOError]
)
def test_other_errors_keep_their_meaning(tmp_path, error):
    """A missing file, a lost connection or a wait that expired are nothing that the disk did."""
    number = {
        FileNotFoundError: errno.ENOENT,
        ConnectionResetError: errno.ECONNRESET,
        TimeoutError: errno.ETIMEDOUT,
        InterruptedError: errno.EINTR,
        BlockingIOError: errno.EAGAIN,
    }[error]
    with pytest.raises(error), commit.disk_errors(tmp_path):
        raise OSError(number, os.strerror(number), "somewhere")


def test_a_second_commit_of_the_same_name_is_refused_and_the_first_stays(tmp_path):
    """A step is committed once."""
    publish(tmp_path / "step_3", "first")
    with pytest.raises(CommitError, match="committed already"):
        publish(tmp_path / "step_3", "second")
    assert (tmp_path / "step_3" / "sub" / "data.txt").read_text() == "first"


def test_a_rename_that_reports_failure_after_success_is_a_success(tmp_path, monkeypatch):
    """A network file system may retransmit a rename: our own nonce at the destination means that it worked."""
    rename = os.rename

    def stuttering(source, target):
        rename(source, target)
        raise FileNotFoundError(errno.ENOENT, "retransmitted", source)

    monkeypatch.setattr(commit.os, "rename", stuttering)
    publish(tmp_path / "step_3")
    verify(tmp_path / "step_3")


def test_several_writers_share_a_stage_by_its_nonce(tmp_path):
    """Ranks write into one stage; one of them commits for all."""
    first, second = Stage(tmp_path / "step_1", "abc"), Stage(tmp_path / "step_1", "abc")
    (first.path / "a").write_text("a")
    (second.path / "b").write_text("b")
    assert sorted(first.commit(step=1, producer="trainer").files) == ["a", "b"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "sub/data.txt").unlink(), "missing"),
        (lambda d: (d / "sub/data.txt").write_text("hell"), "4 bytes"),
        (lambda d: (d / "sub/data.txt").write_text("jello"), "other bytes"),
        (lambda d: (d / "manifest.json").write_text("{"), "cannot be read"),
        (lambda d: (d / "manifest.json").unlink(), "no manifest"),
    ],
)
def test_damage_is_found_and_named(tmp_path, damage, message):
    """Readers refuse what is not what the manifest says."""
    directory = publish(tmp_path / "step_3")
    damage(directory)
    with pytest.raises(CommitError, match=message):
        verify(directory)


def test_steps_are_listed_by_number_and_stages_are_ignored(tmp_path):
    """Only committed step directories count."""
    for name in ("step_10", "step_9", ".step_11.tmp-x", "step_x", "other"):
        (tmp_path / name).mkdir()
    assert list_steps(tmp_path) == [9, 10]
    assert list_steps(tmp_path / "missing") == []


def test_clean_removes_dead_stages_and_nothing_else(tmp_path):
    """What a killed writer left is cleaned; committed directories stay."""
    publish(tmp_path / "step_3")
    Stage(tmp_path / "step_4")
    clean_stages(tmp_path)
    assert os.listdir(tmp_path) == ["step_3"]


def test_prune_removes_the_directory_and_tolerates_that_it_is_gone(tmp_path):
    """Pruning twice is no error."""
    directory = publish(tmp_path / "step_3")
    prune(directory)
    prune(directory)
    assert list(tmp_path.iterdir()) == []


def test_a_wait_that_expires_says_what_it_waited_for_and_who_owed_it(tmp_path):
    """Every wait has a subject, an owner and a deadline."""
    with pytest.raises(WaitTimeout, match="no rollouts/step_3 from orchestrator after 0 s"):
        wait_for(tmp_path / "rollouts" / "step_3", owner="orchestrator", timeout=0.0)


def test_a_wait_ends_when_the_directory_is_committed(tmp_path):
    """The waiter sees the rename, and reports its waiting meanwhile."""
    waits = []
    final = tmp_path / "step_3"
    writer = threading.Thread(target=lambda: (time.sleep(0.2), publish(final)))
    writer.start()
    assert wait_for(final, owner="test", timeout=30, poll=0.05, on_wait=waits.append) == final
    writer.join()
    assert waits


def test_a_wait_can_be_stopped(tmp_path):
    """A process that was asked to stop does not sit out its deadline."""
    assert wait_for(tmp_path / "step_3", owner="test", timeout=3600, stop=lambda: True) is None


def test_a_small_file_is_replaced_whole(tmp_path, monkeypatch):
    """A failing replacement leaves the old content and no debris."""
    path = tmp_path / "state.json"
    write_atomically(path, b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(commit.os, "fsync", full)
    with pytest.raises(UserError, match="disk full"):
        write_atomically(path, b"new")
    assert os.listdir(tmp_path) == ["state.json"]
    assert path.read_bytes() == b"old"


MANY = 3 * commit._REMOVERS


def many_files(directory: Path, files: int = MANY) -> Path:
    """Files, a directory with a file, and a link to a file outside."""
    (directory / "sub").mkdir(parents=True)
    for path in (
        *(directory / f"{i:03}" for i in range(files)),
        directory / "sub" / "data",
        directory.parent / "outside",
    ):
        path.write_text("x")
    (directory / "link").symlink_to(directory.parent / "outside")
    return directory


@pytest.mark.parametrize("files", [0, commit._REMOVERS - 2, commit._REMOVERS, MANY])
def test_everything_goes_but_what_links_lead_to(tmp_path: Path, files: int) -> None:
    """However many files there are."""
    prune(many_files(tmp_path / "step_1", files))
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]


def test_many_files_go_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many at once as there are threads for it."""
    together, unlink, gone = threading.Barrier(commit._REMOVERS, timeout=30), Path.unlink, []

    def slow(path: Path, missing_ok: bool = False) -> None:
        together.wait()  # raises where fewer come
        unlink(path, missing_ok)
        gone.append(path.name)

    directory = tmp_path / "step_1"
    directory.mkdir()
    for i in range(2 * commit._REMOVERS):
        (directory / str(i)).write_text("x")
    monkeypatch.setattr(Path, "unlink", slow)
    prune(directory)
    assert len(gone) == 2 * commit._REMOVERS
    assert list(tmp_path.iterdir()) == []


def test_one_of_many_files_that_cannot_be_removed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One file of many: a warning names its directory, which has lost its name; all other files are gone, and it goes later."""
    unlink = os.unlink

    def refusing(path: "os.PathLike[str] | str", **options: int) -> None:
        if Path(path).name == "007":
            raise PermissionError(1, "Operation not permitted", str(path))
        unlink(path, **options)

    directory = many_files(tmp_path / "step_1")
    with monkeypatch.context() as context:
        context.setattr(os, "unlink", refusing)
        prune(directory)
    assert not directory.exists()
    (left,) = (path for path in tmp_path.iterdir() if path.name != "outside")
    assert left.name.startswith(".step_1.old-")
    assert [path.name for path in left.iterdir() if not path.is_dir()] == ["007"]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"{left} cannot be removed" in record.message
    clean_stages(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]
