"""The matrix leaves nothing out: every fault point in the sources has a cell."""

import ast
from pathlib import Path

from faults.cells import matrix
from support.processes import REPOSITORY


def boundaries(file: Path) -> set[str]:
    """The boundary part of every `faults.point("boundary:…")` of a file."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "faults.point":
            name = node.args[0]
            text = name.values[0] if isinstance(name, ast.JoinedStr) else name
            assert isinstance(text, ast.Constant), f"{file}:{node.lineno}: a point's name begins with its boundary"
            found.add(str(text.value).partition(":")[0])
    return found


def test_every_point_in_the_sources_has_a_cell_in_which_its_process_is_killed():
    there = set.union(*(boundaries(file) for file in (REPOSITORY / "src").rglob("*.py")))
    killed = {cell.point.partition(":")[0] for cell in matrix() if cell.do.startswith("kill")}
    assert {"write", "rename", "ledger", "update-loaded", "result"} <= there  # the search finds something
    assert there <= killed
