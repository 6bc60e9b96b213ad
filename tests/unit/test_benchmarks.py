"""The trainer's benchmark: it runs where there is no GPU, its figures add up, and the page shows what the files hold."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.config import RLConfig, parse
from prime_rl.config.shared import EnvConfig
from prime_rl.monitor.monitor import metrics_path

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


def test_a_case_on_a_cpu(tmp_path: Path) -> None:
    """A case in a process of its own: its row has everything that a table shows."""
    rows, log, case = tmp_path / "rows.json", tmp_path / "log", "tiny 2x32 steps=1 warm=2"
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


def test_a_simulated_fleet() -> None:
    """The real core on a virtual clock: the further it may run ahead, the fuller the fleet and the older what is trained. At level 0 nothing is old, and
    the seats stand empty while the slowest of a batch are awaited and while the trainer works."""
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


def test_a_whole_run_is_summed_up(tmp_path: Path) -> None:
    """Contract: steps that compile and those at the end are not counted; every time that is measured is shown; the peer's best is divided by."""
    (tmp_path / "metrics").mkdir()
    slow = {0: 30.0, 7: 4.0}
    for process, row in {
        "orchestrator": {"perf/throughput": 100.0, "progress/tokens": 50.0, "off_policy/mean": 1.0, "time/idle": 0.5},
        "trainer": {"loss/mean": 0.0, "mismatch_kl/mean": 1e-3, "time/wait_for_batch": 0.25},
    }.items():
        rows = [
            {"step": step, "time": 110.0 + step, "time/step": slow.get(step, 1.0), "reward/mean": step / 10, **row}
            for step in range(11)
        ]
        path = metrics_path(tmp_path, process)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = end_to_end.summarize(tmp_path, began=100.0, ended=130.0)
    assert (found["until_first_step"], found["whole_seconds"], found["steps"]) == (10.0, 30.0, 4)
    assert (found["median_step"], found["slowest_over_median"]) == (1.0, 4.0)
    assert found["sampled_tokens_per_second"] == pytest.approx(100.0)
    assert found["sampled_tokens_per_step"] == pytest.approx(175.0)
    assert found["reward"] == [pytest.approx(0.2), pytest.approx(0.8)]
    assert found["parts"]["trainer"]["step"] == [pytest.approx(1.75), 4.0]
    assert found["limit"].startswith("limited by training")
    machine = {"machine": {"date": "today", "cores": 2, "cpu": "x"}}
    peers = {name: {**found, **machine, "sampled_tokens_per_second": rate, "peer_of": "ours"} for name, rate in (("a", 125.0), ("b", 50.0))}  # fmt: skip
    table = end_to_end.show({"ours": {**found, **machine}, **peers})
    assert "| ours | 10 s | 1.00 s (4.0 ×) | 100 | **0.80** |" in table
    assert end_to_end.show(json.loads(end_to_end.RESULTS.read_text())) in end_to_end.README.read_text()


def test_the_page_shows_what_the_files_hold() -> None:
    """No figure of the trainer is written by hand."""
    assert tables.README.read_text() == tables.readme(), "run `python benchmarks/trainer.py --table`"
