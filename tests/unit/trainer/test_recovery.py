"""A trainer that dies at any commit point and recovers ends with the weights of one that never died; the rest of a trainer's lives."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_rl import faults
from prime_rl.config import TrainerConfig
from prime_rl.monitor import read_metrics, read_status
from prime_rl.monitor.monitor import metrics_path
from prime_rl.transport.checkpoints import complete_steps
from prime_rl.transport.commit import list_steps
from prime_rl.transport.weights import weights_manifest
from support import trainer as support

tied_model, run_training = support.tied_model, support.run_training
Run = Callable[[TrainerConfig], None]
STEPS = 4


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the trainer catches it."""


@pytest.fixture(scope="session")
def undisturbed(tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that nothing happened to."""
    from prime_rl.trainer.parallel import close_world
    from prime_rl.trainer.rl.train import train

    directory = tmp_path_factory.mktemp("undisturbed")
    support.write_rollouts(directory, STEPS)
    train(config(directory, tied_model, ckpt=None, recovery_interval=None))
    close_world()
    return directory


def config(output_dir: Path, model: Path, **settings: Any) -> TrainerConfig:
    """Checkpoints at 2 and 4, recovery checkpoints at 1 and 3, all versions kept."""
    base: dict[str, Any] = {
        "max_steps": STEPS,
        "weights": {"keep": None},
        "ckpt": {"interval": 2},
        "recovery_interval": 1,
    }
    return support.make_config(output_dir, model, **{**base, **settings})


def hashes(output_dir: Path) -> dict[int, str]:
    weights = output_dir / "weights"
    return {step: weights_manifest(weights / f"step_{step}").hash for step in list_steps(weights)}


def metrics(output_dir: Path) -> list[dict[str, float]]:
    return read_metrics(metrics_path(output_dir, "trainer"))


def numbers(output_dir: Path) -> list[dict[str, float]]:
    """The metrics that do not depend on the clock."""
    clock = ("time", "perf/")
    return [{key: row[key] for key in row if not key.startswith(clock)} for row in metrics(output_dir)]


def die_at(monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    """The process "dies" when it passes `point` for the first time. Nothing that it would do after that happens."""
    hit = []

    def fire(name: str, file: Path | None = None) -> None:
        if name == point and not hit:
            hit.append(name)
        if hit:
            raise Killed(point)

    monkeypatch.setattr(faults, "point", fire)
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)  # the dead do not clean up


POINTS = [
    "life:0",
    "rename:incarnations/0.json",
    "renamed:incarnations/0.json",
    "rename:weights/step_3",
    "renamed:weights/step_3",
    "write:checkpoints/step_2/trainer",
    "rename:checkpoints/step_2/trainer",
    "renamed:checkpoints/step_2/trainer",
    "join:checkpoints/step_2",
    "joined:checkpoints/step_2",
    "saved-copy:step_3",
    "manifest:recovery/step_3",
    "rename:recovery/step_3",
    "renamed:recovery/step_3",
    "prune:recovery/step_1",
    "renamed:checkpoints/step_4/trainer",
]


@pytest.mark.parametrize("save_async", [False, True], ids=["in the loop", "in the background"])
@pytest.mark.parametrize("point", POINTS)
def test_dies_and_recovers(
    point: str, save_async: bool, run_training: Run, tied_model: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Whatever it was committing, a trainer that died and recovers has the same weights, checkpoints and metrics as one that did not."""
    ckpt = {"interval": 2, "save_async": save_async}
    support.write_rollouts(tmp_path, STEPS)
    with pytest.MonkeyPatch.context() as patch:
        die_at(patch, point)
        with pytest.raises(Killed):
            run_training(config(tmp_path, tied_model, ckpt=ckpt))
    run_training(config(tmp_path, tied_model, ckpt=ckpt, recover=True))
    assert hashes(tmp_path) == hashes(undisturbed)
    assert numbers(tmp_path) == numbers(undisturbed)
    assert complete_steps(tmp_path / "checkpoints") == [2, 4]
    assert list_steps(tmp_path / "recovery") == [3]
    assert read_status(tmp_path)["trainer"].outcome == "finished"
    left = [path for path in tmp_path.rglob(".*") if ".tmp-" in path.name and path.suffix != ".json"]
    assert left == []
