"""Where the orchestrator goes on: after what is committed, not before and not beyond; and its part of the checkpoints."""

from dataclasses import asdict

import pytest

from prime_rl.config.shared import CkptConfig
from prime_rl.errors import UserError
from prime_rl.orchestrator.checkpoint import (
    PART,
    JointCheckpoints,
    OrchestratorState,
    ResumePoint,
    missing_rows,
    read_part,
    refuse_used,
    resume_point,
)
from prime_rl.transport import checkpoints
from prime_rl.transport.checkpoints import clean
from prime_rl.transport.commit import stage
from support.scripted import ScriptedTrainer, commit_batch


def commit_trainer_part(output_dir, step, incarnation=0):
    ScriptedTrainer(output_dir).checkpoint(step, incarnation)


def commit_checkpoint(output_dir, step):
    """A complete one; the batch before it must be there."""
    commit_trainer_part(output_dir, step)
    assert step in JointCheckpoints(output_dir, None).join({})


def where(progress: ResumePoint) -> tuple[int, int, int]:
    """The next step, the groups drawn so far, the version."""
    return progress.step, progress.state.groups_opened, progress.version


def test_a_fresh_run_starts_at_zero(tmp_path):
    """No checkpoint asked for, or none to resume from."""
    assert resume_point(tmp_path, None) == ResumePoint()
    assert resume_point(tmp_path, CkptConfig()) == ResumePoint()


def test_it_goes_on_after_the_batches_that_are_committed_already(tmp_path):
    """Batches beyond the checkpoint are trained again unchanged; collecting goes on after them, with their place in the task stream."""
    for step, groups in enumerate([10, 20, 33, 41]):
        commit_batch(tmp_path, step, groups)
    commit_checkpoint(tmp_path, 2)
    progress = resume_point(tmp_path, CkptConfig(resume_step=2))
    assert where(progress) == (4, 41, 2)
    assert progress.resumed
    assert not progress.fresh


def test_the_newest_complete_checkpoint_is_resumed_and_a_single_part_never(tmp_path):
    """-1: a part of the trainer without this process's part is no checkpoint."""
    for step, groups in enumerate([10, 20, 33]):
        commit_batch(tmp_path, step, groups)
    commit_checkpoint(tmp_path, 2)
    commit_trainer_part(tmp_path, 3)
    assert where(resume_point(tmp_path, CkptConfig(resume_step=-1))) == (3, 33, 2)
    with pytest.raises(UserError, match="resume_step 3: not in"):
        resume_point(tmp_path, CkptConfig(resume_step=3))


def test_a_checkpoint_is_enough_to_go_on_elsewhere(tmp_path):
    """Another output directory, with the first one's checkpoints: the task stream goes on."""
    state = OrchestratorState(step=2, groups_opened=9)
    earlier = {
        "environments": {"env": 9},
        "discards": {"dynamic_sampling": 1},
        "open_groups": [7, 8],
    }  # of an earlier release
    commit_batch(tmp_path / "old", 1, 9, state=asdict(state) | earlier)
    commit_checkpoint(tmp_path / "old", 2)
    ckpt = CkptConfig(resume_step=2, output_dir=tmp_path / "old")
    assert resume_point(tmp_path / "new", ckpt) == ResumePoint(2, 2, resumed=True, state=state)


def test_after_a_crash_everything_committed_counts(tmp_path):
    """No checkpoint is needed: the row of batches says where to go on, from the first one that there is."""
    assert where(resume_point(tmp_path, None, recover=True)) == (0, 0, 0)
    for step, groups in [(4, 41), (5, 50)]:
        commit_batch(tmp_path, step, groups)
    progress = resume_point(tmp_path, None, recover=True)
    assert where(progress) == (6, 50, 0)
    assert progress.recovered


def test_a_crash_right_after_resuming_goes_on_from_the_same_checkpoint(tmp_path):
    """The process is started again with its old configuration and --recover, before it has committed anything."""
    commit_batch(tmp_path / "old", 1, 20)
    commit_checkpoint(tmp_path / "old", 2)
    ckpt = CkptConfig(resume_step=2, output_dir=tmp_path / "old")
    assert where(resume_point(tmp_path / "new", ckpt, recover=True)) == (2, 20, 0)
    commit_batch(tmp_path / "new", 2, 30)
    assert where(resume_point(tmp_path / "new", ckpt, recover=True)) == (3, 30, 0)


def test_a_damaged_state_is_named_with_its_checkpoint(tmp_path):
    """Flipped bytes in the state: an error that names the checkpoint, not a run from a wrong place."""
    commit_batch(tmp_path, 1, 20)
    commit_checkpoint(tmp_path, 2)
    (tmp_path / "checkpoints" / "step_2" / "orchestrator" / "state.json").write_text("{}")
    with pytest.raises(UserError, match="cannot resume from step 2"):
        resume_point(tmp_path, CkptConfig(resume_step=2))


