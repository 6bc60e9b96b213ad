"""The state behind the weight routes, against an engine that records its calls (the real one: integration tests)."""

import asyncio
import json
import math
import struct
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest

from prime_rl.inference.service import (
    Adapters,
    Rejected,
    ServedBase,
    WeightService,
    check_fit,
    check_version,
    resolve,
)
from prime_rl.transport.commit import step_dir
from prime_rl.transport.weights import (
    PublisherAddress,
    TensorEntry,
    hash_directory,
    manifest_extra,
    version_hash,
    write_base_version,
)
from support.committing import commit_empty, commit_weights

READY = {"state": "ready", "place": "host", "seconds": 0.1}
QUICK = READY | {"seconds": 0.001}
WRONG = {"state": "failed", "why": "tensor a is wrong", "retry": False}
READING = {"state": "reading"}


class FakeEngine:
    """Records calls; `fail` names methods that raise, `gate` holds a load until it is set."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.asked: list[str] = []
        self.fail: set[str] = set()
        self.gate: asyncio.Event | None = None
        self.loaded: dict[str, Any] | None = None
        # The workers' answers to the questions after `prime_stage`, one after the other; ready after that.
        self.staging: list[list[dict[str, Any]]] = []
        self.when_asked: Callable[[], object] = lambda: None
        self.served: dict[int, list[dict[str, Any] | None]] = {}  # by number, of every rank
        self.hanging: set[int] = set()  # numbers whose versions are read without end
        self.ranks = 1

    async def pause_generation(self) -> None:
        if "pause" in self.fail:
            raise RuntimeError("Failed to reset KV cache")
        self.calls.append("pause")

    async def resume_generation(self) -> None:
        if "resume" in self.fail:
            raise RuntimeError("resume failed")
        self.calls.append("resume")

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "prime_served":
            return self.served.get(args[0], [None])
        self.asked.append(method)
        if method == "prime_staged":
            self.when_asked()
            if args[0] in self.hanging:
                return [READING]
            return self.staging.pop(0) if self.staging else [READY]
        self.calls.append(method)
        if method == "prime_stage":
            return [READING]
        if method == "prime_load":
            if self.gate is not None:
                await self.gate.wait()
            if args[3:] and args[3]:  # it stages first
                (progress,) = self.staging.pop(0) if self.staging else [QUICK]
                if progress["state"] != "ready":
                    return [progress | {"blocked": 0.0}]
            self.loaded = args[2]
        if method in self.fail or f"{method} {args[:1]}" in self.fail:
            raise RuntimeError(f"{method} failed")
        if method != "prime_load":
            return [None]
        self.served[args[0]] = [args[2]] * self.ranks
        answer = QUICK | {"state": "loaded", "served": args[2], "blocked": 0.0}
        return [answer] * self.ranks

    async def until(self, call: str) -> None:
        async with asyncio.timeout(60):
            while call not in self.calls:
                await asyncio.sleep(0.01)


def write_tensor(directory: Path, value: int, name: str = "a", shape: tuple[int, ...] = (4,)) -> None:
    size = math.prod(shape)
    header = json.dumps({name: {"dtype": "U8", "shape": shape, "data_offsets": [0, size]}}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes([value] * size))


def commit(root: Path, version: int, value: int | None = None) -> Path:
    return commit_weights(root, version, lambda place: write_tensor(place, version if value is None else value))


LAYER = "model.q_proj"
ADAPTERS = Adapters(2, ["q_proj"])


def commit_adapter(root: Path, version: int, base: Path) -> Path:
    """Half of one: a server that holds adapters takes it."""
    description = {"base": version_hash(hash_directory(base)), "config": {"r": 2}}
    half = f"base_model.model.{LAYER}.lora_A.weight", (2, 4)
    return commit_weights(root, version, lambda place: write_tensor(place, version, *half), adapter=description)


@pytest.fixture
def wide_base(base: Path) -> Path:
    """One with a layer that can have an adapter."""
    write_tensor(base, 0, f"{LAYER}.weight", (4, 4))
    return base


@pytest.fixture
def base(tmp_path: Path) -> Path:
    directory = tmp_path / "base"
    directory.mkdir()
    write_tensor(directory, 0)
    return directory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "weights"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def make(engine: FakeEngine, base: Path, root: Path | None, **options: Any) -> WeightService:
    return WeightService(engine, ServedBase(base), root, **options)  # type: ignore[arg-type]


@pytest.fixture
async def service(engine: FakeEngine, base: Path, root: Path) -> WeightService:
    return make(engine, base, root)


async def rejected(action: Awaitable[object], match: str, status: int) -> str:
    with pytest.raises(Rejected, match=match) as error:
        await action
    assert error.value.status == status
    return error.value.message


UPDATE = ["prime_stage", "pause", "prime_load"]


async def test_an_update(engine: FakeEngine, service: WeightService, root: Path) -> None:
    """Contract: stage, pause, load, resume, in this order. The engine is paused only once every worker has read the
    version; the answer says what took how long. The load is counted, also one of what is served already."""
    asked: list[list[Any]] = []
    engine.when_asked = lambda: asked.append(list(engine.calls))
    engine.staging = [[READY, READING], [READY, READING], [READY, READY | {"place": "device"}]]
    directory = commit(root, 1)
    change = await service.update(str(directory), 1)
    assert engine.calls == [*UPDATE, "resume"]
    assert asked == [["prime_stage"]] * 3
    assert change.place == "host"
    assert set(change.seconds) == {"check", "stage", "stop", "load", "pause"}
    served = await service.served()
    assert served == change.served
    assert (served["version"], served["weight_dir"], served["loads"]) == (1, str(directory), 1)
    await service.update(str(directory), 1)
    assert await service.served() == served | {"loads": 2}


async def test_a_version_that_is_staged_quickly_is_staged_by_its_load(
    engine: FakeEngine, wide_base: Path, root: Path
) -> None:
    """Contract: one call, where one rank staged an adapter quickly. What is late is waited for beside
    generation, as the next one is; what is wrong is refused, with nothing changed; a load that fails is one."""
    service = make(engine, wide_base, root, adapters=ADAPTERS)
    loads, beside = ["prime_load"], ["prime_stage", "prime_staged", "prime_load"]
    quick, late = [[QUICK]], [[READING], [READY]]
    cases = (quick, beside), ([], loads), (late, loads + beside[1:]), (quick, beside), ([], loads)
    for version, (staging, calls) in enumerate(cases, 1):
        engine.staging, engine.asked = [*staging], []
        change = await service.update(str(commit_adapter(root, version, wide_base)), version)
        assert (engine.asked, change.place, change.served) == (calls, "host", await service.served())
    last, engine.staging = str(commit_adapter(root, 6, wide_base)), [[WRONG]]
    await rejected(service.update(last, 6), "tensor a is wrong", 400)
    assert (engine.calls[-2:], (await service.served())["version"]) == (["prime_load", "prime_unstage"], 5)
    engine.fail = {"prime_load"}
    await rejected(service.update(last, 6), "could not be loaded", 500)
    engine.fail, engine.asked, engine.ranks, engine.staging = set(), [], 2, [[QUICK] * 2] * 2
    for _ in range(2):
        await service.update(last, 6)
    assert engine.asked == beside * 2


UNSENT = {"state": "failed", "why": "version 1 is superseded", "retry": True}
UNSENT_SAYS = (
    f"by {gethostname()} from the trainer at 10.0.0.1:4242, the previous weights go on: version 1 is superseded"
)


@pytest.mark.parametrize(
    ("fail", "staging", "status", "says", "calls"),
    [
        # vLLM cannot clear its cache: a request waits for another server's.
        ("pause", [], 503, "did not pause: .*Failed to reset KV cache", ["prime_stage", "resume"]),
        # What cannot be read never pauses the engine: wrong bytes, files that the trainer moves, a slow read.
        ("", [[READING], [WRONG]], 400, "tensor a is wrong", ["prime_stage"]),
        ("", [[READING], [WRONG | {"retry": True}]], 503, "tensor a is wrong", ["prime_stage"]),
        ("", [[READING]] * 1000, 503, "within", ["prime_stage"]),
        # What the publisher does not give may be asked for again, with both addresses; wrong for one worker is wrong.
        ("publisher", [[UNSENT]], 424, UNSENT_SAYS, ["prime_stage"]),
        ("publisher", [[UNSENT, WRONG]], 400, "tensor a is wrong", ["prime_stage"]),
    ],
    ids=["pause", "wrong", "moved", "late", "unsent", "wrong for one"],
)
async def test_an_update_that_fails_leaves_what_was_served(
    engine: FakeEngine, service: WeightService, root: Path, monkeypatch: pytest.MonkeyPatch,
    fail: str, staging: list[list[dict[str, Any]]], status: int, says: str, calls: list[str],
) -> None:  # fmt: skip
    """Contract: it is refused with a reason, nothing stays paused, workers' memory is freed, the version stays."""
    monkeypatch.setattr("prime_rl.inference.service.LOAD_SECONDS", 0.2 if len(staging) == 1000 else 60.0)
    before, (engine.fail, engine.staging) = await service.served(), ({fail}, staging)
    directory = step_dir(root, 1)
    if fail == "publisher":
        publisher = PublisherAddress("10.0.0.1", 4242, "token", 1.0)
        extra = manifest_extra(1, 0, {"a": TensorEntry("", "U8", [4], "", f"{1:016x}")}, publisher=publisher)
        commit_empty(directory, 1, **extra)
    else:
        commit(root, 1)
    await rejected(service.update(str(directory), 1), says, status)
    assert engine.calls == [*calls, "prime_unstage"]
    assert await service.served() == before


