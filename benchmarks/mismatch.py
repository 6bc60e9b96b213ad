"""How far the trainer's log-probabilities are from those of the engine that sampled, for each attention backend.

    python benchmarks/mismatch.py --layers 8 --json benchmarks/results/mismatch_h200.json
    python benchmarks/mismatch.py --model tiny --device cpu --prompts 4 --tokens 16            # no GPU

A model of real width with random weights is exported as the trainer exports it, vLLM samples from it at temperature 1, and the trainer scores
what was sampled. The last norm is scaled so that the distributions are as sharp as a trained model's. Needs vLLM (0.31 or 0.26) and no network.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from attention_rates import BACKENDS
from forked import run_forked
from machine import describe_gpus, describe_machine
from steps import model_source

from prime_rl.config.trainer import TrainerModel
from prime_rl.errors import UserError
from prime_rl.trainer.model import build_policy
from prime_rl.trainer.packing import Document, collate, to_device
from prime_rl.trainer.parallel import close_world, init_world
from prime_rl.trainer.parameters import named_parameters
from prime_rl.trainer.source import find_model
from prime_rl.trainer.weight_copy import RowCopies
from prime_rl.trainer.weight_publisher import write_version

TOKENIZER = Path(__file__).parent.parent / "assets" / "tiny-reverse"
PACKED = 8192  # tokens of a micro-batch


def write_model(directory: Path, model: str, layers: int | None, sharpness: float, device: str) -> None:
    """Export random weights of a model's shape as version 0, in bfloat16."""
    world = init_world(device, 60)
    source = model_source(model, layers)
    policy = build_policy(source, TrainerModel(attention="sdpa", compile=False, activation_checkpointing="none"), world)
    with torch.no_grad():
        dict(named_parameters(policy))["model.norm.weight"].fill_(sharpness)
    source.config.architectures = [type(policy.lm).__name__]  # a made-up shape does not say it; vLLM asks
    staging = RowCopies(policy, world, torch.bfloat16)
    write_version(staging, staging.copy(), source, world, directory, version=0, incarnation=0)
    for path in TOKENIZER.glob("tokenizer*"):  # vLLM wants one, although ids go in and out
        shutil.copy(path, directory)
    close_world()


def sample(model: Path, into: Path, prompts: int, tokens: int, compiled: bool) -> None:
    """Sample with vLLM: ids and log-probabilities of `tokens` tokens after each of `prompts` random prompts of 16 to 64."""
    import vllm
    from vllm import LLM, SamplingParams

    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    rng = np.random.default_rng(0)
    given = [rng.integers(0, vocabulary, int(rng.integers(16, 65))).tolist() for _ in range(prompts)]
    engine = LLM(
        model=str(model),
        dtype="bfloat16",
        max_model_len=64 + tokens,
        gpu_memory_utilization=0.3,
        enforce_eager=not compiled,
        logprobs_mode="processed_logprobs",
        seed=0,
    )
    wanted = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
    found = []
    for output in engine.generate([{"prompt_token_ids": ids} for ids in given], wanted):
        done = output.outputs[0]
        ids = list(done.token_ids)
        logprobs = [entry[token].logprob for entry, token in zip(done.logprobs, ids, strict=True)]
        found.append({"prompt": list(output.prompt_token_ids), "tokens": ids, "logprobs": logprobs})
    into.write_text(json.dumps({"vllm": vllm.__version__, "samples": found}))


def score(model: Path, samples: list[dict[str, list[int]]], settings: dict[str, object], device: str) -> list[float]:
    """The trainer's log-probabilities of all sampled tokens, in the samples' order."""
    world = init_world(device, 60)
    policy = build_policy(find_model(str(model)), TrainerModel.model_validate(settings), world)
    scored: list[float] = []
    for group in _groups(samples):
        documents = [_document(sample) for sample in group]
        batch = to_device(collate(documents, 1, 128 if device == "cuda" else 1), world.device)
        with torch.no_grad():
            scored += policy(batch)[0].float().cpu().tolist()
    return scored


def _document(sample: dict[str, list[int]]) -> Document:
    ids = np.array(sample["prompt"] + sample["tokens"])
    mask = np.arange(len(ids)) >= len(sample["prompt"])
    return Document(ids, mask, 1.0, np.zeros((1, len(ids)), dtype=np.float32))


def _groups(samples: list[dict[str, list[int]]]) -> list[list[dict[str, list[int]]]]:
    groups: list[list[dict[str, list[int]]]] = [[]]
    room = PACKED
    for one in samples:
        size = len(one["prompt"]) + len(one["tokens"])
        if size > room and groups[-1]:
            groups.append([])
            room = PACKED
        groups[-1].append(one)
        room -= size
    return groups


