"""What limits a run is named from what was measured, and console, metrics and doctor name the same."""

import json
from pathlib import Path

import pytest

from prime_rl.launcher import doctor
from prime_rl.launcher.console import Console
from prime_rl.monitor.limits import Shares, limit_of, shares_of
from prime_rl.monitor.monitor import metrics_path
from prime_rl.monitor.run_directory import SIDES, RunDirectory
from prime_rl.transport.incarnations import open_incarnation

# Situations, worked out by hand. The first number is the share that is named.
SITUATIONS = {
    "training, engines overlap": (Shares(waited=0.02, idle=0.4), "training", 0.98, "engines wait 40%"),
    "generation, trainer waits": (Shares(waited=0.63, idle=0.02), "generation", 0.98, "trainer waits 63%"),
    "both are busy, training more": (Shares(waited=0.05, idle=0.1), "training", 0.95, "both sides are busy"),
    # Environment workers: the engines have requests all the time, but a worker has no processor time left.
    "a worker's core is full": (Shares(waited=0.7, cpu=0.97), "environment workers", 1.0, "97% of a core"),
    "a worker is full while it has work": (Shares(waited=0.7, idle=0.5, cpu=0.48), "environment workers", 0.5, "48%"),
    # Two H100s, a tiny model: engines sample 35 % and idle 55 %, the trainer computes 26 % and waits for batches 74 %.
    "two GPUs, nothing else measured": (
        Shares(waited=0.74, idle=0.55, paused=0.1), "the pipeline", 0.65, "engines sample 35%, trainer 26%",
    ),
    "two GPUs, one worker": (
        Shares(waited=0.74, idle=0.55, paused=0.1, cpu=0.33), "environment workers", 0.35, "33% of a core",
    ),
    "one GPU": (
        Shares(waited=0.5, publish=0.16, saved=0.23, idle=0.45, paused=0.16), "checkpoints", 0.23, "for 23%",
    ),
    "checkpoints": (Shares(waited=0.1, saved=0.3, idle=0.5), "checkpoints", 0.3, "for 30%"),
    "reading batches": (Shares(read=0.4, idle=0.45), "data", 0.4, "40% to read"),
    # Synchronous training: both sides take turns.
    "turns": (Shares(waited=0.5, idle=0.5), "the pipeline", 0.5, "engines sample 50%, trainer 50%"),
    "small waits explain nothing": (Shares(waited=0.25, saved=0.05, idle=0.3), "the pipeline", 0.3, "neither side"),
}  # fmt: skip


@pytest.mark.parametrize("situation", SITUATIONS)
def test_each_situation_is_named(situation: str) -> None:
    """Contract: the side nearly always busy, else what explains half of the busier one's loss, else the pipeline."""
    shares, name, share, reason = SITUATIONS[situation]
    limit = limit_of(shares)
    assert (limit.name, limit.share) == (name, pytest.approx(share))
    assert reason in limit.reason


def rows(**seconds: float) -> tuple[dict[str, float], dict[str, float]]:
    """Rows of a step of ten seconds on both sides."""
    trainer = {"wait_for_batch", "read_batch", "export", "export_write", "save_ckpt"}
    sides: tuple[dict[str, float], dict[str, float]]
    sides = {"time/step": 10.0, "time/idle": 0.0}, {"time/step": 10.0, "time/wait_for_batch": 0.0}
    for name, value in seconds.items():
        sides[name in trainer][f"time/{name}"] = value
    return sides


def test_shares_are_of_all_steps_together() -> None:
    """Contract: of a long step and a short one the seconds are added up; shares are not averaged."""
    seconds = {"read_batch": 1.0, "save_ckpt": 1.0, "export": 0.5, "export_write": 1.5}
    orchestrator, trainer = rows(idle=4.0, update_weights=2.0, update_pause=0.5, wait_for_batch=3.0, **seconds)
    short = {"time/step": 2.0, "time/idle": 2.0, "workers/cpu": 0.6}, {"time/step": 2.0, "time/wait_for_batch": 2.0}
    assert shares_of([orchestrator, short[0]], [trainer, short[1]]) == Shares(
        waited=pytest.approx(4 / 12), publish=pytest.approx(0.5 / 12), saved=pytest.approx(1 / 12),
        read=pytest.approx(1 / 12), idle=pytest.approx(6 / 12), paused=pytest.approx(0.5 / 12), cpu=pytest.approx(0.1),
    )  # fmt: skip


def add(root: Path, process: str, *rows: dict[str, float]) -> None:
    path = metrics_path(root, process)
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write("".join(json.dumps({"time": 0.0, **row}) + "\n" for row in rows))


def test_steps_are_judged_without_those_at_which_a_trainer_began(tmp_path: Path) -> None:
    """Contract: what comes late is of its step; the first step, starts, and what was before count for nothing."""
    run = RunDirectory(tmp_path)
    for step, waited in enumerate([9.0, 6.0, 0.0, 9.9, 5.0]):
        orchestrator, trainer = rows(wait_for_batch=waited)
        add(tmp_path, "orchestrator", {"step": step, **orchestrator})
        add(tmp_path, "trainer", {"step": step, **trainer}, {"step": step, "time/save_ckpt": 1.0})
        if step == 1:
            run.read(*SIDES)
            assert (found := run.shares()) is not None
            assert found.waited == pytest.approx(0.6)
    for start in (0, 3):
        open_incarnation(tmp_path, start)
    run.read(*SIDES)
    assert (found := run.shares()) is not None
    assert (found.waited, found.saved) == (pytest.approx(11 / 30), pytest.approx(0.1))
    assert run.shares(since=1.0) is None


def test_console_metrics_and_doctor_name_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Contract: one rule, one window, whoever asks: a step's line, the end of the run, `rl doctor`, the metrics."""
    console = Console(tmp_path, 3)
    for process, row in zip(
        ("orchestrator", "trainer"), rows(wait_for_batch=7.0, idle=1.0, read_batch=0.5), strict=True
    ):
        times = ({"step": step, "time": 2e9 + 100.0 * step, "loss/mean": 0.0} for step in range(3))
        add(tmp_path, process, *({**each, **row} for each in times))
    words = "limited by generation (trainer waits 70%)"
    limit = RunDirectory(tmp_path).limit()
    assert limit is not None
    assert (str(limit), limit.metric) == (words, "limit/generation")
    assert console.step_lines()[-1].endswith("| limited by generation | ETA 0:00")
    assert console.summary()[1:] == [
        "trainer: computes 30%, waits for batches 65%; engines: sample 90%, load weights 0%, idle 10%", words
    ]  # fmt: skip
    doctor.examine(tmp_path)
    assert f"{'time':<15}{console.summary()[1]}\n{'speed':<15}{words}" in capsys.readouterr().out
