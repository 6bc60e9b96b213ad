"""However versions get to those who read them: whole or absent, the same hashes, whatever dies at whatever moment."""

import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from prime_rl.errors import UserError
from prime_rl.faults import Fault
from prime_rl.trainer.model import Policy
from prime_rl.trainer.parallel import World
from prime_rl.trainer.parameters import named_parameters
from prime_rl.trainer.weight_copy import RowCopies
from prime_rl.trainer.weight_publisher import WeightPublisher
from prime_rl.transport.commit import MANIFEST, CommitError, list_steps
from prime_rl.transport.exchange import ExchangeError
from prime_rl.transport.incarnations import read_versions, request_files
from prime_rl.transport.weights import verify_weights, weights_manifest
from prime_rl.wait import wait
from support import trainer as support
from support.publishing import received
from support.transports import TRANSPORTS, Incarnations, Run, fork_server, open_run

world, make_policy, tied_model = support.world, support.make_policy, support.tied_model

# Of the plain one tests/faults kills all there is.
POINTS = {
    "filesystem": ["rename:weights/step_3"],
    "tmpfs": [
        *("rename:weights/step_3", "prune:weights/step_1", "pruned:weights/step_1"),
        *("lasting:weights/step_4", "lasts:weights/step_4"),
    ],
    "memory": [
        *("rename:weights/step_3", "lasting:weights/step_2", "lasts:weights/step_2"),
        "renamed:weights/step_4/manifest.json",
    ],
}


