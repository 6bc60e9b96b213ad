"""The trainer as real processes: several ranks, signals, bad input."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from prime_rl.monitor import read_metrics, read_status
from prime_rl.monitor.monitor import metrics_path
from prime_rl.transport.commit import list_steps
from prime_rl.transport.weights import verify_weights
from support import trainer as support
from support.processes import REPOSITORY, Command

tied_model = support.tied_model
TRAIN = REPOSITORY / "src" / "prime_rl" / "trainer" / "rl" / "train.py"
SECONDS = 120.0


def write_config(output_dir: Path, model: Path, /, **settings: object) -> Path:
    output_dir.mkdir(parents=True, exist_ok=True)
    base = {"output_dir": str(output_dir), "model": {"name": str(model)}, "device": "cpu", "seq_len": 128}
    path = output_dir / "given.toml"
    path.write_text(tomli_w.dumps({**base, "optim": {"lr": 1e-3}, **settings}))
    return path


def torchrun(ranks: int, config: Path, log: Path) -> Command:
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    return Command(
        "torchrun", "--nproc-per-node", ranks, *rendezvous, TRAIN, "@", config, log=log, module="torch.distributed.run"
    )


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {SECONDS:.0f} s: {what}"
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


@pytest.mark.parametrize("samples", [7, 1], ids=["uneven work", "a rank without work"])
def test_two_ranks_equal_one(samples: int, tied_model: Path, tmp_path: Path) -> None:
    """The same rollouts on two gloo ranks give the losses, norms and weights of one rank, to float32 rounding, for three steps."""
    for ranks in (1, 2):
        directory = tmp_path / str(ranks)
        support.write_rollouts(directory, 3, samples)
        with torchrun(ranks, write_config(directory, tied_model, max_steps=3), directory / "log") as command:
            command.succeed(SECONDS)
    one, two = (read_metrics(metrics_path(tmp_path / ranks, "trainer")) for ranks in ("1", "2"))
    assert len(one) == len(two) == 3
    for a, b in zip(one, two, strict=True):
        for name in ("loss/mean", "entropy/mean", "mismatch_kl/mean", "optim/grad_norm", "is_masked/mean"):
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-6), name
    for directory in ("1", "2"):
        verify_weights(tmp_path / directory / "weights" / "step_3")
    first, second = (load_file(tmp_path / ranks / "weights" / "step_3" / "model.safetensors") for ranks in ("1", "2"))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, atol=2e-5, rtol=1e-4, msg=name)


def test_resume_on_another_number_of_ranks(tied_model: Path, tmp_path: Path) -> None:
    """A checkpoint of two ranks is resumed by one process, and the result is that of an undivided run, to float32 rounding."""
    for name in ("whole", "parts"):
        support.write_rollouts(tmp_path / name, 4)
    with Command(
        "trainer", "@", write_config(tmp_path / "whole", tied_model, max_steps=4), log=tmp_path / "a"
    ) as command:
        command.succeed(SECONDS)
    parts = tmp_path / "parts"
    with torchrun(2, write_config(parts, tied_model, max_steps=2, ckpt={}), tmp_path / "b") as command:
        command.succeed(SECONDS)
    resumed = write_config(parts, tied_model, max_steps=4, ckpt={"resume_step": -1})
    with Command("trainer", "@", resumed, log=tmp_path / "c") as command:
        command.succeed(SECONDS)
    want, got = (load_file(tmp_path / name / "weights" / "step_4" / "model.safetensors") for name in ("whole", "parts"))
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_training(number: signal.Signals, tied_model: Path, tmp_path: Path) -> None:
    """A signal ends the run after the current step: weights and a checkpoint of the last step are committed, exit status 0."""
    fake = {"fake": {"batch_size": 8}}
    config = write_config(tmp_path, tied_model, data=fake, ckpt={"interval": "None"})
    with Command("trainer", "@", config, log=tmp_path / "log") as command:
        path = metrics_path(tmp_path, "trainer")
        wait_until(lambda: path.exists() and len(read_metrics(path)) >= 2, f"two steps\n{command.tail()}")
        command.process.send_signal(number)
        command.succeed(SECONDS)
    steps = len(read_metrics(path))
    assert list_steps(tmp_path / "weights") == [0, steps]
    assert list_steps(tmp_path / "checkpoints") == [steps]
    verify_weights(tmp_path / "weights" / f"step_{steps}")
    assert read_status(tmp_path)["trainer"].outcome == "stopped"


def test_signal_to_ranks_that_wait(tied_model: Path, tmp_path: Path) -> None:
    """Two ranks waiting for rollouts agree to stop although only the one that does not look is asked; the status says whom they wait for."""
    support.write_rollouts(tmp_path, 1)
    with torchrun(2, write_config(tmp_path, tied_model), tmp_path / "log") as command:
        wait_until(lambda: 1 in list_steps(tmp_path / "weights"), "the first version")
        wait_until(lambda: read_status(tmp_path)["trainer"].waiting is not None, "the wait")
        waiting = read_status(tmp_path)["trainer"].waiting
        assert waiting is not None
        assert (waiting.subject, waiting.owner) == ("rollouts/step_1", "orchestrator")
        main = read_status(tmp_path)["trainer"].pid
        (other,) = [pid for pid in children(command.process.pid) if pid != main and is_python(pid)]
        os.kill(other, signal.SIGTERM)
        command.succeed(SECONDS)
    assert list_steps(tmp_path / "weights") == [0, 1]


def is_python(pid: int) -> bool:
    return str(TRAIN) in Path(f"/proc/{pid}/cmdline").read_text()


def test_second_signal(tied_model: Path, tmp_path: Path) -> None:
    """A second signal does not wait for anything."""
    fake = {"fake": {"batch_size": 4000}}  # a step of many seconds
    with Command("trainer", "@", write_config(tmp_path, tied_model, data=fake), log=tmp_path / "log") as command:
        wait_until(lambda: read_status(tmp_path).get("trainer") is not None, "the status file")
        wait_until(lambda: read_status(tmp_path)["trainer"].phase == "training", "training")
        command.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "asked to stop" in command.tail(), "the first signal's answer")
        command.process.send_signal(signal.SIGTERM)
        assert command.wait(SECONDS) == 130
    assert list_steps(tmp_path / "weights") == [0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": {"name": "/no/such/model"}}, "error: model directory /no/such/model does not exist"),
        pytest.param(
            {"device": "cuda"},
            "error: --device cuda: torch sees no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU"),
        ),
        (
            {"model": {"name": "x", "attention": "flash_attention_2"}, "data": {"fake": {}}},
            "error: fake data needs the shape of x",
        ),
        ({"rollout_timeout": 0.2}, "error: no rollouts/step_0 from orchestrator after 0 s"),
    ],
    ids=["model", "gpu", "shape", "timeout"],
)
def test_one_clear_line(settings: dict[str, object], message: str, tied_model: Path, tmp_path: Path) -> None:
    """Bad input ends in one line on the console and exit status 1, without a traceback."""
    with Command("trainer", "@", write_config(tmp_path, tied_model, **settings), log=tmp_path / "log") as command:
        assert command.wait(SECONDS) == 1
        assert message in command.tail()
        assert "Traceback" not in command.tail()


def test_dry_run_and_help_touch_nothing(tied_model: Path, tmp_path: Path) -> None:
    """--dry-run writes the resolved config and nothing else; --help imports no torch."""
    given = write_config(tmp_path / "run", tied_model)
    with Command("trainer", "@", given, "--dry-run", log=tmp_path / "log") as command:
        command.succeed(SECONDS)
    left = sorted(p.relative_to(tmp_path / "run").as_posix() for p in (tmp_path / "run").rglob("*") if p.is_file())
    assert left == ["configs/trainer.toml", "given.toml"]
    code = "import sys; sys.argv = ['trainer', '--help']\nfrom prime_rl.entrypoints.trainer import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", code) == 0
