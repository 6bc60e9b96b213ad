"""The first task is run before a server is up; what is reported no reply could have prevented."""

import functools
import itertools
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from prime_rl.envs import conversation, trial
from prime_rl.envs.protocol import Setup
from prime_rl.envs.worker import load

VERIFIERS = """
import json, os, re, socket, subprocess, time
from typing import Any
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str = "4"
    info: dict[str, Any] = {{"labels": ["a"]}}

class Task(vf.Task[Data]):
    {hook}

    @vf.reward(weight=1.0)
    async def graded(self, {parameters}) -> float:
        text = trace.last_reply
        info = self.data.info
        {body}

class TestTaskset(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        yield Task(Data(prompt="2 + 2"), self.config.task)

class TestEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        {env}

__all__ = ["TestTaskset", "TestEnv"]
"""
PLAIN = """
import json, os, re, socket, subprocess, time

tasks = [{{"prompt": "2 + 2", "answer": "4", "info": {{"labels": ["a"]}}, "state": {{}}}}]

async def rollout(task, chat):
    reply = await chat()
    text = reply.text
    info = task["info"]
    {body}
"""
NUMBERS = itertools.count()
CHOOSE = functools.cache(conversation.choose)  # reading a tokenizer takes longest
BROKEN = {
    "KeyError: 'label'": "return float(text == info['label'])",
    "KeyError: 'weights'": "if info['weights']:\n            return 1.0",
    "NameError: name 'likeness' is not defined": "return likeness(text) if len(text) < 9999 else 0.0",
    "ModuleNotFoundError: No module named 'not_installed'": "import not_installed",
    "ImportError: cannot import name 'parse' from 'json'": "from json import parse",
    "AttributeError: module 'json' has no attribute 'parse'": "return json.parse(text)",
    "RuntimeError: no luck": "raise RuntimeError('no luck')",
    "ZeroDivisionError: division by zero": "return 1 / 0",
}
FINE = {
    "reads the reply": "return float(text == '4')",
    "needs usual tags": "return float(bool(re.search('<answer>(.*)</answer>', text, re.DOTALL).group(1)))",
    "has a bug for who sets none": "if '<answer>' not in text:\n            return unknown_name\n        return 1.0",
    "needs tags": "return float(re.search('<a>(.*)</a>', text).group(1))",
    "needs JSON": "return json.loads(text)['score']",
    "needs a tag by name": "return float(dict(re.findall('<(.*)>(.*)</.*>', text))['score'])",
    "finds nothing": "found = dict(re.findall('<x>(.*)=(.*)</x>', text)); return float(found['score'])",
    "needs one of its choices": "return {'A': 1.0, 'B': 0.0}[text]",
    "needs a label of the task": "letter = (re.findall('[A-D]', text[-1:]) or ['?'])[0]; return info[letter]",
    "keeps what it finds": "info.update(re.findall('<(.*)>(.*)</.*>', text)); return float(info['score'])",
    "compares fields": "found = dict(re.findall('<(.*)>(.*)</.*>', text)); return info['labels'] == found['labels']",
    "adds what it finds": "info = info | dict(re.findall('<(.*)>(.*)</.*>', text)); return float(info['score'])",
    "keeps it in the task": "task['info'].update(re.findall('<(.*)>(.*)</.*>', text)); return float(info['score'])",
    "loops over nothing": "for step in re.findall('<step>', text): last = step\n        return len(last)",
    "refuses": "if '<a>' not in text:\n            raise KeyError('no tag')\n        return 1.0",
    "refuses in a handler": "try:\n            return float(json.loads(text)['a'])\n        except Exception:\n"
    "            raise NotImplementedError",
    "runs the reply": "return float(eval((re.findall('<code>(.*)</code>', text) or ['nothing'])[0]))",
    "needs an object": "return (json.loads(text) if text.startswith('{') else text).get('score')",
    "may find a service": "raise_ = socket.create_connection(('127.0.0.1', 1)); return raise_['x']",
    "runs a program": "subprocess.run(['true'], check=True); raise RuntimeError('after it')",
    "writes a file": "open('written', 'w').close(); raise RuntimeError('after it')",
    "takes long": "time.sleep(600)",
}
TWO_TURNS = """
        async with agents.agent.interaction(task) as chat:
            await chat.turn()
            await chat.turn('again')"""
OF_VERIFIERS: dict[str, dict[str, str]] = {
    "missing 1 required positional argument: 'completion'": {"parameters": "trace, completion", "body": "return 1.0"},
    "'Data' object has no attribute 'truth'": {"body": "return float(text == self.data.truth)"},
    "RuntimeError: not prepared": {"hook": "async def setup(self): raise RuntimeError('not prepared')"},
    "KeyError: 'goal'": {"hook": "async def finalize(self, trace): trace.last_reply, self.data.info['goal']"},
    "NameError: name 'grade' is not defined": {"hook": "async def score(self, trace, runtime=None): grade(trace)"},
    "NameError: name 'turns' is not defined": {"env": TWO_TURNS, "body": "return 1.0 / turns"},
    "NameError: name 'seed' is not defined": {"env": "await agents.agent.run(task.with_data(seed=seed))"},
}
FINE_OF_VERIFIERS: dict[str, dict[str, str]] = {
    "needs tags": {"body": FINE["needs tags"]},
    "needs a label of the task": {"body": FINE["needs a label of the task"]},
    "no calls were made": {"body": "return trace.calls[7].cost"},
    "a metric of the rollout": {"body": "return trace.metrics['steps']"},
    "the task is prepared": {"hook": "async def setup(self): self.goal = 1.0", "body": "return self.goal"},
    "a stop makes a note": {
        "hook": "@vf.stop\n    async def noted(self, trace: vf.Trace) -> bool:\n        self.note = 1.0\n"
        "        return False",
        "body": "return self.note",
    },
    "a stop keeps what it finds": {
        "hook": "@vf.stop\n    async def noted(self, trace: vf.Trace) -> bool:\n"
        "        trace.info.update([('', 1.0), *re.findall('<(.*)>', trace.last_reply)])\n        return False",
        "body": "return trace.info['score']",
    },
    "it uses its runtime": {
        "parameters": "trace, runtime",
        "body": "await runtime.run(['true'], {}); raise RuntimeError('after it')",
    },
    "there is a second turn": {
        "env": TWO_TURNS,
        "body": "raise RuntimeError('in no single turn')",
    },
}  # fmt: skip


