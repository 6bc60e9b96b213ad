"""Checkpoints of several parts: what is complete, what is chosen, what is removed, and what is never touched."""

import json
from pathlib import Path

import pytest

from prime_rl.errors import UserError
from prime_rl.transport import checkpoints
from prime_rl.transport.checkpoints import BOTH_PARTS, TRAINER_ONLY, Part
from prime_rl.transport.commit import MANIFEST, CommitError, list_steps, stage


def publish(directory: Path, step: int, incarnation: int = 0) -> None:
    with stage(directory, step=step, producer="test", extra={"incarnation": incarnation}) as path:
        (path / "state").write_text(f"state {step}")


def save(
    root: Path, step: int, parts: tuple[Part, ...] = BOTH_PARTS, *, joined: bool = True, incarnation: int = 0
) -> None:
    for part in parts:
        publish(checkpoints.part_dir(root, step, part), step, incarnation)
    if joined:
        checkpoints.join(root, step, parts, "test")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Complete at 2 and 4; at 6 the trainer's part alone."""
    directory = tmp_path / "checkpoints"
    save(directory, 2)
    save(directory, 4)
    save(directory, 6, TRAINER_ONLY, joined=False)
    return directory


def test_half_saved_is_never_the_newest(root):
    """-1 is the newest complete one; a single part is taken by name alone, by its own process alone."""
    assert checkpoints.complete_steps(root) == [2, 4]
    for part in BOTH_PARTS:
        assert checkpoints.choose_step(root, -1, part) == 4
    assert checkpoints.choose_step(root, 6, "trainer") == 6
    for directory, step, part, says in (
        (root, 6, "orchestrator", "resume_step 6: .* holds complete checkpoints of steps .2, 4."),
        (root.parent / "nothing", -1, "trainer", "holds no complete checkpoint"),
    ):
        with pytest.raises(UserError, match=says):
            checkpoints.choose_step(directory, step, part)
    save(root.parent / "single", 3, TRAINER_ONLY, joined=False)
    with pytest.raises(UserError, match="single parts of steps .3."):
        checkpoints.choose_step(root.parent / "single", -1, "trainer")


def test_joining_needs_every_part(root):
    """No joint manifest over a part that is not committed; a joined checkpoint stays as it is."""
    with pytest.raises(CommitError):
        checkpoints.join(root, 6, BOTH_PARTS, "test")
    assert 6 not in checkpoints.complete_steps(root)
    before = (root / "step_4" / MANIFEST).read_bytes()
    checkpoints.join(root, 4, TRAINER_ONLY, "another")
    assert (root / "step_4" / MANIFEST).read_bytes() == before


def _swap(root: Path) -> None:
    moves = ("step_2/trainer", "aside"), ("step_4/trainer", "step_2/trainer"), ("aside", "step_4/trainer")
    for source, target in moves:
        (root / source).rename(root / target)


def _replace(root: Path) -> None:
    (root / "step_4" / "trainer").rename(root / "aside")
    publish(root / "step_4" / "trainer", 4)


def _renew(root: Path, step: int = 4) -> None:
    path = root / f"step_{step}" / "trainer" / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2, "unheard": "of"}))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda root: (root / "step_4/trainer/state").write_text("state 5"), "state"),
        (_swap, "was committed as step 2"),
        (_replace, "is not the part that"),
        (_renew, "has format 2; this version reads format 1"),
    ],
)
def test_damage_is_named_with_a_way_out(damage, says, root):
    """A damaged checkpoint is refused, never replaced by an older one silently; the older ones are named."""
    damage(root)
    with pytest.raises(UserError, match=f"cannot resume from step 4: .*{says}.*other checkpoints .*: 2$"):
        checkpoints.choose_step(root, -1, "trainer")


