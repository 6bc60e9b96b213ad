"""Contract: every mistake is one line with the key, where it came from and the nearest valid key; status 1; together.

Some more are in docs/reference/config-errors.md.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from prime_rl.config import (
    BaseConfig,
    ConfigError,
    EvalConfig,
    OrchestratorConfig,
    RLConfig,
    SFTConfig,
    TrainerConfig,
    parse,
)
from support.configs import ENV, LEAST, command_line

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


# x.toml, commands, and what each prints; what goes on in a further line is indented by four.
MISTAKES = """
# unknown
$ rl --no-cleen --orchestrator.environment.id x
  --no-cleen names no setting; did you mean --clean?
$ trainer --monitor.wandb.id a --orchestrator.monitor.wandb.id b
  --orchestrator.monitor.wandb.id names no setting: only `rl` has a section `orchestrator`; give
    --monitor.wandb.id to the command `orchestrator`
$ inference --foo.max-num-seqs 4
  --foo.max-num-seqs names no setting
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
$ rl --orchestrator.environment.id x --seq-len 1
  trainer.seq_len: must be greater than or equal to 2, got 1 (--seq-len)
$ eval --environment-ids a --num-examples 0
  num_examples: must be at least 1, or -1 for all, got 0 (--num-examples)
$ trainer --weights.transport.type process-group
  weights.transport: must be 'auto', 'filesystem' or 'memory', and what was given is malformed
    (--weights.transport.type)
# several at once
% sed = 1
% max_steps = 0
$ PRIME_A__B=1 trainer @ x.toml stray --ckpt.keep x --max-stpes 1
  unexpected argument 'stray'
  max_steps: must be greater than 0, got 0 (x.toml, line 2)
  ckpt.keep: must be a valid integer, got 'x' (--ckpt.keep)
  PRIME_A__B names no setting
  unknown key sed (x.toml, line 1); did you mean seed?
  --max-stpes names no setting; did you mean --max-steps?
# in files: the line is named; a secret is not repeated
% [[environments]]
% id = "a"
%
% [[environments]]
% id = "b"
% rato = 2
$ orchestrator @ x.toml
  unknown key environments.1.rato (x.toml, line 6); did you mean environments.1.ratio?
$ orchestrator @ x.toml --environments.5.id c
  --environments.5.id: index 5 is out of range: environments has 2 items
  unknown key environments.1.rato (x.toml, line 6); did you mean environments.1.ratio?
% maxsteps = 1
$ rl --trainer @ x.toml --orchestrator.environment.id x
  unknown key trainer.maxsteps (x.toml, line 1); did you mean trainer.max_steps?
% api_key = 123456
$ inference @ x.toml
  api_key: must be a valid string (x.toml, line 1)
% max_steps = "many"
% model = 3
% ckpt = true
% [monitor]
% wandb = { offline = "x" }
$ trainer @ x.toml
  max_steps: must be a valid integer, got 'many' (x.toml, line 1)
  ckpt: must be a table, got True (x.toml, line 3)
  model: must be a table, got 3 (x.toml, line 2)
  monitor.wandb.offline: must be a valid boolean, unable to interpret input, got 'x' (x.toml, line 5)
% environments = true
$ orchestrator @ x.toml --environments.0.workers 1
  environments.0.id: required, but not given (--environments.0.workers)
% ckpt.path = [false]
$ orchestrator --environment.id x @ x.toml
  ckpt.output_dir: must be a path, got [False] (x.toml, line 1)
# tenants
$ orchestrator --environment.id x --tenant.join d --tenant.name a --output-dir e --no-trainer --bench --router-replay
  output_dir is e, but the run of this tenant is in d/tenants/a: leave it out (output_dir: --output-dir, tenant.join:
    --tenant.join)
  a tenant has a trainer: leave trainer = false out (trainer: --no-trainer)
  a tenant is not measured alone: leave bench out (bench: --bench)
  tenants are trained without router_replay: leave it out (router_replay: --router-replay)
$ orchestrator --environment.id x --tenant.join d --tenant.name a --tenant.scheduler.type cosine --tenant.loss.kl-coef 1
  tenant.scheduler.type 'cosine' needs max_steps, to end at (tenant.scheduler.type: --tenant.scheduler.type)
  the divergence from a reference model needs one: give reference.base_url (tenant.loss.kl_coef: --tenant.loss.kl-coef)
  tenant.loss.kl_coef would not reach samples of advantage zero: set filter_zero_advantage = false
    (tenant.loss.kl_coef: --tenant.loss.kl-coef)
