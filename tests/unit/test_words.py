"""`scripts/check_words.py` counts names that the vocabulary replaces, repeated names and import cycles."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_words.py"


def test_findings_of_each_kind_in_a_small_package(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("check_words", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    check_words = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check_words)
    package = tmp_path / "shop"
    (package / "room").mkdir(parents=True)
    (package / "till.py").write_text("import shop.room.sale\n\n\nclass Crew:\n    lives = 2\n")
    (package / "room" / "sale.py").write_text(
        "def sell(alive):\n    from shop import till\n    found = foundry = till\n"
    )
    (package / "room" / "till.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import shop.till\n\nclass Crew:\n    pass\n"
    )
    findings = [(finding.kind, finding.path, finding.line) for finding in check_words.check(package)]
    assert sorted(findings) == [
        ("class defined twice", "till.py", 4),
        ("file name used twice", "till.py", 1),
        ("import cycle", "room/sale.py", 1),
        ("word", "room/sale.py", 3),
        ("word", "room/till.py", 5),
        ("word", "till.py", 4),
        ("word", "till.py", 5),
    ]
