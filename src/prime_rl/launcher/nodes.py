"""Several nodes: `rl` starts on each with the same command and its own `--node-rank`, and supervises its part.

The first `inference_nodes` serve, one server each; the others train. The first that trains is the *leader*: it prepares
the run directory, runs the orchestrator and decides how the run ends. Nodes meet in `nodes/RANK.json` of the shared run
directory. Clocks are not compared: a node whose record no longer changes is considered lost.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from prime_rl.config import RLConfig
from prime_rl.config.base import BaseConfig
from prime_rl.config.inference import server_name
from prime_rl.errors import UserError, user_errors
from prime_rl.launcher.plan import (
    INFERENCE,
    ORCHESTRATOR,
    TRAINER,
    HostResources,
    Plan,
    ProcessSpec,
    ServerSpec,
    config_path,
    gpus_of_a_server,
    on_cuda,
    process_spec,
    torchrun,
)
from prime_rl.launcher.supervise import RunOutcome, Supervisor
from prime_rl.monitor.status import read_record, write_record
from prime_rl.processes import ProcessId, is_alive, me, this_host
from prime_rl.wait import WaitTimeout, wait

_BEAT_SECONDS = 2.0
_LOST_SECONDS = 30.0  # without a change of its record
_DRAINING, _RUNNING = "draining", "running"
_FAILED = RunOutcome.FAILURE.name, RunOutcome.INTERRUPTED.name


@dataclass(frozen=True)
class NodeRecord:
    """State that a node publishes for the others: running, draining, or the name of a `RunOutcome`."""

    host: str
    url: str  # of its server; empty for a node that trains
    beat: float  # Unix seconds; peers only test whether it changes
    state: str
    machine: str  # see `this_host`; pids mean something there alone
    process: ProcessId


@dataclass
class _Peer:
    """Another node as it was last seen. Its record is `live` once it has changed, or appeared, while this node looks:
    before, it may be of an earlier run."""

    record: NodeRecord
    changed: float
    live: bool = False
    is_lost: bool = False


class Nodes:
    """One node's view of the run. Within a `with` block a thread publishes the node's record every few seconds."""

    def __init__(self, config: RLConfig) -> None:
        assert config.node_rank is not None
        self._config, self.rank = config, config.node_rank
        self.servers = 0 if config.inference is None else config.inference_nodes
        self.leader = self.servers
        self.is_leader, self.is_trainer = self.rank == self.leader, self.rank >= self.servers
        self._directory = config.output_dir / "nodes"
        self._state = _RUNNING
        self._peers: dict[int, _Peer | None] = {}  # None: had no record yet
        self._lock = threading.Lock()  # bounded: held while one small file is written
        self._decision: RunOutcome | None = None  # how the run has ended for this node
        self._stopped = threading.Event()

    @property
    def url(self) -> str:
        """Where other nodes reach this node's server; empty for a node that trains."""
        if self._config.inference is None or self.is_trainer:
            return ""
        server = self._config.inference.server
        host = socket.gethostname() if server.host in (None, "0.0.0.0", "::") else server.host
        return server.with_values({"host": host}).url

    def __enter__(self) -> Self:
        """Raises UserError: other nodes could not reach this node's server, another `rl` has this rank, or nothing can
        be written."""
        inference = None if self.is_trainer else self._config.inference
        key = inference is None or inference.server.host or inference.api_key or os.environ.get("VLLM_API_KEY")
        if not key:  # it would listen on loopback
            raise UserError("set VLLM_API_KEY, the same on all nodes: other hosts ask this node's server")
        if (other := self._duplicate()) is not None:
            raise UserError(f"node {self.rank} is run by pid {other.process.pid} on {other.host} already")
        with user_errors(f"cannot write in {self._directory}", OSError):
            self._write()
        threading.Thread(target=self._beat, name="node", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        self.publish(RunOutcome.FAILURE.name if self._state in (_RUNNING, _DRAINING) else self._state)

    def publish(self, state: str = "") -> None:
        """Write this node's record. Where that fails the next heartbeat writes it again."""
        with suppress(OSError):
            self._write(state)

    def _write(self, state: str = "") -> None:
        with self._lock:
            self._state = state or self._state
            self._directory.mkdir(parents=True, exist_ok=True)
            record = NodeRecord(socket.gethostname(), self.url, time.time(), self._state, this_host(), me())
            write_record(self._path(self.rank), record)

    def _path(self, rank: int) -> Path:
        return self._directory / f"{rank}.json"

    def _duplicate(self) -> NodeRecord | None:
        """Return the record of another `rl` that runs with this rank."""
        record = read_record(NodeRecord, self._path(self.rank))
        if record is None or record.state in RunOutcome.__members__:
            return None
        if record.machine == this_host():
            return record if record.process != me() and is_alive(record.process) else None
        with suppress(WaitTimeout):
            wait(
                lambda: read_record(NodeRecord, self._path(self.rank)) != record,
                subject=f"end of node {self.rank}", owner=record.host, seconds=3 * _BEAT_SECONDS,
            )  # fmt: skip
            return record
        return None

    def _beat(self) -> None:
        while not self._stopped.wait(_BEAT_SECONDS):  # bounded: a daemon thread, it ends with the process
            self.publish()

    def await_nodes(self, ranks: range, say: Callable[[str], None]) -> list[NodeRecord]:
        """Return the records of these nodes once all are live, or the first of one that has ended. Raises WaitTimeout
        after `ready_timeout` seconds."""
        names = f"node{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        if ranks:
            say(f"waiting for {names}: start the same command there, with its --node-rank")

        def live() -> list[NodeRecord] | None:
            nodes = [self._look(rank) for rank in ranks]
            records = [node.record for node in nodes if node is not None and node.live]
            ended = [record for record in records if record.state in RunOutcome.__members__]
            return ended[:1] or (records if len(records) == len(ranks) else None)

        subject, seconds = f"record of {names}", self._config.ready_timeout
        return wait(live, subject=subject, owner="`rl` there", seconds=seconds) if ranks else []

    def tick(self, supervisor: Supervisor, say: Callable[[str], None]) -> None:
        """Publish that this node drains, and react to the others: drain or stop with the leader, report those that are
        lost or back, and fail the run if `lost_node` is "end". Call periodically."""
        if supervisor.is_draining and self._state == _RUNNING:
            self.publish(_DRAINING)
        for rank in range(self._config.nodes):
            node = None if rank == self.rank else self._look(rank)
            if node is None or not node.live or self._decision is not None:
                continue
            state, silence = node.record.state, time.monotonic() - node.changed
            if rank == self.leader and state in RunOutcome.__members__:
                self._decision = RunOutcome[state]
                say(f"node {rank}, which leads, has ended the run")
                supervisor.stop()
            elif state in _FAILED or (state in (_RUNNING, _DRAINING) and silence > _LOST_SECONDS):
                if not node.is_lost:
                    node.is_lost = True
                    self._report_loss(rank, node.record, silence, supervisor, say)
            else:
                if node.is_lost:
                    say(f"node {rank} ({node.record.host}) is back")
                node.is_lost = False
                if rank == self.leader and state == _DRAINING and self.is_trainer:  # servers are needed until the end
                    supervisor.drain()

    def _report_loss(
        self, rank: int, record: NodeRecord, silence: float, supervisor: Supervisor, say: Callable[[str], None]
    ) -> None:
        ended = record.state in _FAILED
        what = f"has ended ({record.state.lower()})" if ended else f"has given no sign of life for {silence:.0f} s"
        fatal = self._config.lost_node == "end"
        say(f"node {rank} ({record.host}) {what}: {'ending the run' if fatal else 'run the same command there again'}")
        if fatal:
            self._decision = RunOutcome.FAILURE
            supervisor.stop()

    def outcome(self, own: RunOutcome) -> RunOutcome:
        """Return the run's outcome and publish it: the leader's, FAILURE after a fatal loss of a node, else `own`."""
        outcome = self._decision or own
        self.publish(outcome.name)
        return outcome

    def _look(self, rank: int) -> _Peer | None:
        record, known = read_record(NodeRecord, self._path(rank)), self._peers.get(rank)
        if record is None:
            return self._peers.setdefault(rank, None)
        if known is None:
            known = self._peers[rank] = _Peer(record, time.monotonic(), live=rank in self._peers)
        elif known.record != record:
            known.record, known.changed, known.live = record, time.monotonic(), True
        return known


def node_plan(config: RLConfig, machine: HostResources, nodes: Nodes, urls: list[str]) -> Plan:
    """Plan what one node runs. `urls`: of all servers, for the orchestrator. Raises UserError: too few GPUs."""
    inference, trainer = config.inference, config.trainer
    sections: dict[str, BaseConfig] = {f"rl-{nodes.rank}": config}
    processes, servers = list[ProcessSpec](), list[ServerSpec]()

    def add(name: str, section: BaseConfig, count: int, *module: str, **more: Any) -> None:
        if count > len(machine.gpus):
            raise UserError(f"node {nodes.rank} needs {count} GPUs for {name}, and has {len(machine.gpus)}")
        sections[name] = section
        processes.append(process_spec(config, machine, name, tuple(machine.gpus[:count]), *module, **more))

    if inference is not None and not nodes.is_trainer:
        values = {"replica": nodes.rank, "weights_root": inference.weights_root or config.output_dir / "weights"}
        servers.append(ServerSpec(nodes.url, config.ready_timeout, inference.server.port))
        count = gpus_of_a_server(inference) if on_cuda(inference.device, machine) else 0
        section = inference.with_values(values)
        add(server_name(nodes.rank), section, count, INFERENCE, key_variable="VLLM_API_KEY", server=servers[0])
    else:
        if trainer.recovery_interval is None and config.max_restarts:
            trainer = trainer.model_copy(update={"recovery_interval": config.recovery_interval})
        count = config.trainer_gpus if on_cuda(trainer.device, machine) else 0
        nodes_that_train, ranks = config.nodes - nodes.servers, config.trainer_ranks or count or 1
        module: tuple[str, ...] = (TRAINER,)
        if nodes_that_train * ranks > 1:
            # torchrun guesses by hostname which node hosts the store: set it explicitly. It is waited for as a server.
            seconds = f"{config.ready_timeout:.0f}"
            rdzv_conf = f"is_host={nodes.is_leader},join_timeout={seconds},read_timeout={seconds}"
            nnodes = str(nodes_that_train)
            rendezvous_args = ("--nnodes", nnodes, "--rdzv-id", "prime-rl", "--rdzv-conf", rdzv_conf)
            module = torchrun(ranks, config.rendezvous or "localhost:0", *rendezvous_args)
        log = "trainer" if nodes.is_leader else f"trainer-{nodes.rank}"
        add("trainer", trainer, count, *module, drain_children=len(module) > 1, log=log)
        if nodes.is_leader:
            client = {"client.base_url": [f"{url}/v1" for url in urls]} if urls else {}
            orchestrator = config.orchestrator.with_values(client)
            add("orchestrator", orchestrator, 0, ORCHESTRATOR, key_variable=orchestrator.client.api_key_var)
    files = {config_path(config, name): section for name, section in sections.items()}
    return Plan(tuple(processes), files, tuple(servers), config.output_dir)
