"""TRL's GRPOTrainer with vLLM in its process on one GPU, on the work of `end_to_end.py`'s cases with random weights.

    python benchmarks/end_to_end.py shared-128 --model-dir /tmp/model --json results.json        # writes the model
    python benchmarks/peers/trl_grpo.py shared-128 --model-dir /tmp/model --json results.json    # TRL 1.16 and vLLM
    uv run --no-sync --with trl==1.16.0 python benchmarks/peers/trl_grpo.py shared-128 \\
      --model-dir assets/tiny-reverse --device cpu --rollouts 16 --tokens 8 --steps 2            # that it runs; no vLLM

The same model files, prompts, reward, rollouts, groups and tokens; AdamW on float32 masters, bfloat16 compute, one
optimizer step a batch, no KL term. TRL is not changed. Its variants differ in what TRL leaves to the user: activation
checkpointing and the size of a micro-batch. Each is a process of its own; the row that counts is the fastest one's
(`end_to_end.py --tables` divides by it).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from end_to_end import CASES, GpuMemory, show, store
from machine import describe_gpus, describe_machine

VARIANTS = {
    "off-32": (False, 32),
    "off-64": (False, 64),
    "on-64": (True, 64),
    "off-16": (False, 16),  # what fits at 512 tokens
    "on-32": (True, 32),
}  # checkpointing, rollouts of a micro-batch
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


def prompts() -> Any:
    """The training tasks of our reverse-text environment."""
    from datasets import Dataset

    from reverse_text.data import texts
    from reverse_text.taskset import SYSTEM_PROMPT

    def chat(text: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": text}]

    return Dataset.from_list([{"prompt": chat(text), "answer": text[::-1]} for text in texts("train", 1000)])


def reward(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """Our environment's."""
    from reverse_text.taskset import parse, similarity

    pairs = zip(completions, answer, strict=True)
    return [similarity(parse(completion[0]["content"]), truth) for completion, truth in pairs]


def train(arguments: argparse.Namespace) -> None:
    """One variant, in this process. Writes when the first step ended and what each took into `arguments.step_times`."""
    began = time.time()
    import torch
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    checkpointing, micro = VARIANTS[arguments.variant]
    cuda, micro = arguments.device == "cuda", min(micro, arguments.rollouts)
    ends: list[float] = []

    def seconds() -> list[float]:
        return [round(after - before, 3) for before, after in pairwise(ends)]

    class Clock(TrainerCallback):
        def mark(self, *_: Any, **__: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
            ends.append(time.time())
            if len(ends) > 1:  # after every step, so that a run cut off by its time limit still has a row
                arguments.step_times.write_text(
                    json.dumps({"until_first_step": ends[1] - began, "step_seconds": seconds()})
                )

        on_train_begin = on_step_end = mark

    config = GRPOConfig(
        output_dir=str(arguments.step_times.parent),
        max_steps=arguments.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=arguments.rollouts // micro,
        num_generations=8,
        max_completion_length=arguments.tokens,
        generation_kwargs={"ignore_eos": True} if cuda else {"min_new_tokens": arguments.tokens},
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        beta=0.0,
        bf16=cuda,
        use_cpu=not cuda,
        gradient_checkpointing=checkpointing,
        optim="adamw_torch_fused",
        model_init_kwargs={"attn_implementation": "sdpa"},
        use_vllm=cuda,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=arguments.gpu_memory,
        vllm_max_model_length=1024,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_dir, padding_side="left")
    trainer = GRPOTrainer(
        model=str(arguments.model_dir),
        reward_funcs=[reward],
        args=config,
        train_dataset=prompts(),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()


def measure(arguments: argparse.Namespace, variant: str, scratch: Path) -> dict[str, Any]:
    """A row as `end_to_end.py` stores it.

    Raises:
        CalledProcessError: TRL failed, of a lack of memory for example.
        TimeoutExpired: No counted step ended within the time limit.
    """
    step_times = scratch / f"{variant}.json"
    command = [
        sys.executable,
        __file__,
        arguments.case,
        *sys.argv[2:],
        "--variant",
        variant,
        "--step-times",
        str(step_times),
    ]
    with GpuMemory(arguments.device == "cuda") as memory:
        try:
            subprocess.run(command, env={**OFFLINE, **os.environ}, check=True, timeout=arguments.timeout)
        except subprocess.TimeoutExpired:
            if not step_times.exists() or len(json.loads(step_times.read_text())["step_seconds"]) <= arguments.warm:
                raise
    row = json.loads(step_times.read_text())
    counted = row["step_seconds"][arguments.warm :] or row["step_seconds"]
    return row | {
        "peer_of": arguments.case,
        "machine": describe_machine()
        | {"gpus": describe_gpus() if arguments.device == "cuda" else [], "trl": version("trl")},
        "median_step": median(counted),
        "slowest_over_median": max(counted) / median(counted),
        "sampled_tokens_per_second": arguments.rollouts * arguments.tokens * len(counted) / sum(counted),
        "device_used_gib": memory.most,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=[case for case, work in CASES.items() if work is not None])
    parser.add_argument("--model-dir", type=Path, required=True, help="what `end_to_end.py --model-dir` wrote")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: generates with transformers, not vLLM"
    )
    parser.add_argument("--rollouts", type=int, help="of a step, in place of the case's")
    parser.add_argument("--tokens", type=int, help="of a reply, in place of the case's")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--gpu-memory", type=float, default=0.2, help="vLLM's share")
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--warm", type=int, default=3, help="steps that are not counted")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each variant")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--step-times", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    work = CASES[arguments.case]
    assert work is not None
    arguments.rollouts, arguments.tokens = arguments.rollouts or work[0], arguments.tokens or work[1]
    if arguments.step_times:
        train(arguments)
        sys.stdout.flush()
        os._exit(0)  # engine and process group may take their time
    with tempfile.TemporaryDirectory(prefix="prime-rl-trl-") as scratch:
        for variant in arguments.variants.split(","):
            try:
                row = measure(arguments, variant, Path(scratch))
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:  # the next one may fit
                print(f"TRL, {variant}: {error}", file=sys.stderr)
                continue
            print(show({f"TRL, {variant}": row}), flush=True)
            if arguments.json:
                store(arguments.json, {f"{arguments.case}, TRL {variant}": row})


if __name__ == "__main__":
    main()
