"""`--slurm`: the script is run by bash, over commands that stand in for SLURM's and for ours. No cluster."""

import importlib.util
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from prime_rl.config import ConfigError, EvalConfig, RLConfig, SFTConfig, parse
from prime_rl.config.inference import InferenceCommandConfig
from prime_rl.errors import UserError
from prime_rl.launcher.slurm import submit
from support.configs import from_table

ROOT = Path(__file__).parents[3]
SAY = 'echo "$SLURMD_NODENAME $(basename "$0") $*${PRIME_SEED:+ with a seed}" >> "$CALLS"\n'
# A job ends with $STATUS once the servers are up, or lasts until it is asked to finish if $LASTS.
JOB = f"""{SAY}trap 'echo "$(basename "$0") finishes" >> "$CALLS"; exit 130' TERM
until [[ -n ${{ALONE:-}} ]] || grep -q inference "$CALLS"; do sleep 0.05; done
while [[ -n ${{LASTS:-}} ]]; do sleep 0.05; done
echo "its last words"; exit "${{STATUS:-0}}"
"""
COMMANDS = {
    "scontrol": 'case $1 in show) printf "a\\nb\\nc\\nd\\n";; *) echo "scontrol $*" >> "$CALLS";; esac',
    "sbatch": 'echo "Submitted batch job 7"',
    # Starts the command once for each node, and passes USR1 on.
    "srun": """\
until [[ $1 != --* ]]; do [[ $1 != --nodelist=* ]] || IFS=, read -ra nodes <<<"${1#*=}"; shift; done
pids=()
trap 'kill -USR1 "${pids[@]}"' USR1
for node in "${nodes[@]}"; do SLURMD_NODENAME=$node SLURM_PROCID=${#pids[@]} "$@" & pids+=($!); done
status=0
for pid in "${pids[@]}"; do
  while kill -0 "$pid" 2>/dev/null; do wait "$pid" || :; done
  wait "$pid" || status=$?
done
exit "$status"
""",
    "inference": f'{SAY}trap "exit 0" TERM; while :; do sleep 0.1; done',
    "torchrun": '"$(dirname "$0")/rank" "$@" & wait $!',  # is not asked itself
    **dict.fromkeys(("rank", "orchestrator", "rl", "sft", "prime-eval"), JOB),
}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of the stand-ins; `calls` in it has a line for each call."""
    (tmp_path / "bin").mkdir()
    for name, body in COMMANDS.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"):
        monkeypatch.setenv(name, "7")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    return tmp_path


def config(root: Path, slurm: dict[str, Any], **more: Any) -> RLConfig:
    orchestrator = {"environments": [{"id": "reverse-text"}]}
    return from_table(RLConfig, {"output_dir": root, "orchestrator": orchestrator, "slurm": slurm, **more})


class Job:
    """The batch script of a config, as it was submitted, running."""

    def __init__(self, cluster: Path, made: Any, command: str = "rl", **env: str) -> None:
        submit(made, command)
        self._calls, script = cluster / "calls", made.output_dir / "configs" / "slurm" / f"{command}.sbatch"
        self.text = script.read_text()
        self._popen = subprocess.Popen(
            ["bash", script], env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def until(self, condition: Callable[[str], bool]) -> None:
        deadline = time.monotonic() + 30
        while not (self._calls.exists() and condition(self._calls.read_text())):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def end(self) -> tuple[int, str, str]:
        """Return its status, what its commands were called with, and what it said."""
        said = self._popen.communicate(timeout=60)[0]
        return self._popen.returncode, self._calls.read_text(), said


def test_one_node_runs_the_command_itself(cluster):
    """Contract: the same run with the same supervision, on a node of the cluster; queued again it recovers."""
    made = config(cluster / "a run", {"partition": "p", "time": "12:00:00", "options": ["--qos=high"]}, clean=True)
    job = Job(cluster, made, ALONE="1")
    assert "#SBATCH --partition=p\n#SBATCH --time=12:00:00\n#SBATCH --qos=high\n" in job.text
    assert f"#SBATCH --output='{cluster}/a run/logs/slurm-%j.log'\n" in job.text
    file = cluster / "a run/configs/slurm/rl.toml"
    status, calls, _ = job.end()
    assert (status, calls) == (0, f"a rl @ {file} --clean\n")
    assert Job(cluster, made, ALONE="1", SLURM_RESTART_COUNT="1").end()[1].endswith(f"a rl @ {file} --recover\n")
    assert parse(RLConfig, ["@", str(file)], env={}).slurm is None


def test_the_first_nodes_serve_and_the_others_train(cluster):
    """Contract: `rl` starts on each node with its rank; the first nodes serve, the others train and meet."""
    inference = {"tensor_parallel_size": 2}
    job = Job(cluster, config(cluster / "run", {"nodes": 4, "inference_nodes": 2}, inference=inference), PRIME_SEED="7")
    status, calls, _ = job.end()
    assert status == 0
    lines = calls.splitlines()
    for rank, node in enumerate("abcd"):
        (call,) = [line for line in lines if line.startswith(f"{node} rl ")]
        words = "--nodes 4 --rendezvous c:20007 --trainer-gpus 8 --inference-nodes 2 --inference.data-parallel-size 4"
        assert f"{words} --node-rank {rank}" in call
    assert len(lines) == 4


def test_a_failure_ends_the_job(cluster):
    """Contract: the failure of any step is the job's, says on which node and its last lines; nothing is waited for. A
    run that got no further is not queued again."""
    made = config(cluster / "run", {"nodes": 2}, inference={})
    status, calls, said = Job(cluster, made, STATUS="3").end()
    assert status == 3
    assert "error: rl on " in said
    assert " ended with status 3" in said
    assert "its last words" in said
    assert "not queued again" in said
    assert "scontrol" not in calls


@pytest.mark.parametrize(("number", "requeue"), [("USR1", True), ("USR1", False), ("INT", True)])
def test_the_run_is_asked_to_finish(cluster, number, requeue):
    """Contract: before the time limit, and at `scancel --signal=INT --batch`, the jobs finish while the servers serve;
    a run that got further goes on in a job queued again if it was the time limit."""
    made = config(cluster / "run", {"nodes": 2, "requeue": requeue}, inference={})
    job = Job(cluster, made, LASTS="1")
    assert f"#SBATCH --{'' if requeue else 'no-'}requeue\n#SBATCH --signal=B:USR1@600\n" in job.text
    job.until(lambda calls: all(name in calls for name in ("a rl", "b rl")))
    (cluster / "run/recovery/step_1").mkdir(parents=True)
    job.signal(signal.Signals[f"SIG{number}"])
    status, calls, _ = job.end()
    assert "rl finishes" in calls
    assert ("scontrol requeue 7" in calls) == (number == "USR1" and requeue)
    assert status != 0


@pytest.mark.parametrize(
    ("slurm", "inference", "message"),
    [
        ({"nodes": 2, "inference_nodes": 2}, {}, "leaves none of 2 nodes"),
        ({"nodes": 2}, {"tensor_parallel_size": 3}, "no multiple of the 3 GPUs"),
        ({"sweep": {"trainer.optim.lr": [1e-4, -1.0]}}, {}, "slurm.sweep, trainer.optim.lr=-1.0: .*greater than"),
        ({"sweep": {"ckpt.output_dir": ["saved"], "seed": [1, 2]}}, {}, "several runs would save in ckpt.output_dir"),
        ({"sweep": {"model.name": ["a/b", "a_b"]}}, {}, "two combinations of values have the directory .*a_b"),
        ({}, {"api_key": "s3cret"}, "^inference.api_key .*: set VLLM_API_KEY before you submit$"),
        ({"template": "nowhere"}, {}, "slurm.template nowhere"),
    ],
)
def test_what_cannot_be_submitted(tmp_path, slurm, inference, message):
    with pytest.raises(UserError, match=message):
        submit(config(tmp_path, slurm, inference=inference), "rl")


def test_a_sweep_is_a_job_array(cluster):
    """Contract: a job for each combination of values, each in a directory of its own."""
    sweep = {"trainer.optim.lr": [1e-4, 2e-4], "seq_len": [512]}
    job = Job(cluster, config(cluster / "run", {"sweep": sweep}), ALONE="1", SLURM_ARRAY_TASK_ID="1")
    assert "#SBATCH --array=0-1\n" in job.text
    directory = cluster / "run/trainer.optim.lr=0.0002,seq_len=512"
    assert job.end()[1] == f"a rl @ {directory / 'configs/slurm/rl.toml'}\n"
    second = parse(RLConfig, ["@", str(directory / "configs/slurm/rl.toml")], env={})
    assert (second.output_dir, second.trainer.optim.lr, second.orchestrator.seq_len) == (directory, 2e-4, 512)


def test_other_commands(cluster, monkeypatch):
    """Contract: `sft` trains by torchrun on all nodes, and goes on from its checkpoints; `eval` runs on one;
    `inference` serves on each, with a key."""
    root, slurm = cluster / "run", {"nodes": 4, "gpus_per_node": 4}
    status, calls, _ = Job(cluster, from_table(SFTConfig, {"output_dir": root, "slurm": slurm}), "sft", ALONE="1").end()
    assert status == 0
    assert calls.count("rank --nnodes=4 --nproc-per-node=4") == 4
    (cluster / "saved/checkpoints/step_4").mkdir(parents=True)
    made = from_table(SFTConfig, {"output_dir": root, "slurm": slurm, "ckpt": {"output_dir": cluster / "saved"}})
    assert "--ckpt.resume-step -1\n" in Job(cluster, made, "sft", ALONE="1", SLURM_RESTART_COUNT="1").end()[1]
    evaluation = from_table(EvalConfig, {"output_dir": root, "slurm": {}, "environment_ids": ["x"]})
    job = Job(cluster, evaluation, "eval", ALONE="1")
    assert f"a prime-eval @ {root / 'configs/slurm/eval.toml'}\n" in job.end()[1]
    assert "--gpus" not in job.text
    served = from_table(InferenceCommandConfig, {"output_dir": root, "slurm": slurm})
    assert "need a key" in Job(cluster, served, "inference").end()[2]
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    job = Job(cluster, served, "inference")
    job.until(lambda calls: "a inference" in calls and "d inference" in calls)
    job.signal(signal.SIGINT)
    assert job.end()[0] == 130


@pytest.mark.parametrize(("time", "save_seconds", "refused"), [
    ("10", 600, True), ("10:01", 600, False), ("2:00:00", 7200, True), ("1-0", 86_400, True), ("1-0:30", 86_400, False),
])  # fmt: skip
def test_time_to_save(time, save_seconds, refused):
    """Contract: a time limit that leaves no time before the save is refused, in all of SLURM's forms."""
    arguments = ["--environment-ids=x", f"--slurm.time={time}", f"--slurm.save-seconds={save_seconds}"]
    with pytest.raises(ConfigError, match="would end at once") if refused else nullcontext():
        parse(EvalConfig, arguments, {})


