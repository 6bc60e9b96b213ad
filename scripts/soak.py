"""A long run under fire: thirty steps, a random process killed 20 s after each recovery, each process three times.

    python scripts/soak.py                                # real vLLM, about 15 minutes on two cores
    python scripts/soak.py --fake --steps 12 --step-seconds 3 --pause 2 --kills 1      # minutes, with a fake engine

In the end exit status 0, every sample trained exactly once, a conserved ledger, the last version served; else status 1.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "benchmarks")]

import tomli_w  # noqa: E402
from machine import describe_machine  # noqa: E402

from conftest import free_port  # noqa: E402
from faults import audit  # noqa: E402
from faults.harness import MODEL, EngineKeeper, ServedWatcher, environment, survivors  # noqa: E402
from prime_rl.monitor import read_status  # noqa: E402
from prime_rl.processes import below, identify, table  # noqa: E402
from prime_rl.transport.commit import list_steps  # noqa: E402
from support.processes import Command  # noqa: E402

OUT = REPOSITORY / "benchmarks" / "results" / "soak.json"
PROCESSES = ("trainer", "orchestrator", "inference", "environment")
INTERVAL = 10
RECOVERY_SECONDS = 300.0
END_SECONDS = 1800.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--step-seconds", type=float, default=15.0, help="seconds that the environment's judge thinks per step"
    )
    parser.add_argument("--pause", type=float, default=20.0, help="seconds from a recovery to the next kill")
    parser.add_argument("--kills", type=int, default=3, help="kills of each process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fake", action="store_true", help="a fake engine outside of the run")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument(
        "--scratch", type=Path, help="the run's directory (default: a temporary one, removed when all is well)"
    )
    options = parser.parse_args()
    directory = options.scratch or Path(tempfile.mkdtemp(prefix="soak-"))
    directory.mkdir(parents=True, exist_ok=True)
    report = soak(options, directory)
    print(summary(report))
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    if not report["problems"] and options.scratch is None:
        shutil.rmtree(directory)
    return 1 if report["problems"] else 0


def soak(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run to the end; what was killed when, how long each recovery took, and what is wrong."""
    run, port, began = directory / "run", free_port(), time.monotonic()
    kills: list[dict[str, Any]] = []
    problems: list[str] = []
    with ExitStack() as stack:
        if options.fake:
            keeper = stack.enter_context(EngineKeeper(directory, port, environment()).running())
        watcher = stack.enter_context(ServedWatcher(port).running())
        config = write_config(options, directory, port)
        rl = stack.enter_context(Command("rl", "@", config, log=directory / "rl.log", env=environment()))
        fire = Fire(run, rl, keeper.kill if options.fake else None, random.Random(options.seed))
        for process in order(options.kills, random.Random(options.seed)):
            if not fire.recovered():
                break
            time.sleep(options.pause)
            if rl.process.poll() is not None:
                break
            kills.append({"process": process, "after": round(time.monotonic() - began, 1), "step": fire.shoot(process)})
            print(f"[{time.strftime('%H:%M:%S')}] killed {process} at step {kills[-1]['step']}", flush=True)
            recovered = fire.recovered()
            kills[-1]["recovery"] = round(fire.seconds, 1) if recovered else None
            print(
                f"[{time.strftime('%H:%M:%S')}] {'recovered' if recovered else 'no recovery'} "
                f"after {fire.seconds:.1f} s",
                flush=True,
            )
        try:
            status = rl.process.wait(END_SECONDS)
        except Exception as error:  # noqa: BLE001 - told below
            status, problems = -1, [f"not over: {error}"]
        watcher.look()
        if status != 0:
            problems.append(f"rl ended with status {status}: {rl.tail(15)}")
        else:
            kept = range(INTERVAL, options.steps + 1, INTERVAL)
            problems += audit.problems(run, options.steps, kept, watcher.last)
    problems += survivors(run)
    counts = Counter(kill["process"] for kill in kills)
    if any(counts[process] < options.kills for process in PROCESSES):
        problems.append(f"the run was over after {dict(counts)}: make steps slower (--step-seconds)")
    return {
        "machine": describe_machine(),
        "engine": "fake" if options.fake else "vllm",
        "steps": options.steps,
        "seed": options.seed,
        "seconds": round(time.monotonic() - began, 1),
        "kills": kills,
        "ledger": audit.account(run),
        "problems": problems,
    }


