"""Directories of many files are removed side by side; what cannot be removed is left and said, the rest goes."""

import os
import threading
from pathlib import Path

import pytest

from prime_rl.transport import commit
from prime_rl.transport.commit import clean_stages, prune

MANY = 3 * commit._REMOVERS


def make_directory(directory: Path, files: int = MANY) -> Path:
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
    prune(make_directory(tmp_path / "step_1", files))
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


def test_what_cannot_be_removed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One file of many: a warning names its directory, which has lost its name; all other files are gone, and it goes later."""
    unlink = os.unlink

    def refusing(path: "os.PathLike[str] | str", **options: int) -> None:
        if Path(path).name == "007":
            raise PermissionError(1, "Operation not permitted", str(path))
        unlink(path, **options)

    directory = make_directory(tmp_path / "step_1")
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
