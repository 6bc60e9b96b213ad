"""A trainer that dies at any commit point ends with the weights of one that did not; and file systems that fail."""

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from prime_rl import faults
from prime_rl.config import TrainerConfig
from prime_rl.errors import UserError
from prime_rl.monitor import read_status
from prime_rl.trainer import training_loop
from prime_rl.trainer.ckpt import Checkpoints
from prime_rl.transport.checkpoints import complete_steps
from prime_rl.transport.commit import list_steps, verify
from prime_rl.transport.incarnations import read_incarnations
from prime_rl.transport.weights import verify_weights, weights_manifest
from prime_rl.wait import wait
from support import trainer as support
from support.trainer import hashes, metrics

tied_model, untied_model, run_training = support.tied_model, support.untied_model, support.run_training
Run = Callable[..., None]
STEPS = 4


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the trainer catches it."""


def config(output_dir: Path, model_dir: Path, **settings: Any) -> TrainerConfig:
    """Checkpoints at 2 and 4, recovery checkpoints at 1 and 3, all versions kept."""
    base: dict[str, Any] = {
        "max_steps": STEPS,
        "weights": {"keep": None},
        "ckpt": {"interval": 2},
        "recovery_interval": 1,
    }
    return support.make_config(output_dir, model_dir, **{**base, **settings})


@pytest.fixture
def run(run_training: Callable[[TrainerConfig], None], tied_model: Path, tmp_path: Path) -> Run:
    """Train with these settings, on rollouts for all steps."""

    def run(output_dir: Path = tmp_path, model: Path = tied_model, **settings: Any) -> None:
        if not (output_dir / "rollouts").exists():
            support.write_rollouts(output_dir, max(STEPS, settings.get("max_steps", STEPS)))
        run_training(config(output_dir, model, **settings))

    return run


@pytest.fixture(scope="session")
def undisturbed(tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that nothing happened to."""
    from prime_rl.trainer.parallel import close_world
    from prime_rl.trainer.rl.train import make_recipe
    from prime_rl.trainer.training_loop import run

    directory = tmp_path_factory.mktemp("undisturbed")
    support.write_rollouts(directory, STEPS)
    run(config(directory, tied_model, ckpt=None, recovery_interval=None), make_recipe)
    close_world()
    return directory


def numbers(output_dir: Path) -> list[dict[str, float]]:
    """The metrics that do not depend on the clock."""
    clock = ("time", "perf/")
    return [{key: row[key] for key in row if not key.startswith(clock)} for row in metrics(output_dir)]


@contextmanager
def dying_at(point: str) -> Iterator[None]:
    """The process "dies" when it passes `point` for the first time. Nothing that it would do after that happens."""
    hit = list[str]()

    def fire(name: str, file: Path | None = None) -> None:
        if name == point and not hit:
            hit.append(name)
        if hit:
            raise Killed(point)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "point", fire)
        patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)  # the dead do not clean up
        with pytest.raises(Killed):
            yield


BEFORE_ANY_SAVE = ["incarnation:0", "rename:incarnations/0.json", "renamed:incarnations/0.json"]
POINTS = [
    "write:weights/step_2",
    "rename:weights/step_3",
    "renamed:weights/step_3",
    *(f"{where}:checkpoints/step_2/trainer" for where in ("write", "rename", "renamed")),
    "join:checkpoints/step_2",
    "joined:checkpoints/step_2",
    "saved-copy:step_3",
    *(f"{where}:recovery/step_3" for where in ("manifest", "rename", "renamed")),
    "prune:recovery/step_1",
    "renamed:checkpoints/step_4/trainer",
]


