"""A run over several nodes: what each runs, what is refused, and what they see of each other."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_rl.config import ConfigError, RLConfig, parse
from prime_rl.launcher.nodes import Nodes, node_plan
from prime_rl.launcher.plan import HostResources
from prime_rl.launcher.supervise import RunOutcome

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
    assert ["is_host=True" in argv for argv in trainers] == [True, False]
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
        (["--node-rank", "0"], "need a rendezvous"),
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

    def pass_by(self, seconds: float, *those: Nodes) -> None:
        self.now += seconds
        for nodes in those:
            supervisor: Any = self
            nodes.tick(supervisor, self.lines.append)


@pytest.mark.parametrize(("choice", "asked", "outcome"), [("wait", [], "SUCCESS"), ("end", ["stop"], "FAILURE")])
def test_a_node_that_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str, asked: list[str], outcome: str
) -> None:
    """It is named once after 30 s, once it is back, and ends the run if so configured."""
    server, leader = (Nodes(config(tmp_path, rank, "--lost-node", choice)) for rank in (0, 1))
    seen = Seen(monkeypatch)
    seen.pass_by(3.0, server, leader)
    for _ in range(12):
        seen.pass_by(3.0, leader)
    (line,) = seen.lines
    assert line.startswith("node 0 (")
    assert "no sign of life for 33 s" in line
    assert seen.asked == asked
    assert leader.outcome(RunOutcome.SUCCESS).name == outcome
    seen.pass_by(3.0, server, leader)
    assert [text for text in seen.lines if "is back" in text] == seen.lines[-1:]


def test_the_leader_decides_how_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it drains the others that train drain as well, and servers go on; all end with its outcome."""
    server, leader, trainer = (Nodes(config(tmp_path, rank)) for rank in range(3))
    seen = Seen(monkeypatch)
    seen.is_draining = True
    seen.pass_by(3.0, leader)
    seen.is_draining = False
    seen.pass_by(0.0, server)
    assert seen.asked == []
    seen.pass_by(0.0, trainer)
    assert seen.asked == ["drain"]
    leader.beat(RunOutcome.INTERRUPTED.name)
    seen.pass_by(0.0, server, trainer)
    assert seen.asked[1:] == ["stop", "stop"]
    assert server.outcome(RunOutcome.SUCCESS) is RunOutcome.INTERRUPTED
