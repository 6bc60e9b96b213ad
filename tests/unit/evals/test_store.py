"""Results are kept line by line: nothing that is finished is lost or made twice, and nothing is mixed with what other settings made."""

import json
import math

import pytest

from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.errors import UserError
from prime_rl.evals.store import Store, alone, flat


def result(task="t", reward=1.0, outcome=Outcome.OK, **more):
    return EpisodeResult("e", "env", task, outcome, reward=reward, input_tokens=10, output_tokens=4, **more)


def test_what_was_added_is_there_again(tmp_path):
    store = Store(tmp_path / "s", {"seed": 0})
    store.add(
        0, result(rewards={"a": 1.0, "b": math.nan}, metrics={"m": 2.0}, prompt="p", completion="c", num_turns=2), 3
    )
    store.add(1, result(outcome=Outcome.TIMEOUT, message="late"), 3)
    store.close()
    again = Store(tmp_path / "s", {"seed": 0})
    assert again.scored("t", 0)
    assert not again.scored("t", 1)  # failed: it is made again
    assert not again.scored("u", 0)
    kept = again.results["t", 0]
    assert (kept.reward, kept.rewards, kept.metrics, kept.prompt, kept.completion, kept.num_turns) == (1.0, {"a": 1.0}, {"m": 2.0}, "p", "c", 2)  # fmt: skip
    again.add(1, result(reward=0.5), 3)
    again.close()
    last = Store(tmp_path / "s", {"seed": 0})
    assert last.results["t", 1].reward == 0.5  # the later line counts
    assert last.spent == (30, 12)  # and what failed has cost as well
    last.close()


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_half_a_line_of_a_killed_writer_is_dropped(tmp_path, cut):
    store = Store(tmp_path / "s", {})
    for attempt in range(2):
        store.add(attempt, result(), 0)
    store.close()
    path = tmp_path / "s" / "results.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    again = Store(tmp_path / "s", {})
    assert set(again.results) == {("t", 0)}
    again.add(1, result(reward=0.25), 0)
    again.close()
    assert [json.loads(line)["reward"] for line in path.read_text().splitlines()] == [1.0, 0.25]


def test_other_settings_do_not_go_on_with_it(tmp_path):
    settings = {"sampling": {"temperature": 1.0, "top_p": 1.0}, "environment": {"args": {}}}
    Store(tmp_path / "s", settings).close()
    other = {"sampling": {"temperature": 0.5, "top_p": 1.0}, "environment": {"args": {}}}
    with pytest.raises(UserError, match=r"made with sampling.temperature = 1.0, and now it is 0.5: .*--clean"):
        Store(tmp_path / "s", other)
    with pytest.raises(UserError, match=r"environment.args.split = nothing, and now it is \"eval\""):
        Store(tmp_path / "s", {**settings, "environment": {"args": {"split": "eval"}}})
    Store(tmp_path / "s", settings).close()


def test_clean_begins_anew(tmp_path):
    store = Store(tmp_path / "s", {"seed": 0})
    store.add(0, result(), 0)
    store.close()
    store = Store(tmp_path / "s", {"seed": 1}, clean=True)
    assert store.results == {}
    store.close()


def test_two_do_not_write_at_once(tmp_path):
    with alone(tmp_path / "evals"):
        with pytest.raises(UserError, match="another evaluation is writing"), alone(tmp_path / "evals"):
            pass
    with alone(tmp_path / "evals"):
        pass


def test_a_damaged_line_is_named(tmp_path):
    store = Store(tmp_path / "s", {})
    store.add(0, result(), 0)
    store.close()
    path = tmp_path / "s" / "results.jsonl"
    path.write_text("nonsense\n" + path.read_text())
    with pytest.raises(UserError, match=r"line 1 of .* is damaged"):
        Store(tmp_path / "s", {})


def test_flat_names_what_differs():
    assert flat({"a": {"b": {"c": 1}, "d": {}}, "e": [1]}) == {"a.b.c": 1, "e": [1]}
