"""Versions of the weights: exactly what was trained, whole or absent, by every transport. (Trainers that die:
test_recovery.py.)"""

import json
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import make_tiny_model
from prime_rl.errors import UserError
from prime_rl.trainer import weight_publisher
from prime_rl.trainer.model import Policy
from prime_rl.trainer.parameters import named_parameters
from prime_rl.trainer.source import find_model
from prime_rl.trainer.weight_copy import WeightCopy
from prime_rl.trainer.weight_publisher import WeightPublisher, export_dtype, write_version
from prime_rl.transport.commit import MANIFEST, CommitError, list_steps, prune
from prime_rl.transport.incarnations import PublishedVersions
from prime_rl.transport.protocol import Lease
from prime_rl.transport.weights import verify_weights, weights_manifest
from prime_rl.wait import wait
from support.forking import on_ranks
from support.publishing import received
from support.versions import TRANSPORTS, Run, assert_equal, open_run

MakePolicy = Callable[..., Policy]
Open = Callable[..., AbstractContextManager[Run]]


@pytest.fixture
def opened(world, make_policy, tied_model, tmp_path):
    """Opens a run by its transport."""
    return lambda transport, /, **more: open_run(
        transport, world, make_policy(tied_model), tied_model, tmp_path, **more
    )


@pytest.fixture(params=[*TRANSPORTS])
def run(request, opened):
    """Each transport."""
    with opened(request.param) as made:
        yield made


def trained(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach().bfloat16().clone() for name, p in named_parameters(policy)}


