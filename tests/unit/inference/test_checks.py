"""Bad input is one clear line, found without importing vLLM."""

import json
import socket
import struct
import subprocess
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from prime_rl.config import InferenceConfig
from prime_rl.errors import UserError
from prime_rl.inference import checks, compat
from prime_rl.inference.server import arguments

CPU = compat.Engine((0, 31), "0.31.0", "cpu")
CUDA = compat.Engine((0, 31), "0.31.0", "cuda")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 512}))
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    return directory


def test_broken_models_are_named(model: Path) -> None:
    """Contract: cut tensors, a lost shard: the file is named. A whole model passes. (The rest: test_preflight.py.)"""
    checks.check_model(str(model))
    data = (model / "model.safetensors").read_bytes()
    malformed = (b"", b"\xff" * 8 + data[8:], b"\x05\0\0\0\0\0\0\0{nope", b"\x02\0\0\0\0\0\0\0[]")
    for broken in (data[:4], data[:20], data[:-1], *malformed):
        (model / "model.safetensors").write_bytes(broken)
        with pytest.raises(UserError, match="model.safetensors"):
            checks.check_model(str(model))
    (model / "model.safetensors").write_bytes(data)
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}))
    with pytest.raises(UserError, match="model-2.safetensors is missing"):
        checks.check_model(str(model))


def test_a_hub_that_cannot_be_reached_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: at once, with what was looked for; a local directory asks nobody. One that is slow, or answers
    something else, is left to vLLM."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    checks.check_hub(str(model))
    with pytest.raises(UserError, match=r"^model.name: no/such is neither .*//127.0.0.1:9 cannot be reached"):
        checks.check_hub("no/such")
    for answer in (httpx.ReadTimeout("slow"), ValueError("no JSON")):
        monkeypatch.setattr("huggingface_hub.HfApi.model_info", Mock(side_effect=answer))
        checks.check_hub("no/such")


def test_a_port_that_is_taken_is_named() -> None:
    """Contract: before anything is loaded, also where a server that is still loading has it: the kernel would let both
    have it (SO_REUSEPORT). The launcher's check names its own option."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is in use"):
            checks.claim_port("127.0.0.1", port)
    with (
        closing(checks.claim_port("127.0.0.1", port)),
        pytest.raises(UserError, match=rf"port {port} is in use: .* --inference.server.port$"),
    ):
        checks.claim_port("0.0.0.0", port, "--inference.server.port")
    with pytest.raises(UserError, match="cannot be used on 203"):
        checks.claim_port("203.0.113.1", port)
    checks.claim_port("127.0.0.1", port).close()


def test_the_device_and_the_routes_are_what_was_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: asking for a missing GPU, or a build for something else, says what to install. vLLM's development
    routes never stand beside ours, nor does a server that has none of ours and no guard."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match="uv sync --extra cuda"):
        checks.check_device("cuda", CPU)
    with pytest.raises(UserError, match="uv sync --group cpu"):
        checks.check_device("cpu", CUDA)
    for device in ("auto", "cuda"):
        with pytest.raises(UserError, match="NVIDIA GPU"):
            checks.check_device(device, CUDA)
    checks.check_device("auto", CPU)
    for name in ("VLLM_SERVER_DEV_MODE", "VLLM_USE_RUST_FRONTEND"):
        monkeypatch.setenv(name, "1")
        with pytest.raises(UserError, match=name):
            checks.check(InferenceConfig(), CPU)
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("engine", "settings", "says"),
    [
        (CPU, {}, None),
        (
            CPU._replace(version=(0, 26), release="0.26.0"),
            {},
            "vLLM 0.26.0 for CPUs does not .* 0.31 does, or a CUDA build",
        ),
        (CUDA, {"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        (CPU, {"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        (CUDA, {"vllm": {"enable_prefix_caching": False}}, "only with prefix caching"),
        (CPU, {"vllm": {"enable_prefix_caching": True}}, "only without prefix caching"),
        (CUDA, {}, None),
        (CUDA._replace(version=(0, 26), release="0.26.0"), {"vllm": {"enable_prefix_caching": False}}, None),
    ],
)
def test_an_engine_that_cannot_say_what_it_chose_is_refused(
    engine: compat.Engine, settings: dict[str, Any], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: refused by name before vLLM is imported, with the releases that can: no zeros are taken for experts."""
    monkeypatch.setattr(checks, "check_device", lambda *_: None)
    config = InferenceConfig.model_validate({"model": {"name": "a/b"}, "router_replay": True, **settings})
    with nullcontext() if says is None else pytest.raises(UserError, match=f"router_replay: .*{says}"):
        checks.check(config, engine)
    on_cpu = engine.device == "cpu"
    assert ("--enable-return-routed-experts" in arguments(config, engine)) is not on_cpu
    assert not on_cpu or says or "--no-enable-prefix-caching" in arguments(config, engine)


def run(directory: Path, *lines: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """`inference` with these lines as its config, and the packages that it imported."""
    (directory / "inference.toml").write_text("\n".join([f'output_dir = "{directory}/out"', *lines]))
    command = [sys.executable, "-X", "importtime", "-m", "prime_rl.entrypoints.inference", "@"]
    done = subprocess.run(
        [*command, str(directory / "inference.toml")], capture_output=True, text=True, timeout=60, check=False
    )
    times = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return done, {line.split("|")[-1].strip() for line in times}


def test_a_missing_model_ends_before_vllm_is_imported(tmp_path: Path) -> None:
    """Contract: one line, exit status 1, and neither vLLM nor torch was imported on the way."""
    result, imported = run(tmp_path, f'model.name = "{tmp_path}/nothing"')
    errors = [line for line in result.stderr.splitlines() if not line.startswith("import time:")]
    assert result.returncode == 1, result.stderr[-2000:]
    assert errors == [f"error: model.name: {tmp_path}/nothing is not a directory"]
    assert not imported & {"vllm", "torch"}
    assert not (tmp_path / "out").exists()


def test_dry_run_touches_nothing_else(tmp_path: Path) -> None:
    """Contract: --dry-run prints arguments and environment, writes the resolved config, and no vLLM is imported."""
    result, imported = run(tmp_path, "dry_run = true", "tensor_parallel_size = 4", "data_parallel_size = 4")
    assert result.returncode == 0, result.stderr[-2000:]
    for text in ("--tensor-parallel-size 4", "--data-parallel-size 4", "VLLM_PLUGINS="):
        assert text in result.stdout
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"inference.toml", "out/configs/inference.toml"}
    assert "vllm" not in imported
