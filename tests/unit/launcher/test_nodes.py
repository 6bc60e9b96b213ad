"""A run over several nodes: what each runs, what is refused, and what they see of each other."""

import os
import socket
import threading
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_rl.config import ConfigError, RLConfig, parse
from prime_rl.errors import UserError
from prime_rl.launcher.nodes import Nodes
from prime_rl.launcher.plan import HostResources, make_plan
from prime_rl.launcher.supervise import RunOutcome
from prime_rl.monitor.status import new_status, read_status, status_path, write_record
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
        plans.append(make_plan(run, NO_GPUS, ["http://a:8000"]))
    names = [[process.name for process in plan.processes] for plan in plans]
    assert names == [["inference"], ["trainer", "orchestrator"], ["trainer"]]
    trainers = [plan.processes[0].argv for plan in plans[1:]]
    assert all("--nnodes 2" in " ".join(argv) and "b:29500" in argv for argv in trainers)
    assert ["is_host=True" in " ".join(argv) for argv in trainers] == [True, False]
    (orchestrator,) = [section for path, section in plans[1].configs.items() if path.stem == "orchestrator"]
    assert orchestrator.client.base_urls == ["http://a:8000/v1"]  # type: ignore[attr-defined]
    assert len({process.log for plan in plans for process in plan.processes}) == 4
    assert len({process.argv[-1] for plan in plans for process in plan.processes}) == 4  # files of their own


def test_one_node_that_trains_needs_no_rendezvous(tmp_path: Path) -> None:
    run = parse(RLConfig, [*WORDS[:-1], "2", "--node-rank", "1", "--output-dir", str(tmp_path)], {})
    assert "torch.distributed.run" not in make_plan(run, NO_GPUS).processes[0].argv


def test_each_node_has_gpus_of_its_own(tmp_path: Path) -> None:
    """Its server gets the first ones and one server a GPU, its trainer the first ones, too. Too few are counted."""
    words = ["--trainer-gpus", "2", "--device", "cuda"]
    plans = [make_plan(config(tmp_path, rank, *words), HostResources(list("01"), 64, {}, 80.0, 1.0)) for rank in (0, 1)]
    placed = [[(process.name, process.gpus) for process in plan.processes] for plan in plans]
    assert placed == [[("inference", ("0",))], [("trainer", ("0", "1")), ("orchestrator", ())]]
    with pytest.raises(UserError, match=r"^node 2 needs 2 GPUs \(0 for inference, 2 for trainer\), but 1 visible"):
        make_plan(config(tmp_path, 2, *words), HostResources(["0"], 8, {}))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--node-rank", "3"], "the ranks of 3 nodes are 0 to 2"),
        ([], "each of several nodes is given its node_rank"),
        (["--node-rank", "1"], "need a rendezvous"),
        (["--node-rank", "1", "--rendezvous", "b"], "rendezvous b: give HOST:PORT"),
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

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.root = root
        self.asked: list[str] = []
        self.lines: list[str] = []
        self.is_draining, self.now = False, 1000.0
        monkeypatch.setattr("prime_rl.launcher.nodes.time", SimpleNamespace(monotonic=lambda: self.now))

    def stop(self) -> None:
        self.asked.append("stop")

    def drain(self) -> None:
        self.asked.append("drain")

    def publish(self, rank: int, **fields: Any) -> None:
        self.now += 1.0
        path = status_path(self.root, f"rl-{rank}")
        path.parent.mkdir(exist_ok=True)
        write_record(path, replace(new_status(f"rl-{rank}"), heartbeat=self.now, **fields))

    def look(self, *those: Nodes) -> None:
        self.now += 3.0
        for nodes in those:
            supervisor: Any = self
            nodes.tick(supervisor, self.lines.append)


@pytest.mark.parametrize(("choice", "asked", "outcome"), [("wait", [], "SUCCESS"), ("end", ["stop"], "FAILURE")])
def test_a_node_that_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str, asked: list[str], outcome: str
) -> None:
    """It is named once after 30 s, once it is back, and ends the run if so configured. A status of an earlier run is
    none of a node."""
    seen, leader = Seen(monkeypatch, tmp_path), Nodes(config(tmp_path, 1, "--lost-node", choice))
    seen.publish(2, outcome="failed")
    for _ in range(2):
        seen.publish(0)
        seen.look(leader)
    for _ in range(12):
        seen.look(leader)
    (line,) = seen.lines
    assert line.startswith("node 0 (")
    assert "no sign of life for 33 s" in line
    if choice == "wait":
        seen.publish(0)
        seen.look(leader)
        assert "is back" in seen.lines[-1]
        seen.publish(0, outcome="stopped")
        seen.look(leader)
        assert "has ended (stopped): run the same command there again" in seen.lines[-1]
    assert seen.asked == asked
    assert leader.end(RunOutcome.SUCCESS).name == outcome


def test_the_leader_decides_how_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it drains the others that train drain as well, and servers go on; all end with its outcome."""
    server, leader, trainer = (Nodes(config(tmp_path, rank)) for rank in range(3))
    seen = Seen(monkeypatch, tmp_path)
    seen.look(server, trainer)
    with leader:
        seen.look(server, trainer)
        seen.is_draining = True
        seen.look(leader)
        seen.is_draining = False
        seen.look(server)
        assert seen.asked == []
        seen.look(trainer)
        assert seen.asked == ["drain"]
        leader.end(RunOutcome.INTERRUPTED)
    seen.look(server, trainer)
    assert seen.asked[1:] == ["stop", "stop"]
    assert server.end(RunOutcome.SUCCESS) is RunOutcome.INTERRUPTED
    assert len(seen.lines) == 2


def test_a_server_that_others_could_not_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(UserError, match="^set VLLM_API_KEY, the same on all nodes"), Nodes(config(tmp_path, 0)):
        pytest.fail("started")
    everywhere = Nodes(config(tmp_path, 0, "--inference.server.host", "0.0.0.0"))
    assert everywhere.url == f"http://{socket.gethostname()}:8000"
    with everywhere:
        assert read_status(tmp_path)["rl-0"].url == everywhere.url


def test_a_node_that_fails_says_so(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Nodes(config(tmp_path, 1)):
        raise RuntimeError
    assert read_status(tmp_path)["rl-1"].outcome == "failed"


def test_a_rank_is_run_once(tmp_path: Path, partner: int) -> None:
    """By a process that is alive; what a dead one has left is taken over."""
    path = status_path(tmp_path, "rl-1")
    path.parent.mkdir()
    write_record(path, replace(new_status("rl-1"), **asdict(identify(partner))))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=rf"^`rl-1` \(pid {partner} on .* is running in"), Nodes(config(tmp_path, 1)):
        pytest.fail("started")
    write_record(path, replace(new_status("rl-1"), pid=partner, started=1))
    with Nodes(config(tmp_path, 1)):
        assert read_status(tmp_path)["rl-1"].pid == os.getpid()


def test_a_leader_that_refuses(tmp_path: Path) -> None:
    """Contract: its word is heard by nodes that waited for it."""
    server, leader = (Nodes(config(tmp_path, rank, "--ready-timeout", "20")) for rank in (0, 1))
    (tmp_path / "status").mkdir()
    said = list[str]()

    def say(line: str) -> None:
        said.append(line)
        threading.Timer(0.5, lambda: leader.end(RunOutcome.FAILURE)).start()

    server.await_others(say)
    assert server.has_ended
    assert server.end(RunOutcome.SUCCESS) is RunOutcome.FAILURE
