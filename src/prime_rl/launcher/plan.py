"""What `rl` is going to start: a pure function of the configuration and of what this machine has.

`make_plan` lists the processes, `lay_out` says which GPUs, ports and how much memory each gets, `visible_gpus` and
`memory_gib` look at the machine.
"""

import itertools
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prime_rl.config import InferenceConfig, RLConfig
from prime_rl.config.base import BaseConfig
from prime_rl.config.inference import SERVER, server_name
from prime_rl.config.share import PAIR
from prime_rl.errors import UserError
from prime_rl.inference.checks import ModelSize, gpu_count

RECOVER = "--recover"  # makes a job go on from what is committed
_SHARED_GPU_FRACTION = 0.4  # of a GPU's memory, where it is shared and nothing is said
_SERVER_GPU_FRACTION = 0.9  # of a GPU's memory, for all servers of a GPU that only serves
_MIN_SERVER_SHARE = 0.7  # below it the cache would lose more than staging in the host's memory costs
_OVERHEAD_GIB = 5.0  # CUDA contexts, NCCL, and what vLLM takes beyond its share
_ENGINE_GIB = 2.0  # activations and CUDA graphs of one engine
_LEAST_CACHE_GIB = 2.0
_EXTRA_PORTS = 1000  # from the first server of a GPU to the one that was not asked for: the ports between are others'
# vLLM's engine prepares each step in Python. With a small model that takes longer than the GPU computes, and a second
# engine uses the time.
_SMALL_GIB = 4.0
_SERVERS_A_GPU = 2
_SIXTEEN_BITS = ("auto", "bfloat16", "float16", "half")  # else files do not say how large weights are
_LAST_PORT = 65_535
_CORES_A_GPU = 8  # for two engines, their HTTP servers, the trainer and the environments
_EPISODES_A_SERVER = 64  # in flight: fewer keep an engine's Python little busy


@dataclass(frozen=True)
class ServerSpec:
    """An inference server; `port` is None for one that runs already. `ready_timeout`: seconds."""

    url: str
    ready_timeout: float
    host: str = ""
    port: int | None = None


@dataclass(frozen=True)
class ProcessSpec:
    """One child. A job ends by itself, with status 0 when all is well; a server runs until it is stopped."""

    name: str
    argv: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    server: ServerSpec | None = None
    # A torchrun agent kills its ranks soon after a signal: signal the ranks themselves, then it exits by itself.
    drain_children: bool = False
    # Name of a process whose first status report this one waits for (bounded) before it is started.
    after: str | None = None
    # Names of servers that must have been ready once before this one is started: they measure what memory is free.
    after_ready: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Processes in the order in which they are started, and the configuration file of each."""

    processes: tuple[ProcessSpec, ...]
    configs: Mapping[Path, BaseConfig]
    servers: tuple[ServerSpec, ...]
    output_dir: Path


@dataclass(frozen=True)
class HostResources:
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
        cache_gib: KV cache of one server, in GiB. None: vLLM sizes it from free memory, so nothing else may allocate on
            the GPU while it starts.
        ports: Of the servers, counted from `server.port`.
        training_gib: What the trainer may use of a GPU that also serves; None where it has its GPUs for itself.
    """

    servers: tuple[tuple[str, ...], ...]
    trainer: tuple[str, ...]
    utilization: float | None = None
    cache_gib: float | None = None
    ports: tuple[int, ...] = ()
    training_gib: float | None = None


