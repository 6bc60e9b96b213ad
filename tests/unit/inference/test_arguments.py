"""The config as vLLM's command line and environment."""

from pathlib import Path
from typing import Any

import pytest

from prime_rl.config import InferenceConfig
from prime_rl.errors import UserError
from prime_rl.inference import compat
from prime_rl.inference.server import arguments, environment, to_argv

CPU = compat.Engine((0, 31), "0.31.0", "cpu")
CUDA = compat.Engine((0, 31), "0.31.0", "cuda")
NONE: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_API_KEY", "VLLM_PLUGINS", "OMP_NUM_THREADS", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


def config(**settings: Any) -> InferenceConfig:
    return InferenceConfig.model_validate(settings)


def flags(engine: compat.Engine = CUDA, **settings: Any) -> dict[str, str | None]:
    """`["--a", "1", "--b"]` as `{"--a": "1", "--b": None}`; of repeated values the first."""
    argv = arguments(config(**settings), engine)
    values: dict[str, str | None] = {}
    for token, following in zip(argv, [*argv[1:], "--"], strict=True):
        if token.startswith("--"):
            values[token] = None if following.startswith("--") else following
    return values


def test_values_become_arguments() -> None:
    """Contract: booleans are switches, lists repeat, dicts are JSON, None is left out."""
    values = {"a_b": 1, "on": True, "no_way": False, "many": ["x", 2], "table": {"k": [1]}, "off": None, "null": "None"}
    assert to_argv(values) == ["--a-b", "1", "--on", "--no-no-way", "--many", "x", "2", "--table", '{"k": [1]}']


NODES = {"data_parallel_size": 4, "tensor_parallel_size": 4, "data_parallel_size_local": 2,
         "data_parallel_address": "10.0.0.1", "data_parallel_rpc_port": 13345}  # fmt: skip
NODE_FLAGS = {"--" + name.replace("_", "-"): str(value) for name, value in NODES.items()}


@pytest.mark.parametrize(
    ("engine", "settings", "expected", "absent"),
    [
        # Logprobs are of the distribution that is sampled from; no generation_config.json changes how requests sample.
        (CUDA, {"model": {"name": "org/m"}, "max_model_len": 128, "seed": 3},
         {"--model": "org/m", "--served-model-name": "org/m", "--max-model-len": "128", "--seed": "3",
          "--dtype": "auto", "--api-server-count": "1", "--logprobs-mode": "processed_logprobs",
          "--generation-config": "vllm", "--worker-extension-cls": "prime_rl.inference.staging.WeightsExtension"},
         {"--enforce-eager", "--no-enable-chunked-prefill", "--max-num-seqs", "--trust-remote-code",
          "--tensor-parallel-size", "--data-parallel-size"}),
        # On CPU float32 (as the trainer), eager, prefill never chunked (else a request with a seed kills the engine).
        (CPU, NONE, {"--dtype": "float32", "--max-model-len": "auto", "--enforce-eager": None,
                     "--no-enable-chunked-prefill": None}, set()),
        (CPU, {"model": {"dtype": "bfloat16"}, "enforce_eager": False},
         {"--dtype": "bfloat16", "--no-enforce-eager": None}, {"--enforce-eager"}),
        # `[vllm]` reaches vLLM under either spelling and wins.
        (CPU, {"vllm": {"max-num-seqs": 4, "dtype": "half"}}, {"--max-num-seqs": "4", "--dtype": "half"}, set()),
        (CUDA, {"vllm": {"enable_chunked_prefill": True}}, {"--enable-chunked-prefill": None}, set()),
        (CUDA, {"vllm": {"deep": {"x": {"y": [1, 2.5, None]}}}}, {"--deep": '{"x": {"y": [1, 2.5, null]}}'}, set()),
        (CUDA, {"pipeline_parallel_size": 2}, {"--pipeline-parallel-size": "2"}, set()),
        # Graphs of all steps that adapters are likely to have, unless the user says which.
        (CUDA, {"lora": {}}, {"--enable-lora": None, "--cudagraph-capture-sizes": "1"}, set()),
        (CUDA, {"lora": {}, "vllm": {"max-cudagraph-capture-size": 8}}, {"--max-cudagraph-capture-size": "8"},
         {"--cudagraph-capture-sizes"}),
        (CPU, {"lora": {}}, {"--enable-lora": None}, {"--cudagraph-capture-sizes"}),
        (CUDA, {"lora": {"tenants": {"slots": 3}}},
         {"--max-cpu-loras": "3", "--distributed-executor-backend": "mp"}, set()),
        (CPU, {"lora": {"tenants": {"slots": 3}}}, {"--max-loras": "3"}, {"--distributed-executor-backend"}),
        # `fp8` gets vLLM's name for quantizing at every load.
        (CUDA, {"quantization": "fp8"}, {"--quantization": "fp8_per_tensor"}, set()),
        (CUDA, {"quantization": "fp8_per_block"}, {"--quantization": "fp8_per_block"}, set()),
        (CUDA, {"model": {"trust_remote_code": True}}, {"--trust-remote-code": None}, set()),
        # Two nodes of eight GPUs: the first serves, the second runs engines only.
        (CUDA, NODES, NODE_FLAGS, {"--headless"}),
        (CUDA, NODES | {"headless": True, "data_parallel_start_rank": 2},
         NODE_FLAGS | {"--data-parallel-start-rank": "2", "--headless": None},
         {"--host", "--port", "--api-server-count"}),
    ],
)  # fmt: skip
def test_what_a_server_is_started_with(
    engine: compat.Engine, settings: dict[str, Any], expected: dict[str, str | None], absent: set[str]
) -> None:
    """Contract: what each kind of server gets, and what it does not get."""
    got = flags(engine, **settings)
    assert expected.items() <= got.items()
    assert not absent & got.keys()


