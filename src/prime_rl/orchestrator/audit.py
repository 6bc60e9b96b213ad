"""`rl audit RUN`: where every episode of a run went, and whether the ledger contradicts itself."""

from collections import Counter
from pathlib import Path

from prime_rl.errors import UserError
from prime_rl.monitor.run_directory import open_run
from prime_rl.orchestrator.ledger import open_copy
from prime_rl.transport.incarnations import read_incarnations, read_versions
from prime_rl.transport.protocol import newest_version
from prime_rl.transport.settings import LEDGER, running_processes

# Of an environment: all episodes that were issued, then by where they are, with mean sampled tokens and reward.
_OUTCOMES = """
    WITH ends AS MATERIALIZED (
        SELECT env, CASE e.state
            WHEN 'issued' THEN ? WHEN 'batched' THEN IIF(e.step < ?, 'trained', 'in a batch')
            WHEN 'dropped' THEN 'dropped: ' || reason ELSE e.state END AS outcome,
            COUNT(*) AS number, TOTAL(tokens) AS tokens, COUNT(tokens) AS sampled, TOTAL(reward) AS reward,
            COUNT(reward) AS scored
        FROM episodes e JOIN groups g ON g.number = group_number GROUP BY 1, 2)
    SELECT i.env, 'issued', i.count, SUM(tokens) / SUM(sampled), SUM(reward) / SUM(scored)
    FROM issued i LEFT JOIN ends USING (env) GROUP BY env
    UNION ALL
    SELECT env, outcome, number, tokens / sampled, reward / scored FROM ends ORDER BY 1, 3 DESC, 2 DESC"""
_INCONSISTENCIES = {
    "episodes in flight, or waiting for a batch, in groups that are closed": """
        SELECT COUNT(*) FROM episodes e JOIN groups g ON g.number = group_number
        WHERE g.state != 'open' AND e.state IN ('issued', 'finished')""",
    "episodes with more than one trained attempt": """
        SELECT COUNT(*) FROM (
            SELECT 1 FROM episodes WHERE state = 'batched' GROUP BY group_number, number HAVING COUNT(*) > 1
        )""",
    "finished episodes without their tokens": """
        SELECT COUNT(*) FROM episodes WHERE state = 'finished' AND id NOT IN (SELECT id FROM results)""",
}


def audit(run_dir: Path) -> tuple[list[tuple[str, str, int, float | None, float | None]], list[str]]:
    """Read a copy of the run's ledger; the run may be alive. Return where its episodes went, and where the ledger
    contradicts itself. Of the former each is an environment, an outcome, the number of episodes, and the means of their
    sampled tokens and rewards (None: none has a result). Raises UserError where there is no ledger, or a damaged one.
    """
    with open_copy(run_dir / LEDGER) as db:
        newest = newest_version(read_versions(run_dir / "weights"), read_incarnations(run_dir))
        unfinished = "in flight" if {"rl", "orchestrator"} & running_processes(run_dir) else "unfinished"
        outcomes = db.execute(_OUTCOMES, (unfinished, newest or 0)).fetchall()
        gaps = Counter[str]()
        for env, outcome, count, *_ in outcomes:
            gaps[env] += count if outcome == "issued" else -count
        faults = [f"{env}: {count:+d} episodes are unaccounted for" for env, count in gaps.items() if count]
        findings = [(count, fault) for fault, query in _INCONSISTENCIES.items() for (count,) in db.execute(query)]
        return outcomes, faults + [f"{count} {fault}" for count, fault in findings if count]


def audit_text(run_dir: Path) -> str:
    """Audit a run; returns a table. Raises as `audit` does."""
    if (open_run(run_dir).directory / "tenants").is_dir() and not (run_dir / LEDGER).exists():
        raise UserError(f"each tenant has a ledger of its own: rl audit {run_dir / 'tenants'}/NAME")
    outcomes, faults = audit(run_dir)
    lines = [f"Episodes of {run_dir} (attempts; length: sampled tokens)"]
    table, issued = [("", "", "episodes", "share", "length", "reward")], 1
    for env, outcome, count, tokens, reward in outcomes:
        issued = count if outcome == "issued" else issued  # the first of an environment
        means = ("-" if tokens is None else f"{tokens:.1f}", "-" if reward is None else f"{reward:.4f}")
        table.append((env, outcome, f"{count:,}", f"{count / max(issued, 1):.1%}", *means))
    width = max(len(env) for env, *_ in table)
    for env, outcome, *numbers in table:
        lines.append(f"  {env:<{width}}  {outcome:<18}" + "".join(f"  {number:>9}" for number in numbers))
    if faults:
        lines += ["NOT CONSERVED, the ledger contradicts itself:", *(f"  {fault}" for fault in faults)]
    else:
        lines.append("In every environment, issued = trained + dropped + the other outcomes.")
    return "\n".join(lines)