@pytest.fixture(params=[*TRANSPORTS])
def run(
    request: pytest.FixtureRequest, world: World, make_policy: Callable[..., Policy], tied_model: Path, tmp_path: Path
) -> Iterator[Run]:
    """Each transport."""
    with open_run(request.param, world, make_policy(tied_model), tied_model, tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def forks() -> Iterator["subprocess.Popen[str]"]:
    with fork_server() as process:
        yield process


@pytest.fixture
def incarnations(
    request: pytest.FixtureRequest, forks: "subprocess.Popen[str]", run: Run, tied_model: Path, tmp_path: Path
) -> Incarnations:
    """Processes that work on the same run."""
    return Incarnations(forks, request.node.callspec.params["run"], tied_model, tmp_path)


@pytest.fixture
def in_tmpfs(world: World, make_policy: Callable[..., Policy], tied_model: Path, tmp_path: Path) -> Iterator[Run]:
    """A run that keeps versions in tmpfs."""
    with open_run("tmpfs", world, make_policy(tied_model), tied_model, tmp_path) as made:
        yield made


def check_whole(run: Run) -> None:
    """Everything that stands under a final name is what its manifest says."""
    for version in read_versions(run.weights):
        directory = run.weights / f"step_{version}"
        if weights_manifest(directory).publisher is None:
            verify_weights(directory)


def test_a_killed_trainer_leaves_what_is_whole(
    run: Run, incarnations: Incarnations, request: pytest.FixtureRequest
) -> None:
    """Contract: whatever a trainer is at when it dies, each version that stands is whole, the next incarnation goes on and cleans, and its versions are whole."""
    for point in POINTS[request.node.callspec.params["run"]]:
        assert incarnations.live("whole_incarnation", fault=Fault(point, "trainer", "kill")) == -signal.SIGKILL, point
        check_whole(run)
        newest = max(read_versions(run.weights))
        assert incarnations.live("go_on", newest) == 0, point
        check_whole(run)
        assert list_steps(run.weights)[-2:] == [newest + 1, newest + 2]
        assert set(run.held()) == run.linked()
        assert [path.name for path in run.weights.iterdir() if path.name.startswith(".")] == []
        start_over(run)


@pytest.mark.parametrize("run", ["tmpfs", pytest.param("filesystem", marks=pytest.mark.slow)], indirect=True)
def test_a_full_disk_is_one_line(run: Run, incarnations: Incarnations) -> None:
    """Contract: nothing half-written stands, in no place, and the incarnation goes on where there is room again."""
    full = Fault("fsync:weights/step_2", "trainer", "enospc")
    assert incarnations.live("through_a_full_disk", fault=full) == 0
    check_whole(run)
    assert list_steps(run.weights) == [0, 1, 3]
    assert set(run.held()) == run.linked()


def start_over(run: Run) -> None:
    for leftover in (run.root / "run", *run.tmpfs.iterdir()):
        shutil.rmtree(leftover)


def test_what_must_outlive_lies_in_the_run_directory(run: Run) -> None:
    """Contract: such a version is a model directory by itself, identified by its tensors and verified by them, however it came there; so is the last
    one. At the end nothing is in memory, and all that is left is whole. A change of one bit is found."""
    incarnation = run.incarnation()
    hashes = run.train(incarnation, range(1, 5), durable=(2,))
    assert len({*hashes.values()}) == 4
    assert load(run, 2) is not None
    incarnation.ensure(4, durable=True)
    support.prune(incarnation, 1, 0, list)
    incarnation.finish(list)
    assert run.held() == []
    assert {3, 4} <= {*list_steps(run.weights)} <= {0, 2, 3, 4}
    assert verify_weights(run.weights / "step_4").hash == hashes[4]
    assert load(run, 4) is not None
    file = run.weights / "step_4" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    with pytest.raises(CommitError):
        verify_weights(file.parent)


def load(run: Run, version: int) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(run.weights / f"step_{version}")


def test_resume(run: Run) -> None:
    """Contract: an incarnation that goes on from a version has it on the disk, whether it stands there, lies in memory, or is gone; and what it gives up
    is gone everywhere but for the newest, which can be put back."""
    hashes = run.train(run.incarnation(), range(1, 5), durable=(2, 4))
    second = run.make()
    run.incarnations.append(second)
    second.open(2, spares=True)
    assert list_steps(run.weights) == [0, 1, 2]
    assert load(run, 2) is not None
    assert weights_manifest(run.weights / "step_2").hash == hashes[2]
    assert verify_weights(run.weights / "given_up_1_step_4").hash == hashes[4]
    assert set(run.held()) == run.linked()
    run.incarnation(7)
    assert weights_manifest(run.weights / "step_7").incarnation == 2


def test_what_is_damaged_is_made_again(in_tmpfs: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Contract: an incarnation that goes on from a version whose tensors lie in tmpfs, and are damaged there, commits it again; none is kept that cannot be
    read."""
    run = in_tmpfs
    run.train(run.incarnation(), range(1, 5))
    for version in (2, 4):
        path = next(weights_manifest(run.weights / f"step_{version}").files.glob("model.*"))
        path.write_bytes(path.read_bytes()[:-9])
    second = run.make()
    run.incarnations.append(second)
    second.open(2, spares=True)
    verify_weights(run.weights / "step_2")
    assert caplog.text.count("cannot be brought to the disk") == 2
    for kept in run.weights.glob("given_up_*"):
        verify_weights(kept)


# ---- tmpfs


def test_after_a_restart_of_the_host(in_tmpfs: Run) -> None:
    """Contract: versions that were in memory count as not there, the others as there; the next incarnation removes what is left of them."""
    in_tmpfs.train(in_tmpfs.incarnation(), range(1, 4), durable=(2,))
    shutil.rmtree(in_tmpfs.tmpfs)
    in_tmpfs.tmpfs.mkdir()
    (in_tmpfs.weights / "step_2" / "notes").symlink_to("gone")  # nothing of ours
    assert [*read_versions(in_tmpfs.weights)] == [0, 2]
    with pytest.raises(CommitError, match="on this host"):
        verify_weights(in_tmpfs.weights / "step_3")
    in_tmpfs.incarnation(2)
    assert list_steps(in_tmpfs.weights) == [0, 2]


def test_a_version_is_brought_to_the_disk_after_a_kill_between_two_files(
    in_tmpfs: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: files that were put in their links' place before the trainer was killed are no obstacle to the rest."""
    monkeypatch.setattr("prime_rl.trainer.weight_copy._LEAST_FILE_BYTES", 1)
    first = in_tmpfs.incarnation()
    hashes = in_tmpfs.train(first, range(1, 2))
    directory = in_tmpfs.weights / "step_1"
    links = [path for path in directory.iterdir() if path.is_symlink()]
    assert len(links) > 1
    data = links[0].read_bytes()
    links[0].unlink()
    links[0].write_bytes(data)
    in_tmpfs.incarnation(1)
    assert verify_weights(directory).hash == hashes[1]
    assert not in_tmpfs.held()


def test_only_its_own_is_cleaned(in_tmpfs: Run, tmp_path: Path) -> None:
    """Contract: an incarnation removes what a dead one left in memory, and nothing of another run: not of a copy of this one either."""
    first = in_tmpfs.incarnation()
    in_tmpfs.train(first, range(1, 4))
    own = in_tmpfs.held()
    prefix = own[0].partition("step_")[0]
    shutil.copytree(in_tmpfs.tmpfs / own[0], in_tmpfs.tmpfs / f"{prefix}step_9.tmp-x")  # no version has links to it
    shutil.copytree(in_tmpfs.tmpfs / own[0], in_tmpfs.tmpfs / "prime-rl-1-2-step_9.tmp-x")
    shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=True)
    copy = WeightPublisher(
        tmp_path / "copy", in_tmpfs.policy, first.source, first.world, torch.bfloat16, weights=first.config
    )
    with closing(copy):
        copy.open(1)
    assert set(in_tmpfs.held()) > set(own)
    in_tmpfs.incarnation(2)
    assert {*in_tmpfs.held()} - in_tmpfs.linked() == {"prime-rl-1-2-step_9.tmp-x"}


def test_room_is_checked_before_anything_is_begun(in_tmpfs: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: a run that may not fit is refused, with the arithmetic; one that fits exactly is not. What the run holds there already counts."""
    incarnation = in_tmpfs.incarnation()
    in_tmpfs.train(incarnation, range(1, 4))
    held = sum(path.stat().st_size for path in in_tmpfs.tmpfs.glob("*/*"))
    assert isinstance(incarnation._copies, RowCopies)
    needed = 9 * sum(slot.size for slot in incarnation._copies.slots.values())
    for missing in (0, 1):
        monkeypatch.setattr(
            "prime_rl.trainer.weight_publisher.available_bytes", lambda left=needed - held - missing: left
        )
        if missing:
            with pytest.raises(
                UserError, match=r"may be needed: 9 versions \(the newest, async_level 0, keep 7, and one"
            ):
                in_tmpfs.incarnation(3)
        else:
            in_tmpfs.incarnation(3)
            in_tmpfs.train(in_tmpfs.incarnations[-1], range(4, 5))
            held = sum(path.stat().st_size for path in in_tmpfs.tmpfs.glob("*/*"))
    assert len(list((in_tmpfs.root / "run" / "incarnations").iterdir())) == 2


# ---- memory


@pytest.fixture
def memory(world: World, make_policy: Callable[..., Policy], tied_model: Path, tmp_path: Path) -> Iterator[Run]:
    """A run that publishes from memory."""
    with open_run("memory", world, make_policy(tied_model), tied_model, tmp_path) as made:
        yield made


def trained(run: Run) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach().to(torch.bfloat16).clone() for name, p in named_parameters(run.policy)}


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_is_received_is_what_was_trained(memory: Run) -> None:
    """Contract: the newest version can be had bit by bit, its directory holds a manifest alone, and the one before is superseded."""
    incarnation = memory.incarnation()
    for version in (1, 2):
        memory.train(incarnation, range(version, version + 1))
        directory = memory.weights / f"step_{version}"
        assert [path.name for path in directory.iterdir()] == [MANIFEST]
        with pytest.raises(CommitError, match="never written"):
            verify_weights(directory)
        assert equal(received(directory), trained(memory))
    with pytest.raises(ExchangeError, match="version 1 of incarnation 0 is superseded: .* holds version 2"):
        received(memory.weights / "step_1")


def test_a_durable_version_can_be_had_all_the_time(memory: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: its files come into the directory that is there, under the same hash, while the publisher still has it."""
    incarnation, seen = memory.incarnation(), list[Any]()

    def point(name: str, *_: object) -> None:
        if name == "lasting:weights/step_1":
            seen.append((memory.weights / "step_1").stat().st_ino)
            seen.append(received(memory.weights / "step_1"))

    monkeypatch.setattr("prime_rl.transport.weights.faults.point", point)
    (digest,) = memory.train(incarnation, range(1, 2), durable=(1,)).values()
    directory = memory.weights / "step_1"
    assert seen[0] == directory.stat().st_ino
    manifest = verify_weights(directory)
    assert (manifest.hash, manifest.publisher) == (digest, None)
    assert equal(seen[1], trained(memory))
    loaded = load(memory, 1).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in trained(memory).items())


def test_versions_of_an_interval_are_kept_for_good(
    world: World, make_policy: Callable[..., Policy], tied_model: Path, tmp_path: Path
) -> None:
    """Contract: `weights.save_interval`; however versions get to servers, these have files and are never pruned."""
    TRANSPORTS["saved"] = {**TRANSPORTS["memory"], "save_interval": 2}
    with open_run("saved", world, make_policy(tied_model), tied_model, tmp_path) as run:
        incarnation = run.incarnation()
        run.train(incarnation, range(1, 8))
        support.prune(incarnation, 0, 0, list)
        incarnation.settle()
        assert list_steps(run.weights) == [0, 2, 4, 6, 7]
        for version in (2, 4, 6):
            verify_weights(run.weights / f"step_{version}")


def test_servers_that_cannot_reach_the_publisher_get_files(
    world: World, make_policy: Callable[..., Policy], tied_model: Path, tmp_path: Path
) -> None:
    """Contract: under `auto` the version that they wait for is written, though the loop stands still, and every later one; a call to a dead
    incarnation counts for nothing."""
    TRANSPORTS["auto"] = {"transport": "auto", "host": "127.0.0.1"}
    with open_run("auto", world, make_policy(tied_model), tied_model, tmp_path) as run:
        incarnation = run.incarnation()
        request_files(run.root / "run", 7, "of another incarnation")
        run.train(incarnation, range(1, 2))
        assert weights_manifest(run.weights / "step_1").publisher is not None
        request_files(run.root / "run", incarnation.incarnation, "no route")
        wait(
            lambda: weights_manifest(run.weights / "step_1").publisher is None,
            subject="files", owner="the publisher", seconds=60, poll=0.05,
        )  # fmt: skip
        verify_weights(run.weights / "step_1")
        run.train(incarnation, range(2, 3))
        verify_weights(run.weights / "step_2")
