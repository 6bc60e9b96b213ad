"""The whole loop in one process: values, determinism, resumption, waits, and refusals."""

import json
import math
import shutil
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from prime_rl import faults
from prime_rl.config import TrainerConfig
from prime_rl.config.shared import TRAINER_STEPS, WARM_UP
from prime_rl.errors import UserError
from prime_rl.trainer import attention, step_tokens, training_loop
from prime_rl.trainer.training_loop import common_config
from prime_rl.transport.commit import list_steps, step_dir
from prime_rl.transport.rollouts import Sample, write_batch
from prime_rl.transport.token_stats import read_token_stats
from prime_rl.wait import WaitTimeout, wait
from support import trainer as support
from support.trainer import hashes, metrics

tied_model, run_training = support.tied_model, support.run_training
Run = Callable[[TrainerConfig], None]


def expected_first_step(model: Path, samples: list[Sample]) -> dict[str, float]:
    """Loss, entropy, mismatch KL and gradient norm of the default loss, in float64, with full logits and autograd."""
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    loss, entropy, kl, count = torch.zeros((), dtype=torch.float64), 0.0, 0.0, 0
    for sample in samples:
        ids = torch.tensor(sample.input_ids)
        logp_all = torch.log_softmax(theirs(ids[None]).logits[0, :-1] / sample.temperature, -1)
        logp = logp_all.gather(1, ids[1:, None]).squeeze(1)
        for t in range(1, len(ids)):
            if not sample.loss_mask[t]:
                continue
            pi, mu, advantage = logp[t - 1], sample.logprobs[t], sample.advantages[t]
            change = pi.exp().item() - math.exp(mu)
            dropped = change > 0.2 if advantage > 0 else change < -0.2
            ratio = (pi - mu).exp()
            loss = loss + (0.0 if dropped else -advantage * ratio) + 1e-3 * (pi - mu) ** 2
            entropy -= (logp_all[t - 1].exp() * logp_all[t - 1]).sum().item()
            kl += ratio.item() - (pi.item() - mu) - 1
            count += 1
    (loss / count).backward()
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in theirs.parameters()))
    mean = loss.item() / count
    return {"loss/mean": mean, "entropy/mean": entropy / count, "mismatch_kl/mean": kl / count, "optim/grad_norm": norm}


def test_first_step_values(run_training, tied_model, tmp_path, heard):
    """Metrics of a step, in one line, equal an independent float64 computation, normalized by all tokens."""
    samples = support.write_rollouts(tmp_path, 3)[0]
    run_training(support.make_config(tmp_path, tied_model, max_steps=3))
    row = metrics(tmp_path)[0]
    for name, value in expected_first_step(tied_model, samples).items():
        assert row[name] == pytest.approx(value, rel=2e-4), name
    assert row["entropy/all/mean"] == row["entropy/mean"]
    assert row["optim/lr"] == 1e-3
    names = {"is_masked/mean", "perf/throughput", "perf/peak_memory", "time/step", "time/wait_for_batch"}
    assert names | {"time/forward_backward", "time/export"} <= row.keys()
    assert row["progress/total_tokens"] == sum(len(sample.input_ids) for sample in samples)
    assert heard.text.count("step 0/3 | loss") == 1


