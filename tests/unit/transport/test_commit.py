"""The commit contract: what has a final name is complete; what is not ours is neither taken for ours nor touched."""

import errno
import json
import os
from pathlib import Path

import pytest

from prime_rl.errors import UserError
from prime_rl.transport import commit
from prime_rl.transport.commit import (
    MANIFEST,
    CommitError,
    FormatError,
    Stage,
    clean_stages,
    list_steps,
    prune,
    read_manifest,
    stage,
    verify,
    write_atomically,
)


def publish(final: Path, text: str = "hello", step: int = 3) -> Path:
    with stage(final, step=step, producer="test", extra={"a": 1}) as path:
        (path / "sub").mkdir()
        (path / "sub" / "data.txt").write_text(text)
    return final


@pytest.fixture
def directory(tmp_path) -> Path:
    return publish(tmp_path / "step_3")


def rewrite(directory: Path, **fields: object) -> None:
    data = json.loads((directory / MANIFEST).read_text()) | fields
    (directory / MANIFEST).write_text(json.dumps(data))


def test_what_is_committed_is_all_or_nothing(tmp_path, directory, monkeypatch):
    """It verifies and names its producer; an exception leaves nothing behind; a second commit of a name is refused and
    the first stays. Several writers share a stage by its nonce, and one commits for all."""
    manifest = verify(directory)
    assert (manifest.step, manifest.producer, manifest.extra) == (3, "test", {"a": 1})
    assert manifest.files["sub/data.txt"]["size"] == 5
    with pytest.raises(RuntimeError), stage(tmp_path / "step_0", step=0, producer="test") as path:  # noqa: PT012
        (path / "half").write_text("x")
        raise RuntimeError
    with pytest.raises(CommitError, match="committed already"):
        publish(directory, "second")
    assert (directory / "sub" / "data.txt").read_text() == "hello"
    assert os.listdir(tmp_path) == ["step_3"]
    first, second = Stage(tmp_path / "step_1", "abc"), Stage(tmp_path / "step_1", "abc")
    (first.path / "a").write_text("a")
    (second.path / "b").write_text("b")
    first.commit(step=1, producer="trainer")
    assert sorted(verify(tmp_path / "step_1").files) == ["a", "b"]


def test_a_rename_that_reports_failure_after_success_is_a_success(tmp_path, monkeypatch):
    """A network file system may retransmit a rename: our own nonce at the destination means that it worked."""
    rename = os.rename

    def stuttering(source, target):
        rename(source, target)
        raise FileNotFoundError(errno.ENOENT, "retransmitted", source)

    monkeypatch.setattr(commit.os, "rename", stuttering)
    verify(publish(tmp_path / "step_3"))


def test_what_stands_in_the_way_of_a_commit_is_named_and_kept(tmp_path):
    (tmp_path / "step_1").mkdir()
    for mine in (tmp_path / "step_1" / "notes", tmp_path / "step_2"):
        mine.write_text("mine")
    for final in (tmp_path / "step_1", tmp_path / "step_2"):
        with pytest.raises(CommitError, match="is in the way, and was not created by this program"):
            publish(final)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["notes", "step_1", "step_2"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_is_full_or_fails_is_one_clear_error_and_commits_nothing(tmp_path, monkeypatch, number):
    """A UserError with the place, the system's own words, and what is safe; an old small file stays."""
    write_atomically(tmp_path / "small", b"old")

    def failing(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(commit.os, "fsync", failing)
    words = rf"cannot be written \({os.strerror(number)}\): nothing was committed"
    for write in (lambda: publish(tmp_path / "step_3"), lambda: write_atomically(tmp_path / "small", b"new")):
        with pytest.raises(UserError, match=words):
            write()
    assert os.listdir(tmp_path) == ["small"]
    assert (tmp_path / "small").read_bytes() == b"old"


def test_a_disk_that_fails_after_the_rename_does_not_call_it_uncommitted(tmp_path, monkeypatch):
    fsync = os.fsync

    def fail_after_rename(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path):
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(commit.os, "fsync", fail_after_rename)
    with pytest.raises(UserError, match="it is committed, but a power cut may undo that"):
        publish(tmp_path / "step_3")
    assert os.listdir(tmp_path) == ["step_3"]
    verify(tmp_path / "step_3")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data.unlink(), "missing"),
        (lambda data: data.write_text("hell"), "4 bytes"),
        (lambda data: data.write_text("jello"), "does not match the manifest"),
        (lambda data: (data.unlink(), data.symlink_to(data)), "data.txt cannot be read"),
        (lambda data: (data.unlink(), data.mkdir()), "data.txt"),
    ],
)
def test_damage_is_found_and_named(directory, damage, message):
    damage(directory / "sub" / "data.txt")
    with pytest.raises(CommitError, match=message):
        verify(directory)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b'{"step": 3}', None])
