"""Where the orchestrator goes on: after what is committed, not before or beyond; and its part of the checkpoints."""

from prime_rl.config import OrchestratorConfig
from prime_rl.config.shared import CkptConfig
from prime_rl.orchestrator.checkpoint import (
    PART,
    JointCheckpoints,
    OrchestratorState,
    ResumePoint,
    read_state,
    resume_point,
)
from prime_rl.transport import checkpoints
from support.scripted import ScriptedTrainer, World, commit_batch


def commit_batches(output_dir, *steps):
    """The batch of step n, after which 10 * (n + 1) groups were opened."""
    for step in steps:
        commit_batch(output_dir, step, 10 * (step + 1))


def resume(output_dir, ckpt=None, recover=False) -> ResumePoint:
    config = OrchestratorConfig(output_dir=output_dir, ckpt=ckpt, recover=recover, environment={"id": "env"})
    return resume_point(config)


def where(progress: ResumePoint) -> tuple[int, int, int]:
    """The next step, the groups drawn so far, the version."""
    return progress.step, progress.state.groups_opened, progress.version


def test_a_run_goes_on_after_the_batches_that_are_committed(tmp_path):
    """From a checkpoint, collecting goes on after the batches beyond it; -1 is the newest complete one; a part of the
    trainer alone is none. (What cannot be resumed from: test_checkpoints.py.)"""
    assert resume(tmp_path, None) == resume(tmp_path, CkptConfig()) == ResumePoint()
    commit_batches(tmp_path, 0, 1, 2, 3)
    World(tmp_path).joint(2)
    ScriptedTrainer(tmp_path).checkpoint(3)
    for asked in (2, -1):
        progress = resume(tmp_path, CkptConfig(resume_step=asked))
        assert where(progress) == (4, 40, 2)
        assert progress.resumed
        assert not progress.fresh


def test_a_checkpoint_is_enough_to_go_on_elsewhere(tmp_path):
    """Another output directory, with the first one's checkpoints: the task stream goes on, also when the process is
    started again with --recover before and after it has committed anything."""
    state = OrchestratorState(step=2, groups_opened=9)
    commit_batch(tmp_path / "old", 1, 9)
    World(tmp_path / "old").joint(2)
    ckpt = CkptConfig(resume_step=2, output_dir=tmp_path / "old")
    assert resume(tmp_path / "new", ckpt) == ResumePoint(2, 2, resumed=True, state=state)
    assert where(resume(tmp_path / "new", ckpt, recover=True)) == (2, 9, 0)
    commit_batches(tmp_path / "new", 2)
    assert where(resume(tmp_path / "new", ckpt, recover=True)) == (3, 30, 0)


def test_after_a_crash_everything_committed_counts(tmp_path):
    """No checkpoint is needed: the row of batches says where to go on, from the first one that there is."""
    assert where(resume(tmp_path, None, recover=True)) == (0, 0, 0)
    commit_batches(tmp_path, 4, 5)
    progress = resume(tmp_path, None, recover=True)
    assert where(progress) == (6, 60, 0)
    assert progress.recovered


def test_a_checkpoint_is_completed_from_the_batch_before_it(tmp_path):
    """Nothing is remembered: whenever a part of the trainer stands alone, the state of that step is added and both are
    joined, over what a crash left there. One whose batch is gone stays single, and does not stop the run; so does one
    that a later incarnation gave up."""
    root = tmp_path / "checkpoints"
    commit_batches(tmp_path, 1, 3)
    joint = JointCheckpoints(tmp_path, None)
    assert joint.join({0: 0}) == []
    for step in (1, 2, 4):
        ScriptedTrainer(tmp_path).checkpoint(step)
    (root / "step_2" / ".orchestrator.tmp-1").mkdir()
    (root / "step_2" / ".manifest.json.tmp-1").write_text("{")
    checkpoints.clean(root, PART)
    assert joint.join({0: 0, 1: 2}) == [2]
    assert joint.join({0: 0}) == [4]
    assert joint.join({0: 0}) == []
    assert sorted(path.name for path in (root / "step_2").iterdir()) == ["manifest.json", "orchestrator", "trainer"]
    state = read_state(checkpoints.part_dir(root, 2, PART))
    assert (state.step, state.groups_opened) == (2, 20)
    for part in checkpoints.BOTH_PARTS:
        checkpoints.check(root, 2, part)


def test_what_is_not_kept_is_removed(tmp_path):
    """What a crash left, too. Never the one that is resumed from: a later part, of an incarnation about to be given up,
    may be joined before the trainer has begun its new one."""
    commit_batches(tmp_path, 0, 1, 2, 3)
    World(tmp_path).joint(1)
    for step, resumed, left in ((2, 1, [1, 2]), (4, None, [4])):
        ScriptedTrainer(tmp_path).checkpoint(step)
        assert JointCheckpoints(tmp_path, CkptConfig(keep=1, resume_step=resumed)).join({}) == [step]
        assert checkpoints.complete_steps(tmp_path / "checkpoints") == left
