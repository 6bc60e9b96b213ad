"""Contract: whatever is given, parsing ends in a configuration that can be written, or in `error:` lines of bounded length and status 2."""

import json
import os
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.config import EvalConfig, InferenceConfig, OrchestratorConfig, RLConfig, SFTConfig, TrainerConfig
from prime_rl.config.assignments import OLDER, Assignments, Keys
from prime_rl.config.base import BaseConfig, Section
from prime_rl.config.loader import load, to_toml
from prime_rl.config.schema import Setting, type_tag
from prime_rl.config.schema import settings as every_setting

# What each entrypoint needs at least.
LEAST = {
    TrainerConfig: [],
    OrchestratorConfig: ["--environment.id", "x"],
    InferenceConfig: [],
    SFTConfig: [],
    EvalConfig: ["--environment-ids", "x"],
    RLConfig: ["--orchestrator.environment.id", "x"],
}
LINE, LINES = 2100, 110  # bounds of an error: characters of a line, lines (errors, hints, and where to find help)
NINES = "9" * 5000
ODD_WORDS = "None true 0 -1 1.5 nan -inf 1e400 ² @ @x.toml x.toml -- -x a,b 1+2j /dev/null '\\d' [] {} [3] [[{}]] {1:2} (1,2) http://[::1 http://h:99999"
ODD_TEXTS = [
    *("", *ODD_WORDS.split()),
    *(NINES, "-" + NINES[:300], str(2**63), "x" * 5000, "é" * 300, "1" + "0" * 400 + ".0", "\udcff", "\x1b[2J\n"),
    *("[" * 5000, "{'a':" * 150 + "1" + "}" * 150, '{"a":' * 500, '[{"id": "y"}]', '{"a": "\\ud800"}'),
    *('{"type": []}', '{"type": {"a": 1}}', '{"type": "sgd"}', '{"": 1}', '{"a": "\\u0000"}'),
]
TEXTS = st.sampled_from(ODD_TEXTS) | st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8
)
SCALARS = st.one_of(
    st.none().map(lambda _: "None"),
    st.booleans(),
    st.integers(-(2**70), 2**70) | st.sampled_from([0, 1, -1, 2**63]),
    st.floats(),
    st.datetimes() | st.dates() | st.times(),
    TEXTS.filter(lambda text: "\udcff" not in text) | st.just("\0"),
)
ODD_FILES = [
    *("a = " + NINES, "a = 0x" + "f" * 5000, "a = " + "[" * 3000, "a." * 3000 + "b = 1", "[a]\n[a]", "\xff", "a = 'x"),
    *("[[a]]\na.b = 1", "include = 3", 'include = "x.toml"', 'include = "\\u0000"', 'include = "y.toml"'),
    *(f'include = "{"z" * 300}"', "[environments.0]\nid = 'x'", "seed = 2020-13-45", "a=1\n" * 3 + "b"),
]
SHARED_NAMES = (
    "base_url admin_base_url server client wandb ckpt seq_len fake bench clean model device log max_steps async_level "
    "environments environment eval inference trainer orchestrator exp_id port path benchmarks recover type"
)
SHARED = set(SHARED_NAMES.split())
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=5)  # fmt: skip


@cache
def paths(section: type[Section]) -> dict[Keys, Setting | None]:
    """Every key of `section`, older ones too, with keys inside of tables of any content, and items of lists."""
    found: dict[Keys, Setting | None] = {}
    for setting in every_setting(section):
        for number in ("0", "1", "7", "²", "-1", NINES) if setting.keys[-1] == "N" else ("0",):
            keys = tuple(number if key == "N" else key for key in setting.keys)
            found[keys] = setting if setting.keys[-1] != "N" else None
        if setting.is_dict:
            found[*setting.keys, "any"] = None
    around = [(), *(keys for keys, setting in found.items() if setting is not None and setting.sections)]
    return {**{(*keys, *older): None for keys in around for older in OLDER}, **found}


def plausible(setting: Setting | None) -> list[Any]:
    """Values that a setting may have, or nearly."""
    if setting is None:
        return [1, "x", {"id": "y"}, "http://h:8001"]
    found: list[Any] = [True, False] if setting.is_bool else []
    found += [1, 2, 8001, 0.5] if {int, float} & {*setting.kinds} else []
    found += [*setting.choices, *(type_tag(one) for one in setting.sections if "type" in one.model_fields)]
    found += [{}, {"type": found[-1] if found else "sgd"}] if setting.sections else []
    found += [[{"id": "y"}], [{"id": "y"}, 3], ["x"], [1, 2]] if setting.is_list else []
    found += [{"any": 1}] if setting.is_dict else []
    found += ["x", "http://h:8001", "http://localhost:8000/v1"] if str in setting.kinds or Path in setting.kinds else []
    return [*found, "None"]


