"""Environments of all kinds side by side in one pool: verifiers v1, classic verifiers in a Python environment that uv makes, plain Python.

The Python environment is really made, from the package index, once for all tests here.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from environments import environment
from fake_engine import FakeEngine, assert_exact, make_tokenizer

from prime_rl.envs.pool import EnvPool
from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.envs.venv import prepare
from prime_rl.errors import UserError

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

START_SECONDS = 180.0
SUPPORT = Path(__file__).parents[1] / "support"
CLASSIC = SUPPORT / "envs" / "reverse_classic"
GUESS = SUPPORT / "envs" / "guess"


def classic(name: str = "reverse-classic", **args: Any) -> Any:
    return environment("reverse-classic", args, name=name, adapter="classic", requirements=[str(CLASSIC)])


@pytest.fixture(scope="module")
def index() -> None:
    """Skips where uv reaches no package index and has not kept what is needed."""
    command = ["uv", "pip", "install", "--dry-run", "--quiet", "--target", "/nonexistent", "verifiers==0.3.1"]
    tried = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=120)
    if tried.returncode:
        pytest.skip(f"uv cannot get verifiers 0.3.1: {tried.stderr.strip().splitlines()[:1]}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(index: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[FakeEngine, EnvPool]]:
    root = tmp_path_factory.mktemp("kinds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        patch.setenv("PYTHONPATH", str(GUESS))
        envs = prepare(
            [
                environment("reverse-text", {"num_tasks": 8}),
                environment("guess"),
                environment("owner/guess@0.2.0", {"words": 2}, name="guess-apart", adapter="python", requirements=[str(GUESS)]),
                classic(),
                classic("two", kind="two", split="eval"),
                classic("forgetful", kind="forgetful"),
                classic("raises", reward="raises"),
                classic("nan", reward="nan"),
                classic("no-length", metric="raises"),
                environment("reverse-classic", {"kind": "two"}, name="old", requirements=[str(CLASSIC), "verifiers<0.2"]),
                classic("slow", kind="slow"),
                classic("silent", kind="silent"),
                environment("reverse-classic", {"kind": "two"}, name="short", adapter="classic", requirements=[str(CLASSIC)], max_turns=1),
            ]
        )  # fmt: skip
        async with FakeEngine(make_tokenizer(root / "model")) as engine:
            pool = EnvPool(
                envs, model=str(engine.model), base_url=engine.base_url, api_key="secret", output_dir=root / "out"
            )
            await pool.start(START_SECONDS)
            yield engine, pool
            await pool.close()


@pytest.fixture(autouse=True)
def _reset(world: tuple[FakeEngine, EnvPool]) -> None:
    engine = world[0]
    engine.exchanges.clear()
    engine.delay, engine.status, engine.malformed = 0.0, 200, False
    engine.reply = lambda prompt: "olleh"


async def run(pool: EnvPool, env: str, *, seconds: float = 60.0, **sampling: Any) -> EpisodeResult:
    return await pool.run(
        env=env,
        task_index=0,
        sampling={"temperature": 0.7, "max_tokens": 64, **sampling},
        policy_version=3,
        episode_id="1.2.3",
        deadline=time.monotonic() + seconds,
    )


async def test_side_by_side(world: tuple[FakeEngine, EnvPool]) -> None:
    """Episodes of every kind run at once, against one engine, and are what each kind makes of them."""
    _, pool = world
    names = ["reverse-text", "guess", "guess-apart", "reverse-classic", "two"]
    results = dict(zip(names, await asyncio.gather(*(run(pool, name) for name in names)), strict=True))
    assert {name: result.message for name, result in results.items() if not result.ok} == {}
    assert {name: result.num_turns for name, result in results.items()} == {
        "reverse-text": 1, "guess": 3, "guess-apart": 3, "reverse-classic": 1, "two": 2,
    }  # fmt: skip
    assert [len(result.samples) for result in results.values()] == [1] * 5
    assert {name: len(pool.tasks(name)) for name in names} == {
        "reverse-text": 8, "guess": 4, "guess-apart": 2, "reverse-classic": 3, "two": 1,
    }  # fmt: skip


async def test_classic_single_turn(world: tuple[FakeEngine, EnvPool]) -> None:
    """Tokens are the engine's; the prompt is the model's template; the rubric's functions are rewards and metrics."""
    engine, pool = world
    result = await run(pool, "reverse-classic", seed=5)
    (sample,) = result.samples
    (exchange,) = engine.exchanges
    assert_exact(sample, engine.exchanges)
    messages = [{"role": "system", "content": "Reverse the text."}, {"role": "user", "content": "Reverse: hello"}]
    assert exchange.prompt == engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)  # fmt: skip
    assert (result.outcome, result.reward, sample.reward) == (Outcome.OK, 2.0, 2.0)
    assert (result.rewards, result.metrics) == (
        {"likeness": 2.0},
        {"length": 1.0, "num_turns": 1.0},
    )
    assert (exchange.body["cache_salt"], exchange.body["sampling_params"]["seed"]) == ("v3", 5)
    assert result.task_id == "reverse_classic/0"
    assert result.completion == "olleh"
    assert (result.input_tokens, result.output_tokens) == (len(exchange.prompt), len(exchange.completion))


