"""Teachers behind real sockets: scores, servers that cannot score, that are busy, that refuse, that are not there."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext

import pytest
from aiohttp import web

from prime_rl.config import OrchestratorConfig
from prime_rl.config.orchestrator import TeacherConfig
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


def holding(most: int, model: str = "big") -> tuple[Handler, Handler]:
    """A vLLM that takes prompts and replies of `most` tokens together, and says so: its two routes."""

    async def complete(request: web.Request) -> web.Response:
        tokens = len((await request.json())["prompt"]) + 1
        return await vllm(request) if tokens <= most else web.Response(status=400, text=f"{tokens} is more than {most}")

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": model, "max_model_len": most}]})

    return complete, models


async def vllm(request: web.Request) -> web.Response:
    """-token / 100 for every token but the first."""
    body = await request.json()
    if "prompt_logprobs" not in body:
        return web.json_response({"error": "unknown"}, status=400)
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("big", 1.0, 1)
    entries = [None, *({str(t): {"logprob": -t / 100, "rank": 1}} for t in body["prompt"][1:])]
    return web.json_response({"choices": [{"prompt_logprobs": entries}]})


def ignore(*_: object) -> None:
    pass


async def started(url: str, **settings: object) -> Teacher:
    teacher = Teacher(TeacherConfig(base_url=f"{url}/v1", **settings), "algorithm.teacher")
    await teacher.start(1.0, ignore)
    return teacher


async def test_scores() -> None:
    """Contract: the log-probability of each token given those before; what is read first counts, and is not part of the answer."""
    async with serving(vllm) as url:
        teacher = await started(url)
        assert teacher.model == "big"
        assert list(await teacher.score([5, 10, 20])) == pytest.approx([0.0, -0.1, -0.2])
        assert list(await teacher.score([5, 10], hint=[1, 2])) == pytest.approx([-0.05, -0.1])
        await teacher.close()


async def test_as_much_as_its_context_holds() -> None:
    """Contract: what is longer is scored as far as it fits, in front of the token that each request samples; nothing of it is a refusal."""
    async with serving(*holding(6)) as url:
        teacher = await started(url)
        assert len(await teacher.score(range(5))) == 5
        assert len(await teacher.score(range(6))) == 5  # a sequence that fills the context
        assert list(await teacher.score([5, 10, 20], hint=[1, 2, 3])) == pytest.approx([-0.05, -0.1])
        with pytest.raises(
            Refused, match=r"takes 6 tokens, which leaves no room behind a hint of 5; .* larger --max-model-len"
        ):
            await teacher.score([5], hint=[1, 2, 3, 4, 5])
        await teacher.close()


async def test_a_server_that_cannot() -> None:
    """Contract: said before anything starts, with its answer."""

    async def cannot(request: web.Request) -> web.Response:
        return web.json_response({"choices": [{"text": "hello"}]})

    async with serving(cannot) as url:
        with pytest.raises(UserError, match="does not give prompt_logprobs") as caught:
            await started(url)
    assert str(caught.value).startswith("algorithm.teacher: ")


@pytest.mark.parametrize(
    ("statuses", "error", "asked"),
    [([503, 429], None, 3), ([500] * 3, TeacherTrouble, 3), ([400], Refused, 1), ([401], UserError, 1)],
)
async def test_a_server_that_fails(statuses: list[int], error: type[Exception] | None, asked: int) -> None:
    """Contract: what is wrong on the server's side gets further attempts, a refusal gets none."""
    answers = []

    async def failing(request: web.Request) -> web.Response:
        answers.append(1)
        fails = 0 <= len(answers) - 2 < len(statuses)  # the first request is asked at the start
        return web.Response(status=statuses[len(answers) - 2], text="too long") if fails else await vllm(request)

    async with serving(failing) as url:
        teacher = await started(url, max_attempts=3)
        with nullcontext() if error is None else pytest.raises(error):
            assert list(await teacher.score([5, 10])) == pytest.approx([0.0, -0.1])
        assert len(answers) == 1 + asked


