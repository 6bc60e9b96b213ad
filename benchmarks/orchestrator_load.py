"""What an episode costs the orchestrator, and whether its event loop stays free with ten thousand in flight.

    uv run --group cpu python benchmarks/orchestrator_load.py --json FILE    # five minutes

The real orchestrator process with its ledger, batches and real worker processes of a plain-Python environment
(`plain_reply.py`), one turn an episode; only the engine is scripted. The orchestrator has the first core, engine and
workers the others. No trainer: sampling runs ahead.

* `throughput`: the engine answers at once. Processor time of the orchestrator's process (all its threads) per episode,
  from the first batch to the last.
* `in flight`: a reply takes `--shortest` to `--longest` seconds, so that `--in-flight` episodes wait at any time. How
  late the event loop is, from when it starts to fill to when fewer are left: over all moments, also within a stall, as
  a timer due at that moment would see it.
* `verifiers`: single-turn episodes a second of one worker of a verifiers environment (reverse-text, in-process
  harness), as `env_worker.py` has it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web
from machine import cpu_seconds, descendants, describe_machine

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))

from fake_engine import PolicyEngine, _serve  # noqa: E402

from prime_rl.config import OrchestratorConfig, load  # noqa: E402
from prime_rl.transport.commit import list_steps  # noqa: E402
from prime_rl.transport.weights import write_base_version  # noqa: E402

MODEL = HERE.parent / "assets" / "tiny-reverse"
TICK = 0.005
GROUP = 8
WARM_UP = 4  # batches: the first waits for imports, while episodes land that belong to the next
LIMIT = 540.0  # seconds for one part


class SlowEngine(PolicyEngine):
    """Answers after a time by chance; keeps nothing of it."""

    shortest = longest = 0.0

    def _add_routes(self, app: web.Application) -> None:
        super()._add_routes(app)
        app.router.add_get("/running", self._running)

    async def _running(self, request: web.Request) -> web.Response:
        return web.json_response(self.running)

    async def _generate(self, request: web.Request) -> web.Response:
        self.delay = random.uniform(self.shortest, self.longest)
        answer = await super()._generate(request)
        self.exchanges.clear()
        return answer


def serve_engine(options: argparse.Namespace) -> None:
    engine = SlowEngine(MODEL, port=0)
    engine.shortest, engine.longest = options.shortest, options.longest
    asyncio.run(_serve(engine))


class LoopLag:
    """How late the event loop of this process is: lateness of a task that wants to run every few milliseconds."""

    def __init__(self) -> None:
        self.late: list[tuple[float, float]] = []  # when (monotonic seconds), by how much

    async def watch(self) -> None:
        while True:
            due = time.monotonic() + TICK
            await asyncio.sleep(TICK)
            now = time.monotonic()
            self.late.append((now, now - due))


def run_orchestrator(options: argparse.Namespace) -> None:
    """Run the orchestrator in this process, with a task in its loop that watches it and writes `lag.json` at last."""
    from prime_rl.entrypoints import orchestrator
    from prime_rl.orchestrator import orchestrator as loop

    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    lag = LoopLag()
    orchestrate = loop.orchestrate

    async def watched(config: OrchestratorConfig) -> None:
        watcher = asyncio.create_task(lag.watch())
        try:
            await orchestrate(config)
        finally:
            watcher.cancel()

    loop.orchestrate = watched
    sys.argv = ["orchestrator", "@", str(options.config)]
    config = load(OrchestratorConfig, prog="orchestrator")
    try:
        orchestrator.run(config)
    finally:
        (config.output_dir / "lag.json").write_text(json.dumps(lag.late))


def quantile(late: list[tuple[float, float]], share: float) -> float:
    """Of all moments: a stall of L seconds makes those in it late by L to 0."""
    moments = sorted(
        max(0.0, by - k * TICK) for _, by in late for k in range(1 + int(by / TICK))
    )  # fmt: skip
    return moments[min(len(moments) - 1, int(share * len(moments)))]


def _threads(pid: int) -> list[int]:
    return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]


class Run:
    """An engine and an orchestrator on it."""

    def __init__(
        self, directory: Path, options: argparse.Namespace, *, delays: tuple[float, float], **settings: Any
    ) -> None:
        self.directory = directory
        write_base_version(directory / "weights", MODEL)
        (directory / "incarnations").mkdir()
        (directory / "incarnations" / "0.json").write_text('{"step": 0}')  # as a trainer would begin its incarnation
        cores = sorted(os.sched_getaffinity(0))
        self.core, self.others = cores[0], set(cores[1:]) or {cores[0]}
        me = [sys.executable, str(Path(__file__).resolve())]
        self.engine = subprocess.Popen(
            [*me, "--as", "engine", "--shortest", str(delays[0]), "--longest", str(delays[1])],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.engine.stdout is not None
        os.sched_setaffinity(self.engine.pid, self.others)
        self.url = url = self.engine.stdout.readline().strip().removesuffix("/v1")
        self.realtime = options.realtime
        lines = [
            f"output_dir = {json.dumps(str(directory))}",
            f"batch_size = {settings['batch']}\nrollouts_per_example = {GROUP}\nasync_level = {settings['steps'] - 1}",
            f"max_off_policy_steps = {settings['steps']}\nmax_steps = {settings['steps']}\nseq_len = 256\n"
            "rollout_timeout = 600.0\nlogprob_check = false",
            f"max_concurrent = {settings['in_flight']}",
            f"model.name = {json.dumps(str(MODEL))}\nsampling.max_tokens = 32\nclient.base_url = {json.dumps(url)}",
            f'[environment]\nid = "plain-reply"\nadapter = "python"\nworkers = {options.workers}',
            f"max_concurrent = {-(-settings['in_flight'] // options.workers)}",
        ]
        (directory / "config.toml").write_text("\n".join(lines) + "\n")
        with (directory / "orchestrator.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*me, "--as", "orchestrator", "--config", str(directory / "config.toml"), "--core", str(self.core), ],
                stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(HERE)},
            )  # fmt: skip

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self.process, self.engine):
            process.terminate()
            process.wait(timeout=60)

    def place(self) -> list[int]:
        """Move workers, which inherit the orchestrator's core, to the others; if asked, give its own threads real-time
        priority. Return the workers' ids."""
        workers = [pid for pid in descendants(self.process.pid) if pid != self.process.pid]
        for pid in workers:
            for thread in _threads(pid):
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.sched_setaffinity(thread, self.others)
        if self.realtime:
            for thread in _threads(self.process.pid):
                os.sched_setscheduler(thread, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(10))
        return workers

    def wait_for_batch(self, step: int) -> None:
        deadline = time.monotonic() + LIMIT
        while step not in list_steps(self.directory / "rollouts"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                log = (self.directory / "orchestrator.log").read_text()[-3000:]
                raise SystemExit(f"no batch of step {step}:\n{log}")
            time.sleep(0.2)
            if time.monotonic() > deadline - LIMIT + 1.0:
                self.place()

    def lag(self) -> list[tuple[float, float]]:
        for _ in range(2):  # the second does not wait for a trainer
            self.process.terminate()
            time.sleep(2.0)
        self.process.wait(timeout=120)
        return json.loads((self.directory / "lag.json").read_text())


def measure_throughput(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    steps, batch = options.steps, 512
    with Run(directory, options, delays=(0.0, 0.0), steps=steps, batch=batch, in_flight=512) as run:
        run.wait_for_batch(WARM_UP)
        workers = run.place()
        before, began = cpu_seconds(run.process.pid), time.monotonic()
        first, worked = max(list_steps(run.directory / "rollouts")), sum(map(cpu_seconds, workers))
        run.wait_for_batch(steps - 1)
        cpu, seconds = cpu_seconds(run.process.pid) - before, time.monotonic() - began
        worked = sum(map(cpu_seconds, workers)) - worked
        episodes = (steps - 1 - first) * batch
        late = [one for one in run.lag() if began <= one[0] <= began + seconds]
    return {
        "episodes": episodes,
        "seconds": seconds,
        "episodes_per_second": episodes / seconds,
        "orchestrator_cpu_ms_per_episode": 1000 * cpu / episodes,
        "workers_cpu_ms_per_episode": 1000 * worked / episodes,
        "loop_late_p99_ms": 1000 * quantile(late, 0.99),
    }


def measure_in_flight(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    batch = 1024
    steps = (
        3 * options.in_flight // batch + 1
    )  # so many that may be issued that it stays full, with groups that wait for their last
    delays = options.shortest, options.longest
    counts: list[tuple[float, int]] = []
    with Run(directory, options, delays=delays, steps=steps, batch=batch, in_flight=options.in_flight) as run:
        threading.Thread(target=_count_in_flight, args=(run, counts), daemon=True).start()
        run.wait_for_batch(0)
        before, begun = cpu_seconds(run.process.pid), time.monotonic()
        last = options.in_flight // batch
        run.wait_for_batch(last)
        ended = time.monotonic()
        cpu = cpu_seconds(run.process.pid) - before
        late = run.lag()
    filled = next(at for at, count in counts if count > options.in_flight // 2)
    filling = [one for one in late if filled - 30.0 <= one[0] <= begun]
    full = [one for one in late if begun <= one[0] <= ended]
    return {
        "in_flight_mean": statistics.fmean(count for at, count in counts if begun <= at <= ended),
        "in_flight_most": max(count for _, count in counts),
        "seconds": ended - begun,
        "episodes_landed": last * batch,
        "orchestrator_core_share": cpu / (ended - begun),
        "loop_late_p50_ms": 1000 * quantile(full, 0.5),
        "loop_late_p99_ms": 1000 * quantile(full, 0.99),
        "loop_late_longest_ms": 1000 * max(by for _, by in full),
        "filling": {
            "loop_late_p99_ms": 1000 * quantile(filling, 0.99),
            "loop_late_longest_ms": 1000 * max(by for _, by in filling),
        },
    }


def _count_in_flight(run: Run, counts: list[tuple[float, int]]) -> None:
    """Thread: requests that the engine is busy with, one an episode."""
    while run.process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):  # it is busy, or ends
            counts.append((time.monotonic(), int(httpx.get(f"{run.url}/running", timeout=30.0).text)))
        time.sleep(1.0)


def measure_verifiers() -> dict[str, float]:
    command = [sys.executable, str(HERE / "env_worker.py"), "--rollouts", "1000", "--concurrency", "128"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    row = json.loads(done.stdout)["repeats"][0]
    names = {"rollouts_per_second": "episodes_per_second", "worker_cpu_ms_per_rollout": "worker_cpu_ms_per_episode"}
    return {name: float(row[key]) for key, name in names.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60, help="batches of 512 episodes of the throughput part")
    parser.add_argument("--in-flight", type=int, default=10_000)
    parser.add_argument("--shortest", type=float, default=40.0)
    parser.add_argument("--longest", type=float, default=120.0)
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="real-time priority for the orchestrator: on a machine that does other things too",
    )
    parser.add_argument("--only", choices=["throughput", "in flight", "verifiers"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--as", dest="role", choices=["engine", "orchestrator"], help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role is not None:
        return {"engine": serve_engine, "orchestrator": run_orchestrator}[options.role](options)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a connection an episode
    measured: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="prime-rl-load-") as root:
        for name, measure in {"throughput": measure_throughput, "in flight": measure_in_flight}.items():
            if options.only in (None, name):
                directory = Path(root) / name.replace(" ", "-")
                directory.mkdir()
                measured[name] = measure(directory, options)
        if options.only in (None, "verifiers"):
            measured["verifiers"] = measure_verifiers()
    print(json.dumps(measured, indent=1))
    if options.json:
        load = [round(one, 2) for one in os.getloadavg()]
        options.json.write_text(
            json.dumps(
                {"machine": describe_machine(), "load_average": load, "realtime": options.realtime, **measured},
                indent=1,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
