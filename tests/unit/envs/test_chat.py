"""An API is asked patiently: what may pass is asked again, what does not is told at once, what it does not know is left out."""

import sys
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from chat_api import ChatApi, refusal
from verifiers.v1.dialects.chat import ChatDialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.types import SamplingConfig

from prime_rl.envs import chat
from prime_rl.envs.chat import PatientClient, chat_config, pause_seconds, retry_after

MESSAGES = [{"role": "user", "content": "hi"}]
BODY = {"model": "m", "messages": MESSAGES, "temperature": 1.0, "top_p": 1.0, "max_tokens": 9}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(chat, "FIRST_PAUSE_SECONDS", 0.002)
    monkeypatch.setattr(chat, "LONGEST_PAUSE_SECONDS", 0.01)


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
    assert await refused(lambda *_: refusal(status)) == (status, chat.TRIES)
    assert all(pause_seconds(failures) <= chat.LONGEST_PAUSE_SECONDS for failures in range(1, 100))
    assert len({pause_seconds(3) for _ in range(20)}) > 1


async def test_what_another_try_does_not_change_is_told_at_once():
    for status in (400, 401, 403, 404):
        assert await refused(lambda *_, status=status: refusal(status)) == (status, 1)
    quota = refusal(429, "You exceeded your current quota: insufficient_quota")
    assert await refused(lambda *_: quota) == (402, 1)


async def test_a_lost_connection_is_tried_as_often():
    async with ChatApi() as api:
        pass
    with pytest.raises(ProviderError) as told:  # nobody listens there any more
        await ask(api)
    assert told.value.status_code == 503


async def test_what_the_api_asks_to_wait_is_waited_for(monkeypatch):
    """Contract: at least `Retry-After`, by every request; whoever asks for more than two minutes is not waited for."""
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(chat, "asyncio", SimpleNamespace(sleep=sleep))
    async with ChatApi(script=lambda number, _: refusal(429, **{"Retry-After": "60"}) if number == 1 else None) as api:
        await ask(api, times=2)
    before, _, again, another = pauses  # each request looks; one paused for its own failure
    assert before == 0
    assert min(again, another) > 50
    assert await refused(lambda *_: refusal(429, **{"Retry-After": "3600"})) == (429, 1)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("0.25", 0.25), (formatdate(1_000_010, usegmt=True), 10.0), (formatdate(1, usegmt=True), 0.0), ("soon", None), ("", None)],
)  # fmt: skip
def test_a_wish_is_a_number_or_a_date(said, seconds):
    assert retry_after({"retry-after": said}, 1_000_000) == seconds


async def test_what_an_api_does_not_know_is_learned_once():
    """Contract: the newer name of `max_tokens`; a parameter that says nothing. One that says something is refused: that would be another evaluation."""
    message = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."  # fmt: skip
    async with ChatApi(script=lambda _, body: refusal(400, message) if "max_tokens" in body else None) as api:
        await ask(api, times=2)
    assert [body.get("max_completion_tokens") for body in api.bodies] == [None, 9, 9]
    async with ChatApi(script=lambda _, body: refusal(400, "Unknown: 'top_p'") if "top_p" in body else None) as api:
        await ask(api, times=2)
    assert ["top_p" in body for body in api.bodies] == [True, False, False]
    assert await refused(lambda *_: refusal(400, "Unknown: 'max_tokens'")) == (400, 1)


async def test_a_reply_is_sent_back_without_the_fields_that_it_left_open():
    """Contract: APIs answer with fields that they do not take; what a message says stays, an empty content too."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    reply = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = {"role": "tool", "tool_call_id": "c", "content": ""}
    left_open = {"refusal": None, "annotations": [], "audio": None}
    async with ChatApi() as api:
        await ask(api, body={**BODY, "messages": [*MESSAGES, {**reply, **left_open}, answer]})
    assert api.bodies[0]["messages"] == [*MESSAGES, reply, answer]
