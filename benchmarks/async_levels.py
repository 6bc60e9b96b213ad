"""What it is worth that sampling runs ahead of training: steps per second at async level 1 against level 0, where both take as long.

    python benchmarks/async_levels.py --device cuda --workers 4 --json benchmarks/results/async_levels_h200.json     # two GPUs
    uv run --group cpu python benchmarks/async_levels.py --batch 16 --group 4 --reply 32 --steps 6 --warm 2      # that it runs; both share the CPU

Whole runs of `rl` with the bundled model and `reverse_text`, one for each level, with one server that is started first. At level 0 a step is generation, then
training, then the new weights; their two times are taken there and printed, with what is left. Twice as fast is the most that running ahead can be, where
the two are equal: a short run at level 0 (`--probe` steps) comes first, after which the length of the replies is set so that they are. A micro-batch
holds one reply, so that training takes as long whatever that length. Settings of `rl` may follow `--`.
"""

import argparse
import json
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from machine import describe_gpus, describe_machine
from rl_runs import REPOSITORY, mean, run_rl, steady, visible

sys.path.insert(0, str(REPOSITORY / "tests"))
from conftest import InferenceServer, launch_server

MATCHED = 1.25  # the two times differ by no more than this factor
PROMPT = 128  # tokens that a micro-batch has room for beside its reply: a prompt, not a second reply


def settings(arguments: argparse.Namespace, level: int, reply: int, server: InferenceServer) -> dict[str, Any]:
    """Of one run, by the names that `rl` takes."""
    found: dict[str, Any] = {
        "device": arguments.device,
        "model.name": server.model,
        "async-level": level,
        "seed": arguments.seed,
        "trainer.seq-len": reply + PROMPT,
        "orchestrator.seq-len": reply + PROMPT,
        "orchestrator.batch-size": arguments.batch,
        "orchestrator.rollouts-per-example": arguments.group,
        "orchestrator.sampling.min-tokens": reply,
        "orchestrator.sampling.max-tokens": reply,
        "orchestrator.environment.id": "reverse-text",
        "orchestrator.environment.workers": arguments.workers,
        "orchestrator.client.base-url": server.base_url,
    }
    if arguments.device == "cpu":
        found |= {"trainer.weights.dtype": "float32"}
    return found


def run(arguments: argparse.Namespace, level: int, reply: int, steps: int, server: InferenceServer, root: Path) -> dict[str, Any]:  # fmt: skip
    """One whole run; what its steps took, after the first ones, which warm up, and without the last one, which nothing follows."""
    directory = Path(tempfile.mkdtemp(prefix=f"level-{level}-", dir=root)) / "outputs"
    # Every step trains on all that it sampled.
    more = ["--orchestrator.no-filter-zero-advantage", "--max-steps", str(steps), *arguments.more]
    gpus = visible()[1:] if arguments.device == "cuda" else None
    run_rl(settings(arguments, level, reply, server), directory, more, arguments.timeout, gpus)
    counted = range(arguments.warm, steps - 1)
    trainer = steady(directory, "trainer", counted)
    orchestrator = steady(directory, "orchestrator", counted)
    seconds = mean(row["time/step"] for row in trainer)
    return {
        "async_level": level,
        "reply": reply,
        "steps": len(trainer),
        "steps_per_second": 1 / seconds,
        "step": seconds,
        "training": mean(row["time/step"] - row["time/wait_for_batch"] for row in trainer),
        "generation": mean(row["time/step"] - row["time/idle"] for row in orchestrator),
        "update": mean(row["time/update_weights"] for row in orchestrator),
        "update_parts": {
            name.removeprefix("time/update_"): mean(row.get(name, 0.0) for row in orchestrator)
            for name in orchestrator[0]
            if name.startswith("time/update_")
        },
        "tokens": mean(row["progress/tokens"] for row in orchestrator),
        "off_policy": mean(row["off_policy/mean"] for row in orchestrator),
    }


def serving(arguments: argparse.Namespace, scratch: Path) -> AbstractContextManager[InferenceServer]:
    """A server for all runs, on the first GPU; each run has it load its base model again."""
    found = REPOSITORY / arguments.model
    options = {"max_model_len": arguments.context, "weights_root": str(scratch)}
    gpu = {"CUDA_VISIBLE_DEVICES": visible()[0]} if arguments.device == "cuda" else {}
    model = found if found.is_dir() else Path(arguments.model)
    return launch_server(scratch / "server", model, options, environment=gpu)


def matched_reply(arguments: argparse.Namespace, probed: dict[str, Any]) -> int:
    """Tokens of a reply with which generation takes as long as training."""
    wanted = round(probed["reply"] * probed["training"] / probed["generation"])
    return min(max(wanted, PROMPT // 2), arguments.context - PROMPT)


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Prints the table, and what follows from it."""
    columns = ("steps_per_second", "step", "generation", "training", "update", "tokens", "off_policy")
    print("".join(f"{name:>18}" for name in ("async_level", *columns)))
    for row in rows:
        print(f"{row['async_level']:>18}" + "".join(f"{row[name]:>18.4g}" for name in columns))
        print(" " * 18 + ", ".join(f"{part} {seconds:.3f}" for part, seconds in row["update_parts"].items()))
    apart, together = rows
    balance = apart["generation"] / apart["training"]
    most = (apart["generation"] + apart["training"]) / max(apart["generation"], apart["training"])
    ratio = together["steps_per_second"] / apart["steps_per_second"]
    matched = 1 / MATCHED <= balance <= MATCHED
    print(f"generation / training at level 0: {balance:.2f}" + ("" if matched else ": not matched (--reply)"))
    print(
        f"async level 1 is {ratio:.2f} times as fast as level 0; these two times allow {most:.2f} and what an update costs"
    )
    return {"ratio": ratio, "generation_over_training": balance, "matched": matched}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default="assets/tiny-reverse")
    parser.add_argument("--batch", type=int, default=256, help="episodes of a step")
    parser.add_argument("--group", type=int, default=8, help="attempts at one task")
    parser.add_argument("--reply", type=int, default=256, help="tokens of each reply, at first")
    parser.add_argument("--context", type=int, default=1024, help="most tokens of prompt and reply")
    parser.add_argument("--workers", type=int, default=1, help="processes that run the environment")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--warm", type=int, default=4, help="steps that are not counted")
    parser.add_argument(
        "--probe", type=int, default=8, help="steps of the run that finds the length of a reply; 0: it stays"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for each run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("more", nargs="*", help="settings of rl")
    arguments = parser.parse_args()
    if arguments.warm + 2 > min(arguments.steps, arguments.probe or arguments.steps):
        parser.error("--steps or --probe leaves none between the first ones and the last one")
    reply = arguments.reply
    with tempfile.TemporaryDirectory(prefix="prime-rl-async-") as scratch:
        root = Path(scratch)
        with serving(arguments, root) as server:
            if arguments.probe:
                probed = run(arguments, 0, reply, arguments.probe, server, root)
                reply = matched_reply(arguments, probed)
                print(f"replies of {reply} tokens: {probed}", flush=True)
            rows = [run(arguments, level, reply, arguments.steps, server, root) for level in (0, 1)]
    result = report(rows)
    if arguments.json:
        given = {name: value for name, value in vars(arguments).items() if name not in ("json", "timeout")}
        machine = describe_machine() | {"gpus": describe_gpus()}
        arguments.json.write_text(
            json.dumps({"machine": machine, "settings": given, **result, "levels": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
