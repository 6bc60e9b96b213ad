"""However versions get to those who read them: whole or absent, the same hashes, whatever dies at whatever moment."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from prime_rl.errors import UserError
from prime_rl.faults import Fault
from prime_rl.trainer.model import Policy
from prime_rl.trainer.parallel import World
from prime_rl.trainer.staging import Staging
from prime_rl.trainer.weights import Versions
from prime_rl.transport.commit import CommitError, list_steps, read_manifest
from prime_rl.transport.lives import read_versions
from prime_rl.transport.weights import verify_weights, weights_manifest
from support import trainer as support
from support.transports import TRANSPORTS, Lives, Run, open_run

world, make_policy, tied_model = support.world, support.make_policy, support.tied_model

# Of the plain one tests/faults kills all there is.
TO_THE_DISK = ["lasting:weights/step_4", "renamed:weights/step_4/manifest.json", "lasts:weights/step_4"]
POINTS = {
    "filesystem": ["rename:weights/step_3"],
    "tmpfs": [
        *(f"{boundary}:prime-rl-*/step_3" for boundary in ("manifest", "rename", "renamed")),
        *(f"{boundary}:weights/step_3" for boundary in ("rename", "renamed")),
        *(f"{boundary}:prime-rl-*/step_1" for boundary in ("prune", "pruned")),
        "pruned:weights/step_1",
        *TO_THE_DISK,
        "prune:prime-rl-*/step_4",
    ],
    "delta": ["manifest:weights/step_3", "rename:weights/step_3", "pruned:weights/step_1", *TO_THE_DISK],
    "delta in tmpfs": ["renamed:prime-rl-*/step_3", "pruned:prime-rl-*/step_1", *TO_THE_DISK],
}


@pytest.fixture(params=[*TRANSPORTS])
def run(
    request: pytest.FixtureRequest, world: World, make_policy: Callable[..., Policy], tied_model: Path, tmp_path: Path
) -> Iterator[Run]:
    """Each transport."""
    with open_run(request.param, world, make_policy(tied_model), tied_model, tmp_path) as made:
        yield made


@pytest.fixture
def lives(request: pytest.FixtureRequest, run: Run, tied_model: Path, tmp_path: Path) -> Iterator[Lives]:
    """Processes that work on the same run."""
    with closing(Lives(request.node.callspec.params["run"], tied_model, tmp_path)) as made:
        yield made


@pytest.fixture
def in_memory(world: World, make_policy: Callable[..., Policy], tied_model: Path, tmp_path: Path) -> Iterator[Run]:
    """A run that keeps versions in memory."""
    with open_run("tmpfs", world, make_policy(tied_model), tied_model, tmp_path) as made:
        yield made


def check_whole(run: Run) -> None:
    """Everything that stands under a final name is what its manifest says; nothing lies in memory that no version names."""
    named = set()
    for version in read_versions(run.weights):
        manifest = verify_weights(run.weights / f"step_{version}")
        if manifest.memory is not None:
            named.add(Path(manifest.memory.directory).name)
    assert {name for name in run.held() if not name.startswith(".")} >= named


@pytest.mark.parametrize(
    "run", ["filesystem", "tmpfs", *(pytest.param(name, marks=pytest.mark.slow) for name in ("delta", "delta in tmpfs"))], indirect=True
)  # fmt: skip
def test_a_killed_trainer_leaves_what_is_whole(run: Run, lives: Lives, request: pytest.FixtureRequest) -> None:
    """Contract: whatever a trainer is at when it dies, each version that stands is whole, the next life goes on and cleans, and its versions are whole."""
    for point in POINTS[request.node.callspec.params["run"]]:
        assert lives.live("whole_life", fault=Fault(point, "trainer", "kill")) == -signal.SIGKILL, point
        check_whole(run)
        newest = max(read_versions(run.weights))
        assert lives.live("go_on", newest) == 0, point
        check_whole(run)
        assert list_steps(run.weights)[-2:] == [newest + 1, newest + 2]
        assert [name for name in run.held() if name.startswith(".")] == []
        assert [path.name for path in run.weights.iterdir() if path.name.startswith(".")] == []
        start_over(run)


@pytest.mark.parametrize(
    "run", ["tmpfs", *(pytest.param(name, marks=pytest.mark.slow) for name in ("filesystem", "delta", "delta in tmpfs"))], indirect=True
)  # fmt: skip
def test_a_full_disk_is_one_line(run: Run, lives: Lives) -> None:
    """Contract: nothing half-written stands, in no place, and the life goes on where there is room again."""
    for place in ("weights", *(["prime-rl-*"] if lives.in_memory else [])):
        full = Fault(f"fsync:{place}/step_2", "trainer", "enospc")
        assert lives.live("through_a_full_disk", fault=full) == 0, place
        check_whole(run)
        assert list_steps(run.weights) == [0, 1, 3]
        assert set(run.held()) <= {"step_1", "step_3"}
        start_over(run)


def start_over(run: Run) -> None:
    for leftover in (run.root / "run", *run.tmpfs.iterdir()):
        shutil.rmtree(leftover)


def test_every_version_has_the_hash_of_its_tensors(run: Run) -> None:
    """Contract: however it lies there, a version is identified by its tensors, and verified by them; a change of one bit is found."""
    life = run.life()
    hashes = run.train(life, range(1, 4), lasting=(2,))
    assert len({*hashes.values()}) == 3
    for version in hashes:
        assert verify_weights(run.weights / f"step_{version}").hash == hashes[version]
    files = weights_manifest(run.weights / "step_3").files
    largest = max(
        (path for path in files.iterdir() if path.name != "config.json"), key=lambda path: path.stat().st_size
    )
    data = bytearray(largest.read_bytes())
    data[-100] ^= 1
    largest.write_bytes(data)
    with pytest.raises(CommitError):
        verify_weights(run.weights / "step_3")


def test_what_must_outlive_lies_in_the_run_directory(run: Run) -> None:
    """Contract: such a version is a model directory by itself, and so is the last one; at the end nothing is in memory, and all that is left is
    whole."""
    life = run.life()
    hashes = run.train(life, range(1, 5), lasting=(2,))
    assert load(run, 2) is not None
    life.ensure(4)
    life.prune(1, 0, list)
    life.leave_memory(1, 0, list)
    assert run.held() == []
    assert {3, 4} <= {*list_steps(run.weights)} <= {0, 2, 3, 4}
    for version in (3, 4):
        assert verify_weights(run.weights / f"step_{version}").hash == hashes[version]
    assert load(run, 4) is not None


def load(run: Run, version: int) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(run.weights / f"step_{version}")


def test_resume(run: Run) -> None:
    """Contract: a life that goes on from a version has it on the disk, whether it stands there, lies in memory, or is gone; and what it gives up
    is gone everywhere but for the newest, which can be put back."""
    hashes = run.train(run.life(), range(1, 5))
    second = run.make()
    run.lives.append(second)
    second.open(2, spares=True)
    assert list_steps(run.weights) == [0, 1, 2]
    assert load(run, 2) is not None
    assert weights_manifest(run.weights / "step_2").hash == hashes[2]
    assert verify_weights(run.weights / "given_up_1_step_4").hash == hashes[4]
    assert set(run.held()) <= {"step_1"}
    run.life(7)
    assert load(run, 7) is not None


def test_what_is_damaged_is_made_again(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Contract: a life that goes on from a version whose tensors lie elsewhere, and are damaged there, commits it again; none is kept that cannot
    be read."""
    run.train(run.life(), range(1, 5))
    lies_elsewhere = []
    for version in (2, 4):
        manifest = weights_manifest(run.weights / f"step_{version}")
        if manifest.memory is not None or manifest.builds_on is not None:
            lies_elsewhere.append(version)
            path = max(manifest.files.glob("model.*"), key=lambda path: path.stat().st_size)
            path.write_bytes(path.read_bytes()[:-9])
    second = run.make()
    run.lives.append(second)
    second.open(2, spares=True)
    assert verify_weights(run.weights / "step_2").builds_on is None
    assert caplog.text.count("cannot be brought to the disk") == len(lies_elsewhere)
    for kept in run.weights.glob("given_up_*"):
        verify_weights(kept)


