"""What `rl parity` starts."""

from pathlib import Path
from typing import Any

import pytest

from prime_rl.config import InferenceConfig, parse
from prime_rl.config.rl import ParityConfig
from prime_rl.launcher import parity
from prime_rl.launcher.plan import ProcessSpec
from prime_rl.launcher.supervise import RunOutcome


def started(monkeypatch: pytest.MonkeyPatch, root: Path, *arguments: str) -> list[ProcessSpec]:
    """The processes that are supervised; none is started."""
    specs: list[ProcessSpec] = []

    class Recorder:
        def __init__(self, processes: list[ProcessSpec], *more: Any) -> None:
            specs.extend(processes)

        def run(self) -> RunOutcome:
            return RunOutcome.SUCCESS

    monkeypatch.setattr(parity, "Supervisor", Recorder)
    config = parse(ParityConfig, ["--model.name", "m", *arguments], {})
    assert parity.serve_and_sample(config, root) is RunOutcome.SUCCESS
    return specs


def read(spec: ProcessSpec) -> ParityConfig:
    """The configuration of the sampler as it reads it."""
    place = spec.argv.index(parity.SAMPLER)
    return parse(ParityConfig, spec.argv[place + 1 :], {})


def test_a_model_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Contract: a server and the sampler after it, of the same model, seed and device."""
    server, sampler = started(monkeypatch, tmp_path, "--device", "cpu", "--seed", "3", "--replies", "5")
    assert (server.name, sampler.after_ready) == ("inference", ("inference",))
    served, job = parse(InferenceConfig, ["@", server.argv[-1]], {}), read(sampler)
    assert (served.model.name, served.device, served.seed, served.output_dir) == ("m", "cpu", 3, tmp_path)
    assert (job.model.name, job.seed, job.replies, job.reply_tokens, job.output_dir) == ("m", 3, 5, 128, tmp_path)
    assert job.client is not None
    assert job.client.base_urls == ["http://localhost:8000"]


def test_the_file_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Contract: it is taken as it is, and its server is started; replies fit its context."""
    run = tmp_path / "rl.toml"
    inference = (
        '[inference]\nquantization = "fp8"\nmax_model_len = 128\napi_key = "k"\n[inference.server]\nport = 8123\n'
    )
    run.write_text(f'[trainer.loss]\ntype = "gspo"\n{inference}[orchestrator.environment]\nid = "x"\n')
    server, sampler = started(monkeypatch, tmp_path, "@", str(run))
    served, job = parse(InferenceConfig, ["@", server.argv[-1]], {}), read(sampler)
    assert (served.model.name, served.quantization, served.server.port) == ("m", "fp8", 8123)
    assert server.env["VLLM_API_KEY"] == sampler.env["VLLM_API_KEY"] == "k"
    assert job.reply_tokens == 64
    assert job.client is not None
    assert job.client.base_urls == ["http://localhost:8123"]
