"""Models of known shapes without files."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from prime_rl.errors import UserError
from prime_rl.trainer.source import find_model


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-1.7B", 1_720_574_976),
        ("Qwen/Qwen3-4B", 4_022_468_096),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-32B", 32_762_123_264),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
    ],
)
def test_known_shapes(name: str, total: int) -> None:
    """Known names have as many parameters as the published models, with nothing downloaded; another name is refused."""
    source = find_model(name, random_weights=True)
    assert source.directory is None
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(source.config)
    assert sum(p.numel() for p in lm.parameters()) == total
    with pytest.raises(UserError, match="needs the shape of nobody/nothing"):
        find_model("nobody/nothing", random_weights=True)
