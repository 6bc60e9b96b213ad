"""Teachers behind real sockets: scores, servers that cannot, are busy, refuse or are gone; and runs with them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from prime_rl.config import OrchestratorConfig
from prime_rl.config.orchestrator import TeacherConfig
from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.errors import UserError
from prime_rl.orchestrator import orchestrator as loop
from prime_rl.orchestrator import teachers
from prime_rl.orchestrator.teachers import Teacher, TeacherError, Teachers
from support.samples import sample_tokens
from support.scripted import World, follow, fresh

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teachers, "_POLL_SECONDS", 0.02)


async def listed(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "big"}, {"id": "other"}]})


@asynccontextmanager
async def serving(complete: Handler, models: Handler = listed) -> AsyncIterator[str]:
    """A server's address."""
    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/v1/models", models)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def vllm(request: web.Request) -> web.Response:
    """-token / 100 for every token but the first."""
    body = await request.json()
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("big", 1.0, 1)
    entries = [None, *({str(t): {"logprob": -t / 100, "rank": 1}} for t in body["prompt"][1:])]
    return web.json_response({"choices": [{"prompt_logprobs": entries}]})


def after_start(answers: list[int | Handler], asked: list[int]) -> Handler:
    """A vLLM that answers so, by status or by handler, to what comes after the request that is made at the start."""

    async def complete(request: web.Request) -> web.StreamResponse:
        asked.append(1)
        answer = answers[len(asked) - 2] if 0 <= len(asked) - 2 < len(answers) else vllm
        return web.Response(status=answer, text="too long") if isinstance(answer, int) else await answer(request)

    return complete


async def garbled(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b"no such thing", headers={"Content-Encoding": "gzip"})