@st.composite
def keys(draw: st.DrawFn, section: type[Section]) -> tuple[Keys, Setting | None]:
    """A real key, or one that goes through a scalar, ends early, or has odd parts."""
    # Every other time one of those that sections share, which are compared and filled before validation.
    every = paths(section)
    shared = [one for one in every if any(part in SHARED for part in one) and "environments" not in one[:-1]]
    found = draw(st.sampled_from(list(every)) | st.sampled_from(shared))
    change = draw(st.sampled_from(["none"] * 30 + ["longer", "shorter", "inside", "no", "deep"]))
    if change == "none":
        return found, every[found]
    odd = st.sampled_from(["", "0", "type", "no_x", "x", "İ", "a" * 3000, "\x1b\n", "a", "any"])
    place = draw(st.integers(1, len(found)))
    return {
        "longer": (*found, *draw(st.lists(odd, min_size=1, max_size=3))),
        "shorter": found[:place],
        "inside": (*found[: place - 1], draw(odd), *found[place - draw(st.integers(0, 1)) :]),
        "no": (*found[:-1], "no_" + found[-1]),
        "deep": (*found, *["a"] * draw(st.sampled_from([30, 1000]))),
    }[change], None


def text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@st.composite
def options(draw: st.DrawFn, section: type[Section]) -> list[str]:
    found, setting = draw(keys(section))
    name = "--" + ".".join(found)
    name = draw(st.sampled_from([name] * 4 + [name.replace("_", "-"), name.upper()]))
    likely = st.sampled_from(plausible(setting)).map(text)
    value = draw(st.sampled_from([likely] * 7 + [TEXTS]).flatmap(lambda strategy: strategy))
    form = draw(st.sampled_from(["glued", "next"] * 8 + ["alone", "two", "file", "stray"]))
    return {
        "alone": [name],
        "glued": [f"{name}={value}"],
        "next": [name, value],
        "two": [name, value, draw(TEXTS)],
        "file": [name, "@", draw(st.sampled_from(["x.toml", "y.toml"]))],
        "stray": [value],
    }[form]


@st.composite
def files(draw: st.DrawFn, section: type[Section]) -> bytes:
    """TOML of a wrong shape, or what is no TOML."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from(ODD_FILES).map(lambda text: text.encode("latin-1")) | st.binary(max_size=20))
    table = Assignments()
    for found, setting in draw(st.lists(keys(section), min_size=1, max_size=4)):
        likely = st.sampled_from(plausible(setting))
        value = draw(st.sampled_from([likely] * 9 + [VALUES]).flatmap(lambda strategy: strategy))
        table.put(found[:40], value)
    return tomli_w.dumps(table.get(())).encode()


@st.composite
def inputs(draw: st.DrawFn) -> tuple[type[BaseConfig], list[str], dict[str, str], dict[str, bytes]]:
    """A class, arguments, variables, and the files that arguments may name."""
    cls = draw(st.sampled_from(list(LEAST)))
    arguments = draw(st.lists(options(cls), max_size=3).map(lambda found: [token for one in found for token in one]))
    arguments = [token for token in arguments if token not in ("-h", "--help")]
    variables = {}
    for one, setting in draw(st.lists(keys(cls), max_size=2) | st.just([])):
        likely = st.sampled_from(plausible(setting)).map(text)
        variables["PRIME_" + "__".join(one).upper()] = draw(
            st.sampled_from([likely] * 5 + [TEXTS]).flatmap(lambda strategy: strategy)
        )
    found = {"x.toml": draw(files(cls)), "y.toml": draw(files(cls))}
    at = draw(
        st.sampled_from([[], ["@", "x.toml"], ["@x.toml", "@", "y.toml"], ["@"], ["@", "."], ["@", "trainer/.."]])
    )
    return cls, [*(LEAST[cls] if draw(st.integers(0, 4)) else []), *at, *arguments], variables, found


def check(cls: type[BaseConfig], argv: list[str], variables: dict[str, str], found: dict[str, bytes]) -> None:
    out, err, before = StringIO(), StringIO(), Path.cwd()
    with TemporaryDirectory() as folder, patch.dict(os.environ, variables), redirect_stdout(out), redirect_stderr(err):
        os.chdir(folder)
        config, status = None, 0
        try:
            for name, content in found.items():
                Path(name).write_bytes(content)
            config = load(cls, argv, prog="prog")
        except SystemExit as exited:
            status = exited.code
        finally:
            os.chdir(before)
    lines = err.getvalue().split("\n")[:-1]
    if config is not None:
        assert tomllib.loads(to_toml(config).encode().decode())
        assert all(line.startswith("hint: ") for line in lines)
    else:
        assert status == 2
        assert len(lines) > 1
        assert lines.pop().startswith("Nothing was started.")
        assert all(line.startswith("error: ") for line in lines)
    assert not out.getvalue()
    assert len(lines) <= LINES
    assert all(len(line) <= LINE for line in lines)


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(inputs())
def test_any_input_ends_in_a_configuration_or_in_error_lines(
    given_input: tuple[type[BaseConfig], list[str], dict[str, str], dict[str, bytes]],
) -> None:
    check(*given_input)
