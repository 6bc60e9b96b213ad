"""Incarnation files, versions and leases: what one process writes the others read."""

import pytest

from prime_rl.transport.commit import CommitError, prune
from prime_rl.transport.incarnations import (
    PublishedVersions,
    open_incarnation,
    read_incarnations,
    read_lease,
    read_versions,
)
from prime_rl.transport.protocol import Lease
from support.scripted import ScriptedTrainer


def test_incarnations_are_numbered_in_the_order_of_their_opening(tmp_path):
    """A damaged file is an error: to go on without the newest incarnation would serve superseded versions."""
    assert read_incarnations(tmp_path) == {}
    assert [open_incarnation(tmp_path, start) for start in (0, 4, 2)] == [0, 1, 2]
    assert read_incarnations(tmp_path) == {0: 0, 1: 4, 2: 2}
    (tmp_path / "incarnations" / "3.json").write_text("{")
    with pytest.raises(CommitError, match=r"3\.json"):
        open_incarnation(tmp_path, 0)


def test_a_version_that_another_incarnation_committed_again_is_read_again(tmp_path):
    """What was seen before is remembered by the file, not by the number."""
    trainer, weights = ScriptedTrainer(tmp_path), tmp_path / "weights"
    trainer.commit(0)
    trainer.commit(3)
    assert read_versions(weights) == {0: 0, 3: 0}
    prune(weights / "step_3")
    assert read_versions(weights) == {0: 0}
    trainer.commit(3, incarnation=1)
    assert read_versions(weights) == {0: 0, 3: 1}


def test_a_lease(tmp_path):
    """No file, no lease; a damaged one is an error: taken for none it would let the trainer prune what is read."""
    assert read_lease(tmp_path) is None
    published = PublishedVersions(tmp_path)
    published.write_lease(Lease(1, 5))
    half_written = tmp_path / "leases" / ".orchestrator.json.tmp-1"
    half_written.touch()
    published.write_lease(Lease(2, 7))
    assert not half_written.exists()
    assert read_lease(tmp_path) == Lease(2, 7)
    (tmp_path / "leases" / "orchestrator.json").write_text("{")
    with pytest.raises(CommitError, match=r"orchestrator\.json"):
        read_lease(tmp_path)
    for _ in range(2):
        published.write_lease(None)
    assert read_lease(tmp_path) is None
