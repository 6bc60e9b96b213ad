"""The config as vLLM's command line and environment."""

import json
from pathlib import Path
from typing import Any

import pytest

from prime_rl.config import InferenceConfig
from prime_rl.errors import UserError
from prime_rl.inference import compat
from prime_rl.inference.server import arguments, environment, is_loopback, to_argv

CPU = compat.Engine((0, 31), "0.31.0", "cpu")
CUDA = compat.Engine((0, 31), "0.31.0", "cuda")
NONE: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_API_KEY", "VLLM_PLUGINS", "VLLM_CACHE_ROOT", "OMP_NUM_THREADS", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


def config(**settings: Any) -> InferenceConfig:
    return InferenceConfig.model_validate(settings)


def flags(argv: list[str]) -> dict[str, str | None]:
    """`["--a", "1", "--b"]` as `{"--a": "1", "--b": None}`; of repeated values the first."""
    found: dict[str, str | None] = {}
    for token, following in zip(argv, [*argv[1:], "--"], strict=True):
        if token.startswith("--"):
            found[token] = None if following.startswith("--") else following
    return found


def test_values_become_arguments() -> None:
    """Contract: booleans are switches, lists repeat, dicts are JSON, None is left out."""
    given = {"a_b": 1, "yes": True, "no_way": False, "many": ["x", 2], "table": {"k": [1]}, "off": None, "null": "None"}
    assert to_argv(given) == ["--a-b", "1", "--yes", "--no-no-way", "--many", "x", "2", "--table", '{"k": [1]}']


def test_what_every_server_is_told() -> None:
    """Contract: the model is served under its configured name, with logprobs of the distribution that is sampled from, and no
    generation_config.json changes how a request is sampled."""
    got = flags(arguments(config(model={"name": "org/m"}, max_model_len=128, seed=3), CUDA))
    assert (got["--model"], got["--served-model-name"], got["--max-model-len"]) == ("org/m", "org/m", "128")
    assert got["--logprobs-mode"] == "processed_logprobs"
    assert got["--generation-config"] == "vllm"
    assert got["--worker-extension-cls"] == "prime_rl.inference.staging.WeightsExtension"
    assert (got["--api-server-count"], got["--seed"], got["--dtype"]) == ("1", "3", "auto")


def test_cpu_defaults() -> None:
    """Contract: on CPU float32 (as the trainer), eager, prefill never chunked (else a request with a seed kills the engine)."""
    got = flags(arguments(config(), CPU))
    assert (got["--dtype"], got["--max-model-len"]) == ("float32", "auto")
    assert {"--enforce-eager", "--no-enable-chunked-prefill"} <= got.keys()
    got = flags(arguments(config(model={"dtype": "bfloat16"}, enforce_eager=False), CPU))
    assert got["--dtype"] == "bfloat16"
    assert "--no-enforce-eager" in got
    assert (
        not {"--enforce-eager", "--no-enable-chunked-prefill", "--max-num-seqs"}
        & flags(arguments(config(), CUDA)).keys()
    )


def test_a_tiny_models_cache_is_limited(tmp_path: Path) -> None:
    """Contract: on a GPU, where vLLM would visit millions of blocks with every update; a larger model's is vLLM's own choice, as is what `[vllm]` says."""
    shape = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    name, flag = {"name": str(tmp_path)}, "--kv-cache-memory-bytes"

    def given(engine: compat.Engine = CUDA, more: dict[str, Any] | None = None, **settings: Any) -> str | None:
        (tmp_path / "config.json").write_text(json.dumps(shape | (more or {})))
        return flags(arguments(config(model=name, **settings), engine)).get(flag)

    assert given() == str(2 * 3 * 2 * 32 * 4 << 20)
    assert given(vllm={"kv-cache-memory-bytes": 7}) == "7"
    assert given(CPU) is None
    for other in ({"num_hidden_layers": 28}, {"kv_lora_rank": 512}, {"layer_types": ["linear_attention"]}):
        assert given(more=other) is None


@pytest.mark.parametrize("engine", [CPU, CUDA])
def test_deterministic(engine: compat.Engine) -> None:
    """Contract: `deterministic` leaves nothing that depends on other requests."""
    got = flags(arguments(config(deterministic=True), engine))
    assert got["--max-num-seqs"] == "1"
    assert {"--no-enable-chunked-prefill", "--no-enable-prefix-caching"} <= got.keys()