async def test_classic_turns_are_one_sequence(world: tuple[FakeEngine, EnvPool]) -> None:
    """The second turn extends the ids of the first, also when that was cut."""
    engine, pool = world
    engine.reply = lambda prompt: "Sure Ġ �"
    result = await run(pool, "two", max_tokens=6)
    (sample,) = result.samples
    assert len(engine.exchanges) == 2
    assert_exact(sample, engine.exchanges)
    assert (result.is_truncated, sample.prompt_len) == (True, len(engine.exchanges[0].prompt))


async def test_classic_that_starts_over_is_two_samples(world: tuple[FakeEngine, EnvPool]) -> None:
    """A prompt that does not go on from the reply before is a sequence of its own."""
    engine, pool = world
    result = await run(pool, "forgetful")
    assert len(result.samples) == 2
    for sample, exchange in zip(result.samples, engine.exchanges, strict=True):
        assert_exact(sample, [exchange])


async def test_classic_turns_that_are_used_up(world: tuple[FakeEngine, EnvPool]) -> None:
    """`max_turns` cuts a conversation short, which is said; the environment's own end is none that cuts."""
    _, pool = world
    short, whole = await run(pool, "short"), await run(pool, "two")
    assert [(one.outcome, one.num_turns, one.is_truncated) for one in (short, whole)] == [
        (Outcome.OK, 1, True), (Outcome.OK, 2, False),
    ]  # fmt: skip


async def test_classic_that_asks_nothing(world: tuple[FakeEngine, EnvPool]) -> None:
    _, pool = world
    result = await run(pool, "silent")
    assert (result.outcome, "asked the model nothing" in result.message) == (Outcome.INVALID, True), result.message


async def test_classic_faults_are_outcomes(world: tuple[FakeEngine, EnvPool]) -> None:
    """A reward that raises is not a 0; a reward that is no number, and an engine that fails, are what they are."""
    engine, pool = world
    raised = await run(pool, "raises")
    assert raised.outcome is Outcome.ERRORED
    assert "reward function 'likeness': ValueError: no reward today" in raised.message
    assert (await run(pool, "nan")).outcome is Outcome.INVALID
    engine.status = 503
    assert (await run(pool, "reverse-classic")).outcome is Outcome.ENGINE_UNAVAILABLE
    engine.status, engine.malformed = 200, True
    refused = await run(pool, "reverse-classic")
    assert refused.outcome is Outcome.ENGINE_REFUSED
    assert not refused.samples


async def test_classic_metric_that_raises(world: tuple[FakeEngine, EnvPool]) -> None:
    """A function of weight 0 is no reason to lose an episode: it gives 0, as verifiers has it."""
    _, pool = world
    result = await run(pool, "no-length")
    assert (result.outcome, result.reward, len(result.samples)) == (Outcome.OK, 2.0, 1), result.message
    assert result.metrics["length"] == 0.0


async def test_classic_for_an_older_verifiers(world: tuple[FakeEngine, EnvPool]) -> None:
    """The version that the package asks for is installed, its kind is read from its source, and its episodes are as exact."""
    engine, pool = world
    result = await run(pool, "old")
    assert result.ok, result.message
    assert_exact(result.samples[0], engine.exchanges)
    assert (result.num_turns, result.metrics["num_turns"]) == (2, 2.0)
    with pytest.raises(UserError, match=r"verifiers<0\.1\.10[\s\S]*classic environments run with verifiers 0\.1\.11 to 0\.3\.1"):  # fmt: skip
        prepare([environment("reverse-classic", requirements=[str(CLASSIC), "verifiers<0.1.10"])])


async def test_classic_deadline_and_cancellation(world: tuple[FakeEngine, EnvPool]) -> None:
    """The deadline holds where the environment waits; a cancelled episode leaves no request, and the worker goes on."""
    engine, pool = world
    assert (await run(pool, "slow", seconds=0.5)).outcome is Outcome.TIMEOUT
    engine.delay = 60.0
    task = asyncio.create_task(run(pool, "reverse-classic"))
    deadline = time.monotonic() + 30
    while not engine.running and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    task.cancel()
    while engine.running and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert engine.running == 0
    engine.delay = 0.0
    assert (await run(pool, "reverse-classic")).ok
    assert pool.restarts == 0


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (classic(group_weight=1.0), r"reward function 'rank' scores a group of episodes together"),
        (classic(kinds="two"), r"no argument 'kinds'; did you mean 'kind'\?"),
        (classic(kind="three"), r"failed to load: KeyError: 'three'"),
        (classic(split="tset"), r"argument split is 'tset'"),
        (classic(kind="no-eval", split="eval"), r"no tasks of its own for evaluation"),
    ],
)
async def test_classic_that_cannot_be_used(
    env: Any, message: str, world: tuple[FakeEngine, EnvPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused when it is loaded, with the reason."""
    engine, _ = world
    envs = prepare([env])
    pool = EnvPool(envs, model=str(engine.model), base_url=engine.base_url, api_key=None, output_dir=tmp_path)
    with pytest.raises(UserError, match=message):
        await pool.start(START_SECONDS)
    await pool.close()
