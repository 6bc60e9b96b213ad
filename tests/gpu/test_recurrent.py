"""Gated delta rules on a GPU, where flash-linear-attention is installed."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from prime_rl.trainer import recurrent
from support.architectures import tiny_config


def test_all_documents_at_once() -> None:
    """Its kernels and our convolution, forward and backward, give what float32 does for each document, and no document
    changes another's outputs or gradients."""
    pytest.importorskip("fla")
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(
            tiny_config("qwen3_5_text", linear_key_head_dim=128, linear_value_head_dim=128)
        )
    mixer = recurrent.mixers(lm.model.layers)[0]
    assert recurrent.why_one_by_one(mixer, lm.config.hidden_size, torch.bfloat16, torch.device("cuda")) is None
