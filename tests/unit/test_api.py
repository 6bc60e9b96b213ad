"""The Python API without servers: configurations from Python, and runs read from their files, whole or not."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.torch import save_file

from prime_rl import RLConfig, api, evaluate, open_run, run, serve
from prime_rl.api import Server, _inference_config
from prime_rl.config import ConfigError, OrchestratorConfig, parse, to_toml, write_toml
from prime_rl.config.loader import from_files
from prime_rl.errors import UserError
from prime_rl.launcher.supervise import RunOutcome
from prime_rl.transport.commit import stage, step_dir
from prime_rl.transport.rollouts import Sample, write_batch
from prime_rl.transport.token_stats import write_token_stats
from prime_rl.transport.weights import ADAPTER_CONFIG, PublisherAddress, manifest_extra, write_base_version
from support.committing import commit_weights
from support.processes import REPOSITORY

TOML = str(REPOSITORY / "examples" / "reverse_text" / "cpu.toml")
ENVIRONMENT = {"environment": {"id": "reverse-text"}}


def test_the_package_is_imported_without_what_it_may_not_need() -> None:
    """Contract: environment workers import it in a Python of their own."""
    script = "import sys, prime_rl; print({name.partition('.')[0] for name in sys.modules} & set(sys.argv[1:]))"
    heavy = ["torch", "vllm", "pyarrow", "pydantic", "httpx", "transformers"]
    done = subprocess.run([sys.executable, "-c", script, *heavy], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_a_configuration_from_python_is_that_of_the_command_line() -> None:
    """Contract: files, then arguments, nested or dotted; settings reach every section, also of a class made directly,
    and a port that nobody gave is still free to choose."""
    made = RLConfig.from_toml(TOML, max_steps=4, trainer={"optim": {"lr": 1e-5}}, **{"orchestrator.batch_size": 16})
    words = ["@", TOML, "--max-steps", "4", "--trainer.optim.lr", "1e-5", "--orchestrator.batch-size", "16"]
    assert to_toml(made) == to_toml(parse(RLConfig, words, {}))
    direct = RLConfig(max_steps=3, device="cpu", orchestrator=ENVIRONMENT, inference={})
    words = [
        "--max-steps",
        "3",
        "--device",
        "cpu",
        "--orchestrator.environment.id",
        "reverse-text",
        "--inference",
        "{}",
    ]
    for config in (direct, RLConfig.from_toml(max_steps=3, device="cpu", orchestrator=ENVIRONMENT, inference={})):
        assert to_toml(config) == to_toml(parse(RLConfig, words, {}))
        assert "port" not in config.inference.server.model_fields_set
    with pytest.raises(ConfigError, match=r"unknown key trainer.optim.lrr \(argument trainer\); did you mean"):
        RLConfig.from_toml(TOML, trainer={"optim": {"lrr": 1}})
    with pytest.raises(ValueError, match="settings of trainer would not be shared: give a dict"):
        RLConfig(orchestrator=ENVIRONMENT, trainer=made.trainer)


def test_a_run_that_cannot_work_is_refused(tmp_path: Path) -> None:
    """Contract: as `rl` refuses it, before anything starts or is written."""
    config = RLConfig(output_dir=tmp_path / "run", orchestrator={"environment": {"id": "no-such-environment"}})
    with pytest.raises(UserError, match="environment no-such-environment is not installed"):
        run(config)
    assert not config.output_dir.exists()


def test_where_a_benchmark_is_and_that_an_evaluation_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: `run` returns the directory that is written; Ctrl-C is no mistake of the user's."""
    monkeypatch.setattr(api.launch, "run", lambda config: 0)
    config = RLConfig(bench=True, output_dir=tmp_path, orchestrator=ENVIRONMENT)
    assert run(config).directory == tmp_path / "bench"
    monkeypatch.setattr(api.Supervisor, "run", lambda self: RunOutcome.INTERRUPTED)
    with pytest.raises(KeyboardInterrupt):
        evaluate(Server("http://localhost:1/v1", "m"), ["reverse-text"])


