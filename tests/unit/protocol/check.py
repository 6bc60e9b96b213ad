"""Explore the protocol by hand: `python tests/unit/protocol/check.py --replicas 3 --versions 4 --crashes 2`.

`--mutant NAME` puts a deliberate bug in and prints a shortest way to what it breaks; `--mutants` tries all of them.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from unit.protocol.mutants import MUTANTS
from unit.protocol.search import Outcome, Search
from unit.protocol.state import Bounds, Rules


def main() -> int:
    """Returns the exit status: 0 if the protocol holds, or every mutant was found."""
    args = arguments()
    if args.mutants:
        return max([try_mutant(name, full=False) for name in MUTANTS])
    if args.mutant:
        return try_mutant(args.mutant, full=True)
    bounds = Bounds(
        replicas=args.replicas, steps=args.versions - 1, crashes=args.crashes, async_level=args.async_level,
        max_off_policy=max(args.max_off_policy, args.async_level), concurrent=args.concurrent, interval=args.interval, joins=args.joins, leaves=args.leaves,
        keep_checkpoints=args.keep_checkpoints, drain=args.drain, killed=args.killed,
    )  # fmt: skip
    print(" ".join(f"{name}={value}" for name, value in bounds._asdict().items()), flush=True)
    begun, used = time.monotonic(), time.process_time()

    def tell(depth: int, states: int) -> None:
        if depth % 10 == 0:
            print(f"  depth {depth:3}: {states:,} states, {time.monotonic() - begun:.0f} s", flush=True)

    outcome = Search(Rules(), bounds).run(limit=args.limit, on_level=tell)
    print(
        f"{outcome.states:,} states, {outcome.transitions:,} transitions, depth {outcome.depth}, {outcome.ends:,} ends; "
        f"{time.monotonic() - begun:.0f} s, {time.process_time() - used:.0f} s of one core"
    )
    print("every property holds" if outcome.violation is None else "VIOLATION")
    return show(outcome)


def try_mutant(name: str, full: bool) -> int:
    """Search with one deliberate bug. Returns 0 if it is found."""
    mutant = MUTANTS[name]
    outcome = Search(mutant.rules, mutant.bounds).run(limit=5_000_000)
    found = outcome.violation is not None and mutant.breaks in outcome.violation
    print(
        f"{name}: {mutant.bug}\n    {'found' if found else 'NOT FOUND'} after {outcome.states:,} states, {len(outcome.trace)} steps"
    )
    if full:
        show(outcome)
    else:
        print(f"    {outcome.violation}")
    return 0 if found else 1


def show(outcome: Outcome) -> int:
    """Print a trace and what it leads to. Returns 1 if there is one."""
    for number, words in enumerate(outcome.trace, 1):
        print(f"{number:4}  {words}")
    if outcome.violation is not None:
        print(f"      => {outcome.violation}")
    return int(outcome.violation is not None)


def arguments() -> argparse.Namespace:
    default = Bounds()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=default.replicas)
    parser.add_argument(
        "--versions", type=int, default=default.steps + 1, help="policy versions, the base model included"
    )
    parser.add_argument("--crashes", type=int, default=default.crashes, help="kills of processes, and of the whole run")
    parser.add_argument("--async-level", type=int, default=default.async_level)
    parser.add_argument("--max-off-policy", type=int, default=default.max_off_policy, help="at least the async level")
    parser.add_argument("--concurrent", type=int, default=1, help="episodes in flight")
    parser.add_argument("--joins", type=int, default=default.joins, help="engines that are added")
    parser.add_argument("--leaves", type=int, default=default.leaves, help="engines that ask to leave")
    parser.add_argument("--interval", type=int, default=default.interval, help="steps between checkpoints")
    parser.add_argument("--keep-checkpoints", type=int, default=default.keep_checkpoints)
    parser.add_argument(
        "--drain", action=argparse.BooleanOptionalAction, default=False, help="the user may ask to stop"
    )
    parser.add_argument(
        "--killed",
        default=default.killed,
        help="Trainer, Orchestrator, Engine (requests fail), engine Restarted unnoticed, Whole run",
    )
    parser.add_argument("--limit", type=int, help="most states")
    parser.add_argument("--mutant", choices=sorted(MUTANTS))
    parser.add_argument("--mutants", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
