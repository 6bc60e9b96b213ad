"""`rl parity` with a real server: the bundled model is sound; with a wrong head or a missing scale it is not."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from prime_rl.config import parse
from prime_rl.config.rl import ParityConfig
from prime_rl.fleet.logprob_check import LEAST_MEAN
from prime_rl.trainer import parity_scorer
from prime_rl.trainer.packing import MicroBatch, collate
from support.processes import Command

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def compared(inference_server, tmp_path_factory):
    """The directory of a comparison by the command, and what it printed."""
    directory, server = tmp_path_factory.mktemp("parity"), inference_server
    server.reset()
    words = ["parity", "--model.name", server.model, "--client.base-url", server.base_url, "--output-dir", directory]
    with Command("rl", *words, "--device", "cpu", "--layers", log=directory / "rl.log") as command:
        assert command.process.wait(300) == 0, command.log.read_text()
    return directory / "parity", command.log.read_text()


@pytest.mark.slow
def test_families_in_vllm(tmp_path):
    """Contract: after an update a hybrid's convolutions are the new ones; vLLM keeping old weights is refused."""
    rows, script = tmp_path / "rows.json", Path(__file__).parents[2] / "scripts" / "check_served.py"
    subprocess.run([sys.executable, script, "--rows", rows, "--only", "falcon_h1", "--only", "gpt_oss"], check=True)
    hybrid, mixture = (json.loads(rows.read_text())["rows"][name] for name in ("falcon_h1", "gpt_oss"))
    assert (hybrid["verdict"], hybrid["moved"] > 1) == ("sound", True)
    assert "keeps the old weights of its GptOssRoutedExperts, OAIAttention" in mixture["reason"]


def layers(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("layer ")]


def test_the_bundled_model_is_sound(compared):
    """Contract: in float32 server and trainer agree to 1e-4 on what the server sampled; layers are transformers'."""
    directory, printed = compared
    result = json.loads((directory / "parity.json").read_text())
    assert result["sound"]
    assert result["tokens"] >= 50
    assert all(gap["largest"] < 1e-4 for gap in result["gaps"].values())
    assert len(layers(result["lines"])) == 3
    assert not any("wrong" in line for line in layers(result["lines"]))
    assert printed.splitlines()[-1].startswith("sound: ")


def judged(compared: tuple[Path, str], directory: Path, model: Path, *more: str) -> dict[str, Any]:
    """What is found of the samples of the command where the trainer's side is `model` with more settings."""
    shutil.copy(compared[0] / "samples.json", directory)
    torch.set_num_threads(1)
    config = parse(ParityConfig, ["--model.name", str(model), "--device", "cpu", *more], {})
    sound = parity_scorer.score(config, directory)
    result: dict[str, Any] = json.loads((directory / "parity.json").read_text())
    assert result["sound"] is sound
    return result


def scale(tensors: Tensors) -> None:
    tensors["model.norm.weight"] *= 1.1  # of all logits


def another_head(tensors: Tensors) -> None:
    head = tensors["model.embed_tokens.weight"]  # which is tied
    head[100:] = head[100:].roll(1, 0)


@pytest.mark.parametrize("change", [scale, another_head])
def test_another_model_of_the_same_shape_is_not_sound(compared, tiny_model, tmp_path, change):
    """Contract: a server that sampled from something else than the trainer's files is found, and named."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    result = judged(compared, tmp_path, model)
    assert not result["sound"]
    assert "look at the server" in result["lines"][-1]
    assert result["gaps"][parity_scorer.TRAINED]["largest"] < 1e-4


def test_a_trainer_that_computes_something_else_is_not_sound(compared, tiny_model, tmp_path, monkeypatch):
    """Contract: where the trainer's head leaves a scale out it is the trainer that is named, and no layer of it."""

    def scaled(*arguments: Any) -> MicroBatch:
        batch = collate(*arguments)
        return replace(batch, inv_temperature=batch.inv_temperature * 1.25)

    monkeypatch.setattr(parity_scorer, "collate", scaled)
    result = judged(compared, tmp_path, tiny_model, "--layers")
    assert not result["sound"]
    assert "look at the trainer" in result["lines"][-1]
    assert not any("wrong" in line for line in layers(result["lines"]))


def test_where_the_trainer_begins_to_differ(compared, tiny_model, tmp_path, monkeypatch):
    """Contract: the first layer that is marked is the one that is computed otherwise."""
    build = parity_scorer.build_policy

    def broken(*arguments: Any, **named: Any) -> Any:
        policy = build(*arguments, **named)
        policy.lm.model.layers[1].register_forward_hook(lambda _, args, out: out * 1.1)
        return policy

    monkeypatch.setattr(parity_scorer, "build_policy", broken)
    result = judged(compared, tmp_path, tiny_model, "--layers")
    assert [line.endswith("wrong") for line in layers(result["lines"])] == [False, True, True]


def test_rounding_is_no_fault(compared, tiny_model, tmp_path):
    """Contract: in bfloat16 the trainer exceeds float32's tolerance, but not transformers' error: it is sound."""
    result = judged(compared, tmp_path, tiny_model, "--trainer.model.dtype", "bfloat16", "--layers")
    assert result["gaps"][parity_scorer.ENGINES]["mean"] > LEAST_MEAN
    assert result["sound"], result["lines"]
    assert len(layers(result["lines"])) == 3
    assert not any("wrong" in line for line in layers(result["lines"]))
