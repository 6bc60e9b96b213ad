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
    ("line", "passed"),
    [
        (["-v"], {"unit::fast", "unit::gpu", "integration::fast", "integration::gpu"}),
        (["tests/unit", "-v"], {"unit::fast", "unit::gpu"}),
        (["-v", "-n0", "-m", "not gpu"], {"unit::fast", "unit::slow", "integration::fast", "integration::slow"}),
        (["-v", "-n0", "-m", "not slow"], {"unit::fast", "unit::gpu", "integration::fast", "integration::gpu"}),
    ],
)
def test_pytest_lists_what_it_runs(line: list[str], passed: set[str], tree: Path) -> None:
    command = [sys.executable, "-m", "pytest", *line]
    output = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True, timeout=120).stdout
    names = [word.partition("::") for word in output.split() if "::test_" in word]
    assert {
        f"{Path(file).stem.removeprefix('test_')}::{name.removeprefix('test_')}" for file, _, name in names
    } == passed
