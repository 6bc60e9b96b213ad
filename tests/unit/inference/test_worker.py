"""How a worker loads: in place, or through vLLM's own reload. The model, its runner and vLLM's config are stand-ins; what they do on a GPU: tests/gpu/test_serving.py."""

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prime_rl.inference import compat
from prime_rl.inference.staging import WeightsExtension

TENSORS = [("a", torch.ones(1))]


class Worker(WeightsExtension):
    """Notes how it was loaded. `trouble`: a reload ends before its end."""

    def __init__(self, lora: object = None, cache: str = "auto", offloaded: int = 0) -> None:
        self.device = torch.device("cuda")
        offload = SimpleNamespace(prefetch=SimpleNamespace(offload_group_size=offloaded))
        cache_config = SimpleNamespace(cache_dtype=cache)
        self.vllm_config = SimpleNamespace(lora_config=lora, cache_config=cache_config, offload_config=offload)
        self.model_config = SimpleNamespace(dtype=torch.bfloat16)
        self.model_runner = self
        self.loads: list[str] = []
        self.trouble = False
        self.made = torch.zeros(1)

    def get_model(self) -> Any:
        return self

    def reload_weights(self, **source: Any) -> None:
        self.loads.append("reload")
        if self.trouble:
            raise RuntimeError("scripted")
        self.made = torch.zeros(1)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loads.append("in place")
        for _, tensor in tensors:
            self.made.copy_(tensor)

    def parameters(self) -> Iterable[torch.Tensor]:
        return [self.made]

    def buffers(self) -> Iterable[torch.Tensor]:
        return []

    def load(self) -> str:
        """What this load did; "replayed" if it needed no loader."""
        before = len(self.loads)
        self.prime_reload(iter(TENSORS))
        return self.loads[-1] if len(self.loads) > before else "replayed"


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "finish_load", lambda model, config: None)
    monkeypatch.setattr(compat, "keeps_as_loaded", lambda model: True)
    monkeypatch.setattr(compat, "settle_reload", lambda model, config: model.loads.append("settled"))
    pytest.importorskip("vllm")
    monkeypatch.setattr("vllm.config.set_current_vllm_config", lambda config: nullcontext())


def test_what_a_reload_left_half_done_is_mended_by_a_reload(tmp_path: Path) -> None:
    """Contract: after a reload that failed, of a version or of the one before it, what it left behind is given up and the next tensors go through a
    reload; then in place again."""
    worker = Worker()
    assert [worker.load() for _ in range(3)] == ["in place", "in place", "replayed"]
    worker.trouble = True
    with pytest.raises(RuntimeError, match="scripted"):
        worker.prime_reload(tmp_path)  # a directory: what going back to the version before loads
    with pytest.raises(RuntimeError, match="scripted"):
        worker.load()
    worker.trouble = False
    assert worker.load() == "reload"
    assert worker.load() == "in place"
    assert worker.loads == ["in place", "in place", "reload", "settled", "reload", "settled", "reload", "in place"]
