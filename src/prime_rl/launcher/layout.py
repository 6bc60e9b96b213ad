"""Who gets which GPUs: how many servers there are, what the trainer gets, and why a layout cannot be. Pure: the machine is an argument."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prime_rl.config import InferenceConfig, RLConfig
from prime_rl.errors import UserError
from prime_rl.inference.checks import ModelSize

SERVING_SHARE = 0.4  # of a GPU's memory, where it is shared and nothing is said
_SERVING_ONLY = 0.9  # of a GPU's memory, for all servers of a GPU that only serves
_LEAST_SERVING_SHARE = 0.7  # below it the cache would lose more than staging in the host's memory costs
_OVERHEAD_GIB = 5.0  # CUDA contexts, NCCL, and what vLLM takes beyond its share
_ENGINE_GIB = 2.0  # activations and CUDA graphs of one engine
_LEAST_CACHE_GIB = 2.0
_EXTRA_PORTS = 1000  # from the first server of a GPU to the one that was not asked for: the ports between are others'
# vLLM's engine prepares each step in Python. With a small model that takes longer than the GPU computes, and a second engine uses the time.
_SMALL_GIB = 4.0
_SERVERS_A_GPU = 2
_SIXTEEN_BITS = ("auto", "bfloat16", "float16", "half")  # else files do not say how large weights are
LAST_PORT = 65_535
_CORES_A_GPU = 8  # for two engines, their HTTP servers, the trainer and the environments
_EPISODES_A_SERVER = 64  # in flight: fewer keep an engine's Python little busy


@dataclass(frozen=True)
class Machine:
    """What the plan depends on besides the configuration.

    Attributes:
        gpu_gib: Memory of the smallest GPU; None where nobody can say.
        model: Sizes of the model that is served; None for one that is not on this host, or without GPUs.
    """

    gpus: Sequence[str]
    cores: int
    environ: Mapping[str, str]
    gpu_gib: float | None = None
    model: ModelSize | None = None


@dataclass(frozen=True)
class Layout:
    """Which GPUs each process uses, and how much of their memory.

    Attributes:
        servers: GPUs of each server that is started; none on a CPU. Several servers may name the same GPU.
        trainer: GPUs of the trainer.
        utilization: Share of a GPU's memory that one server may use; None: vLLM's choice.
        cache_gib: KV cache of one server, in GiB. None: vLLM sizes it from free memory, so nothing else may allocate on the GPU while it starts.
        ports: Of the servers, counted from `server.port`.
        training_gib: What the trainer may use of a GPU that also serves; None where it has its GPUs for itself.
    """

    servers: tuple[tuple[str, ...], ...]
    trainer: tuple[str, ...]
    utilization: float | None = None
    cache_gib: float | None = None
    ports: tuple[int, ...] = ()
    training_gib: float | None = None


def lay_out(config: RLConfig, machine: Machine) -> Layout:
    """The servers get the first GPUs, the trainer the next ones, or the same.

    Raises:
        UserError: it cannot be, with the arithmetic.
    """
    _check_servers(config)
    serving = config.inference is not None and _on_cuda(config.inference.device, machine)
    training = config.trainer_gpus if _on_cuda(config.trainer.device, machine) else 0
    counts = _groups(config) if serving else [0] * ((config.inference_servers or 1) if config.inference else 0)
    if not training and config.trainer_gpus > 1:
        raise UserError(
            f"trainer_gpus {config.trainer_gpus}: the trainer does not use GPUs here (see --device); processes on a CPU are --trainer-ranks"
        )
    if config.inference_gpus is not None and config.inference is not None and not serving:
        raise UserError(
            f"inference_gpus {config.inference_gpus}: the servers do not use GPUs here (see --device); several on a CPU are --inference-servers"
        )
    if training and config.trainer_ranks not in (None, training):
        raise UserError(f"trainer_ranks {config.trainer_ranks} must equal trainer_gpus {training}: one GPU a rank")
    if config.share_gpus:
        _check_shared(config, sum(counts), training)
    _check_enough({"inference": sum(counts), "trainer": training}, config.share_gpus, machine)
    left = list(machine.gpus)
    groups = [tuple(left.pop(0) for _ in range(count)) for count in counts]
    inference = config.inference
    if inference is None:
        return Layout((), tuple(left[:training]))
    ports = tuple(range(config.inference_servers or len(groups)))
    if not serving:
        return Layout(
            tuple(groups), tuple(left[:training]), inference.gpu_memory_utilization, inference.kv_cache_gib, ports
        )
    utilization, limit = _split(config, machine) if config.share_gpus else (inference.gpu_memory_utilization, None)
    engines = _engines_per_gpu(config, len(groups), machine)
    if engines == 1 and not config.share_gpus:
        utilization = _serving_share(inference, machine)
    cache = inference.kv_cache_gib
    room = _room_for_cache(config, (utilization or _SERVING_ONLY) / engines, engines, machine)
    divided = engines > 1 or config.share_gpus
    if divided and cache is not None and room is not None and cache > room:
        raise UserError(
            f"inference.kv_cache_gib {cache:g}: {engines} server{'s'[: engines > 1]} on a GPU of {machine.gpu_gib:.1f} GiB leave {max(room, 0):.1f} for each, beside weights and engine"
        )
    if divided and cache is None:
        cache = _cache_gib(room, machine)
    if engines > 1:
        if cache is None:
            raise UserError(
                f"inference_servers {config.inference_servers}: {engines} servers on a GPU need to know how much memory each may use for keys and "
                "values, and the sizes of model or GPU are not known, leave no room, or [vllm] sets them; give inference.kv_cache_gib"
            )
        utilization = (utilization or _SERVING_ONLY) / engines
        if config.inference_servers is None:
            ports = tuple(extra * _EXTRA_PORTS + number for extra in range(engines) for number in range(len(groups)))
    trainer = machine.gpus if config.share_gpus else left
    return Layout(tuple(groups) * engines, tuple(trainer[:training]), utilization, cache, ports, limit)


def gpus_of_a_server(inference: InferenceConfig) -> int:
    """How many GPUs one server of this configuration uses on this node."""
    replicas = inference.data_parallel_size_local or inference.data_parallel_size
    return inference.tensor_parallel_size * inference.pipeline_parallel_size * replicas


def _groups(config: RLConfig) -> list[int]:
    """Sizes of the groups of GPUs that serve: a server, or several on one GPU."""
    assert config.inference is not None
    each = gpus_of_a_server(config.inference)
    wanted, total = config.inference_servers, config.inference_gpus
    if config.share_gpus and total is None and each == 1 and wanted:
        total = config.trainer_gpus
    if each == 1 and wanted and total and wanted % total == 0:
        return [1] * total
    count = wanted or (1 if total is None else total // each)
    if total is not None and total != count * each:
        parts = [
            f"{name} {size}"
            for name, size in (
                ("tensor_parallel_size", config.inference.tensor_parallel_size),
                ("pipeline_parallel_size", config.inference.pipeline_parallel_size),
                ("data_parallel_size", each // config.inference.tensor_parallel_size // config.inference.pipeline_parallel_size),
            )
            if size > 1
        ]  # fmt: skip
        why = f" ({' x '.join(parts)})" if parts else ""
        asked = f"{wanted} servers use {wanted * each}" if wanted else f"{total} is no multiple of that"
        raise UserError(f"inference_gpus {total} cannot be laid out: a server uses {each}{why}, {asked}")
    return [each] * count


def _check_servers(config: RLConfig) -> None:
    inference, several = config.inference, (config.inference_servers or 1) > 1
    if inference is None:
        if config.inference_servers or config.inference_gpus:
            raise UserError(
                "inference_servers and inference_gpus are for servers that `rl` starts: there is no [inference]"
            )
        return
    if inference.headless:
        raise UserError("inference.headless: another node serves its requests; start it by itself, with `inference`")
    if several and inference.data_parallel_size_local not in (None, inference.data_parallel_size):
        raise UserError(
            "inference_servers: servers whose replicas are spread over nodes (data_parallel_size_local) are started by themselves"
        )


def _check_shared(config: RLConfig, serving: int, training: int) -> None:
    if config.inference is None:
        raise UserError("share_gpus splits GPUs between trainer and server, but there is no [inference]")
    if not serving or not training:
        raise UserError("share_gpus splits GPUs between trainer and server: here both do not use GPUs (see --device)")
    if serving != training:
        raise UserError(f"share_gpus needs as many GPUs that train as serve, not {training} and {serving}")


def _check_enough(wants: Mapping[str, int], shared: bool, machine: Machine) -> None:
    total = max(wants.values()) if shared else sum(wants.values())
    if total <= len(machine.gpus):
        return
    parts = " + ".join(f"{count} for {name}" for name, count in wants.items() if count)
    limit = machine.environ.get("CUDA_VISIBLE_DEVICES")
    source = "no GPU was found" if limit is None else f"CUDA_VISIBLE_DEVICES is '{limit}'"
    have = source if not machine.gpus else f"{len(machine.gpus)} visible ({', '.join(machine.gpus)})"
    hint = "; one GPU can do both: --share-gpus" if not shared and 2 * len(machine.gpus) == total else ""
    raise UserError(
        f"the run needs {total} GPUs ({parts}), but {have}: see --trainer-gpus, --inference-gpus, --device{hint}"
    )


def _engines_per_gpu(config: RLConfig, groups: int, machine: Machine) -> int:
    """How many servers share each GPU: as asked for, else two where the model is small, host and batch are large enough, and a server uses one GPU."""
    inference, orchestrator = config.inference, config.orchestrator
    assert inference is not None
    if config.inference_servers is not None:
        return config.inference_servers // groups
    single = gpus_of_a_server(inference) > 1 or inference.deterministic or inference.server.advertise is not None
    if single or inference.kv_cache_gib is not None or machine.model is None or machine.model.weights > _SMALL_GIB:
        return 1
    in_flight = orchestrator.batch_size * (config.async_level + 1)
    if isinstance(orchestrator.max_concurrent, int):
        in_flight = min(in_flight, orchestrator.max_concurrent)
    if machine.cores < _CORES_A_GPU * groups or in_flight < _EPISODES_A_SERVER * _SERVERS_A_GPU * groups:
        return 1
    if inference.server.port + _EXTRA_PORTS * (_SERVERS_A_GPU - 1) + groups > LAST_PORT:
        return 1
    share = inference.gpu_memory_utilization or (SERVING_SHARE if config.share_gpus else _SERVING_ONLY)
    room = _room_for_cache(config, share / _SERVERS_A_GPU, _SERVERS_A_GPU, machine)
    return 1 if _cache_gib(room, machine) is None else _SERVERS_A_GPU


def _room_for_cache(config: RLConfig, utilization: float, engines: int, machine: Machine) -> float | None:
    """What one server's share of a GPU leaves for its KV cache, in GiB; None where sizes are not known or `[vllm]` sets them."""
    inference = config.inference
    assert inference is not None
    named = {name.replace("-", "_") for name in inference.vllm}
    as_filed = inference.model.dtype in _SIXTEEN_BITS and inference.quantization is None
    if named & {"kv_cache_memory_bytes", "gpu_memory_utilization"} or not as_filed:
        return None
    if machine.gpu_gib is None or machine.model is None:
        return None
    weights = machine.model.weights / (inference.tensor_parallel_size * inference.pipeline_parallel_size)
    # Room for a staged copy of one server is in the trainer's plan.
    copies = 1 if engines == 1 else 2
    return utilization * machine.gpu_gib - copies * weights - _ENGINE_GIB


