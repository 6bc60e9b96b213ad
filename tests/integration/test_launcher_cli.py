"""The `rl` command before anything starts: dry runs and refusals leave nothing behind. And W&B without a network."""

import re
import socket
import subprocess
import tomllib
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path

import pytest

from prime_rl.config.shared import MonitorConfig, WandbConfig
from prime_rl.errors import UserError
from prime_rl.monitor import Monitor
from support.processes import REPOSITORY, run_forked

PORT = 8260


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Looks like a model to the checks; nothing here loads it."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "qwen3"}')
    (directory / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("")
    return directory


def rl(model: Path, output_dir: Path, *options: str) -> subprocess.CompletedProcess[str]:
    given = ("--inference.server.port", str(PORT), "--model.name", str(model), "--output-dir", str(output_dir))
    environment = ("--orchestrator.environment.id", "reverse-text")
    return run_forked("rl", *given, *environment, *options)


def test_dry_run_prints_the_plan_and_writes_only_configs(model: Path, tmp_path: Path) -> None:
    """COMMANDS: validates, prints processes, ports and directories, writes resolved TOMLs, touches nothing else."""
    done = rl(model, tmp_path / "run", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert f"port {PORT}" in done.stdout
    written = sorted(
        str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*") if path.is_file()
    )
    assert written == [f"configs/{name}.toml" for name in ("inference", "orchestrator", "rl", "trainer")]
    first = {path.name: path.read_text() for path in (tmp_path / "run" / "configs").iterdir()}
    again = run_forked("rl", "@", tmp_path / "run/configs/rl.toml", "--dry-run")
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert {path.name: path.read_text() for path in (tmp_path / "run" / "configs").iterdir()} == first


@pytest.mark.parametrize("also", [[], ["--clean"]])
def test_a_dry_run_beside_a_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, also: list[str]) -> None:
    """A run that is there, or under way on the same port, keeps every file as it is; the plan is shown. A key that a
    variable gives is neither printed nor written."""
    key, run = "a-key-nobody-may-see", tmp_path / "run"
    monkeypatch.setenv("PRIME_INFERENCE__API_KEY", key)
    names = "rollouts/step_0/samples.arrow weights/step_1/manifest.json configs/rl.toml metrics/trainer.jsonl"
    files = [run / name for name in names.split()]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text("of the run")
    with socket.create_server(("127.0.0.1", PORT)):
        done = rl(model, run, "--dry-run", *also)
    assert done.returncode == 0, done.stderr
    assert f"port {PORT}" in done.stdout
    assert {file.read_text() for file in files} == {"of the run"}
    configs = list(run.rglob("*.toml"))
    assert {path.parent.name for path in configs} == {"configs", "dry-run"}
    assert key not in str([done.stdout, done.stderr, *(path.read_text() for path in configs)])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], f"error: port {PORT} "),
        (["--model.name", "nowhere/at/all"], "nowhere/at/all"),
        (["--orchestrator.environment.id", "no-such-environment"], "no-such-environment"),
        (["--trainer-gpus", "2", "--device", "cuda"], "GPU"),
        (["--orchestrator.sampling.max-token", "5"], "did you mean --orchestrator.sampling.max-tokens"),
        (["--output-dir", "earlier"], "holds an earlier run (rollouts)"),
    ],
)
def test_refused_before_anything_starts(model: Path, tmp_path: Path, options: list[str], says: str) -> None:
    """One readable error, status 1; nothing is written, an earlier run stays. The port is taken if all else is fine."""
    (tmp_path / "earlier" / "rollouts" / "step_0").mkdir(parents=True)
    arguments = [str(tmp_path / option) if option == "earlier" else option for option in options]
    with nullcontext() if options else socket.create_server(("127.0.0.1", PORT)):
        done = rl(model, tmp_path / "run", *arguments)
    assert (done.returncode, says in done.stderr) == (1, True), done.stderr
    assert done.stderr.count("\n") == 1 or options
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
    assert [path.name for path in (tmp_path / "earlier").rglob("*")] == ["rollouts", "step_0"]