async def test_the_key_of_another_api_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: a teacher gets what `api_key_var` names, or none."""
    sent = []

    async def seeing(request: web.Request) -> web.Response:
        sent.append(request.headers.get("Authorization"))
        return await vllm(request)

    monkeypatch.setenv("OPENAI_API_KEY", "sk-other")
    async with serving(seeing) as url:
        await (await started(url)).close()
        monkeypatch.setenv("TEACHER_API_KEY", "mine")
        await (await started(url)).close()
    assert sent == [None, "Bearer mine"]


@pytest.mark.parametrize("broken", ["garbled", "endless"])
async def test_an_answer_that_is_none(broken: str) -> None:
    """Contract: one that cannot be read, or comes byte by byte for ever, is trouble on the server's side: asked again, and over in time."""
    asked = []

    async def failing(request: web.Request) -> web.StreamResponse:
        asked.append(1)
        if len(asked) == 1:
            return await vllm(request)
        if broken == "garbled":
            return web.Response(body=b"no such thing", headers={"Content-Encoding": "gzip"})
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b" ")
            await asyncio.sleep(0.02)

    async with serving(failing) as url:
        teacher = await started(url, max_attempts=2, timeout=0.2)
        async with asyncio.timeout(60):
            with pytest.raises(TeacherTrouble, match="did not answer"):
                await teacher.score([1, 2])
        assert len(asked) == 3
        await teacher.close()


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


def taught(url: str, max_attempts: int = 4, **settings: object) -> Teachers:
    algorithm = {"type": "opd", "teacher": {"base_url": url, "max_attempts": max_attempts}}
    return Teachers(OrchestratorConfig(environment={"id": "x"}, algorithm=algorithm, **settings))


async def test_an_episode_gets_its_scores_or_is_none() -> None:
    """Contract: every sample has the scores of its teacher, or the episode is counted under what went wrong: another attempt, or invalid."""
    answers = [200]

    async def moody(request: web.Request) -> web.Response:
        return await vllm(request) if answers[-1] == 200 else web.Response(status=answers[-1])

    async with serving(moody) as url:
        found = taught(url, max_attempts=1)
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


async def test_only_what_is_trained_is_scored(caplog: pytest.LogCaptureFixture) -> None:
    """Contract: a sequence beyond `seq_len`, longer than what any teacher takes, is scored as far as training uses it; a smaller context is said."""
    async with serving(*holding(4)) as url:
        found = taught(url, seq_len=2, sampling={"max_tokens": 1})
        await found.start(ignore)
        result, scored = finished(), []
        await found.score("x", result, "http://policy", lambda: scored.append(1))
        assert (result.ok, list(result.samples[0].ref_logprobs), scored) == (True, pytest.approx([0.0, -0.1]), [1])
        await found.close()
        assert not caplog.text
        found = taught(url, seq_len=4, sampling={"max_tokens": 1})
        await found.start(ignore)
        assert "takes 4 tokens" in caplog.text
        assert "give it a larger --max-model-len" in caplog.text
        await found.close()


async def test_teachers_are_shared_where_all_their_settings_are_equal() -> None:
    """Contract: limits hold for the environments that asked for them."""
    kinds = [
        {"id": name, "algorithm": {"type": "opd", "teacher": {"base_url": "http://t", "max_concurrent": most}}, "name": name}
        for name, most in (("a", 3), ("b", 5), ("c", 3))
    ]  # fmt: skip
    found = Teachers(OrchestratorConfig(environments=kinds))
    assert found._scorers["a"] is found._scorers["c"]
    assert [server.config.max_concurrent for server in found._servers] == [3, 5]
    await found.close()


async def test_the_setting_that_names_it_is_named() -> None:
    own = {"id": "x", "algorithm": {"type": "sft", "teacher": {"base_url": "http://127.0.0.1:9"}}}
    found = Teachers(OrchestratorConfig(environments=[own, {"id": "y"}], client={"ready_timeout": 0.1}))
    with pytest.raises(UserError, match=r"^environments\.x\.algorithm\.teacher: .* was not ready after 0 s"):
        await found.start(ignore)
    await found.close()
    found = Teachers(
        OrchestratorConfig(environment={"id": "x"}, algorithm=own["algorithm"], client={"ready_timeout": 0.1})
    )
    with pytest.raises(UserError, match=r"^algorithm\.teacher: "):
        await found.start(ignore)
    await found.close()


async def test_self_distillation_behind_a_hint_that_takes_room() -> None:
    """Contract: the policy's own server is asked for its context, though nobody waited for it; one that is silent is a teacher that is."""
    down = True
    complete, listed = holding(5)

    async def models(request: web.Request) -> web.Response:
        return web.Response(status=503) if down else await listed(request)

    async with serving(complete, models) as url:
        config = OrchestratorConfig(environment={"id": "x"}, algorithm={"type": "opsd"}, model={"name": "big"})
        found = Teachers(config)
        for outcome, hint, scored in (
            (Outcome.TEACHER_UNAVAILABLE, 2, None),
            (Outcome.OK, 2, 2),
            (Outcome.INVALID, 4, None),
        ):
            result = finished()
            result.samples[0].hint = range(hint)
            await found.score("x", result, url)
            assert result.outcome is outcome
            assert scored is None or len(result.samples[0].ref_logprobs) == scored
            down = False
        await found.close()
