"""Conversations with tools, in a worker's process, against a scripted engine: exact tokens, faults rightly placed."""

import itertools
import json
import re
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from verifiers.v1.runtimes.subprocess import SubprocessConfig

from prime_rl.envs import tools
from prime_rl.envs.ids import Broken, LoadError
from prime_rl.envs.protocol import ROLES, EpisodeResult, Outcome, Run, Setup
from prime_rl.envs.verifiers_v1 import VerifiersEnv
from support.environments import write_environments
from support.fake_engine import TEMPLATE, FakeEngine, assert_exact, make_tokenizer
from support.tool_environments import SOURCES

pytestmark = pytest.mark.asyncio(loop_scope="module")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def script(engine: FakeEngine, replies: Iterable[str]) -> None:
    """The replies in turn; the last one for ever."""
    replies = list(replies)
    left = itertools.chain(replies, itertools.repeat(replies[-1]))
    engine.reply = lambda prompt: next(left)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeEngine]:
    root = tmp_path_factory.mktemp("tools")
    path = str(write_environments(root / "path", SOURCES))
    model = make_tokenizer(root / "model", TEMPLATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)  # a worker has the working directory on its path, and PYTHONPATH is not set
        patch.delenv("PYTHONPATH", raising=False)
        patch.syspath_prepend(path)
        async with FakeEngine(model, max_model_len=4096) as engine:
            yield engine


@pytest.fixture(autouse=True)
def _reset(engine: FakeEngine) -> None:
    engine.exchanges.clear()
    engine.delay, engine.max_model_len = 0.0, 4096


def setup(engine: FakeEngine, env_id: str, **settings: Any) -> Setup:
    return Setup(env_id, env_id, {}, str(engine.model), "auto", "info", **settings)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def desk(engine: FakeEngine) -> AsyncIterator[Any]:
    async with VerifiersEnv(setup(engine, "env-desk")) as env:
        yield env


async def run(env: Any, engine: FakeEngine) -> EpisodeResult:
    return await env.run(Run(1, "e", 0, env.task_ids[0], {"max_tokens": 200}, 0, engine.base_url, 0.0))


async def test_calls_are_answered(desk: Any, engine: FakeEngine) -> None:
    """Definitions reach the prompt, results come back as tool messages; the whole is one sample of what was seen."""
    script(engine, [f"Let me see.\n{call('desk_add', a=2, b=3)}\n{call('desk_add', a=5)}", "It is 5."])
    result = await run(desk, engine)
    assert result.ok, result.message
    first, second = engine.exchanges
    text = engine.tokenizer.decode(second.prompt)
    assert '"name": "desk_add", "description": "The sum of two numbers."' in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert second.prompt[: len(first.prompt) + len(first.completion)] == first.prompt + first.completion
    (sample,) = result.samples
    assert_exact(sample, engine.exchanges)
    roles = [ROLES[role] for role, _ in itertools.groupby(sample.roles or b"")]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert (result.num_turns, result.reward) == (2, 2.0)
    assert (result.metrics["tool_calls"], result.metrics["malformed_tool_calls"]) == (2.0, 0.0)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ('<tool_call>\n{"name": "desk_add", "arguments": {"a": 1,}}\n</tool_call>', "it is no JSON, or has no name"),
        (call("desk_subtract", a=1), "there is no tool 'desk_subtract' (tools: desk_add, desk_divide"),
        ('<tool_call>\n{"name": "desk_add", "arguments": [1]}\n</tool_call>', "its arguments are no JSON object"),
        (call("desk_divide", a=1, b=0), "division by zero"),
        (call("desk_add", b=1), "Field required"),
    ],
)
async def test_bad_calls_are_the_models_fault(desk: Any, engine: FakeEngine, said: str, answer: str) -> None:
    """The model is told, the conversation goes on, and it is counted; what it sampled is trained on as it is."""
    script(engine, [said, "Sorry."])
    result = await run(desk, engine)
    assert result.ok, result.message
    assert answer in result.completion
    malformed = "Error: the call cannot be made" in result.completion
    assert (result.metrics["malformed_tool_calls"], result.metrics["failed_tool_calls"]) == (malformed, not malformed)
    assert_exact(*result.samples, engine.exchanges)


async def test_what_hangs_or_dies(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that takes too long is told to the model. A server that it blocked costs the next episode, one that died
    its own, and the worker."""
    monkeypatch.setattr(tools, "CALL_SECONDS", 1.0)
    async with VerifiersEnv(setup(engine, "env-desk")) as env:
        script(engine, [call("desk_stall"), "Too slow."])
        result = await run(env, engine)
        assert result.ok, result.message
        assert "Error: no result within 1 seconds" in result.completion
        monkeypatch.setattr(tools, "CONNECT_SECONDS", 0.5)
        with pytest.raises(Broken, match="tool servers desk do not list their tools: "):
            await run(env, engine)
    async with VerifiersEnv(setup(engine, "env-desk")) as env:
        script(engine, [call("desk_quit"), "Never said."])
        with pytest.raises(Broken, match="tool servers desk do not list their tools: .*quitting"):
            await run(env, engine)


async def test_a_server_of_each_episode(engine: FakeEngine) -> None:
    """A task's own tools know the task, and have no prefix if they want none."""
    async with VerifiersEnv(setup(engine, "env-pad")) as env:
        script(engine, [call("word"), "Done."])
        result = await run(env, engine)
    assert result.ok, result.message
    assert result.completion.splitlines() == ["assistant: word({})", "tool: hello", "assistant: Done."]


async def test_tools_that_do_not_start_are_named(engine: FakeEngine) -> None:
    """Named with the server's last lines: before any episode for all episodes' tools, as its error for one's own."""
    reason = "it exited with status 1: .*No module named no_such_module"
    with pytest.raises(LoadError, match=f"environment 'env-no-desk': its tools failed to start: .*{reason}"):
        async with VerifiersEnv(setup(engine, "env-no-desk")):
            pass
    async with VerifiersEnv(setup(engine, "env-bad-pad")) as env:
        result = await run(env, engine)
    assert result.outcome is Outcome.ERRORED
    assert re.search("it exited with status 1: .*RuntimeError: the index is not there", result.message), result.message


async def test_a_runtime_has_a_directory_when_it_is_used() -> None:
    """Nothing on disk for an episode that writes nothing; what one writes, also by a view, goes with its runtime."""
    for use in (False, True):
        runtime = tools.ToolRuntime(SubprocessConfig(), "a-runtime")
        await runtime.start()
        directory = Path(str(runtime.info.id))
        assert not directory.exists()
        if use:
            await runtime.with_env({}).write("seen", b"1")
            assert (await runtime.run(["cat", "seen"], {})).stdout == "1"
        await runtime.stop()
        assert not directory.exists()
