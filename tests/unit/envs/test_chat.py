"""An API is asked patiently: what may pass is asked again, what does not is told at once."""

from types import SimpleNamespace

import pytest
from verifiers.v1.dialects.chat import ChatDialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.types import SamplingConfig

from prime_rl.envs import verifiers_v1
from prime_rl.envs.verifiers_v1 import PatientClient, chat_config
from support.chat_api import ChatApi, refusal

MESSAGES = [{"role": "user", "content": "hi"}]
BODY = {"model": "m", "messages": MESSAGES, "temperature": 1.0, "top_p": 1.0, "max_tokens": 9}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(verifiers_v1, "FIRST_PAUSE_SECONDS", 0.002)
    monkeypatch.setattr(verifiers_v1, "LONGEST_PAUSE_SECONDS", 0.01)


async def ask(api, times=1, body=BODY):
    client = PatientClient(chat_config(5.0).model_copy(update={"base_url": api.base_url}))
    try:
        for _ in range(times):
            response = await client.get_response(ChatDialect(), body, SamplingConfig())
        return response
    finally:
        await client.close()


async def refused(script):
    """The status that is told in the end, and how often was asked."""
    async with ChatApi(script=script) as api:
        with pytest.raises(ProviderError) as told:
            await ask(api)
    return told.value.status_code, len(api.bodies)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 529])
async def test_what_may_pass_is_asked_again(status):
    """After pauses that grow and differ, and so many times at most."""
    async with ChatApi(script=lambda number, _: refusal(status) if number < 4 else None) as api:
        assert (await ask(api)).message.content == "<reversed_text>abc</reversed_text>"
    assert len(api.bodies) == 4
    assert await refused(lambda *_: refusal(status)) == (status, verifiers_v1.CHAT_TRIES)


async def test_what_another_try_does_not_change_is_told_at_once():
    for status in (400, 401, 403, 404):
        assert await refused(lambda *_, status=status: refusal(status)) == (status, 1)
    quota = refusal(429, "You exceeded your current quota: insufficient_quota")
    assert await refused(lambda *_: quota) == (402, 1)


async def test_what_the_api_asks_to_wait_is_waited_for(monkeypatch):
    """Contract: at least `Retry-After`; an API that asks for more than two minutes is not waited for."""
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(verifiers_v1, "asyncio", SimpleNamespace(sleep=sleep))
    for asked in ("60", "soon"):
        limit = {"Retry-After": asked}
        async with ChatApi(script=lambda n, _, limit=limit: refusal(429, **limit) if n == 1 else None) as api:
            await ask(api)
    assert (pauses[0], pauses[1] < 1) == (60, True)
    assert await refused(lambda *_: refusal(429, **{"Retry-After": "3600"})) == (429, 1)


async def test_the_newer_name_of_max_tokens_is_learned_once():
    message = "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."
    async with ChatApi(script=lambda _, body: refusal(400, message) if "max_tokens" in body else None) as api:
        await ask(api, times=2)
    assert [body.get("max_completion_tokens") for body in api.bodies] == [None, 9, 9]
    assert await refused(lambda *_: refusal(400, "Unknown: 'max_tokens'")) == (400, 1)
