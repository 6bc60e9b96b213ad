"""The whole of `rl`: one command starts, watches and ends everything."""

import signal
import time
from pathlib import Path

import pytest

from conftest import free_port
from prime_rl.monitor import read_metrics
from prime_rl.transport.commit import list_steps
from prime_rl.transport.rollouts import open_batch
from prime_rl.transport.weights import verify_weights
from support.processes import Command, run_forked

TIMEOUT = 400.0
SMALL = [
    "--orchestrator.batch-size", 16, "--orchestrator.rollouts-per-example", 4, "--orchestrator.eval.num-examples", 8,
]  # fmt: skip


def arguments(directory: Path, port: int, *more: object) -> list[object]:
    return [
        "@", "examples/reverse_text/cpu.toml", "--output-dir", directory, "--inference.server.port", port, *SMALL, *more,
    ]  # fmt: skip


def test_one_command_trains_evaluates_and_leaves_a_model(tmp_path, monkeypatch):
    """The first command of the README, shortened: exit 0, a line per step, evals before and after, weights that transformers loads. At async_level 1
    with the bound at 1 no sample of step n is older than version n - 1."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("PRIME_TRAINER__OPTIM__WEIGHT_DECAY", "0.5")
    more = ["--max-steps", 3, "--seed", 3, "--orchestrator.max-off-policy-steps", 1]
    with Command("rl", *arguments(tmp_path / "run", free_port(), *more), log=tmp_path / "rl.log") as rl:
        rl.succeed(TIMEOUT)
        console = rl.tail(80)
    run = tmp_path / "run"
    for step in range(3):
        assert f"Step {step} [{step + 1}/3] | reward" in console
    assert "Eval reverse-text at step 0" in console
    assert "Eval reverse-text at step 3" in console
    assert list_steps(run / "rollouts") == [0, 1, 2]
    for step in range(3):
        batch = open_batch(run / "rollouts" / f"step_{step}")
        versions = {version for row in batch.rows(range(len(batch))) for version in row.policy_versions}
        assert versions <= set(range(max(0, step - 1), step + 1))
    manifest = verify_weights(run / "weights" / "step_3")
    model = AutoModelForCausalLM.from_pretrained(run / "weights" / "step_3")
    assert {name for name, _ in model.named_parameters()} == manifest.tensors.keys()
    assert {"rl", "trainer", "orchestrator", "inference"} == {path.stem for path in (run / "configs").iterdir()}
    assert "seed = 3" in (run / "configs" / "trainer.toml").read_text()
    assert "weight_decay = 0.0" in (run / "configs" / "trainer.toml").read_text()  # the file beats the environment
    assert len(read_metrics(run / "metrics" / "trainer.jsonl")) == 3
    assert remains(run) == []


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_process_behind(tmp_path):
    """kill -9 of `rl` in the middle of a run: server, engine, trainer, orchestrator and workers are gone within seconds."""
    port = free_port()
    with Command("rl", *arguments(tmp_path / "run", port, "--max-steps", 200), log=tmp_path / "rl.log") as rl:
        wait_until(lambda: len(list_steps(tmp_path / "run" / "rollouts")) >= 1, rl)
        family = descendants(rl.process.pid)
        assert len(family) >= 5
        rl.process.kill()
        rl.process.wait(10)
        deadline = time.monotonic() + 30
        while (alive := [pid for pid in family if is_alive(pid)]) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert alive == []


@pytest.mark.slow
def test_interrupting_once_finishes_the_step_and_says_so(tmp_path):
    """Ctrl-C drains: exit status 130, what is committed verifies, nothing is left running."""
    with Command("rl", *arguments(tmp_path / "run", free_port(), "--max-steps", 200), log=tmp_path / "rl.log") as rl:
        wait_until(lambda: len(list_steps(tmp_path / "run" / "weights")) >= 3, rl)
        family = descendants(rl.process.pid)
        rl.process.send_signal(signal.SIGINT)
        assert rl.wait(120) == 130
        assert "draining" in rl.tail()
        assert [pid for pid in family if is_alive(pid)] == []
    newest = max(list_steps(tmp_path / "run" / "weights"))
    verify_weights(tmp_path / "run" / "weights" / f"step_{newest}")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model.name", "nowhere/at/all"], "nowhere/at/all"),
        (["--orchestrator.environment.id", "no-such-environment"], "no-such-environment"),
        (["--trainer-gpus", 2, "--device", "cuda"], "GPU"),
        (["--max-steps", 5, "--ckpt.resume-step", 10], "below ckpt.resume_step 10"),
        (["--orchestrator.sampling.max-token", 5], "did you mean --orchestrator.sampling.max-tokens"),
    ],
)
def test_bad_input_ends_in_one_line_before_anything_starts(tmp_path, more, message):
    """Nothing is spawned, nothing is written but the refusal."""
    done = run_forked("rl", *arguments(tmp_path / "run", free_port()), *more)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "logs").exists()


def wait_until(condition, rl: Command, timeout: float = TIMEOUT) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert rl.process.poll() is None, f"rl ended early:\n{rl.tail()}"
        assert time.monotonic() < deadline, f"not reached in {timeout:.0f} s:\n{rl.tail()}"
        time.sleep(0.2)


def descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
        except OSError:
            continue
    found, queue = [], list(children.get(root, []))
    while queue:
        pid = queue.pop()
        found.append(pid)
        queue += children.get(pid, [])
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def remains(run: Path) -> list[str]:
    """Command lines of living processes that belong to the run: each is given a path inside its directory."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return [line for line in lines if str(run) in line]
