"""Models of known shapes without files, whole or with fewer layers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import make_tiny_model
from prime_rl.errors import UserError
from prime_rl.trainer.source import Source, find_model


def parameters(source: Source) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(source.config).parameters())


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-1.7B", 1_720_574_976),
        ("Qwen/Qwen3-4B", 4_022_468_096),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
    ],
)
def test_known_shapes(name: str, total: int) -> None:
    """Known names have as many parameters as the published models, with nothing downloaded; another name is refused."""
    source = find_model(name, random_weights=True)
    assert source.directory is None
    assert parameters(source) == total
    with pytest.raises(UserError, match="needs the shape of nobody/nothing"):
        find_model("nobody/nothing", random_weights=True)


def test_fewer_layers(tmp_path: Path) -> None:
    """A model without files can be built with fewer layers, and no two callers share its config."""
    whole, part = (find_model("Qwen/Qwen3-30B-A3B", random_weights=True, layers=layers) for layers in (None, 8))
    attention = 2048 * (4096 + 2 * 512) + 4096 * 2048 + 2 * 128
    experts = 128 * 2048 + 128 * 3 * 768 * 2048
    assert parameters(whole) - parameters(part) == 40 * (attention + experts + 2 * 2048)
    assert part.config.num_hidden_layers == 8
    assert whole.config.num_hidden_layers == 48
    (make_tiny_model(tmp_path) / "model.safetensors").unlink()
    assert find_model(str(tmp_path), random_weights=True, layers=1).config.layer_types == ["full_attention"]
    with pytest.raises(UserError, match="layers 3 is more than the 2 layers"):
        find_model(str(tmp_path), random_weights=True, layers=3)


def test_layers_of_real_weights(tmp_path: Path) -> None:
    """Layers of a model that has weights are never left out, and nothing is downloaded before that is said."""
    make_tiny_model(tmp_path)
    for name, fake in ((str(tmp_path), True), (str(tmp_path), False), ("someone/a-large-model", False)):
        with pytest.raises(UserError, match="needs random weights"):
            find_model(name, random_weights=fake, layers=1)
