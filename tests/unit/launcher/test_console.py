"""Console lines from metrics files: one line per step once both sides have it, evals, a summary."""

import json
from dataclasses import replace
from pathlib import Path
from time import time as unix_time

from rich.live import Live

from prime_rl.launcher.console import Console
from prime_rl.monitor import Status
from prime_rl.monitor.monitor import bench_table
from prime_rl.monitor.status import Waiting, new_status, status_path, write_record
from prime_rl.transport.commit import stage

TRAINER = {"loss/mean": 0.0123, "entropy/mean": 2.5, "perf/throughput": 12345.6, "time/step": 3.21}
NOW = 2e9  # after every console began


def add(root: Path, process: str, step: int, time: float, **metrics: float) -> None:
    path = root / "metrics" / f"{process}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"step": step, "time": NOW + time, **metrics}) + "\n")


def test_a_step_is_shown_once_both_sides_have_it(tmp_path):
    """Joined by step, with the remaining time from the pace so far. An eval neither hides its step nor counts as it."""
    console = Console(tmp_path, max_steps=20)
    add(tmp_path, "orchestrator", 0, 99.0, **{"eval/reverse-text/reward/mean": 0.125, "eval/reverse-text/n": 8})
    add(tmp_path, "trainer", 0, 101.0, **TRAINER)
    assert console.step_lines() == ["Eval reverse-text at step 0 | reward 0.1250"]
    add(tmp_path, "orchestrator", 0, 100.0, **{"reward/mean": 0.25})
    assert console.step_lines() == ["Step 0 [1/20] | reward 0.2500 | loss 0.0123 | 12,346 tokens/s | 3.21 s"]
    assert console.step_lines() == []
    add(tmp_path, "trainer", 1, 111.0, **TRAINER)
    add(tmp_path, "orchestrator", 1, 105.0, **{"reward/mean": 0.5})
    assert console.step_lines()[0].endswith("ETA 3:00")
    assert console.steps == {0, 1}
    path = status_path(tmp_path, "inference")  # it was started again: times before it was ready do not count
    path.parent.mkdir()
    write_record(path, replace(new_status("inference"), ready=NOW + 112.0))
    console.look()
    for step, time, end in ((2, 150.0, "3.21 s"), (3, 155.0, "ETA 1:20")):
        add(tmp_path, "trainer", step, time, **TRAINER)
        add(tmp_path, "orchestrator", step, time, **{"reward/mean": 0.5})
        assert console.step_lines()[0].endswith(end)


def test_failed_episodes_are_no_secret(tmp_path):
    """Contract: a reward is not printed without the share of episodes that failed and are not in it."""
    console = Console(tmp_path, max_steps=20)
    add(tmp_path, "orchestrator", 0, 99.0, **{"eval/rt/reward/mean": 0.5, "eval/rt/errors/rate": 0.66})
    add(tmp_path, "trainer", 0, 101.0, **TRAINER)
    add(tmp_path, "orchestrator", 0, 100.0, **{"reward/mean": 0.25, "errors/rate": 0.414})
    said = console.step_lines()
    assert said[0] == "Eval rt at step 0 | reward 0.5000 | errors 66%"
    assert said[1].startswith("Step 0 [1/20] | errors 41% | reward 0.2500")
    assert any("orchestrator.log says why" in line for line in console.summary())


def test_steps_that_come_late_or_again(tmp_path):
    """A trainer that recovers repeats the steps since its recovery checkpoint, from the batches that are there.
    What the trainer adds, such as the time to save, is in the line if it comes in time, and makes none of its own."""
    for step in range(2):  # made before this launch
        add(tmp_path, "orchestrator", step, 1.0, **{"reward/mean": 0.5})
    console = Console(tmp_path, None)
    for step in range(2):
        add(tmp_path, "trainer", step, 1.0, **{"loss/mean": 0.1, "time/step": 1.0})
    add(tmp_path, "trainer", 1, 1.1, **{"time/save_ckpt": 1.0, "time/step": 2.0})
    rest = "| reward 0.5000 | loss 0.1000 |"
    assert console.step_lines() == [f"Step 0 [1] {rest} 1.00 s", f"Step 1 [2] {rest} 2.00 s"]
    add(tmp_path, "trainer", 1, 1.2, **{"time/step": 3.0})
    assert console.step_lines() == []
    add(tmp_path, "trainer", 1, 9.0, **{"loss/mean": 0.1, "time/step": 4.0})
    with (tmp_path / "metrics" / "trainer.jsonl").open("a") as file:
        file.write('{"step": 2, "ti')
        file.flush()
        assert console.step_lines() == [f"Step 1 [2] {rest} 4.00 s"]
        file.write('me": 10.0, "loss/mean": 0.1}\n')
    add(tmp_path, "orchestrator", 2, 1.0)
    add(tmp_path, "orchestrator", 2, 1.0, **{"reward/mean": 0.5})
    assert console.step_lines() == ["Step 2 [3] | reward 0.5000 | loss 0.1000"]


