"""The orchestrator's core against a simulated fleet on a virtual clock: does it keep up, does the pipeline stay full?

    uv run --group cpu python benchmarks/simulate_fleet.py --output FILE    # all rows, about seven minutes
    uv run --group cpu python benchmarks/simulate_fleet.py --replicas 10 --levels 0 1 --rate 100

Fleets of `--replicas` at `--level`, and the smallest of them at each of `--levels`. Every replica has `--seats` seats;
an episode takes one at once and samples `--rate` tokens a second. Replies are as long as rollouts: lognormal, median
600 tokens, at most 4,096 (of a group of 16 the longest takes about a minute). A batch is half as many episodes as there
are seats. The trainer takes as long for one as the full fleet takes to sample it, so that neither is the bottleneck by
itself, and a new version stops all replicas for `--pause` seconds.

Real are the reading of what workers send, the scheduler with its decisions and counts, the routing of episodes to
servers, samples and advantages of every batch with all tokens, and the step's metrics: the code of an orchestrator
that is asked after every episode what may start and whether a batch is complete. Not run are HTTP, environments, the
event loop and the disk (`ledger.py`, `env_worker.py`). Processor time is that of calls into this code, per simulated
second, with the garbage collector's short looks in whichever part they interrupt. Its long one, every ten minutes, is a
part of its own, measured at the end.
"""

import argparse
import gc
import heapq
import itertools
import json
import resource
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from machine import describe_machine

from prime_rl.config import OrchestratorConfig
from prime_rl.envs.protocol import EpisodeResult, Outcome, Result, SampleTokens, decode, encode
from prime_rl.fleet.client import InferenceClient
from prime_rl.fleet.replicas import Replica, ReplicaPool, ReplicaState
from prime_rl.orchestrator.ledger import Counts
from prime_rl.orchestrator.metrics import Tally, step_metrics
from prime_rl.orchestrator.orchestrator import FULL_COLLECTION_SECONDS, limit_gc
from prime_rl.orchestrator.samples import output_tokens, score_batch
from prime_rl.orchestrator.scheduler import Batched, Drop, Dropped, Event, Issued, Limits, Scheduler, Start, Task
from prime_rl.trainer.packing import rollout_lengths

GROUP_SIZE, PROMPT, LONGEST = 16, 128, 4096
LENGTH_STEP = 32  # replies are rounded up to so many tokens, and those of one length have the same ones
SEATS_PER_BATCH = 2
LEVEL_SECONDS = 600.0  # simulated for each level: at level 0 a step takes a minute and a half

T = TypeVar("T")


