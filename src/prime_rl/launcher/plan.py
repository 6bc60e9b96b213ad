"""What `rl` is going to start: a pure function of the configuration and of what this machine has.

`make_plan` lists the processes of this host, which is one of several nodes or has them all, `lay_out` says which GPUs,
ports and how much memory each gets, `HostResources.of_this_host` looks at the machine.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from prime_rl.config import InferenceConfig, RLConfig
from prime_rl.config.base import BaseConfig
from prime_rl.config.inference import server_name
from prime_rl.config.share import PAIR
from prime_rl.errors import UserError
from prime_rl.inference.checks import gpu_memory, tiny_cache_gib, visible_gpus, weights_gib
from prime_rl.launcher.rundir import LAUNCHER
from prime_rl.redact import is_secret
from prime_rl.transport.settings import dry_path

INFERENCE, TRAINER, ORCHESTRATOR = (f"prime_rl.entrypoints.{name}" for name in ("inference", "trainer", "orchestrator"))
RECOVER = "--recover"  # makes a job go on from what is committed
_SHARED_GPU_FRACTION = 0.4  # of a GPU's memory, where it is shared and nothing is said
_SERVER_GPU_FRACTION = 0.9  # of a GPU's memory, for all servers of a GPU that only serves
_MIN_SERVER_SHARE = 0.7  # below it the cache would lose more than staging in the host's memory costs
_OVERHEAD_GIB = 5.0  # CUDA contexts, NCCL, and what vLLM takes beyond its share
_ENGINE_GIB = 2.0  # activations and CUDA graphs of one engine
_LEAST_CACHE_GIB = 2.0
_SIXTEEN_BITS = ("auto", "bfloat16", "float16", "half")  # else files do not say how large weights are
_SMALL_GIB = 4.0  # of weights: for such a model vLLM's Python takes longer over a step than the GPU
_CORES_A_GPU = 8  # for two engines, their HTTP servers, the trainer and the environments
_EPISODES_A_GPU = 128  # in flight: fewer do not keep two engines busy
_EXTRA_PORTS = 1000  # from a server to the second on its GPU: the ports between are others'
_LAST_PORT = 65_535


@dataclass(frozen=True)
class ServerSpec:
    """An inference server; `port` is None for one that runs already. `ready_timeout`: seconds."""

    url: str
    ready_timeout: float
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
    # Names of servers that must have been ready once before this one is started: they measure what memory is free.
    after_ready: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Processes in the order in which they are started, and the configuration file of each."""

    processes: tuple[ProcessSpec, ...]
    configs: Mapping[Path, BaseConfig]
    servers: tuple[ServerSpec, ...]
    output_dir: Path
    versions: str = ""  # what they are, unless full weights


@dataclass(frozen=True)
class HostResources:
    """What the plan depends on besides the configuration."""

    gpus: Sequence[str]
    cores: int
    environ: Mapping[str, str]
    gpu_gib: float | None = None  # memory of the smallest of these GPUs; None where nobody can say
    weights_gib: float | None = None  # of the served model's files; None for one not on this host, or without GPUs

    @classmethod
    def of_this_host(cls, inference: InferenceConfig | None) -> Self:
        """Look at this host. Raises UserError where the NVIDIA driver hangs."""
        gpus, cores = visible_gpus(os.environ), len(os.sched_getaffinity(0))
        sizes = gpu_memory() if inference is not None and gpus else {}
        named = {gpu: sizes[gpu] for gpu in gpus if gpu in sizes} or sizes  # UUIDs are not looked up
        memory = [size for size in named.values() if size]
        weights = weights_gib(inference.model.name) if inference is not None and memory else None
        return cls(gpus, cores, os.environ, min(memory, default=None), weights)


@dataclass(frozen=True)
class Layout:
    """Which GPUs each process uses, and how much of their memory."""

    servers: tuple[tuple[str, ...], ...]  # of each that is started; none on a CPU. Several may name the same GPU
    trainer: tuple[str, ...]
    utilization: float | None = None  # share of a GPU's memory that one server may use; None: vLLM's choice
    # KV cache of one server. None: vLLM sizes it from free memory: nothing else may allocate while it starts.
    cache_gib: float | None = None
    training_gib: float | None = None  # of a GPU that also serves; None where the trainer has its GPUs for itself
    ports: tuple[int, ...] = ()  # of each server, after `inference.server.port`