def test_summary_compares_first_and_last(tmp_path):
    """Reward of the first and the last five steps, evals before and after, weights; of a recovered run the whole."""
    for step in range(1, 13):
        add(tmp_path, "orchestrator", step, step, **{"reward/mean": step / 10})
    add(tmp_path, "orchestrator", 1, 1.0, **{"eval/rt/reward/mean": 0.1})
    add(tmp_path, "orchestrator", 13, 20.0, **{"eval/rt/reward/mean": 0.4})
    for version, files in ((0, []), (2, ["model.safetensors"]), (12, ["model.safetensors"]), (13, [])):
        with stage(tmp_path / "weights" / f"step_{version}", step=version, producer="trainer") as directory:
            for name in files:
                (directory / name).touch()
    assert Console(tmp_path, None).summary() == [
        "reward, first 5 steps → last: 0.3000 → 1.0000 (+0.7000)",
        "eval rt, first → last: 0.1000 → 0.4000 (+0.3000)",
        f"weights  {tmp_path / 'weights' / 'step_12'}",
    ]
    other = tmp_path / "other"
    other.mkdir()
    add(other, "orchestrator", 0, 0.0, **{"reward/mean": 0.5})
    assert Console(other, None).summary() == ["reward, first step → last: 0.5000 → 0.5000 (+0.0000)"]


def test_bench_table_leaves_the_warm_up_out(tmp_path):
    """An orchestrator's first step warms up: it is in no line but the last."""
    assert "stopped before a step" in bench_table(tmp_path, "orchestrator")
    for step, seconds in enumerate((100.0, 2.0, 4.0)):
        add(tmp_path, "orchestrator", step, 10.0, **{"time/step": seconds, "perf/throughput": 1000.0})
    lines = bench_table(tmp_path, "orchestrator").splitlines()
    assert lines[0] == "benchmark of orchestrator: 2 steps after 1 that warm up"
    assert [line.split()[2:] for line in lines if "step (ms)" in line] == [["3,000.0", "2,000.0", "4,000.0"]]
    assert lines[-1].split()[-1] == "97.0"


def test_console_shows_each_phase_once_and_long_waits(tmp_path, capsys):
    """Progress within a phase makes no further lines, and where rows show phases they make none; a long wait names its
    owner."""
    console = Console(tmp_path, max_steps=1)
    status = Status(tmp_path, "orchestrator")
    console.look()
    for done in range(5):
        status.phase(f"evaluating: {done}/5")
        console.look()
    status.waiting("weights/step_0", "trainer", 600.0)
    console.look()
    path = tmp_path / "status" / "orchestrator.json"
    fields = json.loads(path.read_text())
    fields["waiting"]["since"] -= 30
    path.write_text(json.dumps(fields))
    console.look()
    console.look()
    lines = [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "orchestrator: evaluating"
    assert lines[1].startswith("orchestrator waits for weights/step_0 from trainer, for 30 s (gives up in ")
    assert len(lines) == 2
    status.phase("making rollouts")
    console.region.live = Live()
    console.look()
    assert capsys.readouterr().out == ""


def test_rows_say_where_the_run_is(tmp_path):
    """Progress, rewards, each process (servers that do the same together), the limit, and the last warning that was
    logged since the launch, of an engine none."""
    logs = {name: tmp_path / "logs" / f"{name}.log" for name in ("inference", "inference-1", "trainer", "orchestrator")}
    (tmp_path / "logs").mkdir()
    for path in logs.values():
        path.write_text("2026-11-30 10:00:00 WARNING of an earlier launch\n")
    console = Console(tmp_path, max_steps=4, logs=logs)

    def texts(**statuses) -> list[str]:
        return ["".join(text for text, _ in row) for row in console.rows(statuses)]

    assert texts() == ["inference ×2  ● starting", "trainer       ● starting", "orchestrator  ● starting"]
    for step in range(3):
        add(tmp_path, "trainer", step, step, **TRAINER)
        add(tmp_path, "orchestrator", step, step, **{"reward/mean": step / 2, "time/idle": 0.1, "time/step": 1.0})
    console.look()
    with logs["trainer"].open("a") as file:
        file.write("2026-11-30 11:00:00 INFO    step 3\n2026-11-30 11:00:01 WARNING the loss jumped\n")
    with logs["inference"].open("a") as file:
        file.write("2026-11-30 11:00:02 WARNING no tcmalloc\n")
    now = unix_time()
    trainer = replace(new_status("trainer"), phase="training", step=3, ready=now)
    late = replace(
        new_status("orchestrator"), waiting=Waiting("weights/step_3", "trainer", now - 7, now + 60), ready=now
    )
    lost = replace(new_status("inference"), heartbeat=now - 60, ready=now)
    ended = replace(new_status("inference-1"), outcome="failed: it was killed")
    bar, *rest = texts(trainer=trainer, orchestrator=late, inference=lost, **{"inference-1": ended})
    assert bar.startswith("━━━━━━━━━━━━━━━━━━╌╌╌╌╌╌ 3/4 steps, ETA ")
    assert rest == [
        "reward        1.0000 ▁▅█",
        "inference     ● no sign of life for 60 s",
        "inference     ● failed: it was killed",
        "trainer       ● training, step 3",
        "orchestrator  ● waits for weights/step_3 from trainer, for 7 s",
        "warning       11:00:01 trainer: the loss jumped",
    ]
    console.say("trainer was killed: starting it again in 1 s (restart 1 of at most 3)")
    assert texts()[-1].endswith("starting it again in 1 s (restart 1 of at most 3)")
