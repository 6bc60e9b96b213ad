"""Find bad input before vLLM is imported: one clear line in seconds instead of a traceback after half a minute.

What is wrong raises a UserError that names it.
"""

import errno
import functools
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prime_rl.config import InferenceConfig
from prime_rl.errors import UserError
from prime_rl.inference.compat import Engine, why_no_choices
from prime_rl.transport.weights import INDEX, no_tensors_message, read_header

_GIB = 1 << 30
_HUB_SECONDS = 10.0
_DRIVER_SECONDS = 30.0
_USUAL_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_TINY_GIB, _TINY_CACHE_GIB = 0.1, 4.0


def check(config: InferenceConfig, engine: Engine) -> None:
    """Check everything that can be known without vLLM."""
    check_device(config.device, engine)
    # Development routes would shadow ours; the server in Rust has neither our routes nor their guard.
    tenants = config.lora is not None and config.lora.tenants is not None
    stored = ["VLLM_ENABLE_RESPONSES_API_STORE"] if tenants else []  # replies that any key could ask for
    for name in ("VLLM_SERVER_DEV_MODE", "VLLM_USE_RUST_FRONTEND", *stored):
        if os.environ.get(name, "0") not in ("", "0"):
            opens = "opens routes that no key guards, or hides /update_weights"
            raise UserError(f"{name}={os.environ[name]} {opens}: unset it")
    if config.router_replay:
        caches = config.vllm.get("enable_prefix_caching", engine.device == "cuda")
        if why := why_no_choices(engine, prefix_caching=caches, pipeline=config.pipeline_parallel_size):
            raise UserError(f"router_replay: {why}")
    check_model(config.model.name, weights=config.vllm.get("load_format") != "dummy")


def local_model(name: str) -> Path | None:
    """Return the directory that a model name means; None for a name on the hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or path.exists():
        raise UserError(f"model.name: {name} is not a directory")
    return None


def weights_gib(name: str) -> float | None:
    """Return the size of a model's weights in GiB; None for one that is not, or not wholly, on this host yet."""
    directory = model_directory(name)
    if directory is None or not (directory / "config.json").is_file():
        return None
    files = [directory / file for file in _indexed(directory) or {"model.safetensors"}]
    return sum(file.stat().st_size for file in files) / _GIB if all(file.is_file() for file in files) else None


def tiny_cache_gib(weights: float | None) -> float | None:
    """Return the limit of a tiny model's cache, else None: vLLM visits all its blocks, which would be millions in a
    GPU's memory, at its start and with every weight update (some 60 ns each)."""
    return _TINY_CACHE_GIB if weights is not None and weights < _TINY_GIB else None


def model_directory(name: str, revision: str | None = None) -> Path | None:
    """Return a local model's directory, or the snapshot of an earlier download from the hub; None without one."""
    if (local := local_model(name)) is not None:
        return local.resolve()
    from huggingface_hub import try_to_load_from_cache  # half a second
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
    except (HFValidationError, OSError):  # whoever loads it says what is wrong with the name
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def check_hub(name: str, revision: str | None = None) -> None:
    """Check that the hub can be asked for a model that is not in its cache: vLLM would try for half a minute."""
    if model_directory(name, revision) is not None or os.environ.get("VLLM_USE_MODELSCOPE", "").lower() == "true":
        return
    import httpx
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        HfApi().model_info(name, timeout=_HUB_SECONDS)
    except (httpx.NetworkError, httpx.ProxyError, httpx.ConnectTimeout, OfflineModeIsEnabled) as error:
        looked = f"model.name: {name} is neither a local directory nor in the hub's cache"
        raise UserError(f"{looked}, and {constants.ENDPOINT} cannot be reached ({error}): give a directory") from error
    except (httpx.HTTPError, ValueError):  # it answers, or slowly: vLLM says what is wrong
        return


def _indexed(model: Path) -> set[str]:
    """The files that a model's index lists; none without an index."""
    return set(read_json(model / INDEX).get("weight_map", {}).values()) if (model / INDEX).is_file() else set()


