"""Contract: how options are written, for every kind of setting."""

from pathlib import Path

import pytest

from prime_rl.config import (
    ConfigError,
    EvalConfig,
    InferenceConfig,
    OrchestratorConfig,
    RLConfig,
    TrainerConfig,
    parse,
)
from prime_rl.config.orchestrator import TrainingEnv
from prime_rl.config.trainer import AdamW, GRPOLoss, LinearScheduler, Muon
from support.configs import ENV


@pytest.mark.parametrize(
    "argv",
    [
        ["--model.trust-remote-code", "--max-steps", "5"],
        ["--model.trust_remote_code", "--max_steps", "5"],
        ["--model.trust-remote-code=true", "--max-steps=5"],
        ["--model.trust-remote-code", "True", "--max_steps=5"],
    ],
)
def test_kebab_snake_and_equals_are_the_same(argv: list[str]) -> None:
    config = parse(TrainerConfig, argv, {})
    assert (config.model.trust_remote_code, config.max_steps) == (True, 5)


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--filter-zero-advantage"], True),
        (["--no-filter-zero-advantage"], False),
        (["--filter-zero-advantage", "false"], False),
        (["--filter-zero-advantage=False"], False),
        (["--no-filter-zero-advantage", "--filter-zero-advantage"], True),
        ([], True),
    ],
)
def test_flags(argv: list[str], value: bool) -> None:
    assert parse(OrchestratorConfig, [*ENV, *argv], {}).filter_zero_advantage is value


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        ([], None),
        (["--model.compile"], True),
        (["--model.no-compile"], False),
        (["--no-model.compile"], False),
        (["--model.compile", "None"], None),
        (["--model.compile", "false"], False),
    ],
)
def test_flags_that_may_be_null(argv: list[str], value: bool | None) -> None:
    config = parse(TrainerConfig, [*argv, "--seed", "1"], {})
    assert (config.model.compile, config.seed) == (value, 1)


def test_optional_sections(tmp_path: Path) -> None:
    """A bare option or an empty table switches on with defaults, --no-… and "None" off, a setting within switches on."""
    on, empty, off = (tmp_path / f"{name}.toml" for name in ("on", "empty", "off"))
    on.write_text("[ckpt]\ninterval = 7")
    empty.write_text("[ckpt]")
    off.write_text('ckpt = "None"')

    def interval(*argv: str) -> int | None:
        ckpt = parse(TrainerConfig, list(argv), {}).ckpt
        return ckpt.interval if ckpt else -1

    assert interval() == -1
    assert interval("--ckpt") == 50
    assert interval("--ckpt.interval", "5") == 5
    assert interval("@", str(empty)) == 50
    assert interval("@", str(on)) == 7
    assert interval("@", str(on), "--ckpt") == 7
    assert interval("@", str(on), "--no-ckpt") == -1
    assert interval("@", str(on), "--ckpt", "None") == -1
    assert interval("@", str(on), "@", str(off)) == -1
    assert interval("@", str(off), "--ckpt") == 50
    assert interval("@", str(off), "--ckpt.interval", "5") == 5
    assert interval("--ckpt.interval", "5", "--no-ckpt") == -1
    assert interval("--no-ckpt", "--ckpt.interval", "5") == 5


def test_none_is_null_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text('max_steps = "None"\n[optim]\nmax_norm = "None"')
    config = parse(TrainerConfig, ["@", str(path)], {"PRIME_OPTIM__MAX_NORM": "1"})
    assert (config.max_steps, config.optim.max_norm) == (None, None)
    assert parse(TrainerConfig, ["--optim.max-norm", "None"], {}).optim.max_norm is None
    assert parse(TrainerConfig, ["--no-optim.max-norm"], {}).optim.max_norm is None
    vllm = parse(InferenceConfig, ["--vllm", '{"a": ["None", {"b": "None"}]}', "--vllm.c", "None"], {}).vllm
    assert vllm == {"a": [None, {"b": None}], "c": None}


def test_unions_choose_by_type_and_keep_the_default_type_without_one() -> None:
    assert parse(TrainerConfig, ["--loss.type", "grpo", "--loss.clip-high", "0.3"], {}).loss == GRPOLoss(clip_high=0.3)
    assert parse(TrainerConfig, ["--optim.lr", "1e-3"], {}).optim == AdamW(lr=1e-3)
    assert parse(TrainerConfig, ["--optim.type", "muon", "--optim.momentum", "0.9"], {}).optim == Muon(momentum=0.9)
    assert parse(TrainerConfig, ["--loss.kl-tau", "0"], {}).loss.type == "default"
    scheduler = ["--scheduler.type", "linear", "--scheduler.decay-steps", "3", "--max-steps", "20"]
    assert parse(TrainerConfig, scheduler, {}).scheduler == LinearScheduler(decay_steps=3)


