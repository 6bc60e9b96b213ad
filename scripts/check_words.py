#!/usr/bin/env python3
"""Count names in src/ that DESIGN's vocabulary replaces, names that are not unique, and import cycles.

    python scripts/check_words.py            # counts; exit status 1 if one exceeds its limit in LIMITS
    python scripts/check_words.py --list     # every finding with file and line
    python scripts/check_words.py --limit 0  # exit status 1 if there are more findings than this in total

Names of classes, functions, arguments, variables, attributes and modules are split at underscores and capitals, and
the parts are looked up in WORDS. LIMITS only fall: lower one when its count has fallen.

Left out, because they also have an ordinary technical meaning: history (of a conversation), record and account (verbs),
host (a machine), share and part (a fraction, a part of a checkpoint), stretch, confine (a sandbox does), refused (a
connection is), fall, proven. Words in BARE count only where they are the whole name.
"""

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
# What to say: the words that no name has.
VOCABULARY = {
    "incarnation": "life lives foundations",
    "Scheduler and its states": "core flying landing",
    "Ledger": "book journal",
    "WeightSync": "serving",
    "Replica, ReplicaPool": "member members roster verdict verdicts",
    "verify, LogprobCheck": "prove proves doubt doubts canary tainted taint",
    "publish": "tell tells told lent lend",
    "durable": "lasting",
    "superseded": "aside",
    "EnvPool, Worker, slot": "crew crews employer hire hires hired seat seats staff staffing",
    "attribution, offending episode": "blame blames blamed culprit culprits obituary obituaries",
    "Watchdog, stalled": "vigil vigils marks",
    "EvalSidecar": "companion companions",
    "allowed roots": "places confined",
    "slice, range": "piece pieces",
    "offloaded": "parked",
    "advantage, reward": "worth",
}
WORDS = {word: instead for instead, words in VOCABULARY.items() for word in words.split()}
BARE = {"given", "there", "ends", "found", "how", "lost", "again"}  # no names for values
# Modules named after the entrypoints, and the two files whose paths `torchrun` is given.
NAMED_BY_ENTRYPOINT = ("config/", "entrypoints/", "rl/train.py", "sft/train.py", "__init__.py", "__main__.py")
LIMITS = {"word": 0, "class defined twice": 0, "file name used twice": 1, "import cycle": 0}


class Finding(NamedTuple):
    kind: str
    path: str
    line: int
    what: str


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every name that the module binds, with its line."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name)
                | ast.arg(arg=name) | ast.alias(asname=str(name))
                | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store())
            ):  # fmt: skip
                yield name, node.lineno


def word_findings(path: str, tree: ast.Module) -> Iterator[Finding]:
    module = path.removesuffix("/__init__.py").rpartition("/")[2].removesuffix(".py")
    for name, line in [(module, 1), *names(tree)]:
        parts = {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)}
        for word in sorted(parts & WORDS.keys()):
            yield Finding("word", path, line, f"{word}: `{name}`, say {WORDS[word]}")
        if (bare := name.strip("_")) in BARE:
            yield Finding("word", path, line, f"{bare}: `{name}`, use a noun for the value")


def repeated(kind: str, places: Iterable[tuple[str, str, int]]) -> Iterator[Finding]:
    """Yield a finding for each (name, path, line) after the first of its name."""
    seen: dict[str, str] = {}
    for name, path, line in places:
        if name in seen:
            yield Finding(kind, path, line, f"{name}: also {seen[name]}")
        seen.setdefault(name, f"{path}:{line}")


def imports(tree: ast.AST, modules: Iterable[str]) -> Iterator[str]:
    """Yield the modules that this one imports, anywhere but under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from {f"{node.module}.{alias.name}" for alias in node.names} & set(modules) or {node.module}
        else:
            yield from imports(node, modules)


def cycles(graph: dict[str, list[str]], paths: dict[str, str]) -> Iterator[Finding]:
    """Yield one finding a cycle; an edge of each is removed to find the next."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = error.args[1]
        yield Finding("import cycle", paths[circle[0]], 1, " <- ".join(circle))
        graph[circle[1]].remove(circle[0])
        yield from cycles(graph, paths)


def check(root: Path) -> list[Finding]:
    """Return everything wrong in the package at `root`."""
    files = sorted(root.rglob("*.py"))
    trees = {file.relative_to(root).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}
    findings = [finding for path, tree in trees.items() for finding in word_findings(path, tree)]
    nodes = ((path, node) for path, tree in trees.items() for node in ast.walk(tree))
    classes = ((node.name, path, node.lineno) for path, node in nodes if isinstance(node, ast.ClassDef))
    findings += repeated("class defined twice", classes)
    named = [(Path(path).name, path, 1) for path in trees if not any(part in path for part in NAMED_BY_ENTRYPOINT)]
    findings += repeated("file name used twice", named)
    paths = {f"{root.name}/{path}"[:-3].removesuffix("/__init__").replace("/", "."): path for path in trees}
    graph = {name: sorted({*imports(trees[path], paths)} & paths.keys() - {name}) for name, path in paths.items()}
    return [*findings, *cycles(graph, paths)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Count names that DESIGN's vocabulary replaces.")
    parser.add_argument("--list", action="store_true", help="print every finding with file and line")
    parser.add_argument("--limit", type=int, help="fail above this total instead of the limits of each kind")
    arguments = parser.parse_args()
    findings = check(ROOT / "src" / "prime_rl")
    counts = Counter(finding.kind for finding in findings)
    over = {kind for kind in counts if counts[kind] > LIMITS[kind]} if arguments.limit is None else set()
    for finding in findings:
        if arguments.list or finding.kind in over:
            print(f"src/prime_rl/{finding.path}:{finding.line}: {finding.kind}: {finding.what}")
    words = Counter(finding.what.partition(":")[0] for finding in findings if finding.kind == "word")
    print("\n".join(f"{count:5d}  {word}" for word, count in words.most_common()))
    for kind, limit in LIMITS.items():
        advice = f"; lower its limit in {Path(__file__).name}" if counts[kind] < limit else ""
        print(f"{counts[kind]:5d}  {kind} (limit {limit}{advice})")
    sys.exit(bool(over) if arguments.limit is None else len(findings) > arguments.limit)


if __name__ == "__main__":
    main()