# ---- changes


@pytest.fixture
def changes(world: World, make_policy: Callable[..., Policy], tied_model: Path, tmp_path: Path) -> Iterator[Run]:
    """A run whose versions tell what has changed."""
    with open_run("delta", world, make_policy(tied_model), tied_model, tmp_path) as made:
        yield made


def foundations(run: Run) -> dict[int, int | None]:
    return {v: weights_manifest(run.weights / f"step_{v}").builds_on for v in list_steps(run.weights) if v > 0}


def test_what_builds_on_what(changes: Run) -> None:
    """Contract: one in `anchor_every` versions is there in full, the first of each life is, and what must outlive; the others tell changes, hold no
    part of a model, and are smaller."""
    life = changes.life()
    changes.train(life, range(1, 9), lasting=(6,))
    assert foundations(changes) == {1: None, 2: 1, 3: 2, 4: None, 5: 4, 6: None, 7: 6, 8: 7}
    directory = changes.weights / "step_5"
    assert [path.name for path in directory.glob("*.safetensors*")] == []
    with pytest.raises(OSError, match="no file named"):
        load(changes, 5)
    assert (directory / "model.delta").stat().st_size < life._staging.file_bytes / 2
    changes.train(changes.life(8), range(9, 11))
    assert foundations(changes) == {1: None, 2: 1, 3: 2, 4: None, 5: 4, 6: None, 7: 6, 8: None, 9: None, 10: 9}
    for version in range(1, 11):
        verify_weights(changes.weights / f"step_{version}")


