"""A deployment and its tenants on CPUs: real vLLM, FSDP2, two bundled environments, and kills."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import free_port
from prime_rl.monitor import read_status
from prime_rl.monitor.monitor import metrics_path, read_metrics
from prime_rl.orchestrator.audit import audit
from prime_rl.transport.commit import list_steps
from prime_rl.transport.weights import weights_manifest
from support.processes import REPOSITORY, Command, run_forked, until

pytestmark = pytest.mark.slow
FILES = REPOSITORY / "examples" / "tenants"
NO_KEY = {"VLLM_API_KEY": ""}  # each tenant gets one of its own


class Deployment:
    def __init__(self, directory: Path) -> None:
        self.directory, self.port = directory / "outputs", free_port()
        self.rl = self.start()

    def start(self) -> Command:
        words = ["tenants", "@", FILES / "deployment.toml", "--output-dir", self.directory]
        log = self.directory.parent / "rl.log"
        return Command("rl", *words, "--inference.server.port", self.port, log=log, env=NO_KEY)

    def tenant(self, name: str, steps: int) -> Command:
        """An orchestrator, whose server and trainer may still be starting."""
        file = FILES / ("bob.toml" if name == "bob" else "alice.toml")
        words = ["@", file, "--tenant.join", self.directory, "--tenant.name", name, "--max-steps", steps, "--no-eval"]
        words += ["--client.base-url", f"http://localhost:{self.port}", "--batch-size", 16, "--ckpt.interval", 3]
        return Command("orchestrator", *words, log=self.directory.parent / f"{name}.log", env=NO_KEY)

    def home(self, name: str) -> Path:
        return self.directory / "tenants" / name

    def reach(self, version: int, name: str, command: Command) -> None:
        """Wait until the trainer has committed a version."""
        reached = lambda: list_steps(self.home(name) / "weights")[-1:] >= [version]  # noqa: E731
        until(reached, f"version {version} of {name}", command, self.rl, seconds=300)

    def outcomes(self, name: str) -> set[str | None]:
        return {status.outcome for status in read_status(self.home(name)).values()}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    started = Deployment(tmp_path_factory.mktemp("tenants"))
    until(lambda: started.directory.is_dir(), "launcher", started.rl)
    yield started
    started.rl.close()


def test_two_tenants(deployment: Deployment) -> None:
    """Contract: each trains its own adapter on its own environment to its last step, also where its orchestrator is
    killed; every episode is accounted for; both have shares of trainer and engines."""
    steps = {"alice": 8, "bob": 4}
    with deployment.tenant("bob", 4) as bob:
        for version in (2, 4):
            with deployment.tenant("alice", 8) as alice:  # leaving the block kills it
                deployment.reach(version, "alice", alice)
        examined = run_forked("rl", "doctor", deployment.directory).stdout
        assert re.search("tenant alice .*of the trainer's time", examined), examined
        assert "holds a slot without an orchestrator" in examined, examined
        with deployment.tenant("alice", 8) as alice:
            alice.succeed(400)
        bob.succeed(400)
    hashes = set()
    for name, last in steps.items():
        home = deployment.home(name)
        assert not (home / "join.json").exists()
        assert deployment.outcomes(name) == {"finished"}
        outcomes, faults = audit(home)
        assert faults == []
        assert "trained" in {outcome for _, outcome, *_ in outcomes}
        assert {int(row["step"]) for row in read_metrics(metrics_path(home, "trainer"))} == {*range(last)}
        shares = [row["tenant/engine_share"] for row in read_metrics(metrics_path(home, "orchestrator"))]
        assert all(0 < share <= 1 for share in shares)
        hashes.add(weights_manifest(home / "weights" / f"step_{last}").hash)
        assert run_forked("rl", "doctor", home).returncode == 0
    assert len(hashes) == 2


def test_kills_and_interruptions(deployment: Deployment) -> None:
    """Contract: a killed trainer takes in its tenants again; one that is interrupted saves and gives its slot away;
    one whose deployment is interrupted ends in one line, and both go on by the same commands."""
    with deployment.tenant("dave", 200) as dave:
        with deployment.tenant("carol", 200) as carol:
            deployment.reach(2, "carol", carol)
            os.kill(read_status(deployment.directory)["trainer"].pid, signal.SIGKILL)
            deployment.reach(list_steps(deployment.home("carol") / "weights")[-1] + 3, "carol", carol)
            carol.process.send_signal(signal.SIGINT)
            carol.succeed(120)
        assert deployment.outcomes("carol") == {"stopped"}
        assert not (deployment.home("carol") / "join.json").exists()
        deployment.reach(2, "dave", dave)
        deployment.rl.process.send_signal(signal.SIGINT)
        assert deployment.rl.wait(120) == 130
        assert dave.wait(120) == 1
        saved = "error: the trainer has ended the run of dave: it was stopped; what is trained is saved, and the same"
        assert saved in dave.tail(1)
    last = list_steps(deployment.home("dave") / "weights")[-1]
    deployment.rl = deployment.start()
    until(lambda: read_status(deployment.directory).get("rl"), "launcher", deployment.rl)
    with deployment.tenant("dave", last + 2) as dave:
        dave.succeed(300)
    assert deployment.outcomes("dave") == {"finished"}
    assert audit(deployment.home("carol"))[1] == audit(deployment.home("dave"))[1] == []