def test_a_tiny_models_cache_is_limited(tmp_path: Path) -> None:
    """Contract: on a GPU, where vLLM visits millions of blocks per update; no larger model's, nor against `[vllm]`."""

    def size(megabytes: int, engine: compat.Engine = CUDA, **settings: Any) -> str | None:
        (tmp_path / "config.json").write_text("{}")
        with open(tmp_path / "model.safetensors", "wb") as file:
            file.truncate(megabytes << 20)
        return flags(engine, model={"name": str(tmp_path)}, **settings).get("--kv-cache-memory-bytes")

    assert (size(100), size(110), size(100, CPU)) == (str(4 << 30), None, None)
    assert size(100, vllm={"kv-cache-memory-bytes": 7}) == "7"


def test_recurrent_models_on_a_cpu(tmp_path: Path) -> None:
    """Contract: no cache of prefixes, which vLLM keeps only where prompts come in chunks; other models have one."""
    for text, off in (('{"text_config": {"linear_key_head_dim": 8}}', True), ('{"head_dim": 8}', False)):
        (tmp_path / "config.json").write_text(text)
        assert ("--no-enable-prefix-caching" in flags(CPU, model={"name": str(tmp_path)})) == off


@pytest.mark.parametrize(
    ("settings", "key_in_environment", "host"),
    [
        (NONE, None, "127.0.0.1"),
        *(({"server": {"host": host}}, None, host) for host in ("127.9.9.9", "::1", "localhost")),
        ({"server": {"host": "10.1.2.3"}}, "k", "10.1.2.3"),
        ({"api_key": "k"}, None, "0.0.0.0"),
        (NONE, "k", "0.0.0.0"),
        ({"api_key": "k", "server": {"host": "localhost"}}, "k", "localhost"),
    ],
)
def test_who_can_reach_the_server(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], key_in_environment: str | None, host: str
) -> None:
    """Contract: loopback unless a host is given or a key set; the key is never an argument, which all users see."""
    if key_in_environment:
        monkeypatch.setenv("VLLM_API_KEY", key_in_environment)
    assert flags(CPU, **settings)["--host"] == host
    assert "k" not in arguments(config(**settings), CPU)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "gpu-node-7"])
def test_other_hosts_need_a_key(host: str) -> None:
    """Contract: without a key the server refuses to listen to other hosts, and says why; headless ones need none."""
    with pytest.raises(UserError, match=rf"server.host {host} would open the weight routes .* set a key"):
        flags(CPU, server={"host": host})
    flags(CPU, server={"host": host}, headless=True, data_parallel_start_rank=2, **NODES)


@pytest.mark.parametrize(
    ("vllm", "says"),
    [
        ({"hf_token": "hf-1"}, "vllm.hf_token: a secret is given by an environment variable"),
        ({"api-key": "k"}, "the key is given by VLLM_API_KEY"),
        ({"host": "0.0.0.0"}, r"vllm.host: .* \[server\]"),
        ({"uds": "/tmp/s"}, r"vllm.uds: .* \[server\]"),
        ({"tensor-parallel-size": 2}, "vllm.tensor_parallel_size: is an option of its own, tensor_parallel_size"),
        ({"grpc": True}, "vllm.grpc: .* asks for no key"),
        ({"enable-eplb": True}, "vllm.enable_eplb: it moves experts"),
        ({"model": "m"}, "vllm.model: is an option of its own, model.name"),
        ({"data_parallel_rank": 0}, "vllm.data_parallel_rank: .* servers of their own, which client.base_url lists"),
        ({"data-parallel-hybrid-lb": True}, "vllm.data_parallel_hybrid_lb: .* servers of their own"),
        ({"api_server_count": 2}, "vllm.api_server_count"),
        ({"worker-extension-cls": "x"}, "vllm.worker_extension_cls"),
        ({"root_path": "/v1"}, "vllm.root_path"),
        ({"enable-chunked-prefill": True}, "vllm.enable_chunked_prefill"),
    ],
)
def test_options_of_vllm_open_no_back_door(vllm: dict[str, Any], says: str) -> None:
    """Contract: `[vllm]` holds no keys (they would be written), moves no server elsewhere, breaks no weight route."""
    with pytest.raises(UserError, match=says):
        flags(CPU, vllm=vllm)


def test_environment_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Contract: the CPU recipe is set before vLLM is imported, for one replica on one device, and nothing that the user
    has set is touched; compiling is not switched off when asked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    got = environment(config(model={"name": str(tmp_path)}, kv_cache_gib=2.5), CPU)
    expected = {"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1",
                "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}  # fmt: skip
    assert expected.items() <= got.items()
    assert "prime_rl" in got["VLLM_PLUGINS"].split(",")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert not {"OMP_NUM_THREADS", "HF_HUB_OFFLINE"} & environment(config(), CPU).keys()
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment(config(tensor_parallel_size=2), CPU)
    assert "TORCHDYNAMO_DISABLE" not in environment(config(enforce_eager=False), CPU)
    assert not {"OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE"} & environment(config(), CUDA).keys()