def test_a_used_directory_is_refused_unless_it_is_gone_on_with(tmp_path):
    """A fresh run never mixes its batches with those of another."""
    commit_batch(tmp_path, 0, 3)
    with pytest.raises(UserError, match="holds steps 0-0 of an earlier run"):
        refuse_used(tmp_path, ResumePoint())
    refuse_used(tmp_path, ResumePoint(recovered=True))
    with stage(tmp_path / "other" / "weights" / "step_1", step=1, producer="trainer"):
        pass
    with pytest.raises(UserError, match=r"weights holds steps 1-1 of an earlier run: remove it with --clean"):
        refuse_used(tmp_path / "other", ResumePoint())  # its version would be taken for this run's


def test_a_checkpoint_is_completed_from_the_batch_before_it(tmp_path):
    """Nothing is remembered: whenever a part of the trainer stands alone, the state of that step is added and the two are joined."""
    root = tmp_path / "checkpoints"
    for step in range(3):
        commit_batch(tmp_path, step, 10 * (step + 1))
    joint = JointCheckpoints(tmp_path, None)
    assert joint.join({0: 0}) == []
    commit_trainer_part(tmp_path, 2)
    assert joint.join({0: 0}) == [2]
    assert read_part(root, 2).groups_opened == 20
    assert read_part(root, 2).step == 2
    assert joint.join({0: 0}) == []
    for part in checkpoints.BOTH_PARTS:
        checkpoints.check(root, 2, part)


def test_only_checkpoints_of_the_present_history_are_joined(tmp_path):
    """A part that a later incarnation gave up stays single: joined, it would be resumed from."""
    commit_batch(tmp_path, 3, 40)
    commit_trainer_part(tmp_path, 4, incarnation=0)
    joint = JointCheckpoints(tmp_path, None)
    assert joint.join({0: 0, 1: 2}) == []
    assert joint.join({0: 0, 1: 4}) == [4]


def test_a_checkpoint_whose_batch_is_gone_stays_single_and_does_not_stop_the_run(tmp_path, caplog):
    """The state of that step is not known any more: said once, and the others are joined."""
    commit_batch(tmp_path, 3, 40)
    commit_trainer_part(tmp_path, 2)
    commit_trainer_part(tmp_path, 4)
    joint = JointCheckpoints(tmp_path, None)
    assert joint.join({}) == [4]
    assert joint.join({}) == []


def test_what_a_crash_left_in_a_checkpoint_is_cleaned_and_completed(tmp_path):
    """A staged part and a manifest that was never renamed: removed, and the checkpoint is joined anew."""
    commit_batch(tmp_path, 1, 20)
    commit_trainer_part(tmp_path, 2)
    place = tmp_path / "checkpoints" / "step_2"
    (place / ".orchestrator.tmp-1").mkdir()
    (place / ".manifest.json.tmp-1").write_text("{")
    joint = JointCheckpoints(tmp_path, None)
    clean(joint.root, PART)
    assert joint.join({}) == [2]
    assert sorted(path.name for path in place.iterdir()) == ["manifest.json", "orchestrator", "trainer"]


def test_metrics_that_a_crash_kept_from_being_logged_are_found(tmp_path):
    """They stand in the batch's manifest; a row that holds an evaluation only does not count."""
    for step in range(3):
        commit_batch(tmp_path, step, step + 1, metrics={"reward/mean": float(step)})
    logged = {0: {"step": 0, "reward/mean": 0.0}, 1: {"step": 1, "eval/env/reward/mean": 0.5}}
    assert missing_rows(tmp_path / "rollouts", logged) == {1: {"reward/mean": 1.0}, 2: {"reward/mean": 2.0}}


def test_the_checkpoint_that_is_resumed_from_is_not_removed(tmp_path):
    """A part of an incarnation that is about to be given up may be joined before the trainer has begun its new one."""
    for step in (0, 1):
        commit_batch(tmp_path, step, step + 1)
    commit_checkpoint(tmp_path, 1)
    commit_trainer_part(tmp_path, 2)
    assert JointCheckpoints(tmp_path, CkptConfig(keep=1, resume_step=1)).join({}) == [2]
    assert checkpoints.complete_steps(tmp_path / "checkpoints") == [1, 2]


def test_what_a_crash_kept_from_being_removed_is_removed_by_the_next_incarnation(tmp_path):
    """It died after it had completed a checkpoint: before it removed the one that is not kept any more, or in the middle of that."""
    for step in range(4):
        commit_batch(tmp_path, step, step + 1)
    commit_checkpoint(tmp_path, 2)
    commit_checkpoint(tmp_path, 4)
    root = tmp_path / "checkpoints"
    (root / ".step_1.old-0").mkdir()
    joint = JointCheckpoints(tmp_path, CkptConfig(keep=1))
    clean(joint.root, PART)
    assert joint.join({}) == []
    assert sorted(path.name for path in root.iterdir()) == ["step_4"]
