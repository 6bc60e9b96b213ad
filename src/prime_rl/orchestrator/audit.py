"""`rl audit <run>`: the account of a run's episodes, whether it is conserved, and whether what was dropped differs from what was issued."""

import sqlite3
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from prime_rl.orchestrator import bias
from prime_rl.orchestrator.account import Account, EnvAccount
from prime_rl.orchestrator.episodes import Drop
from prime_rl.orchestrator.ledger_file import State, open_copy

LEDGER = "ledger.sqlite"
_RANGES = 10
_WIDTH = 110
_QUANTITIES = {"length": "output_tokens", "reward": "reward"}
# What a setting leaves out on purpose differs in what it is chosen by, and in what goes along with that. Other drops ought to hit blindly.
_BY_DESIGN = {(Drop.FILTERED, "reward"), (Drop.FILTERED, "length"), (Drop.TRUNCATED, "length")}


@dataclass(frozen=True)
class Bias:
    """One drop reason of one environment, compared in one quantity. `differs` is None where there are too few to tell."""

    env: str
    reason: str
    quantity: str  # length (sampled tokens) or reward
    difference: bias.Difference
    differs: bool | None

    @property
    def by_design(self) -> bool:
        """Whether a difference is to be expected, since a setting chose what to drop by this quantity, or by one that it goes along with."""
        return (self.reason, self.quantity) in _BY_DESIGN


@dataclass(frozen=True)
class StepRange:
    """Trained episodes of the steps `first` … `last`, and means over them (NaN where a rebuilt ledger has no values)."""

    first: int
    last: int
    trained: int
    reward: float
    output_tokens: float


@dataclass
class Report:
    """What the audit of a run found."""

    run: Path
    account: Account
    faults: list[str]  # where the ledger contradicts itself
    ranges: list[StepRange] = field(default_factory=list)
    biases: list[Bias] = field(default_factory=list)


def audit_text(run_dir: Path) -> str:
    """The audit of a run, for people.

    Raises:
        UserError: the run has no ledger, or a damaged one.
    """
    report = audit(run_dir)
    return "\n\n".join("\n".join(part) for part in (_account_lines(report), _range_lines(report), _bias_lines(report)))


def audit(run_dir: Path) -> Report:
    """Read a copy of the run's ledger; the run may be alive.

    Raises:
        UserError: the run has no ledger, or a damaged one.
    """
    with open_copy(run_dir / LEDGER) as db:
        account = read_account(db)
        return Report(run_dir, account, _faults(db, account), _ranges(db), _biases(db))


def read_account(db: sqlite3.Connection) -> Account:
    """The account by the rows; `issued` is what was counted when they were issued."""
    envs = {env: EnvAccount(issued=count) for env, count in db.execute("SELECT env, count FROM issued ORDER BY env")}
    rows = """
        SELECT env, e.state, reason, COUNT(*) FROM episodes e JOIN groups g ON g.number = group_number GROUP BY 1, 2, 3
        UNION ALL SELECT env, state, reason, count FROM carried ORDER BY 1, 2, 3
    """
    for env, state, reason, count in db.execute(rows):
        _add(envs.setdefault(env, EnvAccount()), state, reason, count)
    return Account(envs)


def _add(env: EnvAccount, state: str, reason: str, count: int) -> None:
    if state == State.DROPPED:
        env.dropped[reason] = env.dropped.get(reason, 0) + count
    elif state == State.TRAINED:
        env.trained += count
    elif state == State.BATCHED:
        env.batched += count
    elif state == State.FINISHED:
        env.finished += count
    else:
        env.in_flight += count


# -- what must hold ------------------------------------------------------------------------------------------------------------

