"""Partners of a run agree on what they share, or one of them refuses to start, naming the key and both values."""

import json
import time
from pathlib import Path

import pytest

from prime_rl.config import InferenceConfig, OrchestratorConfig, TrainerConfig
from prime_rl.config.orchestrator import TrainingEnv
from prime_rl.config.shared import CkptConfig, ModelConfig
from prime_rl.errors import UserError
from prime_rl.monitor.status import status_path
from prime_rl.transport.settings import Party, agree, dry_path, ways_out
from support import partners
from support.partners import belongs_to

partner = partners.partner


def orchestrator(root: Path, **given: object) -> OrchestratorConfig:
    return OrchestratorConfig(environments=[TrainingEnv(id="rt")], output_dir=root, **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_steps": 5}, "max_steps is 5 here, but None in the trainer"),
        ({"async_level": 2}, "async_level is 2 here, but 1 in the trainer"),
        ({"seed": 3}, "seed is 3 here, but 0 in the trainer"),
        ({"model": ModelConfig(name="other")}, "model.name is other here, but Qwen/Qwen3-0.6B in the trainer"),
        ({"ckpt": CkptConfig(interval=7)}, "ckpt.interval is 7 here, but 50 in the trainer"),
        ({"seq_len": 10**6}, "seq_len is 1000000 in the orchestrator, but"),
    ],
)
def test_a_living_partner_with_other_settings_is_refused(
    tmp_path: Path, partner: int, given: dict[str, object], message: str
) -> None:
    """Each shared key, with both values."""
    agree(TrainerConfig(output_dir=tmp_path, ckpt=CkptConfig()), "trainer")
    belongs_to(tmp_path, "trainer", partner)
    with pytest.raises(UserError, match=message):
        agree(orchestrator(tmp_path, **given), "orchestrator")


def test_who_agrees_or_is_gone_is_no_obstacle(tmp_path: Path, partner: int) -> None:
    """Shorter samples fit; no checkpoints of one's own are no contradiction; a dead, or ended, partner has no say."""
    agree(TrainerConfig(output_dir=tmp_path, ckpt=CkptConfig()), "trainer")
    belongs_to(tmp_path, "trainer", partner)
    agree(orchestrator(tmp_path, seq_len=128), "orchestrator")
    ended = {
        "process": "trainer", "pid": partner, "phase": "done", "step": 3, "since": 0.0, "heartbeat": time.time(),
        "waiting": None, "outcome": "finished",
    }  # fmt: skip
    claim = json.loads((tmp_path / "settings/trainer.json").read_text())
    path = status_path(tmp_path, "trainer")
    path.parent.mkdir()
    path.write_text(json.dumps({**ended, "host": claim["host"], "started": claim["started"]}))
    agree(orchestrator(tmp_path), "orchestrator")
    path.unlink()
    belongs_to(tmp_path, "trainer", partner)
    (tmp_path / "settings/trainer.json").write_text(json.dumps({**claim, "started": 1}))
    agree(orchestrator(tmp_path), "orchestrator")


def test_a_dry_run_writes_beside_what_a_run_has_left(tmp_path: Path) -> None:
    assert dry_path(tmp_path, "sft") == tmp_path / "configs" / "sft.toml"
    (tmp_path / "weights").mkdir()
    assert dry_path(tmp_path, "sft") == tmp_path / "configs" / "dry-run" / "sft.toml"


@pytest.mark.parametrize("first", ["trainer", "orchestrator"])
def test_a_trainer_of_random_samples_is_no_partner(tmp_path: Path, first: Party) -> None:
    """Contract: what was trained on something else is never served as trained on the batches, though whoever made it is gone."""
    parties = {"trainer": TrainerConfig(data={"fake": {}}, output_dir=tmp_path), "orchestrator": orchestrator(tmp_path)}
    second: Party = "orchestrator" if first == "trainer" else "trainer"
    agree(parties[first], first)
    with pytest.raises(UserError, match="trains on random samples"):
        agree(parties[second], second)


@pytest.mark.parametrize("first", ["trainer", "orchestrator"])
def test_an_orchestrator_without_a_trainer_is_no_partner(tmp_path: Path, first: Party) -> None:
    """Contract: whichever starts first, a trainer never trains on batches that were all made from the base model."""
    parties = {"trainer": TrainerConfig(output_dir=tmp_path), "orchestrator": orchestrator(tmp_path, trainer=False)}
    second: Party = "orchestrator" if first == "trainer" else "trainer"
    agree(parties[first], first)
    with pytest.raises(UserError, match=r"rollouts for no trainer.*--trainer.*--clean"):
        agree(parties[second], second)
    agree(InferenceConfig(output_dir=tmp_path / "other"), "inference")


def test_what_to_do_about_an_earlier_run(tmp_path: Path) -> None:
    """--clean first, then a directory that is free, then what can be gone on with."""
    (tmp_path / "outputs2").mkdir()
    ways = ways_out(tmp_path / "outputs", saved=True)
    order = ["--clean", f"{tmp_path / 'outputs3'} is free", "--ckpt.resume-step -1", "--recover"]
    assert sorted(order, key=ways.index) == order
    assert ways_out(tmp_path / "outputs2", saved=False, recover=False).endswith(f"({tmp_path / 'outputs3'} is free)")


