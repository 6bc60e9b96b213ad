"""What `rl` is going to start: a pure function of the configuration and of what this machine has."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from prime_rl.config import RLConfig
from prime_rl.config.base import BaseConfig
from prime_rl.config.inference import SERVER, server_name
from prime_rl.config.share import PAIR
from prime_rl.errors import UserError
from prime_rl.launcher.layout import LAST_PORT, Layout, Machine, lay_out

RECOVER = "--recover"  # tells a job to go on from what is committed


@dataclass(frozen=True)
class Process:
    """One child. A job ends by itself, with status 0 when all is well; a service runs until it is stopped."""

    name: str
    argv: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    service: bool = False
    # A torchrun agent kills its ranks soon after a signal: signal the ranks themselves, then it exits by itself.
    drain_children: bool = False
    # Name of a process whose first status report this one waits for (bounded) before it is started.
    after: str | None = None
    # Names of services that must have been ready once before this one is started: they measure what memory is free.
    after_ready: tuple[str, ...] = ()


@dataclass(frozen=True)
class Server:
    """An inference server, started as process `name`: `health` answers 200 once it serves. `port` is None when somebody else started it, who may
    have started `others`."""

    name: str
    url: str
    health: str
    ready_timeout: float
    host: str = ""
    port: int | None = None
    others: tuple[str, ...] = ()  # health routes of further servers


@dataclass(frozen=True)
class Plan:
    """Processes in the order in which they are started, and the configuration file of each."""

    processes: tuple[Process, ...]
    configs: Mapping[Path, BaseConfig]
    servers: tuple[Server, ...]  # none where those that serve register in a directory
    output_dir: Path
    tmpfs: Path | None = None  # of this host, where the trainer writes weights to


def make_plan(config: RLConfig, machine: Machine) -> Plan:
    """Plan processes, their GPUs, ports and configs.

    Raises:
        UserError: for an impossible layout (see `layout`), too few ports, or an advertised address for several servers.
    """
    layout = lay_out(config, machine)
    if len(layout.servers) > 1 and config.inference is not None and config.inference.server.advertise is not None:
        raise UserError("inference.server.advertise is the address of one server, but several are started")
    servers = tuple(_server(config, number, offset) for number, offset in enumerate(layout.ports))
    placed = {server.name: gpus for server, gpus in zip(servers, layout.servers, strict=True)}
    placed |= {"trainer": layout.trainer, "orchestrator": ()}
    threads = _threads(config, machine, max(1, len(servers)))
    logs = config.output_dir / "logs"
    sections = _sections(config, layout, servers)
    configs = {config.output_dir / "configs" / f"{name}.toml": section for name, section in sections.items()}
    few_cores = machine.cores <= 2
    processes = [
        Process(
            "trainer",
            _trainer_argv(config, placed["trainer"]),
            logs / "trainer.log",
            _environment("trainer", placed, threads, machine),
            placed["trainer"],
            drain_children=trainer_ranks(config, placed["trainer"]) > 1,
            # A server that measures what is free of the GPU must be alone with it.
            after_ready=tuple(server.name for server in servers)
            if layout.training_gib and layout.cache_gib is None
            else (),
        ),
        Process(
            "orchestrator",
            _argv(config, "orchestrator"),
            logs / "orchestrator.log",
            {**_environment("orchestrator", placed, threads, machine), **_client_key(config)},
            # Server and trainer fill two cores while they import; the orchestrator is needed last.
            after="trainer" if few_cores else None,
        ),
    ]
    serving = [
        Process(
            server.name,
            _argv(config, SERVER, server.name),
            logs / f"{server.name}.log",
            {**_environment(server.name, placed, threads, machine), **_server_key(config)},
            placed[server.name],
            service=True,
        )
        for server in servers
    ]
    found = servers or _running_already(config)
    return Plan((*serving, *processes), configs, found, config.output_dir, config.trainer.weights.tmpfs)


def trainer_ranks(config: RLConfig, gpus: Sequence[str]) -> int:
    return config.trainer_ranks or max(1, len(gpus))


def recovery_interval(config: RLConfig) -> int | Literal["auto"] | None:
    """Steps between the trainer's recovery checkpoints: its own setting, else the run's where processes are started again."""
    if config.trainer.recovery_interval is not None or config.bench or config.max_restarts == 0:
        return config.trainer.recovery_interval
    return config.recovery_interval


def describe(plan: Plan) -> str:
    """The plan for people: processes, GPUs, ports, directories."""
    lines = [f"run directory  {plan.output_dir}"]
    for process in plan.processes:
        where = f"GPU {','.join(process.gpus)}" if process.gpus else "CPU"
        lines.append(f"{process.name:<13}  {where:<10}  log {process.log}")
        lines.append(f"{'':<15}{shlex.join(process.argv)}")
        if process.env:
            lines.append(f"{'':<15}{' '.join(f'{k}={_shown(k, v)}' for k, v in sorted(process.env.items()))}")
    for server in plan.servers:
        whose = "already running" if server.port is None else f"port {server.port}"
        lines.append(f"server         {server.url} ({whose})")
    if not plan.servers:
        lines.append("server         those that register (orchestrator.client.discover)")
    if plan.tmpfs is not None:
        started = plan.servers and all(server.port is not None for server in plan.servers)
        limit = "" if started else "; servers on other hosts cannot load them"
        lines.append(f"weights        in this host's memory, {plan.tmpfs}, until a checkpoint needs them{limit}")
    lines += [f"config         {path}" for path in plan.configs]
    return "\n".join(lines)


def _sections(config: RLConfig, layout: Layout, servers: Sequence[Server]) -> dict[str, BaseConfig]:
    """What each process is configured with, by its name."""
    trainer = config.trainer.model_copy(update={"recovery_interval": recovery_interval(config)})
    orchestrator = config.orchestrator
    if layout.training_gib is not None:
        limited = trainer.model.model_copy(update={"memory_limit": layout.training_gib})
        weights = trainer.weights.model_copy(update={"shares_gpu": True})
        trainer = trainer.model_copy(update={"model": limited, "weights": weights})
    if len(servers) > 1 and orchestrator.client.discover is None:
        client = orchestrator.client.model_copy(update={"base_url": [f"{server.url}/v1" for server in servers]})
        orchestrator = orchestrator.model_copy(update={"client": client})
    sections: dict[str, BaseConfig] = {"rl": config, "trainer": trainer, "orchestrator": orchestrator}
    for number, server in enumerate(servers):
        assert config.inference is not None
        sections[server.name] = config.inference.model_copy(
            update={
                "weights_root": config.inference.weights_root or config.output_dir / "weights",
                "weights_tmpfs": config.inference.weights_tmpfs or config.trainer.weights.tmpfs,
                "server": config.inference.server.model_copy(update={"port": server.port}),
                "replica": number,
                "servers_on_host": len(servers),
                "kv_cache_gib": layout.cache_gib,
                "gpu_memory_utilization": layout.utilization,
                **({} if layout.training_gib is None else {"stage_on_device": _stages_on_device(config)}),
            }
        )
    return sections


def _stages_on_device(config: RLConfig) -> bool:
    """What is free on a shared GPU is the trainer's, which leaves room for a copy of the server's only where it publishes from there."""
    assert config.inference is not None
    published = config.trainer.weights.transport != "filesystem" and config.trainer.weights.tmpfs is None
    return published and config.inference.stage_on_device


def _shown(key: str, value: str) -> str:
    return "***" if key.endswith("KEY") else value


def _threads(config: RLConfig, machine: Machine, servers: int) -> dict[str, int]:
    """OpenMP threads of each process. Sampling ahead (async_level ≥ 1) keeps server and trainer busy at the same time,
    so they share the cores; taken in turns each may use nearly all. More threads than cores spin and cost much more."""
    cores, ranks = max(1, machine.cores), config.trainer_ranks or 1
    if config.inference is None or config.async_level == 0:
        serving, training = max(1, cores - 1), cores
    else:
        serving = max(1, cores // 2)
        training = max(1, cores - serving)
    return {SERVER: max(1, serving // servers), "trainer": max(1, training // ranks), "orchestrator": 1}


def _environment(
    name: str, placed: Mapping[str, tuple[str, ...]], threads: Mapping[str, int], machine: Machine
) -> dict[str, str]:
    """Variables that the child gets on top of ours. What the user has set stays, except for the placement."""
    defaults = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    gpus = placed[name]
    if not gpus:
        defaults["OMP_NUM_THREADS"] = str(threads.get(name, threads[SERVER]))
    elif name == "trainer":
        defaults["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        defaults["OMP_NUM_THREADS"] = str(max(1, min(8, machine.cores // (2 * len(gpus)))))
    if machine.gpus:
        defaults["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    chosen = {key: value for key, value in defaults.items() if key not in machine.environ}
    return {**chosen, "CUDA_VISIBLE_DEVICES": ",".join(gpus)} if machine.gpus else chosen


def _config_path(config: RLConfig, name: str) -> str:
    return str(config.output_dir / "configs" / f"{name}.toml")


def _argv(config: RLConfig, entrypoint: str, name: str | None = None) -> tuple[str, ...]:
    """The command of process `name`, by default that of the entrypoint."""
    path = _config_path(config, name or entrypoint)
    command = (sys.executable, "-m", f"prime_rl.entrypoints.{entrypoint}", "@", path)
    return (*command, *_recover(config)) if entrypoint in PAIR else command


def _recover(config: RLConfig) -> tuple[str, ...]:
    return (RECOVER,) if config.recover else ()


def _trainer_argv(config: RLConfig, gpus: Sequence[str]) -> tuple[str, ...]:
    ranks = trainer_ranks(config, gpus)
    if ranks == 1:
        return _argv(config, "trainer")
    torchrun = ("-m", "prime_rl.lifeline", "-m", "torch.distributed.run", "--nproc-per-node", str(ranks))
    # Port 0: torchrun picks a free one, so that two runs on one host never meet.
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--role", "trainer")
    train = ("-m", "prime_rl.trainer.rl.train", "@", _config_path(config, "trainer"), *_recover(config))
    return (sys.executable, *torchrun, *rendezvous, *train)


def _server_key(config: RLConfig) -> dict[str, str]:
    key = None if config.inference is None else config.inference.api_key
    return {} if key is None else {"VLLM_API_KEY": key}


def _client_key(config: RLConfig) -> dict[str, str]:
    key = None if config.inference is None else config.inference.api_key
    return {} if key is None else {config.orchestrator.client.api_key_var: key}


def _running_already(config: RLConfig) -> tuple[Server, ...]:
    client = config.orchestrator.client
    if client.discover is not None:
        return ()  # the orchestrator waits for whoever registers
    first, *others = [f"{root}/health" for root in client.api_roots]
    return (Server(SERVER, ", ".join(client.base_urls), first, client.ready_timeout, others=tuple(others)),)


def _server(config: RLConfig, number: int, offset: int) -> Server:
    """One of those that are started, and so many ports after the first."""
    assert config.inference is not None
    listens, port = config.inference.server, config.inference.server.port + offset
    if port > LAST_PORT:
        raise UserError(f"inference.server.port {listens.port} leaves no ports for {number + 1} servers")
    host = "localhost" if listens.host in (None, "0.0.0.0", "::") else str(listens.host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    name = server_name(number)
    return Server(name, url, f"{url}/health", config.ready_timeout, listens.host or "127.0.0.1", port)