@pytest.mark.parametrize(
    ("point", "save_async"),
    [
        *((point, True) for point in BEFORE_ANY_SAVE + POINTS),
        # In the loop the same is done, in the same order.
        *((f"{where}:checkpoints/step_2/trainer", False) for where in ("write", "renamed")),
    ],
)
def test_dies_and_recovers(point, save_async, run, undisturbed, tmp_path):
    """Whatever it was committing, a recovered trainer has an undisturbed one's weights, checkpoints and metrics."""
    settings: dict[str, Any] = {"ckpt": {"interval": 2, "save_async": save_async}}
    with dying_at(point):
        run(**settings)
    run(**settings, recover=True)
    assert hashes(tmp_path) == hashes(undisturbed)
    assert numbers(tmp_path) == numbers(undisturbed)
    assert complete_steps(tmp_path / "checkpoints") == [2, 4]
    assert list_steps(tmp_path / "recovery") == [3]
    assert read_status(tmp_path)["trainer"].outcome == "finished"
    assert [path for path in tmp_path.rglob(".*") if ".tmp-" in path.name and path.suffix != ".json"] == []


@pytest.mark.parametrize(
    "point",
    [
        "rename:weights/step_3", "make-durable:weights/step_2", "made-durable:weights/step_2",
        "renamed:weights/step_4/manifest.json",
    ],
)  # fmt: skip
def test_dies_while_it_publishes_from_memory(point, run, undisturbed, tmp_path):
    """Contract: whenever a trainer dies, each version that stands is whole, and the next incarnation cleans up."""
    memory, weights = {"keep": None, "transport": "memory", "host": "127.0.0.1"}, tmp_path / "weights"
    with dying_at(point):
        run(weights=memory)
    for recovers in (False, True):
        if recovers:
            run(weights=memory, recover=True)
        for version in (weights / f"step_{step}" for step in list_steps(weights)):
            if weights_manifest(version).publisher is None:  # the others were in memory alone
                verify_weights(version)
    final, whole = (weights_manifest(root / "weights" / f"step_{STEPS}") for root in (tmp_path, undisturbed))
    assert final.publisher is None
    assert {name: entry.xxh3 for name, entry in final.tensors.items()} == {
        name: entry.xxh3 for name, entry in whole.tensors.items()
    }
    assert list_steps(weights) == list(range(STEPS + 1))
    assert [path.name for path in weights.iterdir() if path.name.startswith(".")] == []


def damage(state: Path) -> None:
    """Cut off the end of what a rank saved."""
    file = next((state / "state").glob("rank_*.safetensors"))
    file.write_bytes(file.read_bytes()[:-7])


def test_recovers_from_an_older_state(run, undisturbed, tmp_path, caplog):
    """Damaged states are passed over, with a warning; what was made from them is made again, the same."""
    run()
    for directory in (tmp_path / "checkpoints" / "step_4" / "trainer", tmp_path / "recovery" / "step_3"):
        damage(directory)
    run(recover=True)
    assert "skipping checkpoints/step_4/trainer (" in caplog.text
    assert "skipping recovery/step_3 (" in caplog.text
    assert read_incarnations(tmp_path) == {0: 0, 1: 2}
    assert hashes(tmp_path) == hashes(undisturbed)
    assert complete_steps(tmp_path / "checkpoints") == [2, 4]
    assert (tmp_path / "checkpoints" / "given_up_1_step_4" / "trainer" / "state").is_dir()


def test_recovers_from_nothing(run, undisturbed, tmp_path, caplog):
    """Without any state a trainer recovers from the base model, says how much is made again."""
    run(ckpt=None, recovery_interval=None, max_steps=3)
    run(ckpt=None, recovery_interval=None, recover=True)
    assert "starts over from the base model, 3 updates are made again" in caplog.text
    assert read_incarnations(tmp_path) == {0: 0, 1: 0}
    assert hashes(tmp_path) == hashes(undisturbed)
    manifests = [weights_manifest(tmp_path / "weights" / f"step_{version}") for version in (1, 2, 3, 4)]
    assert [manifest.incarnation for manifest in manifests] == [1, 1, 1, 1]


