"""Bad input found before vLLM is imported: seconds instead of a traceback after half a minute. Each raises one clear line."""

import ctypes
import errno
import ipaddress
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from prime_rl.config import InferenceConfig
from prime_rl.errors import UserError
from prime_rl.inference.compat import Engine
from prime_rl.transport.commit import CommitError
from prime_rl.transport.weights import read_header, without_tensors

ALL_ADDRESSES = "0.0.0.0"
CHAT_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")

_CACHED_TOKENS = 1 << 20  # in float32; twice as many in 16 bits
_CACHE_BYTES = 4 << 30


def check(config: InferenceConfig, engine: Engine, host: str) -> None:
    """Everything that can be known without vLLM.

    Raises:
        UserError: naming what is wrong.
    """
    check_device(config.device, engine)
    check_environment()
    model = local_model(config.model.name)
    if model is not None:
        dummy = config.vllm.get("load_format") == "dummy"
        check_model(model, needs_weights=not dummy)
        check_context(model, config.max_model_len)
        if engine.device == "cpu":
            check_cache(model, config)
        warn_without_chat_template(model, config.model.chat_template)
    if not config.headless:
        check_port(host, config.server.port)


def local_model(name: str) -> Path | None:
    """The directory that a model name means, or None for a name on the hub.

    Raises:
        UserError: the name is written as a path, and no directory is there.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    written_as_path = name.startswith(("/", ".", "~")) or name.count("/") > 1
    if written_as_path or path.exists():
        raise UserError(f"model.name: {name} is not a directory")
    return None


@dataclass(frozen=True)
class ModelSize:
    """What a model needs of a GPU's memory, in GiB.

    Attributes:
        weights: Its safetensors files.
        sequence: KV cache of the longest sequence, in 16 bits; None where the config does not say.
        cache: KV cache that is enough for a tiny model; None for others.
    """

    weights: float
    sequence: float | None = None
    cache: float | None = None


def model_size(name: str, max_model_len: int | None = None) -> ModelSize | None:
    """Sizes of a model; None for one that is not, or not wholly, on this host yet."""
    directory = local_model(name) or _cached_model(name)
    if directory is None or not (directory / "config.json").is_file():
        return None
    index = directory / "model.safetensors.index.json"
    names = set(read_json(index).get("weight_map", {}).values()) if index.is_file() else {"model.safetensors"}
    files = [directory / name for name in names]
    if not files or not all(file.is_file() for file in files):
        return None
    config, values = read_json(directory / "config.json"), cache_values(directory)
    length = max_model_len or config.get("text_config", config).get("max_position_embeddings")
    sequence = None if values is None or length is None else 2 * values * length / (1 << 30)
    most = None if values is None else tiny_cache_bytes(values)
    weights = sum(file.stat().st_size for file in files) / (1 << 30)
    return ModelSize(weights, sequence, None if most is None else most / (1 << 30))


def _cached_model(name: str) -> Path | None:
    """The snapshot of a model on the hub that an earlier download left."""
    from huggingface_hub import try_to_load_from_cache  # half a second
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except (HFValidationError, OSError):  # what is wrong with the name says who loads it
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def tiny_cache_bytes(values: int) -> int | None:
    """The size to which a tiny model's cache is limited; None for other models. In all of a GPU's memory it would have millions of blocks, each of which
    vLLM makes at its start and visits with every update of the weights (some 60 ns).

    Args:
        values: Numbers that the cache holds per token.
    """
    size = values * 4 * _CACHED_TOKENS
    return size if size <= _CACHE_BYTES else None


def check_model(model: Path, needs_weights: bool = True) -> None:
    """A local model directory has a readable config.json and whole safetensors files.

    Raises:
        UserError: naming the file.
    """
    read_json(model / "config.json")
    if not needs_weights:
        return
    index = model / "model.safetensors.index.json"
    if index.exists():
        shards = set(read_json(index).get("weight_map", {}).values())
        if missing := sorted(shard for shard in shards if not (model / shard).is_file()):
            raise UserError(f"{model}: {missing[0]} is missing, though the index lists it")
    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise UserError(without_tensors(model))
    for file in files:
        try:
            read_header(file)
        except CommitError as error:
            raise UserError(str(error)) from error


def check_context(model: Path, max_model_len: int | None) -> None:
    """`max_model_len` is within what the model was made for.

    Raises:
        UserError: it is not.
    """
    config = read_json(model / "config.json")
    text = config.get("text_config", config)
    limit = text.get("max_position_embeddings")
    # A rope scaling lengthens the context by rules of its own, which vLLM knows.
    scaled = (text.get("rope_scaling") or text.get("rope_parameters") or {}).get("factor", 1.0) != 1.0
    allowed = os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1"
    if max_model_len is not None and limit is not None and max_model_len > limit and not scaled and not allowed:
        raise UserError(f"max_model_len {max_model_len} is longer than the model's context of {limit} tokens")


def check_cache(model: Path, config: InferenceConfig) -> None:
    """On a CPU the cache has the size that it is given: one sequence of `max_model_len` fits in. Where every layer keeps all keys and values; what
    others need vLLM knows. (On a GPU the size is known once the weights are loaded: there it is vLLM's line, in the log above ours.)

    Raises:
        UserError: it does not.
    """
    values = cache_values(model)
    if config.max_model_len is None or config.vllm or values is None:
        return
    size = 2 if config.model.dtype in ("bfloat16", "float16", "half") else 4
    needed = values * size * config.max_model_len / (config.tensor_parallel_size * config.pipeline_parallel_size)
    available = float(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or config.cpu.kvcache_gib)
    if needed > available * (1 << 30):
        raise UserError(
            f"cpu.kvcache_gib {available:g} is too small for one sequence of max_model_len {config.max_model_len}: it needs "
            f"{needed / (1 << 30):.1f} GiB"
        )


def cache_values(model: Path) -> int | None:
    """Numbers that a model's cache holds per token; None where not every layer keeps all keys and values, or the config does not say."""
    text = read_json(model / "config.json")
    text = text.get("text_config", text)
    whole = set(text.get("layer_types") or ["full_attention"]) == {"full_attention"}
    special = text.get("kv_lora_rank") or (text.get("sliding_window") and text.get("use_sliding_window", True))
    special = special or any(key.startswith(("mamba", "attn_layer", "hybrid", "ssm", "multi_query")) for key in text)
    if special or not whole or not text.keys() >= {"num_hidden_layers", "num_attention_heads", "num_key_value_heads"}:
        return None
    heads = text["num_attention_heads"]
    head = text.get("head_dim") or text["hidden_size"] // heads
    return int(2 * text["num_hidden_layers"] * (text["num_key_value_heads"] or heads) * head)


def warn_without_chat_template(model: Path, chat_template: str | None) -> None:
    """The token and completion routes work without one; the chat route does not."""
    if chat_template is not None or any((model / name).exists() for name in CHAT_TEMPLATE_FILES):
        return
    tokenizer = model / "tokenizer_config.json"
    if not tokenizer.exists() or not read_json(tokenizer).get("chat_template"):
        logger.warning("{} has no chat template: /v1/chat/completions will refuse requests", model)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_port(host: str, port: int) -> None:
    """The port is free.

    Raises:
        UserError: it is not, or the host is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(_why_not_bound(host, port, error)) from error


def _why_not_bound(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use: stop what listens there, or choose another with --server.port"
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges: choose another with --server.port"
    return f"cannot listen on {host}:{port}: {error.strerror or error}"


_held_ports: list[socket.socket] = []  # until this process ends


def hold_port(host: str, port: int) -> None:
    """Make `port` this server's until this process ends.

    Processes that answer together share a port (SO_REUSEPORT), and a server binds it long before it listens: the kernel
    would let a second server of the same user have it, too, and clients reach one or the other.

    Raises:
        UserError: another server has it.
    """
    holder = _claim_port(host, port, "--server.port")
    os.register_at_fork(after_in_child=holder.close)  # an engine that ends a moment after its server does not keep it
    _held_ports.append(holder)


def check_unheld(host: str, port: int, option: str) -> None:
    """Raise UserError if an inference server has that port, also one that is still loading; `option` chooses another."""
    _claim_port(host, port, option).close()


def _claim_port(host: str, port: int, option: str) -> socket.socket:
    """Bind a name in the kernel that only one socket of a network namespace has."""
    everywhere = host in (ALL_ADDRESSES, "::")
    prefix = f"prime-rl inference: port {port} at "
    own = prefix + ("all" if everywhere else "loopback" if is_loopback(host) else host)
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        holder.bind(f"\0{own}")
        taken = False
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        if not taken:
            holder.close()
            raise
    # A server on all addresses excludes every other one. Each binds first and looks then, so that one of two sees the other.
    lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    others = {line.partition("@")[2] for line in lines} - {own}
    if taken or prefix + "all" in others or (everywhere and any(name.startswith(prefix) for name in others)):
        holder.close()
        raise UserError(
            f"port {port} is taken by another inference server, which may still be loading: stop it, or choose another with {option}"
        )
    return holder


def check_device(device: str, engine: Engine) -> None:
    """The device that was asked for is what the installed vLLM was built for, and is there.

    Raises:
        UserError: it is not.
    """
    if device == "cuda" and engine.device == "cpu":
        raise UserError("device is cuda, but the installed vLLM is the CPU build: run `uv sync --extra cuda`")
    if device == "cpu" and engine.device == "cuda":
        raise UserError("device is cpu, but the installed vLLM is the CUDA build: run `uv sync --group cpu`")
    if engine.device == "cuda" and gpu_count() == 0:
        raise UserError("vLLM's CUDA build needs an NVIDIA GPU, and none is visible here")


def check_environment() -> None:
    """vLLM's development routes would shadow ours in some releases, and its server in Rust knows neither our routes nor their guard.

    Raises:
        UserError: one of them is switched on.
    """
    for name in ("VLLM_SERVER_DEV_MODE", "VLLM_USE_RUST_FRONTEND"):
        if os.environ.get(name, "0") not in ("", "0"):
            raise UserError(
                f"{name}={os.environ[name]} opens routes that no key guards, or hides /update_weights: unset it"
            )


def gpu_count() -> int:
    """NVIDIA GPUs of this machine that `CUDA_VISIBLE_DEVICES` does not hide. Asks NVML, which starts no CUDA context."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.replace("-1", "").strip(", "):
        return 0
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return 0
    nvml.nvmlShutdown()
    return count.value if visible is None else min(count.value, len([part for part in visible.split(",") if part]))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        UserError: it is missing or malformed.
    """
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object")
    return value