_NONE_OF = {
    "episodes of no group": "SELECT COUNT(*) FROM episodes WHERE group_number NOT IN (SELECT number FROM groups)",
    "episodes in flight, or waiting for a batch, in groups that are closed": """
        SELECT COUNT(*) FROM episodes e JOIN groups g ON g.number = group_number
        WHERE g.state != 'open' AND e.state IN ('issued', 'finished')""",
    "episodes trained at another step than their group's batch": """
        SELECT COUNT(*) FROM episodes e JOIN groups g ON g.number = group_number
        WHERE e.state IN ('batched', 'trained') AND (g.state != 'batched' OR e.step != g.step)""",
    "episodes with more than one trained attempt": """
        SELECT COUNT(*) FROM (SELECT 1 FROM episodes WHERE state IN ('batched', 'trained') GROUP BY group_number, number HAVING COUNT(*) > 1)""",
    "finished episodes without their tokens": """
        SELECT COUNT(*) FROM episodes WHERE state = 'finished' AND id NOT IN (SELECT id FROM results)""",
    "batched episodes of steps that are trained": """
        SELECT COUNT(*) FROM episodes WHERE state = 'batched' AND step < (SELECT value FROM meta WHERE key = 'version')""",
}


def _faults(db: sqlite3.Connection, account: Account) -> list[str]:
    faults = [
        f"{name}: {env.difference:+d} episodes are unaccounted for"
        for name, env in account.envs.items()
        if env.difference
    ]
    for what, query in _NONE_OF.items():
        (count,) = db.execute(query).fetchone()
        faults += [f"{count} {what}"] if count else []
    return faults


# -- what was trained ----------------------------------------------------------------------------------------------------------


