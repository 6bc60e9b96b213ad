"""What `rl` decides before it starts anything: where a run goes on, and what is said of restarts at its end."""

from dataclasses import asdict
from pathlib import Path

import pytest

from prime_rl.config import InferenceConfig, OrchestratorConfig, RLConfig
from prime_rl.config.inference import ServerConfig
from prime_rl.config.orchestrator import TrainingEnv
from prime_rl.config.rl import DeploymentConfig
from prime_rl.config.shared import CkptConfig
from prime_rl.errors import UserError
from prime_rl.launcher import launch
from prime_rl.launcher.launch import drained, run
from prime_rl.monitor import Status
from prime_rl.orchestrator.checkpoint import OrchestratorState
from support.committing import commit_empty
from support.configs import from_table

MODEL = Path(__file__).parents[3] / "assets" / "tiny-reverse"


def config(root: Path, **given: object) -> RLConfig:
    orchestrator = OrchestratorConfig(environments=[TrainingEnv(id="reverse-text")])
    return from_table(RLConfig, {"output_dir": root, "orchestrator": orchestrator, **given})


def test_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: also by a dry run, whose plan is one that would start, or says what would refuse it."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    state = OrchestratorState(step=1, seed=1, groups_opened=2)
    commit_empty(tmp_path / "rollouts" / "step_0", 0, "orchestrator", state=asdict(state))
    tiny = {"model": {"name": str(MODEL)}, "device": "cpu", "dry_run": True}
    open_to_all = {"inference": InferenceConfig(server=ServerConfig(host="0.0.0.0"))}
    goes_on = {"recover": True, "seed": 2}  # the trainer would go back first, and what it had made be gone
    for root, given, message in (
        (tmp_path, goes_on, "began with seed 1 and would continue with 2: .*give --seed 1"),
        (tmp_path / "out", open_to_all, "would open the weight routes"),
        (tmp_path / "out", {"ckpt": CkptConfig(resume_step=-1)}, "holds no complete checkpoint"),
        (tmp_path / "out", {"inference": InferenceConfig(max_model_len=64)}, "the logprob check needs 65"),
    ):
        with pytest.raises(UserError, match=message):
            run(config(root, **tiny, **given))
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("VLLM_API_KEY", "k")
    assert run(config(tmp_path, **tiny, **{**goes_on, "seed": 1}, **open_to_all)) == 0
    assert "rl would refuse" not in capsys.readouterr().out
    assert run(config(tmp_path, **tiny)) == 0
    assert f"rl would refuse: {tmp_path} holds an earlier run (rollouts)" in capsys.readouterr().out


def test_a_deployment_takes_no_directory_of_a_run(tmp_path: Path) -> None:
    commit_empty(tmp_path / "weights" / "step_3", 3)
    tiny = {"model": {"name": str(MODEL)}, "device": "cpu", "trainer": {"lora": {}, "tenants": {}}, "inference": {}}
    with pytest.raises(UserError, match=r"holds a run of its own: give the deployment --output-dir \S+"):
        run(from_table(DeploymentConfig, {"output_dir": tmp_path, **tiny}))


def test_a_run_takes_no_directory_of_a_deployment(tmp_path: Path) -> None:
    (tmp_path / "tenants" / "alice").mkdir(parents=True)
    (tmp_path / "tenants" / "alice" / "tenant.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds a deployment, of `rl tenants`: give the run --output-dir \S+"):
        run(config(tmp_path, model={"name": str(MODEL)}, device="cpu"))


def test_a_finished_run_is_not_recovered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Contract: `rl --recover` of a run that has made its steps starts nothing, unless `max_steps` was raised."""
    for name in ("trainer", "orchestrator"):
        Status(tmp_path, name).done("finished")
    commit_empty(tmp_path / "weights" / "step_3", 3)
    tiny = {"model": {"name": str(MODEL)}, "device": "cpu", "recover": True}
    assert run(config(tmp_path, **tiny, max_steps=3)) == 0
    assert capsys.readouterr().out == "this run has made its 3 steps already: nothing is trained again\n"
    assert not launch._is_finished(config(tmp_path, **tiny, max_steps=4))


def test_what_is_promised_to_one_who_interrupts(tmp_path: Path) -> None:
    """Only what is set up to be saved, and only what is there to go on from."""
    plain = config(tmp_path, max_restarts=0)
    for saving in (config(tmp_path, max_restarts=0, ckpt=CkptConfig()), config(tmp_path)):
        assert drained(saving) == "the current step will be finished and saved"
    assert "saves nothing" in drained(config(tmp_path, bench=True))
    assert drained(plain).endswith("--recover goes on from step 0 or later")
    (tmp_path / "recovery" / "step_3").mkdir(parents=True)
    assert drained(plain).endswith("--recover goes on from step 3 or later")
