"""Contract: options > later files > earlier files > variables > defaults, however written; what processes share is
given once, reaches every section that needs it, and cannot be contradicted."""

import re
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
    TrainerConfig,
    child_env,
    load,
    parse,
    to_toml,
    write_toml,
)
from prime_rl.config.loader import resolve
from prime_rl.config.orchestrator import TrainingEnv
from support.configs import LEAST, ORCH, command_line

FILES = {
    # of a trainer, an orchestrator, a server
    "empty": "[ckpt]",
    "on": "[ckpt]\ninterval = 7",
    "off": 'ckpt = "None"',
    "nulls": 'max_steps = "None"\n[optim]\nmax_norm = "None"',
    "steps7": "max_steps = 7",
    "train": "max_steps = 20\n[optim]\nlr = 3e-6",
    "orch": 'batch_size = 32\n[environment]\nid = "reverse-text"',
    "infer": "[server]\nport = 8005",
    "list1": "[vllm]\none = 1\nlist = [1, 2]\n[vllm.deep]\nkept = 1\nchanged = 1",
    "list2": "[vllm]\nlist = [3]\n[vllm.deep]\nchanged = 2",
    "two": '[[environments]]\nid = "a"\nratio = 2\n[[environments]]\nid = "b"',
    "one": '[[environments]]\nid = "c"',
    "base/a": "seed = 1\nmax_steps = 1\n[optim]\nlr = 0.1",
    "base/b": "max_steps = 2",
    "thin/c": 'include = ["../base/a", "../base/b"]\nseed = 3',
    "mixed": 'filter_zero_advantage = false\n[[environments]]\nid = "a"\n[[environments]]\nid = "b"\n'
    '[environments.algorithm]\ntype = "opd"\nteacher.base_url = "http://t:1"',
    "monitor": '[monitor.wandb]\nproject = "p"\nname = "n"',
    "alone": "trainer = false",
    # of a run
    "scalar": "orchestrator.eval = 3",
    "null": 'orchestrator.eval = "None"',
    "root": "[trainer]\nrollout_timeout = 1\ndist_timeout = 1\n[trainer.optim]\nlr = 0.1\nbetas1 = 0.1\nbetas2 = 0.1",
    "optim": "lr = 0.2\nbetas1 = 0.2",
    "train20": "\nmax_steps = 20\n[ckpt]\nresume_step = 10",
    "orch30": "max_steps = 30",
    "top1": "max_steps = 1",
    "section2": "trainer.max_steps = 2",
    "seq256": "seq_len = 256",
    "own256": "trainer.seq_len = 256\norchestrator.seq_len = 256",
    "wandb": '[wandb]\nproject = "p"',
    "near": '[orchestrator.client]\nbase_url = "http://localhost:1"\n[inference.server]\nport = 2',
    "far": '[orchestrator.client]\nbase_url = "http://far:1"\n[inference.server]\nport = 2',
    "here": '[orchestrator.client]\nbase_url = "http://far:1"\n[inference.server]\nhost = "here"',
    "portless": '[orchestrator.client]\nbase_url = "http://localhost:1"\n[inference.server]',
}
# Commands, each group with what its settings are then. The least that a command needs is added.
VALUES = """
# However an option is written.
trainer --model.trust-remote-code --max-steps 5
trainer --model.trust_remote_code --max_steps 5
trainer --model.trust-remote-code=true --max-steps=5
trainer --model.trust-remote-code True --max_steps=5
  model.trust_remote_code=True max_steps=5
# Flags, also those that may be null.
orchestrator --filter-zero-advantage
orchestrator --no-filter-zero-advantage --filter-zero-advantage
orchestrator --seed 1
  filter_zero_advantage=True
orchestrator --no-filter-zero-advantage
orchestrator --filter-zero-advantage false
orchestrator --filter-zero-advantage=False
  filter_zero_advantage=False
trainer --model.compile --seed 1
  model.compile=True seed=1
trainer --model.no-compile --seed 1
trainer --no-model.compile --seed 1
trainer --model.compile false --seed 1
  model.compile=False seed=1
trainer --model.compile None
  model.compile=None
# A bare option or an empty table switches a section on with defaults, --no-… and "None" off, a setting within on.
trainer --seed 1
trainer @ on --no-ckpt
trainer @ on --ckpt None
trainer @ on @ off
trainer --ckpt.interval 5 --no-ckpt
PRIME_CKPT=false trainer
  ckpt=None
trainer --ckpt
trainer @ empty
trainer @ off --ckpt
PRIME_CKPT=true trainer
  ckpt.interval=50
trainer @ on
trainer @ on --ckpt
  ckpt.interval=7
trainer --ckpt.interval 5
trainer @ off --ckpt.interval 5
trainer --no-ckpt --ckpt.interval 5
PRIME_CKPT__INTERVAL=5 trainer
  ckpt.interval=5
# "None" is null everywhere; values are JSON or Python literals where they can be, text where that is meant.
PRIME_OPTIM__MAX_NORM=1 PRIME_MAX_STEPS=3 trainer @ nulls
PRIME_MAX_STEPS=None trainer --optim.max-norm None
trainer --no-optim.max-norm
  max_steps=None optim.max_norm=None
inference --vllm '{"a": ["None", {"b": "None"}]}' --vllm.c None
  vllm={'a':[None,{'b':None}],'c':None}
inference --vllm.max-num-seqs 4 --vllm.name some/name --vllm.on --vllm.deep.list '[1, 2]' --vllm.t (1,2)
  vllm={'max_num_seqs':4,'name':'some/name','on':True,'deep':{'list':[1,2]},'t':[1,2]}
inference --vllm.x '{1, 2}' --vllm.y "b'1'"
  vllm={'x':'{1,2}','y':"b'1'"}
PRIME_VLLM__MAX_NUM_SEQS=4 inference
  vllm={'max_num_seqs':4}
orchestrator --environment.id x --environment.args "{'n': None, 'x': True}"
  environments.*.args=[{'n':None,'x':True}]
trainer --model.name 1234 --monitor.wandb.id 0042
  model.name=1234 monitor.wandb.id=0042
trainer --data.fake "{'micro_batch_size': 8}"
trainer --data.fake '{"micro_batch_size": 8}'
PRIME_DATA__FAKE="{'micro_batch_size':8}" trainer
  data.fake.micro_batch_size=8 data.fake.batch_size=128
# Unions choose by type and keep the default one without.
trainer --loss.type grpo --loss.clip-high 0.3
  loss.type=grpo loss.clip_high=0.3 loss.clip_low=0.2
trainer --optim.lr 1e-3 --loss.kl-tau 0
  optim.type=adamw optim.lr=0.001 loss.type=default loss.kl_tau=0.0
# Lists, and items of lists of tables, in whatever order the line has them.
eval --environment-ids a b
eval --environment-ids a,b
eval --environment-ids=a,b
eval --environment-ids '["a", "b"]'
eval --environment-ids a b --seed 1
eval --environments '[{"id": "a"}, {"id": "b"}]'
eval --environments '{"id": "a"}' '{"id": "b"}'
eval --environment.id b --environments.0.id a --environments.1.id b --no-environment
PRIME_ENVIRONMENT_IDS=a,b eval --environments []
  environments.*.id=['a','b']
orchestrator @ two --environments.0.id z --environments.1.args.k 3 --environments.2.id c
  environments.*.id=['z','b','c'] environments.*.ratio=[2.0,1.0,1.0] environments.*.args=[{},{'k':3},{}]
orchestrator --environments.0.name z --environments '[{"id": "a"}]'
orchestrator --environments '[{"id": "a"}]' --environments.0.name z
  environments.*.id=['a'] environments.*.name=['z']
orchestrator --environment.id x --environment.sampling.temperature 0.5 --eval.environment.id y
  environments.*.id=['x'] environments.*.name=['x'] eval.environments.*.id=['y'] sampling.temperature=1.0
rl @ scalar --orchestrator.eval.environments.0.id x --orchestrator.environment.id y
rl @ null --orchestrator.eval.environments.0.id x --orchestrator.environment.id y
  orchestrator.eval.environments.*.id=['x']
# Ids with commas add environments; versions in ids are no files.
orchestrator --environment-ids wordle,owner/alphabet-sort@1.0
  environments.*.name=['wordle','owner/alphabet-sort@1.0'] environment_ids=[]
eval --environment.id wordle --environment-ids math500 aime24
  environments.*.id=['wordle','math500','aime24']
eval --environment.id livecodebench --environment.args.unsafe
  environments.*.args=[{'unsafe':True}]
# Files: glued, apart, anywhere; tables are merged, the rest is replaced; included ones first, relative to the file.
trainer @ steps7
trainer @steps7
trainer --bench @ steps7
trainer --seed 1 @steps7 --bench
  max_steps=7
inference @ list1 @ list2
  vllm={'one':1,'list':[3],'deep':{'kept':1,'changed':2}}
orchestrator @ two @ one
  environments.*.id=['c']
trainer @ thin/c
  seed=3 max_steps=2 optim.lr=0.1
rl --trainer @ thin/c
  trainer.optim.lr=0.1
# A file for a section wins over those for the whole, an option over both.
rl --trainer.optim.betas1 0.3 --trainer.optim @ optim @ root
rl --trainer.optim.betas1 0.3 --trainer.optim @optim @ root
rl --trainer.optim.betas1 0.3 --trainer.optim=@optim @ root
  trainer.optim.lr=0.2 trainer.optim.betas1=0.3 trainer.optim.betas2=0.1 trainer.dist_timeout=1.0
rl --trainer @ train --orchestrator @orch --inference @ infer
  max_steps=20 orchestrator.max_steps=20 trainer.optim.lr=3e-06 inference.server.port=8005
  orchestrator.client.base_url=http://localhost:8005/v1 orchestrator.environments.*.id=['reverse-text']
# Variables. PRIME_API_KEY is the account's key although `inference` has an api_key; others' are left alone.
PRIME_MODEL__NAME=some/model PRIME_BENCH=true trainer
  model.name=some/model bench=True
PRIME_API_KEY=secret PRIME_TEAM_ID=t PRIME_WHATEVER=1 PRIME_BENCHMARKS=x inference
  api_key=None seed=0
PRIME_LOG_LEVEL=DEBUG trainer
PRIME_LOG_LEVEL=info trainer --log.level debug
  log.level=debug
PRIME_EXP_ID=a orchestrator
  output_dir=outputs/a
# Defaults that users know.
rl --ckpt --wandb --inference
  model.name=Qwen/Qwen3-0.6B inference.server.port=8000 ckpt.interval=50 ckpt.keep=None output_dir=outputs
  trainer.monitor.wandb.project=prime-rl trainer.monitor.wandb.dir=logs trainer.monitor.wandb.name=None
rl --seed 1
  ckpt=None wandb=None trainer.monitor.wandb=None orchestrator.client.base_url=http://localhost:8000/v1
# Micro-batches may be longer than samples.
rl --trainer.seq-len 4096 --orchestrator.seq-len 1024
  seq_len=None trainer.seq_len=4096 orchestrator.seq_len=1024
# Over files that give every section its own length an option concerns one; over the top of a file it is the length.
rl @ seq256 --trainer.seq-len 512
  trainer.seq_len=512 orchestrator.seq_len=512
rl @ own256 --trainer.seq-len 512
  trainer.seq_len=512 orchestrator.seq_len=256
# A later file wins wherever the setting stands.
rl @ top1 @ section2
  max_steps=2 trainer.max_steps=2 orchestrator.max_steps=2
rl @ section2 @ top1
  max_steps=1 trainer.max_steps=1 orchestrator.max_steps=1
# What is for one start concerns the launcher; `rl` starts a trainer whatever the orchestrator's own file says.
rl --dry-run --trainer.clean --inference
  dry_run=True clean=True trainer.dry_run=False orchestrator.dry_run=False inference.dry_run=False
rl --orchestrator @ alone
  orchestrator.trainer=True
# Checkpoints are on or off everywhere; a stronger source switches them.
rl --trainer @ on --no-ckpt
rl --trainer @ on --orchestrator.no-ckpt
  ckpt=None trainer.ckpt=None orchestrator.ckpt=None
rl --trainer @ off --ckpt.keep 2
rl --trainer @ off --orchestrator.ckpt.keep 2
  ckpt.keep=2 trainer.ckpt.keep=2 orchestrator.ckpt.keep=2
# W&B has a run for each side, under a name of its own; a section may differ by a stronger source.
rl --wandb.project p --wandb.name run --wandb.id abc --wandb.dir w --wandb.offline
  trainer.monitor.wandb.project=p trainer.monitor.wandb.dir=w trainer.monitor.wandb.offline=True
  trainer.monitor.wandb.name=run-trainer trainer.monitor.wandb.id=abc-trainer
  orchestrator.monitor.wandb.project=p orchestrator.monitor.wandb.dir=w orchestrator.monitor.wandb.offline=True
  orchestrator.monitor.wandb.name=run-orchestrator orchestrator.monitor.wandb.id=abc-orchestrator
rl --wandb.tags a,b --wandb.log-extras.interval 5 --wandb.log-extras.no-samples --tensorboard
  trainer.monitor.wandb.tags=['a','b'] orchestrator.monitor.wandb.tags=['a','b']
  trainer.monitor.wandb.log_extras.interval=5 orchestrator.monitor.wandb.log_extras.samples=False
  trainer.monitor.tensorboard.log_extras=None orchestrator.monitor.mlflow=None
rl --wandb.log-extras --prometheus.port 9000
  trainer.monitor.wandb.log_extras.interval=10 orchestrator.monitor.prometheus.port=9000
rl --trainer.monitor.wandb.project p
  trainer.monitor.wandb.project=p orchestrator.monitor.wandb=None
rl --trainer @ monitor --wandb.name run
  trainer.monitor.wandb.project=p trainer.monitor.wandb.name=run-trainer
  orchestrator.monitor.wandb.name=run-orchestrator
rl --trainer @ monitor --no-wandb
  trainer.monitor.wandb=None orchestrator.monitor.wandb=None
rl @ wandb --trainer.monitor.wandb.project q --trainer.monitor.wandb.id i
  trainer.monitor.wandb.project=q trainer.monitor.wandb.id=i orchestrator.monitor.wandb.project=p
rl @ wandb --trainer.monitor.no-wandb
  trainer.monitor.wandb=None orchestrator.monitor.wandb.project=p
# Client and server find each other; the stronger source gives the address.
rl --inference.server.port 8001
  orchestrator.client.base_url=http://localhost:8001/v1
rl --inference.server.host 0.0.0.0
  orchestrator.client.base_url=http://localhost:8000/v1
rl --inference.server.host 10.0.0.1
  orchestrator.client.base_url=http://10.0.0.1:8000/v1
rl --inference.server.host fe80::1
  orchestrator.client.base_url=http://[fe80::1]:8000/v1
rl --orchestrator.client.base-url https://far/v1
  orchestrator.client.base_url=https://far/v1 orchestrator.client.api_roots=['https://far']
rl --inference --orchestrator.client.base-url http://127.0.0.1:8001
  inference.server.port=8001 orchestrator.client.api_roots=['http://127.0.0.1:8001']
rl @ near --inference.server.port 3
rl @ far --inference.server.port 3
  orchestrator.client.base_url=http://localhost:3/v1 inference.server.port=3
rl @ near --orchestrator.client.base-url http://localhost:3
  orchestrator.client.base_url=http://localhost:3 inference.server.port=3
rl @ here --inference.server.host there
  orchestrator.client.base_url=http://there:8000/v1 inference.server.port=8000
rl @ portless --inference.server.host 0.0.0.0
  orchestrator.client.base_url=http://localhost:1 inference.server.port=1
sft --inference.server.port 8001 --eval.environment.id x --model.name m
  eval.client.base_url=http://localhost:8001/v1 inference.model.name=m
# A penalty reaches what is trained by reward beside distillation, samples of advantage zero, too.
rl --orchestrator @ mixed --orchestrator.reference.base-url http://r:1 --trainer.loss.kl-coef 0.1
  trainer.loss.kl_coef=0.1
rl --orchestrator @ mixed --trainer.loss.entropy-coef=-0.01
  trainer.loss.entropy_coef=-0.01
# A benchmark measures the trainer on random samples.
rl --bench --orchestrator.batch-size 32
  trainer.bench=True orchestrator.bench=True trainer.data.fake.batch_size=32
rl --bench --trainer.data.fake.batch-size 8
  trainer.data.fake.batch_size=8
"""
# Runs that are refused, with parts of the line. File and line are named; what a stronger source replaced is not.
CONTRADICTIONS = """
rl --trainer @ train20 --orchestrator @ orch30
  decide by --max-steps | trainer.max_steps: train20, line 2 | orchestrator.max_steps: orch30, line 1
rl @ top1 --trainer @ train20
  trainer.max_steps is 20 but max_steps is 1
rl --trainer @ train20 --max-steps 5
  (max_steps: --max-steps, ckpt.resume_step: train20, line 4)
rl @ on --trainer @ off
  trainer.ckpt is None but ckpt is on | decide by --ckpt
rl --wandb.project p --trainer.monitor.wandb.project q
  trainer.monitor.wandb.project is q but wandb.project is p
rl --wandb.project p --trainer.monitor.wandb None
  trainer.monitor.wandb is None but wandb is on
rl --wandb.log-extras --trainer.monitor.wandb.no-log-extras
  trainer.monitor.wandb.log_extras is None but wandb.log_extras is on
rl --no-wandb --trainer.monitor.wandb
  trainer.monitor.wandb is on but wandb is None
rl --inference.server.port 8001 --orchestrator.client.base-url http://localhost:8002/v1
  orchestrator.client.base_url is http://localhost:8002/v1 but inference.server listens on localhost:8001
rl --inference --orchestrator.client.base-url http://10.0.0.1:8000/v1
  orchestrator.client.base_url is http://10.0.0.1:8000/v1 but inference.server listens on localhost:8000
rl --inference.server.host 10.0.0.1 --orchestrator.client.base-url http://10.0.0.2:8000
  orchestrator.client.base_url is http://10.0.0.2:8000 but inference.server listens on 10.0.0.1:8000
# Servers hold adapters, or full weights.
rl --trainer.lora.rank 8 --inference.lora.max-rank 4
  inference.lora.max_rank 4 is too small for trainer.lora.rank 8
rl --trainer.lora.serve merged --inference.lora.max-rank 8
  inference.lora serves adapters alone, and versions are full weights: | give trainer.lora.serve = adapter
sft --inference.lora.max-rank 8 --eval.environment.id x
  inference.lora serves adapters alone, and versions are full weights: leave it out, or give lora
trainer --lora.target-modules []
  target_modules is empty: nothing would be trained
# A server that was named is never ignored.
rl --orchestrator.client.base-url http://a:1 http://b:1 --inference.max-model-len 64
  names 2 servers, but [inference] starts its own
rl --orchestrator.client.base-url http://r:1 --orchestrator.client.admin-base-url http://a:1 --inference.seed 1
  behind a router, but [inference] starts its own
"""


