"""Do batches follow one another? The real scheduler in a simulated world, against the shortest step possible there.

    uv run --group cpu python benchmarks/pipeline.py --json FILE      # a minute, the same figures on any machine

The world, and how the shortest step is derived: `tests/support/pipeline.py`. Four ways to start episodes are compared:
"early" starts all that the async level allows, "1 batch" and "1.25 batches" have no more in flight than that, "paced"
is the scheduler as it is.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from machine import describe_machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.pipeline import World, shortest_step, simulate

LATENCIES = (0.1, 0.5, 1.0, 4.0)  # of one request alone, where a full engine samples a batch in 1 s
TRAIN, SYNC = (0.1, 0.4, 1.5), (0.02, 0.3, 1.0)
FIXED = (0.25, 0.5, 1.5, 2.0)  # batches in flight at most, beside those of `ways`


def ways(world: World) -> dict[str, float]:
    """Seconds of a step, by how episodes are started."""
    count = world.counted
    return {
        "early": simulate(world, paced=False).step(count),
        "1 batch": simulate(world, paced=False, max_concurrent=world.batch).step(count),
        "1.25 batches": simulate(world, paced=False, max_concurrent=world.batch * 5 // 4).step(count),
        "paced": simulate(world).step(count),
    }


def phase_lock() -> list[dict[str, Any]]:
    """Batches of 128 replies of 128 tokens, an engine of 20,000 tokens/s and at most 150 a request."""
    rows = []
    for level, (train, sync) in itertools.product((1, 2), ((0.3, 0.1), (0.3, 0.6), (0.3, 1.2), (0.8, 0.1), (1.2, 0.1))):
        world = World(level, train, sync, batch=128, group=8)
        row: dict[str, Any] = {"level": level, "train": train, "sync": sync, "shortest": shortest_step(world)}
        rows.append(row | ways(world))
    return rows


def grid(spread: float) -> list[dict[str, Any]]:
    """Return the largest step over all training and sync times: divided by the shortest or, if lengths differ, by
    that of the best fixed limit."""
    rows, batch = [], 32 if spread else 16
    for level, gradual, latency in itertools.product((1, 2) if spread else (0, 1, 2, 4), (False, True), LATENCIES):
        worst: dict[str, float] = {}
        for train, sync in itertools.product(TRAIN[:2] if spread else TRAIN, SYNC[:2] if spread else SYNC):
            seats = max(4, int(2 * latency * batch)) if spread else 10**9
            world = World(level, train, sync, batch, 4, 128 / latency, 128.0 * batch, gradual, seats, spread=spread)
            took, least = ways(world), shortest_step(world)
            if spread:
                limits = [int(share * batch) for share in FIXED]
                fixed = (simulate(world, paced=False, max_concurrent=n).step(world.counted) for n in limits)
                least = min(*took.values(), *fixed)
            worst = {way: max(worst.get(way, 0.0), seconds / least) for way, seconds in took.items()}
        fills = "gradually" if gradual else "at once"
        rows.append({"level": level, "engine_fills": fills, "latency": latency, **worst})
    return rows


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}\n| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
    for row in rows:
        print(
            f"| {' | '.join(f'{value:.2f}' if isinstance(value, float) else str(value) for value in row.values())} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    found = {"phase_lock": phase_lock()}
    show("Seconds of a step", found["phase_lock"])
    found["equal_lengths"] = grid(0.0)
    show("Equal lengths: the largest step / the shortest that there can be", found["equal_lengths"])
    found["lognormal_lengths"] = grid(0.8)
    show("Lognormal lengths: the largest step / that of the best fixed limit", found["lognormal_lengths"])
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**describe_machine(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
