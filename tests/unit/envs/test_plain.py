"""Environments in plain Python: tokens are the engine's, rewards are what `rollout` returned, faults are outcomes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prime_rl.envs.ids import LoadError
from prime_rl.envs.protocol import EpisodeResult, Outcome, Run, Setup
from prime_rl.envs.worker import load
from support.fake_engine import FakeEngine, assert_exact

GUESS = Path(__file__).parents[2] / "support" / "envs" / "guess"
HEAD = "tasks = [{'id': 'one', 'prompt': 'Say a.', 'system_prompt': 's', 'answer': 'a'}]\n"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes a module; returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(GUESS))

    def write(name: str, source: str) -> str:
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return write


def setup(
    env_id: str, model: Path, args: dict[str, Any] | None = None, renderer: str = "auto", **settings: Any
) -> Setup:
    return Setup(env_id, env_id, args or {}, str(model), renderer, "info", **settings)


async def play(engine: FakeEngine, one: Setup, **sampling: Any) -> EpisodeResult:
    async with load(one) as env:
        return await env.run(Run(1, "1.2", 0, env.task_ids[0], {"max_tokens": 64, **sampling}, 3, engine.base_url, 0.0))


CALLS = """
tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]
tasks = [{"prompt": "What is 1 + 2?"}]

async def rollout(task, chat):
    reply = await chat()
    while reply.tool_calls:
        answers = [call.problem or str(sum(call.arguments["of"])) for call in reply.tool_calls]
        told = zip(reply.tool_calls, answers)
        reply = await chat([{"role": "tool", "tool_call_id": call.id, "content": answer} for call, answer in told])
    return float(reply.text == "3")
