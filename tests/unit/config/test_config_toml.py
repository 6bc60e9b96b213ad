"""Contract: a resolved configuration, written and fed back with `@`, is the identical configuration."""

import errno
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.config import (
    BaseConfig,
    ConfigError,
    EvalConfig,
    InferenceConfig,
    OrchestratorConfig,
    RLConfig,
    SFTConfig,
    TrainerConfig,
    parse,
    to_toml,
    write_toml,
)
from prime_rl.config.loader import resolve
from prime_rl.config.schema import Setting, type_tag
from prime_rl.config.schema import settings as every_setting
from prime_rl.errors import UserError

LEAST: dict[type[BaseConfig], list[str]] = {
    TrainerConfig: [],
    OrchestratorConfig: ["--environment.id", "x"],
    InferenceConfig: [],
    SFTConfig: [],
    EvalConfig: ["--environment-ids", "x"],
}
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8).filter(lambda t: t != "None")


def values(setting: Setting) -> list[Any]:
    """Values that a setting may be given, by its type; what others must fit is refused and not written."""
    found: list[Any] = ["None"] if setting.nullable else []
    found += [{}, *({"type": type_tag(one)} for one in setting.sections if "type" in one.model_fields)]
    found += [*setting.choices, True, False, 2, 0.25, "http://h:1", ["a", "b"], {"a": 1, "b": ["None", {"c": 0.5}]}]
    return found


@pytest.mark.parametrize("cls", LEAST)
def test_each_setting_is_written_and_fed_back(cls: type[BaseConfig]) -> None:
    """Contract: whatever is accepted for a setting comes back equal."""
    for setting in {one.keys: one for one in every_setting(cls) if "N" not in one.keys}.values():
        for value in values(setting):
            text = value if isinstance(value, str) else json.dumps(value)
            try:
                config = parse(cls, [*LEAST[cls], f"--{'.'.join(setting.keys)}", text], {})
            except ConfigError:
                continue
            assert_same_when_fed_back(config)


LOSSES: list[dict[str, Any]] = [
    {"type": "grpo"},
    {"kl_tau": 0.5},
    {"type": "reinforce", "importance": "mask", "level": "geometric", "low": 0.5},
    {"type": "reinforce", "importance": "none"},
    {"normalization": "group"},
]
SHARED_TOP = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 9),
        "output_dir": TEXT,
        "max_steps": st.none() | st.integers(1, 9),
        "async_level": st.integers(0, 3),
        "seq_len": st.none() | st.integers(32, 64),
        "model": st.fixed_dictionaries({}, optional={"name": TEXT}),
        "ckpt": st.none() | st.fixed_dictionaries({}, optional={"interval": st.none() | st.integers(1, 9)}),
        "wandb": st.none() | st.fixed_dictionaries({}, optional={"name": TEXT, "offline": st.booleans()}),
        "log": st.fixed_dictionaries({}, optional={"level": st.sampled_from(["debug", "info"])}),
        "device": st.sampled_from(["auto", "cpu", "cuda"]),
        "bench": st.booleans(),
        "inference": st.none()
        | st.fixed_dictionaries(
            {}, optional={"server": st.fixed_dictionaries({}, optional={"port": st.integers(1, 9)})}
        ),
        "trainer": st.fixed_dictionaries({}, optional={"loss": st.sampled_from(LOSSES)}),
    },
)


@settings(max_examples=100, deadline=None)
@given(table=SHARED_TOP)
def test_a_whole_run_written_and_fed_back_is_equal(table: dict[str, Any]) -> None:
    """Also each of its processes: `trainer @ outputs/configs/trainer.toml` is the trainer of the run."""
    config = RLConfig.model_validate({**table, "orchestrator": {"environments": [{"id": "x"}]}})
    assert_same_when_fed_back(config)
    assert_same_when_fed_back(config.trainer)
    assert_same_when_fed_back(config.orchestrator)
    if config.inference is not None:
        assert_same_when_fed_back(config.inference)


def assert_same_when_fed_back(config: BaseConfig) -> None:
    one_time = ("dry_run", "recover", "clean")  # meant for one start alone: never written
    expected = config.model_copy(update={name: False for name in one_time if name in type(config).model_fields})
    if isinstance(expected, InferenceConfig):
        expected.api_key = None
    with TemporaryDirectory() as directory:
        path = Path(directory) / "config.toml"
        write_toml(config, path)
        assert parse(type(config), ["@", str(path)], {}) == expected


