"""`rl parity`: its statistics by hand, its verdict, and what a loss would drop."""

import math

import pytest
import torch

from prime_rl.config.trainer import DefaultLoss, GRPOLoss, GSPOLoss, LossConfig
from prime_rl.fleet.logprob_check import (
    ENGINES,
    FACTOR,
    LEAST_LARGEST,
    LEAST_MEAN,
    ROUNDED,
    ROUNDING_FACTOR,
    SERVED,
    TRAINED,
    Difference,
    judge,
)
from prime_rl.trainer.packing import collate
from prime_rl.trainer.parity_scorer import STREAMS, _document, dropped_share, gap


def apart(nats: float) -> dict[str, float]:
    """Scores that differ by so much at every token."""
    first = torch.tensor([-1.0, -2.0])
    return gap(first, first + torch.tensor([-nats, nats]))


def gaps(server: float, trainer: float, rounding: float) -> dict[str, dict[str, float]]:
    return {
        ENGINES: apart(max(server, trainer)),
        SERVED: apart(server),
        TRAINED: apart(trainer),
        ROUNDED: apart(rounding),
    }


def test_numbers_by_hand() -> None:
    """Contract: of sampler and trainer |Δ|, and KL(sampler ‖ trainer) by k1 and k3."""
    first = torch.tensor([-1.0, -2.0])
    numbers = gap(first, first + torch.tensor([2.0, 0.25]).log())
    assert numbers["mean"] == pytest.approx(1.5 * math.log(2))
    assert numbers["largest"] == pytest.approx(2 * math.log(2))
    assert numbers["k1"] == pytest.approx((-math.log(2) + math.log(4)) / 2)
    assert numbers["k3"] == pytest.approx(((2 - math.log(2) - 1) + (0.25 + math.log(4) - 1)) / 2)
    assert gap(torch.zeros(101), -torch.arange(101.0))["p99"] == 99.0


def test_the_tolerance_is_that_of_the_computed_types() -> None:
    """Contract: in float32 the logprob check's smallest; else this model's rounding; quantized, 1 nat."""
    assert judge(gaps(0, 0, 0), 0.0, "default") == (Difference(LEAST_MEAN, LEAST_LARGEST), [])
    bound, _ = judge(gaps(0, 0, 0.01), 0.0, "default")
    assert (bound.mean, bound.largest) == pytest.approx((ROUNDING_FACTOR * 0.01, FACTOR * 0.01))
    assert judge(gaps(0, 0, 0.01), 0.0, "default", quantized=True)[0].mean == 1.0


@pytest.mark.parametrize(
    ("server", "trainer", "rounding", "dropped", "reasons"),
    [
        (1e-6, 1e-6, 0.0, 0.0, []),
        (0.02, 0.01, 0.01, 0.0, []),
        (1e-6, 0.43, 0.0, 0.0, ["look at the trainer"]),  # a scale of the logits that is left out
        (0.43, 0.01, 0.01, 0.0, ["look at the server"]),
        (0.01, 0.43, 0.01, 0.2, ["look at the trainer", "loss.type grpo drops or clips 20.00%"]),
        (0.01, 0.01, 0.01, 0.02, ["loss.type grpo"]),
        (0.01, 0.01, 0.01, math.nan, ["loss.type grpo"]),
        (math.nan, 0.0, 0.0, 0.0, ["server and trainer differ"]),
        (0.0, math.inf, 0.0, 0.0, ["server and trainer differ"]),
    ],
)
def test_the_verdict(server: float, trainer: float, rounding: float, dropped: float, reasons: list[str]) -> None:
    """Contract: what rounding explains is sound; other gaps, or any that the run's loss would drop, name who is off."""
    _, stated = judge(gaps(server, trainer, rounding), dropped, "grpo")
    assert len(stated) == len(reasons)
    assert all(reason in text for reason, text in zip(reasons, stated, strict=True))


@pytest.mark.parametrize(
    ("loss", "share"),
    [(DefaultLoss(), 1 / 3), (GRPOLoss(), 1 / 3), (GRPOLoss(clip_high=0.05), 2 / 3), (GSPOLoss(), 1.0)],
)
def test_the_share_that_a_loss_drops(loss: LossConfig, share: float) -> None:
    """Contract: by the run's own loss, of the reply's tokens alone; of one that couples a sequence, all or none."""
    old = torch.tensor([-0.9, -0.9, -0.9])
    batch = collate([_document([1, 2], [3, 4, 5], old.tolist())], len(STREAMS))
    ratios = torch.tensor([1.0, 1.1, 1.5])
    assert dropped_share(loss, old + ratios.log(), torch.zeros(3), batch) == pytest.approx(share)
