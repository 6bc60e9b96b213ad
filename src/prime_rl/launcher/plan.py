"""What `rl` is going to start: a pure function of the configuration and of what this machine has."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prime_rl.config import RLConfig
from prime_rl.config.base import BaseConfig
from prime_rl.config.share import PAIR
from prime_rl.errors import UserError

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
    # A torchrun agent kills its ranks soon after a signal: ask the ranks themselves to finish, then it ends in peace.
    drain_children: bool = False
    # Name of a process whose first status report this one waits for (bounded) before it is started.
    after: str | None = None


@dataclass(frozen=True)
class Server:
    """The inference server: `health` answers 200 once it serves. `port` is None when somebody else started it, who may have started `others`."""

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
    server: Server | None
    output_dir: Path


@dataclass(frozen=True)
class Machine:
    """What the plan depends on besides the configuration."""

    gpus: Sequence[str]
    cores: int
    environ: Mapping[str, str]


def make_plan(config: RLConfig, machine: Machine) -> Plan:
    """Raises UserError where the machine has fewer GPUs than asked for."""
    placed = _place(config, machine)
    threads = _threads(config, machine)
    logs = config.output_dir / "logs"
    configs = {config.output_dir / "configs" / f"{name}.toml": section for name, section in _sections(config).items()}
    few_cores = machine.cores <= 2
    processes = [
        Process(
            "trainer",
            _trainer_argv(config, placed["trainer"]),
            logs / "trainer.log",
            _environment("trainer", placed, threads, machine),
            placed["trainer"],
            drain_children=trainer_ranks(config, placed["trainer"]) > 1,
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
    if config.inference is not None:
        environment = {**_environment("inference", placed, threads, machine), **_server_key(config)}
        argv = _argv(config, "inference")
        log = logs / "inference.log"
        processes.insert(0, Process("inference", argv, log, environment, placed["inference"], service=True))
    return Plan(tuple(processes), configs, _server(config), config.output_dir)


def trainer_ranks(config: RLConfig, gpus: Sequence[str]) -> int:
    return config.trainer_ranks or max(1, len(gpus))


def recovery_interval(config: RLConfig) -> int | None:
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
    if plan.server is not None:
        whose = "already running" if plan.server.port is None else f"port {plan.server.port}"
        lines.append(f"server         {plan.server.url} ({whose})")
    else:
        lines.append("server         those that register (orchestrator.client.discover)")
    lines += [f"config         {path}" for path in plan.configs]
    return "\n".join(lines)


def _sections(config: RLConfig) -> dict[str, BaseConfig]:
    trainer = config.trainer.model_copy(update={"recovery_interval": recovery_interval(config)})
    sections: dict[str, BaseConfig] = {"rl": config, "trainer": trainer, "orchestrator": config.orchestrator}
    if config.inference is not None:
        root = config.inference.weights_root or config.output_dir / "weights"
        sections["inference"] = config.inference.model_copy(update={"weights_root": root})
    return sections


def _shown(key: str, value: str) -> str:
    return "***" if key.endswith("KEY") else value


def _place(config: RLConfig, machine: Machine) -> dict[str, tuple[str, ...]]:
    """The inference server gets the first GPUs, the trainer the next ones, the orchestrator none."""
    wants = {"inference": 0, "trainer": 0, "orchestrator": 0}
    if config.inference is not None and _on_cuda(config.inference.device, machine):
        wants["inference"] = config.inference_gpus
    if _on_cuda(config.trainer.device, machine):
        wants["trainer"] = config.trainer_gpus
    total = sum(wants.values())
    if total > len(machine.gpus):
        parts = " + ".join(f"{count} for {name}" for name, count in wants.items() if count)
        limit = machine.environ.get("CUDA_VISIBLE_DEVICES")
        source = "no GPU was found" if limit is None else f"CUDA_VISIBLE_DEVICES is '{limit}'"
        have = source if not machine.gpus else f"{len(machine.gpus)} visible ({', '.join(machine.gpus)})"
        raise UserError(
            f"the run needs {total} GPUs ({parts}), but {have}: see --trainer-gpus, --inference-gpus, --device"
        )
    if wants["trainer"] and config.trainer_ranks not in (None, wants["trainer"]):
        raise UserError(
            f"trainer_ranks {config.trainer_ranks} must equal trainer_gpus {wants['trainer']}: one GPU a rank"
        )
    available = list(machine.gpus)
    return {name: tuple(available.pop(0) for _ in range(count)) for name, count in wants.items()}


def _on_cuda(device: str, machine: Machine) -> bool:
    return device == "cuda" or (device == "auto" and len(machine.gpus) > 0)


def _threads(config: RLConfig, machine: Machine) -> dict[str, int]:
    """OpenMP threads of each process. Sampling ahead (async_level ≥ 1) keeps server and trainer busy at the same time,
    so they share the cores; taken in turns each may use nearly all. More threads than cores spin and cost much more."""
    cores, ranks = max(1, machine.cores), config.trainer_ranks or 1
    if config.inference is None or config.async_level == 0:
        serving, training = max(1, cores - 1), cores
    else:
        serving = max(1, cores // 2)
        training = max(1, cores - serving)
    return {"inference": serving, "trainer": max(1, training // ranks), "orchestrator": 1}


def _environment(
    name: str, placed: Mapping[str, tuple[str, ...]], threads: Mapping[str, int], machine: Machine
) -> dict[str, str]:
    """Variables that the child gets on top of ours. What the user has set stays, except for the placement."""
    defaults = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    gpus = placed[name]
    if not gpus:
        defaults["OMP_NUM_THREADS"] = str(threads[name])
    elif name == "trainer":
        defaults["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        defaults["OMP_NUM_THREADS"] = str(max(1, min(8, machine.cores // (2 * len(gpus)))))
    if machine.gpus:
        defaults["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    chosen = {key: value for key, value in defaults.items() if key not in machine.environ}
    return {**chosen, "CUDA_VISIBLE_DEVICES": ",".join(gpus)} if machine.gpus else chosen


def _config_path(config: RLConfig, name: str) -> str:
    return str(config.output_dir / "configs" / f"{name}.toml")


def _argv(config: RLConfig, name: str) -> tuple[str, ...]:
    command = (sys.executable, "-m", f"prime_rl.entrypoints.{name}", "@", _config_path(config, name))
    return (*command, *_recover(config)) if name in PAIR else command


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


def _server(config: RLConfig) -> Server | None:
    if config.inference is None:
        client = config.orchestrator.client
        if client.discover is not None:
            return None  # the orchestrator waits for whoever registers
        first, *others = [f"{root}/health" for root in client.api_roots]
        return Server(", ".join(client.base_urls), first, client.ready_timeout, others=tuple(others))
    server = config.inference.server
    wildcard = server.host in (None, "0.0.0.0", "::")
    host = "localhost" if wildcard else str(server.host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{server.port}"
    return Server(url, f"{url}/health", config.ready_timeout, server.host or "127.0.0.1", server.port)
