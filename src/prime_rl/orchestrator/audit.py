"""`rl audit RUN`: where every episode of a run went, and whether the ledger contradicts itself."""

from pathlib import Path
from typing import NamedTuple

from prime_rl.orchestrator.ledger import open_copy
from prime_rl.transport.settings import LEDGER

_STATES = ["trained", "batched", "finished", "issued", "dropped"]  # in this order
_NAMES = {"batched": "in a batch", "issued": "in flight"}
_FAULTS = {
    "unaccounted for": """
        SELECT env || printf(': %+d episodes are', issued.count - COUNT(outcomes.id)) AS difference
        FROM issued LEFT JOIN outcomes USING (env) GROUP BY env HAVING issued.count != COUNT(outcomes.id)""",
    "episodes in flight, or waiting for a batch, in groups that are closed": """
        SELECT COUNT(*) FROM episodes e JOIN groups g ON g.number = group_number
        WHERE g.state != 'open' AND e.state IN ('issued', 'finished')""",
    "episodes trained at another step than their group's batch": """
        SELECT COUNT(*) FROM episodes e JOIN groups g ON g.number = group_number
        WHERE e.state = 'batched' AND (g.state != 'batched' OR e.step != g.step)""",
    "episodes with more than one trained attempt": """
        SELECT COUNT(*) FROM (
            SELECT 1 FROM episodes WHERE state = 'batched' GROUP BY group_number, number HAVING COUNT(*) > 1
        )""",
    "finished episodes without their tokens": """
        SELECT COUNT(*) FROM episodes WHERE state = 'finished' AND id NOT IN (SELECT id FROM results)""",
}


class OutcomeRow(NamedTuple):
    """The episodes (attempts) of one environment that ended the same way, and means where values are known."""

    env: str
    name: str  # "issued" (all of them), "trained", "in a batch", "finished", "in flight", or "dropped: <reason>"
    episodes: int
    output_tokens: float | None = None
    reward: float | None = None


class AuditReport(NamedTuple):
    """The audit of a run. `faults`: where the ledger contradicts itself."""

    outcomes: list[OutcomeRow]
    faults: list[str]


def audit(run_dir: Path) -> AuditReport:
    """Read a copy of the run's ledger; the run may be alive.

    Raises:
        UserError: the run has no ledger, or a damaged one.
    """
    with open_copy(run_dir / LEDGER) as db:
        findings = [(count, fault) for fault, query in _FAULTS.items() for (count,) in db.execute(query)]
        rows = [OutcomeRow(env, "issued", count) for env, count in db.execute("SELECT env, count FROM issued")]
        query = "SELECT env, state, reason, COUNT(*), AVG(output_tokens), AVG(reward) FROM outcomes GROUP BY 1, 2, 3"
        for env, state, reason, *values in sorted(db.execute(query), key=lambda row: _STATES.index(row[1])):
            name = _NAMES.get(state, state) + (f": {reason}" if reason else "")
            rows.append(OutcomeRow(env, name, *values))
        faults = [f"{count} {fault}" for count, fault in findings if count]
        return AuditReport(sorted(rows, key=lambda row: row.env), faults)


def audit_text(run_dir: Path) -> str:
    """Audit a run; returns a table. Raises as `audit` does."""
    report = audit(run_dir)
    table = [("environment", "outcome", "episodes", "mean length", "mean reward")]
    for row in report.outcomes:
        length = "-" if row.output_tokens is None else f"{row.output_tokens:.1f}"
        reward = "-" if row.reward is None else f"{row.reward:.4f}"
        table.append((row.env, row.name, f"{row.episodes:,}", length, reward))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [f"Episodes of {run_dir} (attempts; length: sampled tokens)"]
    for env, outcome, *numbers in table:
        cells = [env.ljust(widths[0]), outcome.ljust(widths[1])]
        cells += [number.rjust(width) for number, width in zip(numbers, widths[2:], strict=True)]
        lines.append("  " + "  ".join(cells))
    if report.faults:
        lines += ["NOT CONSERVED, the ledger contradicts itself:", *(f"  {fault}" for fault in report.faults)]
    else:
        lines.append("Conserved: issued = trained + dropped + in flight, finished or in a batch, in every environment.")
    return "\n".join(lines)
