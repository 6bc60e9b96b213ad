"""Contract: every configuration file in the repository is valid for the entrypoint that it is written for."""

from pathlib import Path

import pytest

from prime_rl.config import (
    BaseConfig,
    EvalConfig,
    InferenceConfig,
    OrchestratorConfig,
    RLConfig,
    SFTConfig,
    TrainerConfig,
    parse,
)

REPOSITORY = Path(__file__).parents[3]
FILES = sorted(path for folder in ("examples", "configs") for path in (REPOSITORY / folder).rglob("*.toml"))
# What a file is for, by the first word of its name; anything else (rl, cpu, …) is a whole run.
CLASSES: dict[str, type[BaseConfig]] = {
    "train": TrainerConfig,
    "orch": OrchestratorConfig,
    "infer": InferenceConfig,
    "sft": SFTConfig,
    "eval": EvalConfig,
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_shipped_file(path: Path) -> None:
    if path.parent.name == "algorithms":  # these go over the config of a run
        parse(RLConfig, ["@", str(REPOSITORY / "examples/reverse_text/cpu.toml"), "@", str(path)], {})
    else:
        parse(CLASSES.get(path.stem.split("_")[0], RLConfig), ["@", str(path)], {})
