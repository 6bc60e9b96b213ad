"""Several nodes: `rl` starts on each with the same command and its own `--node-rank`, and supervises its part.

The first `inference_nodes` serve, one server each; the others train. The first that trains is the *leader*: it prepares
the run directory, runs the orchestrator and decides how the run ends. Nodes meet in `nodes/RANK.json` of the shared run
directory. Clocks are not compared: a node whose record no longer changes gives no sign of life.
"""

import json
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from prime_rl.config import RLConfig
from prime_rl.config.base import BaseConfig
from prime_rl.config.inference import server_name
from prime_rl.errors import UserError
from prime_rl.launcher.plan import HostResources, Plan, ProcessSpec, ServerSpec, config_path, environment
from prime_rl.launcher.supervise import RunOutcome, Supervisor
from prime_rl.monitor.status import read_record
from prime_rl.transport.commit import write_atomically
from prime_rl.wait import wait

_BEAT_SECONDS = 2.0
_LOST_SECONDS = 30.0  # without a sign of life
_DRAINING, _RUNNING, _FAILED = "draining", "running", RunOutcome.FAILURE.name


@dataclass(frozen=True)
class NodeRecord:
    """What a node says of itself. `state` is how its part ended, once it has."""

    host: str
    url: str  # of its server; empty for a node that trains
    beat: float
    state: str = _RUNNING


class Nodes:
    """The nodes of a run, as one of them sees them."""

    def __init__(self, config: RLConfig) -> None:
        assert config.node_rank is not None
        self._config, self.rank = config, config.node_rank
        self.servers = 0 if config.inference is None else config.inference_nodes
        self.leader = self.servers
        self.leads, self.trains = self.rank == self.leader, self.rank >= self.servers
        self._directory = config.output_dir / "nodes"
        self._state, self._written = _RUNNING, 0.0
        self._seen: dict[int, tuple[float, float]] = {}  # by rank: the last beat, and when it was seen first
        self._silent_nodes = set[int]()
        self._is_over = False  # the leader has said so
        self._failed = False  # by this node's decision

    @property
    def url(self) -> str:
        """Where the other nodes reach this one's server."""
        if self._config.inference is None or self.trains:
            return ""
        server = self._config.inference.server
        return server.with_values({"host": server.host or socket.gethostname()}).url

    def beat(self, state: str = "") -> None:
        """Write this node's record, now and then, and at once if its state changes."""
        changed, self._state = state not in ("", self._state), state or self._state
        if changed or time.monotonic() - self._written > _BEAT_SECONDS:
            self._directory.mkdir(parents=True, exist_ok=True)
            record = NodeRecord(socket.gethostname(), self.url, time.time(), self._state)
            write_atomically(self._path(self.rank), json.dumps(asdict(record)).encode())
            self._written = time.monotonic()

    def await_nodes(self, ranks: range, say: Callable[[str], None]) -> list[NodeRecord]:
        """Return the records of these nodes once all are there: those that change while this one looks."""
        missing = sorted({*ranks} - {self.rank})
        for rank in missing:
            self._look(rank)
        if missing:
            say(f"waiting for {_list(missing)}: start the same command there, with its --node-rank")

        def present() -> bool:
            self.beat()
            missing[:] = [rank for rank in missing if not self._is_new(rank)]
            return not missing

        wait(present, subject=_list(list(ranks)), owner="the same command there", seconds=self._config.ready_timeout)
        records = [read_record(NodeRecord, self._path(rank)) for rank in ranks]
        return [record for record in records if record is not None]

    def tick(self, supervisor: Supervisor, say: Callable[[str], None]) -> None:
        """Write this node's record, say which nodes are lost and which are back, and follow the leader."""
        self.beat(_DRAINING if supervisor.is_draining else "")
        for rank in range(self._config.nodes):
            record = None if rank == self.rank else self._look(rank)
            if rank == self.rank or record is None:
                continue
            if rank == self.leader and record.state == _DRAINING:
                if self.trains:  # servers are needed until the end
                    supervisor.drain()
            elif rank == self.leader and record.state != _RUNNING and not self._is_over:
                self._is_over = True
                say(f"node {rank} has ended the run")
                supervisor.stop()
            silent = time.monotonic() - self._seen[rank][1]
            is_lost = record.state == _FAILED or (record.state == _RUNNING and silent > _LOST_SECONDS)
            if is_lost and rank not in self._silent_nodes:
                self._lose(rank, record, silent, supervisor, say)
            elif rank in self._silent_nodes and not is_lost:
                self._silent_nodes.discard(rank)
                say(f"node {rank} ({record.host}) is back")

    def _lose(
        self, rank: int, record: NodeRecord, silent: float, supervisor: Supervisor, say: Callable[[str], None]
    ) -> None:
        self._silent_nodes.add(rank)
        what = "has failed" if record.state == _FAILED else f"has given no sign of life for {silent:.0f} s"
        fatal = self._config.lost_node == "end"
        say(
            f"node {rank} ({record.host}) {what}: {'ending the run' if fatal else 'start the same command there again'}"
        )
        if fatal:
            self._failed = True
            supervisor.stop()

    def outcome(self, own: RunOutcome) -> RunOutcome:
        """Return how the run has ended: as the leader says, if it does."""
        record = read_record(NodeRecord, self._path(self.leader))
        if self._is_over and record is not None and record.state in RunOutcome.__members__:
            return RunOutcome[record.state]
        return RunOutcome.FAILURE if self._failed else own

    def _look(self, rank: int) -> NodeRecord | None:
        record = read_record(NodeRecord, self._path(rank))
        if record is not None and self._seen.get(rank, (None,))[0] != record.beat:
            self._seen[rank] = record.beat, time.monotonic()
        return record

    def _is_new(self, rank: int) -> bool:
        before = self._seen.get(rank)
        record = self._look(rank)
        return record is not None and record.state == _RUNNING and (before is None or before[0] != record.beat)

    def _path(self, rank: int) -> Path:
        return self._directory / f"{rank}.json"