def source_of(kind: str, body: str = "return 1.0", **parts: str) -> str:
    body = body.replace("; ", "\n        ")
    if kind == "python":
        return PLAIN.format(body=body.replace("\n    ", "\n"))
    defaults = {"hook": "pass", "parameters": "trace", "env": "await agents.agent.run(task)"}
    return VERIFIERS.format(body=body, **(defaults | parts))


@pytest.fixture
def find(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(conversation, "choose", CHOOSE)

    async def find(kind: str, source: str = "", **parts: str) -> str:
        name = f"tried_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(source or source_of(kind, **parts))
        setup = Setup("tried", name, {}, str(tiny_model), "auto", "info", adapter=kind)
        return await trial.find_fault(load(setup), setup)

    return find


@pytest.mark.parametrize("kind", ["verifiers", "python"])
@pytest.mark.parametrize("cause", BROKEN)
async def test_what_no_reply_prevents_is_found(find: Any, kind: str, cause: str) -> None:
    """Contract: on one line, the exception and where the environment's own code raises it."""
    fault = await find(kind, body=BROKEN[cause])
    assert fault.startswith(cause)
    assert "tried_" in fault.rpartition(" (")[2]
    assert "\n" not in fault


@pytest.mark.parametrize("cause", OF_VERIFIERS)
async def test_whatever_runs_in_an_episode_is_tried(find: Any, cause: str) -> None:
    """Contract: a task's own setup, end and score, and the environment's code around them."""
    assert cause in await find("verifiers", **OF_VERIFIERS[cause])


@pytest.mark.parametrize("why", FINE)
async def test_what_another_reply_may_prevent_is_no_fault(
    find: Any, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Contract: no false alarm of a parser, nor of what was cut off; no file is written; no wait beyond a limit."""
    monkeypatch.setattr(trial, "SECONDS", 5.0 if why != "takes long" else 0.5)
    assert await find("python", body=FINE[why]) == ""
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize("why", FINE_OF_VERIFIERS)
async def test_what_a_real_episode_prepares_is_no_fault(find: Any, why: str) -> None:
    """Contract: no false alarm of what depends on other hooks, a runtime or more turns."""
    assert await find("verifiers", **FINE_OF_VERIFIERS[why]) == ""


async def test_nothing_is_connected_to(find: Any) -> None:
    """Contract: no service is called."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        connect = f"socket.create_connection({server.getsockname()!r})"
        assert await find("python", body=f"{connect}\n        raise RuntimeError('after it')") == ""
        with pytest.raises(TimeoutError):
            server.accept()


async def test_one_bad_task_is_no_fault(find: Any, tiny_model: Path) -> None:
    """Contract: a field that the first task lacks, and others have, stops no run."""
    tasks = "tasks = [{'prompt': 'a'}, *({'prompt': str(n), 'label': 'a'} for n in range(9))]\n"
    rollout = (
        "async def rollout(task, chat):\n    reply = await chat()\n    return float(reply.text == task['label'])\n"
    )
    assert await find("python", source=tasks + rollout) == ""
    assert await find("python", source=tasks.replace("'label'", "'lable'") + rollout) != ""
    alternating = "tasks = [{'prompt': str(n), **({'label': 'a'} if n % 2 else {})} for n in range(101)]\n"
    assert await find("python", source=alternating + rollout) == ""


async def test_an_open_file_is_read_on_from_where_it_was(find: Any, tmp_path: Path) -> None:
    """Contract: the trial takes nothing from a file that the environment has open."""
    (tmp_path / "feed").write_text("first")
    source = "import sys\nsys.feed = open('feed', 'rb', buffering=0)\n" + source_of(
        "python", "sys.feed.read(); info['x']"
    )
    assert "KeyError" in await find("python", source=source.replace("import json", "import sys, json"))
    with sys.__dict__.pop("feed") as feed:
        assert feed.read() == b"first"


@pytest.mark.parametrize(
    "env_id", ["reverse-text", "alphabet-sort", "wordle", "calculator", "kuhn-poker", "simple-math"]
)
async def test_bundled_environments_pass(env_id: str, tiny_model: Path) -> None:
    """Contract: none of several turns, tools or agents is reported."""
    setup = Setup(env_id, env_id, {}, str(tiny_model), "auto", "info")
    assert await trial.find_fault(load(setup), setup) == ""