async def test_what_is_refused_before_the_engine_is_touched(
    engine: FakeEngine, service: WeightService, base: Path, root: Path, tmp_path: Path
) -> None:
    """Contract: another base model under version 0, whose path in the manifest is never followed; a base that changed
    on disk. It still says what it serves, unless its workers disagree."""
    good = write_base_version(root / "w2", base)
    other = tmp_path / "other"
    other.mkdir()
    write_tensor(other, 5)
    zero = write_base_version(root / "w1", other)
    await rejected(service.update(str(zero.directory), 0), "another base model", 400)
    write_tensor(base, 9)
    await rejected(service.reload(), "changed on disk", 400)
    assert engine.calls == []
    write_tensor(base, 0)
    assert (await service.update(str(good.directory), 0)).served["hash"] == good.hash
    engine.served[1] = [{"version": 1, "hash": "x", "weight_dir": None}, None]
    await rejected(service.served(), "different weights", 500)


@pytest.mark.parametrize("end", ["stop", "client"])
async def test_a_change_whose_server_stops_or_whose_client_hangs_up(
    engine: FakeEngine, service: WeightService, root: Path, end: str
) -> None:
    """Contract: a stop cancels it and answers its caller; one that leaves it leaves no paused engine or half a load."""
    engine.gate = asyncio.Event()
    change = asyncio.create_task(service.update(str(commit(root, 1)), 1))
    await engine.until("prime_load")
    if end == "stop":
        service.stop()
        await rejected(change, "stopping", 503)
        return
    change.cancel()
    with pytest.raises(asyncio.CancelledError):
        await change
    engine.gate.set()
    await engine.until("resume")
    assert (await service.served())["version"] == 1


