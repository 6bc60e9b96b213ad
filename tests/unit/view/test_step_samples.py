"""Samples and conversations: what is shown, and what is said of steps that are gone."""

import sqlite3
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prime_rl.errors import UserError
from prime_rl.monitor.status import new_status, status_path, write_record
from prime_rl.processes import identify
from prime_rl.view.run_files import RunFiles, answer
from prime_rl.view.step_samples import Decoder, StepSamples, messages
from support.viewing import MODEL, make_run, metric_lines


@pytest.fixture
def run(tmp_path: Path) -> RunFiles:
    return RunFiles(make_run(tmp_path / "run"), "run")


def test_a_page_of_samples(run: RunFiles) -> None:
    """Contract: filters, order and pages; only rows of the page are read."""
    page = answer(run, "samples", {"step": "3", "env": "reverse-text", "low": "0.2", "high": "0.6", "sort": "-reward"})
    assert (page["total"], page["of"], page["envs"]) == (9, 21, ["reverse-text", "wordle"])
    assert [row["reward"] for row in page["rows"]] == sorted((n / 20 for n in range(4, 13)), reverse=True)
    assert page["rows"][0]["preview"].endswith("äöü <b>12<|im_end|>")
    assert [row["row"] for row in answer(run, "samples", {"step": "3", "offset": "20"})["rows"]] == [20]
    assert answer(run, "samples", {"step": "3", "cut": "1"})["total"] == 1
    assert [row["row"] for row in answer(run, "samples", {"step": "3", "text": "äöü <b>7"})["rows"]] == [7]
    assert answer(run, "samples", {"step": "3", "text": "ÄÖÜ <b>7"})["total"] == 0


def test_a_sample(run: RunFiles) -> None:
    """Contract: roles, texts that join to the whole, one value a token in each stream."""
    sample = answer(run, "sample", {"step": "2", "row": "6"})
    assert [(one["role"], one["sampled"]) for one in sample["messages"]] == [
        ("system", False), ("user", False), ("assistant", True),
    ]  # fmt: skip
    assert sample["messages"][1]["text"] == "word &lt;"
    assert sample["messages"][2]["text"] == '<tool_call>{"name": "look"}</tool_call>äöü <b>6'
    assert {
        len(stream) for stream in (sample["ids"], sample["mask"], sample["texts"], *sample["streams"].values())
    } == {len(sample["ids"])}
    assert "".join(sample["texts"]) == Decoder(MODEL / "tokenizer.json").text(sample["ids"])
    assert (sample["advantage"], sample["policy_versions"]) == (-0.2, [2, 3])


def test_what_the_trainer_computed(run: RunFiles) -> None:
    """Contract: its values stand at the sampled tokens of their sample, once its step is trained and as long as they
    can be read."""

    def streams(step: int, row: int) -> tuple[list[float], dict[str, list[float]]]:
        sample = answer(run, "sample", {"step": str(step), "row": str(row)})
        values = sample["streams"].get("log_ratios", [])
        return [value for value, one in zip(values, sample["mask"], strict=False) if one], sample["streams"]

    every = [value for row in range(21) for value in streams(2, row)[0]]
    assert every == pytest.approx(np.linspace(-0.25, 0.5, len(every)), abs=1e-3)
    assert np.count_nonzero(streams(2, 0)[1]["log_ratios"]) == len(streams(2, 0)[0])
    assert "log_ratios" not in streams(3, 0)[1]
    path = run.path / "token_stats" / "step_2" / "rank_0.arrow"
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):  # a wild offset would end this process
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        streams(2, 0)
    path.write_bytes(whole[:-50])
    assert "log_ratios" not in streams(2, 0)[1]


@pytest.mark.parametrize(
    ("step", "what"),
    [
        ("0", "step 0 was removed: samples are kept of 2 steps, 2 to 3"),
        ("4", "step 4 has no samples: the last committed step is 3"),
        ("-1", "step -1 has no samples"),
    ],
)
def test_steps_without_samples(run: RunFiles, step: str, what: str) -> None:
    """Contract: a removed step is told from one to come."""
    with pytest.raises(UserError, match=what):
        answer(run, "samples", {"step": step})


def test_a_torn_file_of_samples(run: RunFiles) -> None:
    """Contract: a damaged file is one line that names it."""
    file = run.path / "rollouts" / "step_3" / "samples.arrow"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"samples\.arrow has \d+ bytes"):
        answer(run, "samples", {"step": "3"})


def test_without_a_tokenizer(run: RunFiles) -> None:
    """Contract: ids are shown, and the mask splits prompt from reply."""
    sample = StepSamples(run.path, 3).sample(0, None)
    assert [(one["role"], one["sampled"]) for one in sample["messages"]] == [("prompt", False), ("assistant", True)]
    assert (sample["tokenizer"], sample["texts"][0]) == (None, "257 ")
    with pytest.raises(UserError, match="replies cannot be searched"):
        StepSamples(run.path, 3).rows({"text": "äöü"}, None)


