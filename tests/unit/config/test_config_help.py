"""Contract: --help shows one section at a time, every option with type, default and one line; no heavy imports."""

import shutil
import subprocess
import sys

import pytest

from prime_rl.config import BaseConfig, RLConfig, load
from prime_rl.config.base import settings
from prime_rl.config.loader import SHELLS, help_text, spell
from support.configs import CLASSES, COMMANDS, ORCH, command_line

HEAVY = ("torch", "vllm", "verifiers", "transformers", "datasets", "numpy", "pyarrow", "wandb", "rich", "httpx")
# What is typed, what is printed, and what is not.
SHOWN = [
    ("trainer --help", "usage: prog", "--optim.lr"),
    ("trainer -h", "--max-steps int|None Steps to run (None: until stopped). [default: None]", "--optim.lr"),
    ("trainer --nonsense --help", "--device auto|cpu|cuda Where to train", "--optim.lr"),
    ("trainer --help @ x.toml", "--bench | --no-bench Measure", "--optim.lr"),
    ("rl --help trainer.optim", "--trainer.optim.lr float Learning rate. [default: 1e-06]", "--trainer.seq-len"),
    ("rl --help trainer.optim", "with --trainer.optim.type adamw, the default: AdamW. --trainer.optim.lr", "usage"),
    (
        "trainer --help ckpt",
        "[ckpt] Checkpoints of the full training state. [default: off; --ckpt, --no-ckpt]",
        "usage",
    ),
    ("orchestrator --help environments", "--environments.N.id str Name that", "--environment.id"),
    ("orchestrator --help environments", "is installed under. [required]", "usage"),
    ("trainer --help optim.lr", "--optim.lr float", "--optim.max-norm"),
    ("rl --help 'learning rate'", "--trainer.optim.lr", "--trainer.optim.offload"),
    ("rl '--help=learning rate'", "--trainer.optim.lr", "--trainer.optim.offload"),
    ("rl --help=wandb", "--wandb.project str", "--trainer.optim.lr"),
    ("rl --help trainer", "[trainer.optim] The optimizer.", "--trainer.optim.lr"),
    ("rl --help trainer", "--trainer.seq-len int", "--trainer-gpus"),
    ("rl --help=wandb", "--trainer.monitor.wandb.id", "--trainer.optim.lr"),
    ("rl --version", "prog (prime-rl ", "usage"),
    *((f"rl --completion {shell}", "trainer.optim.lr", "usage") for shell in SHELLS),
]


def printed(capsys: pytest.CaptureFixture[str], cls: type[BaseConfig], *argv: str) -> tuple[str, int]:
    """What is printed, and the exit status; only mistakes go to standard error."""
    with pytest.raises(SystemExit) as caught:
        load(cls, argv, prog="prog")
    shown = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    assert bool(shown.err) == bool(caught.value.code)
    return shown.out + shown.err, caught.value.code


@pytest.mark.parametrize(("line", "shown", "hidden"), SHOWN)
def test_what_is_asked_for_is_shown(monkeypatch, capsys, line, shown, hidden):
    monkeypatch.setenv("COLUMNS", "300")  # a narrow terminal breaks lines
    cls, argv, _ = command_line(line)
    text, status = printed(capsys, cls, *argv)
    assert status == 0
    assert shown in " ".join(text.split())
    assert hidden not in text


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--help", "trainer.optimm"], "no option has 'trainer.optimm' in its name or description"),
        (["--help=zzz"], "no option has 'zzz' in its name or description"),
        (["--completion", "csh"], "--completion needs one of bash, zsh, fish"),
        ([], "orchestrator: required, but not given"),
        (["--sed", "1", "--max-steps", "x", *ORCH], "max_steps: must be a valid integer, got 'x' (--max-steps)\n"
         "error: --sed names no setting; did you mean --seed?"),
    ],
)  # fmt: skip
def test_what_names_nothing_is_a_mistake(capsys, argv, problem):
    usual = "" if argv else " Settings usually go in a file: prog @ config.toml."
    says = f"Nothing was started.{usual} All settings: prog --help=all; those that are gone: docs/migration.md"
    assert printed(capsys, RLConfig, *argv) == (f"error: {problem}\n{says}\n", 1)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_option_has_one_line_of_help_and_is_shown(cls):
    text = help_text(cls, "x", "all")
    flat = " ".join(text.split())
    for setting in settings(cls):
        keys, description = setting.keys, setting.field.description or ""
        assert description.endswith("."), keys
        assert "\n" not in description
        assert len(description) <= 120, keys
        assert spell(keys, "option") in text or f"[{'.'.join(keys)}]" in text, keys
        assert keys[-1] == "type" or description in flat, keys


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_is_a_script_of_that_shell(capsys, shell):
    if shutil.which(shell):
        script, _ = printed(capsys, RLConfig, "--completion", shell)
        subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=50)


def test_help_that_nobody_reads_to_its_end():
    """Contract: `rl --help | head -1` ends quietly."""
    command = [sys.executable, "-m", "prime_rl.entrypoints.rl", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, errors = process.communicate(timeout=50)
    assert (process.returncode, errors) == (0, b"")


PARSE = "from prime_rl.config import RLConfig, parse; parse(RLConfig, ['--orchestrator.environment.id', 'x'], {})"
HELP = """
import sys
from prime_rl.entrypoints.NAME import main
sys.argv = ['NAME', '--help']
try: main()
except SystemExit as stop: assert not stop.code, stop.code
"""


@pytest.mark.parametrize("code", [PARSE, *(HELP.replace("NAME", name) for name in COMMANDS)])
def test_parsing_and_help_import_nothing_heavy(code):
    script = f"{code}\nimport sys\nsys.exit(' '.join(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.stderr.strip(), done.returncode) == ("", 1)  # sys.exit("")