@dataclass(frozen=True)
class NodeRole:
    """What one of several nodes runs; by default that of a run's only host, which runs everything.

    The first nodes serve, the others train. The first of these *leads*: it has the orchestrator.
    """

    rank: int = 0
    leader: int = 0  # its rank, the number of nodes that only serve
    trainers: int = 1  # nodes that train
    serves: bool = True
    trains: bool = True

    @classmethod
    def of(cls, config: RLConfig) -> Self:
        if config.node_rank is None:
            return cls()
        rank, servers = config.node_rank, 0 if config.inference is None else config.inference_nodes
        return cls(rank, servers, config.nodes - servers, rank < servers, rank >= servers)

    @property
    def leads(self) -> bool:
        return self.rank == self.leader

    @property
    def is_alone(self) -> bool:
        return self.serves and self.trains


def launcher_name(rank: int) -> str:
    """Return the name of the `rl` on one of several nodes, among those of processes."""
    return f"{LAUNCHER}-{rank}"


def make_plan(config: RLConfig, machine: HostResources, urls: Sequence[str] = ()) -> Plan:
    """Plan processes of this host, their GPUs, ports and configs. `urls`: of servers on other nodes.
    Raises UserError: too few ports, or as `lay_out`."""
    role, layout, client = NodeRole.of(config), lay_out(config, machine), config.orchestrator.client
    servers = {server_name(role.rank + number): _server(config, port) for number, port in enumerate(layout.ports)}
    gpus = dict(zip(servers, layout.servers, strict=True)) | {"trainer": layout.trainer, "orchestrator": ()}
    tenants = config.trainer.tenants

    def process(name: str, *module: str, key_variable: str = "", log: str = "", **more: Any) -> ProcessSpec:
        """`key_variable`: gives it the servers' key. `log`: of a trainer beside the leader's."""
        recover = [RECOVER] if config.recover and name in PAIR else []
        argv = (sys.executable, "-m", *module, "@", str(config_path(config, log or name)), *recover)
        env = environment(config, machine, name, gpus[name])
        if key_variable and config.inference is not None and config.inference.api_key is not None:
            env[key_variable] = config.inference.api_key
        return ProcessSpec(name, argv, config.output_dir / "logs" / f"{log or name}.log", env, gpus[name], **more)

    processes = [
        process(name, INFERENCE, key_variable="VLLM_API_KEY", server=server) for name, server in servers.items()
    ]
    if role.trains:
        ranks = config.trainer_ranks or max(1, len(layout.trainer))
        several = ranks * role.trainers > 1
        # A server that measures what is free of the GPU must be alone with it.
        alone = tuple(servers) if layout.training_gib and layout.cache_gib is None else ()
        log = "" if role.leads else f"trainer-{role.rank}"
        module = _torchrun(config, role, ranks) if several else (TRAINER,)
        processes.append(process("trainer", *module, drain_children=several, after_ready=alone, log=log))
    if role.leads and tenants is None:
        processes.append(process("orchestrator", ORCHESTRATOR, key_variable=client.api_key_var))
    sections = _sections(config, layout, servers, urls)
    files: dict[Path, BaseConfig] = {
        config_path(config, LAUNCHER if role.is_alone else launcher_name(role.rank)): config
    }
    files |= {config_path(config, process.log.stem): sections[process.name] for process in processes}
    external = [] if config.inference is not None else [ServerSpec(", ".join(client.base_urls), client.ready_timeout)]
    versions = "" if config.trainer.lora is None else config.trainer.lora.describe()
    versions += f", of {tenants.slots} tenants at a time" if tenants else ""
    return Plan(tuple(processes), files, (*servers.values(), *external), config.output_dir, versions)


def _torchrun(config: RLConfig, role: NodeRole, ranks: int) -> tuple[str, ...]:
    """Return the module that starts the trainer's ranks of this host, and its arguments. The ranks watch its process,
    and it ends with them."""
    # Port 0: torchrun picks a free one, so that two runs on one host never meet.
    endpoint, options = "localhost:0", tuple[str, ...]()
    if role.trainers > 1:
        assert config.rendezvous is not None
        # torchrun guesses by hostname which node hosts the store: set it explicitly. It is waited for as a server.
        seconds = f"{config.ready_timeout:.0f}"
        rdzv_conf = f"is_host={role.leads},join_timeout={seconds},read_timeout={seconds}"
        endpoint = config.rendezvous
        options = ("--nnodes", str(role.trainers), "--rdzv-id", "prime-rl", "--rdzv-conf", rdzv_conf)
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, *options, "--role", "trainer")
    return ("torch.distributed.run", "--nproc-per-node", str(ranks), *rendezvous, "-m", "prime_rl.trainer.rl.train")


