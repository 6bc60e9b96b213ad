"""Call TRL's trainers on a batch: run by TRL's own Python, with a file of calls and a file for what they give, both JSON.

    {"model": PATH, "batch": {"logprob": [B][T], "entropy": [B][T], "old": [B][T], "reference": [B][T], "mask": [B][T], "advantages": [B]},
     "losses": {NAME: settings}, "advantages": {NAME: CALL}, "overlong": CALL}

A loss gives its value and its gradients in `logprob` and `entropy`; a call for advantages gives [B].
"""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.rewards import get_soft_overlong_punishment

TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


class Fixed(nn.Module):
    """A policy with given log-probabilities and entropies of the sampled tokens, each [B, T]."""

    def __init__(self, logprob: Tensor, entropy: Tensor) -> None:
        super().__init__()
        self.logprob, self.entropy = nn.Parameter(logprob), nn.Parameter(entropy)

    def forward(self, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(log_probs=self.logprob, entropy=self.entropy)


def make_trainer(kind: str, model: str, rewards: list[Any], output: str, **settings: Any) -> Any:
    of, config = TRAINERS[kind]
    more = {"max_completion_length": 2, "num_generations": 4} | settings
    args = config(
        output_dir=output, use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False,
        per_device_train_batch_size=8, **more,
    )  # fmt: skip
    trainer = of(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=rewards,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 8),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def loss(batch: dict[str, Tensor], settings: dict[str, Any], model: str, output: str) -> dict[str, Any]:
    policy = Fixed(batch["logprob"], batch["entropy"])
    ids, mask = torch.ones_like(batch["mask"], dtype=torch.int64), batch["mask"].long()
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": batch["advantages"],
        "old_per_token_logps": batch["old"],
        "ref_per_token_logps": batch["reference"],
        "num_items_in_batch": mask.sum(),
    }
    trainer = make_trainer("grpo", model, [lambda **_: [0.0]], output, **settings)
    trainer.model.train()
    total = trainer.compute_loss(policy, inputs)
    slopes = torch.autograd.grad(total, [policy.logprob, policy.entropy], allow_unused=True)
    gradients = [torch.zeros_like(batch["logprob"]) if slope is None else slope for slope in slopes]
    return {"loss": total.item(), "gradient": gradients[0].tolist(), "entropy_gradient": gradients[1].tolist()}


def advantages(call: dict[str, Any], model: str, output: str) -> list[float]:
    """`trainer`, `settings`; `functions`: the rewards [B] of each reward function, groups of four one after the other."""

    def function(values: list[float]) -> Any:
        return lambda **_: values

    rewards = [function(values) for values in call["functions"]]
    trainer = make_trainer(call["trainer"], model, rewards, output, **call["settings"])
    rows = [{"prompt": "abcdefgh"[number // 4]} for number in range(len(call["functions"][0]))]
    return list(trainer._generate_and_score_completions(rows)["advantages"].tolist())


def main(question_file: str, answer_file: str) -> None:
    question = json.loads(Path(question_file).read_text())
    model = question["model"]
    batch = {name: torch.tensor(values, dtype=torch.float64) for name, values in question.get("batch", {}).items()}
    with tempfile.TemporaryDirectory() as output:
        answer: dict[str, Any] = {
            "losses": {name: loss(batch, call, model, output) for name, call in question.get("losses", {}).items()},
            "advantages": {
                name: advantages(call, model, output) for name, call in question.get("advantages", {}).items()
            },
        }
    if "overlong" in question:
        call = question["overlong"]
        punish = get_soft_overlong_punishment(call["max_tokens"], call["cache"])
        answer["overlong"] = punish(completion_ids=[[0] * length for length in call["lengths"]])
    Path(answer_file).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
