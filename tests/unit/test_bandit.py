"""Does it learn? The real advantages, streams and losses on a problem whose expected reward is known exactly."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch

from prime_rl.trainer.parallel import close_world, init_world

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    import bandit
    import bandit_page
finally:
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def world():
    torch.set_num_threads(1)
    yield init_world("cpu", 60)
    close_world()


LEARNING = replace(bandit.LEARNING, steps=30)
CLEARLY = 0.15  # of 0.43 … 1; `gspo`, whose clips are narrow, gains 0.20, all others 0.31 and more


@pytest.mark.parametrize("name", bandit.ALGORITHMS)
def test_every_algorithm_learns(name, world):
    """Contract: its advantages point uphill, with samples one version old."""
    curve = bandit.learn(LEARNING, bandit.ALGORITHMS[name], bandit.LOSSES["default"], 0, world)
    assert curve[-1] > curve[0] + CLEARLY


@pytest.mark.parametrize("name", bandit.LOSSES)
def test_every_loss_learns(name, world):
    curve = bandit.learn(LEARNING, bandit.ALGORITHMS["grpo"], bandit.LOSSES[name], 0, world)
    assert curve[-1] > curve[0] + CLEARLY


def test_stale_samples_need_a_correction(world):
    """Contract: at async level 2 and a large learning rate the uncorrected loss falls behind; corrected ones do not."""
    setting = bandit.STALE["SGD 150"]

    def settled(loss: str, level: int = 2) -> float:
        run = bandit.learn(replace(setting, level=level), bandit.ALGORITHMS["grpo"], bandit.LOSSES[loss], 0, world)
        return fmean(run[-bandit.SETTLED :])

    uncorrected = settled("none")
    assert settled("none", level=0) > uncorrected + 0.05
    for loss in ("default", "truncate, sequence", "gspo"):
        assert settled(loss) > uncorrected + 0.05, loss


def test_the_page_shows_what_was_measured():
    found = json.loads(bandit.RESULTS.read_text())
    assert bandit_page.PAGE.read_text() == bandit_page.page(found), "run `python benchmarks/bandit.py --table`"