def config_path(config: RLConfig, name: str) -> Path:
    """Return where the configuration of process `name` is written, of a dry run never over that of a run."""
    return dry_path(config.output_dir, name) if config.dry_run else config.output_dir / "configs" / f"{name}.toml"


def describe(plan: Plan) -> str:
    """Describe the plan for people: processes, GPUs, ports, files; what `headlines` leaves out."""
    lines = list[str]()
    keys = {value for process in plan.processes for name, value in process.env.items() if is_secret(name, value)}
    for process in plan.processes:
        where = f"GPU {','.join(process.gpus)}" if process.gpus else "CPU"
        variables = [f"{key}={'***' if value in keys else value}" for key, value in sorted(process.env.items())]
        lines += [f"{process.name:<13}  {where:<10}  log {process.log}", f"{'':<15}{shlex.join(process.argv)}"]
        lines += [f"{'':<15}{' '.join(variables)}"] if variables else []
    for server in plan.servers:
        whose = "already running" if server.port is None else f"port {server.port}"
        lines.append(f"server         {server.url} ({whose})")
    return "\n".join([*lines, *(f"config         {path}" for path in plan.configs)])


def headlines(config: RLConfig, plan: Plan) -> list[str]:
    """Say what is about to run: model, environments, batch, GPUs, directory."""
    orchestrator, gpus = config.orchestrator, [process for process in plan.processes if process.gpus]
    lines = [("model", config.trainer.model.name + (f", {plan.versions}" if plan.versions else ""))]
    if config.trainer.tenants is None:
        names = ", ".join(env.name for env in orchestrator.environments)
        if (evals := orchestrator.eval) is not None:
            names += f"; evaluated on {', '.join(env.name for env in evals.environments or orchestrator.environments)}"
            names += f" ({'all' if evals.num_examples < 0 else evals.num_examples} tasks)"
        steps, size, attempts = config.max_steps, orchestrator.batch_size, orchestrator.rollouts_per_example
        rollouts = f"{size} rollouts ({size // attempts} tasks x {attempts}), async level {config.async_level}"
        lines += [("environments", names), ("batch", f"{steps or 'endless'} steps of {rollouts}")]
    placed = "; ".join(f"{process.name} on {','.join(process.gpus)}" for process in gpus)
    lines += [
        ("GPUs", placed or "none found or asked for: running on CPUs (slow)"),
        ("directory", f"{plan.output_dir}; logs in {plan.output_dir / 'logs'}"),
    ]
    return [f"{name:<13} {what}" for name, what in lines]


def _sections(
    config: RLConfig, layout: Layout, servers: Mapping[str, ServerSpec], urls: Sequence[str]
) -> dict[str, BaseConfig]:
    """Return the settings of each process, whether this host runs it or not."""
    trainer, orchestrator, inference = config.trainer, config.orchestrator, config.inference
    if trainer.recovery_interval is None and config.max_restarts and not config.bench:
        trainer = trainer.model_copy(update={"recovery_interval": config.recovery_interval})
    if layout.training_gib is not None:
        trainer = trainer.with_values({"model.memory_limit": layout.training_gib, "weights.shares_gpu": True})
    if len(servers) > 1:
        urls = [server.url for server in servers.values()]
    if urls:
        orchestrator = orchestrator.with_values({"client.base_url": [f"{url}/v1" for url in urls]})
    sections: dict[str, BaseConfig] = {"trainer": trainer, "orchestrator": orchestrator}
    if inference is None:
        return sections
    # What is free on a shared GPU is the trainer's. It leaves room for a server's copy only where it publishes there.
    published = trainer.weights.transport != "filesystem"
    common = {
        "weights_root": inference.weights_root or config.output_dir / "weights",
        "servers_on_host": len(servers),
        "kv_cache_gib": layout.cache_gib,
        "gpu_memory_utilization": layout.utilization,
        "stage_on_device": inference.stage_on_device and (layout.training_gib is None or published),
    }
    for number, (name, server) in enumerate(servers.items(), NodeRole.of(config).rank):
        sections[name] = inference.with_values({**common, "server.port": server.port, "replica": number})
    return sections


