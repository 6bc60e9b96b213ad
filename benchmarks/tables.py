"""Tables of GPU measurements, from the JSON files alone: as text for a terminal, and in `README.md` between markers."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from machine import renewed
from steps import Case
from suites import SUITES

HERE = Path(__file__).parent
RESULTS = HERE / "results"
README = HERE / "README.md"
NOT_MEASURED = "not measured"
COLUMNS = 118

Row = Mapping[str, Any]
Table = list[list[str]]

HEADINGS = [
    "case",
    "tokens/s",
    "bar",
    "peer, tuned",
    "true MFU",
    "peer's MFU",
    "step ms (min–max)",
    "GiB estimated / allocated / reserved",
    "forward + backward / optimizer ms",
    "chosen",
]


def cells(case: Case, row: Row | None) -> list[str]:
    """A case's line under `HEADINGS`."""
    if row is None or "failed" in row:
        reason = NOT_MEASURED if row is None else f"failed: {row['failed']}"
        return [case.name, reason, _bar(case), _peer(case), "", "", "", "", "", ""]
    step = row["step_ms"]
    return [
        case.name,
        f"{row['tokens_per_second']:,.0f}",
        _bar(case) + (f" ({verdict(case, row)})" if case.bar or case.mfu_bar else ""),
        _peer(case),
        _percent(row["mfu"]),
        _percent(row["peer_mfu"]),
        f"{step['median']:,.0f} ({step['min']:,.0f}–{step['max']:,.0f})",
        " / ".join(_number(row[f"{kind}_gib"], ".1f") for kind in ("estimated", "allocated", "reserved")),
        " / ".join(_number(row["parts_ms"][part], ",.1f") for part in ("forward_backward", "optimizer")),
        row["chosen"],
    ]


def verdict(case: Case, row: Row) -> str:
    """How far a bar was reached, and whether that took too much memory."""
    share = row["tokens_per_second"] / case.bar if case.bar else (row["mfu"] or 0.0) / (case.mfu_bar or 1.0)
    too_much = case.within is not None and row["allocated_gib"] > case.within
    return f"{share:.2f} ×" + (", too much memory" if too_much else "")


def _bar(case: Case) -> str:
    if not case.bar and not case.mfu_bar:
        return ""
    text = f"{case.bar:,.0f}" if case.bar else f"{case.mfu_bar:.0f} % MFU"
    return text + (f" in {case.within:.0f} GiB" if case.within else "")


def _peer(case: Case) -> str:
    return _number(case.peer, ",.0f") if case.peer else ""


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1f} %"


def suite_table(suite: str, cases: Sequence[Case], rows: Mapping[str, Row]) -> Table:
    """The table of a suite, without columns that have nothing to say."""
    lines = [[*HEADINGS], *(cells(case, rows.get(case.name)) for case in cases)]
    if suite in _RELATIVE:
        heading, relative = _RELATIVE[suite]
        lines[0].insert(2, heading)
        for case, line in zip(cases, lines[1:], strict=True):
            line.insert(2, relative(case, cases, rows))
    used = [column for column in range(len(lines[0])) if column < 2 or any(line[column] for line in lines[1:])]
    return [[line[column] for column in used] for line in lines]


def _measured(case: Case, rows: Mapping[str, Row]) -> bool:
    return "tokens_per_second" in rows.get(case.name, {})


def _of_one_rank(case: Case, cases: Sequence[Case], rows: Mapping[str, Row]) -> str:
    """All ranks together, as a multiple of one."""
    alone = next(other for other in cases if other.ranks == 1 and other.model == case.model)
    if not _measured(case, rows) or not _measured(alone, rows):
        return ""
    return f"{case.ranks * rows[case.name]['tokens_per_second'] / rows[alone.name]['tokens_per_second']:.2f} ×"


def _of_all_weights(case: Case, cases: Sequence[Case], rows: Mapping[str, Row]) -> str:
    """The MFU of adapters, as a share of that of the same documents when all weights are trained."""
    shape = case.model, case.documents
    whole = next((other for other in cases if not other.lora and (other.model, other.documents) == shape), case)
    mfu, of_whole = (rows.get(each.name, {}).get("mfu") for each in (case, whole))
    return f"{mfu / of_whole:.2f} ×" if case.lora and whole is not case and mfu and of_whole else ""


_RELATIVE = {"ranks": ("times 1 rank", _of_one_rank), "lora": ("MFU, of all weights'", _of_all_weights)}


def case_table(suite: str, cases: Sequence[Case], rows: Mapping[str, Row]) -> str:
    """For a terminal."""
    return text_table(suite_table(suite, cases, rows))


