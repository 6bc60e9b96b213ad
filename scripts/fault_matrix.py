"""Every fault at every point of every process, in runs of `rl`, what each ended in, and docs/reference/fault-matrix.md.

    python scripts/fault_matrix.py                       # everything: some 90 runs, two at a time, an hour on two cores
    python scripts/fault_matrix.py --only 'kill trainer*' --jobs 1 --keep
    python scripts/fault_matrix.py --table               # the table from what was measured before

Rows go to --out as they are made; a cell that has one is not run again (--again runs those that failed, --fresh all).
Exit status 1 when a cell failed.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "benchmarks")]

from machine import describe_machine, renewed  # noqa: E402

from faults.cells import matrix  # noqa: E402
from faults.harness import Cell, run_cell  # noqa: E402

OUT = REPOSITORY / "benchmarks" / "results" / "fault_matrix.json"
PAGE = REPOSITORY / "docs" / "reference" / "fault-matrix.md"

Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="pattern of cells' names, e.g. 'kill trainer*'")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument(
        "--together",
        type=int,
        default=4,
        help="faults of one kind in one process that share a run; one by one if it fails",
    )
    parser.add_argument("--out", type=Path, default=OUT, help="rows as JSON")
    parser.add_argument("--again", action="store_true", help="run the cells again that failed")
    parser.add_argument("--fresh", action="store_true", help="run all cells again")
    parser.add_argument(
        "--keep", action="store_true", help="keep the directories of all runs, not only of those that failed"
    )
    parser.add_argument("--scratch", type=Path, help="where the runs' directories go (default: a temporary directory)")
    parser.add_argument("--list", action="store_true", help="print the cells' names and end")
    parser.add_argument("--table", action="store_true", help="write the table from --out and end")
    options = parser.parse_args()
    cells = [cell for cell in matrix() if not options.only or any(fnmatch(cell.name, p) for p in options.only)]
    if options.list:
        print("\n".join(cell.name for cell in cells))
        return 0
    store = Store(options.out, fresh=options.fresh and not options.table)
    if not options.table:
        scratch = options.scratch or Path(tempfile.mkdtemp(prefix="fault-matrix-"))
        run_all(cells, store, scratch, options.jobs, options.together, again=options.again, keep=options.keep)
    print(store.summary())
    if options.table or not options.only:
        PAGE.write_text(renewed(PAGE, "fault matrix", table(store)))
    return 1 if store.failed(cell.name for cell in cells) else 0


class Store:
    """The rows, by the cells' names; written after each cell, so that an interrupted matrix goes on where it was."""

    def __init__(self, path: Path, fresh: bool) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._data: dict[str, Any] = {"machine": describe_machine(), "rows": {}}
        if path.exists() and not fresh:
            known, held = {cell.name for cell in matrix()}, json.loads(path.read_text())
            date = held["machine"]["date"]  # of rows that are older than dates of their own
            self._data["rows"] = {name: {"date": date, **row} for name, row in held["rows"].items() if name in known}

    def has(self, name: str, again: bool) -> bool:
        row = self._data["rows"].get(name)
        return row is not None and not (again and row["problems"])

    def add(self, name: str, row: Row) -> None:
        with self._lock:
            self._data["machine"] = describe_machine()
            self._data["rows"][name] = {"date": self._data["machine"]["date"], **row}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(json.dumps(self._data, indent=1) + "\n")
            temporary.replace(self._path)

    def rows(self) -> dict[str, Row]:
        return dict(self._data["rows"])

    @property
    def machine(self) -> dict[str, Any]:
        return dict(self._data["machine"])

    def failed(self, names: Any) -> list[str]:
        return [name for name in names if self._data["rows"].get(name, {}).get("problems")]

    def summary(self) -> str:
        rows = self.rows().values()
        failed = [row for row in rows if row["problems"]]
        seconds = sum(row["seconds"] / row.get("together", 1) for row in rows)
        lines = [
            f"{len(rows)} cells, {len(rows) - len(failed)} ended right, {len(failed)} did not; "
            f"{seconds / 60:.0f} minutes of runs"
        ]
        lines += [f"  {row['do']} {row['process']} {row['point']}: {row['problems'][0]}" for row in failed]
        return "\n".join(lines)


