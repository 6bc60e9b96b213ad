"""Environments of all kinds side by side in one pool: verifiers v1, classic verifiers in a Python environment of its
own, plain Python.

That one is made from the package index, once for all tests here, by the lines in docs/guides/environments.md.
"""

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from prime_rl.envs.protocol import Outcome
from prime_rl.errors import UserError
from support.environments import environment, open_pool
from support.fake_engine import assert_exact, make_tokenizer
from support.scripted import until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

REPOSITORY = Path(__file__).parents[2]
SUPPORT = REPOSITORY / "tests" / "support"
CLASSIC = SUPPORT / "envs" / "reverse_classic"
GUESS = SUPPORT / "envs" / "guess"


def classic(python: str, name: str = "reverse-classic", **args: Any) -> Any:
    return environment("reverse-classic", args, name=name, adapter="classic", python=python)


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter that the guide's lines make. Skips where uv reaches no package index and has no cache of it."""
    command = ["uv", "pip", "install", "--dry-run", "--quiet", "--target", "/nonexistent", "verifiers==0.3.1"]
    tried = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=120)
    if tried.returncode:
        pytest.skip(f"uv cannot get verifiers 0.3.1: {tried.stderr.strip().splitlines()[:1]}")
    directory = tmp_path_factory.mktemp("python") / "classic-env"
    page = (REPOSITORY / "docs" / "guides" / "environments.md").read_text()
    lines = page.partition("## A Python environment of its own")[2].partition("```bash\n")[2].partition("```")[0]
    for written, meant in (
        ("gsm8k==0.2.1", f"{CLASSIC} {GUESS}"),
        ("gsm8k-env", directory),
        ("ours.txt", f"{directory}.txt"),
    ):
        assert written in lines
        lines = lines.replace(written, str(meant))
    subprocess.run(["bash", "-ec", lines], cwd=REPOSITORY, check=True, timeout=600)
    return str(directory / "bin" / "python")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(python, tmp_path_factory):
    root = tmp_path_factory.mktemp("kinds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(GUESS))
        envs = [
            environment("reverse-text", {"num_tasks": 8}),
            environment("guess"),
            environment("owner/guess@0.2.0", {"words": 2}, name="guess-apart", python=python),
            classic(python),
            classic(python, "two", kind="two", split="eval"),
            classic(python, "forgetful", kind="forgetful"),
            classic(python, "raises", reward="raises"),
            classic(python, "nan", reward="nan"),
            classic(python, "no-length", metric="raises"),
            classic(python, "slow", kind="slow"),
            classic(python, "silent", kind="silent"),
            environment("reverse-classic", {"kind": "two"}, name="short", python=python, max_turns=1),
        ]
        async with open_pool(envs, make_tokenizer(root / "model"), root / "out") as world:
            yield world


@pytest.fixture(autouse=True)
def _reset(world):
    world.engine.reset()
    world.engine.reply = lambda prompt: "olleh"


async def test_side_by_side(world):
    """Episodes of every kind run at once, against one engine, and are what each kind makes of them."""
    names = ["reverse-text", "guess", "guess-apart", "reverse-classic", "two"]
    results = dict(zip(names, await asyncio.gather(*(world.run(name) for name in names)), strict=True))
    assert {name: result.message for name, result in results.items() if not result.ok} == {}
    assert {name: result.num_turns for name, result in results.items()} == {
        "reverse-text": 1, "guess": 3, "guess-apart": 3, "reverse-classic": 1, "two": 2,
    }  # fmt: skip
    assert [len(result.samples) for result in results.values()] == [1] * 5
    assert {name: len(world.pool.tasks(name)) for name in names} == {
        "reverse-text": 8, "guess": 4, "guess-apart": 2, "reverse-classic": 3, "two": 1,
    }  # fmt: skip


async def test_classic_single_turn(world):
    """Tokens are the engine's; the rubric's functions are rewards and metrics."""
    engine = world.engine
    result = await world.run("reverse-classic", seed=5)
    (sample,) = result.samples
    (exchange,) = engine.exchanges
    assert_exact(sample, engine.exchanges)
    assert (result.outcome, result.reward, sample.reward) == (Outcome.OK, 2.0, 2.0)
    assert (result.rewards, result.metrics) == ({"likeness": 2.0}, {"length": 1.0, "num_turns": 1.0})
    assert (exchange.body["cache_salt"], exchange.body["sampling_params"]["seed"]) == ("v3", 5)
    assert result.task_id == "reverse_classic/0"
    assert result.completion == "olleh"


async def test_classic_environments_are_tried(python, tmp_path):
    """What no reply prevents ends the start, on one line; a parser that raises does not, nor a turn that may not be."""
    model = make_tokenizer(tmp_path / "model")
    for reward, cause in (
        ("label", "KeyError: 'label'"),
        ("name", "NameError: name 'similarity' is not defined"),
        ("module", "ModuleNotFoundError: No module named 'not_installed'"),
    ):
        with pytest.raises(
            UserError, match=f"reverse-classic.*every task fails, whatever the reply: {cause}.*classic.py"
        ):
            async with open_pool([classic(python, reward=reward)], model, tmp_path / reward):
                pass
    fine = [classic(python, reward="parser"), classic(python, "finite", kind="finite")]
    async with open_pool(fine, model, tmp_path / "fine"):
        pass


async def test_classic_turns(world):
    """The second turn extends the ids of the first, also when that was cut; one that starts over is a sample of its
    own. `max_turns` cuts a conversation short, which is said; the environment's own end is none that cuts; who asks
    nothing gives nothing."""
    engine = world.engine
    engine.reply = lambda prompt: "Sure Ġ �"
    result = await world.run("two", max_tokens=6)
    (sample,) = result.samples
    assert len(engine.exchanges) == 2
    assert_exact(sample, engine.exchanges)
    assert (result.is_truncated, sample.prompt_len) == (True, len(engine.exchanges[0].prompt))
    engine.reset()
    for sample, exchange in zip((await world.run("forgetful")).samples, engine.exchanges, strict=True):
        assert_exact(sample, [exchange])
    assert len(engine.exchanges) == 2
    engine.reply = lambda prompt: "olleh"
    short, whole, silent = [await world.run(name) for name in ("short", "two", "silent")]
    assert [(one.outcome, one.num_turns, one.is_truncated) for one in (short, whole, silent)] == [
        (Outcome.OK, 1, True), (Outcome.OK, 2, False), (Outcome.INVALID, 0, False),
    ]  # fmt: skip
    assert "no sampled tokens" in silent.message


async def test_classic_faults_are_outcomes(world):
    """A reward that raises is not a 0, unless its weight is; no number, and an engine's failure, are named."""
    engine = world.engine
    raised = await world.run("raises")
    assert raised.outcome is Outcome.ERRORED
    assert "reward function 'likeness': ValueError: no reward today (" in raised.message
    unweighed = await world.run("no-length")
    assert (unweighed.outcome, unweighed.reward, unweighed.metrics["length"]) == (Outcome.OK, 2.0, 0.0)
    assert (await world.run("nan")).outcome is Outcome.INVALID
    engine.status = 503
    assert (await world.run("reverse-classic")).outcome is Outcome.ENGINE_UNAVAILABLE
    engine.status, engine.malformed = 200, True
    refused = await world.run("reverse-classic")
    assert (refused.outcome, refused.samples) == (Outcome.ENGINE_REFUSED, [])


async def test_classic_deadline_and_cancellation(world):
    """The deadline holds where the environment waits; a cancelled episode leaves no request, and the worker goes on."""
    engine = world.engine
    assert (await world.run("slow", seconds=0.5)).outcome is Outcome.TIMEOUT
    engine.delay = 60.0
    task = asyncio.create_task(world.run("reverse-classic"))
    await until(lambda: engine.running == 1)
    task.cancel()
    await until(lambda: engine.running == 0)
    engine.delay = 0.0
    assert (await world.run("reverse-classic")).ok
    assert world.pool.restarts == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"ranked": True}, r"reward function 'rank' scores a group of episodes together"),
        ({"kinds": "two"}, r"no argument 'kinds'; did you mean 'kind'\?"),
        ({"kind": "three"}, r"failed to load: KeyError: 'three'"),
        ({"split": "tset"}, r"argument split is 'tset'"),
        ({"kind": "no-eval", "split": "eval"}, r"no tasks of its own for evaluation"),
    ],
)
async def test_classic_that_cannot_be_used(args, message, python, world, tmp_path):
    """Refused when it is loaded, with the reason."""
    with pytest.raises(UserError, match=message):
        async with open_pool([classic(python, **args)], world.engine.model, tmp_path):
            pass
