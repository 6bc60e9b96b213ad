"""How long a user waits for `--help` of each entrypoint, and what `import prime_rl.config` costs.

    python benchmarks/startup.py [--repeat 5] [--json startup.json]

Median wall time of fresh processes, Python's own start included, and median processor time, which a busy machine hardly
changes. A heavy module that gets imported on the way is listed: there must be none.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ENTRYPOINTS = ("rl", "sft", "trainer", "orchestrator", "inference", "eval")
HEAVY = ("torch", "vllm", "verifiers", "transformers", "datasets", "pyarrow", "wandb")
DEADLINE_S = 120.0


class Measured(NamedTuple):
    """Wall and processor seconds of each run, and the heavy modules that the command imported."""

    command: str
    wall_s: list[float]
    cpu_s: list[float]
    heavy: list[str]


def help_code(name: str) -> str:
    """Python that does what the installed script `name --help` does."""
    return (
        f"import sys; sys.argv = ['{name}', '--help']\n"
        f"from prime_rl.entrypoints.{name} import main\n"
        "try: main()\nexcept SystemExit as stop: assert not stop.code, stop.code"
    )


def measure(command: str, code: str, repeat: int) -> Measured:
    """Run `code` in `repeat` fresh processes. Raises CalledProcessError where it fails."""
    report = f"\nimport json, sys\nprint('\\n' + json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    wall_s: list[float] = []
    cpu_s: list[float] = []
    heavy: list[str] = []
    for _ in range(repeat):
        start, cpu_start = time.perf_counter(), children_cpu_s()
        done = subprocess.run(
            [sys.executable, "-c", code + report], check=True, capture_output=True, text=True, timeout=DEADLINE_S
        )
        wall_s.append(time.perf_counter() - start)
        cpu_s.append(children_cpu_s() - cpu_start)
        heavy = json.loads(done.stdout.splitlines()[-1])
    return Measured(command, wall_s, cpu_s, heavy)


def children_cpu_s() -> float:
    """Processor seconds of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measure, print the table, write the JSON; status 1 where something heavy was imported."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="processes per figure (5)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    codes = {"python (nothing)": "pass", "import prime_rl.config": "import prime_rl.config"}
    codes |= {f"{name} --help": help_code(name) for name in ENTRYPOINTS}
    results = [measure(command, code, arguments.repeat) for command, code in codes.items()]
    print(f"{'command':<26}{'wall s':>8}{'min':>8}{'max':>8}{'cpu s':>8}  heavy imports")
    for result in results:
        wall = f"{statistics.median(result.wall_s):>8.2f}{min(result.wall_s):>8.2f}{max(result.wall_s):>8.2f}"
        print(f"{result.command:<26}{wall}{statistics.median(result.cpu_s):>8.2f}  {', '.join(result.heavy) or 'none'}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([result._asdict() for result in results], indent=2) + "\n")
    sys.exit(1 if any(result.heavy for result in results) else 0)


if __name__ == "__main__":
    main()