def load(directory: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(directory)


def test_what_servers_get_is_what_the_ranks_trained(tmp_path):
    """Contract: of three ranks (with three experts), and of two replicas of two ranks each, servers get bit for bit the
    rows of all; what must outlive the processes is written in full, the base as its files have it."""
    model = make_tiny_model(tmp_path / "model", experts=3)
    runs = [
        {"ranks": n, "kind": kind, "model": str(model), "root": str(tmp_path / f"{kind}-{n}"), "replicas": replicas}
        for kind in ("filesystem", "memory")
        for n, replicas in ((3, 1), (4, 2))
    ]
    on_ranks("support.versions:rank", runs, tmp_path / "log")


@pytest.mark.parametrize(("which", "dtype"), [("tied_model", torch.bfloat16), ("untied_model", torch.float32)])
def test_transformers_loads_what_was_trained(which, dtype, world, make_policy, request, tmp_path, monkeypatch):
    """transformers loads the directory bit-equal to the masters rounded to its dtype; the manifest verifies; a tied
    head is written once. Every file but of a single large tensor keeps to the limit, and the index
    names the file of every tensor."""
    directory, final = request.getfixturevalue(which), tmp_path / "step_3"
    policy = make_policy(directory)
    with torch.no_grad():
        for _, p in named_parameters(policy):
            p.to_local().add_(0.001)
    limit = 60_000
    monkeypatch.setattr("prime_rl.trainer.weight_copy.FILE_BYTES", limit)
    copies = WeightCopy(policy, world, dtype)
    copies.copy()
    write_version(copies, find_model(str(directory)), final, version=3, incarnation=2)
    manifest = verify_weights(final)
    assert (manifest.version, manifest.incarnation, manifest.base) == (3, 2, None)
    loaded = load(final)
    assert loaded.dtype == dtype
    for name, p in named_parameters(policy):
        assert torch.equal(loaded.get_parameter(name), p.full_tensor().to(dtype)), name
    assert ("lm_head.weight" in manifest.tensors) == (which == "untied_model")
    assert AutoTokenizer.from_pretrained(final).chat_template == AutoTokenizer.from_pretrained(directory).chat_template
    files = sorted(path.name for path in final.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((final / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: entry.file for name, entry in manifest.tensors.items()}
    for file in files:
        assert [*index["weight_map"].values()].count(file) == 1 or (final / file).stat().st_size < limit + 2_000


def test_auto_dtype_is_the_source_checkpoints(tied_model, tmp_path):
    """`auto` keeps the dtype that the base model was published in."""
    AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert export_dtype("auto", find_model(str(tmp_path))) == torch.bfloat16
    assert export_dtype("auto", find_model(str(tied_model))) == torch.float32
    assert export_dtype("bfloat16", find_model(str(tied_model))) == torch.bfloat16


def test_what_must_outlive_lies_in_the_run_directory(run):
    """Contract: such a version is a model directory by itself, identified by its tensors and verified by them, however
    it came there; so is the last one. All that is left at the end is whole. A change of one bit is found."""
    incarnation = run.incarnation()
    hashes = run.train(incarnation, range(1, 5), durable=(2,))
    assert len({*hashes.values()}) == 4
    assert load(run.weights / "step_2") is not None
    incarnation.ensure(4, durable=True)
    incarnation.finish()
    assert verify_weights(run.weights / "step_4").hash == hashes[4]
    assert load(run.weights / "step_4") is not None
    file = run.weights / "step_4" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    with pytest.raises(CommitError):
        verify_weights(file.parent)


def test_resume(run):
    """Contract: an incarnation has its first version on disk, though it was in memory or gone; later ones are gone."""
    hashes = run.train(run.incarnation(), range(1, 5), durable=(2, 4))
    run.incarnation(2)
    assert list_steps(run.weights) == [0, 1, 2]
    assert load(run.weights / "step_2") is not None
    assert weights_manifest(run.weights / "step_2").hash == hashes[2]
    run.incarnation(7)
    assert weights_manifest(run.weights / "step_7").incarnation == 2


def test_a_durable_version_can_be_had_all_the_time(opened, monkeypatch):
    """Contract: at first its directory holds a manifest alone; its files come into that one, under the same hash, while
    the publisher still has it."""
    seen = list[Any]()

    def point(name: str, *_: object) -> None:
        if name == "make-durable:weights/step_1":
            with pytest.raises(CommitError, match="never written"):
                verify_weights(directory)
            assert {path.name for path in directory.iterdir()} == {MANIFEST}
            seen.extend([directory.stat().st_ino, received(weights_manifest(directory))])

    with opened("memory") as run:
        incarnation, directory = run.incarnation(), run.weights / "step_1"
        monkeypatch.setattr("prime_rl.transport.weights.faults.point", point)
        (digest,) = run.train(incarnation, range(1, 2), durable=(1,)).values()
        assert seen[0] == directory.stat().st_ino
        manifest = verify_weights(directory)
        assert (manifest.hash, manifest.publisher) == (digest, None)
        assert_equal(seen[1], trained(run.policy))
        assert_equal(load_file(directory / "model.safetensors"), trained(run.policy))


def test_versions_of_an_interval_are_kept_for_good(opened):
    """Contract: `weights.save_interval`; however versions get to servers, these have files and are never pruned."""
    with opened("memory", save_interval=2, keep=0) as run:
        incarnation = run.incarnation()
        for version in range(1, 8):
            run.train(incarnation, range(version, version + 1))
        assert list_steps(run.weights) == [0, 2, 4, 6, 7]
        for version in (2, 4, 6):
            verify_weights(run.weights / f"step_{version}")


@pytest.fixture
def publisher(opened):
    """Of an incarnation that has begun, on the disk."""
    with opened("filesystem") as run:
        yield run.incarnation()


def steps(publisher: WeightPublisher) -> list[int]:
    return list_steps(publisher.root)


def keeping(publisher: WeightPublisher, keep: int | None) -> WeightPublisher:
    """As in a run with this setting and async level 1."""
    publisher.async_level, publisher.config = 1, publisher.config.model_copy(update={"keep": keep})
    return publisher


def test_prune(publisher):
    """The base, what sampling ahead needs, what checkpoints need, and what the orchestrator holds a lease on stay."""
    for version in range(1, 7):
        publisher.publish(version)

    def after(keep: int | None, *checkpoints: int) -> list[int]:
        keeping(publisher, keep)._needed = lambda: checkpoints
        publisher.finish()
        return steps(publisher)

    assert after(None) == [0, 1, 2, 3, 4, 5, 6]
    published = PublishedVersions(publisher.output_dir)
    published.write_lease(Lease(incarnation=-1, version=0))  # has not heard of this incarnation yet
    assert after(0, 3) == [0, 1, 2, 3, 4, 5, 6]
    published.write_lease(Lease(incarnation=0, version=4))
    assert after(0, 2) == [0, 1, 2, 4, 5, 6]
    published.write_lease(None)
    assert after(0, 2) == [0, 1, 2, 5, 6]


def refuse() -> None:
    raise UserError("not finite")


def test_weights_may_change_meanwhile(publisher):
    """What is committed are the weights at the time of `publish`, whatever becomes of them until they are written.
    Waiting for a version has an end, which says what was waited for; what is being written is not written over."""
    parameter, name = publisher._copies.stored[0].parameter, publisher._copies.stored[0].name
    may_go_on = threading.Event()
    at_the_time = parameter.full_tensor().detach().bfloat16().clone()
    publisher.publish(1, lambda: may_go_on.wait(10))
    publisher.settle(unless=lambda: True)  # as the loop does, until its next batch is there
    with torch.no_grad():
        parameter.to_local().add_(1.0)
    assert steps(publisher) == [0]
    publisher._committer.seconds = 0.05
    for _ in range(2):
        with pytest.raises(UserError, match="no weights/step_1 from the thread that commits it"):
            publisher.publish(2)
    may_go_on.set()
    publisher._committer.seconds = 60
    publisher.settle()
    assert steps(publisher) == [0, 1]
    assert torch.equal(load_file(publisher.root / "step_1" / "model.safetensors")[name], at_the_time)


def test_a_failure_is_heard_once(publisher):
    """A version that its check refuses is not committed, nor the next one, whose call says why."""
    committed: list[int] = []
    publisher._on_committed = lambda version, times: committed.append(version)
    publisher.publish(1, refuse)
    with pytest.raises(UserError, match="not finite"):
        publisher.publish(3)
    publisher.settle()
    publisher.publish(4)
    publisher.settle()
    assert steps(publisher) == [0, 4]
    assert committed == [4]
    assert [path.name for path in publisher.root.glob(".*")] == []


@pytest.fixture
def four_versions(publisher):
    """Beside the base; two of them are superfluous."""
    for version in range(1, 5):
        publisher.publish(version)
    publisher.settle()
    return keeping(publisher, 0)


def test_the_next_version_does_not_wait(four_versions, monkeypatch):
    """While old versions are being removed the next are committed; who awaits the removal hears that it is late."""
    began, may_go_on = threading.Event(), threading.Event()

    def slow(directory: Path) -> None:
        began.set()
        may_go_on.wait(60)
        prune(directory)

    monkeypatch.setattr(weight_publisher, "prune", slow)
    try:
        four_versions.publish(5)
        assert began.wait(60)
        four_versions.publish(6)
        wait(lambda: 6 in steps(four_versions), subject="weights/step_6", owner="the thread", seconds=60, poll=0.05)
        assert steps(four_versions) == [0, 1, 2, 3, 4, 5, 6]
        four_versions._disk.seconds = 0.05
        with pytest.raises(UserError, match="no end of removing old versions from the thread that writes and removes"):
            four_versions.settle()
    finally:
        four_versions._disk.seconds = 60
        may_go_on.set()
    four_versions.finish()
    assert steps(four_versions) == [0, 5, 6]


def test_a_failure_to_prune_is_heard(four_versions, monkeypatch):
    """By whoever comes next, once; what comes after goes on. Nothing is removed for a version that failed."""

    def failing(directory: Path) -> None:
        raise UserError(f"the file system fails at {directory}")

    four_versions.publish(5, refuse)
    with pytest.raises(UserError, match="not finite"):
        four_versions.settle()
    four_versions.settle()
    assert steps(four_versions) == [0, 1, 2, 3, 4]
    with monkeypatch.context() as context:
        context.setattr(weight_publisher, "prune", failing)
        four_versions.publish(5)
        for thread in (four_versions._committer, four_versions._disk):
            ((_, future),) = thread.tasks
            future.exception(timeout=60)
    with pytest.raises(UserError, match="the file system fails at .*step_1"):
        four_versions.publish(6)
    four_versions.publish(6)
    four_versions.settle()
    assert steps(four_versions) == [0, 5, 6]