def rows(text: str) -> list[tuple[str, str]]:
    """Command lines, each with the indented lines below its group."""
    groups = re.findall(r"((?:^\w.*\n)+)((?:  .*\n)+)", text, re.MULTILINE)
    return [(line, " ".join(below.split())) for group, below in groups for line in group.splitlines()]


def read(line: str) -> tuple[type[BaseConfig], list[str], dict[str, str]]:
    """The command with the least that it needs, unless it or one of its files names an environment."""
    cls, argv, env = command_line(line)
    named = " ".join([line.lower(), *(FILES.get(word.strip("@"), "") for word in argv)])
    return cls, [*([] if "environment" in named else LEAST[cls]), *argv], env


def value(config: Any, key: str) -> Any:
    """The setting of a dotted key, with * for every item of a list."""
    part, _, rest = key.partition(".")
    if part == "*":
        return [value(item, rest) for item in config]
    inner = getattr(config, part)
    return value(inner, rest) if rest else inner


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)


@pytest.mark.parametrize(("line", "expected"), rows(VALUES))
def test_what_is_given_counts_where_it_is_needed(line, expected):
    cls, argv, env = read(line)
    config = parse(cls, argv, env)
    keys = re.findall(r"(?:^| )([\w.*]+)=", expected)
    assert " ".join(f"{key}={str(value(config, key)).replace(' ', '')}" for key in keys) == expected
    write_toml(config, Path("resolved"))  # fed back it is the same, wherever sections differ
    assert to_toml(parse(cls, ["@", "resolved"], {})) == to_toml(config)