@pytest.mark.parametrize("loss", [{}, {"type": "gspo", "clip_low": 0.1, "clip_high": 0.1}], ids=["tokens", "sequences"])
def test_tokens_of_a_step(loss, run_training, tied_model, tmp_path):
    """Contract: log ratio and entropy of every sampled token of each step are kept, and shown by trackers."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    batches = support.write_rollouts(tmp_path, 2)
    odd = replace(batches[1][0], ce_weight=[1.0] * len(batches[1][0].input_ids))  # trains its prompt, too
    shutil.rmtree(tmp_path / "rollouts" / "step_1")
    write_batch(tmp_path / "rollouts", 1, [odd, *batches[1][1:]])
    monitor = {"tensorboard": {"log_extras": {"interval": 1}}}
    run_training(support.make_config(tmp_path, tied_model, max_steps=2, loss=loss, monitor=monitor))
    for step, weights in enumerate([tied_model, tmp_path / "weights" / "step_1"]):
        support.assert_token_stats(tmp_path, step, weights, batches[step])
    events = EventAccumulator(str(tmp_path / "tensorboard" / "trainer"))
    events.Reload()
    shown = {name: make_ndarray(events.Tensors(name)[0].tensor_proto) for name in events.Tags()["tensors"]}
    stats = read_token_stats(tmp_path, 0, pa.array([sample.sample_id for sample in batches[0]]))
    for name, column in (("log_ratio", "log_ratios"), ("entropy", "entropies")):
        values, histogram = stats[column].combine_chunks().flatten().to_numpy(), shown[f"distributions/{name}"]
        assert histogram[:, 2].sum() == len(values)
        assert histogram[[0, -1], [0, 1]] == pytest.approx([values.min(), values.max()], rel=1e-3)
    header, *rows = shown["samples"].astype(str).tolist()
    table = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    for sample, row in zip(batches[0], stats.to_pylist(), strict=True):
        ratio = np.array(row["log_ratios"], dtype=np.float64)
        means = {"log_ratio": ratio, "mismatch_kl": np.exp(ratio) - ratio - 1, "entropy": row["entropies"],
                 "logprob": ratio + np.array(sample.logprobs)[sample.loss_mask]}  # fmt: skip
        assert {name: float(table[sample.sample_id][name]) for name in means} == pytest.approx(
            {name: np.mean(values) for name, values in means.items()}, rel=1e-2, abs=1e-3
        )


def test_statistics_do_not_queue_behind_a_hanging_disk(run_training, tied_model, tmp_path, monkeypatch, heard):
    """Contract: those of a step are left out while an earlier step's are being written; one warning says so."""

    def write_late(run: Path, step: int, *_: object) -> None:
        last = step_dir(run / "weights", 3)
        wait(last.is_dir, subject="the last version", owner="the trainer", seconds=60)
        step_dir(run / "token_stats", step).mkdir(parents=True)

    monkeypatch.setattr(step_tokens, "write_token_stats", write_late)
    support.write_rollouts(tmp_path, 3)
    run_training(support.make_config(tmp_path, tied_model, max_steps=3))
    assert list_steps(tmp_path / "token_stats") == [0]
    assert heard.text.count("left out") == 1


@pytest.mark.parametrize("resume_step", [2, -1])
def test_resume_is_bit_exact(resume_step, run_training, tied_model, tmp_path):
    """Two steps, then two resumed ones, give the bytes of four at once: optimizer, schedule and progress return."""
    extra: dict[str, Any] = {"scheduler": {"type": "constant", "warmup_steps": 2}, "weights": {"keep": None}}
    for name in ("whole", "parts"):
        support.write_rollouts(tmp_path / name, 4)
    run_training(support.make_config(tmp_path / "whole", tied_model, max_steps=4, **extra))
    parts = tmp_path / "parts"
    run_training(support.make_config(parts, tied_model, max_steps=2, ckpt={"interval": None}, **extra))
    assert list_steps(parts / "weights") == [0, 1, 2]
    stage = parts / "token_stats" / "step_1" / ".rank_0.arrow.tmp-1"  # of a writer that was killed
    stage.touch()
    run_training(support.make_config(parts, tied_model, max_steps=4, ckpt={"resume_step": resume_step}, **extra))
    assert not stage.exists()
    assert hashes(parts) == hashes(tmp_path / "whole")
    assert [row["progress/total_samples"] for row in metrics(parts)] == [6, 12, 18, 24]
    assert json.loads((parts / "incarnations" / "1.json").read_text())["step"] == 2


def write_one(output_dir: Path, step: int = 0, **changes: Any) -> None:
    sample = support.make_sample(np.random.default_rng(0), "s", 3)
    write_batch(output_dir / "rollouts", step, [replace(sample, **changes)])


LONG = {"input_ids": [1] * 200, "loss_mask": [True] * 200, "logprobs": [-1.0] * 200, "advantages": [1.0] * 200}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (LONG, "200 tokens, more than the trainer's seq_len 128"),
        ({"input_ids": [1, 2, 288]}, "token 288, the trainer's model has 288 tokens"),
        ({"input_ids": [1, 2, -1]}, "token -1"),
        ({"temperature": 0.0}, "temperature 0"),
        ({"ref_kl_weight": [0.0, 1.0, 1.0]}, "no ref_logprobs"),
    ],
    ids=["too long", "beyond the vocabulary", "negative", "greedy", "no reference"],
)
def test_samples_that_do_not_fit(changes, message, run_training, tied_model, tmp_path):
    """Samples that this trainer cannot have produced are refused, with no version; earlier steps are kept."""
    support.write_rollouts(tmp_path, 1)
    write_one(tmp_path, 1, **changes)
    with pytest.raises(UserError, match=message):
        run_training(support.make_config(tmp_path, tied_model, max_steps=2))
    assert [row["step"] for row in metrics(tmp_path)] == [0]
    assert list_steps(tmp_path / "weights") == [0, 1]