def order(kills: int, dice: random.Random) -> list[str]:
    """Who is killed, one after the other: at random, each equally often."""
    found: list[str] = []
    for _ in range(kills):
        found += dice.sample(PROCESSES, len(PROCESSES))
    return found


class Fire:
    """Kills a process of the run, and tells when the run has recovered from it."""

    def __init__(self, run: Path, rl: Command, kill_engine: Callable[[], None] | None, dice: random.Random) -> None:
        self._run, self._rl, self._kill_engine, self._dice = run, rl, kill_engine, dice
        self._before = (-1, -1)
        self.seconds = 0.0

    def shoot(self, process: str) -> int:
        """SIGKILL to it; returns the step that the run was at."""
        self._before = self._reached()
        if process == "inference" and self._kill_engine is not None:
            self._kill_engine()
        else:
            os.kill(self._dice.choice(self._pids(process)), signal.SIGKILL)
        return self._before[0]

    def recovered(self) -> bool:
        """Wait until a batch and a version newer than the kill are committed. Return False if the run ended first."""
        began = time.monotonic()
        while True:
            self.seconds = time.monotonic() - began
            reached = self._reached()
            if reached[0] > self._before[0] and reached[1] > self._before[1]:
                return True
            if self._rl.process.poll() is not None or self.seconds > RECOVERY_SECONDS:
                return False
            time.sleep(0.1)

    def _reached(self) -> tuple[int, int]:
        return tuple(max(list_steps(self._run / name), default=-1) for name in ("rollouts", "weights"))  # type: ignore[return-value]

    def _pids(self, process: str) -> Sequence[int]:
        """Of the inference server either itself or its engine; environment workers by their command line."""
        if process == "environment":
            return [each for each in below({self._rl.process.pid}, table()) if "prime_rl.envs.worker" in _command(each)]
        pid = read_status(self._run)[process].pid
        family = below({pid}, table()) if process == "inference" else {pid}
        return [each for each in family if identify(each) is not None]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def write_config(options: argparse.Namespace, directory: Path, port: int) -> Path:
    """A run in the ordinary, asynchronous way, made slow by the environment."""
    batch = 16
    config: dict[str, Any] = {
        "max_steps": options.steps,
        "async_level": 1,
        "seed": options.seed,
        "device": "cpu",
        "output_dir": str(directory / "run"),
        "seq_len": 256,
        "max_restarts": 100,
        "recovery_interval": 1,
        "heartbeat_timeout": 30.0,
        "model": {"name": str(MODEL)},
        "ckpt": {"interval": INTERVAL},
        "trainer": {"weights": {"dtype": "float32"}},
        "orchestrator": {
            "batch_size": batch,
            "rollouts_per_example": 4,
            "max_concurrent": 8,
            "rollout_timeout": 120.0,
            "sampling": {"max_tokens": 32},
            "client": {"timeout": 60.0},
            "environment": {
                "id": "slow-reverse",
                "args": {"max_words": 1, "num_tasks": 256, "seconds": options.step_seconds * 8 / batch},
            },
        },
    }
    if options.fake:
        config["orchestrator"]["client"]["base_url"] = f"http://127.0.0.1:{port}/v1"
    else:
        config["inference"] = {"server": {"port": port}, "max_model_len": 256, "fork_engine": True}
    path = directory / "run.toml"
    path.write_text(tomli_w.dumps(config))
    return path


def summary(report: dict[str, Any]) -> str:
    counts = Counter(kill["process"] for kill in report["kills"])
    recoveries = [kill["recovery"] for kill in report["kills"] if kill["recovery"] is not None]
    lines = [
        f"{report['steps']} steps in {report['seconds'] / 60:.1f} minutes, engine {report['engine']}, "
        f"{len(report['kills'])} kills ({', '.join(f'{name} {count}' for name, count in sorted(counts.items()))})",
        f"ledger: {report['ledger']}",
    ]
    if recoveries:
        lines.append(
            f"to the next batch and version after a kill: mean {sum(recoveries) / len(recoveries):.1f} s, "
            f"most {max(recoveries):.1f} s"
        )
    return "\n".join(lines + [f"WRONG: {problem}" for problem in report["problems"]])


if __name__ == "__main__":
    sys.exit(main())