async def endless(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    while True:
        await answer.write(b" ")
        await asyncio.sleep(0.02)


def ignore(*_: object) -> None:
    pass


@asynccontextmanager
async def started(url: str, **settings: object) -> AsyncIterator[Teacher]:
    teacher = Teacher(TeacherConfig(base_url=f"{url}/v1", **settings), "algorithm.teacher")
    try:
        await teacher.start(1.0, ignore)
        yield teacher
    finally:
        await teacher.close()


async def test_scores() -> None:
    """Contract: the log-probability of each token given those before; a hint counts, and is not part of the answer."""
    async with serving(vllm) as url, started(url) as teacher:
        assert teacher.model == "big"
        assert list(await teacher.score([5, 10, 20])) == pytest.approx([0.0, -0.1, -0.2])
        assert list(await teacher.score([5, 10], hint=[1, 2])) == pytest.approx([-0.05, -0.1])


@pytest.mark.parametrize(
    ("answer", "message"),
    [(503, "answers HTTP 503: too long"), (garbled, "did not answer: "), (endless, "did not answer: TimeoutError")],
)
async def test_a_server_that_fails(answer: int | Handler, message: str) -> None:
    """Contract: an answer that cannot be read, or never ends, is over in time."""
    async with serving(after_start([answer], [])) as url, started(url, timeout=0.5) as teacher:
        with pytest.raises(TeacherError, match=message):
            await teacher.score([5, 10])


async def test_a_server_that_cannot_be_a_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: said before anything starts, by setting and answer. It gets `api_key_var`'s key, no other API's."""
    keys = []

    async def cannot(request: web.Request) -> web.Response:
        return web.json_response({"choices": [{"text": "hello"}]})

    async def locked(request: web.Request) -> web.Response:
        keys.append(request.headers.get("Authorization"))
        return await listed(request) if keys[-1] == "Bearer mine" else web.Response(status=401)

    monkeypatch.setenv("OPENAI_API_KEY", "sk-other")
    for complete, models, settings, message in (
        (cannot, listed, {}, "gives prompt_logprobs as vLLM does: its answer has no"),
        (vllm, listed, {"model": "huge"}, "serves big, other, not huge"),
        (vllm, locked, {}, r"does not take the key in \$TEACHER_API_KEY"),
    ):
        async with serving(complete, models) as url:
            with pytest.raises(UserError, match=f"^algorithm.teacher: .*{message}"):
                async with started(url, **settings):
                    pass
    monkeypatch.setenv("TEACHER_API_KEY", "mine")
    async with serving(vllm, locked) as url, started(url):
        assert keys == [None, "Bearer mine"]
    own = {"id": "x", "algorithm": {"type": "sft", "teacher": {"base_url": "http://127.0.0.1:9"}}}
    for settings, key in (
        ({"environments": [own, {"id": "y"}]}, "environments.x.algorithm.teacher"),
        ({"environment": {"id": "x"}, "algorithm": own["algorithm"]}, "algorithm.teacher"),
    ):
        silent = Teachers(OrchestratorConfig(client={"ready_timeout": 0.1}, **settings))
        with pytest.raises(UserError, match=f"^{key}: .* was not ready after 0 s"):
            await silent.start(ignore)
        await silent.close()


@pytest.mark.parametrize("kind", ["opd", "opsd"])
async def test_an_episode_gets_its_scores_or_is_none(kind: str) -> None:
    """Contract: a sample has its teacher's scores up to `seq_len`, or its episode failed. `opsd`: its own server's."""
    before = [] if kind == "opsd" else [vllm]  # nobody has waited for the policy's server
    async with serving(after_start([vllm, 502], [1] * (1 - len(before)))) as url:
        teacher = {"teacher": {"base_url": url}} if kind == "opd" else {}
        settings = {"seq_len": 2, "sampling": {"max_tokens": 1}, "model": {"name": "big"}}
        made = Teachers(OrchestratorConfig(environment={"id": "x"}, algorithm={"type": kind, **teacher}, **settings))
        await made.start(ignore)
        for outcome in (Outcome.OK, Outcome.TEACHER_UNAVAILABLE):
            sample = sample_tokens([5], [10, 20], [-1.0, -1.0])
            result = EpisodeResult("e", "x", "t", Outcome.OK, samples=[sample])
            await made.score("x", result, url)
            assert result.outcome is outcome
            assert outcome is not Outcome.OK or list(sample.ref_logprobs) == pytest.approx([0.0, -0.1])
        await made.close()


def make_world(directory: Path, kind: str, **settings: Any) -> World:
    teacher = {"base_url": "http://teacher", "model": "big", "max_concurrent": 1}
    return fresh(directory, algorithm={"type": kind, "teacher": teacher}, batch_size=8, max_steps=1, **settings)


def answer(logprob: float, body: dict[str, Any]) -> dict[str, Any]:
    entries = [None, *({str(one): {"logprob": logprob}} for one in body["prompt"][1:])]
    return {"choices": [{"prompt_logprobs": entries}]}


async def test_who_samples_is_asked_for_as_many_episodes_as_it_allows(tmp_path: Path) -> None:
    """Contract: `max_concurrent` of an `sft` teacher holds over all its episodes, and an episode's time begins when it
    has its turn. What it sampled takes no slot of the policy's server, and says nothing of it."""
    world = make_world(tmp_path, "sft", rollout_timeout=30.0)
    now, most, left, noted = [], [], [], []
    sample = world.pool.run

    async def counting(*, timeout: float, **others: Any) -> Any:
        now.append(1)
        most.append(len(now))
        left.append(timeout)
        result = await sample(**others)
        now.pop()
        return result

    world.pool.run, world.pool.seconds = counting, 0.05
    orchestrator = world.orchestrator()
    for call in ("start", "succeeded"):
        setattr(orchestrator.fleet, call, lambda *of: noted.append(of))
    await follow(world, [1], orchestrator)
    await orchestrator.teachers.close()
    assert max(most) == 1
    assert len(left) >= 8
    assert min(left) > 29.97  # the last of eight has waited for 0.35 s
    assert noted == []


async def test_a_queue_at_a_slow_teacher_costs_no_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: the wait for other episodes' scores runs nobody's time down."""

    async def slowly(self: Teacher, route: str, body: Any, seconds: float) -> Any:
        await asyncio.sleep(0.1)
        return answer(-1.0, body) if body else {"data": []}

    monkeypatch.setattr(Teacher, "_request", slowly)
    monkeypatch.setattr(loop, "_WAKE_SECONDS", 0.02)
    world = make_world(tmp_path, "opd", rollout_timeout=0.3)
    orchestrator = world.orchestrator()
    await follow(world, [1], orchestrator)
    await orchestrator.teachers.close()
    assert orchestrator.tally.before.dropped == {}


async def test_a_teacher_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: what it does not score is made again, then dropped and counted; if it stays silent the run ends."""
    asked = []

    async def dying(self: Teacher, route: str, body: Any, seconds: float) -> Any:
        asked.append(route)
        if len(asked) > 5:
            raise TeacherError("http://teacher did not answer")
        return answer(-1.0, body) if body else {"data": []}

    monkeypatch.setattr(Teacher, "_request", dying)
    orchestrator = make_world(tmp_path, "opd").orchestrator()
    silent = r"more than max_error_rate .*teacher_unavailable: its teacher: http://teacher did not answer"
    with pytest.raises(UserError, match=silent):
        await asyncio.wait_for(orchestrator.run(), 30.0)
    await orchestrator.teachers.close()
