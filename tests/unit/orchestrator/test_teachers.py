"""Teachers behind real sockets: both ways to tell scores, servers that cannot, that are busy, that refuse, that are not there."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from prime_rl.config import OrchestratorConfig
from prime_rl.config.algorithms import TeacherConfig
from prime_rl.envs.protocol import EpisodeResult, Outcome, SampleTokens
from prime_rl.errors import UserError
from prime_rl.orchestrator import teachers
from prime_rl.orchestrator.teachers import Refused, Teacher, Teachers, TeacherTrouble

Handler = Callable[[web.Request], Awaitable[web.Response]]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teachers, "_BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(teachers, "_POLL_SECONDS", 0.02)


@asynccontextmanager
async def serving(complete: Handler, models: Handler | None = None) -> AsyncIterator[str]:
    """A server's address."""

    async def listed(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "big"}, {"id": "other"}]})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/v1/models", models or listed)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


async def vllm(request: web.Request) -> web.Response:
    """-token / 100 for every token but the first."""
    body = await request.json()
    if "prompt_logprobs" not in body:
        return web.json_response({"error": "unknown"}, status=400)
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("big", 1.0, 1)
    entries = [None, *({str(t): {"logprob": -t / 100, "rank": 1}} for t in body["prompt"][1:])]
    return web.json_response({"choices": [{"prompt_logprobs": entries}]})


async def echoing(request: web.Request) -> web.Response:
    body = await request.json()
    if not body.get("echo"):
        return web.json_response({"choices": [{"text": "x"}]})  # silently without
    told = [None, *(-t / 100 for t in body["prompt"][1:]), -0.7]
    return web.json_response({"choices": [{"logprobs": {"token_logprobs": told}}]})


def ignore(*_: object) -> None:
    pass


async def started(url: str, **settings: object) -> Teacher:
    teacher = Teacher(TeacherConfig(base_url=f"{url}/v1", **settings), "algorithm.teacher")
    await teacher.start(1.0, ignore)
    return teacher


@pytest.mark.parametrize("kind", [vllm, echoing])
async def test_scores(kind: Handler) -> None:
    """Contract: the log-probability of each token given those before; what is read first counts, and is not part of the answer."""
    async with serving(kind) as url:
        teacher = await started(url)
        assert teacher.model == "big"
        assert list(await teacher.score([5, 10, 20])) == pytest.approx([0.0, -0.1, -0.2])
        assert list(await teacher.score([5, 10], hint=[1, 2])) == pytest.approx([-0.05, -0.1])
        await teacher.close()


async def test_a_server_that_cannot() -> None:
    """Contract: said before anything starts, with both of its answers."""

    async def cannot(request: web.Request) -> web.Response:
        return web.json_response({"choices": [{"text": "hello"}]})

    async with serving(cannot) as url:
        with pytest.raises(UserError, match="does not tell the log-probabilities of a prompt") as caught:
            await started(url)
    assert str(caught.value).startswith("algorithm.teacher: ")


async def test_a_busy_server_is_asked_again() -> None:
    """Contract: what is wrong on the server's side gets further attempts, a refusal gets none."""
    answers = []

    async def busy(request: web.Request) -> web.Response:
        answers.append(len(answers))
        if len(answers) in (2, 3):
            return web.Response(status=(503, 429)[len(answers) - 2])
        return await vllm(request)

    async with serving(busy) as url:
        teacher = await started(url)
        assert list(await teacher.score([5, 10])) == pytest.approx([0.0, -0.1])
        assert len(answers) == 4


@pytest.mark.parametrize(
    ("status", "error", "asked"), [(500, TeacherTrouble, 3), (400, Refused, 1), (401, UserError, 1)]
)
async def test_a_server_that_fails(status: int, error: type[Exception], asked: int) -> None:
    answers = []

    async def failing(request: web.Request) -> web.Response:
        answers.append(1)
        return await vllm(request) if len(answers) == 1 else web.Response(status=status, text="too long")

    async with serving(failing) as url:
        teacher = await started(url, max_attempts=3)
        with pytest.raises(error):
            await teacher.score([1, 2])
        assert len(answers) == 1 + asked


async def test_not_more_at_a_time_than_allowed() -> None:
    now, most = [], []

    async def counting(request: web.Request) -> web.Response:
        now.append(1)
        most.append(len(now))
        await asyncio.sleep(0.02)
        now.pop()
        return await vllm(request)

    async with serving(counting) as url:
        teacher = await started(url, max_concurrent=3)
        await asyncio.gather(*(teacher.score([1, 2]) for _ in range(12)))
    assert max(most) == 3


async def test_who_is_not_there() -> None:
    with pytest.raises(UserError, match="was not ready after 0 s"):
        await Teacher(TeacherConfig(base_url="http://127.0.0.1:9"), "reference").start(0.1, ignore)


async def test_a_model_that_is_not_served_and_a_key_that_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(vllm) as url:
        with pytest.raises(UserError, match="serves big, other, not huge"):
            await started(url, model="huge")

    async def locked(request: web.Request) -> web.Response:
        return web.Response(status=401 if request.headers.get("Authorization") != "Bearer k" else 200)

    async with serving(vllm, locked) as url:
        with pytest.raises(UserError, match=r"does not take the key in \$TEACHER_API_KEY"):
            await started(url)


def finished() -> EpisodeResult:
    sample = SampleTokens.of([5, 10, 20], [False, True, True], [0.0, -1.0, -1.0], 1, 0.0)
    return EpisodeResult("e", "x", "t", Outcome.OK, samples=[sample])


async def test_an_episode_gets_its_scores_or_is_none() -> None:
    """Contract: every sample has the scores of its teacher, or the episode is counted under what went wrong: another attempt, or invalid."""
    answers = [200]

    async def moody(request: web.Request) -> web.Response:
        return await vllm(request) if answers[-1] == 200 else web.Response(status=answers[-1])

    async with serving(moody) as url:
        algorithm = {"type": "opd", "teacher": {"base_url": url, "max_attempts": 1}}
        found = Teachers(OrchestratorConfig(environment={"id": "x"}, algorithm=algorithm))
        await found.start(ignore)
        result = finished()
        await found.score("x", result, "http://policy")
        assert list(result.samples[0].ref_logprobs) == pytest.approx([0.0, -0.1, -0.2])
        for status, outcome in ((502, Outcome.TEACHER_UNAVAILABLE), (400, Outcome.INVALID)):
            answers.append(status)
            result = finished()
            await found.score("x", result, "http://policy")
            assert result.outcome is outcome
        await found.close()


async def test_without_a_teacher_nobody_is_asked() -> None:
    found = Teachers(OrchestratorConfig(environment={"id": "x"}))
    await found.start(ignore)
    result = finished()
    await found.score("x", result, "http://nowhere")
    assert result.ok
    assert result.samples[0].ref_logprobs is None
    assert found.sampler_of("x") is found.demonstration_of("x") is None


async def test_self_distillation_asks_the_server_that_sampled() -> None:
    async with serving(vllm) as url:
        config = OrchestratorConfig(environment={"id": "x"}, algorithm={"type": "opsd"}, model={"name": "big"})
        found = Teachers(config)
        await found.start(ignore)
        assert found.demonstration_of("x").field == "answer"
        result = finished()
        result.samples[0].hint = [7, 8]
        await found.score("x", result, url)
        assert list(result.samples[0].ref_logprobs) == pytest.approx([-0.05, -0.1, -0.2])
        await found.close()
