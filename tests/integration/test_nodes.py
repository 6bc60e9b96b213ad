"""A run over two nodes, each a network namespace of this machine, with real vLLM. One of them is killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl.monitor import read_metrics
from prime_rl.wait import wait

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]
ADDRESSES = "10.77.0.1", "10.77.0.2"
KEY = {"VLLM_API_KEY": "of-this-test"}


def ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True, timeout=30).returncode == 0


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    names = [f"prime{os.getpid()}{letter}" for letter in "ab"]
    links = [f"v{name[5:]}" for name in names]
    if not all(ip("netns", "add", name) for name in names):
        pytest.skip("network namespaces need root and the command `ip`")
    try:
        assert ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            assert ip("link", "set", link, "netns", name)
            assert ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            assert ip("-n", name, "link", "set", "lo", "up")
            assert ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def start(namespace: str, rank: int, output_dir: Path, *words: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "prime_rl.entrypoints.rl", "@", "examples/reverse_text/cpu.toml", "--nodes", "2"]
    command += ["--node-rank", str(rank), "--output-dir", str(output_dir), "--max-steps", "12", *words]
    with (output_dir.parent / f"{rank}.log").open("ab") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", namespace, *command], cwd=REPOSITORY, env=os.environ | KEY, stdout=log, stderr=log
        )


def test_a_node_is_killed_and_comes_back(namespaces: list[str], tmp_path: Path) -> None:
    """The other one names it, waits, and the run ends with all its steps on both."""
    run, host = tmp_path / "run", ("--inference.server.host", ADDRESSES[0])
    log = tmp_path / "1.log"
    nodes = [start(namespaces[0], 0, run, *host), start(namespaces[1], 1, run)]
    try:
        metrics = run / "metrics" / "trainer.jsonl"
        wait(lambda: len(read_metrics(metrics)) > 2, subject="three steps", owner="the run", seconds=300)
        nodes[0].send_signal(signal.SIGKILL)
        lost = "node 0 .* has given no sign of life"
        wait(lambda: lost.split(" .* ")[1] in log.read_text(), subject="the news", owner="node 1", seconds=120)
        nodes[0] = start(namespaces[0], 0, run, *host)
        assert [node.wait(timeout=300) for node in reversed(nodes)] == [0, 0], log.read_text()[-3000:]
        assert "is back" in log.read_text()
        assert [int(row["step"]) for row in read_metrics(metrics)][-1] == 11
    finally:
        for node in nodes:
            node.kill()