def test_templates_of_other_families() -> None:
    """Contract: names of roles are special tokens themselves, or stand between two."""
    header = {1: "<|start_header_id|>", 2: "<|end_header_id|>", 3: "<|eot_id|>"}
    texts = ["<|start_header_id|>", "user", "<|end_header_id|>", "\n\nHi", "<|eot_id|>"]
    assert messages(texts, [1, 9, 2, 8, 3], [False] * 5, header)[0] | {"text": "Hi"} == {
        "role": "user", "text": "Hi", "start": 3, "end": 4, "sampled": False,
    }  # fmt: skip
    harmony = {1: "<|start|>", 2: "<|channel|>", 3: "<|message|>", 4: "<|end|>"}
    texts = ["<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "Yes", "<|end|>"]
    assert messages(texts, [1, 7, 2, 8, 3, 9, 4], [False] * 7, harmony)[0]["role"] == "assistant final"
    own = messages(
        ["<|user|>", "Hi", "<|assistant|>", "Yes"],
        [1, 9, 2, 8],
        [False, False, False, True],
        {1: "<|user|>", 2: "<|assistant|>"},
    )
    assert [(one["role"], one["text"]) for one in own] == [("user", "Hi"), ("assistant", "Yes")]


def test_episodes_of_the_ledger(run: RunFiles) -> None:
    """Contract: every episode with its outcome; a trained one leads to its sample; the file is left as it is."""
    before = (run.path / "ledger.sqlite").read_bytes()
    rows = answer(run, "episodes", {})
    assert [(row["id"], row["state"], row["reason"]) for row in rows["rows"]] == [
        ("1.0.0", "dropped", "stale"), ("0.0.0", "batched", None), ("0.1.0", "batched", None),
    ]  # fmt: skip
    assert rows["outcomes"] == ["batched", "stale"]
    assert [row["id"] for row in answer(run, "episodes", {"low": "0.4", "outcome": "batched"})["rows"]] == ["0.1.0"]
    assert "issued = trained" in answer(run, "ledger", {})
    assert answer(run, "sample", {"step": "3", "id": "30.0.0"})["sample_id"] == "30.0.0.0"
    with pytest.raises(UserError, match="no sample of episode 0.0.0"):
        answer(run, "sample", {"step": "3", "id": "0.0.0"})
    assert (run.path / "ledger.sqlite").read_bytes() == before
    assert sorted(path.name for path in run.path.glob("ledger*")) == ["ledger.sqlite"]


def test_the_ledger_of_a_crashed_run(run: RunFiles, tmp_path: Path) -> None:
    """Contract: what a crash left half written is not shown, and left to the run to roll back."""
    files = [run.path / "ledger.sqlite", run.path / "ledger.sqlite-journal"]
    rows = answer(run, "episodes", {})
    with closing(sqlite3.connect(files[0], isolation_level=None)) as db:
        db.executescript("PRAGMA cache_size = 1; BEGIN; UPDATE episodes SET reward = 7")
        db.executemany("INSERT INTO results VALUES (?, zeroblob(5000))", [(str(one),) for one in range(99)])
        torn = [path.read_bytes() for path in files]
    for path, data in zip(files, torn, strict=True):
        path.write_bytes(data)
    assert answer(run, "episodes", {}) == rows
    assert "issued = trained" in answer(run, "ledger", {})
    assert [path.read_bytes() for path in files] == torn


def test_a_run_that_is_killed(run: RunFiles) -> None:
    """Contract: it is told from a live one, though its files change no more."""
    with subprocess.Popen(["sleep", "600"]) as process:
        own = identify(process.pid)
        assert own is not None
        status = replace(new_status("trainer"), pid=own.pid, started=own.started)
        (run.path / "status").mkdir()
        write_record(status_path(run.path, "trainer"), status)
        assert answer(run, "summary", {})["state"] == "runs"
        process.kill()
    assert answer(run, "summary", {})["state"] == "failed"


def test_fine_tuning_that_begins(tmp_path: Path) -> None:
    """Contract: a page that was opened before the first step shows the curves of `sft`."""
    (tmp_path / "metrics").mkdir()
    run = RunFiles(tmp_path, "run")
    assert answer(run, "summary", {})["keys"] == []
    (tmp_path / "metrics" / "sft.jsonl").write_text(metric_lines(range(2), **{"loss/mean": 1.0}))
    assert "trainer:loss/mean" in answer(run, "summary", {})["keys"]
    assert answer(run, "series", {"keys": "trainer:loss/mean"})["trainer:loss/mean"]["step"] == [0, 1]
