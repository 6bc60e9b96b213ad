"""Incarnation files, versions and the lease: what one process writes the others read."""

import pytest

from prime_rl.transport.commit import CommitError, prune, stage
from prime_rl.transport.incarnations import (
    EVAL,
    combined_lease,
    drop_lease,
    lease_path,
    next_incarnation,
    open_incarnation,
    read_incarnations,
    read_lease,
    read_versions,
    write_lease,
)
from prime_rl.transport.protocol import Lease, continues_from
from prime_rl.transport.weights import TensorEntry, manifest_extra


def commit_version(root, version, incarnation):
    extra = manifest_extra(version, incarnation, {"w": TensorEntry("f", "F32", [1], f"{version}-{incarnation}")})
    with stage(root / f"step_{version}", step=version, producer="trainer", extra=extra):
        pass


def test_incarnations_are_numbered_in_the_order_of_their_opening(tmp_path):
    """A new incarnation never reuses a number, and remembers its start."""
    assert read_incarnations(tmp_path) == {}
    assert [open_incarnation(tmp_path, start) for start in (0, 4, 2)] == [0, 1, 2]
    assert read_incarnations(tmp_path) == {0: 0, 1: 4, 2: 2}


def test_a_damaged_incarnation_file_is_an_error_and_not_an_earlier_incarnation(tmp_path):
    """Going on as if the newest incarnation were not there would serve versions that were given up."""
    open_incarnation(tmp_path, 0)
    (tmp_path / "incarnations" / "1.json").write_text("{")
    with pytest.raises(CommitError, match=r"1\.json"):
        read_incarnations(tmp_path)


def test_a_version_that_another_incarnation_committed_again_is_read_again(tmp_path):
    """What was seen before is remembered by the file, not by the number."""
    seen = {}
    commit_version(tmp_path, 0, 0)
    commit_version(tmp_path, 3, 0)
    assert read_versions(tmp_path, seen) == {0: 0, 3: 0}
    prune(tmp_path / "step_3")
    assert read_versions(tmp_path, seen) == {0: 0}
    commit_version(tmp_path, 3, 1)
    assert read_versions(tmp_path, seen) == {0: 0, 3: 1}


def test_the_lease_is_read_back_and_given_back(tmp_path):
    """No file, no lease; a damaged one is an error, because taking it for none would let the trainer prune what is read."""
    assert read_lease(tmp_path) is None
    write_lease(tmp_path, Lease(1, 5))
    assert read_lease(tmp_path) == Lease(1, 5)
    lease_path(tmp_path).write_text("{")
    with pytest.raises(CommitError, match=r"orchestrator\.json"):
        read_lease(tmp_path)
    drop_lease(tmp_path)
    drop_lease(tmp_path)
    assert read_lease(tmp_path) is None


def test_a_resumed_run_waits_for_the_incarnation_that_goes_on_from_its_checkpoint():
    """Not the incarnation that is given up; and a trainer that has crashed and recovered since still counts."""
    assert not continues_from(4, {0: 0})
    assert continues_from(4, {0: 0, 1: 4})
    assert continues_from(4, {0: 0, 1: 4, 2: 6})
    assert not continues_from(4, {0: 0, 1: 4, 2: 2})


def test_a_number_is_not_given_twice_though_incarnation_files_are_lost(tmp_path):
    """Versions, the lease and saved states tell of incarnations, too; the base model's version tells of none."""
    commit_version(tmp_path / "weights", 0, 0)
    assert open_incarnation(tmp_path, 0) == 0
    commit_version(tmp_path / "weights", 1, 4)
    assert next_incarnation(tmp_path) == 5
    write_lease(tmp_path, Lease(6, 1))
    assert next_incarnation(tmp_path) == 7
    assert open_incarnation(tmp_path, 0, saved_by={2, 8}) == 9


def test_every_reader_has_a_lease_of_its_own(tmp_path):
    """The trainer goes by the strictest; an incarnation that any of them heard of is not numbered again; one reader's half-written file is not another's to remove."""
    assert combined_lease(tmp_path) is None
    write_lease(tmp_path, Lease(1, 5))
    half_written = tmp_path / "leases" / f".{EVAL}.json.tmp-1"
    half_written.touch()
    write_lease(tmp_path, Lease(2, 7))
    assert half_written.exists()
    write_lease(tmp_path, Lease(1, 9), EVAL)
    assert not half_written.exists()
    assert combined_lease(tmp_path) == Lease(1, 7)
    drop_lease(tmp_path)
    assert combined_lease(tmp_path) == Lease(1, 9)
    assert next_incarnation(tmp_path) == 2
