"""Commands with their configuration classes, and the least that each needs."""

import shlex
from collections.abc import Mapping

from prime_rl.config import (
    BaseConfig,
    EvalConfig,
    OrchestratorConfig,
    RLConfig,
)
from prime_rl.config.base import Section
from prime_rl.config.loader import Config, Entry, Table
from prime_rl.config.schema import CONFIGS

COMMANDS = {command: cls for command, cls in CONFIGS.items() if command != "tenants"}
CLASSES = list(COMMANDS.values())
ENV = ["--environment.id", "x"]
ORCH = ["--orchestrator.environment.id", "x"]
LEAST: dict[type[BaseConfig], list[str]] = {cls: [] for cls in CLASSES} | {
    RLConfig: ORCH,
    OrchestratorConfig: ENV,
    EvalConfig: ["--environment-ids", "x"],
}


def from_table(cls: type[Config], table: Mapping[str, object]) -> Config:
    """As `parse` makes it from a file: sections, also such made in Python, share what they have in common."""
    read = Table()
    for name, value in table.items():
        tree = value.model_dump(exclude_unset=True) if isinstance(value, Section) else value
        read.add((name,), tree, Entry(name="x.toml", precedence=1))
    cls.share(read)
    return cls.model_validate(read.tree())


def command_line(command: str) -> tuple[type[BaseConfig], list[str], dict[str, str]]:
    """Class, arguments and variables of `PRIME_SEED=1 trainer --bench`."""
    words = shlex.split(command)
    variables = dict(words.pop(0).split("=") for word in words[:] if word.startswith("PRIME_"))
    return COMMANDS[words[0]], words[1:], variables