def text_table(table: Table) -> str:
    """Columns aligned with spaces."""
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in table
    )


def markdown(table: Table) -> str:
    head, *lines = table
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines])


def readme() -> str:
    """`README.md` with the part between the markers written again."""
    parts = [*_trainer_part(), *_sync_part()]
    return renewed(README, "trainer", "\n" + "\n\n".join(parts) + "\n")


def rewrite_readme() -> None:
    """Write that."""
    README.write_text(readme())


def _read(name: str) -> dict[str, Any]:
    path = RESULTS / name
    return json.loads(path.read_text()) if path.is_file() else {}


def _machine(measured: Mapping[str, Any]) -> str:
    """`2026-11-20, NVIDIA H200, driver 580.1, Python 3.12.3, torch 2.11.0, …`"""
    gpus = measured.get("gpus") or ["no GPU"]
    name, *rest = (part.strip() for part in gpus[0].split(","))
    driver = f", driver {rest[-1]}" if rest else ""
    versions = ", ".join(f"{package} {found}" for package, found in measured.get("packages", {}).items())
    count = f"{len(gpus)} × " if len(gpus) > 1 else ""
    return f"{measured['date']}, {count}{name}{driver}, Python {measured['python']}, {versions}"


def _prose(text: str) -> str:
    return textwrap.fill(text, COLUMNS, break_long_words=False, break_on_hyphens=False)


def _machines(rows: Mapping[str, Row]) -> str:
    seen = sorted({_machine(row["measured"]) for row in rows.values() if "measured" in row})
    return "Measured: " + "; ".join(seen) + "." if seen else "Not measured."


SYNC = (
    "weights, load",
    "MiB",
    "cast / copy / write / hash / commit ms",
    "check / stage / in no part ms",
    "pause: stop / load / all ms",
    "HTTP to resumed / from step to served ms",
    "then until its logprobs are checked ms",
    "first token after ms",
    "gap between tokens: all requests / the longest of one ms",
    "gap before it / while staging ms",
    "tokens/s quiet, while staging",
    "kept",
)


def sync_lines(rows: Mapping[str, Row]) -> Table:
    """One line a case of `weight_sync.py`: medians over its versions."""
    return [[*SYNC], *(_sync_cells(name, row) for name, row in rows.items())]


def _sync_cells(name: str, row: Row) -> list[str]:
    def ms(*parts: str) -> str:
        return " / ".join(format(1e3 * row["median"].get(part, 0.0), ",.0f") for part in parts)

    return [
        name,
        f"{row['bytes'] / 2**20:,.0f}",
        ms("cast", "copy", "write", "hash", "commit"),
        ms("check", "stage", "rest"),
        ms("stop", "load", "pause"),
        ms("update", "total"),
        ms("prove") if "prove" in row["median"] else "",
        ms("first_token"),
        ms("gap", "gap_of_a_request"),
        ms("quiet_gap", "staging_gap"),
        f"{row['median']['quiet_tokens_per_second']:,.0f}, {row['median']['staging_tokens_per_second']:,.0f}",
        ", ".join(sorted({one["place"] for one in row["syncs"]})),
    ]


def _sync_part() -> list[str]:
    parts = []
    for name in ("cpu", "h100", "h200", "one_h100", "one_h200", "lora_h200"):
        name = f"weight_sync_{name}.json"
        rows = _read(name).get("rows", {})
        parts.append(_prose(f"`weight_sync.py`, `{name}`. {_machines(rows)}"))
        parts += [markdown(sync_lines(rows))] if rows else []
    return parts


_TITLES = {
    "bars": (
        "Bars on one H200: no option is set but the memory limit that a row names. "
        "Weights are exported after every step."
    ),
    "optim": "Other optimizers, and optimizer states in host memory.",
    "ranks": (
        "Several GPUs, each with two micro-batches a step; tokens/s and memory are per GPU. "
        "The bar is 1.9 times 1 rank for 2."
    ),
    "lora": (
        "Adapters of rank 16 in place of all weights. FLOP are counted without gradients of frozen weights; the bar is "
        "0.9 of the MFU when all weights of that shape are trained."
    ),
}


def _trainer_part() -> list[str]:
    measured = _read("trainer_h200.json")
    parts = []
    for suite, title in _TITLES.items():
        rows = measured.get(suite, {})
        parts.append(_prose(f"`trainer.py --suite {suite}`. {title} {_machines(rows)}"))
        parts.append(markdown(suite_table(suite, SUITES[suite], rows)))
    return parts
