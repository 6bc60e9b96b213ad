"""Contract: every line of PRIME-RL's READMEs does what commands.md says. (What `runs` says: test_commands_run.py.)"""

import re
import shutil
from collections import Counter

import pytest
from safetensors.torch import load_file

from prime_rl.config import RLConfig, parse
from support.commands import PAGE, Row, fork_line, make_checkout, parse_line, read_rows
from support.processes import REPOSITORY
from support.serving import commit

ROWS = read_rows()
EIGHT_GPUS = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
MODEL = REPOSITORY / "assets" / "tiny-reverse"


def rows_of(*kinds: str) -> list[Row]:
    return [row for row in ROWS if row.kind in kinds]


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """The weights of an earlier run: versions 10 to 50."""
    root = tmp_path_factory.mktemp("earlier") / "weights"
    tensors = load_file(MODEL / "model.safetensors")
    for version in (10, 20, 30, 40, 50):
        commit(root, version, MODEL, tensors)
    return root


@pytest.fixture
def checkout(tmp_path):
    directory = make_checkout(tmp_path / "prime-rl")
    for name in ("8b", "14b"):
        (directory / f"qwen{name}.toml").write_text(f'[model]\nname = "Qwen/Qwen3-{name.upper()}"\n')
    return directory


TORCHRUN = re.compile(r" torchrun (.*?) src/prime_rl/trainer/(rl|sft)/train.py")


def on_one_rank(line: str) -> str:
    """Return the line with torchrun's script as its command: test_sft.py and test_trainer.py start two ranks."""
    return TORCHRUN.sub(lambda found: " trainer" if found[2] == "rl" else " sft", line)


def test_torchrun_accepts_its_options():
    from torch.distributed.run import get_args_parser

    lines = [found[1] for row in ROWS if (found := TORCHRUN.search(row.line))]
    assert lines
    for options in lines:
        get_args_parser().parse_args([*parse_line(f"torchrun {options}")[1][1:], "train.py"])


@pytest.mark.parametrize("row", {on_one_rank(row.line): row for row in rows_of("plans", "hint")}.values(), ids=str)
def test_planned(row, checkout, request):
    """Pasted with `--dry-run` the line is accepted, writes its configuration, and says what the page promises."""
    if "outputs/weights" in row.line:
        (checkout / "outputs").mkdir()
        shutil.copytree(request.getfixturevalue("versions"), checkout / "outputs" / "weights")
    status, output = fork_line(on_one_rank(row.line), checkout, "--dry-run", environment=EIGHT_GPUS)
    assert status == 0, output
    written = [path for path in checkout.glob("outputs*/**/*") if path.is_file() and "weights" not in path.parts]
    assert written
    assert {path.parent.name for path in written} <= {"configs", "dry-run"}, "resolved configurations, and nothing else"
    assert any(row.text in text for text in (output, *(path.read_text() for path in written)))
    assert "Traceback" not in output


@pytest.mark.parametrize("row", rows_of("refused"), ids=str)
def test_refused(row, checkout):
    """A line that cannot be meant ends at once, in one line that says what to type."""
    status, output = fork_line(row.line, checkout, environment=EIGHT_GPUS)
    assert status not in (0, None), output
    assert row.text in output
    assert "Traceback" not in output
    assert not (checkout / "outputs").exists(), "something was started"


@pytest.mark.parametrize("command", sorted({row.text.split()[0] for row in rows_of("help")}))
def test_help(command, checkout):
    """`--help all` lists the options that the documents name, with their defaults."""
    status, output = fork_line(f"uv run {command} --help all", checkout, environment={"COLUMNS": "300"})
    assert status == 0
    missing = []
    for row in rows_of("help"):
        entrypoint, option, *default = row.text.split()
        if entrypoint != command:
            continue
        found = [line for line in re.split(r"\n(?=  [-\[])", output) if line.split()[:1] == [option]]
        off = "[default: off;" if option.startswith("[") else ""
        expected = f"[default: {default[0]}]" if default else off
        if not any(expected in " ".join(line.split()) for line in found):
            missing.append((row.text, found))
    assert not missing


def test_migrated():
    """What is not carried over has a line in docs/migration.md."""
    lines = [line for line in (REPOSITORY / "docs" / "migration.md").read_text().splitlines() if line.startswith("| ")]
    assert [row.line for row in rows_of("migrated") if not any(row.text in line for line in lines)] == []


def test_named_paths_and_tests_exist():
    """A test is named with its function, so that none is left behind that no longer exists."""
    assert [row.text for row in rows_of("path") if not (REPOSITORY / row.text).exists()] == []
    for row in rows_of("test"):
        file, _, function = row.text.partition("::")
        assert re.search(rf"^(async )?def {function}\(", (REPOSITORY / file).read_text(), re.MULTILINE), row


def test_the_walkthrough_trains_as_the_documents_say():
    """Reverse text: the warmed-up model, a context of 128 tokens, 20 steps."""
    config = parse(RLConfig, ["@", str(REPOSITORY / "examples" / "reverse_text" / "rl.toml")], {})
    assert config.model.name == "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT"
    assert config.max_steps == 20
    assert config.orchestrator.seq_len == 128
    assert config.inference.max_model_len == 128


def test_the_readme_has_a_citation():
    assert "@misc{primeintellect2025prime-rl," in (REPOSITORY / "README.md").read_text()


def test_programs_of_others_are_installed():
    """What the documents call besides our own commands comes with the installation."""
    for program in ("wandb", "hf", "prime", "vf-eval", "pre-commit", "torchrun"):
        assert shutil.which(program, path=str(REPOSITORY / ".venv" / "bin")), program


def test_the_page_counts_its_rows():
    """Nothing is left out silently: the page's sum is that of its rows."""
    counts = Counter(row.kind for row in ROWS)
    working = sum(counts[kind] for kind in ("runs", "plans", "hint", "help", "path", "test"))
    expected = (
        f"{len(ROWS)} rows: {working} work, {counts['refused']} are refused with the line to type, "
        f"{counts['migrated']} are in docs/migration.md, {counts['elsewhere']} cannot be tried here."
    )
    assert expected in PAGE.read_text(), expected
