"""What was asked for and changes nothing is said, not passed over."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from prime_rl.config import TrainerConfig
from prime_rl.trainer.report import without_effect
from support import trainer as support

tied_model, run_training = support.tied_model, support.run_training


def lines(device: str = "cpu", width: int = 256, **settings: Any) -> list[str]:
    return list(without_effect(TrainerConfig.model_validate(settings), nn.Linear(width, 256), device))


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"model": {"memory_limit": 20}}, "model.memory_limit 20 has no effect"),
        ({"model": {"checkpointed_layers": 3}}, "model.checkpointed_layers 3 has no effect"),
    ],
)
def test_what_is_planned_on_gpus_only(settings: dict[str, Any], option: str) -> None:
    """One line that names the option, on a CPU alone."""
    (line,) = lines(**settings)
    assert line.startswith(option)
    assert lines("cuda", **settings) == []


def test_states_that_no_matrix_has() -> None:
    """8-bit states need rows of whole blocks; where a matrix has them nothing is said."""
    settings = {"optim": {"type": "adamw", "state": "int8"}}
    (line,) = lines("cuda", width=100, **settings)
    assert line.startswith("optim.state int8 has no effect")
    assert lines("cuda", **settings) == []


def test_what_a_cpu_honours() -> None:
    """Nothing is said of options that do on a CPU what they do elsewhere, nor of defaults."""
    assert lines() == []
    model = {"activation_checkpointing": "full", "checkpointed_layers": 1, "activation_offload": True, "head_chunk": 8}
    assert lines(model={**model, "reshard_after_forward": False, "compile": True}, optim={"offload": True}) == []


def test_the_loop_says_it(
    run_training: Callable[[TrainerConfig], None],
    tied_model: Path,
    tmp_path: Path,
    heard: pytest.LogCaptureFixture,
) -> None:
    """As a warning, once."""
    config = support.make_config(tmp_path, tied_model, max_steps=1, data={"fake": {"batch_size": 2}})
    config.model.memory_limit = 0.5
    run_training(config)
    (record,) = [record for record in heard.records if "has no effect" in record.getMessage()]
    assert (record.levelname, "model.memory_limit" in record.getMessage()) == ("WARNING", True)
