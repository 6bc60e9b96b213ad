"""What `rl parity` starts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prime_rl.config import InferenceConfig, parse
from prime_rl.config.rl import ParityConfig
from prime_rl.launcher import one_server


def started(monkeypatch: pytest.MonkeyPatch, root: Path, *arguments: str) -> tuple[InferenceConfig, ParityConfig]:
    """The settings of the server and of what samples from it; none is started."""
    servers: list[InferenceConfig] = []
    samplers: list[ParityConfig] = []

    @contextmanager
    def running_server(config: InferenceConfig, seconds: float) -> Iterator[None]:
        servers.append(config)
        yield

    async def sample(config: ParityConfig, directory: Path) -> None:
        samplers.append(config)

    monkeypatch.setattr(one_server, "running_server", running_server)
    monkeypatch.setattr(one_server, "sample", sample)
    one_server.serve_and_sample(parse(ParityConfig, ["--model.name", "m", *arguments], {}), root)
    return servers[0], samplers[0]


def test_a_model_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Contract: a server of the model, seed and device that are given, which is asked."""
    served, sampler = started(monkeypatch, tmp_path, "--device", "cpu", "--seed", "3", "--replies", "5")
    assert (served.model.name, served.device, served.seed, served.output_dir) == ("m", "cpu", 3, tmp_path)
    assert (sampler.model.name, sampler.seed, sampler.replies, sampler.reply_tokens) == ("m", 3, 5, 128)
    assert sampler.client is not None
    assert sampler.client.base_urls == [served.server.url]


def test_the_file_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Contract: it is taken as it is, and its server is started; replies fit its context."""
    monkeypatch.setenv("VLLM_API_KEY", "")
    run = tmp_path / "rl.toml"
    inference = (
        '[inference]\nquantization = "fp8"\nmax_model_len = 128\napi_key = "k"\n[inference.server]\nport = 8123\n'
    )
    run.write_text(f'[trainer.loss]\ntype = "gspo"\n{inference}[orchestrator.environment]\nid = "x"\n')
    served, sampler = started(monkeypatch, tmp_path, "@", str(run))
    assert (served.model.name, served.quantization, served.server.port) == ("m", "fp8", 8123)
    assert os.environ["VLLM_API_KEY"] == "k"
    assert sampler.reply_tokens == 64
    assert sampler.client is not None
    assert sampler.client.base_urls == ["http://localhost:8123"]