def test_keep_and_keep_interval(tmp_path):
    """The newest `keep` stay and those at a multiple of `keep_interval`; older half-saved ones go."""
    for step in (1, 2, 3, 4, 6):
        save(tmp_path, step)
    save(tmp_path, 5, TRAINER_ONLY, joined=False)
    save(tmp_path, 7, TRAINER_ONLY, joined=False)
    checkpoints.remove_expendable(tmp_path, None, None, in_progress=[5])
    assert list_steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    checkpoints.remove_expendable(tmp_path, 1, 3)
    assert list_steps(tmp_path) == [3, 6, 7]


def test_what_is_superseded_or_foreign_is_not_deleted(root):
    """What lies beyond the resumed step is renamed, complete or not, and may be asked for twice. A directory under a
    checkpoint's name without any part is never chosen, moved or removed."""
    (root / "step_9" / "trainer").mkdir(parents=True)
    (root / "step_9" / "trainer" / "weights.bin").write_text("theirs")
    assert checkpoints.choose_step(root, -1, "trainer") == 4
    checkpoints.clean(root, "trainer")
    moved = checkpoints.supersede_after(root, 2, incarnation=3)
    assert [path.name for path in moved] == ["given_up_3_step_4", "given_up_3_step_6"]
    assert checkpoints.supersede_after(root, 2, incarnation=3) == []
    checkpoints.remove_expendable(root, 1, None)
    assert checkpoints.complete_steps(root) == [2]
    assert (root / "given_up_3_step_4" / "trainer" / "state").read_text() == "state 4"
    assert (root / "step_9" / "trainer" / "weights.bin").read_text() == "theirs"


def test_clean_removes_ones_own_remains(root):
    """What a dead writer of the part left goes, its empty step directory, too; the other process may be at work."""
    for name in ("step_8/.trainer.tmp-1", "step_4/.trainer.tmp-2", "step_4/.orchestrator.tmp-3"):
        (root / name).mkdir(parents=True)
    (root / "step_6" / f".{MANIFEST}.tmp-5").write_text("{")
    checkpoints.clean(root, "trainer")
    left = {path.relative_to(root).as_posix() for path in root.rglob(".*")}
    assert left == {"step_4/.orchestrator.tmp-3", f"step_6/.{MANIFEST}.tmp-5"}
    assert not (root / "step_8").exists()
    checkpoints.join(root, 6, TRAINER_ONLY, "test")  # by the owner of the joint manifest
    assert list((root / "step_6").glob(".*")) == []


def found(root: Path, incarnations: dict[int, int]) -> list[tuple[str, bool]]:
    """Names of what may be recovered from, newest first, and whether it is whole."""
    recovery = root.parent / "recovery"
    states = checkpoints.recoverable(root, recovery, incarnations)
    return [(directory.relative_to(root.parent).as_posix(), problem is None) for _, directory, problem in states]


def test_recoverable_newest_first(root):
    """Parts, joined or not, and recovery checkpoints; a damaged one is told apart, and one that a newer version wrote
    is not passed over. A later incarnation that went back gave up the states beyond its start, though it died before
    it moved them."""
    publish(root.parent / "recovery" / "step_5", 5)
    publish(root.parent / "recovery" / "step_3", 3, incarnation=1)
    (root / "step_6" / "trainer" / "state").write_text("torn")
    names = ["checkpoints/step_6/trainer", "recovery/step_5", "checkpoints/step_4/trainer", "recovery/step_3"]
    names += ["checkpoints/step_2/trainer"]
    assert found(root, {0: 0}) == [(name, number > 0) for number, name in enumerate(names)]
    assert found(root, {0: 0, 1: 2}) == [(name, True) for name in names[3:]]
    assert found(root.parent / "nothing" / "checkpoints", {}) == []
    _renew(root, 6)
    with pytest.raises(UserError, match="cannot recover: .*has format 2"):
        found(root, {0: 0})


def test_who_owns_the_joint_manifest(tmp_path):
    """The trainer, unless an orchestrator takes part."""
    assert checkpoints.trainer_is_alone(tmp_path)
    (tmp_path / "status").mkdir()
    (tmp_path / "status" / "orchestrator.json").write_text("{}")
    assert not checkpoints.trainer_is_alone(tmp_path)