def test_beside_the_rest_of_its_run_a_process_should_recover(tmp_path: Path, partner: int) -> None:
    agree(orchestrator(tmp_path), "orchestrator")
    belongs_to(tmp_path, "orchestrator", partner)
    assert "go on with them by --recover" in ways_out(tmp_path, saved=False)
    assert "--clean" not in ways_out(tmp_path, saved=False)


def test_a_server_is_asked_for_its_model_alone(tmp_path: Path, partner: int) -> None:
    """Another seed of the server changes nothing; another model everything."""
    agree(InferenceConfig(output_dir=tmp_path, seed=5), "inference")
    belongs_to(tmp_path, "inference", partner)
    agree(orchestrator(tmp_path), "orchestrator")
    with pytest.raises(UserError, match="model.name is other here, but Qwen/Qwen3-0.6B in the inference"):
        agree(orchestrator(tmp_path, model=ModelConfig(name="other")), "orchestrator")


def test_on_another_host_the_heartbeat_counts(tmp_path: Path) -> None:
    """Pids mean nothing there: fresh settings or a fresh heartbeat do."""
    agree(TrainerConfig(output_dir=tmp_path, seed=4), "trainer")
    path = tmp_path / "settings/trainer.json"
    claim = {**json.loads(path.read_text()), "host": "elsewhere"}
    path.write_text(json.dumps(claim))
    with pytest.raises(UserError, match="seed is 0 here, but 4 in the trainer"):
        agree(orchestrator(tmp_path), "orchestrator")
    path.write_text(json.dumps({**claim, "time": 1.0}))
    agree(orchestrator(tmp_path), "orchestrator")


@pytest.mark.parametrize("process", ["trainer", "orchestrator"])
def test_there_is_one_of_each(tmp_path: Path, partner: int, process: Party) -> None:
    """A second one is refused and changes nothing; a dead or ended one is succeeded."""
    config = TrainerConfig(output_dir=tmp_path) if process == "trainer" else orchestrator(tmp_path)
    agree(config, process)
    agree(config, process)  # the same process
    belongs_to(tmp_path, process, partner)
    path = tmp_path / "settings" / f"{process}.json"
    before = path.read_bytes()
    with pytest.raises(UserError, match=rf"another {process} \(pid {partner} on .*\) is at work on the run"):
        agree(config, process)
    assert path.read_bytes() == before
    path.write_text(json.dumps({**json.loads(before), "started": 1}))
    agree(config, process)


def test_there_is_one_trainer_on_all_hosts(tmp_path: Path, partner: int) -> None:
    """Another host's trainer lives as long as its heartbeat is fresh."""
    config = TrainerConfig(output_dir=tmp_path)
    agree(config, "trainer")
    belongs_to(tmp_path, "trainer", partner)
    path = tmp_path / "settings" / "trainer.json"
    claim = {**json.loads(path.read_text()), "host": "elsewhere", "time": 1.0}
    for age, refused in ((0.0, True), (1000.0, False)):
        path.write_text(json.dumps(claim))
        status = {
            "process": "trainer", "pid": partner, "phase": "training", "step": 3, "since": 0.0, "heartbeat": time.time() - age,
            "waiting": None, "outcome": None, "host": "elsewhere", "started": claim["started"],
        }  # fmt: skip
        status_path(tmp_path, "trainer").parent.mkdir(exist_ok=True)
        status_path(tmp_path, "trainer").write_text(json.dumps(status))
        if refused:
            with pytest.raises(UserError, match="another trainer"):
                agree(config, "trainer")
        else:
            agree(config, "trainer")


@pytest.mark.parametrize("first", ["trainer", "orchestrator"])
def test_a_benchmark_measures_both_though_they_share_no_data(tmp_path: Path, first: Party) -> None:
    """Contract: `rl --bench` has a trainer of random samples and an orchestrator in one directory, each measured by itself."""
    made = orchestrator(tmp_path).model_copy(update={"bench": True})
    parties = {"trainer": TrainerConfig(data={"fake": {}}, output_dir=tmp_path, bench=True), "orchestrator": made}
    second: Party = "orchestrator" if first == "trainer" else "trainer"
    agree(parties[first], first)
    agree(parties[second], second)


def test_a_process_that_was_refused_leaves_no_settings(tmp_path: Path, partner: int) -> None:
    """Contract: what a refused process would have set concerns nobody: the next one is compared with those that took part."""
    config = orchestrator(tmp_path)
    agree(config, "orchestrator")
    before = (tmp_path / "settings" / "orchestrator.json").read_bytes()
    agree(TrainerConfig(output_dir=tmp_path), "trainer")
    belongs_to(tmp_path, "trainer", partner)
    with pytest.raises(UserError, match="makes rollouts for no trainer"):
        agree(orchestrator(tmp_path, trainer=False), "orchestrator")
    assert (tmp_path / "settings" / "orchestrator.json").read_bytes() == before
    (tmp_path / "settings" / "orchestrator.json").unlink()
    with pytest.raises(UserError, match="makes rollouts for no trainer"):
        agree(orchestrator(tmp_path, trainer=False), "orchestrator")
    assert not (tmp_path / "settings" / "orchestrator.json").exists()
