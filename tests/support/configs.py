"""Commands with their configuration classes, and the least that each needs."""

import shlex

from prime_rl.config import (
    BaseConfig,
    EvalConfig,
    InferenceConfig,
    OrchestratorConfig,
    RLConfig,
    SFTConfig,
    TrainerConfig,
)

COMMANDS: dict[str, type[BaseConfig]] = {
    "rl": RLConfig,
    "trainer": TrainerConfig,
    "orchestrator": OrchestratorConfig,
    "inference": InferenceConfig,
    "sft": SFTConfig,
    "eval": EvalConfig,
}
CLASSES = list(COMMANDS.values())
ENV = ["--environment.id", "x"]
ORCH = ["--orchestrator.environment.id", "x"]
LEAST: dict[type[BaseConfig], list[str]] = {cls: [] for cls in CLASSES} | {
    RLConfig: ORCH,
    OrchestratorConfig: ENV,
    EvalConfig: ["--environment-ids", "x"],
}


def command_line(command: str) -> tuple[type[BaseConfig], list[str], dict[str, str]]:
    """Class, arguments and variables of `PRIME_SEED=1 trainer --bench`."""
    words = shlex.split(command)
    variables = dict(words.pop(0).split("=") for word in words[:] if word.startswith("PRIME_"))
    return COMMANDS[words[0]], words[1:], variables
