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

BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 1.0,
    "top_p": 1.0,
    "max_tokens": 9,
}


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


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 529])
async def test_what_may_pass_is_asked_again(status):
    async with ChatApi(script=lambda number, _: refusal(status) if number < 4 else None) as api:
        assert (await ask(api)).message.content == "<reversed_text>abc</reversed_text>"
    assert len(api.bodies) == 4


@pytest.mark.parametrize("status", [400, 401, 403, 404])
async def test_what_another_try_does_not_change_is_told_at_once(status):
    async with ChatApi(script=lambda *_: refusal(status)) as api:
        with pytest.raises(ProviderError) as told:
            await ask(api)
    assert (told.value.status_code, len(api.bodies)) == (status, 1)


async def test_tries_are_bounded():
    async with ChatApi(script=lambda *_: refusal(503)) as api:
        with pytest.raises(ProviderError):
            await ask(api)
    assert len(api.bodies) == chat.TRIES


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
    async with ChatApi(script=lambda *_: refusal(429, **{"Retry-After": "3600"})) as api:
        with pytest.raises(ProviderError):
            await ask(api)
    assert len(api.bodies) == 1


async def test_a_budget_that_is_spent_is_not_waited_for():
    async with ChatApi(script=lambda *_: refusal(429, "You exceeded your current quota: insufficient_quota")) as api:
        with pytest.raises(ProviderError) as told:
            await ask(api)
    assert (told.value.status_code, len(api.bodies)) == (402, 1)


async def test_the_newer_name_of_max_tokens_is_learned_once():
    message = (
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    )
    async with ChatApi(script=lambda _, body: refusal(400, message) if "max_tokens" in body else None) as api:
        await ask(api, times=2)
    assert ["max_completion_tokens" in body for body in api.bodies] == [False, True, True]
    assert api.bodies[-1]["max_completion_tokens"] == 9


async def test_a_parameter_that_says_nothing_is_left_out_where_it_is_not_known():
    """Contract: one that says something is not: that would be another evaluation."""
    async with ChatApi(script=lambda _, body: refusal(400, "Unknown: 'top_p'") if "top_p" in body else None) as api:
        await ask(api, times=2)
    assert ["top_p" in body for body in api.bodies] == [True, False, False]
    async with ChatApi(script=lambda *_: refusal(400, "Unknown: 'max_tokens'")) as api:
        with pytest.raises(ProviderError):
            await ask(api)


async def test_a_reply_is_sent_back_without_the_fields_that_it_left_open():
    """Contract: APIs answer with fields that they do not take; what a message says stays, an empty content too."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    reply = {
        "role": "assistant",
        "content": None,
        "tool_calls": [call],
        "refusal": None,
        "annotations": [],
        "audio": None,
    }
    history = [*BODY["messages"], reply, {"role": "tool", "tool_call_id": "c", "content": ""}]
    async with ChatApi() as api:
        await ask(api, body={**BODY, "messages": history})
    assert api.bodies[0]["messages"] == [
        BODY["messages"][0],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": ""},
    ]


def test_pauses_grow_and_differ():
    assert all(pause_seconds(failures) <= chat.LONGEST_PAUSE_SECONDS for failures in range(1, 100))
    assert len({pause_seconds(3) for _ in range(20)}) > 1


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("5", 5.0), ("0.25", 0.25), (formatdate(1_000_010, usegmt=True), 10.0), (formatdate(1, usegmt=True), 0.0), ("soon", None), ("", None)],
)  # fmt: skip
def test_a_wish_is_a_number_or_a_date(said, seconds):
    assert retry_after({"retry-after": said}, 1_000_000) == seconds
