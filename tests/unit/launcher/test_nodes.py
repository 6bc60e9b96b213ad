"""A run over several nodes: what each runs, what is refused, and what they see of each other."""

import json
import os
import socket
import threading
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_rl.config import ConfigError, RLConfig, parse
from prime_rl.errors import UserError
from prime_rl.launcher.nodes import Nodes, node_plan
from prime_rl.launcher.plan import HostResources
from prime_rl.launcher.supervise import RunOutcome
from prime_rl.processes import identify
from support import partners

partner = partners.partner

RUN = ["--inference.max-model-len", "512", "--orchestrator.environment.id", "x", "--model.name", "m"]
WORDS = [*RUN, "--device", "cpu", "--nodes", "3"]
NO_GPUS = HostResources([], 8, {})


def config(tmp_path: Path, rank: int, *words: str) -> RLConfig:
    own = ["--output-dir", str(tmp_path), "--node-rank", str(rank), "--rendezvous", "b:29500"]
    return parse(RLConfig, [*WORDS, *own, *words], {})


def test_what_each_node_runs(tmp_path: Path) -> None:
    """One serves; two train and meet at the first of them, which has the orchestrator, too."""
    plans = []
    for rank in range(3):
        run = config(tmp_path, rank)
        plans.append(node_plan(run, NO_GPUS, Nodes(run), ["http://a:8000"]))
    names = [[process.name for process in plan.processes] for plan in plans]
    assert names == [["inference"], ["trainer", "orchestrator"], ["trainer"]]
    trainers = [plan.processes[0].argv for plan in plans[1:]]
    assert all("--nnodes 2" in " ".join(argv) and "b:29500" in argv for argv in trainers)
    assert ["is_host=True" in " ".join(argv) for argv in trainers] == [True, False]
    (orchestrator,) = [section for path, section in plans[1].configs.items() if path.stem == "orchestrator"]
    assert orchestrator.client.base_urls == ["http://a:8000/v1"]  # type: ignore[attr-defined]
    assert len({process.log for plan in plans for process in plan.processes}) == 4


def test_one_node_that_trains_needs_no_rendezvous(tmp_path: Path) -> None:
    run = parse(RLConfig, [*WORDS[:-1], "2", "--node-rank", "1", "--output-dir", str(tmp_path)], {})
    assert "torch.distributed.run" not in node_plan(run, NO_GPUS, Nodes(run), []).processes[0].argv


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--node-rank", "3"], "the ranks of 3 nodes are 0 to 2"),
        ([], "each of several nodes is given its node_rank"),
        (["--node-rank", "1"], "need a rendezvous"),
        (["--node-rank", "0", "--inference-nodes", "3"], "leaves none of 3 nodes to train on"),
        (["--node-rank", "0", "--nodes", "1"], "node_rank is for several nodes"),
        (["--node-rank", "0", "--rendezvous", "b:1", "--bench"], "bench is for one node"),
    ],
)
def test_what_cannot_be_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(RLConfig, [*WORDS, *words], {})


class Seen:
    """A supervisor that only notes what it is asked, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.lines: list[str] = []
        self.is_draining, self.now = False, 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        monkeypatch.setattr("prime_rl.launcher.nodes.time", clock)

    def stop(self) -> None:
        self.asked.append("stop")

    def drain(self) -> None:
        self.asked.append("drain")

    def pass_by(self, seconds: float, *those: Nodes, alive: tuple[Nodes, ...] = ()) -> None:
        """Let the nodes that are `alive` publish, and those look."""
        self.now += seconds
        for nodes in alive:
            nodes.publish()
        for nodes in those:
            supervisor: Any = self
            nodes.tick(supervisor, self.lines.append)


@pytest.mark.parametrize(("choice", "asked", "outcome"), [("wait", [], "SUCCESS"), ("end", ["stop"], "FAILURE")])
def test_a_node_that_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str, asked: list[str], outcome: str
) -> None:
    """It is named once after 30 s, once it is back, and ends the run if so configured. A record of an earlier run is
    none of a node."""
    server, leader, trainer = (Nodes(config(tmp_path, rank, "--lost-node", choice)) for rank in range(3))
    trainer.publish(RunOutcome.FAILURE.name)
    seen = Seen(monkeypatch)
    for _ in range(2):
        seen.pass_by(3.0, leader, alive=(server,))
    for _ in range(12):
        seen.pass_by(3.0, leader)
    (line,) = seen.lines
    assert line.startswith("node 0 (")
    assert "no sign of life for 33 s" in line
    assert seen.asked == asked
    assert leader.outcome(RunOutcome.SUCCESS).name == outcome
    if not asked:
        seen.pass_by(3.0, leader, alive=(server,))
        assert "is back" in seen.lines[-1]
        server.publish(RunOutcome.INTERRUPTED.name)
        seen.pass_by(3.0, leader)
        assert "has ended (interrupted): run the same command there again" in seen.lines[-1]


def test_the_leader_decides_how_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it drains the others that train drain as well, and servers go on; all end with its outcome."""
    server, leader, trainer = (Nodes(config(tmp_path, rank)) for rank in range(3))
    seen = Seen(monkeypatch)
    for _ in range(2):
        seen.pass_by(3.0, server, trainer, alive=(leader,))
    seen.is_draining = True
    seen.pass_by(3.0, leader)
    seen.is_draining = False
    seen.pass_by(0.0, server)
    assert seen.asked == []
    seen.pass_by(0.0, trainer)
    assert seen.asked == ["drain"]
    leader.outcome(RunOutcome.INTERRUPTED)
    seen.pass_by(0.0, server, trainer)
    assert seen.asked[1:] == ["stop", "stop"]
    assert server.outcome(RunOutcome.SUCCESS) is RunOutcome.INTERRUPTED
    assert len(seen.lines) == 2


def test_a_server_that_others_could_not_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(UserError, match="^set VLLM_API_KEY, the same on all nodes"), Nodes(config(tmp_path, 0)):
        pytest.fail("started")
    everywhere = Nodes(config(tmp_path, 0, "--inference.server.host", "0.0.0.0"))
    assert everywhere.url == f"http://{socket.gethostname()}:8000"


def test_a_node_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError), Nodes(config(tmp_path, 1)):
        raise RuntimeError
    assert '"FAILURE"' in (tmp_path / "nodes" / "1.json").read_text()


def test_a_rank_is_run_once(tmp_path: Path, partner: int) -> None:
    """By a process that is alive; what a dead one has left is taken over."""
    with Nodes(config(tmp_path, 1)):
        pass
    file = tmp_path / "nodes" / "1.json"
    record = json.loads(file.read_text()) | {"state": "running"}
    file.write_text(json.dumps(record | {"process": asdict(identify(partner))}))
    with pytest.raises(UserError, match=f"^node 1 is run by pid {partner} on "), Nodes(config(tmp_path, 1)):
        pytest.fail("started")
    file.write_text(json.dumps(record | {"process": {"pid": partner, "started": 1}}))
    with Nodes(config(tmp_path, 1)):
        assert json.loads(file.read_text())["process"]["pid"] == os.getpid()


def test_a_leader_that_refuses(tmp_path: Path) -> None:
    """Contract: its word is heard by nodes that waited for it."""
    server, leader = (Nodes(config(tmp_path, rank)) for rank in (0, 1))
    said = list[str]()

    def say(line: str) -> None:
        said.append(line)
        threading.Timer(0.5, lambda: leader.publish(RunOutcome.FAILURE.name)).start()

    (record,) = server.await_nodes(range(1, 2), say)
    assert record.state == "FAILURE"
