"""Where a step's time goes, and what limits the run: the side that the other one waits for."""

import json
from pathlib import Path

import pytest

from prime_rl.launcher.progress import step_line, summary
from prime_rl.launcher.split import Split, split, split_lines
from prime_rl.monitor.monitor import metrics_path


def sides(waited: float = 0.0, updated: float = 0.0, gated: float = 0.0) -> tuple[dict[str, float], dict[str, float]]:
    """Rows of a step of ten seconds on both sides."""
    orchestrator = {"time/step": 10.0, "time/update_weights": updated, "time/wait_for_weights": gated}
    computed = {"time/forward_backward": 0.75 * (10.0 - waited), "time/optimizer": 0.25 * (10.0 - waited)}
    return orchestrator, {"time/step": 10.0, "time/wait_for_batch": waited, **computed}


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ({}, "nothing (both sides are busy)"),
        ({"waited": 0.9, "gated": 0.9, "updated": 0.9}, "nothing (both sides are busy)"),
        ({"waited": 6.3, "updated": 0.5}, "generation (trainer waits 63%)"),
        ({"waited": 1.0, "gated": 4.0}, "training (engines wait 40%)"),
        ({"waited": 1.0, "updated": 2.5}, "weight updates (engines load for 25%)"),
    ],
    ids=str,
)
def test_the_limit_is_what_the_other_side_waits_for(seconds: dict[str, float], words: str) -> None:
    orchestrator, trainer = sides(**seconds)
    found = split([orchestrator], [trainer])
    assert found is not None
    assert found.limit == words
    assert step_line(3, 4, orchestrator, trainer, None).endswith(f"| limited by {words}")


def test_only_a_pause_keeps_engines_from_sampling() -> None:
    """Where servers tell how long they paused, reading new weights beside generation is not taken for lost time."""
    orchestrator, trainer = sides(updated=5.0)
    found = split([orchestrator | {"time/update_pause": 0.5}], [trainer])
    assert found is not None
    assert found.updated == pytest.approx(0.05)


def test_shares_are_of_all_steps_together() -> None:
    """Of a long step and a short one: seconds are added up, shares are not averaged. What is not sampling nor standing still is neither lost."""
    long, short = sides(waited=5.0), ({"time/step": 1.0}, {"time/step": 1.0, "time/wait_for_batch": 1.0})
    found = split([long[0], short[0]], [long[1], short[1]])
    assert found == Split(trained=pytest.approx(5 / 11), waited=pytest.approx(6 / 11), updated=0.0, gated=0.0)
    assert found.sampled == 1.0
    assert split_lines(Split(0.35, 0.63, 0.03, 0.09)) == [
        "time, trainer: computes 35%, waits for batches 63%; engines: sample 88%, load weights 3%, wait for the trainer 9%",
        "limited by generation (trainer waits 63%)",
    ]


def test_nothing_is_said_without_times() -> None:
    """A side that has no time, and a first step, which waits for the start-up."""
    orchestrator, trainer = sides(waited=6.0)
    assert split([], []) is None
    assert split([{"reward/mean": 1.0}], [trainer]) is None
    assert "limited" not in step_line(0, 4, orchestrator, trainer, None)
    assert "limited" not in step_line(1, 4, trainer, trainer, None)  # a side on its own


def test_the_end_of_a_run_sums_up(tmp_path: Path) -> None:
    """Steps that both made, without the first; what the trainer adds late to a row is one with it; another life's rows are left out."""
    (tmp_path / "metrics").mkdir()
    for side in (0, 1):
        path = metrics_path(tmp_path, ("orchestrator", "trainer")[side])
        rows = [{"step": 0, "time": 1.0, **sides(waited=9.9)[side]}]
        rows += [{"step": step, "time": 100.0, **sides(waited=(9.0, 6.0, 6.0)[step])[side]} for step in range(3)]
        rows += [{"step": 2, "time": 101.0, "time/save_ckpt": 1.0}] if side else []
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert summary(tmp_path, since=50.0) == [
        "time, trainer: computes 40%, waits for batches 60%; engines: sample 100%, load weights 0%, wait for the trainer 0%",
        "limited by generation (trainer waits 60%)",
    ]