def _cache_gib(room: float | None, machine: Machine) -> float | None:
    """The KV cache to give a server; None where there is too little room for one sequence, or its size is not known."""
    if room is None or machine.model is None or room < max(_LEAST_CACHE_GIB, machine.model.sequence or 0.0):
        return None
    return round(min(room, machine.model.cache or room), 1)


def _serving_share(inference: InferenceConfig, machine: Machine) -> float | None:
    """The share of a GPU that only serves; None: vLLM's choice. It leaves room to stage a version on the device, unless that is much of the memory."""
    named = {name.replace("-", "_") for name in inference.vllm}
    given = inference.gpu_memory_utilization is not None or "gpu_memory_utilization" in named
    if given or not (inference.stage_weights and inference.stage_on_device):
        return inference.gpu_memory_utilization
    if machine.gpu_gib is None or machine.model is None:
        return None
    weights = machine.model.weights / (inference.tensor_parallel_size * inference.pipeline_parallel_size)
    share = 1 - (weights + _OVERHEAD_GIB) / machine.gpu_gib
    return share if _LEAST_SERVING_SHARE <= share < _SERVING_ONLY else None


def _split(config: RLConfig, machine: Machine) -> tuple[float, float]:
    """How the memory of GPUs that train and serve is split: the share of all servers of a GPU, and what the trainer may use, in GiB."""
    assert config.inference is not None
    share, limit = config.inference.gpu_memory_utilization or SERVING_SHARE, config.trainer.model.memory_limit
    total = machine.gpu_gib
    if total is None:
        if limit is None:
            raise UserError(
                "share_gpus: nvidia-smi does not say how much memory there is; give trainer.model.memory_limit"
            )
        return share, limit
    room = (1 - share) * total - _OVERHEAD_GIB
    if (limit or 0.0) > room or room <= 0:
        raise UserError(
            f"share_gpus: of {total:.1f} GiB the server takes {share:.0%} = {share * total:.1f} (inference.gpu_memory_utilization), "
            f"contexts {_OVERHEAD_GIB:.0f}, which leaves {max(room, 0):.1f} for the trainer"
            + (f", not {limit:.1f} (trainer.model.memory_limit)" if limit else "")
        )
    return share, limit or round(room, 1)


def _on_cuda(device: str, machine: Machine) -> bool:
    return device == "cuda" or (device == "auto" and len(machine.gpus) > 0)
