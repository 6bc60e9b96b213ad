"""`sft` as real processes: the command line, two ranks, signals, bad input."""

import json
from pathlib import Path

import tomli_w
from transformers import AutoModelForCausalLM, AutoTokenizer

from prime_rl.transport.weights import verify_weights
from support import trainer as support
from support.forking import on_ranks
from support.processes import run_forked
from support.trainer import assert_close_metrics, assert_close_weights

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
    """`sft`, with the file that its --dry-run wrote, and two gloo ranks (an odd number of rows) give equal losses and
    weights, to float32 rounding, and transformers loads them."""
    given = write_config(tmp_path / "given", tied_model, max_steps=3)
    assert run_forked("sft", "@", given, "--output-dir", tmp_path / "1", "--dry-run").returncode == 0
    assert [path.name for path in (tmp_path / "1").iterdir()] == ["configs"], "a dry run touches nothing else"
    one, two = tmp_path / "1" / "configs" / "sft.toml", write_config(tmp_path / "2", tied_model, max_steps=3)
    runs = [{"ranks": n, "arguments": ["@", str(file)], "entrypoint": "sft"} for n, file in ((1, one), (2, two))]
    on_ranks("support.forking:train", runs, tmp_path / "log")
    assert_close_metrics(tmp_path / "2", tmp_path / "1", 3, ("data/loss_tokens", "progress/total_samples"), "sft")
    of_one, of_two = (tmp_path / ranks / "weights" / "step_3" for ranks in ("1", "2"))
    for version in (of_one, of_two):
        verify_weights(version)
    assert_close_weights(of_two, of_one)
    model = AutoModelForCausalLM.from_pretrained(of_two)
    prompt = AutoTokenizer.from_pretrained(of_two)("hi", return_tensors="pt").input_ids
    assert model(prompt).logits.isfinite().all()
