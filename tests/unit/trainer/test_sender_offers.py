"""What a sender's process knows of versions, by the time somebody asks for one."""

import errno
import os
import socket
import threading
import time
from typing import Any

import pytest

from prime_rl.trainer import sender
from prime_rl.trainer.sender import Offer, _Answers, _Offered, _Refused, _Server

SECONDS = 60.0
FOREVER = 1e6  # whoever waited so long would not be waited for


def offer(version: int, life: int = 0) -> Offer:
    return Offer(version, life, "hash", version % 2 * 1000, 1000)


def test_who_asks_before_the_process_has_read_of_it_gets_it() -> None:
    """Contract: a version that the trainer offers just now is waited for: two pipes are not read in the order in which they are written."""
    offered = _Offered()
    offered.add(offer(1))
    found: list[Offer] = []

    def ask() -> None:
        with offered.reading(2, 0, "hash", SECONDS) as given:
            found.append(given)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.05)
    assert not found
    offered.add(offer(2))
    asking.join(SECONDS)
    assert found == [offer(2)]


@pytest.mark.parametrize(("version", "life"), [(1, 1), (3, 0), (4, 1)], ids=["older", "an older life", "other bytes"])
def test_what_is_superseded_is_refused_at_once(version: int, life: int) -> None:
    """Contract: nobody waits for what cannot come any more."""
    offered = _Offered()
    offered.add(offer(4, life=1))
    with pytest.raises(_Refused, match="superseded .there is: 4"), offered.reading(version, life, "another", FOREVER):
        pass


class Crowded:
    """A listening socket: no descriptor is free, then one is, then the process ends."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.other = socket.create_connection(listening.getsockname(), SECONDS)
            self.connection, _ = listening.accept()
        self.outcomes = [
            OSError(errno.EMFILE, "Too many open files"),
            (self.connection, ("somewhere", 1)),
            KeyboardInterrupt(),
        ]

    def accept(self) -> Any:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def test_who_cannot_connect_now_can_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: without a free descriptor the process lives on, says so, and serves whoever comes when there is one."""
    monkeypatch.setattr(sender, "_PAUSE_SECONDS", 0.0)
    told, answering = os.pipe()
    memory = os.memfd_create("test")
    settings = {"backends": ["shared-memory"], "timeout": SECONDS, "token": "secret"}
    crowded = Crowded()
    with pytest.raises(KeyboardInterrupt):
        _Server(memory, 0, settings, _Offered(), _Answers(answering)).serve(crowded)  # type: ignore[arg-type]
    assert b"Too many open files" in os.read(told, 1000)
    assert b"shared-memory" in crowded.other.recv(1000)  # the greeting
    crowded.other.close()