@pytest.mark.parametrize(("line", "expected"), rows(CONTRADICTIONS))
def test_a_contradiction_is_one_line(line, expected):
    with pytest.raises(ConfigError) as refused:
        parse(*read(line))
    (shown,) = refused.value.problems
    assert [part for part in expected.split(" | ") if part not in shown] == []


PAIR = ("trainer", "orchestrator")
EVERYWHERE = (*PAIR, "inference")
SHARED = [
    ("output_dir", "elsewhere", "other", EVERYWHERE),
    ("seed", "4", "5", EVERYWHERE),
    ("log.level", "debug", "warning", EVERYWHERE),
    ("device", "cpu", "cuda", ("trainer", "inference")),
    ("model.name", "some/model", "other/model", EVERYWHERE),
    ("router_replay", "True", "False", EVERYWHERE),
    ("max_steps", "20", "30", PAIR),
    ("async_level", "2", "3", PAIR),
    ("ckpt.interval", "5", "6", PAIR),
    ("ckpt.keep", "3", "4", PAIR),
    ("ckpt.resume_step", "10", "11", PAIR),
    ("ckpt.output_dir", "there", "else", PAIR),
    ("seq_len", "512", "1024", PAIR),
]


@pytest.mark.parametrize(("key", "text", "other", "sections"), SHARED)
def test_a_shared_setting_is_the_same_everywhere(key, text, other, sections):
    """Given at the top, in one section, or the same in both it reaches all; two values are an error that names both."""
    at_top, first, last = key, f"{sections[0]}.{key}", f"{sections[-1]}.{key}"
    for places in ([at_top], [first], [at_top, first]):
        config = parse(RLConfig, ["--inference", *ORCH, *(word for one in places for word in (f"--{one}", text))], {})
        for place in (*(f"{section}.{key}" for section in sections), *([] if key == "seq_len" else [key])):
            assert str(value(config, place)) == text
    for place in (at_top, first)[: 1 if key == "seq_len" else 2]:  # micro-batches may be longer than samples
        with pytest.raises(ConfigError) as refused:
            parse(RLConfig, ["--inference", *ORCH, f"--{place}", text, f"--{last}", other], {})
        (line,) = refused.value.problems
        assert f"{last} is {other} but {place} is {text}" in line
        assert f"({place}: --{place}, {last}: --{last})" in line


