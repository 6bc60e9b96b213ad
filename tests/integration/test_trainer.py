"""The trainer as real processes: several ranks, signals."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from conftest import make_tiny_model
from prime_rl.errors import UserError
from prime_rl.monitor import read_metrics, read_status
from prime_rl.monitor.monitor import metrics_path
from prime_rl.processes import ECHO_SECONDS
from prime_rl.trainer.parallel import init_world
from prime_rl.transport.commit import list_steps, verify
from prime_rl.transport.weights import verify_weights, weights_manifest
from support import trainer as support
from support.forking import on_ranks
from support.processes import REPOSITORY, Command, torchrun, until
from support.trainer import assert_close_metrics, assert_close_weights

tied_model, run_training = support.tied_model, support.run_training
TRAIN = REPOSITORY / "src" / "prime_rl" / "trainer" / "rl" / "train.py"
SECONDS = 120.0
RL = ("mismatch_kl/mean", "is_masked/mean")


def write_config(output_dir: Path, model: Path, /, **settings: object) -> Path:
    output_dir.mkdir(parents=True, exist_ok=True)
    base = {"output_dir": str(output_dir), "model": {"name": str(model)}, "device": "cpu", "seq_len": 128}
    path = output_dir / "given.toml"
    path.write_text(tomli_w.dumps({**base, "optim": {"lr": 1e-3}, **settings}))
    return path


def test_two_ranks(run_training, tied_model, tmp_path):
    """Two gloo ranks give the losses, norms and weights of one, to float32 rounding, also if a rank has no work; each
    reports that it is alive; waiting ranks agree to stop if only the one that does not look is asked; two ranks'
    checkpoints, written beside the loop, are whole, and one rank goes on from them."""
    one, two = tmp_path / "one", tmp_path / "two"
    for directory in (one, two):
        batches = support.write_rollouts(directory, 3, samples=(7, 1, 6))
    run_training(support.make_config(one, tied_model, max_steps=3, async_level=3))

    settings: dict[str, Any] = {"ckpt": {"interval": 2, "save_async": True}, "recovery_interval": 1, "async_level": 3}
    with torchrun(2, TRAIN, write_config(two, tied_model, **settings), two / "log") as command:
        until(lambda: waits_for_step(two, 3), f"the wait for the fourth batch\n{command.tail()}")
        until(lambda: list_steps(two / "recovery") == [3], "the recovery checkpoint of step 3")
        statuses = read_status(two)
        assert statuses.keys() == {"trainer", "trainer.1"}
        for status in statuses.values():
            assert status.ready is not None
            assert status.waiting is not None
            assert status.waiting.owner == "orchestrator"
        os.kill(statuses["trainer.1"].pid, signal.SIGTERM)
        command.succeed(SECONDS)
    for state in (two / "checkpoints" / "step_2" / "trainer", two / "recovery" / "step_3"):
        assert verify(state).files.keys() >= {f"state/rank_{rank}.safetensors" for rank in range(2)}
    assert list_steps(two / "checkpoints") == [2, 3]

    assert_close_metrics(two, one, 3, RL)
    for step, samples in enumerate(batches):
        support.assert_token_stats(two, step, two / "weights" / f"step_{step}" if step else tied_model, samples)
    verify_weights(two / "weights" / "step_3")
    assert_close_weights(two / "weights" / "step_3", one / "weights" / "step_3")

    run_training(support.make_config(two, tied_model, max_steps=3, async_level=3, ckpt={"resume_step": 2}))
    assert weights_manifest(two / "weights" / "step_3").incarnation == 1
    assert read_status(two).keys() == {"trainer"}
    support.assert_token_stats(two, 2, two / "weights" / "step_2", batches[2])  # of fewer ranks than before
    assert_close_weights(two / "weights" / "step_3", one / "weights" / "step_3")


@pytest.mark.slow
def test_replicas(run_training, tmp_path):
    """A model with experts gives one rank's losses, norms and weights on replicas of sharded ranks (2 × 2), on replicas
    of one rank (2 × 1), on more ranks than experts (1 × 4), resuming each other's checkpoints with the same weights."""
    model = make_tiny_model(tmp_path / "model", experts=3)
    one, many = tmp_path / "one", tmp_path / "many"
    settings: dict[str, Any] = {"async_level": 5, "dist_timeout": 60.0}
    for directory in (one, many):
        support.write_rollouts(directory, 5, samples=(20,))  # several micro-batches on every rank
    run_training(support.make_config(one, model, max_steps=5, weights={"keep": None}, **settings))

    config = write_config(many, model, weights={"keep": "None"}, ckpt={"interval": 1, "save_async": True}, **settings)
    runs = []
    for start, end, ranks, replicas in [(0, 1, 4, 2), (1, 2, 2, 2), (2, 4, 4, 1)]:
        resume = ["--ckpt.resume-step", str(start)] if start else []
        arguments = ["@", str(config), "--max-steps", str(end), "--model.dp-replicate", str(replicas), *resume]
        runs.append({"ranks": ranks, "arguments": arguments})
    on_ranks("support.forking:train", runs, many / "log")
    saved = (many / "weights" / "step_4").rename(tmp_path / "step_4")
    run_training(support.make_config(many, model, max_steps=5, ckpt={"resume_step": 4}, **settings))

    assert weights_manifest(many / "weights" / "step_4").hash == weights_manifest(saved).hash
    assert_close_metrics(many, one, 5, (*RL, "moe/load_max/mean", "moe/load_max/max", "moe/unused_experts"))
    for version in range(1, 6):
        verify_weights(many / "weights" / f"step_{version}")
        assert_close_weights(many / "weights" / f"step_{version}", one / "weights" / f"step_{version}")
    for version in range(6):  # every rank takes part in the logprob check
        references = [weights_manifest(run / "weights" / f"step_{version}").reference for run in (one, many)]
        assert references[0] is not None
        assert references[1] is not None
        assert references[1].logprobs == pytest.approx(references[0].logprobs, abs=1e-3)


