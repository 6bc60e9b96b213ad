"""Contract of every family: computed exactly, or refused with the reason that docs/reference/models.md gives."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from prime_rl.config.trainer import TrainerModel
from prime_rl.errors import UserError
from prime_rl.trainer.loss import cross_entropy
from prime_rl.trainer.model import build_policy
from prime_rl.trainer.packing import collate
from prime_rl.trainer.parallel import World
from prime_rl.trainer.parameters import named_parameters
from prime_rl.trainer.source import find_model
from support.architectures import FAMILIES, VARIANTS, build_reference, compare, reason_of, tiny_config
from support.trainer import VOCABULARY, random_documents

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import check_models  # noqa: E402

ROWS = {row["type"]: row for row in json.loads(check_models.OUT.read_text())["rows"]}
OTHERS = (
    "bamba", "deepseek_v2", "deepseek_v32", "dots1", "ernie4_5_moe", "hunyuan_v1_moe", "jamba", "jetmoe", "kimi_linear",
    "lfm2_moe",
    "longcat_flash", "mamba", "minimax", "minimax_m2", "olmo_hybrid", "persimmon", "phimoe", "qwen2_moe",
    "recurrent_gemma", "stablelm", "vaultgemma", "xglm", "zamba2",
)  # fmt: skip
"""Types of another kind of attention, of experts or of recurrent layers, or that are refused for another reason."""
TYPES = (*(name for names in FAMILIES.values() for name in names), *OTHERS)


def check_exact(model_type: str, settings: dict[str, Any], directory: Path, world: World) -> None:
    difference = compare(model_type, settings, directory, world)
    assert max(difference.logprob, difference.alone) < 1e-5
    assert difference.gradient < 1e-4, difference.parameter
    assert difference.unwritten == ()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("model_type", TYPES)
def test_a_family(model_type: str, tied: bool, world: World, tmp_path: Path) -> None:
    """Packed = one document at a time = transformers' own forward with logits and its own attention, in loss and
    gradients; and exports have every tensor of the model's files, as it is there. Refusals are one line."""
    row, settings = ROWS[model_type], {"tie_word_embeddings": tied}
    if row["verdict"] == "refused":
        with pytest.raises(UserError) as refusal:
            compare(model_type, settings, tmp_path, world)
        assert reason_of(refusal.value, tmp_path) == row["reason"]
        assert "\n" not in str(refusal.value)
        return
    assert row["verdict"] == "right"
    check_exact(model_type, settings, tmp_path, world)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant(name: str, world: World, tmp_path: Path) -> None:
    """The same of other rotary embeddings and windows."""
    check_exact(*VARIANTS[name], tmp_path, world)


MIXERS = (
    "bamba", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_text",
    "qwen3_5_moe_text", "qwen3_next", "recurrent_gemma", "zamba", "zamba2", "deepseek_v3", "gemma2", "gpt_oss",
    "llama4_text", "mistral",
)  # fmt: skip
"""Recurrent layers of every kind, and attention with latent keys, caps, sinks, chunks and windows."""


@pytest.mark.parametrize("name", MIXERS)
def test_a_poisoned_document_leaves_its_neighbours_alone(name: str, world: World, tmp_path: Path) -> None:
    """Between two documents lies one of ordinary, huge or no numbers: the others' log-probabilities have the same
    bits, and (where no infinity is multiplied by their zeros) so have all gradients of their loss."""
    model_type, settings = VARIANTS.get(name, (name, {}))
    build_reference(tiny_config(model_type, **{**settings, "tie_word_embeddings": False}), tmp_path)
    policy = build_policy(find_model(str(tmp_path)), TrainerModel(), world, tokens=68)
    masters = dict(named_parameters(policy))  # while gathered, modules hold copies
    poison = VOCABULARY - 1
    documents = [
        replace(document, input_ids=document.input_ids % poison, loss_mask=document.loss_mask & (index != 1))
        for index, document in enumerate(random_documents((17, 21, 30)))
    ]
    documents[1] = replace(documents[1], input_ids=np.full(21, poison))
    batch = collate(documents, 1)
    with torch.no_grad():
        row = policy.lm.get_input_embeddings().weight.to_local()[poison]
        row.copy_(torch.randn_like(row))

    def compute(scale: float) -> tuple[Tensor, dict[str, Tensor]]:
        row.detach().mul_(scale)
        for unit in policy.units:
            unit.reshard()
        policy.zero_grad()
        loss, _ = cross_entropy(*policy(batch), batch.streams)
        loss.backward()
        logprobs, _ = policy(batch)
        return logprobs.detach(), {name: p.grad.full_tensor().clone() for name, p in masters.items()}

    logprobs, gradients = compute(1.0)
    huge, of_huge = compute(1e4)
    assert torch.equal(huge, logprobs)
    for name, gradient in gradients.items():
        assert torch.equal(of_huge[name], gradient), name
    assert torch.equal(compute(torch.nan)[0], logprobs)


def test_the_page_has_what_was_measured() -> None:
    """docs/reference/models.md has the rows that the script kept, and a row for every type."""
    page = (ROOT / "docs" / "reference" / "models.md").read_text()
    assert check_models.table(json.loads(check_models.OUT.read_text())) in page
    assert set(ROWS) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_type_is_exact_or_refused() -> None:
    """No type in transformers' mapping that the trainer accepts is off by more than 1e-4 nats, in any variant."""
    script = [sys.executable, "scripts/check_models.py"]
    run = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