@pytest.mark.parametrize(
    ("status", "running", "problem"),
    [(401, "orchestrator", "refuses the key: set VLLM_API_KEY"), (None, "inference", "does not answer .*again")],
)
def test_no_second_server_beside_that_of_a_run(
    status: int | None, running: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: a server that refuses the key, or is too busy to answer, is said."""

    def get(url: str, **_: object) -> httpx.Response:
        if status is None:
            raise httpx.ReadTimeout("timed out")
        return httpx.Response(status)

    config = from_files(OrchestratorConfig, **ENVIRONMENT, output_dir=tmp_path)
    write_toml(config, tmp_path / "configs" / "orchestrator.toml")
    monkeypatch.setattr(httpx, "get", get)
    monkeypatch.setattr("prime_rl.monitor.run_directory.running_processes", lambda directory: {running})
    with pytest.raises(UserError, match=problem), serve(open_run(tmp_path)):
        pass


def test_settings_are_not_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: the run's own server takes no settings: they are refused, by name."""
    (tmp_path / "configs").mkdir()
    monkeypatch.setattr(api, "_server_of", lambda run: Server("http://localhost:1/v1", "m"))
    with serve(open_run(tmp_path)) as server:
        assert server.model == "m"
    with pytest.raises(UserError, match="the run's server, is used: leave out max_model_len"):
        with serve(open_run(tmp_path), max_model_len=256):
            pass


def commit_samples(directory: Path, step: int, rewards: list[float]) -> None:
    tokens = {"input_ids": [1, 2], "loss_mask": [False, True], "logprobs": [0.0, -1.0], "advantages": [0.0, 1.0]}
    rows = [Sample(f"{step}.{n}", "g", "t", "e", [step], **tokens, temperature=1.0, reward=reward)
            for n, reward in enumerate(rewards)]  # fmt: skip
    write_batch(directory / "rollouts", step, rows)


def write_metrics(directory: Path, process: str, *rows: dict[str, float]) -> None:
    path = directory / "metrics" / f"{process}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("place", ["outputs", "outputs/tenants/alice"])
def test_a_run_is_read_while_it_is_written(tmp_path: Path, place: str) -> None:
    """Contract: what is committed is seen, and nothing else; a line that was cut short and a directory that is being
    written are passed over; a step that was pruned is refused with those that are there."""
    directory = tmp_path / place
    (directory / "configs").mkdir(parents=True)
    (directory / "configs" / "trainer.toml").write_text('max_steps = 3\n[model]\nname = "m"\n')
    opened = open_run(directory)
    assert (opened.steps, opened.running, opened.evals.num_rows) == ([], [], 0)
    for look, problem in (
        (opened.samples, "outputs.*: no samples are kept here: none are committed yet"),
        (opened.metrics, r"no metrics of trainer \(there: none yet\)"),
    ):
        with pytest.raises(UserError, match=problem):
            look()
    write_metrics(directory, "trainer", {"step": 0, "loss": 1}, {"step": 1, "loss": 0.5, "entropy": 2.0})
    write_metrics(directory, "orchestrator", {"step": 0, "eval/e/avg@1": 0.25}, {"step": 0, "reward/mean": 0.5})
    with (directory / "metrics" / "trainer.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    for step in (1, 2):
        commit_samples(directory, step, [0.0, float(step)])
    (directory / "rollouts" / ".step_3.tmp-abc").mkdir()
    assert opened.config == {"trainer": {"max_steps": 3, "model": {"name": "m"}}}
    assert opened.metrics().to_pydict() == {"step": [0, 1], "loss": [1.0, 0.5], "entropy": [None, 2.0]}
    assert opened.evals.to_pylist() == [{"step": 0, "eval/e/avg@1": 0.25}]
    assert opened.steps == [1, 2]
    assert opened.samples()["reward"].to_pylist() == [0.0, 2.0]
    write_token_stats(directory, 1, 0, ["1.1"], [1], np.array([[0.25], [2.0]]))
    trained = opened.samples(step=1).select(["sample_id", "log_ratios", "entropies"])
    assert [[*row.values()] for row in trained.to_pylist()] == [["1.0", None, None], ["1.1", [0.25], [2.0]]]
    with pytest.raises(UserError, match="step 0 was removed: samples are kept of 2 steps, 1 to 2"):
        opened.samples(step=0)
    for step in (-1, 3):
        with pytest.raises(UserError, match=f"step {step} has no samples: the last committed step is 2"):
            opened.samples(step=step)
    file = directory / "rollouts" / "step_1" / "samples.arrow"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"step_1/samples\.arrow has \d+ bytes, the manifest says"):
        opened.samples(step=1)


def test_weights_are_the_newest_with_files(tmp_path: Path, tiny_model: Path) -> None:
    """Contract: a version in the trainer's memory alone is passed over, a damaged one is not; the base model stands for
    version 0; of a deployment the tenants are named."""
    root = tmp_path / "weights"
    (tmp_path / "tenants" / "alice").mkdir(parents=True)
    with pytest.raises(UserError, match="holds no run"):
        open_run(tmp_path)
    root.mkdir()
    with pytest.raises(UserError, match=r"has no weights; those of its tenants are in .*alice"):
        _ = open_run(tmp_path).weights
    write_base_version(root, tiny_model)
    assert open_run(tmp_path).weights == tiny_model.resolve()
    written = commit_weights(root, 1, lambda path: save_file({}, path / "model.safetensors"))
    extra = manifest_extra(2, 0, {}, publisher=PublisherAddress("localhost", 1, "t", 1.0))
    with stage(step_dir(root, 2), step=2, producer="trainer", extra=extra):
        pass
    assert open_run(tmp_path).weights == written
    (root / "step_2" / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"step_2/manifest\.json cannot be read"):
        _ = open_run(tmp_path).weights


def test_a_server_is_as_the_one_of_the_run(tmp_path: Path) -> None:
    """Contract: of a model, and of an adapter beside its base model; a tenant's as that of its deployment. What was for
    the run alone is left out."""
    tenant = tmp_path / "run" / "tenants" / "alice"
    (tmp_path / "run" / "configs").mkdir(parents=True)
    lines = ('max_model_len = 256', 'replica = 1', '[server]', 'port = 8001', '[model]', 'name = "base"',
             '[lora]', 'max_rank = 64', '[lora.tenants]', 'slots = 2')  # fmt: skip
    (tmp_path / "run" / "configs" / "inference.toml").write_text("\n".join(lines))
    adapter, more = tenant / "weights" / "step_1", {"seed": 5}
    adapter.mkdir(parents=True)
    for directory in (tmp_path / "run", tenant):
        config = _inference_config(tmp_path / "model", directory, tmp_path / "out", more)
        assert (config.model.name, config.lora, config.replica) == (str(tmp_path / "model"), None, 0)
        assert (config.max_model_len, config.seed, config.output_dir) == (256, 5, tmp_path / "out")
        assert config.server.port != 8001
    described: dict[str, Any] = {"peft_type": "LORA", "r": 8, "base_model_name_or_path": "base"}
    (adapter / ADAPTER_CONFIG).write_text(json.dumps(described))
    config = _inference_config(adapter, tenant, tmp_path / "out", more)
    assert config.lora is not None
    assert (config.model.name, config.lora.max_rank, config.lora.tenants) == ("base", 8, None)
