"""`rl audit RUN`: where every episode of a run went, and whether the ledger contradicts itself."""

from pathlib import Path
from typing import NamedTuple

from prime_rl.orchestrator.ledger import COUNTED, open_copy
from prime_rl.transport.settings import LEDGER

# A row for all episodes of an environment, then one for each way in which they ended.
_OUTCOMES = f"""
    WITH counted AS ({COUNTED}), outcomes (state, name) AS (VALUES
        ('', 'issued'), ('trained', 'trained'), ('batched', 'in a batch'), ('finished', 'finished'),
        ('issued', 'in flight'), ('dropped', 'dropped: ')),
    ended AS (SELECT env, '' AS state, '' AS reason, count, output_tokens, reward FROM counted
        UNION ALL SELECT * FROM counted)
    SELECT env, name || reason, SUM(count), AVG(output_tokens), AVG(reward) FROM ended NATURAL JOIN outcomes
    GROUP BY env, name, reason ORDER BY env, INSTR('issued|trained|in a batch|finished|in flight|dropped: ', name), 2"""
_FAULTS = {
    "unaccounted for": f"""
        SELECT env || printf(': %+d episodes are', issued.count - COALESCE(
            (SELECT SUM(count) FROM ({COUNTED}) counted WHERE counted.env = issued.env), 0
        )) AS difference FROM issued WHERE difference NOT LIKE '%: +0 %'""",
    "episodes of no group": "SELECT COUNT(*) FROM episodes WHERE group_number NOT IN (SELECT number FROM groups)",
    "episodes in flight, or waiting for a batch, in groups that are closed": """
        SELECT COUNT(*) FROM episodes e JOIN groups g ON g.number = group_number
        WHERE g.state != 'open' AND e.state IN ('issued', 'finished')""",
    "episodes trained at another step than their group's batch": """
        SELECT COUNT(*) FROM episodes e JOIN groups g ON g.number = group_number
        WHERE e.state IN ('batched', 'trained') AND (g.state != 'batched' OR e.step != g.step)""",
    "episodes with more than one trained attempt": """
        SELECT COUNT(*) FROM (
            SELECT 1 FROM episodes WHERE state IN ('batched', 'trained')
            GROUP BY group_number, number HAVING COUNT(*) > 1
        )""",
    "finished episodes without their tokens": """
        SELECT COUNT(*) FROM episodes WHERE state = 'finished' AND id NOT IN (SELECT id FROM results)""",
    "batched episodes of steps that are trained": """
        SELECT COUNT(*) FROM episodes
        WHERE state = 'batched' AND step < (SELECT value FROM meta WHERE key = 'version')""",
}


class OutcomeRow(NamedTuple):
    """The episodes (attempts) of one environment that ended the same way, and means where values are known."""

    env: str
    name: str  # "issued" (all of them), "trained", "in a batch", "finished", "in flight", or "dropped: <reason>"
    episodes: int
    output_tokens: float | None
    reward: float | None


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
        faults = [f"{count} {fault}" for count, fault in findings if count]
        return AuditReport([OutcomeRow(*row) for row in db.execute(_OUTCOMES)], faults)


def audit_text(run_dir: Path) -> str:
    """Audit a run; returns a table. Raises as `audit` does."""
    report = audit(run_dir)
    lines = [f"Episodes of {run_dir} (attempts; length: sampled tokens)"]
    if report.outcomes:
        table = [("environment", "outcome", "episodes", "mean length", "mean reward")]
        for row in report.outcomes:
            length = "-" if row.output_tokens is None else f"{row.output_tokens:.1f}"
            reward = "-" if row.reward is None else f"{row.reward:.4f}"
            table.append((row.env, row.name, f"{row.episodes:,}", length, reward))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for env, outcome, *numbers in table:
            cells = [env.ljust(widths[0]), outcome.ljust(widths[1])]
            cells += [number.rjust(width) for number, width in zip(numbers, widths[2:], strict=True)]
            lines.append("  " + "  ".join(cells))
    else:
        lines.append("None was issued yet.")
    if report.faults:
        lines += ["NOT CONSERVED, the ledger contradicts itself:", *(f"  {fault}" for fault in report.faults)]
    else:
        lines.append("Conserved: issued = trained + dropped + in flight, finished or in a batch, in every environment.")
    return "\n".join(lines)