def run_all(
    cells: Sequence[Cell], store: Store, scratch: Path, jobs: int, together: int, *, again: bool, keep: bool
) -> None:
    """Run what is missing in `store`. First the undisturbed runs that the others are compared with."""
    missing = [cell for cell in cells if not store.has(cell.name, again)]
    print(f"{len(missing)} of {len(cells)} cells to run, {jobs} at a time, in {scratch}", flush=True)
    compared = {cell.reference: (cell.engine, cell.lora) for cell in missing if cell.reference}
    references = {name: scratch / f"undisturbed-{name}" for name in compared}
    for name, directory in references.items():
        if directory.exists():
            continue
        engine, lora = compared[name]
        result = run_cell(Cell("none", "-", "-", engine=engine, lora=lora), directory)
        print(f"undisturbed run ({name}): {result.outcome}, {result.seconds:.1f} s", flush=True)
        if result.problems:
            raise SystemExit(f"the undisturbed run is not right: {result.problems}")
    one_vllm = threading.Lock()
    done = Counter(len(missing))

    def work(group: Sequence[Cell]) -> None:
        cell = combined(group)
        more = f"-and-{len(group) - 1}-more" if len(group) > 1 else ""
        directory = scratch / re.sub(r"[^\w.-]+", "-", group[0].name + more)
        shutil.rmtree(directory, ignore_errors=True)
        reference = references[cell.reference] / "run" if cell.reference else None
        with one_vllm if cell.engine == "vllm" else nullcontext():
            result = run_cell(cell, directory, reference)
        if result.problems and len(group) > 1:
            print(f"{cell.name}: FAILED, {result.seconds:.1f} s; now one by one: {result.problems[0]}", flush=True)
            for single in group:
                work([single])
            return
        for single in group:
            place = {"do": single.do, "process": single.process, "point": single.point, "exact": single.exact}
            store.add(single.name, {**place, "together": len(group), **asdict(result)})
        print(f"{done.add(len(group))} {cell.name}: {result.outcome}, {result.seconds:.1f} s", flush=True)
        for problem in result.problems:
            print(f"    {problem}", flush=True)
        if not (keep or result.problems):
            shutil.rmtree(directory, ignore_errors=True)

    with ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(work, group) for group in grouped(missing, together)]:
            future.result()


def grouped(cells: Sequence[Cell], together: int) -> list[list[Cell]]:
    """Group cells whose faults can follow one another in a run: of one process and setting, and the run goes on."""
    groups: dict[str, list[list[Cell]]] = {}
    for number, cell in enumerate(cells):
        alone = (
            cell.exact == "nothing"
            or cell.ends == "ends"
            or cell.resume is not None
            or cell.engine == "vllm"
            or not cell.faults
        )
        # A disk that is full before a process was ever ready ends the run: nothing could happen after it.
        alone |= cell.do == "enospc" and any(name in cell.point for name in ("incarnations", "step_0", "leases"))
        key = str(number) if alone else f"{cell.do} {cell.process} {cell.exact} {cell.settings}"
        lists = groups.setdefault(key, [[]])
        if len(lists[-1]) == together:
            lists.append([])
        lists[-1].append(cell)
    return [group for lists in groups.values() for group in lists]


def combined(group: Sequence[Cell]) -> Cell:
    """One cell in which the faults of all happen."""
    if len(group) == 1:
        return group[0]
    faults = tuple(fault for cell in group for fault in cell.faults)
    return replace(group[0], point=" + ".join(cell.point for cell in group), faults=faults)


class Counter:
    def __init__(self, total: int) -> None:
        self._total, self._count, self._lock = total, 0, threading.Lock()

    def add(self, cells: int) -> str:
        with self._lock:
            self._count += cells
            return f"[{time.strftime('%H:%M:%S')} {self._count}/{self._total}]"


def table(store: Store) -> str:
    """Fault × process × point → outcome, as Markdown."""
    rows, lines = store.rows(), []
    machine = store.machine
    measured = matrix()
    done = [rows[cell.name] for cell in measured if cell.name in rows]
    right = sum(not row["problems"] for row in done)
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    minutes = sum(row["seconds"] / row.get("together", 1) for row in done) / 60
    summary = (
        f"{right} of {len(done)} cells ended right ({len(measured) - len(done)} not run), {minutes:.0f} minutes of "
        f"runs. {dates(done)}; {machine['cores']} cores of {machine['cpu']}, Python {machine['python']}, {packages}."
    )
    legend = (
        "*s*: seconds of the run; `/ 4`: so many faults happened in it, one after the other. *starts*: how often "
        "processes were started."
    )
    lines += [
        _wrap(summary),
        "",
        _wrap(legend),
        "",
        "| fault | process | point | outcome | compared | starts | s | date |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in measured:
        row = rows.get(cell.name)
        if row is None:
            lines.append(f"| {cell.do} | {cell.process} | `{cell.point}` | not run | | | | |")
            continue
        outcome = row["outcome"] if not row["problems"] else f"**{row['outcome']}**: {_plain(row['problems'][0])}"
        starts = ", ".join(f"{name} {count}" for name, count in row["incarnations"].items() if count > 1)
        shared = row.get("together", 1)
        seconds = f"{row['seconds']:.0f}" + (f" / {shared}" if shared > 1 else "")
        lines.append(
            f"| {cell.do} | {cell.process} | `{cell.point}` | {outcome} | {cell.exact} | {starts} | {seconds} | "
            f"{row['date']} |"
        )
    return "\n".join(lines)


def _wrap(text: str) -> str:
    """Wrap prose at the width of the docs; no name is broken."""
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def dates(rows: Sequence[Row]) -> str:
    """How many rows are of which day."""
    days = sorted(row["date"] for row in rows)
    return ", ".join(f"{days.count(day)} of {day}" for day in dict.fromkeys(days))


def _plain(text: str) -> str:
    """Fit for a cell of a table: no machine's paths, no bars."""
    return re.sub(r"/[\w./-]*/run/", "", text).replace("|", "\\|").replace("\n", " ")[:200]


if __name__ == "__main__":
    sys.exit(main())
