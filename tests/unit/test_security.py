"""Contracts about the whole: nothing is unpickled, no key is written or passed in the open, remote code is off."""

import re
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from pydantic import ValidationError

from prime_rl.config import InferenceConfig, OrchestratorConfig, RLConfig, parse, to_toml
from prime_rl.config.base import has_mark, settings
from prime_rl.config.orchestrator import TrainingEnv
from prime_rl.config.shared import EnvConfig, MonitorConfig, WandbConfig
from prime_rl.launcher.plan import HostResources, describe, make_plan
from prime_rl.monitor.monitor import Monitor
from prime_rl.redact import HIDDEN, is_secret
from support.configs import CLASSES

ROOT = Path(__file__).parents[2]
KEY = "a-key-nobody-may-see"

# What runs, or may run, code that comes as data.
UNPICKLES = re.compile(
    r"""^\s*(import|from)\ (_?pickle|cPickle|cloudpickle|dill|marshal|shelve|joblib|jsonpickle)\b
    | torch\.load\((?!.*weights_only=True)
    | (?<![\w.])(eval|exec)\( | yaml\.load\( | read_pickle | _pyobj\(
    | (broadcast|scatter|recv)_object_list | gather_object
    | (allow_pickle|shell|trust_remote_code)=True
    | multiprocessing\.(Queue|Pipe|Manager|Pool)\(""",
    re.VERBOSE,
)
UNPICKLING = [
    "import pickle", "    from pickle import loads", "torch.load(f)", "torch.load(f, weights_only=flag)",
    "dist.broadcast_object_list(box)", "socket.recv_pyobj()", "eval(text)", "subprocess.run(text, shell=True)",
]  # fmt: skip
# Reads a dataset's strings through an Unpickler that admits no class; runs programs in the sandbox.
RESTRICTED = {"environments/livecodebench/tests.py"}


def test_nothing_is_unpickled():
    """Contract: what comes from another process or a file is data, never code; the check can fail."""
    paths = [path for room in ("src", "environments") for path in (ROOT / room).rglob("*.py")]
    files = {path.relative_to(ROOT).as_posix(): path for path in paths}
    for name in RESTRICTED:
        assert "def find_class" in files.pop(name).read_text(), "its Unpickler chooses the classes"
    lines = [f"{name}: {line}" for name, path in files.items() for line in path.read_text().splitlines()]
    assert [line for line in lines if UNPICKLES.search(line.partition(": ")[2])] == []
    assert [line for line in UNPICKLING if not UNPICKLES.search(line)] == []


@pytest.mark.parametrize("cls", CLASSES)
def test_settings_that_hold_keys_are_marked(cls):
    """Contract: a setting named like a secret is marked (not shown or written), or names a variable; no remote code."""
    for setting in settings(cls):
        keys, name = setting.keys, setting.keys[-1]
        if str in setting.kinds and is_secret(name) and not name.endswith("_var"):
            assert has_mark(setting.field, "secret"), keys
        if name == "trust_remote_code":
            assert setting.field.default is False, keys


def test_the_key_reaches_those_who_need_it_by_environment():
    """Contract: server and orchestrator get it as a variable, the trainer not; no command line or file holds it."""
    config = RLConfig(orchestrator={"environment": {"id": "reverse-text"}}, inference={"api_key": KEY})
    plan = make_plan(config, HostResources([], 2, {}))
    assert {process.name for process in plan.processes if KEY in process.env.values()} == {"inference", "orchestrator"}
    assert not any(KEY in argument for process in plan.processes for argument in process.argv)
    sections = (config, config.inference)
    named = config.model_copy(deep=True)
    named.orchestrator.client.api_key_var = "JUDGE"
    other = make_plan(named, HostResources([], 2, {}))
    assert {"JUDGE": KEY}.items() <= next(one.env for one in other.processes if one.name == "orchestrator").items()
    shown = [
        describe(plan),
        describe(other),
        *(text for section in sections for text in (to_toml(section), repr(section))),
    ]
    with pytest.raises(Exception, match="port") as error:
        parse(InferenceConfig, ["--api-key", KEY, "--server.port", "0"], {})
    with pytest.raises(Exception, match="MLFLOW_TRACKING_PASSWORD") as refused:
        parse(OrchestratorConfig, ["--environment.id", "x", "--monitor.mlflow.uri", f"https://bob:{KEY}@host"], {})
    assert not any(KEY in text for text in (*shown, str(error.value), str(refused.value)))


def test_wandb_is_shown_no_keys(tmp_path, monkeypatch):
    """Contract: the configuration that W&B displays has no text under names of secrets, anywhere; the rest stays."""
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = OrchestratorConfig(environments=[TrainingEnv(id="judge", args={"judge_key": KEY, "split": "train"})])
    plain = config.model_dump(mode="json")
    Monitor(tmp_path, "orchestrator", MonitorConfig(wandb=WandbConfig()), plain).close()
    plain["environments"][0]["args"]["judge_key"] = HIDDEN
    assert wandb.init.call_args.kwargs["config"] == plain


@pytest.mark.parametrize(
    ("args", "refused"),
    [
        ({"judge_api_key": "sk-1"}, True),
        ({"judge": {"client": {"apiKey": "x y"}}}, True),
        ({"hf_token": "hf_abc"}, True),
        ({"db_password": "p"}, True),
        ({"judge_key": "sk-1"}, True),
        ({"judges": [{"id": "a"}, {"api_key": "sk-1"}]}, True),
        ({"db": "postgres://u:sk-1@h/db"}, True),
        ({"judge_api_key_var": "OPENAI_API_KEY"}, False),
        ({"api_key": "OPENAI_API_KEY"}, False),
        ({"answer_key": "answer", "stop_token": "</s>", "max_tokens": 3}, False),
    ],
)
def test_a_key_among_an_environments_arguments_is_refused(args, refused):
    """Written to configs/ and shown; the message leads to `secrets` without the key. What only sounds alike passes."""
    if not refused:
        assert EnvConfig(id="x", args=args).args == args
        return
    with pytest.raises(ValidationError, match="secrets") as error:
        EnvConfig(id="x", args=args)
    assert "sk-1" not in str([one["msg"] for one in error.value.errors()])