@pytest.mark.parametrize("steps", [1, 3])
def test_diverged_step_is_not_committed(steps, run_training, tied_model, tmp_path):
    """A gradient that is not finite stops the run before anything of its step is saved or served, even if seen late."""
    support.write_rollouts(tmp_path, 3)
    broken = tmp_path / "rollouts" / f"step_{steps - 1}"
    shutil.rmtree(broken)
    write_one(tmp_path, steps - 1, logprobs=[0.0, -500.0, -1.0], advantages=[0.0, -1.0, -1.0])
    with pytest.raises(UserError, match=f"step {steps - 1}: the gradient norm is (nan|inf)"):
        run_training(support.make_config(tmp_path, tied_model, max_steps=3, async_level=5, ckpt={"interval": steps}))
    assert list_steps(tmp_path / "weights") == list(range(steps))
    assert not list(tmp_path.glob("checkpoints/step_*/trainer"))
    assert [row["step"] for row in metrics(tmp_path)] == list(range(steps - 1))


def test_rows_come_before_what_is_saved(run_training, tied_model, tmp_path, monkeypatch):
    """When a checkpoint is written, and while a batch is awaited, all rows and versions until then are there. A batch
    that never comes ends in a line that says what was owed by whom."""
    support.write_rollouts(tmp_path, 3)
    seen = {}

    def look(name: str, file: Path | None = None) -> None:
        if name.startswith("write:") and name.endswith("trainer"):
            seen[name] = (
                [row["step"] for row in metrics(tmp_path) if "loss/mean" in row],
                list_steps(tmp_path / "weights"),
            )

    monkeypatch.setattr(faults, "point", look)
    with pytest.raises(WaitTimeout, match="no rollouts/step_3 from orchestrator after 0 s"):
        run_training(
            support.make_config(tmp_path, tied_model, ckpt={"interval": 2}, rollout_timeout=0.2, async_level=5)
        )
    ((place, (rows, versions)),) = seen.items()
    assert place == "write:checkpoints/step_2/trainer"
    assert rows[:2] == [0, 1]  # the loop goes on meanwhile
    assert versions[:3] == [0, 1, 2]
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1, 2]
    assert list_steps(tmp_path / "weights") == [0, 1, 2, 3]


def test_bench(run_training, tied_model, tmp_path, heard):
    """--bench runs a few steps on fake data, prints the table and saves nothing. The table leaves the warm-up out."""
    settings: dict[str, Any] = {"bench": True, "data": {"fake": {"batch_size": 4}}, "recovery_interval": 1}
    run_training(support.make_config(tmp_path, tied_model, **settings))
    measured = [1e3 * row["time/step"] for row in metrics(tmp_path)[WARM_UP:]]
    assert len(measured) == TRAINER_STEPS - WARM_UP
    (line,) = [line for line in heard.text.splitlines() if line.startswith("step (ms)")]
    assert [float(cell.replace(",", "")) for cell in line.split()[2:]] == pytest.approx(
        [statistics.median(measured), min(measured), max(measured)], abs=0.06
    )
    assert not any((tmp_path / name).exists() for name in ("weights", "recovery"))


def test_nodes_with_other_settings_are_refused(tied_model, tmp_path, world, monkeypatch):
    """Contract: all ranks train with one configuration; whether to recover is up to rank 0."""
    mine = support.make_config(tmp_path, tied_model)
    for change, message in (
        ({"recover": True}, ""),
        ({"seed": 9}, "^seed is 9 for rank 1, and 0 for rank 0: give all"),
    ):
        monkeypatch.setattr(training_loop, "gather", lambda _, own, change=change: [own, own | change])
        with nullcontext() if not message else pytest.raises(UserError, match=message):
            assert common_config(mine, world) == mine


def test_a_wrong_policy_is_refused(run_training, tied_model, tmp_path, monkeypatch):
    """Contract: a policy that differs from the model's own forward is refused before anything is committed."""
    boundaries = attention.boundaries
    monkeypatch.setattr(attention, "boundaries", lambda ends, longest: boundaries(ends[[0, -1]], int(ends[-1])))
    with pytest.raises(
        UserError, match="tied.* cannot be trained: .* differ from those of Qwen3ForCausalLM's own forward"
    ):
        run_training(support.make_config(tmp_path, tied_model, max_steps=1))
    assert not list_steps(tmp_path / "weights")
