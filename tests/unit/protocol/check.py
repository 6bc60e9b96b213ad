"""Explore the protocol by hand: `python tests/unit/protocol/check.py --replicas 3 --steps 3 --crashes 2`.

The options are the fields of `Bounds`. `--bug NAME` puts a deliberate one in, with its own bounds, and prints a
shortest way to what it breaks.
"""

import argparse
import sys
import time
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from unit.protocol.mutants import mutated
from unit.protocol.search import Search
from unit.protocol.state import Bounds


def main() -> int:
    """Return the exit status: 0 if every property holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in Bounds()._asdict().items():
        is_flag = isinstance(default, bool)
        how = {"action": argparse.BooleanOptionalAction} if is_flag else {"type": type(default)}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, **how)
    parser.add_argument("--limit", type=int, help="most states")
    options = vars(parser.parse_args())
    limit = options.pop("limit")
    options["max_off_policy"] = max(options["max_off_policy"], options["async_level"])
    begun = time.monotonic()

    def report(depth: int, states: int) -> None:
        if depth % 10 == 0:
            print(f"  depth {depth:3}: {states:,} states, {time.monotonic() - begun:.0f} s", flush=True)

    with mutated(options["bug"]) if options["bug"] else nullcontext(Bounds(**options)) as bounds:
        outcome = Search(bounds).run(limit=limit, on_level=report)
    print(
        f"{outcome.states:,} states, {outcome.transitions:,} transitions, depth {outcome.depth}, {outcome.ends:,} ends; "
        f"{time.process_time():.0f} s of one core"
    )
    print(*outcome.trace, outcome.violation or "every property holds", sep="\n")
    return int(outcome.violation is not None)


if __name__ == "__main__":
    sys.exit(main())
