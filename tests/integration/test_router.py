"""A run whose episodes go through a router: with a stand-in, and with vllm-router where that is installed."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from conftest import free_port
from prime_rl.transport.commit import list_steps
from prime_rl.transport.weights import verify_weights
from support.processes import Command, until, wait_for_all

STEPS, TIMEOUT = 4, 300.0
MODEL = "assets/tiny-reverse"


@contextmanager
def vllm_router(port: int, urls: Sequence[str], log: Path) -> Iterator[None]:
    command = ["vllm-router", "--port", str(port), "--policy", "round_robin", "--prometheus-port", str(free_port())]
    with log.open("wb") as output:
        process = subprocess.Popen([*command, "--worker-urls", *urls], stdout=output, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.kill()
            process.wait(30)


@pytest.mark.slow
@pytest.mark.parametrize("router", ["stand-in", "vllm-router"])
def test_a_run_through_a_router(tmp_path: Path, router: str) -> None:
    """Contract: episodes reach all servers by the router, weights and proofs each of them by its own address; all serve the last version."""
    if router == "vllm-router" and shutil.which(router) is None:
        pytest.skip("vllm-router is not on the path")
    front, *ports = (free_port() for _ in range(3))
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    shared = ["--output-dir", tmp_path / "run", "--model.name", MODEL, "--max-steps", STEPS, "--seq-len", 256]
    with ExitStack() as stack:

        def start(name: str, *arguments: object, module: str | None = None) -> Command:
            env = {"PYTHONPATH": os.pathsep.join(["tests", os.environ.get("PYTHONPATH", "")])}
            return stack.enter_context(Command(name, *arguments, log=tmp_path / f"{name}.log", module=module, env=env))

        for port in ports:
            start(f"engine-{port}", "--port", port, "--model", MODEL, "--policy", module="support.fake_engine")
        if router == "vllm-router":
            stack.enter_context(vllm_router(front, urls, tmp_path / "router.log"))
        else:
            start("router", "--port", front, *urls, module="support.router")
        orchestrator = start(
            "orchestrator", *shared, "--client.base-url", f"http://127.0.0.1:{front}", "--client.admin-base-url", *urls,
            "--batch-size", 16, "--rollouts-per-example", 4, "--sampling.max-tokens", 24, "--no-filter-zero-advantage",
            "--environment.id", "reverse-text",
        )  # fmt: skip
        trainer = start("trainer", *shared, "--device", "cpu")
        until(lambda: 1 in list_steps(tmp_path / "run" / "rollouts"), "second batch", orchestrator, trainer)
        wait_for_all([orchestrator, trainer], TIMEOUT)
        newest = verify_weights(tmp_path / "run" / "weights" / f"step_{STEPS}").hash
        assert [httpx.get(f"{url}/weights", timeout=10).json()["hash"] for url in urls] == [newest] * 2