@dataclass
class Fleet:
    """What is simulated. Times in seconds, `rate` in tokens per second and episode."""

    replicas: int
    seats: int = 100
    rate: float = 50.0
    pause: float = 0.5
    level: int = 8
    bound: int = 16
    seconds: float = 60.0
    warm: float = 120.0

    @property
    def in_flight(self) -> int:
        return self.replicas * self.seats

    @property
    def batch(self) -> int:
        return max(self.in_flight // SEATS_PER_BATCH // GROUP_SIZE, 1) * GROUP_SIZE


@dataclass
class Meter:
    """Processor seconds by part."""

    seconds: dict[str, float] = field(default_factory=dict)

    def of(self, part: str, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        began = time.thread_time()
        result = call(*arguments, **options)
        self.seconds[part] = self.seconds.get(part, 0.0) + time.thread_time() - began
        return result


@dataclass(frozen=True)
class Server:
    """What routing asks of a server."""

    root: str


class Simulation:
    """Two clocks: `now`, and the seconds of it in which the replicas did not stand still, by which episodes end."""

    def __init__(self, fleet: Fleet, seed: int = 0) -> None:
        self.fleet = fleet
        self.config = OrchestratorConfig.model_validate(
            {
                "environment": {"id": "simulated"},
                "batch_size": fleet.batch,
                "rollouts_per_example": GROUP_SIZE,
                "async_level": fleet.level,
                "max_off_policy_steps": fleet.bound,
                "seq_len": PROMPT + LONGEST,
            }
        )
        limits = Limits(fleet.batch, GROUP_SIZE, fleet.level, fleet.bound, fleet.in_flight)
        tasks = (Task("simulated", number, f"task-{number}") for number in itertools.count())
        self.scheduler: Scheduler[EpisodeResult] = Scheduler(limits, tasks, emit=self._count_event)
        self.issued, self.trained, self.dropped = 0, 0, Counter[Drop]()
        self.meter = Meter()
        self.draw = np.random.default_rng(seed)
        self.replies = {
            length: _reply(self.draw, length) for length in range(LENGTH_STEP, LONGEST + LENGTH_STEP, LENGTH_STEP)
        }
        self._lengths = self._draw_lengths()
        mean = float(np.mean([next(self._lengths) for _ in range(20_000)]))
        self.train_seconds = fleet.batch * mean / (fleet.in_flight * fleet.rate)
        self.now = self.stood = 0.0
        self.servers = ReplicaPool(
            [cast(InferenceClient, Server(f"http://{number}")) for number in range(fleet.replicas)], slack=GROUP_SIZE
        )
        for replica in self.servers.replicas:
            self.servers.move(replica, ReplicaState.READY)
        self.flying: list[tuple[float, str, int]] = []  # (end in sampling seconds, episode, length)
        self.where: dict[str, Replica] = {}
        self.forgotten: set[str] = set()
        self.trained_at: list[float] = []  # when each batch will have been trained
        self.tally = Tally()
        self.collections: list[float] = []  # seconds, each
        gc.callbacks.append(self._collecting)
        self.reset()

    def reset(self) -> None:
        """Count from now on."""
        self.meter.seconds.clear()
        self.collections.clear()
        self.began, self.busy, self.landed = self.now, 0.0, 0
        self.ages: list[tuple[float, int]] = []  # of each batch: mean and most
        self.most = 0

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self._launch()
            landing = self.flying[0][0] + self.stood if self.flying else np.inf
            version = self.scheduler.version
            trained = self.trained_at[version] if version < len(self.trained_at) else np.inf
            due = np.inf if self.scheduler.opens_at is None else self.scheduler.opens_at
            self._go_to(min(landing, trained, due, end))
            if trained <= min(landing, due, end):
                self._update(version + 1)
            elif landing <= min(due, end):
                self._land(*heapq.heappop(self.flying)[1:])
            self._ship()

    def row(self) -> dict[str, Any]:
        """What the seconds since `reset` were like."""
        fleet, seconds = self.fleet, self.now - self.began
        parts = {part: used / seconds for part, used in self.meter.seconds.items()}
        young, longest_young = sum(self.collections) / seconds, max(self.collections, default=0.0)
        began = time.perf_counter()
        gc.collect()
        full = time.perf_counter() - began
        parts["full collection"] = full / FULL_COLLECTION_SECONDS
        return {
            **asdict(fleet),
            "episodes_in_flight": len(self.scheduler._running),
            "batch_size": fleet.batch,
            "episodes_per_second": self.landed / seconds,
            "steps": len(self.ages),
            "utilisation": self.busy / (seconds * fleet.in_flight),
            "staleness_mean": float(np.mean([mean for mean, _ in self.ages])) if self.ages else None,
            "staleness_max": max((most for _, most in self.ages), default=None),
            "most_on_a_replica": self.most,
            "dropped_stale": self.dropped[Drop.STALE],
            "cpu_seconds_per_second": parts,
            "cpu_total": sum(parts.values()),
            "collector_seconds_per_second": young,  # in whichever part it interrupts
            "collector_longest": longest_young,
            "full_collection_seconds": full,
            "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }

    # -- what happens --------------------------------------------------------------------------------------------------

    def _count_event(self, event: Event) -> None:
        match event:
            case Issued():
                self.issued += 1
            case Dropped(_, reason):
                self.dropped[reason] += 1
            case Batched():
                self.trained += len(event.trained)
                self.dropped[Drop.FILTERED] += len(event.filtered)

    def _collecting(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self.collecting_since = time.perf_counter()
        else:
            self.collections.append(time.perf_counter() - self.collecting_since)

    def _go_to(self, moment: float) -> None:
        self.busy += (moment - self.now) * len(self.scheduler._running)
        self.now = moment

    def _launch(self) -> None:
        while (start := self.meter.of("what may start", self.scheduler.next_start, self.now)) is not None:
            length = next(self._lengths)
            end = self.now - self.stood + length / self.fleet.rate
            heapq.heappush(self.flying, (end, start.episode, length))
            replica = self.meter.of("routing", self._place, start)
            self.where[start.episode] = replica
            self.most = max(self.most, replica.in_flight)

    def _place(self, start: Start) -> Replica:
        replica = self.servers.place(start.group)
        assert replica is not None
        self.servers.start(start.episode, replica)
        return replica

    def _land(self, episode: str, length: int) -> None:
        self.meter.of("routing", self.servers.end, self.where.pop(episode))
        if episode in self.forgotten:
            self.forgotten.remove(episode)
            return
        result = EpisodeResult(
            episode, "simulated", "task", Outcome.OK, reward=float(self.draw.integers(2)),
            samples=[self.replies[length]],
            num_turns=1,
        )  # fmt: skip
        frame = encode(Result(0, result))  # as a worker sends it: each episode has tokens of its own
        self.landed += 1
        message = self.meter.of("decoding", decode, frame)
        assert isinstance(message, Result)
        self.meter.of("landings", self._finish, episode, message.episode)

    def _finish(self, episode: str, result: EpisodeResult) -> None:
        self.tally.output_tokens += output_tokens(result)
        self.scheduler.finish(episode, result)

    def _update(self, version: int) -> None:
        """All replicas stand still, then serve `version`."""
        self.meter.of("updates", self.scheduler.announce, version)
        self.now += self.fleet.pause
        self.stood += self.fleet.pause
        for start in self.meter.of("updates", self.scheduler.serve, version):
            self.forgotten.add(start.episode)

    def _ship(self) -> None:
        if not self.scheduler.batch_ended:
            return
        self.meter.of("batches", self.scheduler.verify, self.scheduler.unverified())
        while (batch := self.meter.of("batches", self.scheduler.ready_batch)) is not None:
            scored = self.meter.of("scoring", score_batch, batch, self.config, {"simulated": 1.0}, {})
            self.meter.of(
                "metrics", step_metrics, batch, scored, self.tally, Counts(),
                seconds=1.0, updates=(self.fleet.pause, {}), several=False,
            )  # fmt: skip
            self.tally = Tally()
            ages = [batch.step - finished.first for group in batch.groups for finished in group.finished]
            self.ages.append((float(np.mean(ages)), max(ages)))
            self.meter.of("batches", self._commit, batch, scored)
            begun = max(self.now, self.trained_at[-1] if self.trained_at else 0.0)
            self.trained_at.append(begun + self.train_seconds)

    def _commit(self, batch: Any, scored: Any) -> None:
        self.servers.keep(self.scheduler.running_or_unverified())
        self.scheduler.advance(batch.committed(scored.trained, scored.filtered))
        assert self.issued == self.trained + self.dropped.total() + self.scheduler.held

    def _draw_lengths(self) -> Iterator[int]:
        while True:
            for length in rollout_lengths(self.draw, 10_000, LONGEST):
                yield -(-length // LENGTH_STEP) * LENGTH_STEP


def _reply(draw: np.random.Generator, length: int) -> SampleTokens:
    tokens = PROMPT + length
    return SampleTokens(
        input_ids=array("i", draw.integers(0, 151_936, tokens).tolist()),
        loss_mask=bytes([False] * PROMPT + [True] * length),
        logprobs=array("f", [0.0] * PROMPT + (-draw.exponential(0.5, length)).tolist()),
        prompt_len=PROMPT,
        reward=0.0,
    )


def measure(fleet: Fleet) -> dict[str, Any]:
    """One row: the time until the pipeline has settled is left out."""
    simulation = Simulation(fleet)
    simulation.run(fleet.warm)
    simulation.reset()
    simulation.run(fleet.seconds)
    gc.callbacks.remove(simulation._collecting)
    return simulation.row()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Fleet(0)
    parser.add_argument("--replicas", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--levels", type=int, nargs="*", default=[0, 1, 2, 4, 6, 8])
    for name in ("seats", "rate", "pause", "level", "bound", "seconds", "warm"):
        value = getattr(defaults, name)
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--output", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    given = {name: value for name, value in vars(arguments).items() if name in Fleet.__dataclass_fields__}
    sizes = sorted(arguments.replicas)
    longer = {**given, "replicas": sizes[0], "seconds": LEVEL_SECONDS}
    fleets = [Fleet(**{**longer, "level": level}) for level in arguments.levels]
    fleets += [Fleet(**{**given, "replicas": size}) for size in sizes]
    rows = []
    limit_gc()
    for fleet in fleets:  # the largest last: the peak memory is the process's
        rows.append(measure(fleet))
        print(json.dumps(rows[-1]), flush=True)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps({**describe_machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
