"""`rl audit RUN`: where every episode of a run went, and whether the ledger contradicts itself."""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_rl.orchestrator.ledger import read_counts
from prime_rl.orchestrator.ledger_file import open_copy

LEDGER = "ledger.sqlite"
_OUTCOMES = {
    "trained": "trained",
    "batched": "in a batch",
    "finished": "finished",
    "issued": "in flight",
    "dropped": "dropped",
}


@dataclass(frozen=True)
class OutcomeRow:
    """The episodes (attempts) of one environment that ended the same way, and means over those whose values are known."""

    env: str
    name: str  # "issued" (all of them), "trained", "in a batch", "finished", "in flight", or "dropped: <reason>"
    episodes: int
    output_tokens: float | None
    reward: float | None


@dataclass(frozen=True)
class AuditReport:
    """The audit of a run. `faults` says where the ledger contradicts itself."""

    run: Path
    outcomes: list[OutcomeRow]
    faults: list[str]


def audit_text(run_dir: Path) -> str:
    """The audit of a run as a table.

    Raises:
        UserError: the run has no ledger, or a damaged one.
    """
    return "\n".join(_outcome_lines(audit(run_dir)))


def audit(run_dir: Path) -> AuditReport:
    """Read a copy of the run's ledger; the run may be alive.

    Raises:
        UserError: the run has no ledger, or a damaged one.
    """
    with open_copy(run_dir / LEDGER) as db:
        return AuditReport(run_dir, _outcomes(db), _faults(db))


def _outcomes(db: sqlite3.Connection) -> list[OutcomeRow]:
    query = """
        WITH counted AS (
            SELECT env, e.state, COALESCE(reason, '') AS reason, 1 AS count, output_tokens, reward
            FROM episodes e JOIN groups g ON g.number = group_number
            UNION ALL SELECT env, state, reason, count, NULL, NULL FROM carried
        )
        SELECT env, '', '', SUM(count), AVG(output_tokens), AVG(reward) FROM counted GROUP BY env
        UNION ALL SELECT env, state, reason, SUM(count), AVG(output_tokens), AVG(reward) FROM counted GROUP BY 1, 2, 3
    """
    order = list(_OUTCOMES)
    rows = sorted(db.execute(query), key=lambda row: (row[0], order.index(row[1]) if row[1] else -1, row[2]))
    return [
        OutcomeRow(env, ": ".join(filter(None, (_OUTCOMES.get(state, "issued"), reason))), count, tokens, reward)
        for env, state, reason, count, tokens, reward in rows
    ]


_NONE_OF = {
    "episodes of no group": "SELECT COUNT(*) FROM episodes WHERE group_number NOT IN (SELECT number FROM groups)",
    "episodes in flight, or waiting for a batch, in groups that are closed": """
        SELECT COUNT(*) FROM episodes e JOIN groups g ON g.number = group_number
        WHERE g.state != 'open' AND e.state IN ('issued', 'finished')""",
    "episodes trained at another step than their group's batch": """
        SELECT COUNT(*) FROM episodes e JOIN groups g ON g.number = group_number
        WHERE e.state IN ('batched', 'trained') AND (g.state != 'batched' OR e.step != g.step)""",
    "episodes with more than one trained attempt": """
        SELECT COUNT(*) FROM (
            SELECT 1 FROM episodes WHERE state IN ('batched', 'trained') GROUP BY group_number, number HAVING COUNT(*) > 1
        )""",
    "finished episodes without their tokens": """
        SELECT COUNT(*) FROM episodes WHERE state = 'finished' AND id NOT IN (SELECT id FROM results)""",
    "batched episodes of steps that are trained": """
        SELECT COUNT(*) FROM episodes
        WHERE state = 'batched' AND step < (SELECT value FROM meta WHERE key = 'version')""",
}


def _faults(db: sqlite3.Connection) -> list[str]:
    faults = [
        f"{env}: {counts.difference:+d} episodes are unaccounted for"
        for env, counts in read_counts(db).items()
        if counts.difference
    ]
    for what, query in _NONE_OF.items():
        (count,) = db.execute(query).fetchone()
        faults += [f"{count} {what}"] if count else []
    return faults


def _outcome_lines(report: AuditReport) -> list[str]:
    lines = [f"Episodes of {report.run} (attempts; length: sampled tokens)"]
    if report.outcomes:
        table = [["environment", "outcome", "episodes", "mean length", "mean reward"]]
        for row in report.outcomes:
            table.append([row.env, row.name, f"{row.episodes:,}", *_means(row.output_tokens, row.reward)])
        lines += _table(table)
    else:
        lines.append("None was issued yet.")
    if report.faults:
        return [*lines, "NOT CONSERVED, the ledger contradicts itself:", *(f"  {fault}" for fault in report.faults)]
    return [*lines, "Conserved: issued = trained + dropped + in flight, finished or in a batch, in every environment."]


def _means(output_tokens: float | None, reward: float | None) -> list[str]:
    return ["-" if output_tokens is None else f"{output_tokens:.1f}", "-" if reward is None else f"{reward:.4f}"]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of text: words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numeric = [all(cell[:1].isdigit() or cell[:1] == "-" for cell in column[1:]) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in rows
    ]
