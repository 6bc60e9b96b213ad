"""The fine-tuning loop in one process: values, determinism, checkpoints, and refusals."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prime_rl.config import SFTConfig
from prime_rl.errors import UserError
from support.trainer import hashes, metrics

Run = Callable[[SFTConfig], None]
ROWS = [{"prompt": f"say {'a' * (i % 7 + 1)}", "completion": "b" * (i % 5 + 1)} for i in range(40)]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def make_config(
    output_dir: Path, model: Path, dataset: Path, data: dict[str, Any] | None = None, **settings: Any
) -> SFTConfig:
    base = {"output_dir": output_dir, "model": {"name": str(model)}, "device": "cpu", "optim": {"lr": 1e-3}}
    rows = {"name": str(dataset), "seq_len": 64, "batch_size": 2, **(data or {})}
    return SFTConfig.model_validate({**base, "data": rows, **settings})


def expected_first_step(model: Path, rows: list[dict[str, str]]) -> tuple[float, float]:
    """Return mean loss per trained token and gradient norm in float64: by conversation, full logits, autograd."""
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(model)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        head = f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n"
        before, after = (tokenizer(text).input_ids for text in (head, f"{row['completion']}<|im_end|>"))
        ids = torch.tensor([before + after])
        logp = torch.log_softmax(theirs(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        total, count = total - logp[-len(after) :].sum(), count + len(after)
    (total / count).backward()
    return total.item() / count, math.sqrt(sum(p.grad.square().sum().item() for p in theirs.parameters()))


def test_first_step_values(run_training, tied_model, dataset, tmp_path):
    """Loss and gradient norm equal a float64 computation, packed and averaged over the step's trained tokens."""
    run_training(make_config(tmp_path, tied_model, dataset, {"shuffle": False, "batch_size": 4}, max_steps=1))
    row = metrics(tmp_path, "sft")[0]
    loss, norm = expected_first_step(tied_model, ROWS[: int(row["data/samples"])])
    assert row["loss/mean"] == pytest.approx(loss, rel=2e-4)
    assert row["optim/grad_norm"] == pytest.approx(norm, rel=2e-4)
    names = {"entropy/mean", "optim/lr", "perf/throughput", "perf/peak_memory", "time/step", "data/loss_tokens"}
    assert names | {"data/packing_efficiency", "data/dropped_too_long", "progress/total_tokens"} <= row.keys()


@pytest.mark.parametrize("serve", ["adapter", "merged"])
def test_a_run_from_an_adapter_resumes_without_it(serve, run_training, tied_model, dataset, tmp_path):
    """Version 0 is the adapter that training starts from, whether versions are adapters or sums; Muon trains adapters;
    what is resumed is the checkpoint, and the run's base model stays the model."""
    first, whole, parts = tmp_path / "first", tmp_path / "whole", tmp_path / "parts"
    lora, common = {"rank": 4}, {"optim": {"type": "muon", "lr": 1e-2}, "ckpt": {"interval": 1}}
    run_training(make_config(first, tied_model, dataset, max_steps=1, lora=lora, **common))
    adapter = first / "weights" / "step_1"
    lora |= {"adapter": adapter, "serve": serve}
    for directory, steps in ((whole, 3), (parts, 2)):
        run_training(make_config(directory, tied_model, dataset, max_steps=steps, lora=lora, **common))
    assert (hashes(parts)[0] == hashes(first)[1]) is (serve == "adapter")
    adapter.rename(tmp_path / "moved")
    common["ckpt"]["resume_step"] = 2
    run_training(make_config(parts, tied_model, dataset, max_steps=3, lora=lora, **common))
    assert hashes(parts) == hashes(whole)
    common["ckpt"]["resume_step"] = -1
    for other, message in (({"rank": 4}, "began with an adapter"), ({**lora, "alpha": 8.0}, "lora.alpha = 32")):
        with pytest.raises(UserError, match=message):
            run_training(make_config(parts, tied_model, dataset, max_steps=4, lora=other, **common))
