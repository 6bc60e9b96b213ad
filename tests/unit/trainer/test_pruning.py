"""Old versions are removed beside the next one: it does not wait for them, the one after it does, and what fails there is heard."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from prime_rl.errors import UserError
from prime_rl.trainer import weight_publisher
from prime_rl.trainer.model import Policy
from prime_rl.trainer.parallel import World
from prime_rl.trainer.source import find_model
from prime_rl.trainer.weight_publisher import WeightPublisher
from prime_rl.transport.commit import list_steps, prune
from prime_rl.wait import wait
from support import trainer as support

world, make_policy, tied_model = support.world, support.make_policy, support.tied_model


@pytest.fixture
def incarnation(
    world: World, make_policy: Callable[..., Policy], tied_model: Path, tmp_path: Path
) -> Iterator[WeightPublisher]:
    """An incarnation with four versions beside the base; two of them are superfluous."""
    made = WeightPublisher(
        tmp_path, make_policy(tied_model), find_model(str(tied_model)), world, torch.float32, timeout=60, async_level=1
    )
    with closing(made):
        made.open(0)
        for version in range(1, 5):
            made.publish(version)
        made.settle()
        yield made


def prune_old(incarnation: WeightPublisher) -> None:
    incarnation.prune(list)


class Slow:
    """`prune`, which waits until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.may = threading.Event(), threading.Event()
        monkeypatch.setattr(weight_publisher, "prune", self)

    def __call__(self, directory: Path) -> None:
        self.began.set()
        self.may.wait(60)
        prune(directory)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    made = Slow(monkeypatch)
    yield made
    made.may.set()


def test_the_next_version_does_not_wait(incarnation: WeightPublisher, slow: Slow, tmp_path: Path) -> None:
    """While old versions are being removed the next one is committed; the one after it begins when that is over."""
    prune_old(incarnation)
    assert slow.began.wait(60)
    incarnation.publish(5)
    wait(
        lambda: 5 in list_steps(tmp_path / "weights"),
        subject="weights/step_5",
        owner="the thread",
        seconds=60,
        poll=0.05,
    )
    assert list_steps(tmp_path / "weights") == [0, 1, 2, 3, 4, 5]
    prune_old(incarnation)
    incarnation._pruner.timeout = 0.05
    for _ in range(2):
        with pytest.raises(UserError, match="no end of removing old versions from the thread that removes them"):
            incarnation.publish(6)
    incarnation._pruner.timeout = 60
    slow.may.set()
    incarnation.publish(6)
    incarnation.settle()
    assert list_steps(tmp_path / "weights") == [0, 4, 5, 6]


@pytest.mark.parametrize(
    "hear",
    [lambda incarnation: incarnation.publish(5), lambda incarnation: incarnation.settle()],
    ids=["publish", "settle"],
)
def test_a_failure_is_heard(
    hear: Callable[[WeightPublisher], None],
    incarnation: WeightPublisher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By whoever comes next, once; what comes after goes on."""

    def failing(directory: Path) -> None:
        raise UserError(f"the file system fails at {directory}")

    with monkeypatch.context() as context:
        context.setattr(weight_publisher, "prune", failing)
        prune_old(incarnation)
        ((_, failed),) = incarnation._pruner.tasks
        assert failed.exception(timeout=60) is not None
    with pytest.raises(UserError, match="the file system fails at .*step_1"):
        hear(incarnation)
    incarnation.publish(5)
    prune_old(incarnation)
    incarnation.settle()
    assert list_steps(tmp_path / "weights") == [0, 4, 5]


def test_nothing_is_removed_for_a_version_that_failed(incarnation: WeightPublisher, tmp_path: Path) -> None:
    """What the version under way would make superfluous stays where it is not committed."""

    def refuse() -> None:
        raise UserError("not finite")

    incarnation.publish(5, refuse)
    prune_old(incarnation)
    with pytest.raises(UserError, match="not finite"):
        incarnation.settle()
    incarnation.settle()
    assert list_steps(tmp_path / "weights") == [0, 1, 2, 3, 4]
