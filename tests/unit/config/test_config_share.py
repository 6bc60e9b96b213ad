"""Contract: what processes share is given once, reaches every section that needs it, and cannot be contradicted."""

import re
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
    to_toml,
    write_toml,
)
from prime_rl.config.base import BaseConfig
from prime_rl.config.loader import resolve
from prime_rl.config.shared import ClientConfig
from support.configs import LEAST, ORCH


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
        return  # micro-batches may be longer than samples
    one, two = key if at_top else f"{sections[0]}.{key}", f"{sections[-1]}.{key}"
    line = problem("--inference", f"--{one}", text, f"--{two}", other)
    assert f"{two} is {other} but {one} is {text}" in line
    assert f"{one}: --{one}" in line
    assert f"{two}: --{two}" in line


FILES = {
    "train20": "\nmax_steps = 20\n[ckpt]\nresume_step = 10",
    "orch30": "max_steps = 30",
    "top1": "max_steps = 1",
    "section2": "trainer.max_steps = 2",
    "seq256": "seq_len = 256",
    "own256": "trainer.seq_len = 256\norchestrator.seq_len = 256",
    "alone": "trainer = false",
    "on": "[ckpt]\ninterval = 3",
    "off": 'ckpt = "None"',
    "wandb": '[wandb]\nproject = "p"',
    "monitor": '[monitor.wandb]\nproject = "p"\nname = "n"',
    "near": '[orchestrator.client]\nbase_url = "http://localhost:1"\n[inference.server]\nport = 2',
    "far": '[orchestrator.client]\nbase_url = "http://far:1"\n[inference.server]\nport = 2',
    "here": '[orchestrator.client]\nbase_url = "http://far:1"\n[inference.server]\nhost = "here"',
    "portless": '[orchestrator.client]\nbase_url = "http://localhost:1"\n[inference.server]',
}
GIVEN = """
# Micro-batches may be longer than samples.
--trainer.seq-len 4096 --orchestrator.seq-len 1024
  seq_len=None trainer.seq_len=4096 orchestrator.seq_len=1024
# Over files that give every section its own length an option concerns one; over the top of a file it is the length.
@ seq256 --trainer.seq-len 512
  trainer.seq_len=512 orchestrator.seq_len=512
@ own256 --trainer.seq-len 512
  trainer.seq_len=512 orchestrator.seq_len=256
# A later file wins wherever the setting stands.
@ top1 @ section2
  max_steps=2 trainer.max_steps=2 orchestrator.max_steps=2
@ section2 @ top1
  max_steps=1 trainer.max_steps=1 orchestrator.max_steps=1
# What is for one start concerns the launcher; `rl` starts a trainer whatever the orchestrator's own file says.
--dry-run --trainer.clean --inference
  dry_run=True clean=True trainer.dry_run=False orchestrator.dry_run=False inference.dry_run=False
--orchestrator @ alone
  orchestrator.trainer=True
# Checkpoints are on or off everywhere; a stronger source switches them.
--trainer @ on --no-ckpt
  ckpt=None trainer.ckpt=None orchestrator.ckpt=None
--trainer @ on --orchestrator.no-ckpt
  ckpt=None trainer.ckpt=None orchestrator.ckpt=None
--trainer @ off --ckpt.keep 2
  ckpt.keep=2 trainer.ckpt.keep=2 orchestrator.ckpt.keep=2
--trainer @ off --orchestrator.ckpt.keep 2
  ckpt.keep=2 trainer.ckpt.keep=2 orchestrator.ckpt.keep=2
# W&B has a run for each side, under a name of its own; a section may differ by a stronger source.
--wandb.project p --wandb.name run --wandb.id abc --wandb.dir w --wandb.offline
  trainer.monitor.wandb.project=p trainer.monitor.wandb.dir=w trainer.monitor.wandb.offline=True
  trainer.monitor.wandb.name=run-trainer trainer.monitor.wandb.id=abc-trainer
  orchestrator.monitor.wandb.project=p orchestrator.monitor.wandb.dir=w orchestrator.monitor.wandb.offline=True
  orchestrator.monitor.wandb.name=run-orchestrator orchestrator.monitor.wandb.id=abc-orchestrator
--wandb
  trainer.monitor.wandb.name=None orchestrator.monitor.wandb.name=None
--trainer.monitor.wandb.project p
  trainer.monitor.wandb.project=p orchestrator.monitor.wandb=None
--trainer @ monitor --wandb.name run
  trainer.monitor.wandb.project=p trainer.monitor.wandb.name=run-trainer
  orchestrator.monitor.wandb.name=run-orchestrator
--trainer @ monitor --no-wandb
  trainer.monitor.wandb=None orchestrator.monitor.wandb=None
@ wandb --trainer.monitor.wandb.project q
  trainer.monitor.wandb.project=q orchestrator.monitor.wandb.project=p
@ wandb --trainer.monitor.wandb.id i
  trainer.monitor.wandb.id=i trainer.monitor.wandb.project=p
@ wandb --trainer.monitor.no-wandb
  trainer.monitor.wandb=None orchestrator.monitor.wandb.project=p
# Client and server find each other; the stronger source gives the address.
--seed 1
  orchestrator.client.base_url=http://localhost:8000/v1
--inference.server.port 8001
  orchestrator.client.base_url=http://localhost:8001/v1
--inference.server.host 0.0.0.0
  orchestrator.client.base_url=http://localhost:8000/v1
--inference.server.host 10.0.0.1
  orchestrator.client.base_url=http://10.0.0.1:8000/v1
--inference.server.host fe80::1
  orchestrator.client.base_url=http://[fe80::1]:8000/v1
--orchestrator.client.base-url https://far/v1
  orchestrator.client.base_url=https://far/v1
--inference --orchestrator.client.base-url http://127.0.0.1:8001
  inference.server.port=8001
@ near --inference.server.port 3
  orchestrator.client.base_url=http://localhost:3/v1 inference.server.port=3
@ near --orchestrator.client.base-url http://localhost:3
  orchestrator.client.base_url=http://localhost:3 inference.server.port=3
@ far --inference.server.port 3
  orchestrator.client.base_url=http://localhost:3/v1 inference.server.port=3
@ here --inference.server.host there
  orchestrator.client.base_url=http://there:8000/v1 inference.server.port=8000
@ portless --inference.server.host 0.0.0.0
  orchestrator.client.base_url=http://localhost:1 inference.server.port=1
# A benchmark measures the trainer on random samples.
--bench --orchestrator.batch-size 32
  trainer.bench=True orchestrator.bench=True trainer.data.fake.batch_size=32
--bench --trainer.data.fake.batch-size 8
  trainer.data.fake.batch_size=8
"""
CONTRADICTIONS = """
# File and line are named; what a stronger source replaced is not.
--trainer @ train20 --orchestrator @ orch30
  decide by --max-steps | trainer.max_steps: train20, line 2 | orchestrator.max_steps: orch30, line 1
@ top1 --trainer @ train20
  trainer.max_steps is 20 but max_steps is 1
--trainer @ train20 --max-steps 5
  (max_steps: --max-steps, ckpt.resume_step: train20, line 4)
@ on --trainer @ off
  trainer.ckpt is None but ckpt is on | decide by --ckpt
--wandb.project p --trainer.monitor.wandb.project q
  trainer.monitor.wandb.project is q but wandb.project is p
--wandb.project p --trainer.monitor.wandb None
  wandb is on but trainer.monitor.wandb is off
--no-wandb --trainer.monitor.wandb
  wandb is off but trainer.monitor.wandb is on
--inference.server.port 8001 --orchestrator.client.base-url http://localhost:8002/v1
  orchestrator.client.base_url is http://localhost:8002/v1 but inference.server listens on localhost:8001
--inference --orchestrator.client.base-url http://10.0.0.1:8000/v1
  orchestrator.client.base_url is http://10.0.0.1:8000/v1 but inference.server listens on localhost:8000
--inference.server.host 10.0.0.1 --orchestrator.client.base-url http://10.0.0.2:8000
  orchestrator.client.base_url is http://10.0.0.2:8000 but inference.server listens on 10.0.0.1:8000
# A server that was named is never ignored.
--orchestrator.client.base-url http://a:1 http://b:1 --inference.max-model-len 64
  names 2 servers, but [inference] starts its own
--orchestrator.client.base-url http://r:1 --orchestrator.client.admin-base-url http://a:1 --inference.max-model-len 64
  behind a router, but [inference] starts its own
"""