@pytest.mark.parametrize(
    "argv",
    [
        ["--environment-ids", "a", "b"],
        ["--environment-ids", "a,b"],
        ["--environment-ids=a,b"],
        ["--environment-ids", '["a", "b"]'],
        ["--environment-ids", "a", "b", "--seed", "1"],
        ["--environments", '[{"id": "a"}, {"id": "b"}]'],
    ],
)
def test_lists(argv: list[str]) -> None:
    assert [environment.id for environment in parse(EvalConfig, argv, {}).environments] == ["a", "b"]


def test_items_of_a_list_of_tables_have_options(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text('[[environments]]\nid = "a"\nratio = 2\n[[environments]]\nid = "b"')
    argv = ["@", str(path), "--environments.0.id", "z", "--environments.1.args.k", "3", "--environments.2.id", "c"]
    environments = parse(OrchestratorConfig, argv, {}).environments
    assert [(e.id, e.ratio, e.args) for e in environments] == [("z", 2, {}), ("b", 1, {"k": 3}), ("c", 1, {})]
    nested = parse(RLConfig, ["--orchestrator.environments.0.id", "x"], {})
    assert [environment.id for environment in nested.orchestrator.environments] == ["x"]
    with pytest.raises(ConfigError, match=r"--environments.5.id: there are 2 of environments"):
        parse(OrchestratorConfig, ["@", str(path), "--environments.5.id", "c"], {})


@pytest.mark.parametrize("table", ["{'micro_batch_size': 8}", '{"micro_batch_size": 8}'])
def test_sections_as_json_or_python_literal(table: str) -> None:
    fake = parse(TrainerConfig, ["--data.fake", table], {}).data.fake
    assert fake is not None
    assert (fake.micro_batch_size, fake.batch_size) == (8, 128)


def test_dict_settings() -> None:
    """Keys of a dict are options too; values are JSON or Python literals where they can be, text otherwise."""
    argv = "--vllm.max-num-seqs|4|--vllm.name|some/name|--vllm.on|--vllm.deep.list|[1, 2]|--vllm.t|(1,2)"
    assert parse(InferenceConfig, argv.split("|"), {}).vllm == {
        "max_num_seqs": 4,
        "name": "some/name",
        "on": True,
        "deep": {"list": [1, 2]},
        "t": [1, 2],
    }
    assert parse(OrchestratorConfig, [*ENV, "--environment.args", "{'n': None, 'x': True}"], {}).environments[
        0
    ].args == {
        "n": None,
        "x": True,
    }


def test_what_a_file_could_not_hold_stays_text() -> None:
    assert parse(InferenceConfig, ["--vllm.x", "{1, 2}", "--vllm.y", "b'1'"], {}).vllm == {"x": "{1, 2}", "y": "b'1'"}


def test_text_settings_are_not_read_as_numbers() -> None:
    assert parse(TrainerConfig, ["--model.name", "1234", "--monitor.wandb.id", "0042"], {}).monitor.wandb.id == "0042"  # type: ignore[union-attr]


def test_transports_of_weights() -> None:
    """Contract: chosen by what is there unless something is asked for; what would fill the memory, or has no effect, is refused."""
    assert parse(TrainerConfig, [], {}).weights.transport == "auto"
    weights = parse(TrainerConfig, ["--weights.transport", "filesystem", "--weights.tmpfs", "/dev/shm"], {}).weights
    assert (weights.transport, weights.tmpfs) == ("filesystem", Path("/dev/shm"))
    with pytest.raises(ConfigError, match="keep None keeps all versions, which /dev/shm has no room for"):
        parse(TrainerConfig, ["--weights.keep", "None", "--weights.tmpfs", "/dev/shm"], {})
    with pytest.raises(ConfigError, match="tmpfs is for files, and transport memory writes none"):
        parse(TrainerConfig, ["--weights.transport", "memory", "--weights.tmpfs", "/dev/shm"], {})
    with pytest.raises(ConfigError, match="must be 'auto', 'filesystem' or 'memory'"):
        parse(TrainerConfig, ["--weights.transport.type", "process-group"], {})


def test_environments_in_short() -> None:
    """Contract: ids with commas add environments of the right kind wherever there are some; versions in ids are no config files."""
    config = parse(OrchestratorConfig, ["--environment-ids", "wordle,owner/alphabet-sort@1.0"], env={})
    assert [env.name for env in config.environments] == ["wordle", "owner/alphabet-sort@1.0"]
    assert all(isinstance(env, TrainingEnv) for env in config.environments)
    assert config.environment_ids == []
    more = parse(EvalConfig, ["--environment.id", "wordle", "--environment-ids", "math500", "aime24"], env={})
    assert [env.id for env in more.environments] == ["wordle", "math500", "aime24"]


def test_unsafe_is_for_what_runs_code() -> None:
    """Contract: it reaches that environment alone, and is refused where there is none."""
    config = parse(EvalConfig, ["--environment-ids", "math500,owner/livecodebench@1", "--unsafe"], env={})
    assert [env.args for env in config.environments] == [{}, {"unsafe": True}]
    with pytest.raises(ConfigError, match="unsafe is about livecodebench, which is not evaluated"):
        parse(EvalConfig, ["--environment-ids", "math500", "--unsafe"], env={})