"""


async def test_tools(tiny_model, package):
    """Definitions reach the model, its calls the environment, answers the model: one sequence. Bad calls are told."""
    name = package("plain_tools", CALLS)

    def reply(prompt: str) -> str:
        if "<tool_response>\n3" in prompt:
            return "3"
        arguments = '{"of": [1, 2]}' if "invalid_json" in prompt else '{"of": [1, 2'
        return f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'

    async with FakeEngine(tiny_model, reply=reply, max_model_len=2048) as engine:
        result = await play(engine, setup(name, tiny_model, renderer="chatml"), max_tokens=200)
        assert '"name": "add"' in engine.tokenizer.decode(engine.exchanges[0].prompt)
    assert (result.outcome, result.reward, result.num_turns) == (Outcome.OK, 1.0, 3), result.message
    assert_exact(*result.samples, engine.exchanges)


@pytest.mark.parametrize(("settings", "context", "turns"), [({"max_turns": 2}, 512, 2), ({}, 250, 3)])
async def test_when_a_conversation_is_over(settings, context, turns, tiny_model, package):
    """When its turns are used up, or its context is full, the environment judges what there is."""
    talks = "async def rollout(task, chat):\n while len(chat.replies) < 8 and await chat('go on, please') is not None:"
    talks += " pass\n return 1"
    name = package("plain_talks", HEAD + talks)
    async with FakeEngine(tiny_model, reply=lambda prompt: "word " * 8, max_model_len=context) as engine:
        result = await play(engine, setup(name, tiny_model, **settings))
    assert (result.outcome, result.num_turns, result.is_truncated) == (Outcome.OK, turns, True), result.message
    assert sum(sum(sample.loss_mask) for sample in result.samples) == result.output_tokens


async def test_engine_failures_are_the_cause(tiny_model, package):
    """An engine that is down, refuses or answers rubbish is the outcome, even if the environment catches everything."""
    name = package(
        "plain_catches", HEAD + "async def rollout(task, chat):\n try: await chat()\n except Exception: pass\n return 1"
    )
    async with FakeEngine(tiny_model) as engine:
        for status, malformed, outcome in (
            (503, False, Outcome.ENGINE_UNAVAILABLE),
            (400, False, Outcome.ENGINE_REFUSED),
            (200, True, Outcome.ENGINE_REFUSED),
        ):
            engine.status, engine.malformed = status, malformed
            assert (await play(engine, setup(name, tiny_model))).outcome is outcome
    assert (await play(engine, setup(name, tiny_model))).outcome is Outcome.ENGINE_UNAVAILABLE  # it is gone


@pytest.mark.parametrize(
    ("body", "outcome", "message"),
    [
        ("return 1 / 0", Outcome.ERRORED, "ZeroDivisionError: division by zero"),
        ("return 'good'", Outcome.ERRORED, "reward 'reward' is a str, not a number"),
        ("return {}", Outcome.ERRORED, "rollout returned no reward"),
        ("await chat(); return float('nan')", Outcome.INVALID, "reward is nan"),
        ("chat.metrics['m'] = 'x'; return 1", Outcome.ERRORED, "metric 'm' is a str"),
        ("chat.messages.clear(); await chat()", Outcome.ERRORED, "nothing has been said"),
        ("return 1", Outcome.INVALID, "no sampled tokens"),
    ],
)
async def test_faults_of_the_environment(body, outcome, message, tiny_model, package, capfd):
    """Outcomes of the episode, with the reason, and a traceback of what was raised; nothing to train on."""
    name = package("plain_faulty", f"{HEAD}async def rollout(task, chat):\n {body}")
    async with FakeEngine(tiny_model) as engine:
        result = await play(engine, setup(name, tiny_model))
    assert result.outcome is outcome
    assert message in result.message
    assert not result.samples
    assert ("Traceback" in capfd.readouterr().err) == (".py:" in result.message)


@pytest.mark.parametrize(
    ("source", "args", "message"),
    [
        ("tasks = [1]\nasync def rollout(task, chat): pass", {}, "task 0 is a int, not a dict"),
        ("tasks = [{'prompt': 3}]\nasync def rollout(task, chat): pass", {}, "the prompt of task 0 is neither text"),
        ("class Environment: pass\nasync def rollout(task, chat): pass", {}, "it has no tasks"),
        ("tasks = 3\nasync def rollout(task, chat): pass", {}, "failed to load: TypeError"),
        (HEAD + "def rollout(task, chat): pass", {}, "it needs `async def rollout(task, chat)`"),
        ("def tasks(): return 1 / 0\nasync def rollout(task, chat): pass", {}, "failed to load: ZeroDivisionError"),
        ("import surely_not_there\ntasks = []\nasync def rollout(task, chat): pass", {}, "module 'surely_not_there'"),
        ("def tasks(count=1): return []\nasync def rollout(task, chat): pass", {"cuont": 2}, "did you mean 'count'?"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(source, args, message, tiny_model, package):
    """One line that names the environment and what to mend."""
    name = package("plain_wrong", source)
    with pytest.raises(LoadError) as caught:
        load(setup(name, tiny_model, args))
    assert message in str(caught.value)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tasks(tiny_model, package):
    """`**kwargs` takes any argument. A task without an id is named by what it holds; twice the same are told apart."""
    end = "async def rollout(task, chat): pass"
    source = f"def tasks(count=1, **more): return [{{'id': key}} for key in more] * count\n{end}"
    made = setup(package("plain_kwargs", source), tiny_model, {"split": "eval", "count": 2})
    assert load(made).task_ids == ["split", "split#2"]
    first = load(
        setup(package("plain_ids", f"tasks = [{{'prompt': one}} for one in 'aba']\n{end}"), tiny_model)
    ).task_ids
    assert load(setup("plain_ids", tiny_model)).task_ids == first
    assert (len(set(first)), first[2]) == (3, f"{first[0]}#2")


def test_imports_little(tiny_model):
    """A worker of a plain environment holds neither verifiers nor torch nor transformers; a later import gets torch."""
    code = (
        f"import sys; sys.path.insert(0, {str(GUESS)!r})\n"
        "from prime_rl.envs.worker import load\nfrom prime_rl.envs.protocol import Setup\n"
        f"load(Setup('guess', 'guess', {{}}, {str(tiny_model)!r}, 'auto', 'info'))\n"
        "print(sorted({'verifiers', 'torch', 'transformers'} & set(sys.modules)))\n"
        "from transformers.utils.import_utils import is_torch_available\nprint(is_torch_available())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, "PyTorch" in done.stderr) == ("[]\nTrue\n", False)