def test_what_is_built_on_stays(changes: Run) -> None:
    """Contract: nothing that a kept version builds on is removed, until that is there in full or superfluous."""
    life = changes.life()
    changes.train(life, range(1, 4))
    life.prune(0, 0, list)
    life.settle()
    assert list_steps(changes.weights) == [0, 1, 2, 3]
    changes.train(life, range(4, 6))
    life.prune(0, 0, list)
    life.settle()
    assert list_steps(changes.weights) == [0, 4, 5]


def test_a_missing_foundation_is_one_line(changes: Run) -> None:
    """Contract: a version whose foundation is gone, or is another one, is refused by name."""
    life = changes.life()
    changes.train(life, range(1, 4))
    (changes.weights / "step_1").rename(changes.weights / "gone")
    with pytest.raises(CommitError, match="step_2 tells what has changed since version 1, which is not there"):
        verify_weights(changes.weights / "step_3")
    changes.train(life, range(4, 5))
    shutil.copytree(changes.weights / "step_4", changes.weights / "step_1")
    for path, old, new in (("manifest.json", '"step": 4', '"step": 1'),):
        place = changes.weights / "step_1" / path
        place.write_text(place.read_text().replace(old, new))
    with pytest.raises(CommitError, match="step_1 is"):
        verify_weights(changes.weights / "step_3")


def test_what_is_not_smaller_is_written_in_full(changes: Run) -> None:
    """Contract: where everything changes, the version is there in full; the next one builds on it."""
    life = changes.life()
    changes.train(life, range(1, 2))
    with torch.no_grad():
        for parameter in changes.policy.parameters():
            local = parameter.to_local()
            local.copy_(torch.randint(-(2**15), 2**15, local.shape, dtype=torch.int16).view(torch.bfloat16))
    life.commit(2)
    life.settle()
    changes.train(life, range(3, 4))
    assert foundations(changes) == {1: None, 2: None, 3: 2}
    assert sorted(path.suffix for path in (changes.weights / "step_2").iterdir() if "model" in path.name) == [
        ".safetensors"
    ]


def test_after_a_version_that_failed_the_next_is_there_in_full(changes: Run) -> None:
    """Contract: changes are told of a committed version only."""
    life = changes.life()
    changes.train(life, range(1, 3))
    life.commit(3, lambda: None)
    life.settle()

    def refuse() -> None:
        raise UserError("not finite")

    changes.step()
    life.commit(4, refuse)
    with pytest.raises(UserError, match="not finite"):
        life.settle()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prime_rl.trainer.export._commit", lambda *_: refuse())
        life.commit(5)
        with pytest.raises(UserError, match="not finite"):
            life.settle()
    changes.train(life, range(6, 8))
    assert foundations(changes) == {1: None, 2: 1, 3: 2, 6: None, 7: 6}


