"""A benchmark touches no run: whatever `--bench` writes lies in a directory of its own."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_rl.config import OrchestratorConfig, RLConfig, SFTConfig, TrainerConfig
from prime_rl.config.base import BaseConfig
from prime_rl.config.orchestrator import EvalSection, TrainingEnv
from prime_rl.config.shared import TRAINER_STEPS, CkptConfig, MonitorConfig, WandbConfig
from prime_rl.entrypoints import trainer
from prime_rl.errors import UserError
from prime_rl.launcher import launch as rl
from prime_rl.launcher.rundir import bench_dir, separate_bench
from prime_rl.monitor import log, read_metrics
from prime_rl.monitor.monitor import metrics_path
from prime_rl.trainer.parallel import close_world
from prime_rl.transport.commit import stage
from support import trainer as support

tied_model = support.tied_model


def files(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_benchmark_beside_a_run(
    tied_model: Path, tmp_path: Path, heard: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file of the run stays; the benchmark says where its own go, and replaces the one before."""
    torch.set_num_threads(1)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    fake = {"seq_len": 32, "data": {"fake": {"batch_size": 2}}, "model": {"name": str(tied_model)}, "device": "cpu"}

    def start(**settings: Any) -> None:
        """The trainer, as rank 0, in this process."""
        log.setup("info", "trainer")  # as `main` does
        try:
            trainer.run(TrainerConfig.model_validate({"output_dir": tmp_path, **fake, **settings}), 0)
        finally:
            close_world()

    start(max_steps=1)
    before = files(tmp_path)
    assert metrics_path(tmp_path, "trainer") in before
    assert "what it writes goes to" not in heard.text
    for steps in (3, 2):  # of the run; a benchmark makes its own
        start(bench=True, max_steps=steps)
        assert len(read_metrics(metrics_path(tmp_path / "bench", "trainer"))) == TRAINER_STEPS
    assert f"what it writes goes to {tmp_path / 'bench'}, no run is touched" in heard.text
    assert (tmp_path / "bench" / "configs" / "trainer.toml").is_file()
    after = files(tmp_path)
    assert {path: after.get(path) for path in before} == before
    assert all(path.is_relative_to(tmp_path / "bench") for path in after.keys() - before.keys())


def environment() -> dict[str, Any]:
    return {"environments": [TrainingEnv(id="reverse-text")]}


def test_the_benchmark_of_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`rl --bench` beside a run starts all processes in the other directory, again and again, and goes on from nothing."""
    with stage(tmp_path / "rollouts" / "step_0", step=0, producer="orchestrator") as path:
        (path / "samples").touch()
    metrics_path(tmp_path / "bench", "trainer").parent.mkdir(parents=True)
    metrics_path(tmp_path / "bench", "trainer").write_text('{"step": 0}\n')  # of an earlier benchmark
    before = files(tmp_path)
    settings: dict[str, Any] = {"bench": True, "dry_run": True, "ckpt": CkptConfig(resume_step=-1)}
    orchestrator = OrchestratorConfig(**environment(), eval=EvalSection(num_examples=4))
    given = RLConfig(output_dir=tmp_path, orchestrator=orchestrator, **settings)
    assert rl.run(given) == 0
    assert f"run directory  {tmp_path / 'bench'}" in capsys.readouterr().out
    after = files(tmp_path)
    assert {path: after.get(path) for path in before} == before
    configs = {tmp_path / "bench" / "configs" / f"{name}.toml" for name in ("rl", "trainer", "orchestrator")}
    assert after.keys() - before.keys() == configs
    for process in (inner := separate_bench(given, print)).trainer, inner.orchestrator:  # as these do themselves
        assert separate_bench(process, pytest.fail).output_dir == tmp_path / "bench"
    assert inner.orchestrator.eval is None


def test_a_run_that_is_called_bench(tmp_path: Path) -> None:
    """It is refused rather than measured over."""
    with stage(tmp_path / "bench" / "weights" / "step_1", step=1, producer="trainer") as path:
        (path / "x").touch()
    for directory in (tmp_path, tmp_path / "bench"):
        with pytest.raises(UserError, match=r"bench is the place of benchmarks, and holds a run"):
            bench_dir(directory)


@pytest.mark.parametrize("kind", [TrainerConfig, SFTConfig, OrchestratorConfig])
def test_a_run_in_wandb_and_evaluations(kind: type[BaseConfig], tmp_path: Path) -> None:
    """Contract: a benchmark goes on with no run in W&B, and evaluates nothing: of no version could the server be verified."""
    monitor = MonitorConfig(wandb=WandbConfig(name="mine", id="abc"))
    section = {**environment(), "eval": EvalSection(num_examples=4)} if kind is OrchestratorConfig else {}
    separate: Any = separate_bench(kind(output_dir=tmp_path, bench=True, monitor=monitor, **section), print)  # type: ignore[type-var]
    assert (separate.monitor.wandb.name, separate.monitor.wandb.id) == ("mine", None)
    assert getattr(separate, "eval", None) is None
