"""A file system that fails while results are written: one clear line, nothing half-written under a final name, and the run goes on later."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_rl import faults
from prime_rl.config import TrainerConfig
from prime_rl.errors import UserError
from prime_rl.monitor import read_status
from prime_rl.trainer import training_loop as loop
from prime_rl.transport.checkpoints import complete_steps
from prime_rl.transport.commit import list_steps
from prime_rl.transport.weights import verify_weights
from prime_rl.wait import wait
from support import trainer as support

tied_model, run_training = support.tied_model, support.run_training
Run = Callable[[TrainerConfig], None]
FAILS = r"the file system fails at \S* \(Input/output error\): nothing was committed, and what was committed before is untouched"


def failing_under(place: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, whose first argument is a descriptor, with an error for files under `place`."""

    def fail(descriptor: int, *rest: Any) -> Any:
        if place in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EIO, "Input/output error")
        return call(descriptor, *rest)

    return fail


@pytest.mark.parametrize("save_async", [False, True], ids=["in the loop", "in the background"])
@pytest.mark.parametrize(
    ("call", "place", "committed"),
    [
        ("pwrite", "/weights/.step_2", [0, 1]),
        ("fsync", "/weights/.step_2", [0, 1]),
        ("fsync", "/checkpoints/step_2/", [0, 1, 2]),
        ("fsync", "/recovery/.step_1", [0, 1]),
    ],
)
def test_input_output_error(
    call: str, place: str, committed: list[int], save_async: bool, run_training: Run, tied_model: Path, tmp_path: Path
) -> None:
    """The run ends with the place and the reason; versions that were committed are whole, and --recover goes on to the end."""
    support.write_rollouts(tmp_path, 2)
    ckpt = {"interval": 2, "save_async": save_async}
    settings: dict[str, Any] = {"max_steps": 2, "weights": {"keep": None}, "ckpt": ckpt, "recovery_interval": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, failing_under(place, getattr(os, call)))
        with pytest.raises(UserError, match=FAILS):
            run_training(support.make_config(tmp_path, tied_model, **settings))
    assert (read_status(tmp_path)["trainer"].outcome or "").startswith("failed: the file system fails at")
    versions = list_steps(tmp_path / "weights")
    assert set(versions) <= {0, 1, 2}
    assert versions[: len(committed)] == committed
    for version in versions[1:]:
        verify_weights(tmp_path / "weights" / f"step_{version}")
    assert complete_steps(tmp_path / "checkpoints") == []
    run_training(support.make_config(tmp_path, tied_model, recover=True, **settings))
    assert complete_steps(tmp_path / "checkpoints") == [2]
    assert list_steps(tmp_path / "weights") == [0, 1, 2]


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
def test_a_save_that_is_under_way_when_the_run_fails(
    fails: bool,
    run_training: Run,
    tied_model: Path,
    tmp_path: Path,
    heard: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error is the loop's; the save is waited for, and where it fails as well that is said. No thread is left."""
    support.write_rollouts(tmp_path, 2)
    over = threading.Event()

    def point(name: str, file: Path | None = None) -> None:
        if name == "write:checkpoints/step_1/trainer":
            assert over.wait(60)
            if fails:
                raise OSError(errno.EIO, "Input/output error")

    class Loop(loop.Checkpoints):
        def look(self, step: int) -> None:
            if self._pending is not None:
                over.set()
                raise UserError("the second step fails")

    monkeypatch.setattr(faults, "point", point)
    monkeypatch.setattr(loop, "Checkpoints", Loop)
    ckpt = {"interval": 1, "save_async": True}
    with pytest.raises(UserError, match="the second step fails"):
        run_training(support.make_config(tmp_path, tied_model, max_steps=2, ckpt=ckpt))
    lost = "checkpoints/step_1/trainer was not committed: the file system fails at"
    assert (lost in heard.text) is fails
    assert list_steps(tmp_path / "checkpoints") == [1]
    assert (tmp_path / "checkpoints" / "step_1" / "trainer").is_dir() is not fails
    assert wait(lambda: not checkpoint_threads(), subject="end of the thread", owner="the trainer", seconds=60)


def checkpoint_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]
