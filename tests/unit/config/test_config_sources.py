"""Contract: command line > `@` files, later over earlier > PRIME_ variables > defaults; tables merge, the rest is replaced."""

from collections.abc import Callable
from pathlib import Path

import pytest

from prime_rl.config import (
    BaseConfig,
    ConfigError,
    EvalConfig,
    InferenceConfig,
    OrchestratorConfig,
    RLConfig,
    TrainerConfig,
    child_env,
    parse,
)
from prime_rl.config.loader import resolve
from support.configs import CLASSES, ENV, LEAST, ORCH

Write = Callable[[str, str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, text: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    return write


def test_lists_are_replaced_and_tables_merged(write: Write) -> None:
    first = write("a.toml", "[vllm]\none = 1\nlist = [1, 2]\n[vllm.deep]\nkept = 1\nchanged = 1")
    second = write("b.toml", "[vllm]\nlist = [3]\n[vllm.deep]\nchanged = 2")
    config = parse(InferenceConfig, ["@", first, "@", second], {})
    assert config.vllm == {"one": 1, "list": [3], "deep": {"kept": 1, "changed": 2}}
    two, one = write("c.toml", '[[environments]]\nid = "a"\n[[environments]]\nid = "b"'), '[[environments]]\nid = "c"'
    replaced = parse(OrchestratorConfig, ["@", two, "@", write("d.toml", one)], {})
    assert [environment.id for environment in replaced.environments] == ["c"]


def test_another_type_takes_nothing_over_from_the_one_before(write: Write) -> None:
    """Contract: settings of a type that a later source replaces do not end up in the later type, and it is said; those of one source stay."""
    grpo = write("dapo.toml", '[loss]\nclip_high = 0.28\ntype = "grpo"\nnormalization = "group"')
    gspo = write("gspo.toml", '[loss]\ntype = "gspo"\nclip_low = 0.001')
    alone = parse(TrainerConfig, ["@", gspo], {}).loss
    config, (hint,) = resolve(TrainerConfig, ["@", grpo, "@", gspo], {})
    assert config.loss == alone
    assert hint.startswith(
        f"loss.clip_high, loss.normalization set by {grpo} for type 'grpo' is left out: {gspo}, line 2"
    )
    changed, _ = resolve(TrainerConfig, ["@", grpo, "--loss.clip-low", "0.5", "--loss.type", "cispo"], {})
    assert (changed.loss.clip_low, changed.loss.clip_high) == (0.5, 4.0)
    same, hints = resolve(TrainerConfig, ["@", grpo, "--loss.type", "grpo", "--loss.clip-low", "0.1"], {})
    assert (same.loss.clip_low, same.loss.clip_high, hints) == (0.1, 0.28, [])
    assert parse(TrainerConfig, ["@", grpo], {"PRIME_LOSS__TYPE": "gspo"}).loss.type == "grpo"


def test_at_is_accepted_glued_apart_and_anywhere(write: Write) -> None:
    path = write("a.toml", "max_steps = 7")
    for argv in (["@", path], ["@" + path], ["--bench", "@", path], ["--seed", "1", "@" + path, "--bench"]):
        assert parse(TrainerConfig, argv, {}).max_steps == 7


@pytest.mark.parametrize("form", ["apart", "glued", "equals"])
def test_a_section_file_beats_root_files_and_loses_to_options(write: Write, form: str) -> None:
    root = write(
        "root.toml",
        "[trainer]\nrollout_timeout = 1\ndist_timeout = 1\n[trainer.optim]\nlr = 0.1\nbetas1 = 0.1\nbetas2 = 0.1",
    )
    section = write("optim.toml", "lr = 0.2\nbetas1 = 0.2")
    given = {
        "apart": ["--trainer.optim", "@", section],
        "glued": ["--trainer.optim", "@" + section],
        "equals": [f"--trainer.optim=@{section}"],
    }[form]
    config = parse(RLConfig, ["--trainer.optim.betas1", "0.3", *given, "@", root, *ORCH], {})
    optim = config.trainer.optim
    assert (optim.lr, optim.betas1, optim.betas2, config.trainer.dist_timeout) == (0.2, 0.3, 0.1, 1)


def test_a_run_from_three_files(write: Write) -> None:
    """`rl --trainer @ … --orchestrator @ … --inference @ …` reads each file into its section."""
    train = write("train.toml", "max_steps = 20\n[optim]\nlr = 3e-6")
    orch = write("orch.toml", 'batch_size = 32\n[environment]\nid = "reverse-text"')
    infer = write("infer.toml", "[server]\nport = 8005")
    config = parse(RLConfig, ["--trainer", "@", train, "--orchestrator", "@" + orch, "--inference", "@", infer], {})
    assert config.max_steps == config.orchestrator.max_steps == 20
    assert config.trainer.optim.lr == 3e-6
    assert config.inference is not None
    assert config.inference.server.port == 8005
    assert config.orchestrator.client.base_url == "http://localhost:8005/v1"
    assert parse(RLConfig, ["--inference", "@", write("i.toml", ""), *ORCH], {}).inference == InferenceConfig()


def test_a_file_may_include_others_relative_to_itself(write: Write) -> None:
    """`include` is read first, so that the file itself wins, and relative to the file, not to the working directory."""
    write("base/a.toml", "seed = 1\nmax_steps = 1\n[optim]\nlr = 0.1")
    write("base/b.toml", "max_steps = 2")
    thin = write("thin/c.toml", 'include = ["../base/a.toml", "../base/b.toml"]\nseed = 3')
    config = parse(TrainerConfig, ["@", thin], {})
    assert (config.seed, config.max_steps, config.optim.lr) == (3, 2, 0.1)
    assert parse(RLConfig, ["--trainer", "@", thin, *ORCH], {}).trainer.optim.lr == 0.1


def test_includes_that_go_round_are_refused(write: Write) -> None:
    one = write("a.toml", 'include = "b.toml"')
    write("b.toml", 'include = "a.toml"')
    with pytest.raises(ConfigError, match="is a cycle"):
        parse(TrainerConfig, ["@", one], {})


def test_variables_reach_nested_settings() -> None:
    env = {
        "PRIME_MODEL__NAME": "some/model",
        "PRIME_CKPT__INTERVAL": "5",
        "PRIME_BENCH": "true",
        "PRIME_DATA__FAKE": "{'micro_batch_size': 3}",
        "PRIME_MAX_STEPS": "None",
    }
    config = parse(TrainerConfig, [], env)
    assert config.ckpt is not None
    assert config.data.fake is not None
    assert (config.model.name, config.ckpt.interval, config.bench, config.data.fake.micro_batch_size) == (
        "some/model",
        5,
        True,
        3,
    )


def test_variable_values_of_lists_dicts_and_sections() -> None:
    env = {"PRIME_ENVIRONMENT_IDS": "a, b"}
    assert [environment.id for environment in parse(EvalConfig, [], env).environments] == ["a", "b"]
    assert parse(InferenceConfig, [], {"PRIME_VLLM__MAX_NUM_SEQS": "4"}).vllm == {"max_num_seqs": 4}
    assert parse(TrainerConfig, [], {"PRIME_CKPT": "true"}).ckpt is not None
    assert parse(TrainerConfig, [], {"PRIME_CKPT": "false"}).ckpt is None


def test_variables_of_many_items_and_of_older_spellings() -> None:
    names = [f"env{number}" for number in range(12)]
    config = parse(OrchestratorConfig, [], {f"PRIME_ENVIRONMENTS__{n}__ID": name for n, name in enumerate(names)})
    assert [environment.id for environment in config.environments] == names
    assert parse(OrchestratorConfig, ENV, {"PRIME_EXP_ID": "a"}).output_dir == Path("outputs/a")
    parse(TrainerConfig, [], {"PRIME_BENCHMARKS": "x"})


def test_other_programs_variables_are_left_alone() -> None:
    """PRIME_X that names no setting is ignored; PRIME_API_KEY is the account's key although `inference` has an api_key."""
    env = {"PRIME_API_KEY": "secret", "PRIME_TEAM_ID": "t", "PRIME_WHATEVER": "1", "PRIMERL_SEED": "5", "SEED": "6"}
    assert parse(InferenceConfig, [], env) == InferenceConfig()
    assert parse(TrainerConfig, [], env) == TrainerConfig()


def test_the_log_level_variable() -> None:
    assert parse(TrainerConfig, [], {"PRIME_LOG_LEVEL": "DEBUG"}).log.level == "debug"
    assert parse(TrainerConfig, ["--log.level", "info"], {"PRIME_LOG_LEVEL": "debug"}).log.level == "info"


def test_a_child_sees_no_variable_that_was_meant_as_a_setting() -> None:
    """A child gets a complete file; PRIME_TRAINER__SEED, right for `rl`, would be an error in the trainer."""
    env = {"PRIME_TRAINER__SEED": "1", "PRIME_LOG_LEVEL": "debug", "PRIME_VLLM": "{'a': 1}"}
    others = {"PRIME_API_KEY": "k", "PRIME_TEAM_ID": "t", "PATH": "p"}
    assert child_env({**env, **others}, InferenceConfig) == others


LAYERS = ("variable", "first file", "second file", "section file", "option")


@pytest.mark.parametrize("given", range(1, 2 ** len(LAYERS)))
def test_every_combination_of_layers(write: Write, given: int) -> None:
    """Whatever layers set a key, in whatever order they are written, the highest of them counts."""
    chosen = [name for bit, name in enumerate(LAYERS) if given & (1 << bit)]
    number = {name: position + 1 for position, name in enumerate(LAYERS)}
    argv = list(ORCH)
    if "option" in chosen:
        argv += ["--trainer.optim.lr", str(number["option"])]
    if "section file" in chosen:
        argv += ["--trainer.optim", "@", write("section.toml", f"lr = {number['section file']}")]
    for name in ("first file", "second file"):
        if name in chosen:
            argv += ["@", write(f"{name}.toml", f"[trainer.optim]\nlr = {number[name]}")]
    env = {"PRIME_TRAINER__OPTIM__LR": str(number["variable"])} if "variable" in chosen else {}
    assert parse(RLConfig, argv, env).trainer.optim.lr == number[chosen[-1]]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_entrypoint_has_the_common_options(cls: type[BaseConfig]) -> None:
    options = ["--output-dir", "elsewhere", "--seed", "4", "--dry-run", "--log.level", "warning"]
    config = parse(cls, [*LEAST[cls], *options], {})
    assert (config.output_dir, config.seed, config.dry_run, config.log.level) == (Path("elsewhere"), 4, True, "warning")


def test_defaults_that_users_know() -> None:
    """The defaults that COMMANDS promises."""
    config = parse(RLConfig, [*ORCH, "--ckpt", "--wandb", "--inference"], {})
    assert config.inference is not None
    assert config.ckpt is not None
    wandb = config.trainer.monitor.wandb
    assert wandb is not None
    assert config.model.name == "Qwen/Qwen3-0.6B"
    assert config.inference.server.port == 8000
    assert (config.ckpt.interval, config.ckpt.keep) == (50, None)
    assert (wandb.project, wandb.dir) == ("prime-rl", Path("logs"))
    assert config.output_dir == Path("outputs")
    plain = parse(RLConfig, ORCH, {})
    assert plain.ckpt is None
    assert plain.wandb is None
    assert plain.trainer.monitor.wandb is None


@pytest.mark.parametrize("reverse", [False, True])
def test_an_item_of_a_list_comes_after_the_list(reverse: bool) -> None:
    """In whatever order the command line gives them: neither option is lost."""
    options = [["--environments.0.name", "z"], ["--environments", '[{"id": "a"}]']]
    line = [word for option in (options[::-1] if reverse else options) for word in option]
    config = parse(OrchestratorConfig, line, {})
    assert [(env.id, env.name) for env in config.environments] == [("a", "z")]