def test_a_stopped_run_goes_on_from_where_it_stopped(run, undisturbed, tmp_path, monkeypatch):
    """Contract: also without `ckpt`, where the last recovery checkpoint may be long ago."""
    with monkeypatch.context() as patch:
        patch.setattr(training_loop, "stop_signal", lambda: (tmp_path / "weights" / "step_2").is_dir)
        run(ckpt=None, recovery_interval=100)
    made = max(list_steps(tmp_path / "weights"))
    assert list_steps(tmp_path / "recovery") == [made]
    run(ckpt=None, recovery_interval=100, recover=True)
    assert read_incarnations(tmp_path) == {0: 0, 1: made}
    assert hashes(tmp_path) == hashes(undisturbed)


@pytest.mark.parametrize("saved", [{}, {"ckpt": None}, {"ckpt": None, "recovery_interval": None}])
def test_recovering_a_finished_run(saved, run, undisturbed, tmp_path):
    """A finished run that is to be recovered is left as it is, whether a state was saved or none."""
    for recover in (False, True):
        run(recover=recover, **saved)
    assert read_incarnations(tmp_path) == {0: 0}
    assert hashes(tmp_path) == hashes(undisturbed)
    assert complete_steps(tmp_path / "checkpoints") == ([] if saved else [2, 4])
    assert read_status(tmp_path)["trainer"].outcome == "finished"


def test_the_last_checkpoint_cannot_be_saved(run, tmp_path):
    """What stands in its place is no checkpoint: the run must not end as if it were one."""
    (tmp_path / "checkpoints" / "step_4" / "trainer" / "foreign").mkdir(parents=True)
    with pytest.raises(UserError, match="step_4/trainer is in the way"):
        run(ckpt={"interval": 100})


