"""Contract of every family: computed exactly, or refused with the reason that docs/reference/models.md gives."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from prime_rl.errors import UserError
from prime_rl.trainer.parallel import World
from support.architectures import FAMILIES, compare, reason_of

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import check_models  # noqa: E402

ROWS = {row["type"]: row for row in json.loads(check_models.OUT.read_text())["rows"]}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("model_type", [name for names in FAMILIES.values() for name in names])
def test_a_family(model_type: str, tied: bool, world: World, tmp_path: Path) -> None:
    """Packed = one document at a time = transformers' own forward with logits and its own attention, in loss and
    gradients; and exports have every tensor that the model's files have."""
    row, settings = ROWS[model_type], {"tie_word_embeddings": tied}
    if row["verdict"] == "refused":
        with pytest.raises(UserError) as refusal:
            compare(model_type, settings, tmp_path, world)
        assert reason_of(refusal.value, tmp_path) == row["reason"]
        return
    difference = compare(model_type, settings, tmp_path, world)
    assert row["verdict"] == "right"
    assert max(difference.logprob, difference.alone) < 1e-5
    assert difference.gradient < 1e-4, difference.parameter
    assert difference.unwritten == ()


def test_the_page_has_what_was_measured() -> None:
    """docs/reference/models.md has the rows that the script kept, and a row for every type."""
    page = (ROOT / "docs" / "reference" / "models.md").read_text()
    assert check_models.table(json.loads(check_models.OUT.read_text())) in page
    assert set(ROWS) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.slow
def test_every_type_is_exact_or_refused() -> None:
    """No type in transformers' mapping that the trainer accepts is off by more than 1e-4 nats, in any variant."""
    script = [sys.executable, "scripts/check_models.py"]
    run = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
