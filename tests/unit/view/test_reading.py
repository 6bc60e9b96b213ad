"""Samples and conversations: what is shown, and what is said of steps that are gone."""

from pathlib import Path

import pytest

from prime_rl.errors import UserError
from prime_rl.view.reading import Decoder, StepSamples, messages
from prime_rl.view.run_files import RunFiles, answer
from support.viewing import MODEL, make_run


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


@pytest.mark.parametrize(
    ("step", "what"),
    [("0", "step 0 was removed: samples are kept of 2 steps, 2 to 3"), ("4", "step 4 is not committed yet")],
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
    assert answer(run, "ledger", {})["faults"] == []
    assert answer(run, "sample", {"step": "3", "id": "30.0.0"})["sample_id"] == "30.0.0.0"
    with pytest.raises(UserError, match="no sample of episode 0.0.0"):
        answer(run, "sample", {"step": "3", "id": "0.0.0"})
    assert (run.path / "ledger.sqlite").read_bytes() == before
    assert sorted(path.name for path in run.path.glob("ledger*")) == ["ledger.sqlite"]
