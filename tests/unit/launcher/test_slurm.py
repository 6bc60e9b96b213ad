"""`rl --slurm`: the script is run by bash, over commands that only say how they were called. No cluster."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from prime_rl.config import RLConfig, parse
from prime_rl.errors import UserError
from prime_rl.launcher.slurm import render, submit
from support.configs import from_table

CALLS = {
    "scontrol": "printf 'a\\nb\\nc\\nd\\n'",
    "uv": 'echo "uv $*" >> "$CALLS"',
    # A server runs until it is ended; the other steps end after it was called, with `$STATUS`.
    "srun": 'echo "srun $*" >> "$CALLS"\n'
    'case "$*" in *inference*) exec sleep "${SERVER_SECONDS:-600}";; esac\n'
    'until grep -q inference "$CALLS"; do sleep 0.05; done\nexit "${STATUS:-0}"',
    "sbatch": 'echo "Submitted batch job 7 ($1)"',
}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of the stand-ins; `calls` in it has a line for each call."""
    for name, body in CALLS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"):
        monkeypatch.setenv(name, "7")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    return tmp_path


def config(root: Path, slurm: dict[str, Any], **more: Any) -> RLConfig:
    orchestrator = {"environments": [{"id": "reverse-text"}]}
    return from_table(RLConfig, {"output_dir": root, "orchestrator": orchestrator, "slurm": slurm, **more})


def run(cluster: Path, made: RLConfig, **env: str) -> tuple[int, str]:
    script = cluster / "script"
    script.write_text(render(made)[0])
    done = subprocess.run(["bash", script], env={**os.environ, **env}, timeout=60, capture_output=True, text=True)
    return done.returncode, (cluster / "calls").read_text()


def test_one_node_runs_the_command_itself(cluster):
    """Contract: the same run with the same supervision, on a node of the cluster."""
    made = config(cluster / "run", {"partition": "p", "time": "12:00:00"}, recover=True)
    text, sections = render(made)
    assert "#SBATCH --partition=p\n#SBATCH --time=12:00:00\n" in text
    assert run(cluster, made) == (0, f"uv run rl @ {cluster / 'run/configs/rl.toml'} --recover\n")
    assert list(sections.values()) == [made]


def test_the_first_nodes_serve_and_the_others_train(cluster):
    """Contract: the first nodes serve, the others train, the orchestrator knows all servers; they end with the jobs."""
    made = config(cluster / "run", {"nodes": 4, "inference_nodes": 2}, inference={"tensor_parallel_size": 2})
    status, calls = run(cluster, made)
    assert status == 0
    for command, parts in {
        "inference @": ["--nodes=2 --ntasks=2 --nodelist=a,b"],
        "train @": ["--nodes=2 --ntasks=2 --nodelist=c,d", "--nnodes=2 --nproc-per-node=8", "--rdzv-endpoint=c:29500"],
        "orchestrator @": ["--nodelist=c ", "--client.base-url http://a:8000 http://b:8000"],
    }.items():
        (call,) = [line for line in calls.splitlines() if command in line]
        assert [part for part in parts if part not in call] == []
    server: Any = render(made)[1][cluster / "run" / "configs" / "inference.toml"]
    assert server.data_parallel_size == 4


def test_a_step_that_fails_ends_the_job(cluster):
    """Contract: a failure of any step is the job's failure, and nothing is left waiting for it."""
    made = config(cluster / "run", {"nodes": 2}, inference={})
    assert run(cluster, made, STATUS="3")[0] != 0
    body = CALLS["srun"].replace("exit", "exec sleep 600 #")
    (cluster / "srun").write_text(f"#!/usr/bin/env bash\n{body}\n")
    assert run(cluster, made, SERVER_SECONDS="0")[0] != 0


@pytest.mark.parametrize(
    ("slurm", "inference", "message"),
    [
        ({"nodes": 2, "inference_nodes": 2}, {}, "leaves none of 2 nodes"),
        ({"nodes": 2}, {"tensor_parallel_size": 3}, "no multiple of the 3 GPUs"),
    ],
)
def test_nodes_that_cannot_be_laid_out(tmp_path, slurm, inference, message):
    with pytest.raises(UserError, match=message):
        render(config(tmp_path, slurm, inference=inference))


def test_submitting_and_printing(cluster, capsys):
    """Contract: `--dry-run` prints the script and submits nothing; the job's configs do not submit again."""
    root = cluster / "run"
    assert submit(config(root, {"nodes": 2}, inference={}, dry_run=True)) == 0
    assert capsys.readouterr().out.startswith("#!/usr/bin/env bash\n#SBATCH")
    assert not (root / "configs" / "rl.sbatch").exists()
    assert submit(config(root, {})) == 0
    assert capsys.readouterr().out == f"Submitted batch job 7 ({root / 'configs/rl.sbatch'})\n"
    assert parse(RLConfig, ["@", str(root / "configs/rl.toml")], env={}).slurm is None
    (cluster / "sbatch").write_text("#!/bin/sh\necho no such partition >&2; exit 1\n")
    with pytest.raises(UserError, match="no such partition"):
        submit(config(root, {}))
