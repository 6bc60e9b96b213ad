"""The directory that servers register in: whatever stands there, the others are read, and each trouble is named."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from prime_rl.transport.members import Member, member_path, publish, read_members, withdraw

A = Member("http://host-a:8000", "boot-a", "model", "host-a", 1)


def test_a_server_is_read_as_it_was_written_and_takes_the_place_of_its_earlier_incarnation(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "there" / "yet"
    assert read_members(directory) == ([], {})
    publish(directory, A)
    other = replace(A, address="http://[::1]:8000/behind", leaving=True)
    publish(directory, other)
    publish(directory, replace(A, boot="later", beat=1))
    members, troubles = read_members(directory)
    assert sorted(members, key=lambda member: member.address) == [other, replace(A, boot="later")]
    assert not troubles
    assert not [name for name in os.listdir(directory) if name.startswith(".")]


def test_addresses_do_not_share_a_file() -> None:
    names = ["http://a:80", "http://a:800", "http://a:80/x", "http://[::1]:80", "http://[::2]:80"]
    assert len({member_path(Path(), name) for name in names}) == len(names)
    assert all(
        path.parent == Path() for path in (member_path(Path(), f"http://{name}") for name in ("../x:1", "a/../../b"))
    )


def test_a_server_removes_its_own_file_alone(tmp_path: Path) -> None:
    publish(tmp_path, replace(A, boot="later"))
    withdraw(tmp_path, A.address, A.boot)
    assert read_members(tmp_path)[0] == [replace(A, boot="later")]
    withdraw(tmp_path, A.address, "later")
    assert read_members(tmp_path) == ([], {})
    withdraw(tmp_path, A.address, "later")  # somebody has cleaned up


@pytest.mark.parametrize(
    "text",
    [
        "", "{", '{"address": "http://b:1"}', "[]", "null", "[" * 100_000, "\0" * 40,
        json.dumps(asdict(A) | {"beat": "1"}), json.dumps(asdict(A) | {"address": "b:1"}),
        json.dumps(asdict(A) | {"address": "http://u:secret@b:1"}),
    ],
)  # fmt: skip
def test_what_is_no_registration_keeps_nobody_else_out(tmp_path: Path, text: str) -> None:
    """Half a file, a foreign one, a damaged one: named, and passed over."""
    publish(tmp_path, A)
    (tmp_path / "b.json").write_text(text)
    (tmp_path / ".c.json.tmp-1").write_text("{")
    (tmp_path / "notes.txt").write_text("{")
    members, troubles = read_members(tmp_path)
    assert members == [A]
    assert list(troubles) == ["b.json"]
    assert "secret" not in str(troubles)


def test_what_is_no_file_does_not_keep_the_reader(tmp_path: Path) -> None:
    publish(tmp_path, A)
    (tmp_path / "directory.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    members, troubles = read_members(tmp_path)
    assert members == [A]
    assert sorted(troubles) == ["directory.json", "pipe.json"]


def test_a_directory_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert list(read_members(tmp_path / "file")[1]) == [""]


def test_a_directory_that_everybody_may_write_to_is_named(tmp_path: Path) -> None:
    """Whoever registers there gets prompts and the key."""
    publish(tmp_path, A)
    tmp_path.chmod(0o777)
    members, troubles = read_members(tmp_path)
    assert (members, list(troubles)) == ([A], [""])