@pytest.mark.parametrize(("key", "text", "other", "sections"), SHARED)
@pytest.mark.parametrize("at_top", [True, False])
def test_the_stronger_source_wins_between_the_top_and_a_section(at_top, key, text, other, sections):
    """Contract: option over file over variable, also in different places; the winner counts everywhere."""
    strong, weak = [key, f"{sections[-1]}.{key}"][:: 1 if at_top else -1]
    for kinds in (("file", "variable"), ("option", "variable"), ("option", "file")):
        argv, env = ["--inference", *ORCH], {}
        for place, kind, given in zip((strong, weak), kinds, (text, other), strict=True):
            if kind == "variable":
                env["PRIME_" + place.upper().replace(".", "__")] = given
            elif kind == "option":
                argv += [f"--{place}", given]
            else:
                Path("run").write_text(f"{place} = {given if given.isdigit() else repr(given)}")
                argv += ["@", "run"]
        config = parse(RLConfig, argv, env)
        assert {str(value(config, f"{section}.{key}")) for section in sections} == {text}


LAYERS = ("variable", "first file", "second file", "section file", "option")


@pytest.mark.parametrize("chosen", range(1, 2 ** len(LAYERS)))
def test_every_combination_of_layers(chosen):
    """Whatever layers set a key, in whatever order they are written, the highest of them counts."""
    argv, env = list(ORCH), dict[str, str]()
    for number, name in reversed(list(enumerate(LAYERS))):
        if not chosen & (1 << number):
            continue
        Path(name).write_text(f"lr = {number}" if name == "section file" else f"[trainer.optim]\nlr = {number}")
        if name == "variable":
            env["PRIME_TRAINER__OPTIM__LR"] = str(number)
        elif name == "option":
            argv += ["--trainer.optim.lr", str(number)]
        elif name == "section file":
            argv += ["--trainer.optim", "@", name]
        else:  # the first one is to be read first
            argv[len(ORCH) : len(ORCH)] = ["@", name]
    assert parse(RLConfig, argv, env).trainer.optim.lr == chosen.bit_length() - 1


