"""`rl audit RUN`: where every episode of a run went, and whether the ledger contradicts itself."""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_rl.orchestrator.ledger import open_copy, read_counts
from prime_rl.transport.settings import LEDGER

_OUTCOMES = {
    "": "issued",
    "trained": "trained",
    "batched": "in a batch",
    "finished": "finished",
    "issued": "in flight",
    "dropped": "dropped",
}
_BY_OUTCOME = """
    WITH counted AS (
        SELECT env, e.state, COALESCE(reason, '') AS reason, 1 AS count, output_tokens, reward
        FROM episodes e JOIN groups g ON g.number = group_number
        UNION ALL SELECT env, state, reason, count, NULL, NULL FROM carried
    )
    SELECT env, '', '', SUM(count), AVG(output_tokens), AVG(reward) FROM counted GROUP BY env
    UNION ALL SELECT env, state, reason, SUM(count), AVG(output_tokens), AVG(reward) FROM counted GROUP BY 1, 2, 3"""
_FAULTS = {
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
    """The audit of a run. `faults`: where the ledger contradicts itself."""

    outcomes: list[OutcomeRow]
    faults: list[str]


def audit(run_dir: Path) -> AuditReport:
    """Read a copy of the run's ledger; the run may be alive.

    Raises:
        UserError: the run has no ledger, or a damaged one.
    """
    with open_copy(run_dir / LEDGER) as db:
        order = list(_OUTCOMES)
        rows = sorted(db.execute(_BY_OUTCOME), key=lambda row: (row[0], order.index(row[1]), row[2]))
        outcomes = [
            OutcomeRow(env, ": ".join(filter(None, (_OUTCOMES[state], reason))), *values)
            for env, state, reason, *values in rows
        ]
        return AuditReport(outcomes, _faults(db))


def _faults(db: sqlite3.Connection) -> list[str]:
    differences = {env: counts.difference for env, counts in read_counts(db).items()}
    faults = [f"{env}: {count:+d} episodes are unaccounted for" for env, count in differences.items() if count]
    for fault, query in _FAULTS.items():
        (count,) = db.execute(query).fetchone()
        faults += [f"{count} {fault}"] if count else []
    return faults


def audit_text(run_dir: Path) -> str:
    """Audit a run; returns a table. Raises as `audit` does."""
    report = audit(run_dir)
    lines = [f"Episodes of {run_dir} (attempts; length: sampled tokens)"]
    if report.outcomes:
        table = [["environment", "outcome", "episodes", "mean length", "mean reward"]]
        for row in report.outcomes:
            length = "-" if row.output_tokens is None else f"{row.output_tokens:.1f}"
            reward = "-" if row.reward is None else f"{row.reward:.4f}"
            table.append([row.env, row.name, f"{row.episodes:,}", length, reward])
        lines += _aligned(table)
    else:
        lines.append("None was issued yet.")
    if report.faults:
        return "\n".join(
            [*lines, "NOT CONSERVED, the ledger contradicts itself:", *(f"  {fault}" for fault in report.faults)]
        )
    conserved = "Conserved: issued = trained + dropped + in flight, finished or in a batch, in every environment."
    return "\n".join([*lines, conserved])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns: the two of words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(widths[i]) if i < 2 else cell.rjust(widths[i]) for i, cell in enumerate(row)]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
