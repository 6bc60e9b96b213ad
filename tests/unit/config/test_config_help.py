"""Contract: --help shows one section at a time, every option with type, default and one line, and is quick: it imports nothing heavy."""

import shutil
import subprocess
import sys

import pytest

from prime_rl.config import (
    BaseConfig,
    OrchestratorConfig,
    RLConfig,
    TrainerConfig,
    load,
)
from prime_rl.config.help import SHELLS, help_text
from prime_rl.config.schema import settings
from prime_rl.config.table import spell
from support.configs import CLASSES, COMMANDS

HEAVY = ("torch", "vllm", "verifiers", "transformers", "datasets", "numpy", "pyarrow", "wandb", "rich", "httpx")


def printed(capsys: pytest.CaptureFixture[str], cls: type[BaseConfig], *argv: str) -> tuple[str, int]:
    """Standard output and error, and the exit status."""
    with pytest.raises(SystemExit) as caught:
        load(cls, argv, prog="prog")
    shown = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return shown.out + shown.err, caught.value.code


@pytest.mark.parametrize("cls", CLASSES)
def test_every_option_has_one_line_of_help_and_is_shown(cls: type[BaseConfig]) -> None:
    text = help_text(cls, "x", "all")
    flat = " ".join(text.split())
    for setting in settings(cls):
        keys = setting.keys
        description = setting.field.description or ""
        assert description.endswith("."), keys
        assert "\n" not in description
        assert len(description) <= 120, keys
        assert spell(keys, "option") in text or f"[{'.'.join(keys)}]" in text, keys
        assert keys[-1] == "type" or description.rstrip(".") in flat, keys


def test_the_overview_has_the_top_level_and_the_sections(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: whatever else is given; status 0."""
    monkeypatch.setenv("COLUMNS", "140")  # a narrow terminal breaks lines
    for argv in (["--help"], ["-h"], ["--nonsense", "--help"], ["--help", "@", "x.toml"]):
        text, status = printed(capsys, TrainerConfig, *argv)
        assert status == 0
    lines = text.splitlines()
    assert lines[0].startswith("usage: prog")
    assert any("--max-steps int|None" in line and "[default: None]" in line for line in lines)
    assert any("--device auto|cpu|cuda" in line for line in lines)
    assert any("--bench | --no-bench" in line and "[default: false]" in line for line in lines)
    assert any(line.startswith("  [ckpt]") for line in lines)
    assert "--optim.lr" not in text


def test_one_section_or_option(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    text, status = printed(capsys, RLConfig, "--help", "trainer.optim")
    assert status == 0
    assert "--trainer.optim.lr float" in text
    assert "[default: 1e-06]" in text
    assert "with --trainer.optim.type adamw, the default:" in text
    assert "--trainer.seq-len" not in text
    ckpt, _ = printed(capsys, TrainerConfig, "--help", "ckpt")
    assert "[default: off; --ckpt, --no-ckpt]" in ckpt
    environments, _ = printed(capsys, OrchestratorConfig, "--help", "environments")
    assert "--environments.N.id str" in environments
    assert "[required]" in environments
    assert "--optim.lr float" in printed(capsys, TrainerConfig, "--help", "optim.lr")[0]
    text, status = printed(capsys, RLConfig, "--help", "trainer.optimm")
    assert status == 2
    assert "no option has 'trainer.optimm' in its name or description" in text
    assert "--trainer.optim.lr" in printed(capsys, RLConfig, "--help", "learning rate")[0]


def test_search_in_names_and_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    text, status = printed(capsys, RLConfig, "--help=wandb")
    assert status == 0
    assert "--wandb.project str" in text
    assert "--trainer.monitor.wandb.id" in text
    assert "--trainer.optim.lr" not in text
    assert "--trainer.optim.lr" in printed(capsys, RLConfig, "--help=learning rate")[0]
    assert printed(capsys, RLConfig, "--help=zzz")[1] == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    text, status = printed(capsys, RLConfig, "--version")
    assert (text.startswith("prog (prime-rl "), status) == (True, 0)


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_is_a_script_of_that_shell(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    text, status = printed(capsys, RLConfig, "--completion", shell)
    assert status == 0
    assert "trainer.optim.lr" in text
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True, timeout=50)
    assert printed(capsys, RLConfig, "--completion", "csh") == (
        "error: --completion needs one of bash, zsh, fish\nNothing was started. For all settings: prog --help\n",
        2,
    )


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


def test_parsing_imports_nothing_heavy() -> None:
    parse = "from prime_rl.config import RLConfig, parse; parse(RLConfig, ['--orchestrator.environment.id', 'x'], {})"
    assert imported(parse) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_entrypoint_imports_nothing_heavy(name: str) -> None:
    """`rl --help` and the others answer before any large package is imported."""
    code = (
        "import sys, importlib\n"
        f"main = importlib.import_module('prime_rl.entrypoints.{name}').main\n"
        f"sys.argv = ['{name}', '--help']\n"
        "try: main()\nexcept SystemExit as stop: assert not stop.code, stop.code"
    )
    assert imported(code) == []