def test_another_type_takes_nothing_over_from_the_one_before():
    """Contract: settings of a type that a later source replaces do not get into the later type, which is said; those of
    one source stay. A `type` that chooses no section is a setting like others."""
    Path("dapo").write_text('[loss]\nclip_high = 0.28\ntype = "grpo"\nnormalization = "group"')
    Path("gspo").write_text('[loss]\ntype = "gspo"\nclip_low = 0.001')
    config, (hint,) = resolve(TrainerConfig, ["@", "dapo", "@", "gspo"], {})
    assert config.loss == parse(TrainerConfig, ["@", "gspo"], {}).loss
    left_out = "loss of type 'grpo' is left out: gspo, line 2 makes it 'gspo'"
    assert hint == left_out
    changed, _ = resolve(TrainerConfig, ["@", "dapo", "--loss.clip-low", "0.5", "--loss.type", "cispo"], {})
    assert (changed.loss.clip_low, changed.loss.clip_high) == (0.5, 4.0)
    same, hints = resolve(TrainerConfig, ["@", "dapo", "--loss.type", "grpo", "--loss.clip-low", "0.1"], {})
    assert (same.loss.clip_low, same.loss.clip_high, hints) == (0.1, 0.28, [])
    assert parse(TrainerConfig, ["@", "dapo"], {"PRIME_LOSS__TYPE": "gspo"}).loss.type == "grpo"
    Path("api").write_text('[client]\ntype = "auto"\nbase_url = "http://a:1"\n[environment]\nid = "x"')
    client = parse(EvalConfig, ["@", "api", "--client.type", "chat"], {}).client
    assert (client.type, client.base_url) == ("chat", "http://a:1")


