"""Where the orchestrator goes on: after what is committed, not before and not beyond."""

import pytest

from prime_rl.config.shared import CkptConfig
from prime_rl.errors import UserError
from prime_rl.orchestrator.ckpt import Progress, resume_progress, save_progress
from prime_rl.transport.commit import list_steps, stage


def commit_batch(output_dir, step, groups_opened):
    with stage(
        output_dir / "rollouts" / f"step_{step}",
        step=step,
        producer="orchestrator",
        extra={"groups_opened": groups_opened},
    ):
        pass


def test_a_fresh_run_starts_at_zero(tmp_path):
    """No checkpoint asked for, or none to resume from."""
    assert resume_progress(tmp_path, None) == Progress()
    assert resume_progress(tmp_path, CkptConfig()) == Progress()


def test_it_goes_on_after_the_batches_that_are_committed_already(tmp_path):
    """Batches beyond the checkpoint are trained again unchanged; collecting goes on after them, with their place in the task stream."""
    save_progress(tmp_path, CkptConfig(), Progress(2, 20))
    for step, groups in enumerate([10, 20, 33, 41]):
        commit_batch(tmp_path, step, groups)
    assert resume_progress(tmp_path, CkptConfig(resume_step=2)) == Progress(4, 41, 2, resumed=True)


def test_a_gap_in_the_batches_ends_what_is_reused(tmp_path):
    """Only an unbroken row of batches from the checkpoint on counts."""
    save_progress(tmp_path, CkptConfig(), Progress(2, 20))
    commit_batch(tmp_path, 3, 41)
    assert resume_progress(tmp_path, CkptConfig(resume_step=2)) == Progress(2, 20, 2, resumed=True)


def test_minus_one_means_the_newest_and_keep_bounds_their_number(tmp_path):
    """`--ckpt.resume-step -1`, `--ckpt.keep 2`."""
    for step in (2, 4, 6):
        save_progress(tmp_path, CkptConfig(keep=2), Progress(step, step * 10))
    assert resume_progress(tmp_path, CkptConfig(resume_step=-1)) == Progress(6, 60, 6, resumed=True)
    root = tmp_path / "checkpoints"
    assert [step for step in list_steps(root) if (root / f"step_{step}" / "orchestrator").exists()] == [4, 6]


@pytest.mark.parametrize(("step", "message"), [(5, "no checkpoint of step 5"), (-1, "nothing to resume")])
def test_a_checkpoint_that_is_not_there_is_named(tmp_path, step, message):
    """One clear line instead of a run from nowhere."""
    if step != -1:
        save_progress(tmp_path, CkptConfig(), Progress(2, 20))
    with pytest.raises(UserError, match=message):
        resume_progress(tmp_path, CkptConfig(resume_step=step))
