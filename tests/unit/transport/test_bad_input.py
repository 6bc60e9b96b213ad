"""A run directory in which others have worked: what is not ours is neither taken for ours nor touched, and what is damaged is one clear error."""

import errno
import json
import os
import struct
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
    wait_for,
    write_atomically,
)
from prime_rl.transport.weights import hash_directory, read_header


def publish(final: Path, step: int) -> Path:
    with stage(final, step=step, producer="test") as path:
        (path / "data").write_text("hello")
    return final


def rewrite(directory: Path, **fields: object) -> None:
    data = json.loads((directory / MANIFEST).read_text()) | fields
    (directory / MANIFEST).write_text(json.dumps(data))


@pytest.mark.parametrize(
    "name",
    ["step_007", "step_-1", "step_+1", "step_1_0", "step_²", "step_٣", "step_", "step_1.5", "Step_1", "step_3.bak"],
)
def test_only_names_that_we_write_are_steps(tmp_path: Path, name: str) -> None:
    """`step_007` would be looked for as `step_7`: a name that does not lead back to itself is not ours."""
    (tmp_path / name).mkdir()
    publish(tmp_path / "step_10", 10)
    assert list_steps(tmp_path) == [10]


def test_files_and_dangling_links_are_no_steps_and_a_link_to_a_directory_is_one(tmp_path: Path) -> None:
    """A checkpoint may be moved to another disk and linked; a file of that name is nothing."""
    root = tmp_path / "checkpoints"
    root.mkdir()
    (root / "step_1").write_text("notes")
    (root / "step_2").symlink_to(tmp_path / "nowhere")
    (root / "step_3").symlink_to(publish(tmp_path / "elsewhere" / "step_3", 3))
    assert list_steps(root) == [3]
    assert verify(root / "step_3").step == 3


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"null",
        b"[]",
        b'"text"',
        b"17",
        b"[" * 100_000,
        b'{"step": 3}',
        b'{"step": 3, "producer": "a", "nonce": "b", "files": null}',
        b'{"step": "3", "producer": "a", "nonce": "b", "files": {}}',
        b'{"step": 3, "producer": "a", "nonce": "b", "files": {"data": null}}',
        b'{"step": 3, "producer": "a", "nonce": "b", "files": {"data": {"size": 5}}}',
        b'{"step": 3, "producer": "a", "nonce": "b", "files": {}, "extra": null}',
        b'{"step": 3, "producer": "a", "nonce": "b", "files": {}, "more": 1}',
    ],
)
def test_a_garbage_manifest_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    """Whatever the bytes, readers see one kind of error with the file's name in it."""
    directory = publish(tmp_path / "step_3", 3)
    (directory / MANIFEST).write_bytes(content)
    with pytest.raises(CommitError, match=r"step_3/manifest\.json cannot be read"):
        verify(directory)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A FIFO whose writer never comes, or a device that never ends, is an error at once, under any name that is read; so is what no memory holds."""
    directory = publish(tmp_path / "step_3", 3)
    (directory / MANIFEST).rename(tmp_path / "whole")
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir):
        for name, read in (
            (MANIFEST, read_manifest),
            ("x.safetensors", hash_directory),
            ("x.safetensors", lambda directory: read_header(directory / "x.safetensors")),
        ):
            make(directory / name)
            with pytest.raises(CommitError, match=f"step_3/{name} cannot be read: it is not a regular file"):
                read(directory)
            (directory / name).rmdir() if make is Path.mkdir else (directory / name).unlink()
    (tmp_path / "whole").rename(directory / MANIFEST)
    os.truncate(directory / MANIFEST, 5 << 29)
    with pytest.raises(CommitError, match=r"step_3/manifest\.json cannot be read: it is longer than 64 MiB"):
        read_manifest(directory)
    (directory / "x.safetensors").write_bytes(struct.pack("<Q", 1 << 30))
    os.truncate(directory / "x.safetensors", 5 << 29)
    with pytest.raises(
        CommitError, match=r"x\.safetensors is not a safetensors file: its header is longer than 100,000,000"
    ):
        hash_directory(directory)


def test_a_snapshot_of_links_is_read(tmp_path: Path) -> None:
    """As in Hugging Face's cache, where the files of a model are links to `../../blobs/<hash>`."""
    blob, snapshot = tmp_path / "blobs" / "0a1b", tmp_path / "snapshots" / "c0ffee"
    header = json.dumps({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    for directory in (blob.parent, snapshot):
        directory.mkdir(parents=True)
    blob.write_bytes(struct.pack("<Q", len(header)) + header + b"abcd")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0a1b")
    assert list(hash_directory(snapshot)) == ["a"]
    assert read_header(snapshot / "model.safetensors")["a"].entry.file == "model.safetensors"


def test_a_newer_format_is_told_from_damage_even_with_unknown_fields(tmp_path: Path) -> None:
    """The way out is another program, not another checkpoint."""
    directory = publish(tmp_path / "step_3", 3)
    rewrite(directory, format=2, unheard="of", files=[])
    with pytest.raises(FormatError, match="has format 2; this version reads format 1"):
        read_manifest(directory)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../outside"])
def test_a_manifest_cannot_point_outside_of_its_directory(tmp_path: Path, name: str) -> None:
    """Names in a manifest are other people's input."""
    directory = publish(tmp_path / "step_3", 3)
    (tmp_path / "outside").write_text("hello")
    rewrite(directory, files={name: {"size": 5, "xxh3": "0"}})
    with pytest.raises(CommitError, match="outside of the directory"):
        verify(directory)


@pytest.mark.parametrize("part", ["", "trainer"])
def test_a_directory_under_another_steps_name_is_refused(tmp_path: Path, part: str) -> None:
    """A copy or a rename by hand would be trained or served as what it is not."""
    publish(tmp_path / "step_7" / part, 7)
    (tmp_path / "step_7").rename(tmp_path / "step_3")
    with pytest.raises(CommitError, match="step_3.* was committed as step 7"):
        verify(tmp_path / "step_3" / part)


def test_a_foreign_directory_is_not_committed(tmp_path: Path) -> None:
    """No manifest, a manifest that is a directory, a file in the directory's place: never a traceback."""
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_2" / MANIFEST).mkdir(parents=True)
    (tmp_path / "step_3").write_text("a file")
    for step, message in ((1, "it has no manifest"), (2, "cannot be read"), (3, "it has no manifest")):
        with pytest.raises(CommitError, match=f"step_{step}.*{message}"):
            read_manifest(tmp_path / f"step_{step}")


def test_a_listed_file_that_is_a_directory_or_a_loop_is_damage(tmp_path: Path) -> None:
    """What cannot be read is named, like what is missing."""
    directory = publish(tmp_path / "step_3", 3)
    (directory / "data").unlink()
    (directory / "data").symlink_to(directory / "data")
    with pytest.raises(CommitError, match="step_3/data cannot be read"):
        verify(directory)
    (directory / "data").unlink()
    (directory / "data").mkdir()
    with pytest.raises(CommitError, match="step_3/data"):
        verify(directory)


def test_a_parent_that_is_no_directory_is_one_clear_error(tmp_path: Path) -> None:
    """`rollouts` as a file: listing, waiting, publishing and small files each say so."""
    (tmp_path / "rollouts").write_text("a file")
    for action in (
        lambda: list_steps(tmp_path / "rollouts"),
        lambda: wait_for(tmp_path / "rollouts" / "step_0", owner="orchestrator", timeout=5),
        lambda: Stage(tmp_path / "rollouts" / "step_0"),
        lambda: write_atomically(tmp_path / "rollouts" / "0.json", b"{}"),
    ):
        with pytest.raises(UserError, match="rollouts"):
            action()


def test_a_directory_that_may_not_be_listed_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taking it for empty would start a run over."""

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(commit.os, "scandir", refuse)
    with pytest.raises(UserError, match="checkpoints cannot be listed .*Permission denied"):
        list_steps(tmp_path / "checkpoints")


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_what_stands_in_the_way_of_a_commit_is_named_and_kept(tmp_path: Path, kind: str) -> None:
    """Foreign things under a final name are neither replaced nor taken for an earlier commit."""
    final = tmp_path / "step_3"
    if kind == "directory":
        final.mkdir()
        (final / "notes").write_text("mine")
    elif kind == "file":
        final.write_text("mine")
    else:
        (tmp_path / "elsewhere").mkdir()
        final.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CommitError, match="step_3 is in the way, and nothing of ours"):
        publish(final, 3)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
    assert (final / "notes").read_text() == "mine" if kind == "directory" else final.exists()


def test_removing_a_link_leaves_what_it_leads_to(tmp_path: Path) -> None:
    """Pruned or left by a dead writer: the link goes, and only the link."""
    kept = publish(tmp_path / "kept" / "step_3", 3)
    root = tmp_path / "weights"
    root.mkdir()
    (root / "step_3").symlink_to(kept)
    (root / ".step_4.old-0").symlink_to(kept)
    prune(root / "step_3")
    clean_stages(root)
    assert list(root.iterdir()) == []
    assert verify(kept).step == 3


def test_what_cannot_be_removed_is_said_and_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pruned directory has lost its name at once; that it still takes room is told."""

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(commit.shutil, "rmtree", refuse)
    prune(publish(tmp_path / "step_3", 3))
    assert list_steps(tmp_path) == []
    assert "cannot be removed" in caplog.text
