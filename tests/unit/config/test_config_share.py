"""Contract: what processes share is given once, reaches every section that needs it, and cannot be contradicted."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from prime_rl.config import (
    ConfigError,
    EvalConfig,
    InferenceConfig,
    OrchestratorConfig,
    RLConfig,
    SFTConfig,
    TrainerConfig,
    load,
    parse,
    write_toml,
)
from prime_rl.config.base import BaseConfig
from prime_rl.config.loader import resolve
from prime_rl.config.shared import ClientConfig

ORCH = ["--orchestrator.environment.id", "x"]


def rl(*argv: str) -> RLConfig:
    return parse(RLConfig, [*ORCH, *argv], {})


def problem(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        rl(*argv)
    (line,) = caught.value.problems
    return line


def value(config: BaseConfig, key: str) -> object:
    here: object = config
    for part in key.split("."):
        here = getattr(here, part)
    return here


EVERYWHERE = ("trainer", "orchestrator", "inference")
PAIR = ("trainer", "orchestrator")
SHARED = [
    ("output_dir", "elsewhere", "other", Path("elsewhere"), EVERYWHERE),
    ("seed", "4", "5", 4, EVERYWHERE),
    ("log.level", "debug", "warning", "debug", EVERYWHERE),
    ("device", "cpu", "cuda", "cpu", ("trainer", "inference")),
    ("model.name", "some/model", "other/model", "some/model", EVERYWHERE),
    ("max_steps", "20", "30", 20, PAIR),
    ("async_level", "2", "3", 2, PAIR),
    ("ckpt.interval", "5", "6", 5, PAIR),
    ("ckpt.keep", "3", "4", 3, PAIR),
    ("ckpt.resume_step", "10", "11", 10, PAIR),
    ("ckpt.output_dir", "there", "else", Path("there"), PAIR),
    ("seq_len", "512", "1024", 512, PAIR),
]


@pytest.mark.parametrize(("key", "text", "_other", "expected", "sections"), SHARED)
@pytest.mark.parametrize("places", [("top",), ("section",), ("top", "section")])
def test_a_shared_setting_reaches_every_section_and_the_top(
    places: tuple[str, ...], key: str, text: str, _other: str, expected: object, sections: tuple[str, ...]
) -> None:
    """Given at the top, in one section, or the same in both."""
    given = {"top": [f"--{key}", text], "section": [f"--{sections[0]}.{key}", text]}
    config = rl("--inference", *(word for place in places for word in given[place]))
    for place in (*(f"{section}.{key}" for section in sections), *([] if key == "seq_len" else [key])):
        assert value(config, place) == expected


@pytest.mark.parametrize(("key", "text", "other", "_expected", "sections"), SHARED)
@pytest.mark.parametrize("at_top", [True, False])
def test_different_values_are_an_error_that_names_both(
    at_top: bool, key: str, text: str, other: str, _expected: object, sections: tuple[str, ...]
) -> None:
    if key == "seq_len" and not at_top:
        return  # see test_micro_batches_may_be_longer_than_samples
    one, two = key if at_top else f"{sections[0]}.{key}", f"{sections[-1]}.{key}"
    line = problem("--inference", f"--{one}", text, f"--{two}", other)
    assert f"{two} is {other} but {one} is {text}" in line
    assert f"{one}: --{one}" in line
    assert f"{two}: --{two}" in line


def test_micro_batches_may_be_longer_than_samples() -> None:
    config = rl("--trainer.seq-len", "4096", "--orchestrator.seq-len", "1024")
    assert (config.seq_len, config.trainer.seq_len, config.orchestrator.seq_len) == (None, 4096, 1024)


def test_a_contradiction_between_files_names_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And an option of the top or of any section decides it."""
    monkeypatch.chdir(tmp_path)
    Path("train.toml").write_text("\nmax_steps = 20")
    Path("orch.toml").write_text("max_steps = 30")
    files = ("--trainer", "@", "train.toml", "--orchestrator", "@", "orch.toml")
    line = problem(*files)
    assert "decide by --max-steps" in line
    assert "trainer.max_steps: train.toml, line 2" in line
    assert "orchestrator.max_steps: orch.toml, line 1" in line
    for option in ("--max-steps", "--trainer.max-steps", "--orchestrator.max-steps"):
        config = rl(*files, option, "5")
        assert (config.max_steps, config.trainer.max_steps, config.orchestrator.max_steps) == (5, 5, 5)


