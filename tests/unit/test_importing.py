"""Functions of the user's own: found where the processes of a run find them, run once, and refused in words."""

import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.errors import UserError
from prime_rl.importing import load_function

COUNTING = """
import sys
sys.runs = getattr(sys, "runs", 0) + 1

def first(logprob, old, advantage, sequences): ...
def second(result, sequences): ...
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one not in ("", str(Path.cwd()))])
    monkeypatch.setattr(sys, "runs", 0, raising=False)
    return tmp_path


def test_a_file_is_run_once(here: Path) -> None:
    """Contract: for all settings that name it, however they write its path."""
    (here / "own.py").write_text(COUNTING)
    one = load_function("own.py:first", {}, 3, "loss.path", offered=("sequences",))
    other = load_function(f"{here}/../{here.name}/own.py:first", {}, 3, "algorithm.path", offered=("sequences",))
    assert one is other
    assert sys.runs == 1  # type: ignore[attr-defined]


def test_a_module_of_the_working_directory(here: Path) -> None:
    """Contract: found as the processes of `rl` find it, though a console script has another path. It hides none."""
    (here / "only_here.py").write_text("def value(): ...")
    (here / "json.py").write_text("raise AssertionError")
    script = "import sys; sys.path[:] = [one for one in sys.path if one]\n"
    script += "from prime_rl.importing import load_function\n"
    script += "print(load_function('only_here:value', {}, 0, 'loss.path').__module__)\n"
    script += "load_function('json:dumps', {}, 1, 'loss.path')"
    found = subprocess.run([sys.executable, "-P", "-c", script], cwd=here, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "only_here\n"


@pytest.mark.parametrize(
    ("path", "arguments", "problem"),
    [
        ("own.py:second", 1, "missing a required argument: 'sequences'"),  # only where it is offered one
        ("failing.py:value", 0, "cannot be imported: ValueError: half done"),
        ("builtins:max", 3, "does not take its arguments: no signature found"),
        ("builtins:dict", 3, "does not take its arguments: no signature found"),
        (
            "nowhere:value",
            0,
            r"'nowhere:value' \(module:name or file.py:name\) cannot be imported: .*No module named 'nowhere'",
        ),
    ],
)
def test_a_refusal_says_what_to_do(here: Path, path: str, arguments: int, problem: str) -> None:
    (here / "own.py").write_text(COUNTING)
    (here / "failing.py").write_text("def value(): ...\nraise ValueError('half done')")
    with pytest.raises(UserError, match=problem):
        load_function(path, {}, arguments, "loss.path")
    (here / "failing.py").write_text("def value(): ...")
    assert load_function("failing.py:value", {}, 0, "loss.path"), "a file that failed is not kept"
