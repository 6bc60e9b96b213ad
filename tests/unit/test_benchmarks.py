"""The trainer's benchmark runs where there is no GPU, its figures add up, and the page shows what the files hold."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.config import RLConfig, parse
from prime_rl.config.shared import EnvConfig

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


sys.path.insert(0, str(BENCHMARKS))  # as its scripts import each other
try:
    import end_to_end
    import simulate_fleet
    import steps
    import suites
    import tables
finally:
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("more", ["", " lora.rank=4"])
def test_a_case_on_a_cpu(tmp_path: Path, more: str) -> None:
    """A case in a process of its own: its row has everything that a table shows."""
    rows, log, case = tmp_path / "rows.json", tmp_path / "log", f"tiny 2x32 steps=1 warm=2{more}"
    command = [sys.executable, str(BENCHMARKS / "trainer.py"), "--device", "cpu", "--case", case]
    command += ["--json", str(rows), "--log", str(log), "--scratch", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    row = json.loads(rows.read_text())["cases"][case]
    assert row["tokens_per_step"] == 2 * 2 * 32
    assert row["tokens_per_second"] > 0
    assert set(row["parts_ms"]) == {"data", "forward_backward", "optimizer", "export_wait"}
    assert row["export_ms"]["write"] is not None, "a version was committed"
    assert row["first"]["loss"] != row["last"]["loss"]
    assert case in done.stdout.split("case", 1)[1]


def test_every_suite_is_a_valid_config() -> None:
    """No case fails on a GPU host because of its settings; a step has the micro-batches that the case names."""
    for case in (case for suite in suites.SUITES.values() for case in suite):
        config = steps.make_config(case, "cpu", Path("unused"))
        steps.model_source(case.model, case.layers)
        if case.loss == "rl" and ":" not in case.documents:
            fake = config.data.fake
            assert fake.batch_size * fake.seq_len == case.tokens * case.micro_batches * case.ranks


def test_adapters_are_held_against_all_weights() -> None:
    """Each row of adapters but that of the model without another one is a share of the MFU of the same documents."""
    rows = {case.name: {"mfu": 45.0 if case.lora else 50.0} for case in suites.LORA}
    shares = [tables._of_all_weights(case, suites.LORA, rows) for case in suites.LORA]
    assert shares == ["0.90 ×" if case.lora and case.model != "32B" else "" for case in suites.LORA]


def test_a_simulated_fleet() -> None:
    """The real core on a virtual clock: the further it may run ahead, the fuller the fleet and the older the samples.
    At level 0 nothing is old, and the seats are empty while the slowest of a batch or the trainer are awaited."""
    rows = [
        simulate_fleet.measure(simulate_fleet.Fleet(2, level=level, seconds=60.0, warm=120.0)) for level in (0, 4, 8)
    ]
    assert all(row["most_on_a_replica"] <= 100 + 16 + 1 for row in rows)  # as even as the slack of a group
    assert all(row["steps"] > 0 and row["episodes_in_flight"] <= 200 for row in rows)
    assert [row["utilisation"] for row in rows] == sorted(row["utilisation"] for row in rows)
    assert rows[0]["utilisation"] < 0.2
    assert rows[2]["utilisation"] > 0.85
    assert rows[0]["staleness_max"] == 0
    assert 0 < rows[1]["staleness_mean"] < rows[2]["staleness_mean"]
    assert set(rows[0]["cpu_seconds_per_second"]) >= {"what may start", "landings", "batches", "scoring", "updates"}


def test_cases_of_whole_runs_are_settings_of_rl(tmp_path: Path) -> None:
    """Contract: each case is a configuration that `rl` takes, and differs from its defaults in the work alone."""
    for case in end_to_end.CASES:
        options, more = end_to_end.settings(case, argparse.Namespace(device="cuda", steps=20), tmp_path)
        argv = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        config = parse(RLConfig, [*argv, *more], {})
        assert config.share_gpus == case.startswith("shared")
        assert config.orchestrator.environments[0].workers == EnvConfig(id="x").workers


def test_the_page_shows_what_the_files_hold() -> None:
    """No figure of the trainer is written by hand."""
    assert end_to_end.show(json.loads(end_to_end.RESULTS.read_text())) in end_to_end.README.read_text()
    assert tables.README.read_text() == tables.readme(), "run `python benchmarks/trainer.py --table`"
