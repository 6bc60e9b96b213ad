"""Contract: every mistake is one line naming the key, where it came from and the nearest valid key; status 2; all together.

Some more are in docs/reference/config-errors.md.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_rl.config import (
    BaseConfig,
    ConfigError,
    EvalConfig,
    InferenceConfig,
    OrchestratorConfig,
    RLConfig,
    SFTConfig,
    TrainerConfig,
    load,
    parse,
)
from support.configs import ENV, ORCH, command_line

REPOSITORY = Path(__file__).resolve().parents[3]
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        (tmp_path / "x.toml").write_text(text)
        return "x.toml"

    return write


def problems(cls: type[BaseConfig], argv: list[str], env: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(cls, argv, env or {})
    return caught.value.problems


MISTAKES = """
# unknown
$ rl --no-cleen --orchestrator.environment.id x
  --no-cleen names no setting; did you mean --clean?
$ trainer --pp.rank 4
  --pp.rank names no setting
$ trainer --monitor.wandb.id a --orchestrator.monitor.wandb.id b
  --orchestrator.monitor.wandb.id names no setting: only `rl` has a section `orchestrator`; give
  --monitor.wandb.id to the command `orchestrator`
# wrong values
$ trainer --optim.lr true
  optim.lr: must be a valid number, got 'true' (--optim.lr)
$ trainer --loss.type reinforce --loss.normalization fixed
  loss: normalization fixed needs fixed_length, the tokens that every sequence is divided by (normalization:
  --loss.normalization)
$ orchestrator --environment.id x --environments.00.id y
  environments: must be a list, got {'00': {'id': 'y'}} (--environments.00.id)
$ trainer --optim.lr nan
  optim.lr: must be a finite number, got 'nan' (--optim.lr)
$ trainer --device coda
  device: must be 'auto', 'cpu' or 'cuda', got 'coda'; did you mean 'cuda'? (--device)
$ rl --orchestrator.environment.id x --seq-len 1
  trainer.seq_len: must be greater than or equal to 2, got 1 (--seq-len)
$ eval --environment-ids a --num-examples 0
  num_examples: must be at least 1, or -1 for all, got 0 (--num-examples)
$ orchestrator --environment.id x --client.base-url localhost:8000
  client.base_url: 'localhost:8000' does not start with http:// or https://, got ['localhost:8000']
  (--client.base-url)
$ rl --max-steps 0 --orchestrator.environment.id x
  max_steps: must be greater than 0, got 0 (--max-steps)
$ rl --wandb.offline=x --orchestrator.environment.id x
  wandb.offline: must be a valid boolean, unable to interpret input, got 'x' (--wandb.offline)
# misuse of options
$ trainer what
  unexpected argument 'what'
$ eval --environment-ids a x.toml
  to read the file x.toml, write: @ x.toml
$ trainer --optim
  --optim is a section: expected a table such as "{'key': 1}", --optim @ file.toml, or one of its settings
  (--optim.…), got ''
$ trainer --no-bench=true
  --no-bench takes no value
$ trainer --optim @ --seed 1
  --optim @ must be followed by a file
# contradictions
$ rl --max-steps 5 --ckpt.resume-step 10 --orchestrator.environment.id x
  max_steps 5 is below ckpt.resume_step 10 (max_steps: --max-steps, ckpt.resume_step: --ckpt.resume-step)
$ orchestrator --environment.id x --max-off-policy-steps 1 --async-level 2
  max_off_policy_steps 1 is below async_level 2 (max_off_policy_steps: --max-off-policy-steps, async_level:
  --async-level)
$ orchestrator --environment.id x --sampling.max-tokens 2048
  sampling.max_tokens 2048 leaves no room for a prompt within seq_len 2048 (sampling.max_tokens:
  --sampling.max-tokens)
$ sft --data.micro-batch-size 3
  data: micro_batch_size 3 does not divide batch_size 128 (micro_batch_size: --data.micro-batch-size)
$ trainer --data.fake.seq-len 9999
  data.fake.seq_len 9999 exceeds seq_len 2048 (data.fake.seq_len: --data.fake.seq-len)
