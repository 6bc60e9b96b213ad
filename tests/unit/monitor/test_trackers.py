"""Trackers, each with its real library, without a network."""

import json
import re
import socket
import urllib.request
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from prime_rl.config.shared import MlflowConfig, MonitorConfig, PrometheusConfig, TensorboardConfig, TrackioConfig
from prime_rl.errors import UserError
from prime_rl.monitor import Extras, Monitor
from prime_rl.monitor.trackers import check_trackers
from prime_rl.wait import wait

EXTRAS = Extras([("words", "Reverse: abc", "cba", 1.0, 0.5)] * 2, {"reward": np.float32([0, 1, 1])})
ROWS = {0: {"reward/mean": 0.25, "eval/words/avg@4": 0.5, "eval/words/avg@4/ci95": 0.1}, 1: {"reward/mean": 0.75}}
BOTH = {"log_extras": {"interval": 2}}
RUN_CONFIG = {"model": {"name": "tiny"}, "api_key": "sk-secret"}


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return int(server.getsockname()[1])


def log_two_steps(root: Path, process: str = "orchestrator", **trackers: object) -> None:
    """Log two steps, the first of which has extras, with trackers that all work."""
    monitor = Monitor(root / "run-7", process, MonitorConfig.model_validate(trackers), RUN_CONFIG)
    for step, row in ROWS.items():
        monitor.log(step, row, lambda: EXTRAS)
    monitor.close()
    assert [*monitor._trackers.active] == [*trackers], "none failed"


def wandb_rows(root: Path) -> list[dict[str, str]]:
    """Read W&B's file: records in blocks of 32 KiB, each of a checksum, a length, and whether it is whole (1), or the
    first (2), a middle (3) or the last part (4)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, part, rows = next(root.rglob("*.wandb")).read_bytes(), 7, b"", []
    while place + 7 < len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (2, 3):
            continue
        record, part = Record.FromString(part), b""
        if record.history.item:
            rows.append({item.key or ".".join(item.nested_key): item.value_json for item in record.history.item})
        elif record.run.run_id:
            rows.append({"group": record.run.run_group, "tags": ",".join(record.run.tags)})
    return rows


def test_wandb(tmp_path: Path) -> None:
    """Contract: processes of one run share a group; the chosen steps have a table of rollouts and histograms."""
    settings = {"name": "words-orchestrator", "tags": ["small"], "offline": True, **BOTH}
    log_two_steps(tmp_path, wandb=settings)

    def rows() -> list[dict[str, str]] | None:
        with suppress(DecodeError):  # half a record
            written = [row for row in wandb_rows(tmp_path) if "group" in row or "step" in row]
            return written if len(written) > 2 else None
        return None

    # W&B's own process may write for a moment longer.
    run, first, second = wait(rows, subject="rows in W&B's file", owner="W&B", seconds=60)[:3]
    assert run == {"group": "words", "tags": "small"}
    assert (first["reward/mean"], first["step"], second["reward/mean"]) == ("0.25", "0", "0.75")
    assert first["samples.nrows"] == "2"
    assert sum(json.loads(first["distributions/reward.values"])) == 3
    assert "samples.nrows" not in second
    (table,) = tmp_path.rglob("*.table.json")
    assert json.loads(table.read_text())["data"][0] == ["words", "Reverse: abc", "cba", 1.0, 0.5]


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    log_two_steps(tmp_path, tensorboard=BOTH)
    events = EventAccumulator(str(tmp_path / "run-7" / "tensorboard" / "orchestrator"))
    events.Reload()
    shown = {tag: [(one.step, make_ndarray(one.tensor_proto)) for one in events.Tensors(tag)]
             for tag in events.Tags()["tensors"]}  # fmt: skip
    assert [(step, float(value)) for step, value in shown["reward/mean"]] == [(0, 0.25), (1, 0.75)]
    ((step, table),) = shown["samples"]
    assert (step, table[1][2]) == (0, b"cba")
    ((_, histogram),) = shown["distributions/reward"]
    assert histogram[:, 2].sum() == 3


def mlflow_runs(uri: str) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    return list(client.search_runs([one.experiment_id for one in client.search_experiments()]))


def mlflow_history(uri: str, run: Any) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    history = MlflowClient(uri).get_metric_history(run.info.run_id, "reward_mean")
    return [(one.step, one.value) for one in history]


def test_mlflow(tmp_path: Path) -> None:
    """Contract: numbers and settings are there; secrets are not shown."""
    server = (tmp_path / "server").as_uri()
    log_two_steps(tmp_path, mlflow={"uri": server, "name": "words-orchestrator"})
    (run,) = mlflow_runs(server)
    assert (run.info.run_name, run.info.status) == ("words-orchestrator", "FINISHED")
    assert (run.data.tags["group"], run.data.metrics["eval_words_avg_4"]) == ("words", 0.5)
    assert run.data.params == {"model": "{'name': 'tiny'}", "api_key": "(withheld)"}
    assert mlflow_history(server, run) == [(0, 0.25), (1, 0.75)]


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: two runs of one process do not end each other; one of the same name is continued."""
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / "trackio")
    first = Monitor(tmp_path / "a", "trainer", MonitorConfig(trackio=TrackioConfig(name="a-trainer")), {})
    log_two_steps(tmp_path, trackio={"name": "b-orchestrator", **BOTH})
    log_two_steps(tmp_path, trackio={"name": "b-orchestrator", **BOTH})
    nameless = [Monitor(tmp_path, process, MonitorConfig(trackio=TrackioConfig()), {}) for process in ("a", "b")]
    for monitor in nameless:
        monitor.log(0, {"loss/mean": 1.0})
        monitor.close()
    first.log(5, {"loss/mean": 2.0})
    first.close()
    logs = sqlite_storage.SQLiteStorage.get_logs
    assert [(row["step"], row["loss/mean"]) for row in logs("prime-rl", "a-trainer")] == [(5, 2.0)]
    assert len(set(sqlite_storage.SQLiteStorage.get_runs("prime-rl"))) == 4
    rows = logs("prime-rl", "b-orchestrator")
    assert [(row["step"], row["reward/mean"]) for row in rows] == [(0, 0.25), (1, 0.75)] * 2
    assert rows[0]["samples"]["_value"][0]["completion"] == "cba"
    assert sum(rows[0]["distributions/reward"]["values"]) == 3


