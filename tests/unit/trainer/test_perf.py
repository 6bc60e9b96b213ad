"""Counting FLOP: what a model multiplies per token, what causal attention needs, and PRIME-RL's own count."""

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from prime_rl.trainer import perf

SHAPE = {
    "vocab_size": 100,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
}
ATTENTION, HEAD = 16 * 8 * (4 + 2 + 2 + 4), 100 * 16


@pytest.mark.parametrize(
    ("config", "of_layer"),
    [
        (Qwen3Config(**SHAPE, tie_word_embeddings=True), ATTENTION + 3 * 16 * 24),
        (Qwen3Config(**SHAPE, tie_word_embeddings=False), ATTENTION + 3 * 16 * 24),
        # A token goes through `num_experts_per_tok` experts and the router.
        (
            Qwen3MoeConfig(**SHAPE, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=12),
            ATTENTION + 8 * 16 + 2 * 3 * 16 * 12,
        ),
    ],
    ids=["tied", "untied", "experts"],
)
def test_matmul_parameters(config: PretrainedConfig, of_layer: int) -> None:
    """Projections and feed-forward of every layer, and the head once; the lookup never."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    assert perf.matmul_parameters(lm) == 3 * of_layer + HEAD


def test_flops_by_hand() -> None:
    """6 per matmul parameter and token; causal attention half of all pairs, in each of 3 layers of 4 heads of 8."""
    config = Qwen3Config(**SHAPE)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    flops = perf.step_costs(lm, config).of([10, 20]).sum()
    assert flops == 6 * perf.matmul_parameters(lm) * 30 + 12 * (3 * 4 * 8) * (10**2 + 20**2) / 2