$ inference --data-parallel-size-local 2
  data_parallel_size_local 2 exceeds data_parallel_size 1 (data_parallel_size_local: --data-parallel-size-local)
$ inference --data-parallel-size 4 --headless --data-parallel-size-local 2
  headless needs data_parallel_start_rank, data_parallel_address, too (headless: --headless)
$ inference --data-parallel-size 4 --headless --data-parallel-size-local 2 --data-parallel-address 10.0.0.1
$   --data-parallel-start-rank 3
  data_parallel_start_rank 3 with data_parallel_size_local 2: replicas 1 to 3 are for headless nodes
  (data_parallel_start_rank: --data-parallel-start-rank, data_parallel_size_local: --data-parallel-size-local)
$ inference --data-parallel-size 4 --data-parallel-start-rank 2
  data_parallel_start_rank is for headless nodes: the node that serves has the first replicas
  (data_parallel_start_rank: --data-parallel-start-rank)
$ inference --data-parallel-size 4 --data-parallel-size-local 2
  data_parallel_size_local 2 of 4: the other nodes need data_parallel_address, where they reach this one
  (data_parallel_size_local: --data-parallel-size-local)
$ eval --environment-ids x --client.base-url http://r:1 http://q:1 --client.admin-base-url http://a:1
  client: admin_base_url names the servers behind one router: base_url has to name that one (admin_base_url:
  --client.admin-base-url, base_url: --client.base-url)
$ eval --environment-ids x --client.base-url http://a:1 --client.admin-base-url http://a:1/v1
$   http://b:1
  client: base_url is one of the servers in admin_base_url, not a router: list them in base_url
  (base_url: --client.base-url, admin_base_url: --client.admin-base-url)
$ eval --environment-ids x --client.base-url http://r:1 --client.admin-base-url http://u:p@a:1
  client.admin_base_url: holds a password, which would be written and shown: put the key into the variable
  api_key_var, got ['http://a:1'] (--client.admin-base-url)
$ orchestrator --environment.id x --algorithm.type opd --algorithm.teacher.base-url http://t:1
$   --sampling.temperature 0.7
  a teacher tells log-probabilities of temperature 1, and x is sampled at 0.7 (sampling.temperature:
  --sampling.temperature)
$ orchestrator --environment.id x --reference.base-url http://t:1 --environment.sampling.temperature 0.5
  the reference tells log-probabilities of temperature 1, and x is sampled at 0.5
$ orchestrator --environment.id x --environments.0.id y
  give either [environment] or [[environments]], not both (environment: --environment.id, environments:
  --environments.0.id)
$ orchestrator --environments.0.id x --environments.1.id y --environments.1.name all
  environments.1: an environment cannot be named 'all', metrics' word for all of them: give another `name` (name:
  --environments.1.name, id: --environments.1.id)
$ eval --environment-ids a a
  two environments are named 'a': give each its own `name`
$ rl --orchestrator.environment.id x --orchestrator.reference.base-url http://t:1
  a reference model has no effect where the loss does not ask for it: give trainer.loss.kl_coef
  (orchestrator.reference: --orchestrator.reference.base-url)
$ rl --orchestrator.environment.id x --clean --ckpt.resume-step 3
  clean would remove the checkpoint that ckpt.resume_step names (clean: --clean, ckpt.resume_step:
  --ckpt.resume-step)
"""  # what is printed follows its command; both go on in further lines


def transcript(text: str) -> list[tuple[str, str]]:
    """Commands, each with the line that it prints."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("$   ") or line.startswith("  "):
            found[-1][line[0] == " "] += " " + line.strip("$ ")
        elif line.startswith("$ "):
            found.append([line[2:], ""])
    return [(command, printed.strip()) for command, printed in found]


@pytest.mark.parametrize(("command", "line"), transcript(MISTAKES))
def test_a_mistake_is_one_line(command: str, line: str) -> None:
    assert problems(*command_line(command)) == [line]


