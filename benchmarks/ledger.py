"""What exactly-once costs a step: recording every episode in the ledger, writing it, and committing the batch.

    python benchmarks/ledger.py --output benchmarks/results/ledger.json

512 episodes of 2048 tokens a step (1792 of them sampled), in groups of 8, as they come decoded from the workers' wire.
`--flushes` is how often the ledger is written while a step is collected (the orchestrator does so once a second),
besides before and after the batch is renamed into place.
Files lie under `--directory`, which must be on the disk that runs are kept on.
"""

import argparse
import json
import statistics
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from machine import describe_machine

from prime_rl.envs.protocol import EpisodeResult, Outcome, Result, SampleTokens, decode, encode
from prime_rl.orchestrator.ledger import Ledger, batch_extra
from prime_rl.orchestrator.samples import exact_streams
from prime_rl.orchestrator.scheduler import Batched, Finished, Issued, Start, Task
from prime_rl.transport.rollouts import Sample, write_batch

EPISODES, GROUP_SIZE, TOKENS, PROMPT = 512, 8, 2048, 256
PARTS = ("record", "flush while collecting", "flush before", "commit of the batch", "flush after")
CPU = "of that, processor"


class Clock:
    """Seconds by part of a step, and the processor's seconds of all of them."""

    def __init__(self) -> None:
        self.parts = dict.fromkeys((*PARTS, CPU), 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began, used = time.perf_counter(), time.process_time()
        yield
        self.parts[name] += time.perf_counter() - began
        self.parts[CPU] += time.process_time() - used


def episode(rng: np.random.Generator, name: str) -> EpisodeResult:
    """A finished episode as the pool hands it over."""
    sampled = TOKENS - PROMPT
    tokens = SampleTokens(
        input_ids=array("i", rng.integers(0, 151_936, TOKENS).tolist()),
        loss_mask=bytes([False] * PROMPT + [True] * sampled),
        logprobs=array("f", [0.0] * PROMPT + (-rng.exponential(0.5, sampled)).tolist()),
        prompt_len=PROMPT,
        reward=0.5,
    )
    made = EpisodeResult(name, "math", "task", Outcome.OK, reward=float(rng.random()), samples=[tokens], num_turns=1)
    message = decode(encode(Result(0, made)))
    assert isinstance(message, Result)
    return message.episode


def sample(name: str, result: EpisodeResult, step: int) -> Sample:
    """An episode's row of the batch."""
    ids, mask, logprobs = exact_streams(result.samples[0])
    streams = (ids, mask, logprobs, mask * np.float32(0.5))
    return Sample(f"{name}.0", name, "task", "math", [step], *streams, temperature=1.0, reward=result.reward)


def run_step(ledger: Ledger, rollouts: Path, step: int, flushes: int) -> dict[str, float]:
    """One step's bookkeeping, from the first issue to the last flush; seconds by part."""
    rng, clock, per_batch = np.random.default_rng(step), Clock(), EPISODES // GROUP_SIZE
    groups = list(range(step * per_batch, (step + 1) * per_batch))
    results = {name: episode(rng, name) for group in groups for name in [f"{group}.{i}.0" for i in range(GROUP_SIZE)]}
    samples = [sample(name, result, step) for name, result in results.items()]
    tasks = {group: Task("math", group, f"task-{group}") for group in groups}
    starts = {
        start.episode: start
        for group in groups
        for start in [Start(group, i, 0, tasks[group], step) for i in range(GROUP_SIZE)]
    }
    with clock.part("record"):
        for start in starts.values():
            ledger.record(Issued(start, 0))
    every = len(results) // (flushes + 1) + 1
    for number, (name, result) in enumerate(results.items(), 1):
        with clock.part("record"):
            ledger.record(Finished(starts[name], step, step, result))
        if number % every == 0:
            with clock.part("flush while collecting"):
                ledger.flush()
    with clock.part("flush before"):
        ledger.flush()
        ledger.check(EPISODES)
    event = Batched(step, tasks, list(results), [])
    with clock.part("commit of the batch"):
        write_batch(rollouts, step, samples, batch_extra(event))
    with clock.part("record"):
        ledger.record(event)
    with clock.part("flush after"):
        ledger.flush()
    return clock.parts


def measure(directory: Path, steps: int, flushes: int) -> dict[str, object]:
    """Medians over all steps but the first, which pays for what is done once."""
    with tempfile.TemporaryDirectory(dir=directory, prefix=".benchmark-") as place:
        path = Path(place) / "ledger.sqlite"
        ledger = Ledger(path)
        times = [run_step(ledger, Path(place) / "rollouts", step, flushes) for step in range(steps + 1)]
        totals = [sum(parts[name] for name in PARTS) for parts in times]
        ledger.close()
        began = time.perf_counter()
        Ledger(path).close()
        return {
            "flushes while collecting": flushes,
            "seconds": {name: statistics.median(parts[name] for parts in times[1:]) for name in PARTS},
            "seconds a step": statistics.median(totals[1:]),
            CPU: statistics.median(parts[CPU] for parts in times[1:]),
            "slowest step": max(totals[1:]),
            "first step": totals[0],
            "seconds to open": time.perf_counter() - began,
            "ledger MiB": path.stat().st_size / 2**20,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--flushes", type=int, nargs="+", default=[0, 20])
    parser.add_argument("--directory", type=Path, default=Path.cwd())
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    found = []
    for flushes in args.flushes:
        result = measure(args.directory, args.steps, flushes)
        found.append(result)
        for name, value in result.items():
            parts = value.items() if isinstance(value, dict) else [(name, value)]
            for label, number in parts:
                print(f"{label:<26}{number:>9.3f}")
        print()
    if args.output:
        shape = {"episodes": EPISODES, "tokens": TOKENS, "group size": GROUP_SIZE, "steps": args.steps}
        args.output.write_text(json.dumps({"machine": describe_machine(), **shape, "measured": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
