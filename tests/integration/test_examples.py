"""Contract: what the examples' READMEs tell people to type works."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import free_port
from prime_rl.config import RLConfig, SFTConfig, parse
from prime_rl.transport.commit import list_steps
from support.processes import REPOSITORY, Command, run_forked

TIMEOUT = 400.0
EXAMPLES = REPOSITORY / "examples"
ENVIRONMENTS = {
    "alphabet_sort": "alphabet-sort",
    "wordle": "wordle",
    "tool_use": "calculator",
    "self_play": "kuhn-poker",
    "hendrycks_math": "hendrycks-math",
    "intellect_math": "intellect-math",
}
EIGHT_GPUS = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}  # what some of them are laid out for
RUNS = [f"{name}/{file}.toml" for name in ENVIRONMENTS for file in ("rl", "cpu")]
DEMONSTRATIONS = {
    "wordle": ("sft.toml", "--games", 40),
    "tool_use": ("sft.toml", "--problems", 40),
    "self_play": ("sft_cpu.toml", "--games", 40),
}


@pytest.mark.parametrize("config", RUNS)
def test_dry_run(config: str, tmp_path: Path) -> None:
    """A whole run is planned from the file alone: without a GPU, and what asks for eight where they are."""
    arguments = ("@", EXAMPLES / config, "--output-dir", tmp_path / "run", "--dry-run")
    done = run_forked("rl", *arguments, env=os.environ | (EIGHT_GPUS if "_math/rl" in config else {}))
    assert done.returncode == 0, done.stderr
    name = ENVIRONMENTS[Path(config).parent.name]
    assert f'id = "{name}"' in (tmp_path / "run" / "configs" / "orchestrator.toml").read_text()


def test_tenants_dry_run(tmp_path: Path) -> None:
    """A deployment and its tenants are planned from their files."""
    commands = (("rl", "tenants"), "deployment", "--output-dir"), (("orchestrator",), "alice", "--tenant.join")
    for command, file, option in (*commands, (("orchestrator",), "bob", "--tenant.join")):
        done = run_forked(*command, "@", EXAMPLES / "tenants" / f"{file}.toml", option, tmp_path, "--dry-run")
        assert done.returncode == 0, done.stderr
    assert (
        "of 2 tenants at a time" in run_forked("rl", "tenants", "@", tmp_path / "configs/rl.toml", "--dry-run").stdout
    )


@pytest.mark.parametrize("name", ["reverse_text", "hendrycks_math", "intellect_math"])
def test_three_files_say_what_one_says(name: str) -> None:
    """`rl @ examples/NAME/rl.toml` and `rl --trainer @ configs/NAME/train.toml …` are one run but for GPU numbers."""
    one = parse(RLConfig, ["@", str(EXAMPLES / name / "rl.toml")], {})
    files = {"trainer": "train", "orchestrator": "orch", "inference": "infer"}
    paths = {section: str(REPOSITORY / "configs" / name / f"{file}.toml") for section, file in files.items()}
    sections = [argument for section, path in paths.items() for argument in (f"--{section}", "@", path)]
    gpus = ["--trainer-gpus", str(one.trainer_gpus), "--inference-gpus", str(one.inference_gpus)]
    three = parse(RLConfig, [*sections, *gpus], {})
    assert three.model_dump(exclude={"seq_len"}) == one.model_dump(exclude={"seq_len"})  # each section has it


@pytest.mark.parametrize("file", ["sft.toml", "sft_cpu.toml", "sft_eval.toml"])
def test_fine_tuning_leaves_the_directory_to_rl(file: str) -> None:
    """Contract: `sft`, `rl`, `eval`, pasted in the README's order: `rl` finds its default directory free."""
    config = parse(SFTConfig, ["@", str(EXAMPLES / "reverse_text" / file)], {})
    assert config.output_dir != RLConfig.model_fields["output_dir"].default


@pytest.mark.parametrize("name", DEMONSTRATIONS)
def test_demonstrations(name: str, tmp_path: Path) -> None:
    """The script writes conversations that start as the environment's do, and `sft` takes the file."""
    rows = tmp_path / "rows.jsonl"
    script = EXAMPLES / name / "demonstrations.py"
    config, *count = DEMONSTRATIONS[name]
    subprocess.run([sys.executable, script, *map(str, count), "--output", rows], check=True, timeout=60)
    first = json.loads(rows.read_text().splitlines()[0])
    assert [message["role"] for message in first["messages"][:3]] == ["system", "user", "assistant"]
    arguments = ("@", EXAMPLES / name / str(config), "--data.name", rows, "--output-dir", tmp_path / "run", "--dry-run")
    done = run_forked("sft", *arguments)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_on_a_cpu(name: str, tmp_path: Path) -> None:
    """`cpu.toml` runs the same environment to its end: exit 0, two steps trained, weights left."""
    arguments = ("@", EXAMPLES / name / "cpu.toml", "--output-dir", tmp_path / "run", "--max-steps", 2)
    with Command("rl", *arguments, "--inference.server.port", free_port(), log=tmp_path / "log") as command:
        command.succeed(TIMEOUT)
    assert list_steps(tmp_path / "run" / "rollouts") == [0, 1]
    assert 2 in list_steps(tmp_path / "run" / "weights")
