"""Contract: --help shows every option with type, default and one line, and is quick: it imports nothing heavy."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from prime_rl.config import (
    BaseConfig,
    EvalConfig,
    InferenceConfig,
    OrchestratorConfig,
    RLConfig,
    SFTConfig,
    TrainerConfig,
    load,
)
from prime_rl.config.base import Section
from prime_rl.config.help import help_text
from prime_rl.config.origin import spell
from prime_rl.config.schema import Keys, Setting, settings

CLASSES = [RLConfig, TrainerConfig, OrchestratorConfig, InferenceConfig, SFTConfig, EvalConfig]
HEAVY = ("torch", "vllm", "verifiers", "transformers", "datasets", "numpy", "pyarrow", "wandb", "rich", "httpx")


def every(section: type[Section], prefix: Keys = ()) -> Iterator[tuple[Keys, Setting]]:
    for name, setting in settings(section).items():
        yield (*prefix, name), setting
        for member in setting.sections:
            yield from every(member, (*prefix, name))
        if setting.item_section is not None:
            yield from every(setting.item_section, (*prefix, name, "N"))


@pytest.mark.parametrize("cls", CLASSES)
def test_every_option_is_shown_with_its_help(cls: type[BaseConfig]) -> None:
    text = help_text(cls, "x")
    flat = " ".join(text.split())
    for keys, setting in every(cls):
        assert spell(keys, "option") in text or f"[{'.'.join(keys)}]" in text, keys
        description = (setting.field.description or "").rstrip(".")
        assert description
        assert keys[-1] == "type" or description in flat, keys


@pytest.mark.parametrize("cls", CLASSES)
def test_every_setting_has_one_line_of_help(cls: type[BaseConfig]) -> None:
    for keys, setting in every(cls):
        description = setting.field.description or ""
        assert description.endswith("."), keys
        assert "\n" not in description
        assert len(description) <= 120, keys


def test_types_defaults_and_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")  # a narrow terminal breaks lines
    text = help_text(TrainerConfig, "trainer")
    lines = text.splitlines()
    assert any("--optim.lr float" in line and "[default: 1e-06]" in line for line in lines)
    assert any("--max-steps int|None" in line and "[default: None]" in line for line in lines)
    assert any("--device auto|cpu|cuda" in line for line in lines)
    assert any("--bench | --no-bench" in line and "[default: false]" in line for line in lines)
    assert (
        "[ckpt] Checkpoints of the full training state (off unless given; --ckpt switches it on, --no-ckpt off):"
        in text
    )
    for member in ("default, the default", "grpo"):
        assert f"with --loss.type {member}:" in text
    assert "[required]" in help_text(OrchestratorConfig, "x")
    assert "--environments.N.id str" in help_text(OrchestratorConfig, "x")


def test_help_exits_with_status_0_whatever_else_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--help"], ["-h"], ["--nonsense", "--help"]):
        with pytest.raises(SystemExit) as caught:
            load(TrainerConfig, argv, prog="trainer")
        assert caught.value.code == 0
    assert "usage: trainer" in capsys.readouterr().out


def imported(code: str) -> list[str]:
    script = f"{code}\nimport json, sys\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return eval(done.stdout.splitlines()[-1])


def test_help_that_nobody_reads_to_its_end() -> None:
    """Contract: `rl --help | head -1` ends quietly."""
    command = [sys.executable, "-m", "prime_rl.entrypoints.rl", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, errors = process.communicate(timeout=50)
    assert (process.returncode, errors) == (0, b"")


def test_the_configuration_imports_nothing_heavy() -> None:
    """Neither importing the classes, nor help, nor parsing a command line."""
    parse = "from prime_rl.config import RLConfig, parse; parse(RLConfig, ['--orchestrator.environment.id', 'x'], {})"
    assert imported(parse) == []
    load_help = "from prime_rl.config import RLConfig, load\ntry: load(RLConfig, ['--help'])\nexcept SystemExit: pass"
    assert imported(load_help) == []


@pytest.mark.parametrize("name", ["rl", "sft", "trainer", "orchestrator", "inference", "eval"])
def test_the_help_of_each_entrypoint_imports_nothing_heavy(name: str) -> None:
    """`rl --help` and the others answer before any large package is imported."""
    code = (
        "import sys, importlib\n"
        f"main = importlib.import_module('prime_rl.entrypoints.{name}').main\n"
        f"sys.argv = ['{name}', '--help']\n"
        "try: main()\nexcept SystemExit as stop: assert not stop.code, stop.code"
    )
    assert imported(code) == []
