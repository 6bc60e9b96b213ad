"""A benchmark touches no run: whatever `--bench` writes lies in a directory of its own."""

from pathlib import Path
from typing import Any

import pytest

from prime_rl.config import OrchestratorConfig, RLConfig
from prime_rl.config.orchestrator import EvalSection, TrainingEnv
from prime_rl.config.shared import CkptConfig
from prime_rl.errors import UserError
from prime_rl.launcher import launch
from prime_rl.launcher.rundir import as_benchmark
from prime_rl.monitor.monitor import metrics_path
from prime_rl.transport.commit import stage
from support.configs import from_table


def files(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_the_benchmark_of_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`rl --bench` beside a run plans all processes in `bench/`, again and again, and goes on from nothing.
    It evaluates nothing: of no version could the server be verified."""
    with stage(tmp_path / "rollouts" / "step_0", step=0, producer="orchestrator") as path:
        (path / "samples").touch()
    metrics_path(tmp_path / "bench", "trainer").parent.mkdir(parents=True)
    metrics_path(tmp_path / "bench", "trainer").write_text('{"step": 0}\n')  # of an earlier benchmark
    before = files(tmp_path)
    settings: dict[str, Any] = {"bench": True, "dry_run": True, "ckpt": CkptConfig(resume_step=-1)}
    orchestrator = OrchestratorConfig(environments=[TrainingEnv(id="reverse-text")], eval=EvalSection(num_examples=4))
    config = from_table(RLConfig, {"output_dir": tmp_path, "orchestrator": orchestrator, **settings})
    assert launch.run(config) == 0
    assert f"directory     {tmp_path / 'bench'};" in capsys.readouterr().out
    after = files(tmp_path)
    assert {path: after.get(path) for path in before} == before
    configs = {tmp_path / "bench" / "configs" / f"{name}.toml" for name in ("rl", "trainer", "orchestrator")}
    assert after.keys() - before.keys() == configs
    inner = as_benchmark(config)
    for process in inner.trainer, inner.orchestrator, as_benchmark(orchestrator.model_copy(update={"bench": True})):
        assert as_benchmark(process).output_dir.name == "bench", "as the processes do themselves, once"
    assert inner.orchestrator.eval is None


def test_a_run_that_is_called_bench(tmp_path: Path) -> None:
    """It is refused rather than measured over."""
    with stage(tmp_path / "bench" / "weights" / "step_1", step=1, producer="trainer") as path:
        (path / "x").touch()
    for directory in (tmp_path, tmp_path / "bench"):
        with pytest.raises(UserError, match="bench holds a run, not a benchmark"):
            as_benchmark(RLConfig(output_dir=directory, orchestrator={"environment": {"id": "x"}}))