def test_the_joint_manifest_is_the_orchestrators(run, tmp_path):
    """Where an orchestrator takes part the trainer commits its parts alone, and removes none."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "orchestrator.toml").touch()
    run(ckpt={"interval": 1, "keep": 1})
    assert complete_steps(tmp_path / "checkpoints") == []
    assert list_steps(tmp_path / "checkpoints") == [1, 2, 3, 4]
    with pytest.raises(UserError, match="single parts of steps .1, 2, 3, 4."):
        run(ckpt={"resume_step": -1})


def test_weights_that_checkpoints_need_stay(run, tmp_path):
    """[N - async_level, N] of each kept checkpoint N stay, also while it is still being written."""
    ckpt = {"interval": 1, "keep": 1, "keep_interval": 4, "save_async": True}
    run(max_steps=9, async_level=1, ckpt=ckpt, weights={"keep": 0})
    assert complete_steps(tmp_path / "checkpoints") == [4, 8, 9]
    assert list_steps(tmp_path / "weights") == [0, 3, 4, 7, 8, 9]


def test_nobody_waits_for_a_recovery_checkpoint(run, tmp_path, monkeypatch):
    """Contract: by the clock the first is early; while one is written the loop goes on, and the next comes later."""
    steps, saved = 14, list[int]()

    def point(name: str, file: Path | None = None) -> None:
        if name.startswith("saved-copy:"):
            saved.append(int(name.removeprefix("saved-copy:step_")))
        if name == "manifest:recovery/step_3":
            wait(lambda: 9 in list_steps(tmp_path / "weights"), subject="version 9", owner="the loop", seconds=120)

    monkeypatch.setattr(faults, "point", point)
    monkeypatch.setattr("prime_rl.trainer.ckpt.recovery_pause", lambda held_up, writing: 0.0)
    run(ckpt=None, recovery_interval="auto", async_level=1, max_steps=steps)
    assert saved[0] == 3
    assert len(saved) > 1
    assert saved[1] >= 9, "it waited"
    assert [row["step"] for row in metrics(tmp_path)] == list(range(steps))
    assert {int(row["step"]) for row in metrics(tmp_path) if "time/save_ckpt" in row} == set(saved) - {steps}


@pytest.mark.parametrize(("interval", "expected"), [(5, [5]), (7, [3, 7])])
def test_a_checkpoint_waits_for_no_recovery_checkpoint(interval, expected, run, tmp_path, monkeypatch):
    """Contract: by the clock none is begun within three steps of a checkpoint, which would wait until it is written."""
    saved = list[str]()
    monkeypatch.setattr(faults, "point", lambda name, file=None: saved.append(name))
    monkeypatch.setattr("prime_rl.trainer.ckpt.recovery_pause", lambda held_up, writing: 3600.0)
    ckpt = {"interval": interval, "save_async": True}
    run(ckpt=ckpt, recovery_interval="auto", async_level=1, max_steps=8)
    copies = [name for name in saved if name.startswith("saved-copy:")]
    assert copies == [f"saved-copy:step_{step}" for step in expected]


FOREIGN = r"step_7 was not made by this program, or is damaged: move it"
REFUSALS: list[tuple[str, dict[str, Any], str | None]] = [
    ("checkpoints of an earlier run", {}, None),
    ("resume_step 3: .* holds complete checkpoints", {"ckpt": {"resume_step": 3}}, None),
    ("max_steps 1 is below", {"ckpt": {"resume_step": -1}, "max_steps": 1}, None),
    ("another base model", {"ckpt": {"resume_step": -1}}, None),
    (FOREIGN, {"recover": True}, "weights/step_7/x"),
]


@pytest.mark.parametrize(("message", "settings", "foreign"), REFUSALS, ids=str)
def test_who_is_refused_leaves_no_trace(message, settings, foreign, run, untied_model, tmp_path):
    """A trainer that may not go on in a run directory, or finds what is not ours under our names, changes no file."""
    run(max_steps=2, weights={"keep": 1})
    if foreign is not None:
        (tmp_path / foreign).parent.mkdir(parents=True)
        (tmp_path / foreign).write_text("mine")
    # A restart by the launcher says at once that it lives.
    apart = {"status", "logs", "metrics"} if "recover" in settings else set[str]()

    def files() -> dict[Path, bytes]:
        paths = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name not in apart]
        return {path: path.read_bytes() for path in paths}

    before, model = files(), {"model": untied_model} if "another base" in message else {}
    with pytest.raises(UserError, match=message):
        run(**{"weights": {"keep": 7}, **model, **settings})
    assert files() == before


def test_only_damaged_states_are_no_reason_to_start_over(run, undisturbed, tmp_path):
    """Where no saved state is whole, nothing is given up: the user is told which they are, and may move them away."""
    run(ckpt=None, max_steps=3)
    state = tmp_path / "recovery" / "step_3"
    damage(state)
    with pytest.raises(
        UserError, match=r"every checkpoint is damaged: .*recovery/step_3 \(.*put back a copy, or move these out"
    ):
        run(ckpt=None, recover=True)
    assert read_incarnations(tmp_path) == {0: 0}
    assert list_steps(tmp_path / "weights") == [0, 1, 2, 3]
    state.rename(tmp_path / "moved")
    run(ckpt=None, recover=True)
    assert hashes(tmp_path) == hashes(undisturbed)


def test_a_mistyped_step_loses_no_checkpoint(run, undisturbed, tmp_path):
    """Going back by hand keeps later checkpoints under other names."""
    run()
    run(ckpt={"interval": 2, "resume_step": 2})
    verify(tmp_path / "checkpoints" / "given_up_1_step_4" / "trainer")
    assert hashes(tmp_path) == hashes(undisturbed)
    assert list(read_incarnations(tmp_path).values()) == [0, 2]


def test_the_state_it_began_from_is_gone(run, tmp_path):
    """An incarnation that began at step 2 does not recover from the base model, which is another history."""
    run(max_steps=2, recovery_interval=None)
    with dying_at("renamed:incarnations/1.json"):
        run(ckpt={"interval": 2, "resume_step": 2})
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(UserError, match="the run went on from step 2, and neither that state nor a later one"):
        run(recover=True)


@pytest.mark.parametrize("place", ["weights/step_2", "recovery/step_1"])
def test_an_outlived_trainer_commits_no_more(place, run, tmp_path, monkeypatch):
    """Once a later incarnation is opened the earlier trainer ends, by a message, before it commits anything."""

    def point(name: str, file: Path | None = None) -> None:
        if name == "rename:weights/step_1":
            (tmp_path / "incarnations" / "7.json").write_text('{"step": 0}')

    monkeypatch.setattr(faults, "point", point)
    with pytest.raises(UserError, match=r"another trainer has gone on with the run .*incarnation 7; this one is 0"):
        run(recovery_interval=1 if place.startswith("recovery") else None)
    assert not (tmp_path / place).exists()


def test_two_runs_with_one_place_for_checkpoints(run, tmp_path):
    """The second one is refused, whether it begins anew or would go on from a checkpoint that is not the newest."""
    one, two = tmp_path / "one", tmp_path / "two"
    ckpt: dict[str, Any] = {"interval": 2, "output_dir": tmp_path}
    run(one, ckpt=ckpt)
    with pytest.raises(UserError, match="checkpoints of an earlier run"):
        run(two, ckpt=ckpt)
    with pytest.raises(UserError, match="later checkpoints, of another run .up to step_4.: to branch off, copy step_2"):
        run(two, ckpt={**ckpt, "resume_step": 2})
    assert complete_steps(tmp_path / "checkpoints") == [2, 4]


FAILS = r"\S* cannot be written \(Input/output error\): nothing was committed, and what was committed before"


def failing_under(place: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, whose first argument is a descriptor, with an error for files under `place`."""

    def fail(descriptor: int, *rest: Any) -> Any:
        if place in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EIO, "Input/output error")
        return call(descriptor, *rest)

    return fail


