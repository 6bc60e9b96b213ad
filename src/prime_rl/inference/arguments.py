"""Our config as vLLM's own command line and environment. Pure: the same config gives the same answer, and no vLLM is needed."""

import ipaddress
import json
import os
from pathlib import Path
from typing import Any

from prime_rl.config import InferenceConfig
from prime_rl.errors import UserError
from prime_rl.inference import compat
from prime_rl.inference.checks import gpu_count, local_model, read_json, tiny_cache_bytes
from prime_rl.redact import is_secret

WORKER_EXTENSION = "prime_rl.inference.staging.WeightsExtension"
LOOPBACK, ALL_ADDRESSES = "127.0.0.1", "0.0.0.0"
# Options of vLLM that `[vllm]` may not hold, and why.
_REJECTED = {
    "api_server_count": "how many processes answer is set by server.api_servers",
    "worker_extension_cls": "the weight routes need their own",
    "api_key": "the key is given by VLLM_API_KEY or --api-key",
    "model": "is an option of its own, model.name",
    # The launcher counts GPUs by these.
    **{
        name: f"is an option of its own, {name}"
        for name in (
            "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "data_parallel_size_local",
            "data_parallel_address", "data_parallel_rpc_port", "data_parallel_start_rank", "headless",
        )
    },
    **dict.fromkeys(("host", "port", "uds"), "where the server listens is set by [server]"),
}  # fmt: skip
_REJECTED_UNLESS_OFF = {
    "grpc": "vLLM's gRPC server asks for no key and has no weight routes: leave it out",
    # They have to be paused together and know nothing of each other's servers.
    **dict.fromkeys(
        ("data_parallel_rank", "data_parallel_external_lb", "data_parallel_hybrid_lb", "data_parallel_multi_port_external_lb"),
        "replicas at addresses of their own are started as servers of their own, which client.base_url lists; experts that "
        "are spread over nodes have one address, with data_parallel_size and headless nodes",
    ),
}  # fmt: skip

_REJECTED_ON_CPU = {
    "enable_chunked_prefill": "a request with a seed would kill a CPU engine that computes prompts in chunks"
}


def resolve_device(config: InferenceConfig, engine: compat.Engine | None) -> str:
    """ "cpu" or "cuda": what was asked for, else what the installed vLLM was built for, else what the machine has."""
    if config.device != "auto":
        return config.device
    if engine is not None:
        return engine.device
    return "cuda" if gpu_count() else "cpu"


def api_key(config: InferenceConfig) -> str | None:
    """The config's key, else the environment's."""
    return config.api_key or os.environ.get("VLLM_API_KEY") or None


def listen_host(config: InferenceConfig) -> str:
    """Loopback unless a host is given or a key guards the server."""
    return config.server.host or (ALL_ADDRESSES if api_key(config) else LOOPBACK)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def guarded_host(config: InferenceConfig) -> str:
    """`listen_host`, which must be out of others' reach or behind a key: who reaches the weight routes decides what is served.

    Raises:
        UserError: other hosts would reach a server without a key.
    """
    host = listen_host(config)
    if config.headless or is_loopback(host) or api_key(config) is not None:
        return host
    raise UserError(
        f"server.host {host} would open the weight routes to every host that reaches it: set a key (VLLM_API_KEY, which clients need "
        "too), or leave server.host out to listen on loopback"
    )


def arguments(config: InferenceConfig, engine: compat.Engine | None) -> list[str]:
    """vLLM's argument list. `[vllm]` of the config wins over everything chosen here.

    Raises:
        UserError: a setting in `[vllm]` would break the weight routes or hold a secret, or other hosts would reach a server without a key.
    """
    flags = _own_flags(config) | _parallel_flags(config) | compat.release_flags(engine)
    if resolve_device(config, engine) == "cpu":
        flags |= _cpu_flags(config)
        rejected = _REJECTED_UNLESS_OFF | _REJECTED_ON_CPU
    else:
        flags |= _cache_flags(config)
        rejected = _REJECTED_UNLESS_OFF
    if config.deterministic:
        flags |= _deterministic_flags()
    extra = extra_options(config)
    for name, value in extra.items():
        off = value is None or value is False
        if why := _REJECTED.get(name) or (None if off else rejected.get(name)):
            raise UserError(f"vllm.{name}: {why}")
        if isinstance(value, str) and is_secret(name, value):
            raise UserError(f"vllm.{name}: a secret is given by an environment variable (HF_TOKEN, …), not in a config")
    return to_argv(flags | extra)


def extra_options(config: InferenceConfig) -> dict[str, Any]:
    """Return the options under `[vllm]`, whose names may be written with either hyphens or underscores."""
    return {name.replace("-", "_"): value for name, value in config.vllm.items()}


def to_argv(flags: dict[str, Any]) -> list[str]:
    """`{"a_b": 1}` as `["--a-b", "1"]`: booleans as switches, lists as repeated values, dicts as JSON, None left out."""
    argv: list[str] = []
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if value is None or value == "None":
            continue
        if isinstance(value, bool):
            argv.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, dict):
            argv += [flag, json.dumps(value)]
        elif isinstance(value, (list, tuple)):
            argv += [flag, *map(str, value)]
        else:
            argv += [flag, str(value)]
    return argv


