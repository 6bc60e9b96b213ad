"""Committed versions: exactly the trained weights, loadable, complete or absent."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from prime_rl.errors import UserError
from prime_rl.trainer import weight_publisher
from prime_rl.trainer.model import Policy
from prime_rl.trainer.parallel import World
from prime_rl.trainer.parameters import named_parameters
from prime_rl.trainer.source import Source, find_model
from prime_rl.trainer.weight_copy import RowCopies
from prime_rl.trainer.weight_publisher import WeightPublisher, export_dtype, write_version
from prime_rl.transport.commit import list_steps, prune
from prime_rl.transport.incarnations import drop_lease, write_lease
from prime_rl.transport.protocol import Lease
from prime_rl.transport.weights import verify_weights
from prime_rl.wait import wait
from support import trainer as support

world, make_policy = support.world, support.make_policy
tied_model, untied_model = support.tied_model, support.untied_model


def export(
    policy: Policy,
    source: Source,
    world: World,
    final: Path,
    dtype: torch.dtype,
    version: int = 1,
    incarnation: int = 0,
) -> None:
    """Commit the policy's weights, all in this thread."""
    copies = RowCopies(policy, world, dtype)
    write_version(copies, copies.copy(), source, world, final, version=version, incarnation=incarnation)


def test_large_weights_lie_in_several_files_written_at_once(
    untied_model: Path,
    world: World,
    make_policy: Callable[..., Policy],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every file but one of a single large tensor keeps to the limit; the index names the file of every tensor; all read the same weights."""
    policy, source = make_policy(untied_model), find_model(str(untied_model))
    export(policy, source, world, tmp_path / "step_1", torch.float32)
    monkeypatch.setattr("prime_rl.trainer.weight_copy.FILE_BYTES", 60_000)
    export(policy, source, world, tmp_path / "step_2", torch.float32, version=2)

    files = sorted(path.name for path in (tmp_path / "step_2").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    one, several = verify_weights(tmp_path / "step_1"), verify_weights(tmp_path / "step_2")
    assert several.hash == one.hash
    index = json.loads((tmp_path / "step_2" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: entry.file for name, entry in several.tensors.items()}
    for file in files:
        held = [name for name, entry in several.tensors.items() if entry.file == file]
        assert len(held) == 1 or (tmp_path / "step_2" / file).stat().st_size < 62_000
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "step_2").state_dict()
    for name, parameter in named_parameters(policy):
        assert torch.equal(loaded[name], parameter.full_tensor())


@pytest.mark.parametrize("which", ["tied_model", "untied_model"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_what_was_trained(
    which: str,
    dtype: torch.dtype,
    world: World,
    make_policy: Callable[..., Policy],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    """transformers loads the directory bit-equal to the masters rounded to its dtype; the manifest verifies; a tied head is written once."""
    directory = request.getfixturevalue(which)
    policy = make_policy(directory)
    with torch.no_grad():
        for _, p in named_parameters(policy):
            p.to_local().add_(0.001)
    final = tmp_path / "step_3"
    export(policy, find_model(str(directory)), world, final, dtype, version=3, incarnation=2)
    manifest = verify_weights(final)
    assert (manifest.version, manifest.incarnation, manifest.base) == (3, 2, None)
    loaded = AutoModelForCausalLM.from_pretrained(final)
    assert loaded.dtype == dtype
    for name, p in named_parameters(policy):
        assert torch.equal(loaded.get_parameter(name), p.full_tensor().to(dtype)), name
    with safe_open(final / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) == (which == "untied_model")  # noqa: SIM118
    assert AutoTokenizer.from_pretrained(final).chat_template == AutoTokenizer.from_pretrained(directory).chat_template


def test_auto_dtype_is_the_source_checkpoints(tied_model: Path, tmp_path: Path) -> None:
    """`auto` keeps the dtype that the base model was published in."""
    AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert export_dtype("auto", find_model(str(tmp_path))) == torch.bfloat16
    assert export_dtype("auto", find_model(str(tied_model))) == torch.float32
    assert export_dtype("bfloat16", find_model(str(tied_model))) == torch.bfloat16


@pytest.fixture
def publisher(
    world: World, make_policy: Callable[..., Policy], tied_model: Path, tmp_path: Path
) -> Iterator[WeightPublisher]:
    """Of an incarnation that has begun, on the disk. (In a tmpfs, and from memory: test_transports.)"""
    policy, source = make_policy(tied_model), find_model(str(tied_model))
    with closing(WeightPublisher(tmp_path, policy, source, world, torch.float32, timeout=60)) as made:
        made.open(0)
        yield made


def test_prune(publisher: WeightPublisher, tmp_path: Path) -> None:
    """The base, what sampling ahead needs, what checkpoints need, and what the orchestrator holds a lease on stay."""
    for version in range(1, 7):
        publisher.publish(version)
    support.prune(publisher, 1, None, list)
    publisher.settle()
    assert list_steps(tmp_path / "weights") == [0, 1, 2, 3, 4, 5, 6]
    write_lease(tmp_path, Lease(incarnation=-1, version=0))  # has not heard of this incarnation yet
    support.prune(publisher, 1, 0, lambda: [3])
    publisher.settle()
    assert list_steps(tmp_path / "weights") == [0, 1, 2, 3, 4, 5, 6]
    write_lease(tmp_path, Lease(incarnation=0, version=4))
    support.prune(publisher, 1, 0, lambda: [2])
    publisher.settle()
    assert list_steps(tmp_path / "weights") == [0, 1, 2, 4, 5, 6]
    drop_lease(tmp_path)
    support.prune(publisher, 1, 0, lambda: [2])
    publisher.settle()
    assert list_steps(tmp_path / "weights") == [0, 1, 2, 5, 6]


def test_weights_may_change_meanwhile(publisher: WeightPublisher, tmp_path: Path) -> None:
    """What is committed are the weights at the time of `publish`, whatever becomes of them until they are written."""
    parameter, name = publisher._copies.tensors[0].parameter, publisher._copies.tensors[0].name
    go_on = threading.Event()
    at_the_time = parameter.full_tensor().detach().clone()
    publisher.publish(1, lambda: go_on.wait(10))
    with torch.no_grad():
        parameter.to_local().add_(1.0)
    assert list_steps(tmp_path / "weights") == [0]
    go_on.set()
    publisher.settle()
    files = verify_weights(tmp_path / "weights" / "step_1").files
    assert torch.equal(load_file(files / "model.safetensors")[name], at_the_time)


def test_a_failure_is_heard_once(publisher: WeightPublisher, tmp_path: Path) -> None:
    """A version that its check refuses is not committed, nor the next one, whose call says why."""
    told: list[int] = []
    publisher._on_committed = lambda version, times: told.append(version)

    def refuse() -> None:
        raise UserError("not finite")

    publisher.publish(1, refuse)
    with pytest.raises(UserError, match="not finite"):
        publisher.publish(3)
    publisher.settle()
    publisher.publish(4)
    publisher.settle()
    assert list_steps(tmp_path / "weights") == [0, 4]
    assert told == [4]
    assert [path.name for path in (tmp_path / "weights").glob(".*")] == []


def test_a_version_that_takes_too_long(publisher: WeightPublisher, tmp_path: Path) -> None:
    """Waiting for a version has an end, which says what was waited for; what is being written is not written over."""
    publisher.settle()
    go_on = threading.Event()
    publisher.publish(1, lambda: go_on.wait(10))
    publisher._committer.timeout = 0.05
    for _ in range(2):
        with pytest.raises(UserError, match="no weights/step_1 from the thread that commits it"):
            publisher.publish(2)
    go_on.set()
    publisher._committer.timeout = 60
    publisher.settle()
    assert list_steps(tmp_path / "weights") == [0, 1]


# ---- pruning beside the loop


@pytest.fixture
def incarnation(publisher: WeightPublisher) -> WeightPublisher:
    """With four versions beside the base; two of them are superfluous."""
    publisher.async_level = 1
    for version in range(1, 5):
        publisher.publish(version)
    publisher.settle()
    return publisher


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
    incarnation.prune(list)
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
    incarnation.prune(list)
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
        incarnation.prune(list)
        ((_, failed),) = incarnation._pruner.tasks
        assert failed.exception(timeout=60) is not None
    with pytest.raises(UserError, match="the file system fails at .*step_1"):
        hear(incarnation)
    incarnation.publish(5)
    incarnation.prune(list)
    incarnation.settle()
    assert list_steps(tmp_path / "weights") == [0, 4, 5]


def test_nothing_is_removed_for_a_version_that_failed(incarnation: WeightPublisher, tmp_path: Path) -> None:
    """What the version under way would make superfluous stays where it is not committed."""

    def refuse() -> None:
        raise UserError("not finite")

    incarnation.publish(5, refuse)
    incarnation.prune(list)
    with pytest.raises(UserError, match="not finite"):
        incarnation.settle()
    incarnation.settle()
    assert list_steps(tmp_path / "weights") == [0, 1, 2, 3, 4]