SOURCES = ("variable", "file", "option")


@pytest.mark.parametrize(("key", "text", "other", "expected", "sections"), SHARED)
@pytest.mark.parametrize("at_top", [True, False])
@pytest.mark.parametrize(("weaker", "stronger"), [(0, 1), (0, 2), (1, 2)])
def test_the_stronger_source_wins_between_the_top_and_a_section(
    tmp_path: Path,
    weaker: int,
    stronger: int,
    at_top: bool,
    key: str,
    text: str,
    other: str,
    expected: object,
    sections: tuple[str, ...],
) -> None:
    """Contract: option over file over variable, also where the two stand in different places; the winner counts everywhere."""
    places = [key, f"{sections[-1]}.{key}"] if at_top else [f"{sections[-1]}.{key}", key]
    argv, env = ["--inference", *ORCH], {}
    for place, kind, given in zip(places, (SOURCES[stronger], SOURCES[weaker]), (text, other), strict=True):
        if kind == "variable":
            env["PRIME_" + place.upper().replace(".", "__")] = given
        elif kind == "option":
            argv += [f"--{place}", given]
        else:
            file = tmp_path / "run.toml"
            file.write_text(f"{place} = {given if given.isdigit() else repr(given)}")
            argv += ["@", str(file)]
    config = parse(RLConfig, argv, env)
    for section in sections:
        assert value(config, f"{section}.{key}") == expected


@pytest.mark.parametrize("files", [("top", "section"), ("section", "top")])
def test_a_later_file_wins_wherever_the_setting_stands(tmp_path: Path, files: tuple[str, str]) -> None:
    """As it does for the same key. A file for one section is beside the last of them: there neither wins."""
    (tmp_path / "top").write_text("max_steps = 1")
    (tmp_path / "section").write_text("trainer.max_steps = 2")
    config = rl(*(token for name in files for token in ("@", str(tmp_path / name))))
    assert config.max_steps == config.orchestrator.max_steps == (2 if files[-1] == "section" else 1)
    (tmp_path / "train").write_text("max_steps = 3")
    assert "max_steps is 3" in problem("@", str(tmp_path / "top"), "--trainer", "@", str(tmp_path / "train"))


