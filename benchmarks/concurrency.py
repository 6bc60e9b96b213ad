"""`max_concurrent = "auto"` against numbers that stay: a server whose cache holds fewer replies than there could be in flight.

    python benchmarks/concurrency.py --json benchmarks/results/concurrency_h200.json                # one GPU, five minutes
    python benchmarks/concurrency.py --model tiny --device cpu --prompt 64 --reply 64 --group 4 --cache 8 --flight 32 --batch 64 --begin 8 --fixed 8 32

One `inference` whose key-value cache holds `--cache` full replies, and an orchestrator with `--bench` for each of the numbers in `--fixed` and for
`auto`, which begins with a batch: more than fits, by default. What is told of each: tokens a second in the middle half, the preemptions of all and of the
second half (a preempted reply is computed again: that is thrashing), and of `auto` the course of the limit. Prompts and replies have a fixed length.
"""

import argparse
import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import describe_gpus, describe_machine
from rollout import START_SECONDS, commit, orchestrator_command, server_command
from rollout_parts import Load, Watch, await_true, environment, fetch, make_model, make_prompts, running, scratch
from tables import markdown

from prime_rl.config.shared import ORCHESTRATOR_STEPS

BLOCK = 16  # tokens of a block of the cache, as vLLM has it on GPUs
CPU_BLOCK = 128


@dataclass(frozen=True)
class Case:
    """One orchestrator: a fixed number in flight, or `auto`."""

    limit: str
    batch: int

    def __str__(self) -> str:
        return f"auto, beginning with {self.batch}" if self.limit == "auto" else self.limit


def measure(case: Case, load: Load, given: argparse.Namespace, directory: Path, url: str) -> dict[str, Any]:
    """One row.

    Raises:
        SystemExit: the orchestrator failed.
    """
    directory.mkdir()
    (directory / "prompts.json").symlink_to(directory.parent / "prompts.json")
    total, log = ORCHESTRATOR_STEPS * case.batch, directory / "orchestrator.log"
    chosen = argparse.Namespace(**{**vars(given), "batch": case.batch})
    command = orchestrator_command(load, chosen, directory, url)
    command[command.index("--max-concurrent") + 1] = case.limit
    env = environment(directory / "env", given.device == "cpu")
    with running(f"the orchestrator: {case}", command, env, log) as process, Watch(f"{url}/metrics", {}) as watch:
        await_true("the orchestrator", START_SECONDS, lambda: watch.tokens[-1:] > watch.tokens[:1], process, log)
        began = watch.seconds[0]
        while process.poll() is None and time.monotonic() < began + given.limit:
            time.sleep(0.2)
    if process.returncode:
        sys.exit("\n".join(log.read_text().splitlines()[-25:]) + f"\nthe orchestrator failed (log: {log})")
    half = watch.tokens[0] + total * load.reply / 2
    at_half = next(lost for lost, tokens in zip(watch.preempted, watch.tokens, strict=True) if tokens >= half)
    found = re.findall(r"(\d+) episodes may be in flight now", log.read_text())
    return {
        "limit": case.limit,
        "batch": case.batch,
        **watch.rates(total * load.reply),
        "preempted": watch.preempted[-1] - watch.preempted[0],
        "preempted_in_second_half": watch.preempted[-1] - at_half,
        "replies": total,
        "course": [int(limit) for limit in found],
    }


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """One line for each row."""
    best = max((row["tokens_per_second"] for row in rows if row["limit"] != "auto"), default=0.0)
    lines = [["in flight", "tokens/s", "of the best fixed", "running", "preempted, of replies", "in the second half", "course of the limit"]]  # fmt: skip
    for row in rows:
        course = ", ".join(str(limit) for limit in row["course"])
        lines.append(
            [
                str(Case(row["limit"], row["batch"])), f"{row['tokens_per_second']:,.0f}",
                f"{row['tokens_per_second'] / best:.3f}" if best else "", f"{row.get('running', 0):.0f}",
                f"{row['preempted']:.0f} of {row['replies']:,}", f"{row['preempted_in_second_half']:.0f}", course,
            ]
        )  # fmt: skip
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6B", help="0.6B, 1.7B, 4B, 8B: the shape alone; or tiny (0.6B)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cache", type=int, default=128, help="full replies, with their prompts, that the cache holds")
    parser.add_argument("--flight", type=int, default=512, help="most that a server runs and workers have seats for")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (128)")
    parser.add_argument("--reply", type=int, default=256, help="tokens of a reply (256)")
    parser.add_argument("--group", type=int, default=16, help="attempts at one prompt (16)")
    parser.add_argument("--batch", type=int, default=512, help=f"rollouts of a step, of which there are {ORCHESTRATOR_STEPS} (512)")  # fmt: skip
    parser.add_argument("--fixed", type=int, nargs="*", default=[128, 160, 192, 512], help="numbers that stay")
    parser.add_argument("--begin", type=int, nargs="*", default=[96], help="further batches for auto to begin with")
    parser.add_argument("--api-servers", type=int, default=1, help="processes of the server that answer HTTP (1)")
    parser.add_argument("--workers", type=int, default=4, help="environment workers (4)")
    parser.add_argument("--port", type=int, default=8431)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each orchestrator (300)")
    parser.add_argument("--commit", help="what is measured, where there is no repository")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args()


def main() -> None:
    given, directory = parse(), scratch()
    model = make_model(given.model, directory / "model")
    load = Load(model, given.prompt, given.reply, given.flight, given.group)
    cases = [Case("auto", batch) for batch in (given.batch, *given.begin)]
    cases += [Case(str(number), given.batch) for number in given.fixed]
    texts, _ = make_prompts(load, ORCHESTRATOR_STEPS * max(case.batch for case in cases) // load.group + 1)
    (directory / "prompts.json").write_text(json.dumps(texts))
    block = CPU_BLOCK if given.device == "cpu" else BLOCK
    command = server_command(load, given, directory / "run")
    with (directory / "inference.toml").open("a") as file:
        file.write(f"num_gpu_blocks_override = {given.cache * -(-load.length // block) + 1}\n")
    url, log = f"http://127.0.0.1:{given.port}", directory / "server.log"
    options = {name: value for name, value in vars(given).items() if name not in ("json", "commit")}
    head = {**describe_machine(), "gpus": describe_gpus(), "commit": given.commit or commit(), "options": options}
    rows: list[dict[str, Any]] = []
    with running("the server", command, environment(directory / "server", given.device == "cpu"), log) as server:
        await_true("the server", START_SECONDS, lambda: fetch(f"{url}/health") is not None, server, log)
        for number, case in enumerate(cases):
            rows.append(measure(case, load, given, directory / str(number), url))
            print(json.dumps(rows[-1]), flush=True)
            if given.json is not None:  # at once: the next one may fail
                given.json.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    print(markdown(table(rows)))


if __name__ == "__main__":
    main()