def test_ranks_that_cannot_be_divided():
    """Both numbers are named, before any rank waits for another."""
    with pytest.raises(UserError, match="1 ranks cannot form model.dp_replicate = 2 groups"):
        init_world("cpu", SECONDS, replicate=2)


def waits_for_step(output_dir: Path, step: int) -> bool:
    status = read_status(output_dir).get("trainer")
    return status is not None and status.waiting is not None and status.waiting.subject == f"rollouts/step_{step}"


def test_signal_while_training(tied_model, tmp_path):
    """A signal ends the run after the current step: its weights and a checkpoint are committed, exit status 0."""
    fake = {"fake": {"batch_size": 8}}
    config = write_config(tmp_path, tied_model, data=fake, ckpt={"interval": "None"})
    with Command("trainer", "@", config, log=tmp_path / "log") as command:
        path = metrics_path(tmp_path, "trainer")
        until(lambda: path.exists() and len(read_metrics(path)) >= 2, f"two steps\n{command.tail()}")
        command.process.send_signal(signal.SIGTERM)
        command.succeed(SECONDS)
    steps = len(read_metrics(path))
    assert list_steps(tmp_path / "weights") == [0, steps]
    assert list_steps(tmp_path / "checkpoints") == [steps]
    verify_weights(tmp_path / "weights" / f"step_{steps}")
    assert read_status(tmp_path)["trainer"].outcome == "stopped"


def test_second_signal(tied_model, tmp_path):
    """A second signal does not wait for anything."""
    fake = {"fake": {"batch_size": 4000}}  # a step of many seconds
    with Command("trainer", "@", write_config(tmp_path, tied_model, data=fake), log=tmp_path / "log") as command:
        until(lambda: read_status(tmp_path).get("trainer") is not None, "the status file")
        until(lambda: read_status(tmp_path)["trainer"].phase == "training", "training")
        command.process.send_signal(signal.SIGINT)
        until(lambda: "asked to stop" in command.tail(), "the first signal's answer")
        time.sleep(ECHO_SECONDS)
        command.process.send_signal(signal.SIGINT)
        assert command.wait(SECONDS) == 130
    assert list_steps(tmp_path / "weights") == [0]