def test_variables_of_many_items_and_of_children():
    """Contract: items are in the order of their numbers; a child, which gets a complete file, sees no variable meant as
    a setting: PRIME_TRAINER__SEED, right for `rl`, would be an error in the trainer."""
    names = [f"env{number}" for number in range(12)]
    config = parse(OrchestratorConfig, [], {f"PRIME_ENVIRONMENTS__{n}__ID": name for n, name in enumerate(names)})
    assert [environment.id for environment in config.environments] == names
    assert all(isinstance(environment, TrainingEnv) for environment in config.environments)
    env = {"PRIME_TRAINER__SEED": "1", "PRIME_LOG_LEVEL": "debug", "PRIME_VLLM": "{'a': 1}"}
    others = {"PRIME_API_KEY": "k", "PRIME_TEAM_ID": "t", "PATH": "p"}
    assert child_env({**env, **others}, InferenceConfig) == others


def test_a_shared_setting_given_beside_the_resolved_file_reaches_every_section():
    """`rl @ outputs/configs/rl.toml --max-steps 60`: one option changes what stands in the file for every section."""
    options = "--inference.server.port 8123 --max-steps 30 --seed 4 --ckpt.interval 5 --seq-len 512"
    write_toml(parse(RLConfig, [*ORCH, *options.split()], {}), Path("rl.toml"))
    options = "--max-steps 60 --output-dir elsewhere --ckpt.interval 7 --inference.server.port 8124"
    longer = parse(RLConfig, ["@", "rl.toml", *options.split()], {})
    for section in PAIR:
        keys = ("max_steps", "output_dir", "ckpt.interval", "seed", "seq_len")
        assert [value(longer, f"{section}.{key}") for key in keys] == [60, Path("elsewhere"), 7, 4, 512]
    assert longer.orchestrator.client.base_url == "http://localhost:8124/v1"