def test_cpu_nodes_have_no_gpus(tmp_path, capsys):
    submit(config(tmp_path, {"nodes": 2}, inference={}, device="cpu", dry_run=True), "rl")
    text = capsys.readouterr().out
    assert "-gpus" not in text


def test_submitting_and_printing(cluster, capsys):
    """Contract: `--dry-run` prints the script and submits nothing; a template of one's own is used; SLURM's answer is
    shown."""
    root = cluster / "run"
    submit(config(root, {"nodes": 2}, inference={}, dry_run=True), "rl")
    assert capsys.readouterr().out.startswith("#!/usr/bin/env bash\n")
    assert not (root / "configs/slurm").exists()
    (cluster / "own.j2").write_text("#!/bin/sh\n{{ command }} on {{ slurm.nodes }}")
    submit(config(root, {"template": str(cluster / "own.j2")}), "rl")
    script = root / "configs/slurm/rl.sbatch"
    assert capsys.readouterr().out == f"Submitted batch job 7 ({script})\n"
    assert script.read_text() == "#!/bin/sh\nrl on 1\n"
    (cluster / "bin/sbatch").write_text("#!/bin/sh\necho no such partition >&2; exit 1\n")
    with pytest.raises(UserError, match="no such partition"):
        submit(config(root, {}), "rl")


def test_ready_scripts(monkeypatch):
    """Contract: those in scripts/slurm are what the commands render for the examples."""
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("render_slurm", "scripts/slurm/render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, text in module.rendered().items():
        assert Path("scripts/slurm", name).read_text() == text, "run `python scripts/slurm/render.py`"
