"""The state behind the weight routes, against an engine that records what it is told (the real one: integration tests)."""

import asyncio
import json
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from socket import gethostname
from typing import Any
from unittest.mock import AsyncMock

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from prime_rl import faults
from prime_rl.inference import version_files
from prime_rl.inference.routes import PrimeRoutes, add_alias
from prime_rl.inference.service import UpdateMetrics, WeightService
from prime_rl.inference.version_files import AllowedRoots, Rejected, check_fit
from prime_rl.monitor.status import Status, read_status
from prime_rl.transport.commit import CommitError, prune, read_manifest, replace_manifest, stage
from prime_rl.transport.weights import (
    PublisherAddress,
    TensorEntry,
    hash_directory,
    manifest_extra,
    version_dir,
    write_base_version,
)

READY = {"state": "ready", "place": "host", "seconds": 0.1}


class FakeEngine:
    """Records calls; `fail` names methods that raise, `gate` holds a load until it is set."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.asked: list[str] = []
        self.fail: set[str] = set()
        self.gate: asyncio.Event | None = None
        self.loaded: dict[str, Any] | None = None
        # What is answered to the questions after `prime_stage`, one after the other; ready after that. None: ready at once.
        self.staging: list[dict[str, Any]] | None = []
        self.identity: dict[str, Any] | None = None

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        if "pause" in self.fail:
            raise RuntimeError("pause failed")
        self.calls.append(("pause", mode, clear_cache))

    async def resume_generation(self) -> None:
        if "resume" in self.fail:
            raise RuntimeError("resume failed")
        self.calls.append("resume")

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "prime_served":
            return [self.identity]
        self.asked.append(method)
        if method == "prime_staged":
            return [self.staging.pop(0) if self.staging else READY]
        self.calls.append(method)
        if method == "prime_stage":
            return [{"state": "reading"} if self.staging is not None else READY]
        if method == "prime_load":
            if self.gate is not None:
                await self.gate.wait()
            self.loaded = args[1]
        if method in self.fail:
            raise RuntimeError(f"{method} failed")
        if method == "prime_commit":
            self.identity = self.loaded
        return [None]


def write_tensor(directory: Path, value: int) -> None:
    header = json.dumps({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes([value] * 4))


def commit(root: Path, version: int) -> Path:
    extra: dict[str, Any] = {}
    with stage(version_dir(root, version), step=version, producer="trainer", extra=extra) as tmp:
        write_tensor(tmp, version)
        extra |= manifest_extra(version, 0, hash_directory(tmp))
    return version_dir(root, version)


def commit_published(root: Path, version: int) -> Path:
    """A version that is in no file."""
    publisher = PublisherAddress("10.0.0.1", 4242, "token", 1.0)
    tensors = {"a": TensorEntry("", "U8", [4], "", f"{version:016x}")}
    extra = manifest_extra(version, 0, tensors, publisher=publisher)
    with stage(version_dir(root, version), step=version, producer="trainer", extra=extra):
        pass
    return version_dir(root, version)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    directory = tmp_path / "base"
    directory.mkdir()
    write_tensor(directory, 0)
    return directory


def make(engine: FakeEngine, base: Path, root: Path | None) -> WeightService:
    async def label(version: int) -> None:
        engine.calls.append(("label", version))

    return WeightService(engine, base, AllowedRoots(root), label)


UPDATE = ["prime_stage", ("pause", "keep", True), "prime_load", "prime_commit"]


async def test_an_update(base: Path, tmp_path: Path) -> None:
    """Contract: stage, pause with the cache cleared, load, commit, label, resume, in this order."""
    engine, root = FakeEngine(), tmp_path / "weights"
    service = make(engine, base, root)
    directory = commit(root, 1)
    got = await service.update(str(directory), 1)
    assert engine.calls == [*UPDATE, ("label", 1), "resume"]
    assert got == await service.served()
    assert (got.version, got.weight_dir) == (1, str(directory))


async def test_a_failed_load_is_undone(base: Path, tmp_path: Path) -> None:
    """Contract: a load that fails is undone on every rank before generation goes on; the version does not change."""
    engine, root = FakeEngine(), tmp_path / "weights"
    service = make(engine, base, root)
    before = await service.served()
    engine.fail = {"prime_load"}
    with pytest.raises(Rejected, match="could not be loaded") as error:
        await service.update(str(commit(root, 1)), 1)
    assert error.value.status == 400
    assert engine.calls == [*UPDATE[:3], "prime_restore", "resume", "prime_unstage"]
    assert await service.served() == before


async def test_a_read_that_hangs_is_left(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: a version on a mount that does not answer is refused (503), in the check and beside generation; the next change has its turn, and
    so many threads may hang at most."""
    engine, root, back = FakeEngine(), tmp_path / "weights", threading.Event()
    service = make(engine, base, root)
    gone, good = commit(root, 1), commit(root, 2)
    await service.served()  # the base is hashed
    monkeypatch.setattr(version_files, "STALL_SECONDS", 3.0)
    monkeypatch.setattr("prime_rl.inference.service.STALL_SECONDS", 0.1)
    look = AllowedRoots.look

    def hang(self: AllowedRoots, directory: Path, version: int) -> Any:
        if directory == gone:
            back.wait(60)
        return look(self, directory, version)

    monkeypatch.setattr(AllowedRoots, "look", hang)
    try:
        with pytest.raises(Rejected, match=r"step_1 could not be read: no progress for 3 s") as error:
            await service.update(str(gone), 1)
        assert error.value.status == 503
        monkeypatch.setattr(version_files, "STALL_SECONDS", 60.0)
        engine.staging = [{"state": "reading", "blocks": 7}] * 100_000  # never more
        with pytest.raises(Rejected, match=r"step_2 could not be read: no progress") as error:
            await service.update(str(good), 2)
        assert (error.value.status, engine.asked[-1], engine.loaded) == (503, "prime_unstage", None)
        engine.staging = []
        assert (await service.update(str(good), 2)).version == 2
        monkeypatch.setattr(version_files, "MOST_ABANDONED", 1)
        with pytest.raises(Rejected, match="1 earlier reads still hang"):
            await service.update(str(good), 2)
        back.set()
        async with asyncio.timeout(60):
            while version_files._abandoned and next(iter(version_files._abandoned)).is_alive():
                await asyncio.sleep(0.01)
        assert (await service.update(str(good), 2)).version == 2
    finally:
        back.set()


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"a\0b": {"size": 1, "xxh3": "0"}}}, {"files": {"\ud800": {"size": 1, "xxh3": "0"}}}, {"files": {"x" * (10 << 20): {"size": 1, "xxh3": "0"}}},
        {"files": {"loop.safetensors": {"size": 1, "xxh3": "0"}}}, {"extra": {"publisher": {"host": "127.0.0.1"}}}, {"extra": {"tmpfs": {"directory": 5, "nonce": 5, "host": 5, "boot": 5}}},
        {"extra": {"tensors": []}}, {"extra": {"tensors": "abc"}}, {"index": "[" * 200_000},
    ],
    ids=lambda change: str(change)[:40],
)  # fmt: skip
async def test_a_manifest_may_say_anything(base: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    """Contract: whatever is in a manifest or under the names in it, the version is refused with a line of bounded length (4xx)."""
    service = make(FakeEngine(), base, tmp_path / "weights")
    directory = commit(tmp_path / "weights", 1)
    (directory / "loop.safetensors").symlink_to("loop.safetensors")
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["extra"] |= change.get("extra", {})
    if index := change.get("index"):
        (directory / "model.safetensors.index.json").write_text(index)
    (directory / "manifest.json").write_text(json.dumps(manifest | change | {"extra": manifest["extra"]}))
    with pytest.raises(Rejected) as error:
        await service.update(str(directory), 1)
    assert error.value.status in (400, 403)
    assert len(error.value.message) < 10_000


def test_a_read_that_hangs_does_not_hold_the_process() -> None:
    """Contract: the interpreter ends although a thread still waits for the file system."""
    code = "import asyncio, time; from prime_rl.inference import version_files as v; v.STALL_SECONDS = 0.1; asyncio.run(v.read(lambda _: time.sleep(3600), 'x'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "Rejected: x could not be read" in done.stderr


async def test_a_stop_answers_whoever_waits(base: Path, tmp_path: Path) -> None:
    """Contract: a change that is under way when the server stops is cancelled, and its caller is answered."""
    engine, root = FakeEngine(), tmp_path / "weights"
    engine.gate = asyncio.Event()
    service = make(engine, base, root)
    change = asyncio.create_task(service.update(str(commit(root, 1)), 1))
    async with asyncio.timeout(60):
        while "prime_load" not in engine.calls:
            await asyncio.sleep(0.01)
    service.stop()
    with pytest.raises(Rejected, match="stopping") as error:
        await change
    assert error.value.status == 503


async def test_an_engine_that_cannot_pause_goes_on(base: Path, tmp_path: Path) -> None:
    """Contract: where vLLM cannot clear its cache (a request waits for another server's) the update is refused, and nothing stays paused."""
    engine = FakeEngine()
    service = make(engine, base, tmp_path / "weights")
    engine.pause_generation = AsyncMock(side_effect=RuntimeError("Failed to reset KV cache"))  # type: ignore[method-assign]
    with pytest.raises(Rejected, match=r"did not pause: .*Failed to reset KV cache") as error:
        await service.update(str(commit(tmp_path / "weights", 1)), 1)
    assert error.value.status == 503
    assert engine.calls == ["prime_stage", "resume", "prime_unstage"]


async def test_fixed_weights_are_never_touched(base: Path, tmp_path: Path) -> None:
    """Contract: a server whose engine cannot follow an update refuses it with the reason, before anything is read; it still says what it serves."""
    engine = FakeEngine()
    places = AllowedRoots(tmp_path / "weights")
    service = WeightService(engine, base, places, AsyncMock(), fixed="experts move")
    directory = commit(tmp_path / "weights", 1)
    for change in (service.update(str(directory), 1), service.reload()):
        with pytest.raises(Rejected, match="cannot be changed: experts move"):
            await change
    assert engine.calls == []
    assert (await service.served()).version == 0


@pytest.mark.parametrize("anew", [False, True])
async def test_a_directory_that_is_replaced_while_it_is_loaded_is_not_served(
    base: Path, tmp_path: Path, anew: bool
) -> None:
    """Contract: what was hashed is what was loaded, even where a new incarnation of the trainer sets the version aside or commits it anew."""
    engine, root = FakeEngine(), tmp_path / "weights"
    service = make(engine, base, root)
    before, directory = await service.served(), commit(root, 1)
    engine.gate = asyncio.Event()
    update = asyncio.create_task(service.update(str(directory), 1))
    async with asyncio.timeout(60):
        while "prime_load" not in engine.calls:
            await asyncio.sleep(0.01)
    prune(directory)
    if anew:
        extra: dict[str, Any] = {}
        with stage(directory, step=1, producer="trainer", extra=extra) as tmp:
            write_tensor(tmp, 7)
            extra |= manifest_extra(1, 1, hash_directory(tmp))
    engine.gate.set()
    with pytest.raises(Rejected, match="could not be loaded"):
        await update
    assert "prime_commit" not in engine.calls
    assert await service.served() == before


async def test_what_is_read_at_once_is_not_asked_for(base: Path, tmp_path: Path) -> None:
    """Contract: each question takes a step of the engine; a small model is read by the time that the first is answered."""
    engine, root = FakeEngine(), tmp_path / "weights"
    engine.staging = None
    assert (await make(engine, base, root).update(str(commit(root, 1)), 1)).version == 1
    assert "prime_staged" not in engine.asked


async def test_generation_goes_on_until_all_is_read(base: Path, tmp_path: Path) -> None:
    """Contract: the engine is paused only once every worker has read the version; the parts say what took how long."""
    engine, root, parts = FakeEngine(), tmp_path / "weights", UpdateMetrics()
    service = make(engine, base, root)
    asked: list[list[Any]] = []
    answer = engine.collective_rpc

    async def rpc(method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "prime_staged":
            asked.append(list(engine.calls))
            return [READY, {"state": "reading"} if len(asked) < 3 else READY | {"place": "device"}]
        return await answer(method, timeout, args)

    engine.collective_rpc = rpc  # type: ignore[method-assign]
    await service.update(str(commit(root, 1)), 1, parts)
    assert asked == [["prime_stage"]] * 3
    assert parts.place == "host"
    assert set(parts.seconds) == {"check", "stage", "stop", "load", "pause"}


@pytest.mark.parametrize("late", [False, True])
async def test_what_cannot_be_read_never_pauses_the_engine(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Contract: a version that is not what its manifest says, or is not read in time, is refused with the reason while generation goes on, and
    the workers' memory is given back."""
    monkeypatch.setattr("prime_rl.inference.service.LOAD_SECONDS", 0.2 if late else 60.0)
    engine, root = FakeEngine(), tmp_path / "weights"
    service = make(engine, base, root)
    before = await service.served()
    failed = {"state": "failed", "why": "tensor a is wrong", "retry": False}
    engine.staging = [{"state": "reading"}] * (1000 if late else 1) + [failed]
    with pytest.raises(Rejected, match="within" if late else "tensor a is wrong") as error:
        await service.update(str(commit(root, 1)), 1)
    assert error.value.status == (503 if late else 400)
    assert engine.calls == ["prime_stage", "prime_unstage"]
    assert await service.served() == before


async def test_what_the_publisher_does_not_give_may_be_asked_for_again(base: Path, tmp_path: Path) -> None:
    """Contract: a version that the trainer's publisher does not give is told apart (424) from one that is wrong, with both addresses; wrong for one worker is wrong."""
    engine, root = FakeEngine(), tmp_path / "weights"
    service = make(engine, base, root)
    directory = commit_published(root, 1)
    unpublished = {"state": "failed", "why": "version 1 is superseded", "retry": True}
    engine.staging = [unpublished]
    with pytest.raises(
        Rejected,
        match=f"by {gethostname()} from the trainer at 10.0.0.1:4242, the previous weights go on: version 1 is superseded",
    ) as error:
        await service.update(str(directory), 1)
    assert error.value.status == 424
    assert engine.calls == ["prime_stage", "prime_unstage"]
    answer = engine.collective_rpc

    async def rpc(method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        wrong = {"state": "failed", "why": "tensor a is wrong", "retry": False}
        return [unpublished, wrong] if method == "prime_staged" else await answer(method, timeout, args)

    engine.collective_rpc = rpc  # type: ignore[method-assign]
    with pytest.raises(Rejected, match="tensor a is wrong") as error:
        await service.update(str(directory), 1)
    assert error.value.status == 400


@pytest.mark.parametrize("changed", [True, False])
async def test_a_version_whose_place_changes_while_it_is_read(base: Path, tmp_path: Path, changed: bool) -> None:
    """Contract: a trainer that brings a version from memory to the disk takes the files away that a worker is reading: that is told apart (503, to be
    asked again) from a version that is wrong (400)."""
    engine, root = FakeEngine(), tmp_path / "weights"
    service = make(engine, base, root)
    directory = commit(root, 1)
    answer = engine.collective_rpc

    async def rpc(method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        if method != "prime_staged":
            return await answer(method, timeout, args)
        if changed:
            known = read_manifest(directory)
            replace_manifest(directory, known.files, known.extra | {"moved": True})
        return [{"state": "failed", "why": "no such file", "retry": False}]

    engine.collective_rpc = rpc  # type: ignore[method-assign]
    with pytest.raises(Rejected, match="no such file") as error:
        await service.update(str(directory), 1)
    assert error.value.status == (503 if changed else 400)
    assert engine.calls == ["prime_stage", "prime_unstage"]
    engine.collective_rpc = answer  # type: ignore[method-assign]
    assert (await service.update(str(directory), 1)).version == 1


async def test_a_failed_restore_leaves_the_engine_paused(base: Path, tmp_path: Path) -> None:
    """Contract: if the old weights cannot be restored the server says so (500) and never generates with half of them, whatever it is asked
    then, an update that does not stop it included; a good update mends it."""
    engine, root = FakeEngine(), tmp_path / "weights"
    service = make(engine, base, root)
    directory = commit(root, 1)
    engine.fail = {"prime_load", "prime_restore"}
    for action in (
        service.update(str(directory), 1),
        service.served(),
        service.resume(),
        service.pause("wait", clear_cache=False),
    ):
        with pytest.raises(Rejected, match="unusable") as error:
            await action
        assert error.value.status == 500
    engine.fail = {"pause"}
    with pytest.raises(Rejected, match="did not pause"):
        await service.update(str(directory), 1)
    assert "resume" not in engine.calls
    engine.fail = set()
    assert (await service.update(str(directory), 1)).version == 1
    assert engine.calls[-1] == "resume"


async def test_a_restore_that_succeeds_mends_too(base: Path, tmp_path: Path) -> None:
    """Contract: unusable is what is so now. A load that fails, with a way back this time, leaves a server that serves."""
    engine, root = FakeEngine(), tmp_path / "weights"
    service = make(engine, base, root)
    directory = commit(root, 1)
    for fail, says in (({"prime_load", "prime_restore"}, "unusable"), ({"prime_load"}, "previous weights go on")):
        engine.fail = fail
        with pytest.raises(Rejected, match=says):
            await service.update(str(directory), 1)
    assert "resume" in engine.calls
    assert (await service.served()).version == 0


async def test_an_engine_that_does_not_go_on_does_not_serve(base: Path, tmp_path: Path) -> None:
    """Contract: loaded and committed is not enough. Who asks hears that it stands still (503), until it goes on."""
    engine, root = FakeEngine(), tmp_path / "weights"
    service = make(engine, base, root)
    directory = commit(root, 1)
    engine.fail = {"resume"}
    for action in (service.update(str(directory), 1), service.served()):
        with pytest.raises(Rejected, match="did not resume") as error:
            await action
        assert error.value.status == 503
    engine.fail = set()
    assert (await service.update(str(directory), 1)).version == 1
    assert (await service.served()).version == 1


async def test_a_client_that_hangs_up_does_not_stop_an_update(base: Path, tmp_path: Path) -> None:
    """Contract: a cancelled request leaves neither a paused engine nor half-loaded weights."""
    engine, root = FakeEngine(), tmp_path / "weights"
    engine.gate = asyncio.Event()
    service = make(engine, base, root)
    request = asyncio.create_task(service.update(str(commit(root, 1)), 1))
    async with asyncio.timeout(60):
        while "prime_load" not in engine.calls:
            await asyncio.sleep(0.01)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        engine.gate.set()
        while "resume" not in engine.calls:
            await asyncio.sleep(0.01)
    assert (await service.served()).version == 1


async def test_one_change_at_a_time(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: a second change waits for the first, and is refused with 409 after the deadline."""
    monkeypatch.setattr("prime_rl.inference.service.LOCK_SECONDS", 0.05)
    engine, root = FakeEngine(), tmp_path / "weights"
    engine.gate = asyncio.Event()
    service = make(engine, base, root)
    first = asyncio.create_task(service.update(str(commit(root, 1)), 1))
    await asyncio.sleep(0)
    with pytest.raises(Rejected, match="still running") as error:
        await service.reload()
    assert error.value.status == 409
    engine.gate.set()
    await first
    await service.reload()
    loads = [call for call in engine.calls if call in ("prime_load", "resume")]
    assert loads == ["prime_load", "resume", "prime_load", "resume"]


async def test_a_changed_base_is_not_reloaded(base: Path, tmp_path: Path) -> None:
    """Contract: the base is what the server started with; if its files were changed, a reload is refused before the engine."""
    engine = FakeEngine()
    service = make(engine, base, tmp_path)
    await service.served()
    write_tensor(base, 9)
    with pytest.raises(Rejected, match="changed on disk"):
        await service.reload()
    assert engine.calls == []


async def test_ranks_that_disagree_are_reported(base: Path, tmp_path: Path) -> None:
    """Contract: what is served is what every worker says; disagreement is an error."""
    engine = FakeEngine()

    async def two_answers(method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        return [{"version": 1, "hash": "x", "weight_dir": None}, None]

    engine.collective_rpc = two_answers  # type: ignore[method-assign]
    with pytest.raises(Rejected, match="different weights"):
        await make(engine, base, tmp_path).served()


def test_places(tmp_path: Path) -> None:
    """Contract: with a root only below it, links resolved; without one any committed version."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    inside, elsewhere = commit(root, 1), commit(outside, 1)
    (root / "link").symlink_to(outside)
    confined = AllowedRoots(root)
    assert confined.resolve(str(inside)) == inside
    assert confined.resolve(f"{root}/link/../root/step_1") == inside
    for path in (
        elsewhere,
        root / "link" / "step_1",
        f"{root}/../outside",
        commit(tmp_path / "root-sibling", 1),
        "/",
        "inside",
    ):
        with pytest.raises(Rejected, match="outside") as error:
            confined.resolve(str(path))
        assert error.value.status == 403
    assert AllowedRoots(None).resolve(str(root / "link" / "step_1")) == elsewhere
    with pytest.raises(Rejected) as error:
        confined.resolve("a\0b")
    assert error.value.status == 400


def test_what_is_no_version_is_not_described(tmp_path: Path) -> None:
    """Contract: one answer for a directory that is missing, a file, and whatever holds no version: a shared file system is what is needed, and nothing
    of this host is listed or quoted. Somebody else's manifest.json is not quoted either."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "secret").write_text("s3cr3t")
    answers = set()
    for path in (tmp_path / "nowhere", tmp_path / "home", tmp_path / "home" / "secret"):
        with pytest.raises(Rejected, match="trainer and server need one file system") as error:
            AllowedRoots(None).resolve(str(path))
        answers.add((error.value.status, error.value.message.replace(str(path), "")))
    assert len(answers) == 1
    for content in ('{"s3cr3t": 1}', "s3cr3t", '["s3cr3t"]'):
        (tmp_path / "home" / "manifest.json").write_text(content)
        with pytest.raises(CommitError) as foreign:
            AllowedRoots(None).look(AllowedRoots(None).resolve(str(tmp_path / "home")), 1)
        assert "s3cr3t" not in str(foreign.value)


@pytest.mark.parametrize("confined", [True, False])
async def test_files_are_confined(base: Path, tmp_path: Path, confined: bool) -> None:
    """Contract: a file that is a link out of the root (without one: out of its directory), or that a manifest names outside of its directory, is not even
    looked at."""
    engine, root = FakeEngine(), tmp_path / "weights"
    service = make(engine, base, root if confined else None)
    linked = commit(root, 1)
    (tmp_path / "elsewhere").write_bytes((linked / "model.safetensors").read_bytes())
    (linked / "model.safetensors").unlink()
    (linked / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    named = commit(root, 2)
    manifest = json.loads((named / "manifest.json").read_text())
    manifest["files"]["../../elsewhere"] = manifest["files"]["model.safetensors"]
    (named / "manifest.json").write_text(json.dumps(manifest))
    for directory, version in ((linked, 1), (named, 2)):
        with pytest.raises(Rejected, match="outside") as error:
            await service.update(str(directory), version)
        assert error.value.status == 403
    assert engine.calls == []


async def test_a_change_is_told_with_its_deadline(base: Path, tmp_path: Path) -> None:
    """Contract: while weights are loaded the status waits for the engine with a deadline, so that the silence is no stall;
    afterwards, also after a failure, it serves."""
    engine, root = FakeEngine(), tmp_path / "weights"
    engine.gate = asyncio.Event()
    status = Status(tmp_path, "inference")
    service = WeightService(engine, base, AllowedRoots(root), AsyncMock(), status=status)
    try:
        for version, fail in ((1, set()), (2, {"prime_load"})):
            engine.fail, engine.calls = fail, []
            engine.gate.clear()
            update = asyncio.create_task(service.update(str(commit(root, version)), version))
            async with asyncio.timeout(60):
                while "prime_load" not in engine.calls:
                    await asyncio.sleep(0.01)
            waiting = read_status(tmp_path)["inference"].waiting
            assert waiting is not None
            assert (waiting.subject, waiting.owner) == (f"version {version} in the engine", "engine")
            assert waiting.deadline > waiting.since
            engine.gate.set()
            await asyncio.gather(update, return_exceptions=True)
            after = read_status(tmp_path)["inference"]
            assert (after.phase, after.waiting) == ("serving", None)
    finally:
        status.close()


def test_a_server_that_is_asked_to_leave_says_so_and_serves_on(base: Path, tmp_path: Path) -> None:
    """Contract of /leave: it may be asked twice, /weights tells of it, and what is served does not change."""
    with make_client(base, tmp_path / "weights") as client:
        before = client.get("/weights").json()
        assert before["leaving"] is False
        assert [client.post("/leave").json() for _ in range(2)] == [{"leaving": True}] * 2
        assert client.get("/weights").json() == before | {"leaving": True}
        assert client.post("/v1/generate").status_code == 200


def test_fault_points(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: under a plan the token route answers 500 as often as planned, under both names; an update is refused before or
    after the load; without a plan there is no such layer."""
    plan = tmp_path / "faults.json"
    points = [("generate", 2), ("update-received:v1", 1), ("update-loaded:v1", 1), ("update-answered:v1", 1)]
    rows = [{"point": point, "process": "inference", "do": "error", "times": times} for point, times in points]
    plan.write_text(json.dumps(rows))
    monkeypatch.setenv(faults.ENV, str(plan))
    monkeypatch.setattr(faults, "_plan", [])
    faults.arm("inference")
    client = make_client(base, tmp_path / "weights")
    directory = commit(tmp_path / "weights", 1)
    with client:
        paths = ("/inference/v1/generate", "/v1/generate", "/v1/generate")
        assert [client.post(path).status_code for path in paths] == [500, 500, 200]
        body = {"weight_dir": str(directory), "version": 1}
        assert [client.post("/update_weights", json=body).status_code for _ in range(4)] == [500, 500, 500, 200]
        assert client.get("/weights").json()["version"] == 1
        assert sorted(path.name for path in tmp_path.glob("*.seen")) == [f"faults.inference.{n}.seen" for n in range(4)]
    monkeypatch.setattr(faults, "_plan", [])
    assert not make_client(base, tmp_path / "weights").app.user_middleware  # type: ignore[attr-defined]


def make_client(base: Path, root: Path) -> TestClient:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.prime_service = make(FakeEngine(), base, root)
        app.state.prime_models = ["m"]
        app.state.prime_leaving = False
        yield

    app = FastAPI(lifespan=lifespan)
    app.post("/inference/v1/generate")(lambda: {})
    PrimeRoutes().attach_router(app)
    return TestClient(app)


def test_fit() -> None:
    """Contract: names and shapes must be the model's; the head of a tied model may be there or not."""
    entry = TensorEntry("f", "F32", [2, 3], "0")
    head = {"lm_head.weight": entry}
    check_fit({"a": entry}, {"a": TensorEntry("g", "BF16", [2, 3], "1")}, tied=False)
    check_fit({"a": entry, **head}, {"a": entry}, tied=True)
    check_fit({"a": entry}, {"a": entry, **head}, tied=True)
    for tensors, base in (
        ({"a": entry}, {"a": entry, **head}),
        ({"a": entry, "b": entry}, {"a": entry}),
        ({"a": TensorEntry("f", "F32", [3, 2], "0")}, {"a": entry}),
    ):
        with pytest.raises(Rejected):
            check_fit(tensors, base, tied=False)


def test_the_alias_is_the_same_route() -> None:
    """Contract: the alias runs the token route with its dependencies; a vLLM without that route is an error."""
    app = FastAPI()
    app.post("/inference/v1/generate")(lambda: {"from": "tokens"})
    add_alias(app, "/inference/v1/generate", "/v1/generate")
    assert TestClient(app).post("/v1/generate").json() == {"from": "tokens"}
    with pytest.raises(Exception, match="no token route"):
        add_alias(FastAPI(), "/inference/v1/generate", "/v1/generate")


async def test_version_zero_of_another_base(base: Path, tmp_path: Path) -> None:
    """Contract: version 0 is taken by its hash; the path in its manifest is never followed."""
    engine = FakeEngine()
    service = make(engine, base, tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    write_tensor(other, 5)
    zero = write_base_version(tmp_path / "w1", other)
    with pytest.raises(Rejected, match="another base model"):
        await service.update(str(zero.directory), 0)
    assert engine.calls == []
    good = write_base_version(tmp_path / "w2", base)
    assert (await service.update(str(good.directory), 0)).hash == good.hash
