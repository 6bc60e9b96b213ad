"""A server that makes itself known: where others reach it, that its sign of life goes on, and that it is gone when it ends."""

import asyncio
import logging

import pytest

import prime_rl.inference.register as register
from prime_rl.config import InferenceConfig
from prime_rl.errors import UserError
from prime_rl.inference.register import Departure, Registration, published_address
from prime_rl.transport.members import publish, read_members
from support.scripted import until


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(register, "BEAT_SECONDS", 0.02)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def address(key: str | None = None, **server) -> str:
    return published_address(InferenceConfig(server=server, api_key=key))


def test_where_others_reach_it(monkeypatch):
    """The address that it listens at; for all addresses one of this host, never the wildcard; or what the user says."""
    assert address() == "http://127.0.0.1:8000"
    assert address(host="::1", port=81) == "http://[::1]:81"
    assert address("key", host="node-7") == "http://node-7:8000"
    assert address(advertise="https://gate/infer/v1/") == "https://gate/infer"
    monkeypatch.setattr(register, "outward_address", lambda family: "10.1.2.3")
    assert address("key") == address("key", host="0.0.0.0") == "http://10.1.2.3:8000"
    monkeypatch.setattr(register, "outward_address", lambda family: None)
    monkeypatch.setattr(register.socket, "gethostname", lambda: "node-7")
    assert address("key", host="::") == "http://node-7:8000"


def test_no_address_that_others_could_use(monkeypatch):
    monkeypatch.setattr(register, "outward_address", lambda family: "127.0.0.1")
    with pytest.raises(UserError, match="server.advertise"):
        address("key")


@pytest.mark.parametrize("url", ["node:8000", "http://u:hunter2@node:8000"])
def test_an_address_that_cannot_be_published(url):
    with pytest.raises(ValueError, match="without a password"):
        address(advertise=url)


async def test_it_beats_says_that_it_leaves_and_withdraws(tmp_path):
    departure = Departure()
    running = asyncio.create_task(Registration(tmp_path, "http://a:1", "model", "boot", departure).run())

    def now():
        return next(iter(read_members(tmp_path)[0]), None)

    await until(lambda: now() is not None and now().beat > 2)
    assert (now().address, now().boot, now().model, now().leaving) == ("http://a:1", "boot", "model", False)
    departure.ask()
    await until(lambda: now().leaving)
    beat = now().beat
    await until(lambda: now().beat > beat and now().leaving)  # it is there as long as it serves
    running.cancel()
    await asyncio.wait({running}, timeout=60)
    assert read_members(tmp_path) == ([], {})
    await asyncio.sleep(0.1)
    assert read_members(tmp_path) == ([], {})


async def test_a_beat_that_is_being_written_at_the_end_does_not_stay(tmp_path, monkeypatch):
    """The file system is slow: what is still on its way must not register a server that is gone."""
    began = []

    def slow(directory, member):
        began.append(member)
        register.threading.Event().wait(0.3)
        publish(directory, member)

    monkeypatch.setattr(register, "publish", slow)
    running = asyncio.create_task(Registration(tmp_path, "http://a:1", "model", "boot", Departure()).run())
    await until(lambda: bool(began))
    running.cancel()
    await asyncio.wait({running}, timeout=60)
    await asyncio.sleep(0.5)
    assert read_members(tmp_path) == ([], {})


async def test_a_directory_that_cannot_be_written_is_said_once_and_tried_again(tmp_path, heard):
    place = tmp_path / "servers"
    place.touch()  # in the way
    running = asyncio.create_task(Registration(place, "http://a:1", "model", "boot", Departure()).run())
    await asyncio.sleep(0.3)
    place.unlink()
    await until(lambda: bool(read_members(place)[0]))
    running.cancel()
    await asyncio.wait({running}, timeout=60)
    said = [record.getMessage() for record in heard.records if record.levelno == logging.WARNING]
    assert len(said) == 1
    assert str(place) in said[0]
    assert "registered in" in heard.text