def test_prometheus(tmp_path: Path) -> None:
    """Contract: each process of a host has a page of its own, with the last value of each metric."""
    port = free_port()
    config = MonitorConfig(prometheus=PrometheusConfig(port=port))
    monitors = [Monitor(tmp_path, process, config, {}) for process in ("trainer", "orchestrator")]
    for step, row in ROWS.items():
        monitors[1].log(step, row)
    monitors[1]._trackers._thread.results()
    pages = [urllib.request.urlopen(f"http://127.0.0.1:{port + n}/metrics", timeout=5).read().decode() for n in (0, 1)]
    assert 'prime_rl_reward_mean{process="orchestrator"} 0.75' in pages[1]
    assert 'prime_rl_eval_words_avg_4{process="orchestrator"} 0.5' in pages[1]
    assert 'prime_rl_step{process="orchestrator"} 1.0' in pages[1]
    assert "prime_rl" not in pages[0]
    assert "process_resident_memory_bytes" in pages[0]
    for monitor in monitors:
        monitor.close()
    check_trackers({"trainer": config, "orchestrator": config})


def test_a_tracker_that_fails_is_left_out(tmp_path: Path) -> None:
    """Contract: it is said once, without a password, the run goes on, and the other trackers get every step."""
    from loguru import logger

    lines: list[str] = []
    sink = logger.add(lambda line: lines.append(str(line)))
    monitor = Monitor(tmp_path, "trainer", MonitorConfig.model_validate({"tensorboard": {}, "mlflow": {}}), {})
    active = monitor._trackers.active

    def fail(*_: object) -> None:
        raise ZeroDivisionError("no answer from https://bob:pass@word@host/api")

    active["tensorboard"] = active["tensorboard"]._replace(log=fail)
    for step, row in ROWS.items():
        monitor.log(step, row)
    monitor.close()
    logger.remove(sink)
    assert (
        len([line for line in lines if re.search(r"tensorboard failed .*ZeroDivisionError: .* https://host/api", line)])
        == 1
    )
    server = (tmp_path / "mlruns").as_uri()
    assert mlflow_history(server, *mlflow_runs(server)) == [(0, 0.25), (1, 0.75)]


def test_one_that_cannot_start_is_found_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: one line, before anything runs, and also from the process itself."""
    check_trackers({"sft": MonitorConfig()})
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = int(server.getsockname()[1])
        taken = MonitorConfig(prometheus=PrometheusConfig(port=port - 1))
        with pytest.raises(UserError, match=rf"^prometheus cannot use 127.0.0.1:{port}: .*in use"):
            check_trackers({"orchestrator": taken})
        with pytest.raises(UserError, match=rf"^prometheus did not start: 127.0.0.1:{port}, choose another .*in use"):
            Monitor(tmp_path, "orchestrator", taken, {})
    gone = f"127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match=f"^mlflow cannot use {gone}: .*refused"):
        check_trackers({"trainer": MonitorConfig(mlflow=MlflowConfig(uri=f"http://{gone}"))})
    for wrong in ("http://h:99999", "http://h:abc", "http://[::1"):
        with pytest.raises(UserError, match=r"^mlflow cannot use its uri: (Port|Invalid)"):
            check_trackers({"trainer": MonitorConfig(mlflow=MlflowConfig(uri=wrong))})
    (tmp_path / "mlruns").write_text("")  # no directory
    with pytest.raises(UserError, match="^mlflow did not start: "):
        Monitor(tmp_path, "trainer", MonitorConfig(tensorboard=TensorboardConfig(), mlflow=MlflowConfig()), {})
    monkeypatch.setattr("prime_rl.monitor.trackers.find_spec", lambda name: None)
    with pytest.raises(UserError, match="^trackio needs the library trackio: add `--extra trackers`"):
        check_trackers({"trainer": MonitorConfig(trackio=TrackioConfig())})


def test_the_dashboard_shows_documented_metrics() -> None:
    """Contract: every number of ours in Grafana's file is one of `docs/reference/metrics.md`."""
    docs = Path(__file__).parents[3] / "docs"
    shown = {*re.findall(r"prime_rl_(\w+)", (docs / "grafana.json").read_text())} - {"step"}
    known = "\n".join(re.findall(r"`([^`]+)`", (docs / "reference" / "metrics.md").read_text()))
    names = {re.sub(r"\W", "_", name) for name in known.split("\n")}
    assert len(shown) > 15
    assert {name for name in shown if name not in names and name.rpartition("_")[0] not in names} == set()