$ orchestrator --environment.id x --tenant.join d --tenant.name a --ckpt.resume-step 3 --ckpt.output-dir /c
  a tenant saves in d/tenants/a: leave ckpt.output_dir out (ckpt.output_dir: --ckpt.output-dir)
  a tenant goes on from what is committed: leave ckpt.resume_step out (ckpt.resume_step: --ckpt.resume-step)
$ rl --orchestrator.environment.id x --orchestrator.tenant.join d --orchestrator.tenant.name b
  `rl` starts a trainer of its own: leave orchestrator.tenant out (orchestrator.tenant: --orchestrator.tenant.name)
$ rl --trainer.tenants.slots 2
  trainer.tenants is for `rl tenants`, which starts the servers and the trainer alone (trainer.tenants:
    --trainer.tenants.slots)
# odd words
$ orchestrator --environment.id x --environments.0.wrkers 1
  --environments.0.wrkers names no setting; did you mean --environments.0.workers?
$ orchestrator --environment.id x --environments.² 1
  environments: must be a list, got {'²': '1'} (--environments.²)
$ orchestrator --environment.id x --client.base-url http://[::1
  client.base_url: 'http://[::1' is no address: Invalid IPv6 URL, got ['http://[::1'] (--client.base-url)
$ orchestrator --environment.id x --algorithm.length-penalty.scale 1
  algorithm.length_penalty: needs a `type`, got {'scale': 1} (--algorithm.length-penalty.scale)
$ rl --orchestrator.environment.id x --inference.server.host.x=token
  inference.server.host: must be a valid string, got {'x': 'token'} (--inference.server.host.x)
# misuse of options
$ eval --environment-ids a x.toml
  to read the file x.toml, write: @ x.toml
$ trainer --no-bench=true
  --no-bench takes no value
$ trainer --optim @ --seed 1
  --optim @ must be followed by a file
# contradictions
$ orchestrator --environment.id x --max-off-policy-steps 1 --async-level 2
  max_off_policy_steps 1 is below async_level 2 (max_off_policy_steps: --max-off-policy-steps, async_level:
    --async-level)
$ orchestrator --environment.id x --sampling.max-tokens 2048
  sampling.max_tokens 2048 leaves no room for a prompt within seq_len 2048 (sampling.max_tokens:
    --sampling.max-tokens)
$ rl --orchestrator.environment.id x --orchestrator.sampling.max-tokens 256 --inference.max-model-len 256
  orchestrator.sampling.max_tokens 256 leaves no room for a prompt within inference.max_model_len 256
    (orchestrator.sampling.max_tokens: --orchestrator.sampling.max-tokens, inference.max_model_len:
    --inference.max-model-len)
$ sft --data.micro-batch-size 3
  data: micro_batch_size 3 does not divide batch_size 128 (micro_batch_size: --data.micro-batch-size)
$ trainer --data.fake.seq-len 9999
  data.fake.seq_len 9999 exceeds seq_len 2048 (data.fake.seq_len: --data.fake.seq-len)
$ inference --data-parallel-size-local 2
  data_parallel_size_local 2 of data_parallel_size 1: a node has more replicas than there are (data_parallel_size_local:
    --data-parallel-size-local)
$ inference --data-parallel-size 4 --headless --data-parallel-size-local 2 --data-parallel-address 10.0.0.1
$   --data-parallel-start-rank 3
  headless runs some of replicas 1 to 3: give data_parallel_size_local, and as data_parallel_start_rank the first of
    them (headless: --headless)
$ inference --data-parallel-size 4 --data-parallel-start-rank 2
  data_parallel_start_rank is for headless nodes: the node that serves has the first replicas
    (data_parallel_start_rank: --data-parallel-start-rank)
$ inference --data-parallel-size 4 --data-parallel-size-local 2
  data_parallel_size_local 2 of data_parallel_size 4: all nodes need data_parallel_address, that of the one that serves
    (data_parallel_size_local: --data-parallel-size-local, data_parallel_size: --data-parallel-size)
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
$ rl --orchestrator.environment.id x --trainer.loss.kl-coef 0.1
  the divergence from a reference model needs one: give orchestrator.reference.base_url
    (trainer.loss.kl_coef: --trainer.loss.kl-coef)
  trainer.loss.kl_coef would not reach samples of advantage zero: set orchestrator.filter_zero_advantage = false
    (trainer.loss.kl_coef: --trainer.loss.kl-coef)
$ rl --orchestrator.environment.id x --orchestrator.algorithm.type opd
$   --orchestrator.algorithm.teacher.base-url http://t:1 --trainer.loss.entropy-coef 1
$   --orchestrator.no-filter-zero-advantage
  trainer.loss.entropy_coef has no effect: nothing is trained by reward (trainer.loss.entropy_coef:
    --trainer.loss.entropy-coef, orchestrator.algorithm.type: --orchestrator.algorithm.type)