@pytest.mark.parametrize(
    ("cls", "argv", "text", "lines"),
    [
        (OrchestratorConfig, ["@", "x.toml"], '[[environments]]\nid = "a"\n\n[[environments]]\nid = "b"\nrato = 2', ["unknown key environments.1.rato (x.toml, line 6); did you mean environments.1.ratio?"]),
        (RLConfig, ["--trainer", "@", "x.toml", *ORCH], "maxsteps = 1", ["unknown key trainer.maxsteps (x.toml, line 1); did you mean trainer.max_steps?"]),
        (TrainerConfig, ["@", "x.toml"], "a = [\n", ["x.toml: malformed TOML: Invalid value (at end of document)"]),
        (InferenceConfig, ["@", "x.toml"], "api_key = 123456", ["api_key: must be a valid string (x.toml, line 1)"]),
        (TrainerConfig, ["@", "x.toml"], 'max_steps = "many"\nmodel = 3\nckpt = true\n[monitor]\nwandb = { offline = "x" }', [
            "model: must be a table, got 3 (x.toml, line 2)",
            "max_steps: must be a valid integer, got 'many' (x.toml, line 1)",
            "ckpt: must be a table, got True (x.toml, line 3)",
            "monitor.wandb.offline: must be a valid boolean, unable to interpret input, got 'x' (x.toml, line 5)",
        ]),
        (InferenceConfig, ["@", "x.toml"], "seed = " + "9" * 5000, ["x.toml: malformed TOML: Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits"]),
        (OrchestratorConfig, ["@", "x.toml", "--environments.0.workers", "1"], "environments = true", ["environments.0.id: required, but not given (--environments.0.workers)"]),
        (OrchestratorConfig, [*ENV, "--environments.0.wrkers", "1"], "", ["--environments.0.wrkers names no setting; did you mean --environments.0.workers?"]),
        (OrchestratorConfig, [*ENV, "--environments.²", "1"], "", ["environments: must be a list, got {'²': '1'} (--environments.²)"]),
        (OrchestratorConfig, [*ENV, "--client.base-url", "http://[::1"], "", ["client.base_url: 'http://[::1' is no address: Invalid IPv6 URL, got ['http://[::1'] (--client.base-url)"]),
        (OrchestratorConfig, [*ENV, "--algorithm.length-penalty.scale", "1"], "", ["algorithm.length_penalty: needs a `type`, got {'scale': 1} (--algorithm.length-penalty.scale)"]),
        (OrchestratorConfig, ["@", "x.toml"], "ckpt.path = [false]", ["ckpt.output_dir: must be a path, got [False] (x.toml, line 1)"]),
        (RLConfig, [*ORCH, "--inference.server.host.x=token"], "", ["inference.server.host: must be a valid string, got {'x': 'token'} (--inference.server.host.x)"]),
    ],
)  # fmt: skip
def test_mistakes_in_files_and_odd_input(
    write: Write, cls: type[BaseConfig], argv: list[str], text: str, lines: list[str]
) -> None:
    """Contract: file and line are named; a secret is not repeated."""
    write(text)
    assert problems(cls, argv) == lines


def test_several_mistakes_are_listed_together(write: Write) -> None:
    file = write("sed = 1\nmax_steps = 0")
    found = problems(TrainerConfig, ["@", file, "stray", "--ckpt.keep", "x", "--max-stpes", "1"], {"PRIME_A__B": "1"})
    assert len(found) == 6
    for part in ("sed", "max_steps: ", "'stray'", "ckpt.keep", "--max-stpes", "PRIME_A__B"):
        assert sum(part in line for line in found) == 1, part


def test_missing_files(write: Write, tmp_path: Path) -> None:
    write("")
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe\x00")
    assert problems(TrainerConfig, ["@", "bad.toml"])[0].startswith("bad.toml: malformed TOML: 'utf-8' codec")
    assert problems(TrainerConfig, ["@", "xx.toml"]) == ["no such file: xx.toml (did you mean x.toml?)"]
    assert problems(TrainerConfig, ["@", "no/x.toml"]) == ["no such file: no/x.toml (nor is there a directory no)"]
    assert problems(TrainerConfig, ["@", str(tmp_path)])[0].endswith("cannot be read: Is a directory")
    # What the file would have given is not complained about.
    for cls in (RLConfig, OrchestratorConfig, EvalConfig):
        assert problems(cls, ["@", "xx.toml"]) == ["no such file: xx.toml (did you mean x.toml?)"]