def test_wandb_offline_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline runs are written below the run directory; online without a key is one readable error and no file."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monitor = Monitor(tmp_path, "trainer", MonitorConfig(wandb=WandbConfig(id="abc-trainer", offline=True)), {})
    monitor.log(0, {"loss/mean": 1.0})
    monitor.close()
    assert list((tmp_path / "logs" / "wandb").glob("offline-run-*-abc-trainer/*.wandb"))
    with pytest.raises(UserError, match=r"wandb did not start.*--monitor\.wandb\.offline"):
        Monitor(tmp_path / "online", "trainer", MonitorConfig(wandb=WandbConfig()), {})
    assert not (tmp_path / "online" / "metrics").exists()


def test_a_run_can_be_examined(tmp_path: Path) -> None:
    """`rl doctor RUN` and `rl audit RUN` are told of in --help; what they cannot read is one line."""
    for what in ("doctor", "audit"):
        assert f"`rl {what} RUN`" in run_forked("rl", "--help").stdout
        missing = run_forked("rl", what, tmp_path / "missing")
        assert missing.returncode == 1
        assert missing.stderr.startswith("error: ")
        assert missing.stderr.count("\n") == 1
        assert run_forked("rl", what).stderr.startswith(f"error: usage: rl {what} RUN")
    found = run_forked("rl", "doctor", tmp_path)
    assert (found.returncode, found.stderr) == (0, "")
    assert "never started" in found.stdout


def test_eval_by_names_that_no_shell_has(tmp_path: Path) -> None:
    """Contract: a shell's own `eval` hides ours, so `rl eval` does the same and calls itself so; `prime-eval` is it."""
    evaluation = ("--environment-ids", "reverse-text", "--model.name", "m/m", "--output-dir", tmp_path, "--dry-run")
    plain, ours = run_forked("eval", *evaluation), run_forked("rl", "eval", *evaluation)
    assert (plain.returncode, plain.stdout, plain.stderr) == (0, ours.stdout, ours.stderr)
    assert run_forked("rl", "eval", "--help").stdout.startswith("usage: rl eval ")
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["prime-eval"] == scripts["eval"]


def test_a_port_that_nobody_gave(model: Path, tmp_path: Path) -> None:
    """Contract: the plan shows the one that is free, and every process is written with it."""
    given = ("--inference", "--model.name", model, "--output-dir", tmp_path / "run", "--dry-run")
    with ExitStack() as sockets:
        with suppress(OSError):  # whoever listens there already does as well
            sockets.enter_context(socket.create_server(("127.0.0.1", 8000)))
        done = run_forked("rl", *given, "--orchestrator.environment.id", "reverse-text")
    shown = re.search(r"\(port (\d+)\)", done.stdout)
    assert shown is not None, done.stderr
    assert (port := int(shown[1])) > 8000
    written = {path.stem: tomllib.loads(path.read_text()) for path in (tmp_path / "run/configs").iterdir()}
    assert written["inference"]["server"]["port"] == written["rl"]["inference"]["server"]["port"] == port
    assert written["orchestrator"]["client"]["base_url"] == f"http://localhost:{port}/v1"


def test_nothing_to_recover_starts_fresh(model: Path, tmp_path: Path) -> None:
    """--recover on an empty directory says so and is no error; the jobs of a run get it."""
    for recovers in (False, True):
        done = rl(model, tmp_path / "run", "--recover", "--dry-run")
        assert (done.returncode, "nothing to recover in" in done.stdout) == (0, not recovers), done.stderr
        jobs = [line for line in done.stdout.splitlines() if re.search("entrypoints.(trainer|orch)", line)]
        assert [line.endswith("--recover") for line in jobs] == [recovers] * 2
        (tmp_path / "run/recovery/step_1").mkdir(parents=True, exist_ok=True)