def make_plan(config: RLConfig, machine: HostResources) -> Plan:
    """Plan processes, their GPUs, ports and configs.

    Raises:
        UserError: for an impossible layout (see `lay_out`), or too few ports.
    """
    layout, inference, client = lay_out(config, machine), config.inference, config.orchestrator.client
    servers = [_server(config, number, offset) for number, offset in enumerate(layout.ports)]
    names = tuple(map(server_name, range(len(servers))))
    threads = _threads(config, machine, max(1, len(servers)))
    sections = _sections(config, layout, servers)
    configs = {name: config.output_dir / "configs" / f"{name}.toml" for name in sections}
    api_key = None if inference is None else inference.api_key

    def process(
        name: str, module: Sequence[str], gpus: tuple[str, ...] = (), key_variable: str | None = None, **more: Any
    ) -> ProcessSpec:
        recover = [RECOVER] if config.recover and name in PAIR else []
        argv = (sys.executable, "-m", *module, "@", str(configs[name]), *recover)
        key = {} if api_key is None or key_variable is None else {key_variable: api_key}
        env = _environment(gpus, name, threads, machine) | key
        return ProcessSpec(name, argv, config.output_dir / "logs" / f"{name}.log", env, gpus, **more)

    processes = [
        process(name, ["prime_rl.entrypoints.inference"], gpus, "VLLM_API_KEY", server=server)
        for name, gpus, server in zip(names, layout.servers, servers, strict=True)
    ]
    ranks = config.trainer_ranks or max(1, len(layout.trainer))
    train = ["prime_rl.entrypoints.trainer"]
    if ranks > 1:
        # Port 0: torchrun picks a free one, so that two runs on one host never meet.
        rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--role", "trainer")
        torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *rendezvous)
        train = ["prime_rl.lifeline", *torchrun, "-m", "prime_rl.trainer.rl.train"]
    # A server that measures what is free of the GPU must be alone with it.
    alone = names if layout.training_gib and layout.cache_gib is None else ()
    # Server and trainer fill two cores while they import; the orchestrator is needed last.
    last = "trainer" if machine.cores <= 2 else None
    processes += [
        process("trainer", train, layout.trainer, drain_children=ranks > 1, after_ready=alone),
        process("orchestrator", ["prime_rl.entrypoints.orchestrator"], (), client.api_key_var, after=last),
    ]
    files = {configs[name]: section for name, section in sections.items()}
    external = ServerSpec(", ".join(client.base_urls), client.ready_timeout)
    return Plan(tuple(processes), files, tuple(servers) or (external,), config.output_dir)


def describe(plan: Plan) -> str:
    """Describe the plan for people: processes, GPUs, ports, directories."""
    lines = [f"run directory  {plan.output_dir}"]
    for process in plan.processes:
        where = f"GPU {','.join(process.gpus)}" if process.gpus else "CPU"
        lines.append(f"{process.name:<13}  {where:<10}  log {process.log}")
        lines.append(f"{'':<15}{shlex.join(process.argv)}")
        variables = [f"{key}={'***' if key.endswith('KEY') else value}" for key, value in sorted(process.env.items())]
        if variables:
            lines.append(f"{'':<15}{' '.join(variables)}")
    for server in plan.servers:
        whose = "already running" if server.port is None else f"port {server.port}"
        lines.append(f"server         {server.url} ({whose})")
    lines += [f"config         {path}" for path in plan.configs]
    return "\n".join(lines)


def _sections(config: RLConfig, layout: Layout, servers: Sequence[ServerSpec]) -> dict[str, BaseConfig]:
    """Return what each process is configured with, by its name."""
    trainer, orchestrator, inference = config.trainer, config.orchestrator, config.inference
    if trainer.recovery_interval is None and config.max_restarts and not config.bench:
        trainer = trainer.model_copy(update={"recovery_interval": config.recovery_interval})
    if layout.training_gib is not None:
        limited = trainer.model.model_copy(update={"memory_limit": layout.training_gib})
        weights = trainer.weights.model_copy(update={"shares_gpu": True})
        trainer = trainer.model_copy(update={"model": limited, "weights": weights})
    if len(servers) > 1:
        client = orchestrator.client.model_copy(update={"base_url": [f"{server.url}/v1" for server in servers]})
        orchestrator = orchestrator.model_copy(update={"client": client})
    sections: dict[str, BaseConfig] = {"rl": config, "trainer": trainer, "orchestrator": orchestrator}
    # What is free on a shared GPU is the trainer's. It leaves room for a server's copy only where it publishes there.
    published = trainer.weights.transport != "filesystem" and trainer.weights.tmpfs is None
    for number, server in enumerate(servers):
        assert inference is not None
        sections[server_name(number)] = inference.model_copy(
            update={
                "weights_root": inference.weights_root or config.output_dir / "weights",
                "weights_tmpfs": inference.weights_tmpfs or trainer.weights.tmpfs,
                "server": inference.server.model_copy(update={"port": server.port}),
                "replica": number,
                "servers_on_host": len(servers),
                "kv_cache_gib": layout.cache_gib,
                "gpu_memory_utilization": layout.utilization,
                "stage_on_device": inference.stage_on_device and (layout.training_gib is None or published),
            }
        )
    return sections


