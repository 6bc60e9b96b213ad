"""Contract: the lines that run the tests, with this repository's settings, over a small tree of tests."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TESTS = """
import pytest

def test_fast(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.gpu
def test_gpu(): pass
"""
LEFT_OUT = "2 tests not selected: slow ones, which `-m slow` runs"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    for place in ("unit", "integration"):
        (root / "tests" / place).mkdir(parents=True)
        (root / "tests" / place / f"test_{place}.py").write_text(TESTS)
    shutil.copy(REPOSITORY / "tests" / "conftest.py", root / "tests")
    return root


@pytest.mark.parametrize(
    ("line", "passed", "last"),
    [
        (["-v"], {"unit::fast", "unit::gpu", "integration::fast", "integration::gpu"}, LEFT_OUT),
        (["tests/unit", "-v"], {"unit::fast", "unit::gpu"}, LEFT_OUT.replace("2", "1", 1)),
        (["-v", "-n0", "-m", "not gpu"], {"unit::fast", "unit::slow", "integration::fast", "integration::slow"}, ""),
        (["-v", "-n0", "-m", "not slow"], {"unit::fast", "unit::gpu", "integration::fast", "integration::gpu"}, ""),
    ],
)
def test_pytest_lists_what_it_runs_and_says_what_it_left_out(
    line: list[str], passed: set[str], last: str, tree: Path
) -> None:
    command = [sys.executable, "-m", "pytest", *line]
    output = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True, timeout=120).stdout
    names = [word for word in output.split() if "::test_" in word]
    assert {
        f"{Path(name.partition('::')[0]).stem.removeprefix('test_')}::{name.rpartition('test_')[2]}" for name in names
    } == passed
    assert ("not selected" in output) == bool(last)
    assert last in output
