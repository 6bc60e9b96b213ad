"""Orchestrator and trainer as processes of their own against one real server: the loop, started by hand."""

import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from faults import audit
from prime_rl.monitor import read_metrics
from prime_rl.trainer.packing import Document, collate, to_device
from prime_rl.transport.commit import list_steps, verify
from prime_rl.transport.weights import verify_weights
from support import trainer as support
from support.processes import Command, wait_for_all

world, make_policy = support.world, support.make_policy

STEPS = 3
TIMEOUT = 240.0

ORCHESTRATOR = [
    "--environment.id", "reverse-text", "--environment.args", '{"max_words": 1, "num_tasks": 40}',
    "--batch-size", 8, "--rollouts-per-example", 4, "--seq-len", 256, "--sampling.max-tokens", 24,
    "--no-filter-zero-advantage",
]  # fmt: skip
TRAINER = [
    "--seq-len", 256, "--optim.lr", "1e-3", "--device", "cpu", "--weights.dtype", "float32", "--weights.keep", 10,
]  # fmt: skip


@pytest.fixture
def tmp_path(inference_server) -> Path:
    """Runs live below the shared server's weights root: it takes weights from nowhere else."""
    return Path(tempfile.mkdtemp(prefix="run-", dir=inference_server.weights_root))


def both_logprobs(rows: list[dict], policy) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probabilities of a batch's sampled tokens: as the engine recorded, as the trainer computes, packed."""
    documents = [
        Document(
            np.array(row["input_ids"]),
            np.array(row["loss_mask"]),
            row["temperature"],
            np.array([row["logprobs"]], np.float32),
        )
        for row in rows
    ]
    batch = to_device(collate(documents, 1), torch.device("cpu"))
    with torch.no_grad():
        logprobs, _ = policy(batch)
    return batch.streams[0].numpy(), logprobs.numpy()


class Run:
    """The two processes of one run, with shared settings."""

    def __init__(self, server, directory: Path, *, trainer=(), orchestrator=()):
        self.directory = directory
        shared = [
            "--output-dir", directory, "--model.name", server.model, "--max-steps", STEPS, "--async-level", 0,
        ]  # fmt: skip
        self.arguments = {
            "trainer": [*shared, *TRAINER, *trainer],
            "orchestrator": [*shared, *ORCHESTRATOR, "--client.base-url", server.base_url, *orchestrator],
        }

    def start(self, name: str, *more: str) -> Command:
        return Command(name, *self.arguments[name], *more, log=self.directory / "logs" / f"{name}.log")

    def metrics(self, process: str) -> list[dict]:
        return read_metrics(self.directory / "metrics" / f"{process}.jsonl")

    def batch(self, step: int) -> list[dict]:
        return audit._batch(self.directory, step, attempts=True)

    def tensor_files(self, version: int) -> dict[str, bytes]:
        weights = self.directory / "weights" / f"step_{version}"
        return {path.name: path.read_bytes() for path in weights.glob("*.safetensors")}


@pytest.fixture
def seeded(inference_server, tmp_path) -> tuple[Run, Run]:
    """Run twice, synchronously, one sequence at a time: then by weights from memory, started in the other order."""
    runs, order = [], ["trainer", "orchestrator"]
    for transport in ("filesystem", "memory"):
        inference_server.reset()
        run = Run(inference_server, tmp_path / transport,
                  orchestrator=["--seed", 7, "--sampling.seeded", "--max-concurrent", 1],
                  trainer=["--seed", 7, "--weights.transport", transport])  # fmt: skip
        with ExitStack() as stack:
            wait_for_all([stack.enter_context(run.start(name)) for name in order], TIMEOUT)
        order.reverse()
        runs.append(run)
    return runs[0], runs[1]


def test_synchronous_runs(seeded, inference_server, tmp_path, make_policy):
    """Contracts of async_level 0: every sample comes from the version it updates, the mismatch KL stays below 1e-3, and
    the trainer's log-probabilities of sampled tokens are the engine's to 1e-4, before and after updates (fp32, CPU).
    With a seed the run repeats bit for bit, also with `weights.transport` memory: only the last version has tensors in
    files then, and each is served by its hash. A used directory is refused; with --no-trainer --clean batches come from
    the base, though the server served a later version.
    """
    run, second = seeded
    for step in range(STEPS):
        assert run.batch(step) == second.batch(step)
        verify(run.directory / "rollouts" / f"step_{step}")
    assert run.tensor_files(STEPS) == second.tensor_files(STEPS) != {}
    assert all(second.tensor_files(version) == {} for version in range(1, STEPS))
    served = inference_server.get("/weights").json()
    assert (served["version"], served["hash"]) == (
        STEPS,
        verify_weights(second.directory / "weights" / f"step_{STEPS}").hash,
    )
    rows = second.metrics("trainer")
    for step in range(STEPS):
        assert all(row["policy_versions"] == [step] for row in run.batch(step))
    assert [row["step"] for row in run.metrics("trainer")] == list(range(STEPS))
    assert all(abs(row["mismatch_kl/mean"]) < 1e-3 for row in [*run.metrics("trainer"), *rows])
    for step in range(STEPS):
        weights = run.directory / "weights" / f"step_{step}" if step else inference_server.model
        recorded, computed = both_logprobs(run.batch(step), make_policy(weights))
        assert len(recorded) > 50
        assert np.abs(recorded - computed).max() <= 1e-4

    with second.start("orchestrator") as again:
        assert again.wait(TIMEOUT) == 1
        assert "holds an earlier run (rollouts, weights, metrics): remove it with --clean" in again.tail()
    verify(second.directory / "rollouts" / "step_0")
    with second.start("orchestrator", "--no-trainer", "--clean") as alone:
        assert alone.wait(TIMEOUT) == 0
        assert f"no trainer: {STEPS} batches committed on the base model (version 0)" in alone.tail()
    assert list_steps(second.directory / "rollouts") == list(range(STEPS))
    assert not list_steps(second.directory / "weights")
    assert all(row["policy_versions"] == [0] for step in range(STEPS) for row in second.batch(step))