def _threads(config: RLConfig, machine: HostResources, servers: int) -> dict[str, int]:
    """Return the OpenMP threads of each process. More threads than cores spin and cost much more.

    Sampling ahead (async_level ≥ 1) keeps server and trainer busy at the same time, so they share the cores; taken in
    turns each may use nearly all.
    """
    cores, ranks = max(1, machine.cores), config.trainer_ranks or 1
    in_turns = config.inference is None or config.async_level == 0
    inference = max(1, cores - 1 if in_turns else cores // 2)
    trainer = cores if in_turns else max(1, cores - inference)
    return {SERVER: max(1, inference // servers), "trainer": max(1, trainer // ranks), "orchestrator": 1}


def _environment(gpus: Sequence[str], name: str, threads: Mapping[str, int], machine: HostResources) -> dict[str, str]:
    """Return the variables that the child gets on top of ours. What the user has set stays, except for the placement."""
    defaults = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    if not gpus:
        defaults["OMP_NUM_THREADS"] = str(threads.get(name, threads[SERVER]))
    elif name == "trainer":
        defaults["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        defaults["OMP_NUM_THREADS"] = str(max(1, min(8, machine.cores // (2 * len(gpus)))))
    if machine.gpus:
        defaults["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    chosen = {key: value for key, value in defaults.items() if key not in machine.environ}
    return {**chosen, "CUDA_VISIBLE_DEVICES": ",".join(gpus)} if machine.gpus else chosen


def _server(config: RLConfig, number: int, offset: int) -> ServerSpec:
    """Return one of the servers that are started, on the port that is `offset` after the first one's."""
    assert config.inference is not None
    listens, port = config.inference.server, config.inference.server.port + offset
    if port > _LAST_PORT:
        raise UserError(f"inference.server.port {listens.port} leaves no ports for {number + 1} servers")
    host = "localhost" if listens.host in (None, "0.0.0.0", "::") else str(listens.host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    return ServerSpec(url, config.ready_timeout, listens.host or "127.0.0.1", port)


# -- layout ------------------------------------------------------------------------------------------------------------


def lay_out(config: RLConfig, machine: HostResources) -> Layout:
    """Give the servers the first GPUs, and the trainer the next ones, or the same.

    Raises:
        UserError: it cannot be, with the arithmetic.
    """
    inference = config.inference
    if inference is None and (config.inference_servers or config.inference_gpus):
        raise UserError(
            "inference_servers and inference_gpus are for servers that `rl` starts: there is no [inference]"
        )
    served = inference is not None and _on_cuda(inference.device, machine)
    training = config.trainer_gpus if _on_cuda(config.trainer.device, machine) else 0
    if not training and config.trainer_gpus > 1:
        raise UserError(
            f"trainer_gpus {config.trainer_gpus}: the trainer does not use GPUs here (see --device); "
            "processes on a CPU are --trainer-ranks"
        )
    if config.inference_gpus is not None and not served:
        raise UserError(
            f"inference_gpus {config.inference_gpus}: the servers do not use GPUs here (see --device); "
            "several on a CPU are --inference-servers"
        )
    if training and config.trainer_ranks not in (None, training):
        raise UserError(f"trainer_ranks {config.trainer_ranks} must equal trainer_gpus {training}: one GPU a rank")
    counts = [] if inference is None else _server_sizes(config, inference, served)
    _check_enough(config, sum(counts), training, machine)
    left = iter(machine.gpus)
    groups = tuple(tuple(next(left) for _ in range(count)) for count in counts)
    trainer = tuple(machine.gpus if config.share_gpus else left)[:training]
    if inference is None:
        return Layout((), trainer)
    ports, share, cache = tuple(range(len(groups))), inference.gpu_memory_utilization, inference.kv_cache_gib
    if not served:
        return Layout(groups, trainer, share, cache, ports)
    ports = tuple(range(config.inference_servers or len(groups)))
    engines, limit = _engines_per_gpu(config, inference, len(groups), machine), None
    if config.share_gpus:
        share, limit = _split(config, inference, machine)
    elif engines == 1:
        share = _server_fraction(inference, machine)
    if engines == 1 and not config.share_gpus:
        return Layout(groups, trainer, share, cache, ports)
    room = _room_for_cache(inference, (share or _SERVER_GPU_FRACTION) / engines, engines, machine)
    if cache is not None and room is not None and cache > room:
        raise UserError(
            f"inference.kv_cache_gib {cache:g}: {engines} server{'s'[: engines > 1]} on a GPU of {machine.gpu_gib:.1f} GiB "
            f"leave {max(room, 0):.1f} for each, beside weights and engine"
        )
    cache = _cache_gib(room, machine) if cache is None else cache
    if engines > 1:
        if cache is None:
            raise UserError(
                f"inference_servers {config.inference_servers}: {engines} servers on a GPU need to know how much memory each "
                "may use for keys and values, and the sizes of model or GPU are not known, leave no room, or [vllm] sets "
                "them; give inference.kv_cache_gib"
            )
        share = (share or _SERVER_GPU_FRACTION) / engines
        if config.inference_servers is None:
            ports = tuple(extra * _EXTRA_PORTS + number for extra in range(engines) for number in range(len(groups)))
    return Layout(groups * engines, trainer, share, cache, ports, limit)


def gpus_of_a_server(inference: InferenceConfig) -> int:
    """Return how many GPUs one server of this configuration uses on this node."""
    replicas = inference.data_parallel_size_local or inference.data_parallel_size
    return inference.tensor_parallel_size * inference.pipeline_parallel_size * replicas


def _server_sizes(config: RLConfig, inference: InferenceConfig, served: bool) -> list[int]:
    """Return how many GPUs each server, or each group of servers on one GPU, gets."""
    wanted, total = config.inference_servers, config.inference_gpus
    if inference.headless:
        raise UserError("inference.headless: another node serves its requests; start it by itself, with `inference`")
    if (wanted or 1) > 1 and inference.data_parallel_size_local not in (None, inference.data_parallel_size):
        raise UserError(
            "inference_servers: servers whose replicas are spread over nodes (data_parallel_size_local) are started by "
            "themselves"
        )
    if not served:
        return [0] * (wanted or 1)
    each = gpus_of_a_server(inference)
    if config.share_gpus and total is None and each == 1 and wanted:
        total = config.trainer_gpus
    if each == 1 and wanted and total and wanted % total == 0:
        return [1] * total
    count = wanted or (1 if total is None else total // each)
    if total is not None and total != count * each:
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        factors = " x ".join(f"{name} {size}" for name in sizes if (size := getattr(inference, name)) > 1)
        asked = f"{wanted} servers use {wanted * each}" if wanted else f"{total} is no multiple of that"
        why = f" ({factors})" if factors else ""
        raise UserError(f"inference_gpus {total} cannot be laid out: a server uses {each}{why}, {asked}")
    return [each] * count


def _check_enough(config: RLConfig, inference: int, training: int, machine: HostResources) -> None:
    """Raise UserError where the GPUs that serve and train cannot be shared as asked for, or are more than there are."""
    if config.share_gpus:
        if config.inference is None:
            raise UserError("share_gpus splits GPUs between trainer and server, but there is no [inference]")
        if not inference or not training:
            raise UserError(
                "share_gpus splits GPUs between trainer and server: here both do not use GPUs (see --device)"
            )
        if inference != training:
            raise UserError(f"share_gpus needs as many GPUs that train as serve, not {training} and {inference}")
    total, visible = inference if config.share_gpus else inference + training, len(machine.gpus)
    if total <= visible:
        return
    counts = {"inference": inference, "trainer": training}
    summands = " + ".join(f"{count} for {name}" for name, count in counts.items() if count)
    have = f"{visible} visible ({', '.join(machine.gpus)})"
    if not visible:
        limit = machine.environ.get("CUDA_VISIBLE_DEVICES")
        have = "no GPU was found" if limit is None else f"CUDA_VISIBLE_DEVICES is '{limit}'"
    hint = "; one GPU can do both: --share-gpus" if not config.share_gpus and 2 * visible == total else ""
    raise UserError(
        f"the run needs {total} GPUs ({summands}), but {have}: see --trainer-gpus, --inference-gpus, --device{hint}"
    )


def _engines_per_gpu(config: RLConfig, inference: InferenceConfig, groups: int, machine: HostResources) -> int:
    """Return how many servers share each GPU.

    As many as asked for, else two where the model is small, host and batch are large enough, and a server uses one GPU.
    """
    orchestrator = config.orchestrator
    if config.inference_servers is not None:
        return config.inference_servers // groups
    # Who bounds the sequences of an engine means those of the GPU.
    single = gpus_of_a_server(inference) > 1 or inference.deterministic or "max_num_seqs" in _vllm_options(inference)
    if single or inference.kv_cache_gib is not None or machine.model is None or machine.model.weights > _SMALL_GIB:
        return 1
    in_flight = orchestrator.batch_size * (config.async_level + 1)
    if isinstance(orchestrator.max_concurrent, int):
        in_flight = min(in_flight, orchestrator.max_concurrent)
    few = machine.cores < _CORES_A_GPU * groups or in_flight < _EPISODES_A_SERVER * _SERVERS_A_GPU * groups
    if few or inference.server.port + _EXTRA_PORTS * (_SERVERS_A_GPU - 1) + groups > _LAST_PORT:
        return 1
    share = inference.gpu_memory_utilization or (_SHARED_GPU_FRACTION if config.share_gpus else _SERVER_GPU_FRACTION)
    room = _room_for_cache(inference, share / _SERVERS_A_GPU, _SERVERS_A_GPU, machine)
    return 1 if _cache_gib(room, machine) is None else _SERVERS_A_GPU


def _room_for_cache(
    inference: InferenceConfig, utilization: float, engines: int, machine: HostResources
) -> float | None:
    """Return the GiB that one server's share of a GPU leaves for its KV cache; None if unknown, or set in `[vllm]`."""
    as_filed = inference.model.dtype in _SIXTEEN_BITS and inference.quantization is None
    chosen = _vllm_options(inference) & {"kv_cache_memory_bytes", "gpu_memory_utilization"}
    if chosen or not as_filed or machine.gpu_gib is None or machine.model is None:
        return None
    # Room for a staged copy of one server is in the trainer's plan.
    copies = 1 if engines == 1 else 2
    return utilization * machine.gpu_gib - copies * _weights_gib(inference, machine.model) - _ENGINE_GIB


def _cache_gib(room: float | None, machine: HostResources) -> float | None:
    """Return the KV cache to give a server; None where one sequence would not fit, or its size is not known."""
    if room is None or machine.model is None or room < max(_LEAST_CACHE_GIB, machine.model.sequence or 0.0):
        return None
    return round(min(room, machine.model.cache or room), 1)


def _server_fraction(inference: InferenceConfig, machine: HostResources) -> float | None:
    """Return the share of a GPU that only serves; None: vLLM's choice.

    It leaves room to stage a version on the device, unless that is much of the memory.
    """
    chosen = inference.gpu_memory_utilization is not None or "gpu_memory_utilization" in _vllm_options(inference)
    if chosen or not inference.stage_on_device:
        return inference.gpu_memory_utilization
    if machine.gpu_gib is None or machine.model is None:
        return None
    share = 1 - (_weights_gib(inference, machine.model) + _OVERHEAD_GIB) / machine.gpu_gib
    return share if _MIN_SERVER_SHARE <= share < _SERVER_GPU_FRACTION else None


def _split(config: RLConfig, inference: InferenceConfig, machine: HostResources) -> tuple[float, float]:
    """Split the memory of GPUs that train and serve: the share of all servers of a GPU, and the trainer's GiB."""
    share, limit = inference.gpu_memory_utilization or _SHARED_GPU_FRACTION, config.trainer.model.memory_limit
    if (total := machine.gpu_gib) is None:
        if limit is None:
            raise UserError(
                "share_gpus: nvidia-smi does not say how much memory there is; give trainer.model.memory_limit"
            )
        return share, limit
    room = (1 - share) * total - _OVERHEAD_GIB
    if (limit or 0.0) > room or room <= 0:
        raise UserError(
            f"share_gpus: of {total:.1f} GiB the server takes {share:.0%} = {share * total:.1f} "
            f"(inference.gpu_memory_utilization), contexts {_OVERHEAD_GIB:.0f}, which leaves {max(room, 0):.1f} for the "
            "trainer" + (f", not {limit:.1f} (trainer.model.memory_limit)" if limit else "")
        )
    return share, limit or round(room, 1)


def _vllm_options(inference: InferenceConfig) -> set[str]:
    """Return the names of vLLM's own options that `[vllm]` sets."""
    return {name.replace("-", "_") for name in inference.vllm}


def _weights_gib(inference: InferenceConfig, model: ModelSize) -> float:
    """Return the size of the weights on each GPU of a server."""
    return model.weights / (inference.tensor_parallel_size * inference.pipeline_parallel_size)


def _on_cuda(device: str, machine: HostResources) -> bool:
    return device == "cuda" or (device == "auto" and len(machine.gpus) > 0)


# -- the machine -------------------------------------------------------------------------------------------------------


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Name the GPUs as CUDA_VISIBLE_DEVICES wants them: indices, or UUIDs where the variable holds those."""
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return parse_visible(visible)
    return [str(index) for index in range(gpu_count())]


def memory_gib(gpus: Sequence[str]) -> float | None:
    """Return the memory of the smallest of these GPUs, in GiB; None where nvidia-smi is missing or hangs."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return None
    query = [tool, f"--id={','.join(gpus)}", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.splitlines()
    except subprocess.TimeoutExpired:
        return None
    return min((int(line) for line in lines if line.isdigit()), default=0) / 1024 or None


def parse_visible(value: str) -> list[str]:
    """Read the list up to the first invalid entry, such as -1, as CUDA does."""
    items = [item.strip() for item in value.split(",")]
    return list(itertools.takewhile(lambda item: item and not item.startswith("-"), items))
