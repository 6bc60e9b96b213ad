"""vLLM's own layerwise reload, of a small model: what becomes of layers that a failed one has left half loaded."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from prime_rl.inference.staging import WeightsExtension

pytest.importorskip("vllm")
NAMES = [f"{layer}.{shard}" for layer in "ab" for shard in (0, 1)]


class Fused(nn.Module):
    """A parameter that the checkpoint holds as two tensors, as vLLM's layers for gate and up are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2), requires_grad=False)

        def load(param: nn.Parameter, loaded_weight: torch.Tensor, shard: int) -> None:  # as vLLM calls them
            param.data[2 * shard : 2 * shard + 2].copy_(loaded_weight)

        self.weight.weight_loader = load  # type: ignore[attr-defined]


class Head(nn.Module):
    weight: nn.Parameter


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Fused(), Fused()
        self.head = Head()
        self.head.weight = self.a.weight  # tied

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())  # once, as vLLM's models do
        for name, tensor in tensors:
            layer, shard = name.split(".")
            parameter = parameters[f"{layer}.weight"]
            parameter.weight_loader(parameter, tensor, int(shard))  # type: ignore[attr-defined]


def tensors_of(version: int, fail_after: int | None) -> Iterator[tuple[str, torch.Tensor]]:
    for index, name in enumerate(NAMES):
        if index == fail_after:
            raise OSError("scripted")
        yield name, torch.full((2, 2), version + index / 10)


class Worker(WeightsExtension):
    """A worker on a CPU with vLLM's `reload_weights`."""

    def __init__(self) -> None:
        from vllm.config import VllmConfig
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        self.device, self.rank = torch.device("cpu"), 0
        self.vllm_config = VllmConfig()
        self.model_config = SimpleNamespace(dtype=torch.float32, quantization=None, model="/base")
        self.load_config: Any = None
        self.lora_config: Any = None
        self.model, self.model_runner = Model(), self
        record_metadata_for_reloading(self.model)

    def get_model(self) -> Model:
        return self.model

    def reset_lora_state(self) -> None: ...
    def reset_encoder_cache(self) -> None: ...
    def reset_mm_cache(self) -> None: ...

    def reload_weights(self, **source: Any) -> None:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        GPUModelRunner.reload_weights(self, **source)  # type: ignore[arg-type]

    def load(self, version: int, fail_after: int | None = None) -> None:
        place, digest = Path(f"/v{version}"), f"hash {version}"
        self.prime_staging = SimpleNamespace(
            directory=place, digest=digest, place="host", wait=lambda seconds: None, drop=lambda: None,
            tensors=tensors_of(version, fail_after),
        )  # type: ignore[assignment]  # fmt: skip
        self.prime_load(str(place), {"version": version, "hash": digest, "weight_dir": str(place)})

    def holds(self) -> list[float]:
        return [round(float(x), 3) for parameter in self.model.parameters() for x in parameter.data[::2, 0]]


@pytest.mark.parametrize("again", [0, 1, 3, None], ids=lambda count: f"the next ends after {count}")
@pytest.mark.parametrize("loaded", [0, 1, 2, 3])
def test_what_a_load_left_half_loaded(loaded: int, again: int | None) -> None:
    """Contract: wherever a load ends, and wherever the next one ends after that, the next version that is loaded is that version, in every layer."""
    worker = Worker()
    with pytest.raises(OSError, match="scripted"):
        worker.load(1, fail_after=loaded)
    if again is not None:
        with pytest.raises(OSError, match="scripted"):
            worker.load(1, fail_after=again)
    worker.load(2)
    assert worker.holds() == [2.0, 2.1, 2.2, 2.3]
    assert worker.prime_served() == {"version": 2, "hash": "hash 2", "weight_dir": "/v2"}
