"""Contract: whatever is given, parsing ends in a configuration that can be written, or in a ConfigError."""

import json
import tomllib
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tomli_w
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
)
from prime_rl.config.base import Section
from prime_rl.config.layers import OLDER, Keys
from prime_rl.config.schema import settings as every_setting
from prime_rl.config.schema import type_tag

# What each entrypoint needs at least.
LEAST: dict[type[BaseConfig], list[str]] = {
    TrainerConfig: [],
    OrchestratorConfig: ["--environment.id", "x"],
    InferenceConfig: [],
    SFTConfig: [],
    EvalConfig: ["--environment-ids", "x"],
    RLConfig: ["--orchestrator.environment.id", "x"],
}
ODD_WORDS = (
    "None true 0 -1 1.5 nan 1e400 ² @ @x.toml x.toml -- -x a,b 1+2j [] {} [3] [[{}]] {1:2} http://[::1 http://h:99999"
)
ODD = [*ODD_WORDS.split(), "", '[{"id": "y"}]', '{"type": []}', '{"type": {"a": 1}}', '{"": 1}']
PLAUSIBLE = [True, 1, 0.5, 8001, "x", "sgd", "http://h:8001", "http://localhost:8000/v1", ["x"], [{"id": "y"}], {"any": 1}, {}]  # fmt: skip
# These are compared and filled between sections before the last validation.
SHARED_NAMES = "base_url admin_base_url server wandb ckpt seq_len fake bench clean model eval inference trainer type"
SHARED = {*SHARED_NAMES.split()}


@cache
def paths(section: type[Section]) -> dict[Keys, list[Any]]:
    """Every key of `section`, older ones too, each with words that it may have."""
    found: dict[Keys, list[Any]] = {older: [] for older in OLDER}
    for setting in every_setting(section):
        tags = [type_tag(one) for one in setting.sections if "type" in one.model_fields]
        for number in ("0", "1", "²") if "N" in setting.keys else ("",):
            keys = tuple(number if key == "N" else key for key in setting.keys)
            found[keys] = [*setting.choices, *tags, *({"type": tag} for tag in tags)]
    return found


@st.composite
def assignments(draw: st.DrawFn, cls: type[BaseConfig]) -> tuple[Keys, Any]:
    """A real key, or one that ends early or goes on below a scalar, and a value that may or may not fit."""
    every = paths(cls)
    keys = draw(st.sampled_from(list(every)) | st.sampled_from([one for one in every if SHARED & {*one}]))
    value = draw(st.sampled_from([*every[keys], *PLAUSIBLE, *ODD]))
    change = draw(st.sampled_from([""] * 9 + ["longer", "shorter", "no"]))
    if change == "longer":
        keys = (*keys, draw(st.sampled_from(["0", "type", "no_x", "x"])))
    if change == "shorter":
        keys = keys[: draw(st.integers(1, len(keys)))]
    return ((*keys[:-1], "no_" + keys[-1]) if change == "no" else keys), value


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
        try:
            config = parse(cls, ["@", str(file), *argv], env)
        except ConfigError:
            return
    assert tomllib.loads(to_toml(config))
