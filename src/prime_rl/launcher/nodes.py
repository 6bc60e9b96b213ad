"""Several nodes: `rl` starts on each with the same command and its own `--node-rank`, and supervises its part.

Which part `NodeRole` says. The leader, the first node that trains, prepares the run directory, runs the orchestrator
and decides how the run ends. Nodes meet in `status/rl-RANK.json` of the shared run directory. Clocks are not compared:
a node whose status no longer changes is considered lost.
"""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from prime_rl.config import RLConfig
from prime_rl.errors import UserError, user_errors
from prime_rl.launcher.plan import NodeRole, launcher_name
from prime_rl.launcher.rundir import forget_status, refuse_running
from prime_rl.launcher.supervise import RunOutcome, Supervisor
from prime_rl.monitor.status import ProcessStatus, Status, read_record, say_for, status_path
from prime_rl.wait import wait

_LOST_SECONDS = 30.0  # without a change of its status
_DRAINING, _RUNNING = "draining", "running"
_OUTCOMES = {"finished": RunOutcome.SUCCESS, "failed": RunOutcome.FAILURE, "stopped": RunOutcome.INTERRUPTED}


@dataclass
class _Peer:
    """Another node as it was last seen. A status that was there at the first look may be of an earlier run: the node is
    `live` once this node has seen it appear or change."""

    status: ProcessStatus
    changed: float
    live: bool = False
    is_lost: bool = False


class Nodes:
    """One node's view of the run. Within a `with` block its status is kept fresh for the others."""

    def __init__(self, config: RLConfig) -> None:
        self._config, self.role = config, NodeRole.of(config)
        self._name = launcher_name(self.role.rank)
        self._peers: dict[int, _Peer | None] = {}  # None: had no status yet
        self._status: Status | None = None
        self._drains = False
        self._decision: RunOutcome | None = None  # how the run has ended, by another node

    @property
    def url(self) -> str:
        """Where other nodes reach this node's server; empty for a node that trains."""
        if self._config.inference is None or not self.role.serves:
            return ""
        server = self._config.inference.server
        host = socket.gethostname() if server.host in (None, "0.0.0.0", "::") else server.host
        return server.with_values({"host": host}).url

    def __enter__(self) -> Self:
        """Raises UserError: other nodes could not reach this node's server, another `rl` has this rank, or nothing can
        be written."""
        inference = self._config.inference if self.role.serves else None
        key = inference is None or inference.server.host or inference.api_key or os.environ.get("VLLM_API_KEY")
        if not key:  # it would listen on loopback
            raise UserError("set VLLM_API_KEY, the same on all nodes: other hosts ask this node's server")
        refuse_running(self._config.output_dir, {self._name})
        with user_errors(f"cannot write in {self._config.output_dir}", OSError):
            self._status = Status(self._config.output_dir, self._name, self.url)
        self._status.phase(_RUNNING)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._status is not None:
            self.end(RunOutcome.FAILURE)

    def end(self, own: RunOutcome) -> RunOutcome:
        """Publish the run's outcome, the leader's or else `own`, as this node's last word; return it."""
        outcome = self._decision or own
        word = next(word for word, named in _OUTCOMES.items() if named is outcome)
        if self._status is not None:
            self._status.done(word)
            self._status = None
        else:
            forget_status(self._config.output_dir, self._name)
            say_for(self._config.output_dir, self._name, word)
        return outcome

    @property
    def has_ended(self) -> bool:
        """Whether another node has decided how the run ends."""
        return self._decision is not None

    def await_others(self, say: Callable[[str], None]) -> list[str]:
        """Return the URLs of all servers: the leader waits until every other node is live, those wait for the leader
        alone. If one of them ends meanwhile, the run has ended. Raises WaitTimeout after `ready_timeout` seconds."""
        others = [rank for rank in range(self._config.nodes) if rank != self.role.rank]
        ranks = others if self.role.leads else [self.role.leader]
        names = f"node{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        say(f"waiting for {names}: start the same command there, with its --node-rank")

        def live() -> list[ProcessStatus] | None:
            peers = map(self._look, ranks)
            statuses = [peer.status for peer in peers if peer is not None and peer.live]
            ended = [status for status in statuses if status.outcome]
            return ended[:1] or (statuses if len(statuses) == len(ranks) else None)

        subject, seconds = f"status of {names}", self._config.ready_timeout
        statuses = wait(live, subject=subject, owner="`rl` there", seconds=seconds)
        if outcome := statuses[0].outcome:
            say(f"{statuses[0].process} has ended the run")
            self._decision = _OUTCOMES[outcome]
        return [status.url for status in statuses if status.url]

    def tick(self, supervisor: Supervisor, say: Callable[[str], None]) -> None:
        """Publish that this node drains, and react to the others: drain or stop with the leader, report those that are
        lost or back, and fail the run if `lost_node` is "end". Call periodically."""
        if supervisor.is_draining and self._status is not None and not self._drains:
            self._drains = True
            self._status.phase(_DRAINING)
        for rank in range(self._config.nodes):
            peer = None if rank == self.role.rank else self._look(rank)
            if peer is None or not peer.live or self.has_ended:
                continue
            status, silence = peer.status, time.monotonic() - peer.changed
            if rank == self.role.leader and status.outcome:
                self._decision = _OUTCOMES[status.outcome]
                say(f"node {rank}, which leads, has ended the run")
                supervisor.stop()
            elif status.outcome in ("failed", "stopped") or (status.outcome is None and silence > _LOST_SECONDS):
                if not peer.is_lost:
                    silent = f"has given no sign of life for {silence:.0f} s"
                    what = f"has ended ({status.outcome})" if status.outcome else silent
                    is_fatal = self._config.lost_node == "end"
                    then = "ending the run" if is_fatal else "run the same command there again"
                    say(f"node {rank} ({status.host}) {what}: {then}")
                    if is_fatal:
                        self._decision = RunOutcome.FAILURE
                        supervisor.stop()
                peer.is_lost = True
            else:
                if peer.is_lost:
                    say(f"node {rank} ({status.host}) is back")
                peer.is_lost = False
                if rank == self.role.leader and status.phase == _DRAINING and self.role.trains:
                    supervisor.drain()  # not where only servers are, which are needed until the end

    def _look(self, rank: int) -> _Peer | None:
        status = read_record(ProcessStatus, status_path(self._config.output_dir, launcher_name(rank)))
        known = self._peers.get(rank)
        if status is None:
            return self._peers.setdefault(rank, None)
        if known is None:
            known = self._peers[rank] = _Peer(status, time.monotonic(), live=rank in self._peers)
        elif known.status != status:
            known.status, known.changed, known.live = status, time.monotonic(), True
        return known
