"""Contract: any input ends in a ConfigError, or in a configuration that, written and fed back, is the same."""

import errno
import json
import tomllib
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args, get_origin

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.config import (
    BaseConfig,
    ConfigError,
    InferenceConfig,
    RLConfig,
    TrainerConfig,
    parse,
    to_toml,
    write_toml,
)
from prime_rl.config.base import Keys, Section
from prime_rl.config.base import settings as every_setting
from prime_rl.config.migration import OLDER
from prime_rl.config.rl import DeploymentConfig
from prime_rl.config.schema import write_schemas
from prime_rl.errors import UserError
from support.configs import COMMANDS, LEAST

ODD_WORDS = (
    "None true 0 -1 1.5 nan 1e400 ² @ @x.toml x.toml -- -x a,b 1+2j [] {} [3] [[{}]] {1:2} http://[::1 http://h:99999"
)
ODD = [*ODD_WORDS.split(), "", '[{"id": "y"}]', '{"type": []}', '{"type": {"a": 1}}', '{"": 1}']
URLS = ["http://h:8001", "http://localhost:8000/v1"]
PLAUSIBLE = [True, 1, 0.5, 8001, "x", "muon", *URLS, ["x"], [{"id": "y"}], {"any": 1}, {}]
# These are compared and filled between sections before the last validation.
SHARED_NAMES = (
    "base_url admin_base_url server wandb trackio ckpt seq_len fake bench clean model eval inference trainer type"
)
SHARED = {*SHARED_NAMES.split()}


@cache
def paths(section: type[Section]) -> dict[Keys, list[Any]]:
    """Every key of `section`, older ones too, each with words that it may have."""
    found: dict[Keys, list[Any]] = {older: [] for older in OLDER}
    for setting in every_setting(section):
        tags = [one.model_fields["type"].default for one in setting.sections if "type" in one.model_fields]
        for number in ("0", "1", "²") if "N" in setting.keys else ("",):
            keys = tuple(number if key == "N" else key for key in setting.keys)
            choices = [word for kind in setting.kinds if get_origin(kind) is Literal for word in get_args(kind)]
            found[keys] = [*choices, *tags, *({"type": tag} for tag in tags)]
    return found


@st.composite
def assignments(draw: st.DrawFn, cls: type[BaseConfig]) -> tuple[Keys, Any]:
    """A real key, or one that ends early or goes on below a scalar, and a value that may or may not fit."""
    every = paths(cls)
    keys = draw(st.sampled_from(list(every)) | st.sampled_from([one for one in every if SHARED & {*one}]))
    value = deepcopy(draw(st.sampled_from([*every[keys], *PLAUSIBLE, *ODD])))  # a table may be added to
    change = draw(st.sampled_from([""] * 9 + ["longer", "shorter", "no"]))
    if change == "longer":
        keys = (*keys, draw(st.sampled_from(["0", "type", "no_x", "x"])))
    if change == "shorter":
        keys = keys[: draw(st.integers(1, len(keys)))]
    return ((*keys[:-1], "no_" + keys[-1]) if change == "no" else keys), value


@pytest.mark.parametrize("cls", [cls for cls in LEAST if cls is not RLConfig])  # its sections are the others'
def test_each_setting_is_written_and_fed_back(cls: type[BaseConfig]) -> None:
    """Contract: whatever is accepted for a setting, alone, comes back equal."""
    values = ["None", {}, True, False, 2, 0.25, "http://h:1", ["a", "b"], {"a": 1, "b": ["None", {"c": 0.5}]}]
    for keys, words in paths(cls).items():
        for value in () if {"0", "1", "²"} & {*keys} else (*words, *values):
            option = ["--" + ".".join(keys), value if isinstance(value, str) else json.dumps(value)]
            assert_same_when_fed_back(cls, [*LEAST[cls], *option], {})


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(st.data())
def test_any_input_ends_in_a_configuration_or_in_mistakes(data: st.DataObject) -> None:
    cls = data.draw(st.sampled_from(list(LEAST)))
    given_by = {kind: data.draw(st.lists(assignments(cls), max_size=3)) for kind in ("option", "file", "variable")}
    argv, env, table = list(LEAST[cls]), {}, dict[str, Any]()
    for keys, value in given_by["option"]:
        argv += ["--" + ".".join(keys), value if isinstance(value, str) else json.dumps(value)]
    for keys, value in given_by["variable"]:
        env["PRIME_" + "__".join(keys).upper()] = value if isinstance(value, str) else json.dumps(value)
    for keys, value in given_by["file"]:
        around = table
        for key in keys[:-1]:
            if not isinstance(around.get(key), dict):
                around[key] = {}
            around = around[key]
        around[keys[-1]] = value
    with TemporaryDirectory() as folder:
        file = Path(folder, "x.toml")
        file.write_text(tomli_w.dumps(table))
        assert_same_when_fed_back(cls, ["@", str(file), *argv], env)