@pytest.mark.parametrize("shared", [False, True])
def test_the_process_that_writes_holds_the_rows(shared: bool, changes: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: threads and the process beside a GPU tell the same changes; a process that was killed has lost the rows: then the version is there
    in full."""
    monkeypatch.setattr(
        "prime_rl.trainer.weights.Staging", lambda *args, **options: Staging(*args, **options | {"shared": shared})
    )
    life = changes.life()
    changes.train(life, range(1, 3))
    if (writer := life._staging.own.writer) is not None:
        os.kill(writer.start().pid, signal.SIGKILL)
    changes.train(life, range(3, 5))
    assert foundations(changes) == {1: None, 2: 1, 3: None if shared else 2, 4: 3 if shared else None}
    for version in range(1, 5):
        verify_weights(changes.weights / f"step_{version}")


# ---- memory


def test_in_memory_the_run_directory_holds_no_part_of_a_model(in_memory: Run) -> None:
    """Contract: nobody takes the directory of such a version for a model; its manifest says where the tensors are."""
    in_memory.train(in_memory.life(), range(1, 2))
    directory = in_memory.weights / "step_1"
    assert [path.name for path in directory.glob("*.safetensors*")] == []
    with pytest.raises(OSError, match="no file named"):
        load(in_memory, 1)
    assert in_memory.held() == ["step_1"]
    assert weights_manifest(directory).files.parent.parent == in_memory.tmpfs


def test_after_a_restart_of_the_host(in_memory: Run) -> None:
    """Contract: versions that were in memory count as not there, the others as there; the next life removes what is left of them."""
    in_memory.train(in_memory.life(), range(1, 4), lasting=(2,))
    shutil.rmtree(in_memory.tmpfs)
    in_memory.tmpfs.mkdir()
    assert [*read_versions(in_memory.weights)] == [0, 2]
    with pytest.raises(CommitError, match="they are gone"):
        verify_weights(in_memory.weights / "step_3")
    in_memory.life(2)
    assert list_steps(in_memory.weights) == [0, 2]


def test_only_its_own_is_cleaned(in_memory: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Contract: a life removes what a dead one left in memory, and nothing of another run: not of a copy of this one either."""
    first = in_memory.life()
    in_memory.train(first, range(1, 4))
    (own,) = in_memory.tmpfs.iterdir()
    shutil.copytree(own / "step_3", own / "step_9")
    (own / ".step_8.tmp-x").mkdir()
    stranger = in_memory.tmpfs / f"{own.name[:-4]}beef"  # of an earlier run in this directory
    shutil.copytree(own, stranger)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copy = Versions(
        tmp_path / "copy", in_memory.policy, first.source, first.world, torch.bfloat16, memory=first._in_tmpfs
    )
    with closing(copy):
        copy.open(1)
    assert sorted(path.name for path in own.iterdir()) == [".step_8.tmp-x", "step_1", "step_2", "step_3", "step_9"]
    in_memory.life(2)
    assert sorted(path.name for path in own.iterdir()) == ["step_1"]
    assert len(list(stranger.iterdir())) == 5
    assert str(stranger) in caplog.text


def test_room_is_checked_before_anything_is_begun(in_memory: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: a run that may not fit is refused, with the arithmetic; one that fits exactly is not. What the run holds there already counts."""
    life = in_memory.life()
    in_memory.train(life, range(1, 4))
    held = sum(path.stat().st_size for path in in_memory.tmpfs.glob("*/*/*"))
    needed = 9 * life._staging.file_bytes
    for missing in (0, 1):
        monkeypatch.setattr("prime_rl.trainer.weights.available_bytes", lambda left=needed - held - missing: left)
        if missing:
            with pytest.raises(UserError, match=r"may be needed: 9 versions \(of this test\)"):
                in_memory.life(3)
        else:
            in_memory.life(3)
            in_memory.train(in_memory.lives[-1], range(4, 5))
            held = sum(path.stat().st_size for path in in_memory.tmpfs.glob("*/*/*"))
    assert len(list((in_memory.root / "run" / "incarnations").iterdir())) == 2


def test_the_manifest_names_the_very_tensors(in_memory: Run) -> None:
    """Contract: a directory in memory that was committed anew is not taken for the version's."""
    in_memory.train(in_memory.life(), range(1, 3))
    one, two = (weights_manifest(in_memory.weights / f"step_{version}") for version in (1, 2))
    shutil.rmtree(one.files)
    shutil.copytree(two.files, one.files)
    manifest = json.loads((one.files / "manifest.json").read_text())
    (one.files / "manifest.json").write_text(json.dumps(manifest | {"step": 1}))
    assert read_manifest(one.files).step == 1
    with pytest.raises(CommitError, match="another version"):
        verify_weights(one.directory)
