"""The trainer's benchmark: it runs where there is no GPU, its figures add up, and the page shows what the files hold."""

import argparse
import importlib.metadata
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from transformers import Qwen3Config

from prime_rl.config import RLConfig, parse
from prime_rl.config.shared import EnvConfig
from prime_rl.monitor.monitor import metrics_path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def modules() -> Iterator[dict[str, ModuleType]]:
    """The benchmark's modules, imported as its scripts import each other."""
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import end_to_end
        import package
        import rollout
        import rollout_parts
        import simulate_fleet
        import steps
        import suites
        import tables
        import trainer
        import weight_sync

        yield {
            "steps": steps, "suites": suites, "tables": tables, "trainer": trainer,
            "fleet": simulate_fleet, "rollout": rollout, "rollout_parts": rollout_parts, "package": package, "sync": weight_sync,
            "end_to_end": end_to_end,
        }  # fmt: skip
    finally:
        sys.path[:] = before


def test_a_case_on_a_cpu(tmp_path: Path) -> None:
    """Two cases in processes of their own, one of which fails: the other's row is written all the same, with everything that a table shows."""
    found, log = tmp_path / "rows.json", tmp_path / "log"
    good, bad = "tiny 2x32 steps=1 warm=2", "tiny 2x32 attention=varlen"
    command = [sys.executable, str(BENCHMARKS / "trainer.py"), "--device", "cpu", "--case", bad, "--case", good]
    command += ["--json", str(found), "--log", str(log), "--scratch", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(found.read_text())["cases"]
    assert "needs a GPU" in rows[bad]["failed"]
    row = rows[good]
    assert row["tokens_per_step"] == 2 * 2 * 32
    assert row["tokens_per_second"] > 0
    assert set(row["parts_ms"]) == {"data", "forward_backward", "optimizer", "export_wait"}
    assert row["export_ms"]["write"] is not None, "a version was committed"
    assert row["first"]["loss"] != row["last"]["loss"]
    assert good in done.stdout.split("case", 1)[1]


def test_cases_are_read(modules: dict[str, ModuleType]) -> None:
    case = modules["steps"].parse_case("4B 16x4096 memory_limit=80 steps=2 loss=sft export=false optim.lr=1e-3")
    assert (case.model, case.documents, case.tokens, case.steps, case.export) == ("4B", "16x4096", 65536, 2, False)
    assert case.settings == {"memory_limit": "80"}
    config = modules["steps"].make_config(case, "cpu", Path("unused"))
    assert (config.model.memory_limit, config.optim.lr) == (80, 1e-3)


def test_every_suite_is_a_valid_config(modules: dict[str, ModuleType]) -> None:
    """No case fails on a GPU host because of its settings; a step has the micro-batches that the case names."""
    for case in (case for suite in modules["suites"].SUITES.values() for case in suite):
        config = modules["steps"].make_config(case, "cpu", Path("unused"))
        modules["steps"].model_source(case.model, case.layers)
        if case.loss == "rl" and ":" not in case.documents:
            fake = config.data.fake
            assert fake.batch_size * fake.seq_len == case.tokens * case.micro_batches * case.ranks


def test_the_peers_count_of_flops(modules: dict[str, ModuleType]) -> None:
    """6 per matmul parameter and token; attention over all pairs of a micro-batch."""
    config = Qwen3Config(num_hidden_layers=3, hidden_size=16)
    assert modules["steps"].peer_flops(1000, config, 30, 30) == 30 * (6 * 1000 + 12 * 3 * 16 * 30)


def test_a_simulated_fleet(modules: dict[str, ModuleType]) -> None:
    """The real core on a virtual clock: the further it may run ahead, the fuller the fleet and the older what is trained. At level 0 nothing is old, and
    the seats stand empty while the slowest of a batch are awaited and while the trainer works."""
    fleet = modules["fleet"]
    rows = [fleet.measure(fleet.Fleet(2, level=level, seconds=60.0, warm=120.0)) for level in (0, 4, 8)]
    assert all(row["most_on_a_replica"] <= 100 + 16 + 1 for row in rows)  # as even as the slack of a group
    assert all(row["steps"] > 0 and row["episodes_in_flight"] <= 200 for row in rows)
    assert [row["utilisation"] for row in rows] == sorted(row["utilisation"] for row in rows)
    assert rows[0]["utilisation"] < 0.2
    assert rows[2]["utilisation"] > 0.85
    assert rows[0]["staleness_max"] == 0
    assert 0 < rows[1]["staleness_mean"] < rows[2]["staleness_mean"]
    assert set(rows[0]["cpu_seconds_per_second"]) >= {"what may start", "landings", "batches", "scoring", "updates"}


def test_cases_of_whole_runs_are_settings_of_rl(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    """Contract: each case is a configuration that `rl` takes, and differs from its defaults in the work alone."""
    end_to_end = modules["end_to_end"]
    for case in end_to_end.CASES:
        options, more = end_to_end.settings(case, argparse.Namespace(device="cuda", steps=20), tmp_path)
        argv = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        config = parse(RLConfig, [*argv, *more], {})
        assert config.share_gpus == case.startswith("shared")
        assert config.orchestrator.environments[0].workers == EnvConfig(id="x").workers


def test_a_whole_run_is_summed_up(modules: dict[str, ModuleType], tmp_path: Path) -> None:
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
    end_to_end = modules["end_to_end"]
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


def test_gaps_between_tokens(modules: dict[str, ModuleType]) -> None:
    """The longest time without a token that touches an interval, of all requests and of the one that waited longest; tokens a second and request."""
    times = np.array([0.0, 1.0, 1.5, 2.0, 6.0, 6.5, 7.0])
    arrivals = modules["sync"].Arrivals(times, np.array([0, 1, 0, 1, 1, 1, 0]), np.array([1, 1, 2, 1, 1, 1, 1]))
    assert arrivals.gap(3.0, 4.0) == (4.0, 6.0)
    assert arrivals.gap(0.5, 2.5) == (4.0, 6.0)
    assert arrivals.gap(6.2, 6.9) == (0.5, 6.5)
    assert arrivals.gap_of_a_stream(3.0, 4.0) == 5.5
    assert arrivals.rate(1.0, 3.0) == 1.0  # two requests
    assert math.isnan(arrivals.gap(7.5, 8.0)[0])


def test_cases_of_weight_sync(modules: dict[str, ModuleType]) -> None:
    """A case says what it is; where the package is not installed vLLM finds our routes by metadata like those of an installation."""
    case = modules["sync"].parse_case("0.6B layers=4 on=tmpfs stage=false syncs=2")
    assert (case.model, case.layers, case.on, case.stage, case.syncs, case.in_flight) == (
        "0.6B",
        4,
        "tmpfs",
        False,
        2,
        64,
    )
    assert case.name == "0.6B layers=4 on=tmpfs stage=false"
    for wrong in ("0.6B on=paper", "0.6B by=nccl", "0.6B color=red"):
        with pytest.raises(ValueError):
            modules["sync"].parse_case(wrong)


def test_what_failed_takes_no_measured_place(modules: dict[str, ModuleType]) -> None:
    """A run that was cut off, or on a machine with fewer GPUs, leaves what an earlier one has measured."""
    older = {"a": {"rate": 1.0}, "b": {"rate": 2.0}, "c": {"absent": "not here"}}
    newer = {"a": {"rate": 3.0}, "b": {"failed": "time limit"}, "c": {"rate": 4.0}, "d": {"absent": "needs 2 GPUs"}}
    kept = modules["trainer"].replace_rows(older, newer)
    assert kept == {"a": {"rate": 3.0}, "b": {"rate": 2.0}, "c": {"rate": 4.0}, "d": {"absent": "needs 2 GPUs"}}


def test_the_page_shows_what_the_files_hold(modules: dict[str, ModuleType]) -> None:
    """No figure of the trainer is written by hand."""
    tables = modules["tables"]
    assert tables.README.read_text() == tables.readme(), "run `python benchmarks/trainer.py --table`"


def test_a_rate_is_of_the_middle(modules: dict[str, ModuleType]) -> None:
    """Contract: what is sampled while a run begins and ends counts neither way; between two looks at the counter time is linear."""
    watch = modules["rollout_parts"].Watch("", {})
    for second, tokens in enumerate([100, 110, 130, 230, 330, 430, 480, 500]):  # 400 in all, slow at both ends
        watch.seconds.append(float(second))
        watch.tokens.append(float(tokens))
        watch.running.append(8.0)
        watch.waiting.append(0.0)
        watch.preempted.append(0.0)
        watch.cpu.append({"worker": 0.5 * second})
    rates = watch.rates(400)  # from 200 to 400
    assert (rates["tokens_per_second"], rates["seconds"], rates["cores worker"]) == pytest.approx((100.0, 2.0, 0.5))


def test_what_was_measured_before_the_limit_is_kept(
    modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: bare vLLM has the time of its start on top of its limit; its rate with log-probabilities alone suffices for the ratio."""
    rollout, rates = modules["rollout"], {"with logprobs": {"tokens_per_second": 2.0}}

    @contextmanager
    def running(name: str, command: list[object], env: object, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
        log.touch()
        Path(str(command[-1])).write_text(json.dumps(rates))
        process = subprocess.Popen(["sleep", "60"])
        yield process
        process.kill()
        process.wait(30)

    monkeypatch.setattr(rollout, "running", running)
    monkeypatch.setattr(rollout, "START_SECONDS", 0.1)
    load, given = rollout.Load(tmp_path, 8, 8, 4, 2), argparse.Namespace(device="cpu", limit=0.1)
    (tmp_path / "bare").mkdir()
    measured = rollout.bare(load, [], given, tmp_path)
    assert measured == rates | {"incomplete": "not measured within 0 s for its start and 0 s"}
    rates.clear()
    assert rollout.bare(load, [], given, tmp_path).keys() == {"failed"}


def test_counters_are_summed_over_their_labels(modules: dict[str, ModuleType]) -> None:
    text = '# HELP vllm:n x\nvllm:n{engine="0"} 2.0\nvllm:n{engine="1"} 3.5\nvllm:n_created{engine="0"} 9\n'
    assert modules["rollout_parts"].gauge(text, "vllm:n") == 5.5


def test_plugin_metadata_stands_in_for_an_installation(
    modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: where prime-rl is not installed, what is put on PYTHONPATH names the routes as pyproject.toml does."""
    package = modules["package"]
    assert package.plugin_path(tmp_path) == [], "it is installed here"
    monkeypatch.setattr(package, "entry_points", lambda group: [])
    (path,) = package.plugin_path(tmp_path)
    (made,) = importlib.metadata.distributions(path=[path])
    (declared,) = importlib.metadata.entry_points(group=package.PLUGIN_GROUP, name=package.PLUGIN)
    assert [(entry.name, entry.value) for entry in made.entry_points] == [(declared.name, declared.value)]
