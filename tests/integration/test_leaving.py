"""Two real servers: one joins a run that is under way, the other one leaves it."""

import signal
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from conftest import free_port
from prime_rl.transport.commit import list_steps
from prime_rl.transport.weights import verify_weights
from support.ledgers import conserved
from support.processes import Command, until, wait_for_all

STEPS, TIMEOUT = 24, 300.0
MODEL = "assets/tiny-reverse"


@pytest.mark.slow
def test_a_server_joins_and_another_one_leaves(tmp_path: Path) -> None:
    """The orchestrator is started before any server. What the leaving one has in flight is not made again; the run ends on the other alone."""
    run = tmp_path / "run"
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    shared = ["--output-dir", run, "--model.name", MODEL, "--max-steps", STEPS]

    def serve(number: int) -> Command:
        return Command(
            "inference", "--output-dir", tmp_path / f"server{number}", "--model.name", MODEL, "--weights-root", run / "weights",
            "--server.port", ports[number], "--cpu.fork-engine", "--max-model-len", 256,
            log=tmp_path / f"server{number}.log",
        )  # fmt: skip

    with ExitStack() as stack:
        orchestrator = stack.enter_context(
            Command(
                "orchestrator", *shared, "--client.base-url", *urls, "--batch-size", 16, "--rollouts-per-example", 4,
                "--seq-len", 256, "--sampling.max-tokens", 24, "--no-filter-zero-advantage",
                "--environment.id", "reverse-text", log=tmp_path / "orchestrator.log",
            )
        )  # fmt: skip
        trainer = stack.enter_context(
            Command("trainer", *shared, "--seq-len", 256, "--device", "cpu", log=tmp_path / "trainer.log")
        )

        def said(text: str) -> bool:
            return text in orchestrator.log.read_text(errors="replace")

        until(lambda: said(f"waiting for an inference server at {urls[0]}"), "wait for a server", orchestrator)
        first = stack.enter_context(serve(0))
        until(lambda: 1 in list_steps(run / "rollouts"), "second batch", orchestrator, trainer, first)
        trainer.process.send_signal(signal.SIGSTOP)  # the run waits for it until the second server is there
        second = stack.enter_context(serve(1))
        until(lambda: said(f"{urls[1]} serves version"), "second server", orchestrator, first, second)
        trainer.process.send_signal(signal.SIGCONT)
        until(lambda: len(list_steps(run / "rollouts")) >= 4, "fourth batch", orchestrator, trainer)
        assert httpx.post(f"{urls[0]}/leave", timeout=10).json() == {"leaving": True}
        assert httpx.get(f"{urls[0]}/weights", timeout=10).json()["leaving"] is True
        until(
            lambda: said(f"{urls[0]} has left and can be stopped"),
            "end of what the first serves",
            orchestrator,
            trainer,
            first,
        )
        first.process.terminate()
        first.wait(60)
        wait_for_all([orchestrator, trainer], TIMEOUT)
        served = httpx.get(f"{urls[1]}/weights", timeout=10).json()
        assert (served["version"], served["hash"]) == (STEPS, verify_weights(run / "weights" / f"step_{STEPS}").hash)
    assert list_steps(run / "rollouts") == list(range(STEPS))
    assert not {"stale", "errored", "timeout"} & conserved(run).dropped.keys()