def assert_same_when_fed_back(cls: type[BaseConfig], argv: list[str], env: dict[str, str]) -> None:
    """What is accepted, at least; also each process of a run: `trainer @ outputs/configs/trainer.toml`."""
    try:
        config: Any = parse(cls, argv, env)
    except ConfigError:
        return
    parts = (config.trainer, config.orchestrator, config.inference) if isinstance(config, RLConfig) else ()
    with TemporaryDirectory() as folder:
        for part in (config, *filter(None, parts)):
            write_toml(part, Path(folder, "c.toml"))
            assert to_toml(parse(type(part), ["@", str(Path(folder, "c.toml"))], {})) == to_toml(part)


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


def test_what_is_written(tmp_path: Path) -> None:
    """Contract: every setting, so that no variable changes what a file says; no secret; nothing meant for one start:
    fed back, the configuration of a dry run runs, and that of a cleaned run does not clean again."""
    write_toml(TrainerConfig(), tmp_path / "t.toml")
    env = {"PRIME_SEED": "4", "PRIME_CKPT__INTERVAL": "1", "PRIME_LOG_LEVEL": "debug", "PRIME_MAX_STEPS": "1"}
    assert parse(TrainerConfig, ["@", str(tmp_path / "t.toml")], env) == TrainerConfig()
    sections = {"inference": {"api_key": "s3cret"}, "orchestrator": {"environment": {"id": "x"}}}
    run = RLConfig.model_validate({"dry_run": True, "clean": True, **sections})
    assert "dry_run" not in to_toml(run)
    assert "clean" not in to_toml(run)
    assert 'api_key = "None"' in to_toml(run)
    assert "s3cret" not in to_toml(run) + repr(run) + repr(InferenceConfig(api_key="s3cret"))


REPOSITORY = Path(__file__).parents[3]
# What a file is for, by the first word of its name; anything else (rl, cpu, …) is a whole run.
KINDS = {
    "train": "trainer", "orch": "orchestrator", "infer": "inference", "sft": "sft", "eval": "eval",
    "alice": "orchestrator", "bob": "orchestrator",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        str(path.relative_to(REPOSITORY))
        for folder in ("examples", "configs")
        for path in (REPOSITORY / folder).rglob("*.toml")
    ],
)
def test_shipped_file(name: str) -> None:
    """Contract: every file in the repository is valid for the command that it is written for."""
    path = REPOSITORY / name
    below = [REPOSITORY / "examples/reverse_text/cpu.toml"] if path.parent.name == "algorithms" else []
    cls = COMMANDS[KINDS.get(path.stem.split("_")[0], "rl")] if not below else RLConfig
    cls = DeploymentConfig if path.stem == "deployment" else cls
    parse(cls, [f"@{file}" for file in (*below, path)], {})


REPOSITORY = Path(__file__).parents[3]
FILES = [
    path
    for directory in ("configs", "examples")
    for path in sorted((REPOSITORY / directory).rglob("*.toml"))
    if not path.is_symlink()
]


@pytest.fixture(scope="module")
def validators() -> dict[Path, Any]:
    jsonschema = pytest.importorskip("jsonschema")
    paths = (REPOSITORY / "schemas").glob("*.json")
    return {path: jsonschema.Draft202012Validator(json.loads(path.read_text())) for path in paths}


def test_schemas_are_those_of_the_configs(tmp_path: Path) -> None:
    """Contract: `rl schema` writes what stands in the repository, for every command."""
    for path in write_schemas(tmp_path):
        assert path.read_text() == (REPOSITORY / "schemas" / path.name).read_text(), "run `rl schema`"


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_files_fit_the_schema_that_they_name(file: Path, validators: dict[Path, Any]) -> None:
    """Contract: an editor finds the schema by the first line, nothing wrong in our files, and a mistyped key."""
    first, text = file.read_text().splitlines()[0], file.read_text()
    validator = validators[(file.parent / first.removeprefix("#:schema ")).resolve()]
    assert not [error.message for error in validator.iter_errors(tomllib.loads(text))]
    assert not validator.is_valid(tomllib.loads("model_nam = 1\n" + text))