def test_a_file_of_an_older_release_names_todays(write: Write, tmp_path: Path) -> None:
    """configs/trainer/NAME.toml is configs/NAME/train.toml; only what is there is named."""
    write("")
    roles = [("trainer", "train"), ("training", "train"), ("orchestrator", "orch"), ("inference", "infer")]
    (tmp_path / "configs/math").mkdir(parents=True)
    for folder, name in roles:
        (today := tmp_path / f"configs/math/{name}.toml").write_text("")
        for older in (f"configs/{folder}/math.toml", f"configs/{folder}/math/1b.toml"):
            line = f"no such file: {older} (today it is configs/math/{name}.toml)"
            assert problems(TrainerConfig, ["@", older]) == [line]
        today.unlink()
    line = "no such file: configs/trainer/math.toml (nor is there a directory configs/trainer)"
    assert problems(TrainerConfig, ["@", "configs/trainer/math.toml"]) == [line]


@pytest.mark.parametrize("text", ["{'api_key': 'sk-1'", " [{'api_key': 'sk-1'", "[{'api_key': 'sk-1'}]"])
def test_a_malformed_table_is_not_printed(text: str) -> None:
    """Contract: it may hold a secret."""
    for argv, env in (([], {"PRIME_INFERENCE": text}), (["--inference", text], {}), ([f"--inference={text}"], {})):
        (line,) = problems(RLConfig, [*argv, "--orchestrator.environment.id", "x"], env)
        assert "what was given is malformed" in line
        assert "sk-1" not in line


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["x.toml"], "@ x.toml"),
        (["missing.toml"], "@ missing.toml"),
        (["--bench", "x.toml"], "@ x.toml"),
        (["--seed", "1", "x.toml"], "@ x.toml"),
        (["train"], "@ train"),
    ],
)
def test_a_file_without_at_shows_the_at(write: Write, argv: list[str], shown: str) -> None:
    write("")
    Path("train").write_text("")  # without suffix it is recognised by being there
    (line,) = problems(TrainerConfig, argv)
    assert line.startswith("to read the file ")
    assert line.endswith(f"write: {shown}")


def test_load_prints_and_exits_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(TrainerConfig, ["--sed", "1", "--max-steps", "x"], prog="trainer")
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "error: max_steps: must be a valid integer, got 'x' (--max-steps)",
        "error: --sed names no setting; did you mean --seed?",
        "Nothing was started. For all settings: trainer --help",
    ]


@pytest.mark.parametrize(
    ("cls", "key"), [(OrchestratorConfig, "eval"), (SFTConfig, "eval"), (RLConfig, "orchestrator"), (RLConfig, "orchestrator.eval")]
)  # fmt: skip
@pytest.mark.parametrize("scalar", ["3", "true", '"None"', "[1]"])
def test_an_option_wins_over_a_scalar_where_a_table_belongs(
    write: Write, cls: type[BaseConfig], key: str, scalar: str
) -> None:
    """Contract: an item of a list below what a file says is no table replaces it, as any other option does."""
    argv = ["@", write(f"{key} = {scalar}"), f"--{key}.environments.0.id", "x"]
    argv += ORCH if key == "orchestrator.eval" else ENV if cls is OrchestratorConfig else []
    config: Any = parse(cls, argv, {})
    for part in key.split("."):
        config = getattr(config, part)
    assert [one.id for one in config.environments] == ["x"]


PAGE = (REPOSITORY / "docs" / "reference" / "config-errors.md").read_text()
BLOCKS = re.findall(r"```text\n(?:# x\.toml\n(.*?)\n\n)?\$ (.*?)\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("file", "command", "printed"), BLOCKS)
def test_the_page_of_mistakes_shows_what_is_printed(write: Write, file: str, command: str, printed: str) -> None:
    write(file)
    cls, argv, variables = command_line(command)
    assert [f"error: {line}" for line in problems(cls, argv, variables)] == printed.splitlines()
