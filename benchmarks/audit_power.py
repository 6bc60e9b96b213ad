"""How often `rl audit` finds a drop that prefers long episodes, and how often it finds one where there is none (simulated, at 99 % confidence).

python benchmarks/audit_power.py --runs 100 --json benchmarks/results/audit_power.json

Groups of 8 episodes; lengths are lognormal, half of the variance of their logarithm (0.5 in all) between tasks, half within. A share of the
episodes is dropped; the longer half `odds` times as likely as the shorter half. `own`: what was dropped has a length of its own (stale, filtered);
`siblings`: it has none (timeout, error), and the group's others stand in for it.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from machine import describe_machine

from prime_rl.orchestrator.bias import CONFIDENCE, GroupValues, difference

SIZE, SHARE = 8, 0.05
GROUPS = (64, 256, 512)
ODDS = (1.0, 2.0, 4.0)


def simulated(rng: np.random.Generator, groups: int, odds: float, own: bool) -> Iterator[GroupValues]:
    """One run's groups."""
    for _ in range(groups):
        deviations = rng.normal(0, 0.5) + rng.normal(0, 0.5, SIZE)
        dropped = rng.random(SIZE) < SHARE * 2 / (1 + odds) * np.where(deviations > 0, odds, 1.0)
        values = np.exp(5 + deviations)
        yield GroupValues(np.where(dropped & (not own), np.nan, values), dropped)


def found(runs: int, groups: int, odds: float, own: bool) -> float:
    """Share of runs in which the dropped are called different."""
    hits = 0
    for seed in range(runs):
        p = difference(list(simulated(np.random.default_rng(seed), groups, odds, own))).p
        hits += p is not None and p <= 1 - CONFIDENCE
    return hits / runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    print(f"{'groups':>8}{'dropped':>9}{'values':>10}" + "".join(f"{'odds ' + format(odds, 'g'):>10}" for odds in ODDS))
    for own in (True, False):
        for groups in GROUPS:
            shares = [found(args.runs, groups, odds, own) for odds in ODDS]
            kind = "own" if own else "siblings"
            print(
                f"{groups:>8}{round(groups * SIZE * SHARE):>9}{kind:>10}"
                + "".join(f"{share:>10.1%}" for share in shares),
                flush=True,
            )
            rows.append({"groups": groups, "values": kind, **dict(zip(map(str, ODDS), shares, strict=True))})
    if args.json:
        args.json.write_text(
            json.dumps({"machine": describe_machine(), "runs": args.runs, "found": rows}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