@pytest.mark.parametrize("save_async", [False, True], ids=["in the loop", "in the background"])
@pytest.mark.parametrize(
    ("place", "committed"),
    [("/weights/.step_2", [0, 1]), ("/checkpoints/step_2/", [0, 1, 2]), ("/recovery/.step_1", [0, 1])],
)
def test_input_output_error(place, committed, save_async, run, tmp_path):
    """The run ends with the place and the reason; committed versions are whole, and --recover goes on to the end."""
    settings: dict[str, Any] = {"max_steps": 2, "ckpt": {"interval": 2, "save_async": save_async}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", failing_under(place, os.fsync))
        with pytest.raises(UserError, match=FAILS):
            run(**settings)
    assert "cannot be written" in (read_status(tmp_path)["trainer"].outcome or "")
    versions = list_steps(tmp_path / "weights")
    assert set(versions) <= {0, 1, 2}
    assert versions[: len(committed)] == committed
    for version in versions[1:]:
        verify_weights(tmp_path / "weights" / f"step_{version}")
    assert complete_steps(tmp_path / "checkpoints") == []
    run(recover=True, **settings)
    assert complete_steps(tmp_path / "checkpoints") == [2]
    assert list_steps(tmp_path / "weights") == [0, 1, 2]


def test_background_failure_is_heard_at_a_following_step(run, tmp_path):
    """The loop does not run on for ever while its checkpoints fail."""

    def full(name: str, file: Path | None = None) -> None:
        if name == "write:checkpoints/step_1/trainer":
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "point", full)
        with pytest.raises(UserError, match="checkpoints/step_1.* cannot be written .No space left on device"):
            run(max_steps=40, recovery_interval=None, ckpt={"interval": 1, "save_async": True})
    assert list_steps(tmp_path / "weights")[-1] < 40
    assert not list((tmp_path / "checkpoints").glob("step_*/*"))


def test_versions_of_a_checkpoint_stay(run, monkeypatch):
    """Contract: while it is written, `needed` names it, also when the loop waits for that before it saves the next."""
    named, commit = list[bool](), Checkpoints._await_dependencies

    def look(checkpoints: Checkpoints, step: int, *arguments: Any) -> None:
        time.sleep(0.5)  # until the loop waits
        named.append(step in checkpoints.needed())
        commit(checkpoints, step, *arguments)

    monkeypatch.setattr(Checkpoints, "_await_dependencies", look)
    run(max_steps=2, ckpt={"interval": 1, "save_async": True}, recovery_interval=None)
    assert named == [True, True]
