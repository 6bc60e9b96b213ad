"""The thread that prepares the next step: the right data, errors where they belong, an end within a bound."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prime_rl.config.trainer import DefaultLoss, PolicyLoss
from prime_rl.errors import UserError
from prime_rl.trainer.loss import STREAMS
from prime_rl.trainer.packing import StepData, StepSource
from prime_rl.trainer.parallel import World
from prime_rl.trainer.rl import data as rl_data
from prime_rl.trainer.rl.data import RolloutData
from prime_rl.trainer.source import find_model
from prime_rl.transport.rollouts import write_batch
from support import trainer as support

world, tied_model = support.world, support.tied_model


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive(), thread.name


class Steps(StepSource):
    """Steps whose data is what `make` gives, as the number of samples."""

    def __init__(self, world: World, make: Callable[[int], int], seconds: float = 10) -> None:
        super().__init__(world, seconds)
        self.make = make

    def prepare(self, step: int) -> StepData:
        return StepData([], [], self.make(step))


def test_one_step_ahead(no_thread_is_left: None, world: World) -> None:
    """While one step is trained the next one, and no more, is prepared; each is prepared once, in order."""
    made = []
    second = threading.Event()

    def make(step: int) -> int:
        made.append(step)
        if step == 1:
            second.set()
        return 10 * step

    source = Steps(world, make)
    assert source.read(0).samples == 0
    assert second.wait(60)
    assert made == [0, 1]
    assert [source.read(step).samples for step in (1, 2, 3)] == [10, 20, 30]
    source.close()
    assert made[:4] == [0, 1, 2, 3]


def test_an_error_belongs_to_its_step(no_thread_is_left: None, world: World) -> None:
    """What goes wrong ahead of time is raised where that step is read, not before."""

    def make(step: int) -> int:
        if step == 1:
            raise UserError("row 7 is bad")
        return step

    source = Steps(world, make)
    source.read(0)
    with pytest.raises(UserError, match="row 7 is bad"):
        source.read(1)
    source.close()


def test_too_slow(no_thread_is_left: None, world: World) -> None:
    """Preparing a step that is read is waited for with a bound."""
    go_on = threading.Event()
    source = Steps(world, lambda step: int(go_on.wait(10)), 0.05)
    with pytest.raises(UserError, match="no data of step 0 from the thread that prepares it"):
        source.read(0)
    go_on.set()
    source.close()


def rollouts(root: Path, world: World, model: Path, loss: PolicyLoss | None = None) -> RolloutData:
    config = support.make_config(root, model, dist_timeout=30.0).model_copy(update={"loss": loss or DefaultLoss()})
    return RolloutData(config, world, find_model(str(model)), lambda subject, owner, timeout: None)


def test_rollouts_are_read_ahead(
    no_thread_is_left: None, world: World, tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that is committed while another one is trained is read before it is asked for; it is what a reader that is asked would have read."""
    support.write_rollouts(tmp_path, 2)
    one = rollouts(tmp_path, world, tied_model)
    second = tmp_path / "rollouts" / "step_1"
    second.rename(tmp_path / "later")
    read = threading.Event()
    prepare = one.prepare
    monkeypatch.setattr(one, "prepare", lambda step: (prepare(step), read.set())[0])
    one.read(0)
    assert not one.arrived(1)
    read.clear()
    (tmp_path / "later").rename(second)
    assert read.wait(60)
    assert one.arrived(1)
    assert one.wait(1, lambda: False)
    ahead, two = one.read(1), rollouts(tmp_path, world, tied_model)
    asked = two.read(1)
    one.close()
    two.close()
    assert ahead.lengths == asked.lengths
    assert ahead.environments == asked.environments == ["test"]
    for a, b in zip(ahead.batches, asked.batches, strict=True):
        for name, part in vars(a).items():
            assert np.array_equal(part, vars(b)[name]), name


@pytest.mark.parametrize("ranks", [1, 2])
def test_groups_of_a_step(
    ranks: int, no_thread_is_left: None, world: World, tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: with normalization group every group's weights add up to 1 / groups, wherever its members lie: over several micro-batches and ranks."""
    draw, group_of = (
        np.random.default_rng(0),
        [number % 5 for number in range(23)],
    )  # members lie in several record batches
    samples = [
        replace(support.make_sample(draw, str(number), 40 + number), group_id=f"group {group}")
        for number, group in enumerate(group_of)
    ]
    write_batch(tmp_path / "rollouts", 0, samples)
    readers = [rollouts(tmp_path, world, tied_model, PolicyLoss(normalization="group")) for _ in range(ranks)]
    for rank, reader in enumerate(readers):
        reader.world = replace(world, rank=rank, size=ranks)
    steps = [reader.prepare(0) for reader in readers]
    counts = [rl_data._tokens_of_groups(step) for step in steps]
    monkeypatch.setattr(rl_data, "sum_over_ranks", lambda world, values: [*values[:3], *sum(counts)])
    weights, micro_batches = np.zeros(5), [set[int]() for _ in range(5)]
    for reader, step in zip(readers, steps, strict=True):
        rl_data.normalize(step, world, reader.config.loss)
        for batch, groups in zip(step.batches, step.groups, strict=True):
            documents = groups[batch.documents()[0]]
            weights += np.bincount(documents, batch.streams[STREAMS.index("rl_scale")], minlength=5)
            for group in documents:
                micro_batches[group].add(id(batch))
        reader.close()
    assert all(len(found) > 1 for found in micro_batches)
    assert weights.tolist() == pytest.approx([0.2] * 5, rel=1e-5)
    tokens = {
        place: sum(sum(one.loss_mask) for one, g in zip(samples, group_of, strict=True) if g == place)
        for place in range(5)
    }
    assert sum(counts).tolist() == list(tokens.values())