def environment(config: InferenceConfig, engine: compat.Engine | None) -> dict[str, str]:
    """Variables to set before vLLM is imported, unless the user has set them."""
    values = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
        "VLLM_PLUGINS": compat.plugin_allowlist(),
    }
    if "VLLM_CONFIGURE_LOGGING" not in os.environ:
        values["VLLM_LOGGING_CONFIG_PATH"] = str(Path(__file__).with_name("logging.json"))
    if engine is not None:
        # Releases that share a cache of model descriptions evict each other's, which costs 12 s at every start.
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        values["VLLM_CACHE_ROOT"] = str(cache / f"vllm-{engine.release}")
    if local_model(config.model.name) is not None:
        values["HF_HUB_OFFLINE"] = "1"
    if resolve_device(config, engine) == "cpu":
        values |= _cpu_environment(config)
    return {name: value for name, value in values.items() if name not in os.environ}


def _own_flags(config: InferenceConfig) -> dict[str, Any]:
    return {
        "model": config.model.name,
        "served_model_name": config.model.name,
        "trust_remote_code": config.model.trust_remote_code or None,
        "dtype": config.model.dtype,
        "chat_template": config.model.chat_template,
        "host": None if config.headless else guarded_host(config),
        "port": None if config.headless else config.server.port,
        "max_model_len": config.max_model_len,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "quantization": _quantization(config),
        "enforce_eager": config.enforce_eager,
        # Servers of one run that drew the same random numbers would sample the same replies to one prompt.
        "seed": config.seed + config.replica,
        "worker_extension_cls": WORKER_EXTENSION,
        # The log-probability under the distribution that was sampled from, temperature and truncation included:
        # what an importance ratio needs.
        "logprobs_mode": "processed_logprobs",
        # A model's generation_config.json must not change how a request that does not name a parameter is sampled.
        "generation_config": "vllm",
        "disable_uvicorn_access_log": True,
    }


def _quantization(config: InferenceConfig) -> str | None:
    """Whether a model on the hub is quantized already is not known here; vLLM finds out by itself, where no quantization is named."""
    if config.quantization is None:
        return None
    directory = local_model(config.model.name)
    already = directory is not None and "quantization_config" in read_json(directory / "config.json")
    return compat.quantization(config.quantization, already)


def _parallel_flags(config: InferenceConfig) -> dict[str, Any]:
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    sizes = {name: getattr(config, name) for name in names}
    flags: dict[str, Any] = {name: size for name, size in sizes.items() if size > 1}
    flags |= {
        "data_parallel_size_local": config.data_parallel_size_local,
        "data_parallel_address": config.data_parallel_address,
        "data_parallel_rpc_port": config.data_parallel_rpc_port,
        "data_parallel_start_rank": config.data_parallel_start_rank,
    }
    if config.headless:
        return flags | {"headless": True}
    # vLLM would choose as many as there are replicas.
    return flags | {"api_server_count": config.server.api_servers}


def _cpu_flags(config: InferenceConfig) -> dict[str, Any]:
    return {
        # float32: the trainer computes in it here, and both must agree to 1e-4.
        "dtype": "float32" if config.model.dtype == "auto" else config.model.dtype,
        "enforce_eager": True if config.enforce_eager is None else config.enforce_eager,
        # As long as the KV cache allows, where nothing is asked for: a model's full context seldom fits.
        "max_model_len": config.max_model_len or "auto",
        # vLLM sets a request's generator back after a chunk, which CPU generators cannot do: a seed kills the engine.
        "enable_chunked_prefill": False,
    }


def _cache_flags(config: InferenceConfig) -> dict[str, Any]:
    """The size of the cache, where it is given or the model is tiny."""
    if config.kv_cache_gib is not None:
        return {"kv_cache_memory_bytes": int(config.kv_cache_gib * (1 << 30))}
    model = local_model(config.model.name)
    size = None if model is None else tiny_cache_bytes(model)
    return {} if size is None else {"kv_cache_memory_bytes": size}


def _deterministic_flags() -> dict[str, Any]:
    """One sequence at a time, computed the same way whatever came before: equal seeds give equal tokens."""
    return {"max_num_seqs": 1, "enable_chunked_prefill": False, "enable_prefix_caching": False}


def _cpu_environment(config: InferenceConfig) -> dict[str, str]:
    values = {"VLLM_CPU_KVCACHE_SPACE": str(config.cpu.kvcache_gib)}
    if config.tensor_parallel_size * config.pipeline_parallel_size * config.data_parallel_size == 1:
        # The worker lives in the engine's process, which halves the start; its threads must then be few, or they starve
        # each other (7 tokens/s instead of 600 on two cores).
        values |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    if config.enforce_eager is not False:
        values["TORCHDYNAMO_DISABLE"] = "1"
    return values
