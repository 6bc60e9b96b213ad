"""What an environment worker costs: single-turn rollouts per second, CPU, memory, start-up. The engine is scripted.

python benchmarks/env_worker.py --rollouts 1000 --concurrency 128 --repeat 3 --json benchmarks/results/env_worker.json
PYTHONPATH=OTHER/src python benchmarks/env_worker.py …            # another checkout, to compare on one machine
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
sys.path.insert(0, str(SUPPORT))

from fake_engine import make_tokenizer  # noqa: E402
from machine import cpu_seconds, descendants, describe_machine  # noqa: E402

from prime_rl.config.shared import EnvConfig  # noqa: E402
from prime_rl.envs.pool import EnvPool  # noqa: E402


def memory_mib(pid: int) -> int:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) // 1024


async def measure(pool: EnvPool, pid: int, rollouts: int, concurrency: int) -> dict[str, float]:
    slots = asyncio.Semaphore(concurrency)

    async def one(index: int) -> bool:
        async with slots:
            result = await pool.run(
                env="reverse-text",
                task_index=index % 1000,
                sampling={"max_tokens": 64, "seed": index},
                policy_version=0,
                episode_id=str(index),
                timeout=300.0,
            )
        return result.ok

    await asyncio.gather(*(one(i) for i in range(16)))  # first use builds clients and caches
    own, worker, begin = time.process_time(), cpu_seconds(pid), time.perf_counter()
    done = await asyncio.gather(*(one(i) for i in range(rollouts)))
    wall, cpu = time.perf_counter() - begin, cpu_seconds(pid) - worker
    assert all(done)
    return {
        "rollouts_per_second": rollouts / wall,
        "worker_cpu_ms_per_rollout": 1000 * cpu / rollouts,
        "pool_cpu_ms_per_rollout": 1000 * (time.process_time() - own) / rollouts,
        "worker_mib": memory_mib(pid),
    }


async def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = make_tokenizer(Path(directory) / "model")
        engine = subprocess.Popen(
            [sys.executable, SUPPORT / "fake_engine.py", "--model", model], stdout=subprocess.PIPE, text=True
        )
        assert engine.stdout is not None
        base_url = engine.stdout.readline().strip()
        pool = EnvPool(
            [EnvConfig(id="reverse-text", max_concurrent=128, workers=1)],
            model=str(model),
            base_url=base_url,
            api_key=None,
            output_dir=options.output or Path(directory),
        )
        try:
            begin = time.perf_counter()
            await pool.start(timeout=120)
            ready = time.perf_counter() - begin
            (pid,) = set(descendants(os.getpid())) - {os.getpid(), engine.pid}
            rows = [await measure(pool, pid, options.rollouts, options.concurrency) for _ in range(options.repeat)]
            result = {"machine": describe_machine(), "worker_ready_seconds": ready, "repeats": rows}
            print(json.dumps(result, indent=1))
            if options.json is not None:
                options.json.write_text(json.dumps(result, indent=1) + "\n")
        finally:
            await pool.close()
            engine.kill()
            engine.wait(timeout=10)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--output", type=Path, help="keep the worker's log here")
    asyncio.run(main(parser.parse_args()))