def _list(ranks: list[int]) -> str:
    return f"node{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def node_plan(config: RLConfig, machine: HostResources, nodes: Nodes, urls: list[str]) -> Plan:
    """Plan what one node runs. `urls`: of all servers, for the orchestrator. Raises UserError: too few GPUs."""
    inference, trainer = config.inference, config.trainer
    sections: dict[str, BaseConfig] = {f"rl-{nodes.rank}": config}
    on_gpus = (trainer if nodes.trains or inference is None else inference).device != "cpu" and len(machine.gpus) > 0
    processes = list[ProcessSpec]()

    def add(name: str, section: BaseConfig, count: int, *argv: str, variable: str = "", **more: object) -> None:
        if on_gpus and count > len(machine.gpus):
            raise UserError(f"node {nodes.rank} needs {count} GPUs for {name}, and has {len(machine.gpus)}")
        gpus = tuple(machine.gpus[:count]) if on_gpus else ()
        sections[name] = section
        env = environment(config, machine, name, gpus, 1)
        if variable and inference is not None and inference.api_key is not None:
            env[variable] = inference.api_key
        log = (
            config.output_dir / "logs" / f"{name if name != 'trainer' or nodes.leads else f'trainer-{nodes.rank}'}.log"
        )
        recover = ["--recover"] if config.recover and name in ("trainer", "orchestrator") else []
        command = (sys.executable, "-m", *argv, "@", str(config_path(config, name)), *recover)
        processes.append(ProcessSpec(name, command, log, env, gpus, **more))  # type: ignore[arg-type]

    servers = list[ServerSpec]()
    if inference is not None and not nodes.trains:
        values = {"replica": nodes.rank, "weights_root": inference.weights_root or config.output_dir / "weights"}
        servers.append(ServerSpec(nodes.url, config.ready_timeout, inference.server.port))
        size = inference.tensor_parallel_size * inference.pipeline_parallel_size * inference.data_parallel_size
        add(server_name(nodes.rank), inference.with_values(values), size, "prime_rl.entrypoints.inference",
            variable="VLLM_API_KEY", server=servers[0])  # fmt: skip
    else:
        if trainer.recovery_interval is None and config.max_restarts:
            trainer = trainer.model_copy(update={"recovery_interval": config.recovery_interval})
        training, ranks = config.nodes - nodes.servers, config.trainer_ranks or (config.trainer_gpus if on_gpus else 1)
        argv = ["prime_rl.entrypoints.trainer"]
        if training * ranks > 1:
            meeting = config.rendezvous or "localhost:0"
            argv = ["torch.distributed.run", "--nnodes", str(training), "--nproc-per-node", str(ranks)]
            # torchrun finds out who is the host by the machine's name, which may not resolve to this address.
            argv += ["--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--rdzv-conf", f"is_host={nodes.leads}"]
            argv += ["--rdzv-id", "prime-rl", "--role", "trainer"]
            argv += ["-m", "prime_rl.trainer.rl.train"]
        add("trainer", trainer, ranks, *argv, drain_children=training * ranks > 1)
        if nodes.leads:
            client = {"client.base_url": [f"{url}/v1" for url in urls]} if urls else {}
            orchestrator = config.orchestrator.with_values(client)
            add("orchestrator", orchestrator, 0, "prime_rl.entrypoints.orchestrator",
                variable=orchestrator.client.api_key_var)  # fmt: skip
    files = {config_path(config, name): section for name, section in sections.items()}
    return Plan(tuple(processes), files, tuple(servers), config.output_dir)
