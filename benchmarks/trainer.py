"""Speed and memory of the trainer: whole steps on real shapes with random weights and fake data, a process for a case.

    python benchmarks/trainer.py --suite bars                                   # what is to be reached on one H200
    python benchmarks/trainer.py --suite optim | ranks | losses | lora
    python benchmarks/trainer.py --case "4B 1x16384 memory_limit=80" --case "0.6B 16x4096 loss.type=gspo"
    python benchmarks/trainer.py --device cpu --suite tiny                      # no GPU
    python benchmarks/trainer.py --table                                        # README.md's tables from the JSON files

Needs `src` on PYTHONPATH and the trainer's packages, no network and no files. Figures go to `results/trainer_h200.json`
(`--json`): rows that are not measured again are kept. What the processes print goes to `--log`.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from forked import run_forked
from machine import describe_gpus, describe_machine
from steps import Case, measure, model_bytes, parse_case
from suites import SUITES
from tables import case_table, rewrite_readme

RESULTS = Path(__file__).parent / "results" / "trainer_h200.json"
_MEMORY = Path("/dev/shm")
_LEAST_SECONDS = 30.0  # for a case that is begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", action="append", default=[], choices=[*SUITES])
    parser.add_argument(
        "--case", action="append", default=[], help='for example "0.6B 1x16384 memory_limit=15 steps=8"'
    )
    parser.add_argument("--only", action="append", help="rows of the suites whose name contains this")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=3600.0, help="no case is begun after so many seconds")
    parser.add_argument(
        "--scratch", type=Path, help="directory for what is exported (memory where there is room, or the temporary one)"
    )
    parser.add_argument("--json", type=Path, default=RESULTS, help="file for the figures (results/trainer_h200.json)")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "trainer_benchmark.log")
    parser.add_argument("--table", action="store_true", help="only write README.md's tables again")
    parser.add_argument(
        "--collect", type=Path, help="only take the trainer.json that gpu/suite.sh left in this folder into results/"
    )
    arguments = parser.parse_args()
    if arguments.collect is not None:
        collect(arguments.collect)
    if arguments.table or arguments.collect is not None:
        rewrite_readme()
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes that were begun are ended
    deadline = time.monotonic() + arguments.seconds
    for suite in arguments.suite:
        run_cases(suite, [case for case in SUITES[suite] if wanted(case.name, arguments.only)], arguments, deadline)
    if arguments.case:
        run_cases("cases", [parse_case(text) for text in arguments.case], arguments, deadline)


def wanted(name: str, only: Sequence[str] | None) -> bool:
    return only is None or any(part in name for part in only)


def run_cases(suite: str, cases: Sequence[Case], arguments: argparse.Namespace, deadline: float) -> None:
    """Measure the cases one after the other; their table comes last."""
    gpus = describe_gpus()
    rows: dict[str, dict[str, Any]] = {}
    for case in cases:
        if arguments.device == "cuda" and case.ranks > max(len(gpus), 1):
            continue
        if time.monotonic() > deadline:
            print(f"{case.name}: no time left", flush=True)
            continue
        limit = min(case.limit, max(deadline - time.monotonic(), _LEAST_SECONDS))
        where = arguments.scratch or roomy(case)
        with tempfile.TemporaryDirectory(dir=where) as scratch:
            job = partial(measure, case, arguments.device, Path(scratch))
            outcome = run_forked(job, limit=limit, log=arguments.log, ranks=case.ranks)
        row = outcome.value if outcome.error is None else {"failed": outcome.error}
        took = {"seconds": outcome.seconds, "exported_to_memory": where == _MEMORY, "measured": here(gpus)}
        rows[case.name] = {**row, **took}
        save(arguments.json, suite, {case.name: rows[case.name]})
        print(f"{case.name}: {row.get('failed') or format(row['tokens_per_second'], ',.0f')}", flush=True)
    print(case_table(suite, cases, rows), flush=True)


def collect(folder: Path) -> None:
    """Take a suite's rows, but those that failed or could not run, in the place of older ones with the same names."""
    older = json.loads(RESULTS.read_text())
    for suite, rows in json.loads((folder / "trainer.json").read_text()).items():
        save(RESULTS, suite, replace_rows(older.get(suite, {}), rows))


def replace_rows(older: dict[str, Any], newer: dict[str, Any]) -> dict[str, Any]:
    """Both, `newer` in the place of `older`: a row without a result takes the place of none."""
    return older | {
        name: row for name, row in newer.items() if name not in older or not row.keys() & {"failed", "absent"}
    }


def roomy(case: Case) -> Path:
    """Return where versions go: to memory if three fit, as on a node that also serves, else the temporary directory."""
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 3.2 * model_bytes(case):
        return _MEMORY
    return Path(tempfile.gettempdir())


def here(gpus: Sequence[str]) -> dict[str, object]:
    """Hardware, versions and date, for every row: rows are measured on different days."""
    return {**describe_machine(), "gpus": list(gpus)}


def save(path: Path, suite: str, rows: dict[str, Any]) -> None:
    """Put rows into the file, in the place of older ones of the same names."""
    kept = json.loads(path.read_text()) if path.is_file() else {}
    kept[suite] = {**kept.get(suite, {}), **rows}
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
