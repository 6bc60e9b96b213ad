"""`rl --slurm` on a real SLURM: slurmctld and two nodes on this machine."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import free_port
from prime_rl.monitor import read_status
from prime_rl.transport.commit import list_steps
from prime_rl.transport.weights import verify_weights
from support.processes import until
from support.slurm_cluster import NODES, SlurmCluster, missing, slurm_cluster

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() != "", reason=f"SLURM: {missing()}")]
SECONDS = 250.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster(free_port) as made:
        yield made


def submit(cluster: SlurmCluster, run: Path, nodes: int, *more: str) -> str:
    """Submit a run on CPUs, and return the number of the job."""
    options = [f"--output-dir={run}", f"--inference.server.port={free_port()}", f"--slurm.nodes={nodes}", *more]
    small = ["--orchestrator.batch-size=32", "--no-orchestrator.eval"]
    arguments = ["@", "examples/reverse_text/cpu.toml", *small, *options]
    said = cluster.run(sys.executable, "-m", "prime_rl.entrypoints.rl", *arguments)
    return said.split("Submitted batch job ")[1].split()[0]


def test_a_lost_node(cluster, tmp_path):
    """Contract: on two nodes, one serves and one trains; where one is lost the job is queued again, and goes on to the
    end from what was saved."""
    run = tmp_path / "run"
    job = submit(cluster, run, 2, "--max-steps=12")
    until(lambda: list_steps(run / "recovery"), "a recovery checkpoint", seconds=SECONDS)
    begun = max(list_steps(run / "recovery"))
    cluster.kill_node(NODES[1])
    until(lambda: cluster.state(job).endswith(" 1"), "the job to be queued again", seconds=SECONDS)
    cluster.start_node(NODES[1])
    until(lambda: cluster.state(job) == "COMPLETED 1", "the end of the job", seconds=SECONDS)
    verify_weights(run / "weights" / "step_12")
    log = (run / "logs" / "trainer.log").read_text()
    assert "recovering from" in log
    assert "starting at step 0" not in log.split("recovering from")[1]
    assert begun < 12
    assert (run / "logs" / f"slurm-{job}.rl.{NODES[0]}.log").exists()
    assert NODES[1] in (run / "logs" / f"slurm-{job}.log").read_text()


@pytest.mark.parametrize("nodes", [1, 2])
def test_scancel(cluster, tmp_path, nodes):
    """Contract: the current step is finished and saved."""
    run = tmp_path / "run"
    job = submit(cluster, run, nodes, "--max-steps=1000")
    until(lambda: max(list_steps(run / "weights"), default=0) >= 2, "version 2", seconds=SECONDS)
    cluster.run("scancel", job)
    until(lambda: cluster.state(job) == "CANCELLED 0", "the end of the job", seconds=SECONDS)
    until(lambda: cluster.run("squeue", "--noheader", "--jobs", job) == "", "its processes", seconds=SECONDS)
    last = max(list_steps(run / "weights"))
    assert last in list_steps(run / "recovery")
    assert read_status(run)["trainer"].outcome == "stopped"