def test_what_a_stronger_source_replaced_is_not_named_in_errors(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text("max_steps = 20\n[ckpt]\nresume_step = 10")
    line = problem("--trainer", "@", str(tmp_path / "train.toml"), "--max-steps", "5")
    assert "max_steps: --max-steps" in line
    assert f"ckpt.resume_step: {tmp_path / 'train.toml'}, line 3" in line


def test_lengths_that_an_option_gives_one_section(tmp_path: Path) -> None:
    """Over files that give every section its own it concerns that section; over the top of a file it is the length."""
    (tmp_path / "run.toml").write_text("seq_len = 256")
    top = rl("@", str(tmp_path / "run.toml"), "--trainer.seq-len", "512")
    assert (top.trainer.seq_len, top.orchestrator.seq_len) == (512, 512)
    (tmp_path / "run.toml").write_text("[trainer]\nseq_len = 256\n[orchestrator]\nseq_len = 256")
    own = rl("@", str(tmp_path / "run.toml"), "--trainer.seq-len", "512")
    assert (own.trainer.seq_len, own.orchestrator.seq_len) == (512, 256)


def test_a_stronger_source_switches_checkpoints_on_and_off(tmp_path: Path) -> None:
    on, off = tmp_path / "on.toml", tmp_path / "off.toml"
    on.write_text("[ckpt]\ninterval = 3")
    off.write_text('ckpt = "None"')
    for place in ("ckpt", "orchestrator.ckpt"):
        *section, name = place.split(".")
        config = rl("--trainer", "@", str(on), f"--{'.'.join([*section, f'no-{name}'])}")
        assert (config.ckpt, config.trainer.ckpt, config.orchestrator.ckpt) == (None, None, None)
        config = rl("--trainer", "@", str(off), f"--{place}.keep", "2")
        assert config.ckpt is not None
        assert config.ckpt == config.trainer.ckpt == config.orchestrator.ckpt
    assert parse(RLConfig, [*ORCH, "@", str(on)], {"PRIME_ORCHESTRATOR__CKPT": "false"}).orchestrator.ckpt is not None
    assert "ckpt is on but trainer.ckpt is off" in problem("@", str(on), "--trainer", "@", str(off))


def test_wandb_of_a_stronger_source(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text('[monitor.wandb]\nproject = "p"\nname = "n"')
    file = ("--trainer", "@", str(tmp_path / "train.toml"))
    config = rl(*file, "--wandb.name", "run")
    trainer, orchestrator = config.trainer.monitor.wandb, config.orchestrator.monitor.wandb
    assert trainer is not None
    assert orchestrator is not None
    assert (trainer.project, trainer.name, orchestrator.name) == ("p", "run-trainer", "run-orchestrator")
    assert rl(*file, "--no-wandb").trainer.monitor.wandb is None
    (tmp_path / "run.toml").write_text('[wandb]\nproject = "p"')
    config = rl("@", str(tmp_path / "run.toml"), "--trainer.monitor.wandb.project", "q")
    assert config.trainer.monitor.wandb is not None
    assert config.orchestrator.monitor.wandb is not None
    assert (config.trainer.monitor.wandb.project, config.orchestrator.monitor.wandb.project) == ("q", "p")
    config = rl("@", str(tmp_path / "run.toml"), "--trainer.monitor.no-wandb")
    assert (config.trainer.monitor.wandb, config.orchestrator.monitor.wandb is None) == (None, False)


@pytest.mark.parametrize(
    "argv",
    [["--trainer.monitor.wandb.project", "q"], ["--trainer.monitor.no-wandb"], ["--trainer.monitor.wandb.id", "i"]],
)
def test_a_monitor_of_its_own_is_written_and_fed_back(tmp_path: Path, argv: list[str]) -> None:
    """Contract: the run's own file gives the same run, where a section differs from the top by a stronger source, too."""
    (tmp_path / "run.toml").write_text('[wandb]\nproject = "p"\nname = "n"')
    config = rl("@", str(tmp_path / "run.toml"), *argv)
    write_toml(config, tmp_path / "resolved.toml")
    assert parse(RLConfig, ["@", str(tmp_path / "resolved.toml")], {}) == config


@pytest.mark.parametrize(
    ("orch", "infer", "option", "text", "url", "port"),
    [
        ("http://localhost:1", "port = 2", "--inference.server.port", "3", "http://localhost:3/v1", 3),
        ("http://localhost:1", "port = 2", "--orchestrator.client.base-url", "http://localhost:3", "http://localhost:3", 3),
        ("http://far:1", "port = 2", "--inference.server.port", "3", "http://localhost:3/v1", 3),
        ("http://far:1", 'host = "here"', "--inference.server.host", "there", "http://there:8000/v1", 8000),
        ("http://localhost:1", "", "--inference.server.host", "0.0.0.0", "http://localhost:1", 1),
    ],
)  # fmt: skip
def test_the_stronger_source_gives_the_address(
    tmp_path: Path, orch: str, infer: str, option: str, text: str, url: str, port: int
) -> None:
    (tmp_path / "run.toml").write_text(f'[orchestrator.client]\nbase_url = "{orch}"\n[inference.server]\n{infer}')
    config = rl("@", str(tmp_path / "run.toml"), option, text)
    assert config.inference is not None
    assert (config.orchestrator.client.base_url, config.inference.server.port) == (url, port)


def test_a_shared_setting_given_beside_the_resolved_file_reaches_every_section(tmp_path: Path) -> None:
    """`rl @ outputs/configs/rl.toml --max-steps 60`: one option changes what stands in the file for every section."""
    options = "--inference.server.port 8123 --max-steps 30 --seed 4 --ckpt.interval 5 --seq-len 512"
    first = rl(*options.split())
    file = tmp_path / "rl.toml"
    write_toml(first, file)
    assert parse(RLConfig, ["@", str(file)], {}) == first
    options = "--max-steps 60 --output-dir elsewhere --ckpt.interval 7 --inference.server.port 8124"
    longer = parse(RLConfig, ["@", str(file), *options.split()], {})
    assert longer.trainer.max_steps == longer.orchestrator.max_steps == 60
    assert {longer.trainer.output_dir, longer.orchestrator.output_dir} == {Path("elsewhere")}
    assert longer.trainer.ckpt is not None
    assert longer.trainer.ckpt.interval == 7
    assert longer.orchestrator.client.base_url == "http://localhost:8124/v1"
    assert longer.trainer.seed == 4


def test_the_debug_files_make_a_run_once_they_share_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: what they say for each process alone (a directory each, random samples) is decided, or left out with a hint."""
    monkeypatch.chdir(Path(__file__).parents[3])
    files = [("trainer", "train"), ("orchestrator", "orch"), ("inference", "infer")]
    argv = [token for section, name in files for token in (f"--{section}", "@", f"examples/debug/rl/{name}.toml")]
    with pytest.raises(ConfigError, match="decide by --output-dir"):
        parse(RLConfig, argv, {})
    config, (fake, trainer) = resolve(RLConfig, [*argv, "--output-dir", "x"], {})
    assert config.trainer.output_dir == Path("x")
    assert config.trainer.data.fake is None
    assert fake.startswith("trainer.data.fake (examples/debug/rl/train.toml, line ")
    assert trainer.startswith("orchestrator.trainer is left out")


def test_wandb_reaches_both_monitors_under_names_of_their_own() -> None:
    argv = ["--wandb.project", "p", "--wandb.name", "run", "--wandb.id", "abc", "--wandb.dir", "w", "--wandb.offline"]
    config = rl(*argv)
    for section in (config.trainer, config.orchestrator):
        wandb = section.monitor.wandb
        assert wandb is not None
        assert (wandb.project, wandb.dir, wandb.offline) == ("p", Path("w"), True)
    assert config.trainer.monitor.wandb.name == "run-trainer"  # type: ignore[union-attr]
    assert config.orchestrator.monitor.wandb.name == "run-orchestrator"  # type: ignore[union-attr]
    assert config.trainer.monitor.wandb.id == "abc-trainer"  # type: ignore[union-attr]
    assert rl("--wandb").trainer.monitor.wandb.name is None  # type: ignore[union-attr]


def test_clean_of_a_section_is_that_of_the_run() -> None:
    assert rl("--trainer.clean").clean


def test_wandb_of_one_process_alone_stays_there() -> None:
    config = rl("--trainer.monitor.wandb.project", "p")
    assert config.trainer.monitor.wandb is not None
    assert config.orchestrator.monitor.wandb is None


def test_wandb_contradicted() -> None:
    line = problem("--wandb.project", "p", "--trainer.monitor.wandb.project", "q")
    assert "trainer.monitor.wandb.project is q but wandb.project is p" in line


@pytest.mark.parametrize(
    ("argv", "states"),
    [
        (["--wandb.project", "p", "--trainer.monitor.wandb", "None"], ("on", "off")),
        (["--no-wandb", "--trainer.monitor.wandb"], ("off", "on")),
    ],
)
def test_wandb_on_and_off_by_equally_strong_sources(argv: list[str], states: tuple[str, str]) -> None:
    assert f"wandb is {states[0]} but trainer.monitor.wandb is {states[1]}" in problem(*argv)


@pytest.mark.parametrize(
    ("argv", "url"),
    [
        ([], "http://localhost:8000/v1"),
        (["--inference"], "http://localhost:8000/v1"),
        (["--inference.server.port", "8001"], "http://localhost:8001/v1"),
        (["--inference.server.host", "0.0.0.0"], "http://localhost:8000/v1"),
        (["--inference.server.host", "10.0.0.1"], "http://10.0.0.1:8000/v1"),
        (["--inference.server.host", "fe80::1"], "http://[fe80::1]:8000/v1"),
        (["--orchestrator.client.base-url", "https://far/v1"], "https://far/v1"),
    ],
)
def test_the_client_finds_the_server(argv: list[str], url: str) -> None:
    assert rl(*argv).orchestrator.client.base_url == url


def test_the_server_takes_the_port_of_the_client() -> None:
    config = rl("--inference", "--orchestrator.client.base-url", "http://127.0.0.1:8001")
    assert config.inference is not None
    assert config.inference.server.port == 8001


@pytest.mark.parametrize(
    "argv",
    [
        ["--inference.server.port", "8001", "--orchestrator.client.base-url", "http://localhost:8002/v1"],
        ["--inference", "--orchestrator.client.base-url", "http://10.0.0.1:8000/v1"],
        ["--inference.server.host", "10.0.0.1", "--orchestrator.client.base-url", "http://10.0.0.2:8000"],
    ],
)
def test_client_and_server_that_disagree(argv: list[str]) -> None:
    line = problem(*argv)
    assert line.startswith("orchestrator.client.base_url is http://")
    assert "but inference.server listens on" in line


def test_bench_measures_the_trainer_on_random_samples() -> None:
    config = rl("--bench", "--orchestrator.batch-size", "32")
    assert config.trainer.bench
    assert config.orchestrator.bench
    assert config.trainer.data.fake is not None
    assert config.trainer.data.fake.batch_size == 32
    own = rl("--bench", "--trainer.data.fake.batch-size", "8").trainer.data.fake
    assert own is not None
    assert own.batch_size == 8


def test_dry_run_and_clean_concern_the_launcher_alone() -> None:
    config = rl("--dry-run", "--clean", "--inference")
    assert config.dry_run
    assert config.inference is not None
    assert not any(section.dry_run for section in (config.trainer, config.orchestrator, config.inference))


def test_sections_made_in_python_share_as_well() -> None:
    config = RLConfig(
        max_steps=5,
        trainer=TrainerConfig(seed=3),
        orchestrator=OrchestratorConfig.model_validate({"environment": {"id": "x"}}),
        inference=InferenceConfig(),
    )
    assert config.inference is not None
    assert (config.orchestrator.max_steps, config.orchestrator.seed, config.inference.seed) == (5, 3, 3)


def test_environment_and_environments_read_the_same() -> None:
    one = parse(OrchestratorConfig, ["--environment.id", "x", "--environment.args", "{'a': 1}"], {})
    several = parse(OrchestratorConfig, ["--environments", '[{"id": "x", "args": {"a": 1}}]'], {})
    assert one == several
    assert (one.environments[0].name, one.environments[0].args) == ("x", {"a": 1})
    evaluation = parse(OrchestratorConfig, ["--environment.id", "x", "--eval.environment.id", "y"], {}).eval
    assert evaluation is not None
    assert [environment.id for environment in evaluation.environments] == ["y"]


def test_sampling_override() -> None:
    """A partial override changes what it names."""
    argv = ["--environment.id", "x", "--sampling.top-k", "5", "--environment.sampling.temperature", "0.5"]
    config = parse(OrchestratorConfig, argv, {})
    override = config.environments[0].sampling
    assert override is not None
    merged = override.over(config.sampling)
    assert (merged.temperature, merged.top_k, config.sampling.temperature) == (0.5, 5, 1.0)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_base_url_with_and_without_v1(url: str) -> None:
    assert parse(EvalConfig, ["--environment-ids", "x", "--client.base-url", url], {}).client.api_roots == [
        "http://h:1"
    ]


@pytest.mark.parametrize(
    ("urls", "problem"),
    [
        (["http://a:1", "http://a:1/v1/"], "a server is named twice"),
        (["http://localhost:1", "http://127.0.0.1:1"], "a server is named twice"),
        (["http://a", "http://A:80"], "a server is named twice"),
        (["http://a:1", "b:1"], "'b:1' does not start with http"),
        (["http://a:1", "http://u:secret@b:1"], "holds a password"),
        ([], "names no server"),
    ],
)
def test_servers_that_cannot_be_meant(urls: list[str], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        ClientConfig(base_url=urls)


@pytest.mark.parametrize(
    "urls", [["http://u:secret@a:1", "http://u:secret@a:1/v1"], ["http://u:secret@a:1", "http://a:1"], ["ftp://u:secret@a:1"], ["u:secret@a/v1"]]
)  # fmt: skip
def test_no_refusal_of_servers_shows_a_password(urls: list[str]) -> None:
    """Contract: what is refused is named without what must not be shown."""
    with pytest.raises(ValidationError) as refused:
        ClientConfig(base_url=urls)
    assert "secret" not in str([error["msg"] for error in refused.value.errors()])
    with pytest.raises(ConfigError) as shown:
        parse(OrchestratorConfig, ["--environment.id", "x", "--client.base-url", *urls], {})
    assert "secret" not in str(shown.value)
    with pytest.raises(ConfigError) as shown:
        parse(OrchestratorConfig, ["--environment.id", "x", "--reference.base-url", urls[0]], {})
    assert "secret" not in str(shown.value)


def test_a_router_is_none_of_the_servers_behind_it() -> None:
    with pytest.raises(ValidationError, match="not a router"):
        ClientConfig(base_url="http://localhost:1", admin_base_url=["http://127.0.0.1:1/v1", "http://a:1"])


def test_servers_are_named_or_started_not_both() -> None:
    """Contract: it never ignores a server that was named."""
    urls = ("--orchestrator.client.base-url", "http://a:1", "http://b:1")
    assert "names 2 servers, but [inference] starts its own" in problem(*urls, "--inference.max-model-len", "64")
    behind = ("--orchestrator.client.base-url", "http://r:1", "--orchestrator.client.admin-base-url", "http://a:1")
    assert "behind a router, but [inference] starts its own" in problem(*behind, "--inference.max-model-len", "64")


@pytest.mark.parametrize(
    ("cls", "given", "today", "expected"),
    [
        (TrainerConfig, "--exp-id try", "--output-dir outputs/try", Path("outputs/try")),
        (RLConfig, "--ckpt.path there", "--ckpt.output-dir there", Path("there")),
        (
            RLConfig,
            "--orchestrator.client.port 8001",
            "--orchestrator.client.base-url http://localhost:8001/v1",
            "http://localhost:8001/v1",
        ),
        (RLConfig, "--inference.server.port http://localhost:8001", "--inference.server.port 8001", 8001),
    ],
)
def test_older_spellings_work_with_a_hint(
    cls: type[BaseConfig], given: str, today: str, expected: object, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load(cls, [*(ORCH if cls is RLConfig else []), *given.split()], prog="x")
    key = today.split()[0].strip("-").replace("-", "_")
    assert value(config, f"trainer.{key}" if cls is RLConfig and key.startswith("ckpt") else key) == expected
    assert capsys.readouterr().err == f"hint: {given} is an older spelling of {today}\n"


def test_an_older_spelling_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.toml"
    path.write_text("[client]\nport = 8001\n[environment]\nid = 'x'")
    config = load(OrchestratorConfig, ["@", str(path)], prog="orchestrator")
    assert config.client.base_url == "http://localhost:8001/v1"
    assert "client.base_url http://localhost:8001/v1" in capsys.readouterr().err


def test_an_older_spelling_beside_todays_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "x.toml").write_text("[ckpt]\npath = 'a'\noutput_dir = 'b'")
    line = f"ckpt.path and ckpt.output_dir are the same setting, give it once ({path}, line 2)"
    with pytest.raises(ConfigError) as refused:
        parse(TrainerConfig, ["@", str(path)], {})
    assert refused.value.problems == [line]


def test_a_file_for_an_orchestrator_alone_serves_in_a_whole_run(tmp_path: Path) -> None:
    """Contract: `rl` starts a trainer, whatever the orchestrator's own file says of one."""
    (tmp_path / "orch.toml").write_text("trainer = false")
    assert not parse(OrchestratorConfig, ["@", str(tmp_path / "orch.toml"), "--environment.id", "x"], {}).trainer
    assert rl("--orchestrator", "@", str(tmp_path / "orch.toml")).orchestrator.trainer


@pytest.mark.parametrize("kind", [RLConfig, TrainerConfig, OrchestratorConfig, SFTConfig])
def test_what_is_gone_on_with_is_not_cleaned(kind: type[BaseConfig]) -> None:
    """Contract: every command refuses to remove what it is told to resume from."""
    needed = {RLConfig: ORCH, OrchestratorConfig: ["--environment.id", "x"]}.get(kind, [])
    for option in (["--ckpt.resume-step", "2"], *([["--recover"]] if kind is not SFTConfig else [])):
        with pytest.raises(ConfigError, match="clean would remove"):
            parse(kind, [*needed, "--clean", *option], {})
