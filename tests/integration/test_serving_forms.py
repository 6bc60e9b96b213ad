"""Every command of docs/guides/serving.md becomes arguments that vLLM's parser takes, with the command's values."""

import argparse
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

from prime_rl.config import InferenceConfig, parse
from prime_rl.errors import UserError
from prime_rl.inference import compat
from prime_rl.inference.server import arguments

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "serving.md"
COMMANDS = re.findall(r"^uv run inference ([^#\n]+?)\s*(?:#.*)?$", PAGE.read_text(), re.MULTILINE)
OTHER_NAMES = {"model_name": "model"}
OTHER_VALUES = {("quantization", "fp8"): "fp8_per_tensor"}


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """vLLM's parser sets variables."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def parsed(command: str) -> tuple[InferenceConfig, argparse.Namespace]:
    """Our config, and what vLLM makes of the arguments for a GPU."""
    installed = compat.require_engine()
    config = parse(InferenceConfig, shlex.split(command), {})
    argv = arguments(config, installed._replace(device="cuda"))
    return config, compat.parse_arguments(installed, argv, config.vllm)


def given(command: str) -> dict[str, str]:
    """`--a.b-c 1 --d` as `{"a_b_c": "1", "d": ""}`."""
    found: dict[str, str] = {}
    for token in shlex.split(command):
        if token.startswith("--"):
            name = token[2:].removeprefix("vllm.").replace("-", "_").replace(".", "_")
            found[OTHER_NAMES.get(name, name)] = ""
        else:
            found[list(found)[-1]] = token
    return found


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables and vLLM's config objects by joined names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = value if isinstance(value, Mapping) else vars(value) if is_dataclass(value) else None
        found |= {f"{prefix}{name}": value} if inner is None else flat(inner, f"{prefix}{name}_")
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_vllm_takes_what_is_documented(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: nothing that a page tells to type is unknown to vLLM, and every value arrives where its name says."""
    monkeypatch.setenv("VLLM_API_KEY", "k")
    _, args = parsed(command)
    got = flat(vars(args))
    for name, value in given(command).items():
        expected = str(float(value)) if isinstance(got[name], float) else value or "True"
        assert str(got[name]) == OTHER_VALUES.get((name, value), expected), name


def test_the_page_holds_every_form() -> None:
    """Contract: the forms that users of other systems know are there."""
    names = {name for command in COMMANDS for name in given(command)}
    assert len(COMMANDS) >= 14
    assert names >= {
        *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "data_parallel_size_local"),
        *("headless", "data_parallel_address", "data_parallel_rpc_port", "data_parallel_start_rank", "nnodes"),
        *("enable_expert_parallel", "all2all_backend", "quantization", "kv_offloading_size"),
        "kv_transfer_config_kv_connector",
    }  # fmt: skip


def test_an_unknown_option_is_one_line() -> None:
    """Contract: the nearest option of the installed release is named."""
    says = r"^vllm.all2all_bakend: vLLM .* has no option --all2all-bakend; did you mean all2all_backend\?$"
    with pytest.raises(UserError, match=says):
        parsed("--vllm.all2all-bakend allgather_reducescatter")
