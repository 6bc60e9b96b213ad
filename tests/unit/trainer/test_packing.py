"""Packing: every sample once, no micro-batch over its limits, as many on every rank; collation keeps tokens, labels and
boundaries; steps are prepared ahead by a thread, with errors where they belong and an end within a bound."""

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.errors import UserError
from prime_rl.trainer.packing import Costs, Document, StepData, StepSource, collate, plan, rollout_lengths, to_device
from prime_rl.trainer.parallel import World
from support import trainer as support

CPU = torch.device("cpu")


@given(
    lengths=st.lists(st.integers(1, 64), max_size=60), ranks=st.integers(1, 5), quadratic=st.sampled_from([0.0, 0.1])
)
def test_plan(lengths: list[int], ranks: int, quadratic: float) -> None:
    """Every sample exactly once; no bin over seq_len; equal counts; the same for every caller."""
    result = plan(lengths, 64, ranks, Costs(1.0, quadratic))
    bins = [members for of_rank in result for members in of_rank]
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= 64 for members in bins)
    assert len({len(of_rank) for of_rank in result}) == 1
    assert len(result) == ranks
    assert len(result[0]) >= 1
    assert plan(np.array(lengths, dtype=np.int64), 64, ranks, Costs(1.0, quadratic)) == result


@pytest.mark.parametrize("samples", [512, 4096])
def test_micro_steps_are_balanced(samples: int) -> None:
    """On lengths as RL has them, the ranks' micro-batches of one micro-step cost the same (they wait for the dearest),
    there are no more of them than the tokens need, and what one of 16k has room for is filled."""
    lengths = np.array(rollout_lengths(np.random.default_rng(0), samples))
    costs = Costs(1.0, 1e-4)  # about the ratio of a 0.6B model
    result = plan(lengths, 16_384, 8, costs)
    price = np.array([[costs.of(lengths[members]).sum() for members in of_rank] for of_rank in result])
    assert price.sum() / (8 * price.max(axis=0).sum()) > 0.98
    fewest = -(-int(lengths.sum()) // 16_384)
    assert sum(map(len, result)) == -(-fewest // 8) * 8
    assert price.max() / price.min() < 1.02  # also from one micro-step to the next


def make(tokens: list[int], mask: list[bool], temperature: float = 1.0) -> Document:
    return Document(np.array(tokens), np.array(mask), temperature, np.array([tokens], dtype=np.float32) * 10)


def test_collate() -> None:
    """Positions restart, the loss index points at each trained token's predecessor, streams are the trained token's."""
    documents = [make([1, 2, 3], [True, False, True], 0.5), make([4, 5], [False, True])]
    batch = to_device(collate(documents, 1), CPU)
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 5]
    assert batch.max_seqlen == 3
    assert batch.loss_index.tolist() == [1, 3]  # the first document's first token is predicted from nothing
    assert batch.labels.tolist() == [3, 5]
    assert batch.inv_temperature.tolist() == [2.0, 1.0]
    assert batch.streams.tolist() == [[30.0, 50.0]]


@pytest.mark.parametrize(("documents", "multiple", "tokens"), [(0, 1, 2), (0, 8, 8), (1, 8, 8), (3, 8, 16)])
def test_padding(documents: int, multiple: int, tokens: int) -> None:
    """Padding is a document of its own without loss tokens; an empty micro-batch is padding only."""
    batch = collate([make([1, 2, 3], [True, True, True])] * documents, 1, multiple)
    placed = to_device(batch, CPU)
    assert placed.cu_seqlens.diff()[:documents].tolist() == [3] * documents
    assert len(placed.input_ids) == len(placed.position_ids) == placed.cu_seqlens[-1] == tokens
    assert len(placed.labels) == 2 * documents
    assert placed.streams.shape == (1, 2 * documents)
    assert (placed.cu_seqlens.diff() > 0).all()


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

    def __init__(self, world: World, make: Callable[[int], int], seconds: float = 2) -> None:
        super().__init__(world, seconds)
        self.make = make

    def prepare(self, step: int) -> StepData:
        return StepData([], [], self.make(step))


def test_steps_are_prepared_ahead(no_thread_is_left: None, world: World) -> None:
    """While one step is trained the next one, and no more, is prepared, once. Errors are raised where that step is
    read, not before; preparing a step that is read is waited for with a bound."""
    made, second, go_on = [], threading.Event(), threading.Event()

    def make(step: int) -> int:
        made.append(step)
        if step == 1:
            second.set()
        if step == 3:
            raise UserError("row 7 is bad")
        if step == 4:
            go_on.wait(10)
        return 10 * step

    source = Steps(world, make)
    assert source.read(0).samples == 0
    assert second.wait(60)
    assert made == [0, 1]
    assert [source.read(step).samples for step in (1, 2)] == [10, 20]
    with pytest.raises(UserError, match="row 7 is bad"):
        source.read(3)
    with pytest.raises(UserError, match="no data of step 4 from the thread that prepares it"):
        source.read(4)
    go_on.set()
    source.close()
    assert made == [0, 1, 2, 3, 4]
