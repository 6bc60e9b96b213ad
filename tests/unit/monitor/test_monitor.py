"""Log format, metrics files and status files."""

import ast
import errno
import itertools
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Any

import pytest

from prime_rl.config.shared import MonitorConfig, WandbConfig
from prime_rl.errors import UserError
from prime_rl.monitor import Monitor, Status, read_metrics, read_status
from prime_rl.monitor.monitor import MetricsFile, metrics_path
from prime_rl.monitor.trackers import check_wandb
from prime_rl.wait import wait
from support.processes import REPOSITORY

DATED = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
SAYS = """
import logging, sys, warnings
from pathlib import Path
from loguru import logger
from prime_rl.monitor import log
log.setup("info", sys.argv[1], sys.argv[2] or None)
logger.info("hello {}", {"a": 3}); logger.info(f"braces {{x}} {'{}'}"); logger.debug("not shown")
logging.getLogger("vllm.engine").warning("%d of {}", 2); logging.getLogger("httpx").info("not shown")
logging.getLogger("bad").warning("%d", "x"); warnings.warn("old")
key = "sk-secret"
try: 1 / (len(key) - 9)
except ZeroDivisionError: logger.exception("failed")
if sys.argv[3:]: log.fail(ValueError("gone"), 7)
raise RuntimeError("crash")
"""


def says(process: str, output_dir: Path | str, *more: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SAYS, process, str(output_dir), *more]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run(command, text=True, timeout=60, **{**pipes, **options})


def test_log_lines(tmp_path):
    """One format for our lines and those of libraries; no colours in files; no values of variables in a traceback.
    The line that a process fails or crashes with is kept where `rl doctor` looks for it."""
    done = says("trainer", tmp_path)
    kept = (tmp_path / "logs" / "trainer.log").read_text()
    for text in (done.stdout, kept):
        lines = text.splitlines()
        expected = ("INFO    hello {'a': 3}", "INFO    braces {x} {}", "WARNING vllm.engine: 2 of {}")
        for line, words in zip(lines, expected, strict=False):
            assert re.fullmatch(f"{DATED} {re.escape(words)}", line)
        assert "WARNING py.warnings: " in text
        assert "ERROR   failed\nTraceback" in text
        assert not re.search("not shown|sk-secret|\033", text)
    assert done.stdout.splitlines()[-1] == kept.splitlines()[-1] == "RuntimeError: crash"
    done = says("eval", tmp_path, "fail")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (7, "error: gone")
    assert (tmp_path / "logs" / "eval.log").read_text().splitlines()[-1] == "error: gone"


@pytest.mark.parametrize("process", ["trainer", "trainer.1"])
def test_what_rl_keeps_is_not_kept_twice(tmp_path, process):
    """Stdout is the log file, which ranks share: every line once, no other file. By hand a rank has its own file."""
    path = tmp_path / "logs" / "trainer.log"
    path.parent.mkdir()
    with path.open("ab") as file:
        says(process, tmp_path, stdout=file)
    tag = r"\[trainer.1\] " if "." in process else ""
    assert len(re.findall(f"{DATED} INFO    {tag}hello", path.read_text())) == path.read_text().count("hello") == 1
    assert os.listdir(path.parent) == ["trainer.log"]
    says(process, tmp_path / "by hand")
    assert os.listdir(tmp_path / "by hand" / "logs") == [f"{process}.log"]