def environment(config: RLConfig, machine: HostResources, name: str, gpus: Sequence[str]) -> dict[str, str]:
    """Return the variables that the child gets on top of ours. What the user has set stays, except for the placement.

    More OpenMP threads than cores spin and cost much more. Sampling ahead (async_level ≥ 1) keeps servers and trainer
    busy at the same time, so they share the cores; taken in turns each may use nearly all.
    """
    cores, ranks = machine.cores, config.trainer_ranks or 1
    in_turns = config.inference is None or config.async_level == 0
    served = max(1, cores - 1 if in_turns else cores // 2)
    training = cores if in_turns else cores - served
    defaults = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    if not gpus:
        threads = {"trainer": training // ranks, "orchestrator": 1}.get(name, served)
        defaults["OMP_NUM_THREADS"] = str(max(1, threads))
    elif name == "trainer":
        defaults["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        defaults["OMP_NUM_THREADS"] = str(max(1, min(8, cores // (2 * len(gpus)))))
    placement = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if machine.gpus else {}
    if machine.gpus:
        defaults["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return {key: value for key, value in defaults.items() if key not in machine.environ} | placement


def _server(config: RLConfig, offset: int) -> ServerSpec:
    """Return one of the servers that are started, whose port is `offset` after the first one's."""
    assert config.inference is not None
    first, port = config.inference.server, config.inference.server.port + offset
    if port > _LAST_PORT:
        raise UserError(f"inference.server.port {first.port} leaves no ports for {offset + 1} servers")
    return ServerSpec(first.with_values({"port": port}).url, config.ready_timeout, port)


# -- layout ------------------------------------------------------------------------------------------------------------


def lay_out(config: RLConfig, machine: HostResources) -> Layout:
    """Give the servers of this host the first GPUs, and its trainer the next ones, or the same.
    Raises UserError, with the arithmetic: it cannot be."""
    inference, visible, role = config.inference, machine.gpus, NodeRole.of(config)
    serves = inference is not None and on_cuda(inference.device, machine)
    training = config.trainer_gpus if on_cuda(config.trainer.device, machine) else 0
    _refuse_senseless(config, serves, training)
    training = training if role.trains else 0
    if not role.serves:
        inference, serves = None, False
    count = 0 if inference is None else _count_servers(config, inference, serves)
    size = 0 if inference is None or not serves else gpus_of_a_server(inference)
    inference_gpus = count * size
    if config.share_gpus and not 0 < inference_gpus == training:
        raise UserError(f"share_gpus: as many GPUs must train as serve, not {training} and {inference_gpus}")
    needed = inference_gpus if config.share_gpus else inference_gpus + training
    if needed > len(visible):
        limit = machine.environ.get("CUDA_VISIBLE_DEVICES")
        have = "no GPU was found" if limit is None else f"CUDA_VISIBLE_DEVICES is '{limit}'"
        have = f"{len(visible)} visible ({', '.join(visible)})" if visible else have
        both = role.is_alone and 2 * len(visible) == needed and not config.share_gpus
        host = "the run" if role.is_alone else f"node {role.rank}"
        hint = "; one GPU can do both: --share-gpus" if both else ""
        raise UserError(
            f"{host} needs {needed} GPUs ({inference_gpus} for inference, {training} for trainer), but {have}: see "
            f"--trainer-gpus, --inference-gpus, --device{hint}"
        )
    servers = tuple(tuple(visible[size * number : size * (number + 1)]) for number in range(count))
    trainer = tuple(visible if config.share_gpus else visible[inference_gpus:])[:training]
    if inference is None:
        return Layout((), trainer)
    if not serves:
        machine = replace(machine, gpu_gib=None)
    ports = tuple(range(len(servers)))
    if serves and role.is_alone and _gains_by_two(config, inference, len(servers), machine):
        memory = _memory(config, inference, 2, machine)
        if memory[1] is not None:
            return Layout(servers * 2, trainer, *memory, (*ports, *(_EXTRA_PORTS + port for port in ports)))
    return Layout(servers, trainer, *_memory(config, inference, 1, machine), ports)


def gpus_of_a_server(inference: InferenceConfig) -> int:
    replicas = inference.data_parallel_size_local or inference.data_parallel_size
    return inference.tensor_parallel_size * inference.pipeline_parallel_size * replicas


def _count_servers(config: RLConfig, inference: InferenceConfig, served: bool) -> int:
    """Return how many servers to start, on GPUs if `served`. Raises UserError: `inference_gpus` is no multiple."""
    each, total = gpus_of_a_server(inference), config.inference_gpus
    if not served or total is None:
        return 1
    if total % each:
        sizes = "the product of its tensor, pipeline and data parallel sizes"
        raise UserError(f"inference_gpus {total} cannot be laid out: a server uses {each} ({sizes})")
    if total > each and inference.data_parallel_size_local not in (None, inference.data_parallel_size):
        raise UserError("inference_gpus: servers spread over nodes are started by `inference`")
    return total // each


def _refuse_senseless(config: RLConfig, serves: bool, training: int) -> None:
    """Raise UserError for settings that mean nothing here. `serves`: on GPUs; `training`: how many GPUs train."""
    inference, ranks = config.inference, config.trainer_ranks
    refusals = (
        (not serves and config.inference_gpus, "inference_gpus: no GPU serves here (see [inference] and --device)"),
        (inference and inference.headless, "inference.headless: another node serves its requests; use `inference`"),
        (not training and config.trainer_gpus > 1, "trainer_gpus: no GPU trains here (--device); use --trainer-ranks"),
        (training and ranks not in (None, training), f"trainer_ranks {ranks}, trainer_gpus {training}: one GPU a rank"),
    )
    for refused, message in refusals:
        if refused:
            raise UserError(message)


def _gains_by_two(config: RLConfig, inference: InferenceConfig, gpus: int, machine: HostResources) -> bool:
    """Whether two servers on each GPU are faster than one: each leaves the GPU idle while its Python works."""
    in_flight = config.orchestrator.max_concurrent or config.orchestrator.batch_size * (config.async_level + 1)
    bounded = inference.kv_cache_gib or {"max_num_seqs", "max-num-seqs"} & {*inference.vllm}
    small = machine.weights_gib is not None and machine.weights_gib <= _SMALL_GIB and gpus_of_a_server(inference) == 1
    room = inference.server.port + _EXTRA_PORTS + gpus <= _LAST_PORT
    busy = machine.cores >= _CORES_A_GPU * gpus and in_flight >= _EPISODES_A_GPU * gpus
    # Kernels of adapters are small. Where processes take turns on a GPU two servers would starve the trainer.
    lora = config.trainer.lora is not None and config.trainer.lora.serve == "adapter"
    return small and busy and room and not (bounded or (lora and config.share_gpus))


def _memory(
    config: RLConfig, inference: InferenceConfig, engines: int, machine: HostResources
) -> tuple[float | None, float | None, float | None]:
    """Return `utilization`, `cache_gib` and `training_gib` (see `Layout`) where `engines` servers use each GPU."""
    share, cache, limit = inference.gpu_memory_utilization, inference.kv_cache_gib, None
    total, filed = machine.gpu_gib, machine.weights_gib
    weights = filed and filed / (inference.tensor_parallel_size * inference.pipeline_parallel_size)
    if config.share_gpus:
        share = share or _SHARED_GPU_FRACTION
        limit = _left_to_train(share, config.trainer.model.memory_limit, total)
    elif engines == 1:
        # Leave room to stage a version on the device, unless that is much of the memory.
        if share is None and inference.stage_on_device and total and weights:
            rest = 1 - (weights + _OVERHEAD_GIB) / total
            share = rest if _MIN_SERVER_SHARE <= rest < _SERVER_GPU_FRACTION else None
        return share, cache, None
    share = (share or _SERVER_GPU_FRACTION) / engines
    # Files say how large 16-bit weights are. Room for a staged copy of a single server is in the trainer's plan.
    as_filed = inference.model.dtype in _SIXTEEN_BITS and inference.quantization is None
    chosen = cache is not None or {"kv_cache_memory_bytes", "kv-cache-memory-bytes"} & {*inference.vllm}
    if as_filed and not chosen and total and weights:
        room = share * total - weights * (2 if engines > 1 else 1) - _ENGINE_GIB
        if room >= _LEAST_CACHE_GIB:
            cache = round(min(room, tiny_cache_gib(filed) or room), 1)
    return share, cache, limit


def _left_to_train(share: float, limit: float | None, total: float | None) -> float:
    """Return how many GiB the trainer may use of GPUs of which servers take `share`."""
    if total is None and limit is None:
        raise UserError("share_gpus: nvidia-smi does not say how much memory there is; give trainer.model.memory_limit")
    room = limit or 0.0 if total is None else (1 - share) * total - _OVERHEAD_GIB
    if (limit or 0.0) > room or room <= 0:
        raise UserError(
            f"share_gpus: of {total:.1f} GiB the server takes {share:.0%} (inference.gpu_memory_utilization), contexts "
            f"{_OVERHEAD_GIB:.0f}, which leaves {max(room, 0):.1f} for the trainer"
            + (f", not {limit:.1f} (trainer.model.memory_limit)" if limit else "")
        )
    return limit or round(room, 1)


def on_cuda(device: str, machine: HostResources) -> bool:
    return device == "cuda" or (device == "auto" and len(machine.gpus) > 0)
