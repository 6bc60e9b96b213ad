"""Call verl's public functions on a batch: run by verl's own Python, with a file of calls and a file for what they give, both JSON.

    {"batch": {"logprob": [B][T], "old": [B][T], "reference": [B][T], "mask": [B][T]}, "losses": {NAME: CALL}, "advantages": {NAME: CALL}}

A loss gives its value and its gradient in `logprob`; an advantage estimator gives [B][T].
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss(batch: dict[str, Tensor], call: dict[str, Any]) -> dict[str, Any]:
    """`of`: a policy loss by verl's name, "kl" (of the kind `kl`, against the rows `against`) or "nll" (-logprob)."""
    x = batch["logprob"].clone().requires_grad_()
    mask = tensor(call["mask"]) if "mask" in call else batch["mask"]
    sums = {"loss_agg_mode": call["aggregation"]}
    if call["of"] in ("kl", "nll"):
        tokens = -x if call["of"] == "nll" else core_algos.kl_penalty(x, batch[call["against"]], call["kl"])
        more = {"loss_scale_factor": call["length"]} if "length" in call else {}
        total = core_algos.agg_loss(tokens, mask, **sums, **more)
    else:
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            global_batch_info={"loss_scale_factor": call.get("length")},
            policy_loss=PolicyLossConfig(
                loss_mode=call["of"], rollout_correction=RolloutCorrectionConfig(**call.get("correction", {}))
            ),
            **call.get("settings", {}),
        )
        function = core_algos.get_policy_loss_fn(call["of"])
        advantages = tensor(call["advantages"])
        total, _ = function(
            old_log_prob=batch["old"], log_prob=x, advantages=advantages, response_mask=mask, config=config, **sums
        )
    (gradient,) = torch.autograd.grad(total, x)
    return {"loss": total.item(), "gradient": gradient.tolist()}


def advantages(call: dict[str, Any]) -> list[list[float]]:
    """`estimator`: verl's name; `rewards` [B], given at the last token of `lengths` [B]; `groups` [B]; `functions`: single rewards [B] by name."""
    lengths, longest = call["lengths"], max(call["lengths"])
    mask, rewards = torch.zeros(len(lengths), longest), torch.zeros(len(lengths), longest, dtype=torch.float64)
    for row, (length, reward) in enumerate(zip(lengths, call["rewards"], strict=True)):
        mask[row, :length], rewards[row, length - 1] = 1, reward
    estimator = core_algos.get_adv_estimator_fn(call["estimator"])
    more: dict[str, Any] = {"config": AlgoConfig(**call.get("config", {}))}
    if call["estimator"] != "reinforce_plus_plus":
        more["index"] = np.array(call["groups"])
    if "functions" in call:
        more["non_tensor_batch"] = {name: np.array(values) for name, values in call["functions"].items()}
        prompts = torch.ones(len(lengths), 1, dtype=torch.int64)
        more["batch"] = {"prompts": prompts, "attention_mask": torch.cat([prompts, mask.long()], 1)}
    if "by_std" in call:
        more["norm_adv_by_std_in_grpo"] = call["by_std"]
    values, _ = estimator(token_level_rewards=rewards, response_mask=mask.double(), **more)
    return [row[:length].tolist() for row, length in zip(values, lengths, strict=True)]


def main(question_file: str, answer_file: str) -> None:
    question = json.loads(Path(question_file).read_text())
    batch = {name: tensor(values) for name, values in question.get("batch", {}).items()}
    losses = {name: loss(batch, call) for name, call in question.get("losses", {}).items()}
    by_attempt = {name: advantages(call) for name, call in question.get("advantages", {}).items()}
    Path(answer_file).write_text(json.dumps({"losses": losses, "advantages": by_attempt}))


if __name__ == "__main__":
    main(*sys.argv[1:])