def test_nothing_is_left_of_what_the_disk_has_no_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: one clear line; the file from before stays, and no half of another lies beside it."""
    path = tmp_path / "t.toml"
    write_toml(TrainerConfig(), path)
    before, write = path.read_text(), Path.write_text

    def full(staged: Path, text: str, **options: str) -> None:
        write(staged, text[:100], **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match="cannot write .*No space left"):
        write_toml(TrainerConfig(max_steps=3), path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.toml"]
    assert path.read_text() == before


def test_a_written_file_wins_over_variables(tmp_path: Path) -> None:
    """Every setting is in it, so that the environment cannot change what it says."""
    write_toml(TrainerConfig(), tmp_path / "t.toml")
    env = {"PRIME_SEED": "4", "PRIME_CKPT__INTERVAL": "1", "PRIME_LOG_LEVEL": "debug", "PRIME_MAX_STEPS": "1"}
    assert parse(TrainerConfig, ["@", str(tmp_path / "t.toml")], env) == TrainerConfig()


def test_a_secret_is_not_written_and_not_shown() -> None:
    config = InferenceConfig(api_key="s3cret")
    assert 'api_key = "None"' in to_toml(config)
    assert "s3cret" not in to_toml(config) + repr(config)
    run = RLConfig.model_validate({"inference": {"api_key": "s3cret"}, "orchestrator": {"environment": {"id": "x"}}})
    assert "s3cret" not in to_toml(run) + repr(run)


def test_what_is_meant_for_one_start_is_not_written() -> None:
    """Fed back, the configuration of a dry run runs, and that of a cleaned run does not clean again."""
    run = RLConfig.model_validate({"dry_run": True, "clean": True, "orchestrator": {"environment": {"id": "x"}}})
    assert "dry_run" not in to_toml(run)
    assert "clean" not in to_toml(run)


def test_the_configuration_of_a_run_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    """Contract: `rl @ outputs/configs/rl.toml --recover` leaves out, with a hint each, settings that are gone; only there."""
    text = """
inference.stage_weights = true
[trainer.optim]
type = "muon"
betas1 = 0.9
[[orchestrator.environments]]
id = "x"
recycle_mib = "None"
[orchestrator.filters.gibberish]
max_tokens = 0
"""
    gone = ["stage_weights", "betas1", "recycle_mib", "max_tokens"]
    run, alone = tmp_path / "configs" / "rl.toml", tmp_path / "no_run" / "configs" / "rl.toml"
    (tmp_path / "status").mkdir()
    for file in (run, alone, tmp_path / "rl.toml"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    config, hints = resolve(RLConfig, ["@", str(run)], {})
    assert config.orchestrator.environments[0].id == "x"
    assert len(hints) == len(gone)
    for name in gone:
        assert any(f".{name} of an earlier release is left out" in hint and f"{run}, line" in hint for hint in hints)
    for file in (alone, tmp_path / "rl.toml"):
        with pytest.raises(ConfigError) as refused:
            parse(RLConfig, ["@", str(file)], {})
        assert len(refused.value.problems) == len(gone)
    with pytest.raises(ConfigError, match="--inference.stage-weights names no setting any more"):
        parse(RLConfig, ["@", str(run), "--inference.stage-weights", "true"], {})
    for optim in ("betas1 = 0.8", "betas2 = 0.999", "nesterov = false", "match_rms = false"):
        run.write_text(text.replace("betas1 = 0.9", optim))
        with pytest.raises(ConfigError, match=f"unknown key trainer.optim.{optim.split()[0]}"):
            parse(RLConfig, ["@", str(run)], {})
    run.write_text(text.replace("betas1 = 0.9", "momentun = 0.9"))
    with pytest.raises(ConfigError, match="unknown key trainer.optim.momentun"):
        parse(RLConfig, ["@", str(run)], {})
    run.write_text(text.replace("betas1", "betos"))
    with pytest.raises(ConfigError, match="unknown key trainer.optim.betos"):
        parse(RLConfig, ["@", str(run)], {})
