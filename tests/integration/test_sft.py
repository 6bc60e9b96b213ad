"""`sft` as real processes: the command line, two ranks, signals, bad input."""

import json
from pathlib import Path

import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from prime_rl.monitor import read_metrics
from prime_rl.monitor.monitor import metrics_path
from prime_rl.transport.weights import verify_weights
from support import trainer as support
from support.processes import run_forked
from support.ranks import train_on_ranks

tied_model = support.tied_model


def write_config(output_dir: Path, model: Path, **settings: object) -> Path:
    """A config and its dataset: conversations of two turns, of which the second one varies in length."""
    output_dir.mkdir(parents=True, exist_ok=True)
    rows = output_dir / "rows.jsonl"
    turns = (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    with rows.open("w") as file:
        for number in range(50):
            messages = [{"role": role, "content": text * (number % 9 + 1)} for role, text in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    data = {"name": str(rows), "seq_len": 128, "batch_size": 3}
    base = {"output_dir": str(output_dir), "model": {"name": str(model)}, "device": "cpu", "data": data}
    path = output_dir / "given.toml"
    path.write_text(tomli_w.dumps({**base, "optim": {"lr": 1e-3}, **settings}))
    return path


def test_two_ranks_equal_one(tied_model: Path, tmp_path: Path) -> None:
    """The `sft` command, given the file that its --dry-run wrote, and two gloo ranks (an odd number of rows) give the same losses and
    weights, to float32 rounding, and transformers loads them."""
    given = write_config(tmp_path / "given", tied_model, max_steps=3)
    assert run_forked("sft", "@", given, "--output-dir", tmp_path / "1", "--dry-run").returncode == 0
    assert [path.name for path in (tmp_path / "1").iterdir()] == ["configs"], "a dry run touches nothing else"
    one, two = tmp_path / "1" / "configs" / "sft.toml", write_config(tmp_path / "2", tied_model, max_steps=3)
    train_on_ranks([(1, ["@", str(one)]), (2, ["@", str(two)])], tmp_path / "log", "sft")
    rows = [read_metrics(metrics_path(tmp_path / ranks, "sft")) for ranks in ("1", "2")]
    assert [len(each) for each in rows] == [3, 3]
    for a, b in zip(*rows, strict=True):
        for name in ("loss/mean", "entropy/mean", "optim/grad_norm", "data/loss_tokens", "progress/total_samples"):
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-6), name
    for ranks in ("1", "2"):
        verify_weights(tmp_path / ranks / "weights" / "step_3")
    first, second = (load_file(tmp_path / ranks / "weights" / "step_3" / "model.safetensors") for ranks in ("1", "2"))
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, atol=2e-5, rtol=1e-4, msg=name)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "2" / "weights" / "step_3")
    prompt = AutoTokenizer.from_pretrained(tmp_path / "2" / "weights" / "step_3")("hi", return_tensors="pt").input_ids
    assert model(prompt).logits.isfinite().all()
