"""Contract: a resolved configuration, written and fed back with `@`, is the identical configuration."""

import errno
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.config import (
    BaseConfig,
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
from prime_rl.config.base import Section
from prime_rl.config.orchestrator import (
    SFT,
    Distillation,
    OverlongPenalty,
    TeacherConfig,
    TeacherServer,
)
from prime_rl.config.schema import Setting, find
from prime_rl.config.schema import settings as every_setting
from prime_rl.errors import UserError

CLASSES = [TrainerConfig, OrchestratorConfig, InferenceConfig, SFTConfig, EvalConfig, RLConfig]
PLAIN_TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8).filter(
    lambda t: t != "None"
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | PLAIN_TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(PLAIN_TEXT, inner, max_size=2),
    max_leaves=4,
)
# Settings that other settings or the launcher's sharing constrain: drawing them freely would be refused, not written.
FIXED = {"type", "environment_ids", "base_url", "admin_base_url"}
CONSTRAINED_NAMES = (
    "seq_len max_steps resume_step warmup_steps decay_steps batch_size micro_batch_size rollouts_per_example attention "
    "max_off_policy_steps async_level max_tokens data_parallel_size_local headless data_parallel_start_rank tmpfs level "
    "transport max_model_len normalization fixed_length kl_estimator dual_clip low high max_logprob weights template easy "
    "hard host temperature dynamic_sampling length_penalty requirements max_workers"
)
CONSTRAINED = set(CONSTRAINED_NAMES.split())


def settings_of(section: type[Section]) -> dict[str, Setting]:
    return {one.keys[0]: one for one in every_setting(section) if len(one.keys) == 1}


def values(setting: Setting) -> st.SearchStrategy[Any]:
    """Values that a setting may be given, by its type; invalid ones (out of range) are filtered by validation."""
    options: list[st.SearchStrategy[Any]] = [st.none()] if setting.nullable else []
    if setting.sections:
        options += [tables(section) for section in setting.sections]
    elif (item := find(setting.owner, (setting.keys[-1], "0"))) is not None and item.sections:
        options.append(st.lists(tables(item.sections[0]), max_size=2, unique_by=lambda table: table["name"]))
    elif dict[str, float] in setting.kinds:
        options.append(st.dictionaries(PLAIN_TEXT, st.floats(-2, 2), max_size=3))
    elif setting.is_dict:
        options.append(st.dictionaries(PLAIN_TEXT, JSON, max_size=3))
    elif setting.choices:
        options.append(st.sampled_from(setting.choices))
    elif setting.is_bool:
        options.append(st.booleans())
    elif list[str] in setting.kinds:
        options.append(st.lists(PLAIN_TEXT, max_size=2))
    elif int in setting.kinds:
        options.append(st.integers(1, 8))
    elif float in setting.kinds:
        options.append(st.floats(0.001, 0.999))
    else:
        options.append(PLAIN_TEXT)
    return st.one_of(options)


@cache
def tables(section: type[Section]) -> st.SearchStrategy[dict[str, Any]]:
    """Tables of `section` with any of its settings given."""
    required = {n: PLAIN_TEXT for n, s in settings_of(section).items() if s.field.is_required() and not s.sections}
    if {"id", "name"} <= set(settings_of(section)) and "args" in settings_of(section):
        required["name"] = PLAIN_TEXT
    required = {
        name: st.integers(1, 8) if {int, float} & {*settings_of(section)[name].kinds} else drawn
        for name, drawn in required.items()
    }
    if issubclass(section, TeacherServer):
        required = {"base_url": st.just("http://teacher")}
    if issubclass(section, Distillation):
        required = {"teacher": tables(TeacherServer if section is SFT else TeacherConfig)}
    if section is OverlongPenalty:
        required = {"max_tokens": st.integers(8, 16), "cache": st.integers(1, 8)}
    free = {
        name: values(setting)
        for name, setting in settings_of(section).items()
        if name not in FIXED | CONSTRAINED | set(required)
    }
    fixed = {"type": st.just(settings_of(section)["type"].field.default)} if "type" in settings_of(section) else {}
    return st.fixed_dictionaries({**required, **fixed}, optional=free)


def admissible(cls: type[BaseConfig], table: dict[str, Any]) -> dict[str, Any]:
    """`table` with an end of the run, as schedules need, and exactly one form of environments where `cls` asks for one."""
    if "max_steps" in settings_of(cls):
        table = {**table, "max_steps": 1000, "clean": False}  # with which nothing is gone on with
    if cls is SFTConfig:
        return with_evaluation(table)
    if "environment" not in settings_of(cls):
        return table
    environments = table.get("environments") or [{"id": "x"}]
    of_versions = (
        ("weights_dir", "steps", "interval", "follow", "eval_base", "hold", "unsafe") if cls is EvalConfig else ()
    )
    rest = {key: value for key, value in table.items() if key not in ("environment", *of_versions)}
    if isinstance(rest.get("eval"), dict):
        rest["eval"] = {key: value for key, value in rest["eval"].items() if key != "environment"}
    return {**rest, "environments": environments}


def with_evaluation(table: dict[str, Any]) -> dict[str, Any]:
    """A server only where something is evaluated, of the model that is trained, and at no address of its own."""
    section = table.get("eval")
    if section is None:
        return {key: value for key, value in table.items() if key != "inference"}
    table = {
        **table,
        "eval": {**section, "environment": None, "environments": section.get("environments") or [{"id": "x"}]},
    }
    if isinstance(table.get("inference"), dict):
        model = {key: value for key, value in table["inference"].get("model", {}).items() if key != "name"}
        table["inference"] = {
            **table["inference"],
            "model": model,
            "dry_run": False,
            "api_key": None,
        }  # neither is written
        table["eval"] = {**table["eval"], "client": {}}
    return table


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls is not RLConfig])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_written_and_fed_back_is_equal(cls: type[BaseConfig], data: st.DataObject) -> None:
    config = cls.model_validate(admissible(cls, data.draw(tables(cls))))  # type: ignore[arg-type]
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
        "output_dir": PLAIN_TEXT,
        "max_steps": st.none() | st.integers(1, 9),
        "async_level": st.integers(0, 3),
        "seq_len": st.none() | st.integers(32, 64),
        "model": st.fixed_dictionaries({}, optional={"name": PLAIN_TEXT}),
        "ckpt": st.none() | st.fixed_dictionaries({}, optional={"interval": st.none() | st.integers(1, 9)}),
        "wandb": st.none() | st.fixed_dictionaries({}, optional={"name": PLAIN_TEXT, "offline": st.booleans()}),
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


@pytest.mark.parametrize("cls", [TrainerConfig, InferenceConfig, SFTConfig])
def test_every_setting_is_written(cls: type[BaseConfig]) -> None:
    text = to_toml(cls())
    for name, setting in settings_of(cls).items():
        if name not in ("dry_run", "clean"):
            assert name in text, setting


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