def _ranges(db: sqlite3.Connection) -> list[StepRange]:
    (last,) = db.execute("SELECT MAX(step) FROM episodes WHERE state = 'trained'").fetchone()
    if last is None:
        return []
    width = -(-(last + 1) // _RANGES)
    query = """
        SELECT step / ?, COUNT(*), AVG(reward), AVG(output_tokens) FROM episodes WHERE state = 'trained' GROUP BY 1 ORDER BY 1
    """
    return [
        StepRange(part * width, min(part * width + width - 1, last), count, _number(reward), _number(tokens))
        for part, count, reward, tokens in db.execute(query, (width,))
    ]


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


# -- what was dropped ----------------------------------------------------------------------------------------------------------


def _biases(db: sqlite3.Connection) -> list[Bias]:
    found = []
    query = "SELECT DISTINCT env, reason FROM episodes JOIN groups g ON g.number = group_number WHERE reason NOT NULL ORDER BY 1, 2"
    for env, reason in db.execute(query).fetchall():
        for quantity, column in _QUANTITIES.items():
            found.append((env, reason, quantity, bias.difference(_groups(db, env, reason, column))))
    verdicts = bias.significant([difference.p for *_, difference in found])
    return [
        Bias(env, reason, quantity, difference, None if difference.p is None else verdict)
        for (env, reason, quantity, difference), verdict in zip(found, verdicts, strict=True)
    ]


def _groups(db: sqlite3.Connection, env: str, reason: str, column: str) -> list[bias.GroupValues]:
    query = f"""
        SELECT group_number, {column}, reason = ? FROM episodes JOIN groups g ON g.number = group_number WHERE env = ? ORDER BY 1
    """
    rows = db.execute(query, (reason, env)).fetchall()
    numbers = np.array([row[0] for row in rows], dtype=np.int64)
    values = np.array([_number(row[1]) for row in rows], dtype=np.float64)
    dropped = np.array([bool(row[2]) for row in rows], dtype=np.bool_)
    cuts = np.flatnonzero(np.diff(numbers)) + 1
    return [bias.GroupValues(*parts) for parts in zip(np.split(values, cuts), np.split(dropped, cuts), strict=True)]


# -- for people ----------------------------------------------------------------------------------------------------------------


def _account_lines(report: Report) -> list[str]:
    reasons = sorted(report.account.total.dropped)
    names = sorted(report.account.envs)
    rows = [(name, report.account.envs[name]) for name in names]
    rows += [("all", report.account.total)] if len(names) != 1 else []
    table = [["environment", "issued", "trained", "batched", "finished", "in flight", *reasons]]
    table += [
        [name, *map(_count, (env.issued, env.trained, env.batched, env.finished, env.in_flight))]
        + [_count(env.dropped.get(reason, 0)) for reason in reasons]
        for name, env in rows
    ]
    lines = [f"Episodes of {report.run} (attempts; those with a reason at the right were dropped)", *_table(table)]
    if report.faults:
        return [*lines, "NOT CONSERVED, the ledger contradicts itself:", *(f"  {fault}" for fault in report.faults)]
    return [*lines, "Conserved: issued = trained + dropped + in flight, finished or batched, in every environment."]


def _range_lines(report: Report) -> list[str]:
    if not report.ranges:
        return ["Nothing is trained yet."]
    table = [["steps", "trained", "mean reward", "mean length"]]
    for part in report.ranges:
        steps = f"{part.first}-{part.last}" if part.last > part.first else str(part.first)
        table.append([steps, _count(part.trained), f"{part.reward:.4f}", f"{part.output_tokens:.1f}"])
    return ["Trained", *_table(table)]


def _bias_lines(report: Report) -> list[str]:
    if not report.biases:
        return ["Nothing was dropped."]
    table = [["environment", "reason", "dropped", "quantity", "mean dropped", "mean issued", "p", ""]]
    for row in report.biases:
        found = row.difference
        mark = "~" if found.siblings else ""
        means = (f"{mark}{mean:.4g}" for mean in (found.dropped_mean, found.issued_mean))
        p = "-" if found.p is None else f"{found.p:.4f}"
        table.append([row.env, row.reason, _count(found.dropped), row.quantity, *means, p, _verdict(row)])
    return [
        "Do dropped episodes differ from the issued ones? (length = sampled tokens)",
        *_table(table),
        *(textwrap.fill(note, _WIDTH) for note in _notes(report.biases)),
    ]


def _verdict(row: Bias) -> str:
    if row.differs is None:
        return "too few"
    if not row.differs:
        return "no difference shown"
    return "differs (by design)" if row.by_design else "DIFFERS"


def _notes(biases: Sequence[Bias]) -> Iterable[str]:
    tests = sum(row.differs is not None for row in biases)
    yield (
        f"Two-sided permutation test of the difference in means (drops reassigned among groups and within them, {bias.PERMUTATIONS:,} times, fixed "
        f"seed); 'differs' holds at {bias.CONFIDENCE:.0%} confidence for all {tests} tests together (Holm). 'Too few': under {bias.MIN_DROPPED} "
        f"dropped or in under {bias.MIN_GROUPS} groups."
    )
    if any(row.differs and row.by_design for row in biases):
        yield (
            "By design: a setting chose these, and nothing is wrong. 'filtered' leaves out attempts of advantage zero (filter_zero_advantage) and what "
            "filters name, so that "
            "their rewards differ, and their lengths where length goes along with reward; 'truncated' leaves out what does not fit seq_len."
        )
    if any(row.differs and not row.by_design for row in biases):
        yield (
            "DIFFERS: no setting chose these by that quantity, and yet they are not like the rest: what is trained may be a biased sample of what was "
            "issued. Find out why they are dropped."
        )
    if any(row.difference.siblings for row in biases):
        yield (
            "~ some of the dropped have no value of their own (they failed, timed out or were cancelled): every episode counts with the mean of its "
            "group's others. That shows drops that prefer certain tasks, not those that prefer the long attempts at a task."
        )


def _count(number: int) -> str:
    return f"{number:,}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of text: words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    words = [not any(cell.lstrip("~-")[:1].isdigit() for cell in column[1:]) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if word else cell.rjust(width)
            for cell, width, word in zip(row, widths, words, strict=True)
        ).rstrip()
        for row in rows
    ]