def rows(text: str) -> list[tuple[str, str]]:
    """Command lines, each with the indented lines below it."""
    return [
        (line, " ".join(below.split())) for line, below in re.findall(r"^([@-].*)\n((?:  .*\n)+)", text, re.MULTILINE)
    ]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("line", "expected"), rows(GIVEN))
def test_what_is_given_reaches_whom_it_concerns(line: str, expected: str) -> None:
    config = rl(*line.split())
    keys = [pair.partition("=")[0] for pair in expected.split()]
    assert " ".join(f"{key}={value(config, key)}" for key in keys) == expected
    write_toml(config, Path("resolved"))  # the run's own file gives the same run, wherever its sections differ
    assert to_toml(parse(RLConfig, ["@", "resolved"], {})) == to_toml(config)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("line", "expected"), rows(CONTRADICTIONS))
def test_a_contradiction_is_one_line(line: str, expected: str) -> None:
    shown = problem(*line.split())
    assert [part for part in expected.split(" | ") if part not in shown] == []


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


def test_a_shared_setting_given_beside_the_resolved_file_reaches_every_section(tmp_path: Path) -> None:
    """`rl @ outputs/configs/rl.toml --max-steps 60`: one option changes what stands in the file for every section."""
    options = "--inference.server.port 8123 --max-steps 30 --seed 4 --ckpt.interval 5 --seq-len 512"
    file = tmp_path / "rl.toml"
    write_toml(rl(*options.split()), file)
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
        (["http://u:secret@a:1", "http://u:secret@a:1/v1"], "holds a password"),
        (["ftp://u:secret@a:1"], "does not start with http"),
        (["u:secret@a/v1"], "does not start with http"),
        ([], "names no server"),
    ],
)
def test_servers_that_cannot_be_meant(urls: list[str], problem: str) -> None:
    """Contract: what is refused is named without what must not be shown."""
    with pytest.raises(ValidationError, match=problem) as refused:
        ClientConfig(base_url=urls)
    assert "secret" not in str([error["msg"] for error in refused.value.errors()])
    for key in ("client", "reference"):
        with pytest.raises(ConfigError) as shown:
            parse(OrchestratorConfig, ["--environment.id", "x", f"--{key}.base-url", *urls], {})
        assert "secret" not in str(shown.value)


def test_a_router_is_none_of_the_servers_behind_it() -> None:
    with pytest.raises(ValidationError, match="not a router"):
        ClientConfig(base_url="http://localhost:1", admin_base_url=["http://127.0.0.1:1/v1", "http://a:1"])


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


@pytest.mark.parametrize("kind", [RLConfig, TrainerConfig, OrchestratorConfig, SFTConfig])
def test_what_is_gone_on_with_is_not_cleaned(kind: type[BaseConfig]) -> None:
    """Contract: every command refuses to remove what it is told to resume from."""
    for option in (["--ckpt.resume-step", "2"], *([["--recover"]] if kind is not SFTConfig else [])):
        with pytest.raises(ConfigError, match="clean would remove"):
            parse(kind, [*LEAST[kind], "--clean", *option], {})
