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
from prime_rl.transport.checkpoints import complete_steps
from prime_rl.transport.commit import list_steps
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


def test_first_step_values(run_training: Run, tied_model: Path, dataset: Path, tmp_path: Path) -> None:
    """Loss and gradient norm equal a float64 computation, packed and averaged over the step's trained tokens."""
    run_training(make_config(tmp_path, tied_model, dataset, {"shuffle": False, "batch_size": 4}, max_steps=1))
    row = metrics(tmp_path, "sft")[0]
    loss, norm = expected_first_step(tied_model, ROWS[: int(row["data/samples"])])
    assert row["loss/mean"] == pytest.approx(loss, rel=2e-4)
    assert row["optim/grad_norm"] == pytest.approx(norm, rel=2e-4)
    names = {"entropy/mean", "optim/lr", "perf/throughput", "perf/peak_memory", "time/step", "data/loss_tokens"}
    assert names | {"data/packing_efficiency", "data/dropped_too_long", "progress/total_tokens"} <= row.keys()


@pytest.mark.parametrize("save_async", [False, True], ids=["in the loop", "in the background"])
def test_resume_is_bit_exact(
    save_async: bool, run_training: Run, tied_model: Path, dataset: Path, tmp_path: Path
) -> None:
    """A run cut in two, over an epoch's end, gives an undivided one's weights and losses; checkpoints have weights."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    data = {"batch_size": 12}  # some 19 rows a step: the second epoch begins in step 2
    run_training(make_config(whole, tied_model, dataset, data, max_steps=4))
    ckpt = {"interval": 1, "save_async": save_async}
    run_training(make_config(parts, tied_model, dataset, data, max_steps=3, ckpt=ckpt))
    assert list_steps(parts / "weights") == [0, 1, 2, 3]
    assert metrics(parts, "sft")[-1]["progress/total_samples"] > len(ROWS)
    run_training(make_config(parts, tied_model, dataset, data, max_steps=4, ckpt={**ckpt, "resume_step": 2}))
    assert hashes(parts)[4] == hashes(whole)[4]
    assert complete_steps(parts / "checkpoints") == [1, 2, 3, 4]
    assert (parts / "checkpoints" / "given_up_1_step_3").is_dir()
    for a, b in zip(metrics(whole, "sft"), metrics(parts, "sft"), strict=True):
        assert (a["loss/mean"], a["progress/total_samples"]) == (b["loss/mean"], b["progress/total_samples"])


@pytest.mark.parametrize("serve", ["adapter", "merged"])
def test_a_run_from_an_adapter_resumes_without_it(
    serve: str, run_training: Run, tied_model: Path, dataset: Path, tmp_path: Path
) -> None:
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