def test_processes_of_an_engine_log_as_their_server(tmp_path):
    """vLLM sets up each of its processes by `logging.json`."""
    code = """
import json, logging.config, sys
from prime_rl.inference import server
logging.config.dictConfig(json.loads(open(server.__file__.replace("server.py", "logging.json")).read()))
logging.getLogger("vllm.core").info("engine"); logging.getLogger("vllm.core").debug("not shown")
"""
    env = {**os.environ, "PRIMERL_LOG": json.dumps(["info", "inference", str(tmp_path)])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    for text in (done.stdout, (tmp_path / "logs" / "inference.log").read_text()):
        assert re.fullmatch(f"{DATED} INFO    vllm.core: engine\n", text)


def test_templates_of_log_lines_take_their_arguments():
    """loguru formats with `{}`: a template for `logging`, or one that counts wrong, would silently lose arguments."""
    wrong = []
    for path in (REPOSITORY / "src" / "prime_rl").rglob("*.py"):
        source = path.read_text()
        if "from loguru import logger" not in source:
            continue
        for call in ast.walk(ast.parse(source)):
            if isinstance(call, ast.Call) and re.fullmatch(
                r"logger(\.opt\(.*\))?\.(debug|info|warning|error|exception)", ast.unparse(call.func)
            ):
                template, *values = call.args
                literal = isinstance(template, ast.Constant)
                parsed = Formatter().parse(template.value) if literal and values else []
                takes = [field for _, field, _, _ in parsed if field is not None]
                starred = any(isinstance(value, ast.Starred) for value in values)
                if (len(takes) != len(values) and not starred) or (literal and re.search(r"%[sdr]", template.value)):
                    wrong.append(f"{path.name}:{call.lineno}")
    assert wrong == []


def test_metrics_lines(tmp_path, heard):
    """A flat object a line: step, time, finite numbers; non-finite ones dropped with one warning a key. A resumed run
    continues the file; a repeated step replaces the earlier one; a torn line harms nobody."""
    path = metrics_path(tmp_path, "trainer")
    first = Monitor(tmp_path, "trainer", MonitorConfig(), {})
    first.log(0, {"loss/mean": 0.5, "bad": math.nan, "count": 3})
    for step in (1, 2):
        first.log(step, {"bad": math.inf})
    first.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [set(line) for line in lines[:2]] == [{"step", "time", "loss/mean", "count"}, {"step", "time"}]
    assert lines[0]["count"] == 3
    # Threads of other tests may still be logging, paths and hexadecimal digits with "bad" in them included.
    assert len([said for said in heard.messages if said.startswith("bad is ")]) == 1
    with path.open("a") as file:
        file.write('{"step": 3, "loss/me')
    second = Monitor(tmp_path, "trainer", MonitorConfig(), {})
    second.log(2, {"loss/mean": 9.0})
    second.log(2, {"eval/x/reward/mean": 0.25})
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert (rows[2]["loss/mean"], rows[2]["eval/x/reward/mean"]) == (9.0, 0.25)
    assert read_metrics(tmp_path / "none.jsonl") == []
    follower = MetricsFile(path, kept=2)
    assert (len(follower.read()), follower.read(), [*follower.rows]) == (5, [], [1, 2])
    path.write_text('{"step": 0}\n')  # the run was started over, shorter so far
    assert (follower.read(), follower.rows) == ([{"step": 0}], {0: {"step": 0}})
    for text in ('{"step": 1}\nhalf of a {"step": 7}\n[]\n{"step": 2, "a": "text"}\n{"step": 3', ', "a": 4.0}\n'):
        with path.open("a") as file:
            file.write(text)
        follower.read()
    assert [*follower.rows] == [0, 3]
    (tmp_path / "new").write_text('{"step": 5}\n' * 99)  # started over, longer already
    (tmp_path / "new").replace(path)
    assert (len(follower.read()), [*follower.rows]) == (99, [5])


def test_a_full_disk_is_named(tmp_path):
    """The disk fills up in the middle of a line: the next incarnation removes half a line, and its row is whole."""
    path = metrics_path(tmp_path, "trainer")
    monitor = Monitor(tmp_path, "trainer", MonitorConfig(), {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))  # room for half a line
        with pytest.raises(UserError, match=f"{path}.*: the lines before are kept"):
            monitor.log(0, {"loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    monitor = Monitor(tmp_path, "trainer", MonitorConfig(), {})
    monitor.log(0, {"loss": 2.0})
    monitor.close()
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [(0, 2.0)]
    assert len(path.read_text().splitlines()) == 1


def test_a_process_that_says_nothing_still_lives(tmp_path, monkeypatch):
    """The heartbeat goes on by itself, over errors of the disk too, and ends with the last word."""
    monkeypatch.setattr("prime_rl.monitor.status.HEARTBEAT_SECONDS", 0.02)
    real, failing = Path.write_text, [errno.ENOSPC, errno.EROFS]

    def write_text(self: Path, text: str) -> int:
        if failing:
            raise OSError(failing.pop(), "")
        return real(self, text)

    status = Status(tmp_path, "trainer")
    first = read_status(tmp_path)["trainer"]
    monkeypatch.setattr(Path, "write_text", write_text)
    later = lambda: read_status(tmp_path)["trainer"].heartbeat > first.heartbeat and not failing  # noqa: E731
    wait(later, subject="heartbeat", owner="its thread", seconds=60, poll=0.05)
    status.done("finished")
    last = read_status(tmp_path)["trainer"]
    time.sleep(0.2)
    assert read_status(tmp_path)["trainer"] == last


def test_a_long_wait_is_said_and_repeated_sparingly(tmp_path, monkeypatch, heard):
    """Contract: a process that waits for one never started names both after ten seconds; other ranks are silent."""
    clock = [1000.0]
    monkeypatch.setattr("prime_rl.monitor.status.time.time", lambda: clock[0])
    monkeypatch.setattr("prime_rl.monitor.status.HEARTBEAT_SECONDS", 3600.0)  # the beats are those below
    main, other, said = Status(tmp_path, "orchestrator"), Status(tmp_path, "trainer.1"), []
    for seconds in range(0, 400):
        clock[0] = 1000.0 + seconds
        for status in (main, other):
            status.waiting("weights/step_0", "trainer", 600)
            status._say()
        said += [seconds] * (len(heard.messages) - len(said))
    assert said == [10, 70, 140, 280]
    assert heard.messages[0] == f"waiting for weights/step_0 from trainer, for 10 s (at most 600 s; in {tmp_path})"
    main.close()
    other.close()


def test_progress_is_told_apart_from_life(tmp_path, monkeypatch):
    """Another phase, step or item is progress, and so is the end of a wait; saying the same again is not."""
    clock = itertools.count(100.0)
    monkeypatch.setattr("prime_rl.monitor.status.time.time", lambda: next(clock))
    monkeypatch.setattr("prime_rl.monitor.status._MIN_INTERVAL_SECONDS", 0.0)
    status, seen = Status(tmp_path, "trainer"), 0.0
    for call, argument, expected in (
        (status.phase, "training", True), (status.phase, "training", False), (status.phase, "training: 1/2", True),
        (status.step, 3, True), (status.step, 3, False), (partial(status.waiting, "x", "y"), 1.0, False),
        (status.phase, "training: 1/2", True), (lambda _: status.progress(), None, True),
    ):  # fmt: skip
        call(argument)
        before, seen = seen, read_status(tmp_path)["trainer"].progress
        assert (seen != before) == expected, (call, argument)


@pytest.mark.parametrize(
    "text", ['{"colour": "red"}', "", "null", "[" * 100_000, '{"pid": "many"}', '{"heartbeat": NaN}', '{"waiting": {}}']
)
def test_status_files_of_others(tmp_path, text):
    """Files of an older version lack fields, those of a newer one may have more; a damaged or foreign one is none."""
    Status(tmp_path, "trainer").done("finished")
    path = tmp_path / "status" / "trainer.json"
    fields = json.loads(path.read_text())
    for name in ("progress", "ready", "host", "started"):
        del fields[name]
    path.write_text(json.dumps({**fields, **json.loads(text)}) if text.startswith("{") else text)
    (tmp_path / "status" / "orchestrator.json").mkdir()
    found = [(status.outcome, status.progress, status.ready) for status in read_status(tmp_path).values()]
    assert found == ([("finished", 0.0, None)] if "red" in text else [])


@pytest.mark.parametrize(
    ("variables", "login", "error"),
    [
        ({}, None, "W&B has no key: .*uv run wandb login.*WANDB_API_KEY.*--wandb.offline"),
        ({}, "machine elsewhere.org login user password p", "W&B has no key"),
        ({}, f"machine api.wandb.ai login user password {'k' * 40}", None),
        ({"WANDB_API_KEY": "k" * 40}, None, None),
        ({"WANDB_MODE": "offline"}, None, None),
    ],
)
def test_wandb_without_a_key_is_found_first(tmp_path, monkeypatch, variables, login, error):
    """Contract: who uploads has a key where W&B itself looks for it, or gets one line; offline needs none."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name, value in ({"NETRC": str(tmp_path / "netrc")} | variables).items():
        monkeypatch.setenv(name, value)
    if login is not None:
        (tmp_path / "netrc").write_text(login)
    with pytest.raises(UserError, match=error) if error else nullcontext():
        check_wandb(None, WandbConfig())
    check_wandb(None, WandbConfig(offline=True))


def test_runs_of_one_process_are_runs_of_their_own(tmp_path: Path) -> None:
    """Contract: what tenants of one trainer log goes to a run each."""
    config = MonitorConfig(wandb=WandbConfig(offline=True))
    for monitor in [Monitor(tmp_path / name, "trainer", config, {}) for name in ("a", "b")]:
        monitor.close()
    assert len({path.name for path in tmp_path.rglob("run-*.wandb")}) == 2