def test_extra_options_win_and_some_are_refused() -> None:
    """Contract: `[vllm]` reaches vLLM under either spelling and wins; what would break the weight routes is refused."""
    got = flags(arguments(config(vllm={"max-num-seqs": 4, "dtype": "half"}), CPU))
    assert (got["--max-num-seqs"], got["--dtype"]) == ("4", "half")
    assert "--enable-chunked-prefill" in flags(arguments(config(vllm={"enable_chunked_prefill": True}), CUDA))
    assert flags(arguments(config(server={"api_servers": 3}), CPU))["--api-server-count"] == "3"
    for extra in (
        {"api_server_count": 2},
        {"worker-extension-cls": "x"},
        {"api_key": "k"},
        {"enable-chunked-prefill": True},
    ):
        with pytest.raises(UserError, match="vllm"):
            arguments(config(vllm=extra), CPU)


def test_two_nodes_of_eight_gpus() -> None:
    """Contract: DP=4 x TP=4 over two nodes: the first node serves, the second runs engines only."""
    both = {
        "data_parallel_size": 4,
        "tensor_parallel_size": 4,
        "data_parallel_size_local": 2,
        "data_parallel_address": "10.0.0.1",
        "data_parallel_rpc_port": 13345,
    }
    expected = {
        "--data-parallel-size": "4",
        "--tensor-parallel-size": "4",
        "--data-parallel-size-local": "2",
        "--data-parallel-address": "10.0.0.1",
        "--data-parallel-rpc-port": "13345",
    }
    first = flags(arguments(config(**both), CUDA))
    assert expected.items() <= first.items()
    assert "--headless" not in first
    second = flags(arguments(config(**both, headless=True, data_parallel_start_rank=2), CUDA))
    assert {**expected, "--data-parallel-start-rank": "2", "--headless": None}.items() <= second.items()
    assert not {"--host", "--port", "--api-server-count"} & second.keys()


def test_an_option_that_vllm_does_not_have_is_one_line() -> None:
    """Contract: what `[vllm]` names is looked up before vLLM's parser, which would print all that it has; the nearest is named."""
    known = {"--enable-eplb", "--eplb-config", "--kv-transfer-config"}
    compat.check_options(CUDA, ["enable_eplb", "eplb-config", "kv_transfer_config.kv_role"], known)
    says = r"^vllm.enable_epbl: vLLM 0.31.0 has no option --enable-epbl; did you mean enable_eplb\?$"
    with pytest.raises(UserError, match=says):
        compat.check_options(CUDA, ["eplb_config", "enable_epbl"], known)
    with pytest.raises(UserError, match="has no option --zzz$"):
        compat.check_options(CUDA, ["zzz"], known)


def test_fp8_of_unquantized_weights(tmp_path: Path) -> None:
    """Contract: `fp8` reaches vLLM by the name that it has for quantizing at every load; a model that is quantized already keeps vLLM's own."""
    (tmp_path / "config.json").write_text("{}")
    for model in ("org/m", str(tmp_path)):
        got = flags(arguments(config(model={"name": model}, quantization="fp8"), CUDA))
        assert got["--quantization"] == "fp8_per_tensor"
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    for name in ("fp8", "fp8_per_block"):
        got = flags(arguments(config(model={"name": str(tmp_path)}, quantization=name), CUDA))
        assert got["--quantization"] == name
    assert "--quantization" not in arguments(config(), CUDA)


def test_pipeline_parallel() -> None:
    """Contract: sizes of one are not spelled out; PP reaches vLLM."""
    got = flags(arguments(config(pipeline_parallel_size=2), CUDA))
    assert got["--pipeline-parallel-size"] == "2"
    assert not {"--tensor-parallel-size", "--data-parallel-size"} & got.keys()