def test_a_garbage_manifest_is_an_error_that_names_it(directory, content):
    """Bytes, or a directory in its place; no manifest, or a file as the directory, is not a committed directory."""
    (directory / MANIFEST).unlink()
    with pytest.raises(CommitError, match="step_3 is not a committed directory: it has no manifest"):
        read_manifest(directory)
    with pytest.raises(CommitError, match="it has no manifest"):
        read_manifest(directory / "sub" / "data.txt")
    if content is None:
        (directory / MANIFEST).mkdir()
    else:
        (directory / MANIFEST).write_bytes(content)
    with pytest.raises(CommitError, match=r"step_3/manifest\.json cannot be read"):
        verify(directory)


def test_a_manifest_is_of_this_directory_and_of_this_format(tmp_path, directory):
    """A newer format is told from damage even with unknown fields: the way out is another program. No file lies outside
    the directory; a directory under another step's name, a copy or a rename by hand, is refused."""
    (tmp_path / "outside").write_text("hello")
    for name in ("../outside", "/etc/hostname", "a/../../outside"):
        rewrite(directory, files={name: {"size": 5, "xxh3": "0"}})
        with pytest.raises(CommitError, match="outside of the directory"):
            verify(directory)
    rewrite(directory, format=2, unheard="of", files=[])
    with pytest.raises(FormatError, match="has format 2; this version reads format 1"):
        read_manifest(directory)
    for part in ("", "trainer"):
        publish(tmp_path / "step_7" / part, step=7)
        (tmp_path / "step_7").rename(tmp_path / "step_8")
        with pytest.raises(CommitError, match="step_8.* was committed as step 7"):
            verify(tmp_path / "step_8" / part)
        prune(tmp_path / "step_8")


def test_only_directories_under_names_that_we_write_are_steps(tmp_path):
    """`step_007` would be looked for as `step_7`. A link to a directory is a step: it may lie on another disk."""
    names = ["step_007", "step_-1", "step_+1", "step_1_0", "step_²", "step_٣", "step_", "Step_1", "step_3.bak"]
    for name in (*names, ".step_11.tmp-x", "step_10", "step_9"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_1").write_text("notes")
    (tmp_path / "step_2").symlink_to(tmp_path / "nowhere")
    (tmp_path / "step_3").symlink_to(publish(tmp_path / "elsewhere" / "step_3"))
    assert list_steps(tmp_path) == [3, 9, 10]
    assert verify(tmp_path / "step_3").step == 3
    assert list_steps(tmp_path / "missing") == []


def test_a_parent_that_cannot_be_listed_is_not_an_empty_one(tmp_path):
    """Taking it for empty would start a run over."""
    (tmp_path / "rollouts").write_text("a file")
    for action in (
        lambda: list_steps(tmp_path / "rollouts"),
        lambda: Stage(tmp_path / "rollouts" / "step_0"),
        lambda: write_atomically(tmp_path / "rollouts" / "0.json", b"{}"),
    ):
        with pytest.raises(UserError, match="rollouts"):
            action()


def test_removing_leaves_what_links_lead_to_and_what_is_committed(tmp_path):
    directory, outside = tmp_path / "step_1", tmp_path / "outside"
    publish(outside / "step_3")
    (directory / "sub").mkdir(parents=True)
    (directory / "sub" / "data").write_text("x")
    (directory / "link").symlink_to(outside)
    (tmp_path / "step_2").symlink_to(outside / "step_3")
    for removed in (directory, tmp_path / "step_2", tmp_path / "step_2"):  # again: no error
        prune(removed)
    (tmp_path / ".step_4.old-0").symlink_to(outside / "step_3")
    Stage(tmp_path / "step_4")
    clean_stages(tmp_path)
    clean_stages(tmp_path / "missing")
    assert list(tmp_path.iterdir()) == [outside]
    verify(outside / "step_3")
