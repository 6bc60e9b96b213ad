"""Print docs/reference/config-errors.md: 44 mistakes in a configuration, and what is printed for each.

uv run scripts/config_errors.py > docs/reference/config-errors.md
PYTHONPATH=../older/src uv run scripts/config_errors.py    # the same of another version, to compare
"""

import os
import shlex
import tempfile
from pathlib import Path

from prime_rl.config import (
    BaseConfig,
    ConfigError,
    EvalConfig,
    InferenceConfig,
    OrchestratorConfig,
    RLConfig,
    SFTConfig,
    TrainerConfig,
    parse,
)

HEAD = """# Mistakes in a configuration

What is printed for some of them. Nothing has started by then, and the exit status is 2. `scripts/config_errors.py`
makes this page.
"""
COMMANDS: dict[str, type[BaseConfig]] = {
    "rl": RLConfig,
    "trainer": TrainerConfig,
    "orchestrator": OrchestratorConfig,
    "inference": InferenceConfig,
    "sft": SFTConfig,
    "eval": EvalConfig,
}
ENV = "--orchestrator.environment.id x"
# A command line, possibly with variables before it, and the contents of x.toml where it names that file.
MISTAKES: list[tuple[str, str]] = [
    # unknown keys
    ("trainer @ x.toml", "seed = 1\n\n[optim]\nlrr = 1"),
    ("trainer @ x.toml", "[optimm]\nlr = 1"),
    ("trainer @ x.toml", "[trainer.optim]\nlr = 1"),
    ("rl @ x.toml", "[trainer.model]\nnam = 'm'\n[orchestrator.environment]\nid = 'x'"),
    ("rl @ x.toml", "learning_rate = 1\n[orchestrator.environment]\nid = 'x'"),
    ("rl @ x.toml", "[[orchestrator.environments]]\nid = 'x'\nration = 1"),
    ("trainer --model-name m", ""),
    ("trainer --optim.lrr 1", ""),
    ("trainer --lr 1e-5", ""),
    ("trainer --loss.clip-high 0.2", ""),
    ("trainer --optim.match-rms", ""),
    ("orchestrator --environment.id x --client.discover d", ""),
    ("inference --tp 2", ""),
    ("inference --gpu-memory 0.5", ""),
    ("eval --environment x", ""),
    ("PRIME_MODEL__NAEM=m trainer", ""),
    # wrong values
    ("trainer --max-steps ten", ""),
    ("trainer --max-steps", ""),
    ("trainer --optim.lr -1", ""),
    ("trainer --device gpu", ""),
    ("trainer --optim.type adam", ""),
    ("trainer --dry-run=perhaps", ""),
    ("trainer --seed 99999999999999999999", ""),
    ("trainer @ x.toml", "[optim]\nlr = [1]"),
    ("trainer @ x.toml", "optim = 3"),
    ("inference --server.port 99999", ""),
    ("PRIME_MAX_STEPS=ten trainer", ""),
    ("trainer --data.fake \"{'batch_size': }\"", ""),
    # files
    ("trainer x.toml", "seed = 1"),
    ("trainer @ missing.toml", ""),
    ("trainer @", ""),
    ("trainer @ x.toml", "seed = 1\nseed = 2"),
    ("trainer @ x.toml", "[optim\nlr = 1"),
    ("trainer @ x.toml", "include = 'x.toml'"),
    ("trainer -lr 1", ""),
    # contradictions and what is missing
    ("rl", ""),
    ("orchestrator", ""),
    (f"rl {ENV} --max-steps 5 --trainer.max-steps 6", ""),
    (f"rl {ENV} --orchestrator.seq-len 4096 --trainer.seq-len 2048", ""),
    (f"rl {ENV} --orchestrator.batch-size 10 --orchestrator.rollouts-per-example 4", ""),
    ("trainer --scheduler.type linear", ""),
    ("inference --headless", ""),
    ("eval --environment-ids x --steps 10", ""),
    ("sft --inference.model.name m", ""),
]


def printed(command: str) -> list[str]:
    """The lines that a command prints for its mistakes; none where it has none."""
    words = shlex.split(command)
    env = dict(word.split("=", 1) for word in words if word.startswith("PRIME_"))
    name, *argv = [word for word in words if not word.startswith("PRIME_")]
    try:
        parse(COMMANDS[name], argv, env)
    except ConfigError as error:
        return error.problems
    return []


def page() -> str:
    """The page, in Markdown."""
    parts = [HEAD]
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        try:
            for command, file in MISTAKES:
                Path("x.toml").write_text(file)
                shown = [f"$ {command}", *(f"error: {line}" for line in printed(command))]
                if file:
                    shown = ["# x.toml", *file.split("\n"), "", *shown]
                parts.append("\n".join(["```text", *shown, "```", ""]))
        finally:
            os.chdir(before)
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