async def test_a_read_that_hangs_is_left(
    engine: FakeEngine, service: WeightService, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: a version on a mount that hangs is refused (503), in the check and beside generation, not the next."""
    back = threading.Event()
    gone, good = str(commit(root, 1)), str(commit(root, 2))
    await service.served()  # the base is hashed
    monkeypatch.setattr("prime_rl.inference.service.STALL_SECONDS", 0.1)

    def hang(root: Path | None, weight_dir: str, version: int) -> Any:
        if weight_dir == gone:
            back.wait(60)
        return check_version(root, weight_dir, version)

    monkeypatch.setattr("prime_rl.inference.service.check_version", hang)
    try:
        await rejected(service.update(gone, 1), r"step_1 could not be read within 0 s", 503)
        monkeypatch.setattr("prime_rl.inference.service.STALL_SECONDS", 2.0)
        engine.staging = [[READING | {"blocks": 7}]] * 100_000  # never more
        await rejected(service.update(good, 2), r"step_2 could not be read: no progress", 503)
        assert (engine.asked[-1], engine.loaded) == ("prime_unstage", None)
        engine.staging = []
        assert (await service.update(good, 2)).served["version"] == 2
    finally:
        back.set()


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"a\0b": {"size": 1, "xxh3": "0"}}}, {"files": {"\ud800": {"size": 1, "xxh3": "0"}}},
        {"files": {"x" * (10 << 20): {"size": 1, "xxh3": "0"}}}, {"extra": {"version": 2}},
        {"files": {"loop.safetensors": {"size": 1, "xxh3": "0"}}}, {"extra": {"publisher": {"host": "127.0.0.1"}}},
        {"extra": {"tmpfs": {"directory": 5, "nonce": 5, "host": 5, "boot": 5}}}, {"extra": {"tensors": []}},
        {"index": "[" * 200_000}, {"index": '{"weight_map": {"a": "elsewhere"}}'},
    ],
    ids=lambda change: str(change)[:40],
)  # fmt: skip
async def test_a_manifest_may_say_anything(service: WeightService, root: Path, change: dict[str, Any]) -> None:
    """Contract: whatever a manifest or the names in it say, the version is refused with a bounded line (4xx)."""
    directory = commit(root, 1)
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


async def test_a_failed_load_leaves_the_engine_paused(engine: FakeEngine, service: WeightService, root: Path) -> None:
    """Contract: a server with half-loaded weights says so (500) and never generates, whatever it is asked then, even an
    update that does not stop it; the next load that succeeds mends it."""
    directory = str(commit(root, 1))
    engine.fail = {"prime_load"}
    await rejected(
        service.update(directory, 1), "step_1 could not be loaded, nothing is sampled .*: prime_load failed", 500
    )
    assert engine.calls == [*UPDATE, "prime_unstage"]
    for action in (service.served(), service.pause(True), service.pause(False)):
        await rejected(action, "could not be loaded", 500)
    engine.fail = {"pause"}
    await rejected(service.update(directory, 1), "did not pause", 503)
    assert "resume" not in engine.calls
    engine.fail = set()
    assert (await service.update(directory, 1)).served["version"] == 1
    assert engine.calls[-1] == "resume"


async def test_an_engine_that_does_not_go_on_does_not_serve(
    engine: FakeEngine, service: WeightService, root: Path
) -> None:
    """Contract: loaded and committed is not enough. Who asks hears that it stands still (503), until it goes on."""
    directory = str(commit(root, 1))
    engine.fail = {"resume"}
    for action in (service.update(directory, 1), service.served()):
        await rejected(action, "did not resume", 503)
    engine.fail = set()
    assert (await service.update(directory, 1)).served["version"] == 1
    assert (await service.served())["version"] == 1


async def test_an_adapter_that_fails(
    engine: FakeEngine, wide_base: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: its load pauses nothing, but where it fails the engine is paused, and goes on with one that succeeds,
    also if it could not be resumed meanwhile. Who asks while it fails does not hear what was served before."""
    service = make(engine, wide_base, root, adapters=ADAPTERS)
    for version in (1, 2):
        await service.update(str(commit_adapter(root, version, wide_base)), version)
    assert not {"pause", "resume"} & set(engine.calls)
    third, call = str(commit_adapter(root, 3, wide_base)), engine.collective_rpc

    async def fail_meanwhile(method: str, *rest: Any, **more: Any) -> list[Any]:
        if method == "prime_served":
            monkeypatch.setattr(engine, "collective_rpc", call)
            await rejected(service.update(third, 3), "could not be loaded", 500)
        return await call(method, *rest, **more)

    engine.fail = {"prime_load"}
    monkeypatch.setattr(engine, "collective_rpc", fail_meanwhile)
    await rejected(service.served(), "could not be loaded", 500)
    assert engine.calls[-2:] == ["pause", "prime_unstage"]
    engine.fail = {"resume"}
    await rejected(service.update(third, 3), "did not resume", 503)
    engine.fail = set()
    assert (await service.update(third, 3)).served["version"] == 3
    assert engine.calls[-2:] == ["prime_load", "resume"]


async def test_one_change_at_a_time(
    engine: FakeEngine, service: WeightService, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: a second change waits for the first, and is refused with 409 after the deadline."""
    monkeypatch.setattr("prime_rl.inference.service.LOCK_SECONDS", 0.05)
    engine.gate = asyncio.Event()
    first = asyncio.create_task(service.update(str(commit(root, 1)), 1))
    await asyncio.sleep(0)
    await rejected(service.reload(), "still running", 409)
    engine.gate.set()
    await first
    await service.reload()
    loads = [call for call in engine.calls if call in ("prime_load", "resume")]
    assert loads == ["prime_load", "resume", "prime_load", "resume"]


async def test_tenants_do_not_wait_for_each_other(
    engine: FakeEngine, wide_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: no load of theirs pauses the engine; a version that is read without end, or one that cannot be loaded,
    keeps nobody else's from being served; a load that succeeds mends the one's that failed."""
    monkeypatch.setattr("prime_rl.inference.service.LOAD_SECONDS", 60.0)
    one, other = (
        make(engine, wide_base, tmp_path / name, number=number, adapters=ADAPTERS)
        for number, name in ((1, "a"), (2, "b"))
    )
    versions = {name: str(commit_adapter(tmp_path / name, 1, wide_base)) for name in "ab"}
    engine.hanging = {1}
    reading = asyncio.create_task(one.update(versions["a"], 1))
    await engine.until("prime_stage")
    assert (await other.update(versions["b"], 1)).served["version"] == 1
    assert (one.busy, other.busy) == (True, False)
    assert ((await one.served())["version"], (await other.served())["version"]) == (0, 1)
    engine.hanging = set()
    assert (await reading).served["version"] == 1
    engine.fail = {"prime_load (1,)"}
    await rejected(one.update(versions["a"], 1), "could not be loaded", 500)
    assert (one.failures, other.failures) == (1, 0)
    with pytest.raises(Rejected, match="could not be loaded"):
        one.check_usable()
    await rejected(one.served(), "could not be loaded", 500)
    assert (await other.reload()).served["version"] == 0
    engine.fail = set()
    await one.update(versions["a"], 1)
    one.check_usable()
    assert ((await one.served())["loads"], (await other.served())["loads"]) == (2, 2)
    assert not {"pause", "resume"} & set(engine.calls)
    await rejected(one.update(versions["b"], 1), "outside", 403)


def test_allowed_roots(tmp_path: Path, root: Path) -> None:
    """Contract: with a root only below it, links resolved; without one any committed version."""
    outside = tmp_path / "outside"
    inside, elsewhere, sibling = commit(root, 1), commit(outside, 1), commit(tmp_path / "weights-sibling", 1)
    (root / "link").symlink_to(outside)
    (tmp_path / "moved").symlink_to(root)
    assert resolve(root, str(inside)) == inside
    assert resolve(root, f"{root}/link/../weights/step_1") == inside
    for path in (elsewhere, root / "link" / "step_1", f"{root}/../outside", sibling, "/", "inside"):
        with pytest.raises(Rejected, match="outside") as error:
            resolve(root, str(path))
        assert error.value.status == 403
    assert resolve(None, str(root / "link" / "step_1")) == elsewhere
    with pytest.raises(Rejected, match="outside"):
        resolve(tmp_path / "moved", str(tmp_path / "moved" / "step_1"))


def test_what_is_no_version_is_not_described(tmp_path: Path) -> None:
    """Contract: one answer for a missing directory, a file, and whatever holds no version: a shared file system is
    needed; nothing of this host is listed or quoted, nor somebody else's manifest.json."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "secret").write_text("s3cr3t")
    answers = set()
    for path in (tmp_path / "nowhere", tmp_path / "home", tmp_path / "home" / "secret"):
        with pytest.raises(Rejected, match="trainer and server need one file system") as error:
            check_version(None, str(path), 1)
        answers.add((error.value.status, error.value.message.replace(str(path), "")))
    assert len(answers) == 1
    (tmp_path / "home" / "manifest.json").write_text('{"s3cr3t": 1}')
    with pytest.raises(Rejected) as error:
        check_version(None, str(tmp_path / "home"), 1)
    assert (error.value.status, "s3cr3t" in str(error.value)) == (400, False)


def test_fit() -> None:
    """Contract: names and shapes must be the model's; the head of a tied model may be there or not."""
    entry = TensorEntry("f", "F32", [2, 3], "0")
    model, headed = {"a": entry}, {"a": entry, "lm_head.weight": entry}
    check_fit({"a": TensorEntry("g", "BF16", [2, 3], "1")}, model, tied=False)
    check_fit(headed, model, tied=True)
    check_fit(model, headed, tied=True)
    for tensors, base in ((model, headed), (headed, model), ({"a": TensorEntry("f", "F32", [3, 2], "0")}, model)):
        with pytest.raises(Rejected):
            check_fit(tensors, base, tied=False)