$ sft --eval.environment.id x --model.name one --inference.model.name other
  inference.model.name is other but model.name is one: both are the same setting, give it once (model.name:
    --model.name, inference.model.name: --inference.model.name)
$ sft --eval.environment.id x --inference --eval.client.base-url http://far:1/v1
  eval.client.base_url is http://far:1/v1 but inference.server listens on localhost:8000: give one of them
    (eval.client.base_url: --eval.client.base-url)
"""


def transcript(text: str) -> list[tuple[str, str, list[str]]]:
    """The file, a command, and the lines that it prints."""
    rows, file, before = list[tuple[str, str, list[str]]](), "", ""
    for line in re.sub(r"\n(?:\$ |  )  +", " ", text).splitlines():
        if line.startswith("%"):
            file = (file if before.startswith("%") else "") + f"{line[2:]}\n"
        elif line.startswith("$"):
            rows.append((file, line[2:], []))
        elif line.startswith(" "):
            rows[-1][2].append(line[2:])
        before = line
    return rows


@pytest.mark.parametrize(("file", "command", "lines"), transcript(MISTAKES))
def test_a_mistake_is_one_line(write: Write, file: str, command: str, lines: list[str]) -> None:
    write(file)
    assert problems(*command_line(command)) == lines


PAGE = (REPOSITORY / "docs" / "reference" / "config-errors.md").read_text()
BLOCKS = re.findall(r"```text\n(?:# x\.toml\n(.*?)\n\n)?\$ (.*?)\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("file", "command", "printed"), BLOCKS)
def test_the_page_of_mistakes_shows_what_is_printed(write: Write, file: str, command: str, printed: str) -> None:
    write(file)
    assert [f"error: {line}" for line in problems(*command_line(command))] == printed.splitlines()


def test_files_that_cannot_be_read(write: Write, tmp_path: Path) -> None:
    write("")
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe\x00")
    assert problems(TrainerConfig, ["@", "bad.toml"])[0].startswith("bad.toml: malformed TOML: 'utf-8' codec")
    (tmp_path / "long.toml").write_text("seed = " + "9" * 5000)
    assert problems(TrainerConfig, ["@", "long.toml"])[0].startswith("long.toml: malformed TOML: Exceeds the limit")
    assert problems(TrainerConfig, ["@", "no/x.toml"]) == ["no such file: no/x.toml (nor is there a directory no)"]
    assert problems(TrainerConfig, ["@", str(tmp_path)])[0].endswith("cannot be read: Is a directory")
    # What the file would have given is not complained about.
    for cls in (TrainerConfig, RLConfig, OrchestratorConfig, EvalConfig):
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
    ("urls", "problem"),
    [
        ("http://a:1 http://a:1/v1/", "a server is named twice"),
        ("http://localhost:1 http://127.0.0.1:1", "a server is named twice"),
        ("http://a http://A:80", "a server is named twice"),
        ("http://a:1 b:1", "'b:1' does not start with http"),
        ("http://a:1 http://u:secret@b:1", "holds a password"),
        ("http://u:secret@a:1 http://u:secret@a:1/v1", "holds a password"),
        ("ftp://u:secret@a:1", "does not start with http"),
        ("u:secret@a/v1", "does not start with http"),
        ("[]", "names no server"),
    ],
)
def test_servers_that_cannot_be_meant(urls: str, problem: str) -> None:
    """Contract: what is refused is named without what must not be shown."""
    shown = problems(OrchestratorConfig, [*ENV, "--client.base-url", *urls.split()])
    assert problem in shown[0]
    assert "secret" not in str(shown)
    assert "secret" not in str(problems(OrchestratorConfig, [*ENV, "--reference.base-url", *urls.split()]))


@pytest.mark.parametrize("words", ["x.toml", "missing.toml", "--bench x.toml", "--seed 1 x.toml", "train"])
def test_a_file_without_at_shows_the_at(write: Write, words: str) -> None:
    write("")
    Path("train").write_text("")  # without suffix it is recognised by being there
    file = words.split()[-1]
    assert problems(TrainerConfig, words.split()) == [f"to read the file {file}, write: @ {file}"]


@pytest.mark.parametrize("cls", [RLConfig, TrainerConfig, OrchestratorConfig, SFTConfig])
def test_what_is_gone_on_with_is_not_cleaned(cls: type[BaseConfig]) -> None:
    """Contract: every command refuses to remove what it is told to resume from."""
    for option in (["--ckpt.resume-step", "2"], *([["--recover"]] if cls is not SFTConfig else [])):
        assert "clean would remove" in problems(cls, [*LEAST[cls], "--clean", *option])[0]
