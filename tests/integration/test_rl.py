"""The whole of `rl`: one command starts, watches and ends everything."""

from pathlib import Path

from conftest import free_port
from faults.harness import survivors
from prime_rl.monitor import read_metrics
from prime_rl.transport.commit import list_steps
from prime_rl.transport.rollouts import open_batch
from prime_rl.transport.weights import verify_weights
from support.processes import Command

TIMEOUT = 400.0
SMALL = [
    "--orchestrator.batch-size", 16, "--orchestrator.rollouts-per-example", 4, "--orchestrator.eval.num-examples", 8,
]  # fmt: skip


def arguments(directory: Path, port: int, *more: object) -> list[object]:
    return [
        "@", "examples/reverse_text/cpu.toml", "--output-dir", directory, "--inference.server.port", port,
        *SMALL, *more,
    ]  # fmt: skip


def test_one_command_trains_evaluates_and_leaves_a_model(tmp_path, monkeypatch):
    """The first command of the README, shortened: exit 0, a line per step, evals before and after, weights that
    transformers loads. At async_level 1 with the bound at 1 no sample of step n is older than version n - 1."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("PRIME_TRAINER__OPTIM__WEIGHT_DECAY", "0.5")
    more = ["--max-steps", 3, "--seed", 3, "--orchestrator.max-off-policy-steps", 1]
    with Command("rl", *arguments(tmp_path / "run", free_port(), *more), log=tmp_path / "rl.log") as rl:
        rl.succeed(TIMEOUT)
        console = rl.tail(80)
    run = tmp_path / "run"
    for step in range(3):
        assert f"Step {step} [{step + 1}/3] | reward" in console
    assert "Eval reverse-text at step 0" in console
    assert "Eval reverse-text at step 3" in console
    assert list_steps(run / "rollouts") == [0, 1, 2]
    for step in range(3):
        batch = open_batch(run / "rollouts" / f"step_{step}")
        versions = {version for row in batch.rows(range(len(batch))) for version in row.policy_versions}
        assert versions <= set(range(max(0, step - 1), step + 1))
    manifest = verify_weights(run / "weights" / "step_3")
    model = AutoModelForCausalLM.from_pretrained(run / "weights" / "step_3")
    assert {name for name, _ in model.named_parameters()} == manifest.tensors.keys()
    assert {"rl", "trainer", "orchestrator", "inference"} == {path.stem for path in (run / "configs").iterdir()}
    assert "seed = 3" in (run / "configs" / "trainer.toml").read_text()
    assert "weight_decay = 0.0" in (run / "configs" / "trainer.toml").read_text()  # the file beats the environment
    assert len(read_metrics(run / "metrics" / "trainer.jsonl")) == 3
    assert survivors(run) == []