def compare(trainer: list[float], engine: list[float]) -> dict[str, float]:
    """Absolute differences and the mismatch KL (k3) of sampled tokens' log-probabilities."""
    log_ratio = np.asarray(trainer) - np.asarray(engine)
    return {
        "tokens": float(log_ratio.size),
        "mean_abs": float(np.abs(log_ratio).mean()),
        "max_abs": float(np.abs(log_ratio).max()),
        "mismatch_kl": float((np.expm1(log_ratio) - log_ratio).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6B", help="0.6B, 1.7B, 4B, 8B, tiny (0.6B)")
    parser.add_argument("--layers", type=int, help="layers of it (all)")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256, help="sampled per prompt (256)")
    parser.add_argument("--sharpness", type=float, default=6.0, help="weight of the last norm (6)")
    parser.add_argument("--compiled", action="store_true", help="let vLLM compile and capture graphs (slower to start)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for vLLM (300)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "mismatch.log")
    parser.add_argument("--sample-from", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sample-into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.sample_from is not None:
        sample(arguments.sample_from, arguments.sample_into, arguments.prompts, arguments.tokens, arguments.compiled)
        return
    with tempfile.TemporaryDirectory() as scratch:
        run(arguments, Path(scratch))


def run(arguments: argparse.Namespace, scratch: Path) -> None:
    """Export, sample, score with every backend, and print the table."""
    model, into, log = scratch / "weights" / "step_0", scratch / "samples.json", arguments.log
    made = run_forked(
        partial(write_model, model, arguments.model, arguments.layers, arguments.sharpness, arguments.device),
        limit=120,
        log=log,
    )
    if made.error:
        sys.exit(f"exporting the model failed: {made.error} (log: {log})")
    run_engine(arguments, model, into, log)
    sampled = json.loads(into.read_text())
    samples = sampled["samples"]
    engine = [value for one in samples for value in one["logprobs"]]
    low = "bfloat16" if arguments.device == "cuda" else "float32"
    cases = [(name, {"attention": name, "dtype": low}) for name in BACKENDS]
    cases.append(("sdpa, float32", {"attention": "sdpa", "dtype": "float32"}))
    rows = []
    print(f"vLLM {sampled['vllm']}; mean entropy-like -logprob of the samples {-np.mean(engine):.2f}")
    print(f"{'attention':<20}{'mean |Δ|':>12}{'max |Δ|':>12}{'mismatch KL':>14}")
    for name, settings in cases:
        job = partial(_scored, model, samples, {**settings, "activation_checkpointing": "none"}, arguments.device)
        outcome = run_forked(job, limit=180, log=log)
        row: dict[str, object] = {"attention": name}
        if outcome.error or isinstance(outcome.value, str):
            row["absent"] = outcome.error or outcome.value
            print(f"{name:<20}  {row['absent']}", flush=True)
        else:
            found = compare(outcome.value, engine)
            row |= found
            print(
                f"{name:<20}{found['mean_abs']:>12.2e}{found['max_abs']:>12.2e}{found['mismatch_kl']:>14.2e}",
                flush=True,
            )
        rows.append(row)
    if arguments.json is not None:
        setting = {
            key: getattr(arguments, key) for key in ("model", "layers", "prompts", "tokens", "sharpness", "compiled")
        }
        head = {**describe_machine(), "gpus": describe_gpus(), "vllm": sampled["vllm"], **setting}
        arguments.json.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


def _scored(
    model: Path, samples: list[dict[str, list[int]]], settings: dict[str, object], device: str
) -> list[float] | str:
    """The same, or why this backend cannot run here."""
    try:
        return score(model, samples, settings, device)
    except UserError as error:
        return str(error)


def run_engine(arguments: argparse.Namespace, model: Path, into: Path, log: Path) -> None:
    """vLLM in a process of its own, so that all its memory is free again afterwards."""
    command = [sys.executable, __file__, "--sample-from", str(model), "--sample-into", str(into)]
    command += ["--prompts", str(arguments.prompts), "--tokens", str(arguments.tokens)]
    command += ["--compiled"] if arguments.compiled else []
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
    if arguments.device == "cpu":
        settings |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    with log.open("a") as file:
        done = subprocess.run(
            command, env=os.environ | settings, stdout=file, stderr=subprocess.STDOUT, timeout=arguments.limit
        )
    if done.returncode:
        sys.exit(f"vLLM failed with exit code {done.returncode} (log: {log})")


if __name__ == "__main__":
    main()
