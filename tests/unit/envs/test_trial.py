"""Reward functions are tried before a server is up; what is reported no reply could have prevented."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from prime_rl.envs import verifiers_v1
from prime_rl.envs.ids import LoadError
from prime_rl.envs.protocol import Setup
from prime_rl.envs.trial import broken_reward

SOURCE = """
import asyncio, json, re
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str = "4"
    seed: int | None = None

class Task(vf.Task[Data]):
    {hook}

    @vf.reward(weight=1.0)
    async def graded(self, {parameters}) -> float:
        {body}

class TestTaskset(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        yield Task(Data(prompt="2 + 2"), self.config.task)

class TestEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        {env}

__all__ = ["TestTaskset", "TestEnv"]
"""
PASSES = "await agents.agent.run(task)"


def source(body: str, parameters: str = "trace", hook: str = "pass", env: str = PASSES) -> str:
    return SOURCE.format(body=body, parameters=parameters, hook=hook, env=env)


async def tried(**parts: str) -> str:
    names: dict[str, Any] = {"__name__": "tried"}
    exec(source(**parts), names)
    with suppress(Exception):  # it cannot be tried
        return await broken_reward(object.__new__(names["TestEnv"]), names["Task"](names["Data"](prompt="2 + 2")))
    return ""


BROKEN: dict[str, dict[str, Any]] = {
    "RuntimeError: no luck": {"body": "raise RuntimeError('no luck')"},
    "KeyError: 'difficulty'": {"body": "return 1.0 / {}['difficulty'] * len(trace.last_reply)"},
    "TypeError: ": {"body": "return 1.0", "parameters": "completion"},
    "NameError: name 'similarity' is not defined": {"body": "return similarity(trace.last_reply, self.data.answer)"},
    "'Data' object has no attribute 'truth'": {"body": "return float(trace.last_reply == self.data.truth)"},
    "has no attribute 'parse'": {"body": "return json.parse(trace.last_reply)"},
    "No module named 'surely_not_installed'": {"body": "reply = trace.last_reply; import surely_not_installed"},
    "ZeroDivisionError: ": {"body": "return 1 / 0", "env": "await agents.agent.run(task.with_data(seed=1))"},
}
FINE: dict[str, dict[str, Any]] = {
    "it reads the reply": {"body": "return float(trace.last_reply == self.data.answer)"},
    "a reply without tags": {"body": "return float(re.search('<a>(.*)</a>', trace.last_reply).group(1))"},
    "a reply that is no JSON": {"body": "return json.loads(trace.last_reply)['score']"},
    "no calls were made": {"body": "return trace.calls[-1].cost"},
    "a loop over nothing": {"body": "for call in trace.calls: last = call\n        return last"},
    "a metric of the rollout": {"body": "return trace.metrics['steps']"},
    "a service that may come back": {"body": "raise ConnectionError('refused')"},
    "it needs a runtime": {"body": "return len(runtime.name)", "parameters": "trace, runtime=None"},
    "the task is prepared": {
        "body": "return self.goal", "hook": "async def setup(self, trace, runtime): self.goal = 1.0",
    },
    "the environment completes the task": {
        "body": "return 1 / self.data.seed", "env": "await agents.agent.run(task.with_data(seed=1))",
    },
    "the environment does something else": {
        "body": "raise RuntimeError", "env": "await agents.agent.provision(task)",
    },
}  # fmt: skip


@pytest.mark.parametrize("cause", BROKEN)
async def test_a_reward_that_cannot_work_is_named(cause: str) -> None:
    """Contract: function and exception: of an exception before the rollout is read, and afterwards of what does not
    exist."""
    said = await tried(**BROKEN[cause])
    assert cause in said
    assert said.startswith("'graded', which scores its episodes, raises whatever the reply: ")


@pytest.mark.parametrize("why", FINE)
async def test_what_another_reply_or_run_may_prevent_is_no_fault(why: str) -> None:
    """Contract: no false alarm where an exception may be due to the made-up reply, to what a real episode prepares, or
    to a service that is away."""
    assert await tried(**FINE[why]) == ""


async def test_a_worker_is_not_ready_with_a_broken_reward(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: one line that names the environment, too; a slow function is not waited for."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(verifiers_v1, "TRIAL_SECONDS", 0.2)

    async def enter(name: str, body: str) -> None:
        (tmp_path / f"{name}.py").write_text(source(body))
        async with verifiers_v1.VerifiersEnv(Setup(f"{name}-eval", name, {}, str(tiny_model), "auto", "info")):
            pass

    await enter("slow_reward", "await asyncio.sleep(600)")
    with pytest.raises(LoadError) as caught:
        await enter("bad_reward", "return 1 / 0")
    assert str(caught.value).startswith("environment 'bad_reward': 'graded', which scores its episodes, raises")
    assert "ZeroDivisionError: division by zero" in str(caught.value)
    assert "\n" not in str(caught.value)
