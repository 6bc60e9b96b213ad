"""Images and manifests: what is installed is the resolution, their commands and settings are ours, signals arrive."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from prime_rl.config import InferenceConfig, OrchestratorConfig, TrainerConfig
from prime_rl.config.base import BaseConfig
from prime_rl.config.loader import parse
from prime_rl.monitor import Status

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "locks").glob("*.txt"))
OVERLAYS = sorted((ROOT / "deploy" / "kubernetes" / "overlays").iterdir())
COMMANDS: dict[str, type[BaseConfig]] = {
    "inference": InferenceConfig, "orchestrator": OrchestratorConfig, "trainer": TrainerConfig,
}  # fmt: skip


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_a_lock_has_versions_and_hashes_alone(lock: Path) -> None:
    """No addresses and no paths: whoever builds an image chooses the index, and hashes say what may come from it."""
    head, *lines = lock.read_text().splitlines()
    assert head.startswith("# Written by scripts/export_locks.py")
    pin, digest = r"[a-z0-9-]+==[0-9a-z.+]+ \\", r"    --hash=sha256:[0-9a-f]{64}( \\)?"
    assert [line for line in lines if not re.fullmatch(f"{pin}|{digest}", line)] == []
    assert lock.stat().st_size < 1 << 20


def test_locks_are_the_resolution() -> None:
    """Without uv.lock, which is not committed, direct dependencies alone are compared, with what is installed."""
    if (ROOT / "uv.lock").exists() and shutil.which("uv") is not None:
        command = [sys.executable, ROOT / "scripts" / "export_locks.py", "--check"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    from importlib.metadata import PackageNotFoundError, version

    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["cpu"]]
    names = {re.split(r"[\[<>=! ;]", requirement)[0].lower() for requirement in wanted}
    pins = dict(re.findall(r"^(\S+)==(\S+) ", (ROOT / "locks" / "cpu.txt").read_text(), re.MULTILINE))
    assert names - pins.keys() == set()
    installed = {}
    for name in names:
        try:
            installed[name] = version(name).partition("+")[0]
        except PackageNotFoundError:  # of the other engine
            continue
    assert {name: pins[name] for name in installed} == installed


def test_the_images_differ_in_what_they_serve_with() -> None:
    """Both copy what exists and .dockerignore lets through; all but the lock and the compiler is the same."""
    cuda, cpu = ((ROOT / name).read_text() for name in ("Dockerfile", "Dockerfile.cpu"))

    def steps(text: str) -> list[str]:
        return [line for line in text.splitlines() if not line.startswith("#")]

    assert steps(cuda.replace("locks/cuda.txt", "locks/cpu.txt").replace("recommends g++ ", "recommends ")) == steps(
        cpu
    )
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in (line for line in steps(cuda) if line.startswith("COPY ") and "--from" not in line):
        for source in line.split()[1:-1]:
            assert (ROOT / source).exists()
            assert any(pattern.split("/")[0] == source.split("/")[0] for pattern in sent)


def rendered(overlay: Path) -> list[dict[str, Any]]:
    tool = next(
        (command for command in (["kustomize", "build"], ["kubectl", "kustomize"]) if shutil.which(command[0])), None
    )
    if tool is None:
        pytest.skip("neither kustomize nor kubectl is installed")
    text = subprocess.run([*tool, str(overlay)], check=True, capture_output=True, text=True, timeout=60).stdout
    return list(yaml.safe_load_all(text))


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_manifests_fit_the_schema(overlay: Path) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for resource in rendered(overlay):
        validator.validate(resource, "1.37", strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_a_run_on_kubernetes_fits_together(overlay: Path) -> None:
    """Options and files parse; all write one run on the shared volume; the orchestrator is told where servers are; no
    pod runs as root or holds a key; SIGTERM leaves time."""
    resources = rendered(overlay)
    of = {(resource["kind"], resource["metadata"]["name"]): resource for resource in resources}
    data = of["ConfigMap", "run"]["data"]
    configs: dict[str, Any] = {}
    for resource in resources:
        if resource["kind"] not in ("StatefulSet", "Job"):
            continue
        pod = resource["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        variables = {"PRIME_OUTPUT_DIR": data["output-dir"], "PRIME_REPLICA": "0"}
        command, *arguments = [arg.replace("$(PRIME_OUTPUT_DIR)", data["output-dir"]) for arg in container["args"]]
        at = arguments.index("@") + 1
        arguments[at] = str(overlay / Path(arguments[at]).relative_to("/config"))
        configs[command] = parse(COMMANDS[command], arguments, variables)
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert mounts["/outputs"] == "outputs"
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["resources"]["limits"]
        assert all("value" not in variable for variable in container["env"])
        assert pod["terminationGracePeriodSeconds"] >= 60
        assert not pod["enableServiceLinks"]
        assert container["image"].startswith("prime-rl:")
        assert "command" not in container  # the image has a first process
    assert configs.keys() == COMMANDS.keys()
    assert "Secret" not in {kind for kind, _ in of}
    assert {str(config.output_dir) for config in configs.values()} == {data["output-dir"]}
    assert len({config.model.name for config in configs.values()}) == 1
    assert configs["trainer"].recover
    assert configs["trainer"].recovery_interval == "auto"  # else an evicted trainer starts over
    assert configs["orchestrator"].recover
    assert configs["orchestrator"].max_steps == configs["trainer"].max_steps
    service, servers = of["Service", "inference"]["spec"], of["StatefulSet", "inference"]["spec"]
    assert servers["serviceName"] == "inference"
    assert [port["port"] for port in service["ports"]] == [8000]
    addresses = [f"http://inference-{number}.inference:8000" for number in range(servers["replicas"])]
    assert configs["orchestrator"].client.base_urls == addresses
    assert configs["inference"].server.port == 8000
    assert servers["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/health"


ENTRY = [sys.executable, str(ROOT / "scripts" / "container_entry.py")]


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("exit 3", 3),
        ("kill -KILL $$", 137),
        (
            "trap 'echo asked; exit 0' TERM; echo ready; sleep 60 > /dev/null & wait",
            143,
        ),  # it drained, and has not completed
        ("trap 'exit 7' TERM; echo ready; sleep 60 > /dev/null & wait", 7),
    ],
)
def test_the_first_process_of_a_container(script: str, status: int) -> None:
    """Signals reach the command, and its status comes back; what was asked to stop has not ended well."""
    with subprocess.Popen([*ENTRY, "bash", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if "ready" in script:
            process.stdout.readline()
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == status
        assert ("asked" in process.stdout.read()) == ("asked" in script)


def test_no_such_command() -> None:
    done = subprocess.run([*ENTRY, "no-such-command"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 127
    assert "no-such-command" in done.stderr


def test_health_is_that_of_this_container(tmp_path: Path) -> None:
    """A process that reports is well, one that halts is not; others' reports say nothing, and none is no health."""

    def health() -> tuple[int, str]:
        command = [sys.executable, ROOT / "scripts" / "container_health.py"]
        environment = {**os.environ, "PRIME_OUTPUT_DIR": str(tmp_path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stderr

    assert health()[0] == 1
    run = tmp_path / "a-run"
    status = Status(run, "trainer")
    status.phase("training")
    assert health() == (0, "")
    status.close()
    path = run / "status" / "trainer.json"
    path.write_text(re.sub(r'"heartbeat": [\d.]+', f'"heartbeat": {time.time() - 100}', path.read_text()))
    assert "trainer: has given no sign of life" in health()[1]
    path.write_text(re.sub(r'"host": "[^"]+"', '"host": "another/00000000"', path.read_text()))
    assert "no process of this container" in health()[1]
