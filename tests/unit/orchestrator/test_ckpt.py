"""Where the orchestrator goes on: after what is committed, not before and not beyond."""

import json

import pytest

from prime_rl.config.shared import CkptConfig
from prime_rl.errors import UserError
from prime_rl.orchestrator.ckpt import Incarnation, Progress, latest_incarnation, newest_version, resume_progress
from prime_rl.transport.commit import stage
from prime_rl.transport.weights import TensorEntry, manifest_extra


def commit_batch(output_dir, step, groups_opened):
    with stage(
        output_dir / "rollouts" / f"step_{step}",
        step=step,
        producer="orchestrator",
        extra={"groups_opened": groups_opened},
    ):
        pass


def commit_checkpoint(output_dir, step):
    with stage(output_dir / "checkpoints" / f"step_{step}" / "trainer", step=step, producer="trainer"):
        pass


def commit_version(output_dir, version, life):
    extra = manifest_extra(version, life, {"w": TensorEntry("f", "F32", [1], str(version))})
    with stage(output_dir / "weights" / f"step_{version}", step=version, producer="trainer", extra=extra):
        pass


def test_a_fresh_run_starts_at_zero(tmp_path):
    """No checkpoint asked for, or none to resume from."""
    assert resume_progress(tmp_path, None) == Progress()
    assert resume_progress(tmp_path, CkptConfig()) == Progress()


def test_it_goes_on_after_the_batches_that_are_committed_already(tmp_path):
    """Batches beyond the checkpoint are trained again unchanged; collecting goes on after them, with their place in the task stream."""
    commit_checkpoint(tmp_path, 2)
    for step, groups in enumerate([10, 20, 33, 41]):
        commit_batch(tmp_path, step, groups)
    assert resume_progress(tmp_path, CkptConfig(resume_step=2)) == Progress(4, 41, 2, resumed=True)


def test_what_an_interrupted_trainer_saved_can_be_resumed_with_nothing_else(tmp_path):
    """The trainer's own checkpoint after Ctrl-C is enough: -1 is the newest of it."""
    for step, groups in enumerate([10, 20, 33]):
        commit_batch(tmp_path, step, groups)
    commit_checkpoint(tmp_path, 2)
    commit_checkpoint(tmp_path, 3)
    assert resume_progress(tmp_path, CkptConfig(resume_step=-1)) == Progress(3, 33, 3, resumed=True)


def test_a_gap_in_the_batches_ends_what_is_reused(tmp_path):
    """Only an unbroken row of batches from the checkpoint on counts."""
    commit_checkpoint(tmp_path, 2)
    commit_batch(tmp_path, 1, 20)
    commit_batch(tmp_path, 3, 41)
    assert resume_progress(tmp_path, CkptConfig(resume_step=2)) == Progress(2, 20, 2, resumed=True)


def test_a_lost_batch_is_an_error_and_not_a_repeated_task_stream(tmp_path):
    """Without the batch before the checkpoint nobody knows which tasks were drawn."""
    commit_checkpoint(tmp_path, 2)
    with pytest.raises(UserError, match="the batch before the checkpoint is missing"):
        resume_progress(tmp_path, CkptConfig(resume_step=2))


@pytest.mark.parametrize(("step", "message"), [(5, "no checkpoint of step 5"), (-1, "nothing to resume")])
def test_a_checkpoint_that_is_not_there_is_named(tmp_path, step, message):
    """One clear line instead of a run from nowhere."""
    if step != -1:
        commit_checkpoint(tmp_path, 2)
    with pytest.raises(UserError, match=message):
        resume_progress(tmp_path, CkptConfig(resume_step=step))


def test_versions_of_a_life_that_was_given_up_do_not_count(tmp_path):
    """The newest version is one that the present life made, or the one it started from."""
    assert latest_incarnation(tmp_path) == Incarnation()
    (tmp_path / "incarnations").mkdir()
    for number, start in enumerate([0, 2]):
        (tmp_path / "incarnations" / f"{number}.json").write_text(json.dumps({"step": start}))
    life = latest_incarnation(tmp_path)
    assert life == Incarnation(1, 2)
    for version in range(5):
        commit_version(tmp_path, version, life=0)
    assert newest_version(tmp_path / "weights", life) == 2
    commit_version(tmp_path, 6, life=1)
    assert newest_version(tmp_path / "weights", life) == 6
