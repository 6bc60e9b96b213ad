"""On a CPU, what would not fit into the host's memory is said before it is built: the kernel would end it without a word."""

from pathlib import Path

import pytest

from prime_rl.config import TrainerConfig
from prime_rl.errors import UserError
from prime_rl.trainer import model
from prime_rl.trainer.model import check_host_memory, host_estimate
from prime_rl.trainer.parallel import World
from prime_rl.trainer.source import find_model
from support import trainer as support

tied_model, world = support.tied_model, support.world


def test_what_is_counted(world: World) -> None:
    """16 bytes a parameter at least (weights, gradients, AdamW's states), wherever the states lie, and more for more tokens."""
    source = find_model("Qwen/Qwen3-0.6B", random_weights=True)
    few, many, offloaded = (
        host_estimate(TrainerConfig.model_validate({"optim": {"offload": offload}}), source, world, tokens)
        for tokens, offload in ((256, False), (2048, False), (2048, True))
    )
    assert few is not None
    assert many is not None
    assert 16 * 596e6 < few.total < many.total
    assert offloaded == many


def test_too_little_memory(
    world: World, tied_model: Path, monkeypatch: pytest.MonkeyPatch, heard: pytest.LogCaptureFixture
) -> None:
    """It ends a benchmark, with a command that fits; a run goes on with a warning. Where there is enough nothing is said."""
    source = find_model(str(tied_model))
    needed = host_estimate(TrainerConfig(), source, world, 128)
    assert needed is not None
    monkeypatch.setattr(model, "available_bytes", lambda: needed.total)
    check_host_memory(TrainerConfig(bench=True), source, world, 128, "trainer --small")
    assert heard.text == ""
    monkeypatch.setattr(model, "available_bytes", lambda: needed.total - 1)
    with pytest.raises(UserError, match=r"128 tokens a micro-batch takes about .* for example: trainer --small"):
        check_host_memory(TrainerConfig(bench=True), source, world, 128, "trainer --small")
    check_host_memory(TrainerConfig(), source, world, 128, "trainer --small")
    assert "the kernel may end this process" in heard.text