def test_the_debug_files_make_a_run_once_they_share_a_directory(monkeypatch):
    """Contract: what each says for itself (its own directory, random samples) is decided, or left out with a hint."""
    monkeypatch.chdir(Path(__file__).parents[3])
    names = [("trainer", "train"), ("orchestrator", "orch"), ("inference", "infer")]
    argv = [token for section, name in names for token in (f"--{section}", "@", f"examples/debug/rl/{name}.toml")]
    with pytest.raises(ConfigError, match="decide by --output-dir"):
        parse(RLConfig, argv, {})
    config, (fake, trainer) = resolve(RLConfig, [*argv, "--output-dir", "x"], {})
    assert config.trainer.output_dir == Path("x")
    assert config.trainer.data.fake is None
    assert fake.startswith("trainer.data.fake (examples/debug/rl/train.toml, line ")
    assert trainer.startswith("orchestrator.trainer is left out")


OLDER = [
    ("trainer --exp-id try", "--output-dir outputs/try", "output_dir"),
    ("rl --ckpt.path there", "--ckpt.output-dir there", "trainer.ckpt.output_dir"),
    ("rl --orchestrator.client.port 1", "--orchestrator.client.base-url http://localhost:1/v1",
     "orchestrator.client.base_url"),
    ("rl --inference.server.port http://localhost:8001", "--inference.server.port 8001", "inference.server.port"),
    ("orchestrator @ older", "client.base_url http://localhost:8001/v1", "client.base_url"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "today", "key"), OLDER)
def test_older_spellings_work_with_a_hint(line, today, key, capsys):
    Path("older").write_text("[client]\nport = 8001\n[environment]\nid = 'x'")
    cls, argv, _ = read(line)
    config = load(cls, argv, prog="x")
    assert str(value(config, key)) == today.split()[1]
    shown = "older, line 2 8001" if "older" in line else line.partition(" ")[2]
    assert capsys.readouterr().err == f"hint: {shown} is an older spelling of {today}\n"
