"""The documentation names code, options and files that exist, in lines that can be read."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl.config import EvalConfig, InferenceConfig, OrchestratorConfig, RLConfig, SFTConfig, TrainerConfig
from prime_rl.config.base import find
from prime_rl.config.rl import ParityConfig

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "prime_rl"
DOCS = ROOT / "docs"
PAGES = sorted(
    [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("examples/*/README.md")]
)
COLUMNS = 120
CONFIGS = (RLConfig, TrainerConfig, OrchestratorConfig, InferenceConfig, SFTConfig, EvalConfig, ParityConfig)
ROOMS = {path.name.removesuffix(".py") for path in SOURCE.iterdir() if not path.name.startswith("_")}


def exists(name: str) -> bool:
    """Whether `name`, as in `trainer.step.Step.run`, is a module, class, function or method of prime_rl."""
    parts = name.removeprefix("prime_rl.").split(".")
    path = SOURCE
    while parts and (path / parts[0]).is_dir():
        path /= parts.pop(0)
    if parts and (path / f"{parts[0]}.py").exists():
        path = path / f"{parts.pop(0)}.py"
    elif parts:
        path /= "__init__.py"
    if not parts:
        return True
    body: list[ast.stmt] = ast.parse(path.read_text()).body if path.exists() else []
    for part in parts:
        inner = next((node for node in body if part in names(node)), None)
        if inner is None:
            return False
        body = inner.body if isinstance(inner, ast.ClassDef) else []
    return True


def names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def prose(page: Path) -> Iterator[str]:
    """Yield lines, without code blocks, tables and what scripts write between markers."""
    code = generated = False
    for line in page.read_text().splitlines():
        if marker := re.match(r"<!-- .*: (begin|end) -->", line):
            generated = marker[1] == "begin"
        elif line.lstrip().startswith("```"):
            code = not code
        elif not (code or generated or line.startswith("|")):
            yield line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page(page: Path) -> None:
    """Contract: dotted names of rooms are code or options; linked files exist; prose fits its columns."""
    assert [line for line in prose(page) if len(line) > COLUMNS] == []
    text = page.read_text()
    dotted = {
        name for name in re.findall(r"`((?:\w+\.)+\w+)(?:\(\))?`", text) if name.split(".")[0] in {*ROOMS, "prime_rl"}
    }
    files = {name for name in dotted if name.rpartition(".")[2] in ("py", "jsonl", "toml", "log", "json", "sqlite")}
    options = {name for name in dotted if any(find(config, tuple(name.split("."))) for config in CONFIGS)}
    assert [name for name in sorted(dotted - files - options) if not exists(name)] == []
    modules = re.findall(r"`(?:src/prime_rl/)?((?:\w+/)+\w+\.py)`", text)
    assert [name for name in modules if not any((root / name).exists() for root in (ROOT, SOURCE))] == []
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    assert [link for link in links if not (page.resolve().parent / link).exists()] == []
