"""Partners of a run agree on what they share, or one of them refuses to start, naming the key and both values."""

import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from prime_rl.config import InferenceConfig, OrchestratorConfig, TrainerConfig
from prime_rl.config.orchestrator import TrainingEnv
from prime_rl.config.shared import CkptConfig, ModelConfig
from prime_rl.errors import UserError
from prime_rl.monitor.status import new_status, status_path, write_record
from prime_rl.transport.settings import check_and_commit, suggestions
from support import partners
from support.partners import belongs_to, change

partner = partners.partner


def orchestrator(root: Path, **given: object) -> OrchestratorConfig:
    return OrchestratorConfig(environments=[TrainingEnv(id="rt")], output_dir=root, **given)


def write_status(root: Path, claim: dict[str, object], **fields: object) -> Path:
    path = status_path(root, "trainer")
    path.parent.mkdir(exist_ok=True)
    write_record(
        path, replace(new_status("trainer"), **{key: claim[key] for key in ("pid", "host", "started")}, **fields)
    )
    return path


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"async_level": 2}, "async_level is 2 here, but 1 in the trainer"),
        ({"model": ModelConfig(name="other")}, "model.name is other here, but Qwen/Qwen3-0.6B in the trainer"),
        ({"ckpt": CkptConfig(interval=7)}, "ckpt.interval is 7 here, but 50 in the trainer"),
        ({"router_replay": True}, "router_replay is True here, but False in the trainer"),
        ({"seq_len": 10**6}, "seq_len is 1000000 in the orchestrator, but"),
    ],
)
def test_a_living_partner_with_other_settings_is_refused(tmp_path, partner, given, message):
    check_and_commit(TrainerConfig(output_dir=tmp_path, ckpt=CkptConfig()), "trainer")
    belongs_to(tmp_path, "trainer", partner)
    with pytest.raises(UserError, match=message):
        check_and_commit(orchestrator(tmp_path, **given), "orchestrator")


def test_a_partner_that_agrees_or_is_gone_is_no_obstacle(tmp_path, partner):
    """Shorter samples fit; missing own checkpoints too; a dead or ended partner has no say, a server on its model."""
    check_and_commit(TrainerConfig(output_dir=tmp_path, ckpt=CkptConfig()), "trainer")
    check_and_commit(InferenceConfig(output_dir=tmp_path, seed=5), "inference")
    for process in ("trainer", "inference"):
        belongs_to(tmp_path, process, partner)
    check_and_commit(orchestrator(tmp_path, seq_len=128), "orchestrator")
    settings = tmp_path / "settings/trainer.json"
    path = write_status(tmp_path, change(settings), outcome="finished")
    check_and_commit(orchestrator(tmp_path, seed=9), "orchestrator")
    path.unlink()
    change(settings, started=1)
    check_and_commit(orchestrator(tmp_path, seed=9), "orchestrator")
    with pytest.raises(UserError, match="model.name is other here, but Qwen/Qwen3-0.6B in the inference"):
        check_and_commit(orchestrator(tmp_path, model=ModelConfig(name="other")), "orchestrator")


@pytest.mark.parametrize("first", ["trainer", "orchestrator"])
@pytest.mark.parametrize(
    ("trainer", "other", "message"),
    [
        ({"data": {"fake": {}}}, {}, "trains on random samples"),
        ({}, {"trainer": False}, "rollouts for no trainer.*--trainer.*--clean"),
        ({"data": {"fake": {}}, "bench": True}, {"bench": True}, None),  # as `rl --bench` runs them
    ],
)
def test_data_of_one_without_the_other_is_never_mixed(tmp_path, first, trainer, other, message):
    """Contract: what was trained on something else is never served as trained on the batches, its maker gone or not."""
    second = orchestrator(tmp_path).model_copy(update=other)
    parties = {"trainer": TrainerConfig(output_dir=tmp_path, **trainer), "orchestrator": second}
    check_and_commit(parties.pop(first), first)
    ((last, config),) = parties.items()
    with nullcontext() if message is None else pytest.raises(UserError, match=message):
        check_and_commit(config, last)


@pytest.mark.parametrize("process", ["trainer", "orchestrator"])
def test_there_is_one_of_each(tmp_path, partner, process):
    """A second one is refused and changes nothing; a dead or ended one is succeeded."""
    config = TrainerConfig(output_dir=tmp_path) if process == "trainer" else orchestrator(tmp_path)
    check_and_commit(config, process)
    check_and_commit(config, process)  # the same process
    belongs_to(tmp_path, process, partner)
    path = tmp_path / "settings" / f"{process}.json"
    before = path.read_bytes()
    with pytest.raises(UserError, match=rf"another {process} \(pid {partner} on .*\) is running in"):
        check_and_commit(config, process)
    assert path.read_bytes() == before
    change(path, started=1)
    check_and_commit(config, process)


def test_on_another_host_fresh_settings_or_a_fresh_heartbeat_count(tmp_path):
    """Pids mean nothing there."""
    check_and_commit(TrainerConfig(output_dir=tmp_path, seed=4), "trainer")
    path = tmp_path / "settings/trainer.json"
    claim = change(path, host="elsewhere")
    with pytest.raises(UserError, match="seed is 0 here, but 4 in the trainer"):
        check_and_commit(orchestrator(tmp_path), "orchestrator")
    change(path, heartbeat=1.0)
    check_and_commit(orchestrator(tmp_path), "orchestrator")
    write_status(tmp_path, claim)
    with pytest.raises(UserError, match="another trainer"):
        check_and_commit(TrainerConfig(output_dir=tmp_path), "trainer")
    write_status(tmp_path, claim, heartbeat=time.time() - 1000)
    check_and_commit(TrainerConfig(output_dir=tmp_path), "trainer")


def test_what_to_do_about_an_earlier_run(tmp_path, partner):
    """Every way out is named; beside the rest of its run it is --recover alone."""
    ways = suggestions(tmp_path / "outputs", saved=True)
    assert all(way in ways for way in ("--clean", "--output-dir", "--ckpt.resume-step -1", "--recover"))
    check_and_commit(orchestrator(tmp_path), "orchestrator")
    belongs_to(tmp_path, "orchestrator", partner)
    assert "go on with them by --recover" in suggestions(tmp_path, saved=False)
    assert "--clean" not in suggestions(tmp_path, saved=False)
