"""What an environment worker costs: single-turn rollouts per second, CPU, memory, start-up. The engine is scripted.

python benchmarks/env_worker.py --rollouts 1000 --concurrency 128
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
sys.path.insert(0, str(SUPPORT))

from fake_engine import make_tokenizer  # noqa: E402

from prime_rl.config.shared import EnvConfig  # noqa: E402
from prime_rl.envs.pool import EnvPool  # noqa: E402


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int) -> int:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) // 1024


async def measure(pool: EnvPool, rollouts: int, concurrency: int) -> None:
    slots = asyncio.Semaphore(concurrency)

    async def one(index: int) -> bool:
        async with slots:
            result = await pool.run(
                env="reverse-text",
                task_index=index % 1000,
                sampling={"max_tokens": 64, "seed": index},
                policy_version=0,
                episode_id=str(index),
                deadline=time.monotonic() + 300,
            )
        return result.ok

    await asyncio.gather(*(one(i) for i in range(16)))  # first use builds clients and caches
    (process,) = pool._processes.values()
    pid = process.pid
    own, worker, begin = time.process_time(), cpu_seconds(pid), time.perf_counter()
    done = await asyncio.gather(*(one(i) for i in range(rollouts)))
    wall, cpu = time.perf_counter() - begin, cpu_seconds(pid) - worker
    print(f"ok                        {sum(done)}/{rollouts}")
    print(f"rollouts per second       {rollouts / wall:.1f}  (wall {wall:.2f} s, concurrency {concurrency})")
    print(f"worker CPU per rollout    {1000 * cpu / rollouts:.2f} ms  ({rollouts / cpu:.0f} rollouts per core-second)")
    print(f"pool CPU per rollout      {1000 * (time.process_time() - own) / rollouts:.2f} ms")
    print(f"worker memory             {memory_mib(pid)} MiB")


async def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = make_tokenizer(Path(directory) / "model")
        engine = subprocess.Popen(
            [sys.executable, SUPPORT / "fake_engine.py", "--model", model], stdout=subprocess.PIPE, text=True
        )
        assert engine.stdout is not None
        base_url = engine.stdout.readline().strip()
        pool = EnvPool(
            [EnvConfig(id="reverse-text", max_concurrent=128)],
            model=str(model),
            base_url=base_url,
            api_key=None,
            output_dir=options.output or Path(directory),
        )
        try:
            begin = time.perf_counter()
            await pool.start(timeout=120)
            print(f"worker ready after        {time.perf_counter() - begin:.1f} s")
            await measure(pool, options.rollouts, options.concurrency)
        finally:
            await pool.close()
            engine.kill()
            engine.wait(timeout=10)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--output", type=Path, help="keep the worker's log here")
    asyncio.run(main(parser.parse_args()))