@pytest.mark.parametrize(
    ("settings", "key_in_environment", "host"),
    [
        (NONE, None, "127.0.0.1"),
        ({"server": {"host": "127.0.0.2"}}, None, "127.0.0.2"),
        ({"server": {"host": "10.1.2.3"}}, "k", "10.1.2.3"),
        ({"api_key": "k"}, None, "0.0.0.0"),
        (NONE, "k", "0.0.0.0"),
        ({"api_key": "k", "server": {"host": "localhost"}}, "k", "localhost"),
    ],
)
def test_who_can_reach_the_server(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], key_in_environment: str | None, host: str
) -> None:
    """Contract: loopback unless a host is given or a key is set; the key is never an argument, which all users can read."""
    if key_in_environment:
        monkeypatch.setenv("VLLM_API_KEY", key_in_environment)
    argv = arguments(config(**settings), CPU)
    assert flags(argv)["--host"] == host
    assert "k" not in argv


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "gpu-node-7"])
def test_other_hosts_need_a_key(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Contract: without a key the server refuses to listen where other hosts reach it, and says why; engines that answer no
    HTTP (headless) need none."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(UserError, match=rf"server.host {host} would open the weight routes .* set a key"):
        arguments(config(server={"host": host}), CPU)
    node = {
        "data_parallel_size": 2,
        "data_parallel_size_local": 1,
        "data_parallel_start_rank": 1,
        "data_parallel_address": "h",
    }
    arguments(config(server={"host": host}, headless=True, **node), CPU)


@pytest.mark.parametrize(
    ("vllm", "says"),
    [
        ({"hf_token": "hf-1"}, "vllm.hf_token: a secret is given by an environment variable"),
        ({"api-key": "k"}, "the key is given by VLLM_API_KEY"),
        ({"host": "0.0.0.0"}, r"vllm.host: .* \[server\]"),
        ({"uds": "/tmp/s"}, r"vllm.uds: .* \[server\]"),
        ({"tensor-parallel-size": 2}, "vllm.tensor_parallel_size: is an option of its own, tensor_parallel_size"),
        ({"grpc": True}, "vllm.grpc: .* asks for no key"),
        ({"model": "m"}, "vllm.model: is an option of its own, model.name"),
        ({"data_parallel_rank": 0}, "vllm.data_parallel_rank: .* servers of their own, which client.base_url lists"),
        ({"data-parallel-hybrid-lb": True}, "vllm.data_parallel_hybrid_lb: .* servers of their own"),
    ],
)
def test_options_of_vllm_open_no_back_door(vllm: dict[str, Any], says: str) -> None:
    """Contract: `[vllm]` neither holds keys, which would be written to configs and logs, nor moves the server elsewhere."""
    with pytest.raises(UserError, match=says):
        arguments(config(vllm=vllm), CPU)


def test_remote_code_is_off() -> None:
    """Contract: code that comes with a model runs only when asked for."""
    assert "--trust-remote-code" not in arguments(config(), CPU)
    assert "--trust-remote-code" in arguments(config(model={"trust_remote_code": True}), CPU)


def test_loopback() -> None:
    """Contract: only addresses of this machine count as loopback."""
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"))


def test_environment_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Contract: the CPU recipe is set before vLLM is imported, and nothing that the user has set is touched."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    got = environment(config(model={"name": str(tmp_path)}, cpu={"kvcache_gib": 3}), CPU)
    assert got["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert got["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert (got["OMP_NUM_THREADS"], got["TORCHDYNAMO_DISABLE"], got["HF_HUB_OFFLINE"]) == ("1", "1", "1")
    assert got["VLLM_CACHE_ROOT"] == "/cache/vllm-0.31.0"
    assert "prime_rl" in got["VLLM_PLUGINS"].split(",")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert "OMP_NUM_THREADS" not in environment(config(), CPU)
    assert "HF_HUB_OFFLINE" not in environment(config(), CPU)


def test_environment_elsewhere() -> None:
    """Contract: the single-process recipe is for one replica on one device; compiling is not switched off when asked for."""
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment(config(tensor_parallel_size=2), CPU)
    assert "TORCHDYNAMO_DISABLE" not in environment(config(enforce_eager=False), CPU)
    assert not {"OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE"} & environment(config(), CUDA).keys()


def test_json_values_survive() -> None:
    """Contract: a table in `[vllm]` arrives as the same JSON."""
    value = {"backend": "nccl", "deep": {"x": [1, 2.5, None]}}
    argv = arguments(config(vllm={"weight_transfer_config": value}), CPU)
    assert json.loads(argv[argv.index("--weight-transfer-config") + 1]) == value
