"""Call a peer on a batch, by the peer's own Python: `call_peers.py trl|verl QUESTION ANSWER`, both JSON files.

    {"model": PATH, "batch": {"logprob" "entropy" "old" "reference" "mask": [B][T], "advantages": [B]},
     "losses": {NAME: CALL}, "advantages": {NAME: CALL}}

A loss gives its value and its gradients in `logprob` and `entropy`, a call for advantages [B] or [B][T].
"""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Fixed(nn.Module):
    """A policy with given log-probabilities and entropies of the sampled tokens, each [B, T]."""

    def __init__(self, logprob: Tensor, entropy: Tensor) -> None:
        super().__init__()
        self.logprob, self.entropy = nn.Parameter(logprob), nn.Parameter(entropy)

    def forward(self, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(log_probs=self.logprob, entropy=self.entropy)


class TRL:
    """Through its trainers, which are given log-probabilities in place of a model's."""

    def __init__(self, model: str, output: str) -> None:
        self.model, self.output = model, output

    def trainer(self, kind: str, rewards: list[Any], **settings: Any) -> Any:
        import trl
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer

        args = getattr(trl, f"{kind}Config")(
            output_dir=self.output, use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False,
            per_device_train_batch_size=8, **({"max_completion_length": 2, "num_generations": 4} | settings),
        )  # fmt: skip
        trainer = getattr(trl, f"{kind}Trainer")(
            model=AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32),
            reward_funcs=rewards,
            args=args,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * 8),
            processing_class=AutoTokenizer.from_pretrained(self.model),
        )
        trainer.current_gradient_accumulation_steps = 1
        return trainer

    def loss(self, batch: Batch, settings: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
        policy = Fixed(batch["logprob"].clone(), batch["entropy"].clone())
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
        trainer = self.trainer("GRPO", [lambda **_: [0.0]], **settings)
        trainer.model.train()
        return trainer.compute_loss(policy, inputs), [policy.logprob, policy.entropy]

    def advantages(self, call: dict[str, Any]) -> list[float]:
        """`rewards` [B], groups of four one after the other."""
        trainer = self.trainer(call["trainer"], [lambda **_: call["rewards"]], **call["settings"])
        rows = [{"prompt": "abcdefgh"[number // 4]} for number in range(len(call["rewards"]))]
        return list(trainer._generate_and_score_completions(rows)["advantages"].tolist())


class Verl:
    """Through its public functions."""

    def loss(self, batch: Batch, call: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
        """`of`: a policy loss by verl's name, "kl" (of the kind `kl`, against the rows `against`) or "nll"
        (-logprob)."""
        from verl.trainer.config.algorithm import RolloutCorrectionConfig
        from verl.trainer.ppo import core_algos
        from verl.workers.config import ActorConfig
        from verl.workers.config.actor import PolicyLossConfig

        x, entropy = (batch[name].clone().requires_grad_() for name in ("logprob", "entropy"))
        mask = tensor(call["mask"]) if "mask" in call else batch["mask"]
        sums = {"loss_agg_mode": call["aggregation"]}
        if call["of"] in ("kl", "nll"):
            tokens = -x if call["of"] == "nll" else core_algos.kl_penalty(x, batch[call["against"]], call["kl"])
            return core_algos.agg_loss(tokens, mask, **sums), [x, entropy]
        correction = RolloutCorrectionConfig(**call.get("correction", {}))
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            global_batch_info={"loss_scale_factor": call.get("length")},
            policy_loss=PolicyLossConfig(loss_mode=call["of"], rollout_correction=correction),
            **call.get("settings", {}),
        )
        total, _ = core_algos.get_policy_loss_fn(call["of"])(
            old_log_prob=batch["old"],
            log_prob=x,
            advantages=tensor(call["advantages"]),
            response_mask=mask,
            config=config,
            **sums,
        )
        return total, [x, entropy]

    def advantages(self, call: dict[str, Any]) -> list[list[float]]:
        """`rewards` [B], given at the last token of `lengths` [B]; `groups` [B]; `functions`: single rewards [B] by
        name."""
        from verl.trainer.config import AlgoConfig
        from verl.trainer.ppo import core_algos

        lengths, longest = call["lengths"], max(call["lengths"])
        mask, rewards = torch.zeros(len(lengths), longest), torch.zeros(len(lengths), longest, dtype=torch.float64)
        for row, (length, reward) in enumerate(zip(lengths, call["rewards"], strict=True)):
            mask[row, :length], rewards[row, length - 1] = 1, reward
        more: dict[str, Any] = {"config": AlgoConfig(**call.get("config", {}))}
        if call["estimator"] != "reinforce_plus_plus":
            more["index"] = np.array(call["groups"])
        if "functions" in call:
            more["non_tensor_batch"] = {name: np.array(values) for name, values in call["functions"].items()}
            prompts = torch.ones(len(lengths), 1, dtype=torch.int64)
            more["batch"] = {"prompts": prompts, "attention_mask": torch.cat([prompts, mask.long()], 1)}
        if "by_std" in call:
            more["norm_adv_by_std_in_grpo"] = call["by_std"]
        estimator = core_algos.get_adv_estimator_fn(call["estimator"])
        values, _ = estimator(token_level_rewards=rewards, response_mask=mask.double(), **more)
        return [row[:length].tolist() for row, length in zip(values, lengths, strict=True)]


def main(name: str, question_file: str, answer_file: str) -> None:
    question = json.loads(Path(question_file).read_text())
    batch = {name: tensor(values) for name, values in question["batch"].items()}
    answer: dict[str, Any] = {"losses": {}}
    with tempfile.TemporaryDirectory() as output:
        peer = TRL(question["model"], output) if name == "trl" else Verl()
        for key, call in question["losses"].items():
            total, inputs = peer.loss(batch, call)
            slopes = torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)
            gradient, entropy_gradient = (slope.tolist() for slope in slopes)
            answer["losses"][key] = {
                "loss": total.item(),
                "gradient": gradient,
                "entropy_gradient": entropy_gradient,
            }
        answer["advantages"] = {key: peer.advantages(call) for key, call in question["advantages"].items()}
    Path(answer_file).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