def adapted_modules(name: str, *, experts: bool) -> list[str]:
    """Return the layers that adapters may be for, by the last parts of their names in the model's files: not the head,
    where vLLM would compute one for every token. `experts`: whether vLLM can serve adapters of experts here."""
    shapes = tensor_shapes(name)
    names = [name for name, shape in shapes.items() if ".layers." in name and len(shape) == 2]
    modules = {name.split(".")[-2] for name in names if ".experts." not in name} or {*_USUAL_LAYERS}
    has_experts = any(".experts." in name for name in names) or not shapes
    return sorted({*modules, "experts"} if experts and has_experts else modules)


def tensor_shapes(name: str) -> dict[str, list[int]]:
    """Return the shapes of the tensors in a model's files; none of a model that is not on this host."""
    directory = model_directory(name)
    files = [] if directory is None else directory.glob("*.safetensors")
    return {name: tensor.entry.shape for file in files for name, tensor in read_header(file).items()}


def has_experts(model: Path) -> bool:
    """Whether a local model is a mixture of experts, by the names of its settings."""
    return re.search(r'"(num|n_routed|num_local)_experts"', json.dumps(read_json(model / "config.json"))) is not None


def is_recurrent(model: Path) -> bool:
    """Whether some layers of a local model keep a state in place of keys and values, by the names of its settings."""
    return re.search(r'"(mamba|conv|linear)_', json.dumps(read_json(model / "config.json"))) is not None


def check_model(name: str, *, weights: bool = True) -> None:
    """Check that a local directory is there and describes a model, and with `weights` that its safetensors files are
    whole. A name on the hub passes."""
    if (model := local_model(name)) is None:
        return
    if "model_type" not in read_json(model / "config.json"):
        raise UserError(f"{model / 'config.json'} describes no model: it has no model_type")
    if not weights:
        return
    if missing := sorted(file for file in _indexed(model) if not (model / file).is_file()):
        raise UserError(f"{model}: {missing[0]} is missing, though the index lists it")
    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise UserError(no_tensors_message(model))
    for file in files:
        read_header(file)


def claim_port(host: str, port: int, option: str = "--server.port", holder: str = "inference") -> socket.socket:
    """Claim a free port for this process until the returned socket is closed; `option` chooses another port.

    Processes that answer together share a port (SO_REUSEPORT), and a server binds it long before it listens: the kernel
    would let a second server of the same user have it, too; clients would reach either. So a server also binds a
    name in the kernel that only one socket of a network namespace has. Launchers have names of their own (`holder`).
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        claim.bind(f"\0prime-rl {holder}: port {port}")
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        claim.close()
        in_use = error.errno == errno.EADDRINUSE
        why = "is in use" if in_use else f"cannot be used on {host} ({error.strerror or error})"
        advice = f"stop what listens or still loads there, or choose another with {option}"
        raise UserError(f"port {port} {why}: {advice}") from error
    return claim


def check_device(device: str, engine: Engine) -> None:
    """Check that the device that was asked for is what the installed vLLM was built for, and is there."""
    if device not in ("auto", engine.device):
        install = "--extra cuda" if device == "cuda" else "--group cpu"
        build = "CUDA" if engine.device == "cuda" else "CPU"
        raise UserError(f"device is {device}, but the installed vLLM is the {build} build: run `uv sync {install}`")
    if engine.device == "cuda" and not visible_gpus(os.environ):
        raise UserError("vLLM's CUDA build needs an NVIDIA GPU, and none is visible here")


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Name the GPUs as CUDA_VISIBLE_DEVICES wants them: indices, or UUIDs where the variable holds those."""
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return list(gpu_memory())
    items = map(str.strip, visible.split(","))
    return list(itertools.takewhile(lambda item: item[:1] not in ("", "-"), items))  # as CUDA does: -1 ends it


@functools.cache
def gpu_memory() -> dict[str, float | None]:
    """Return the memory of each GPU of this host in GiB, by index; None where the driver does not say.
    Raises UserError where it hangs."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return {}
    query = [tool, "--query-gpu=index,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=_DRIVER_SECONDS).stdout.splitlines()
    except subprocess.TimeoutExpired:
        raise UserError(f"nvidia-smi does not answer within {_DRIVER_SECONDS:.0f} s: the driver hangs") from None
    rows = [row.groups() for line in lines if (row := re.fullmatch(r"(\d+), *(.*)", line))]
    return {index: int(memory) / 1024 if memory.isdigit() else None for index, memory in rows}


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object")
    return value
