"""A port is one server's from its first moment on."""

import os
import socket

import pytest

from prime_rl.errors import UserError
from prime_rl.inference import ports
from prime_rl.launcher import checks

PORT = 10**6 + os.getpid()  # no real one: only the name is held, and tests run beside one another


def test_a_second_server_on_a_port_is_refused_before_the_first_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: the kernel would let both have it (SO_REUSEPORT); who listens everywhere and who listens at loopback are the same to clients here."""
    held: list[socket.socket] = []
    monkeypatch.setattr(ports, "_held", held)
    try:
        ports.hold_port("127.0.0.1", PORT)
        for host in ("127.0.0.1", "localhost", "0.0.0.0", "::1"):
            with pytest.raises(UserError, match=f"port {PORT} is taken by another inference server"):
                ports.hold_port(host, PORT)
        ports.hold_port("127.0.0.1", PORT + 1)
        ports.hold_port("10.9.8.7", PORT)
        ports.hold_port("0.0.0.0", PORT + 2)
        with pytest.raises(UserError, match=f"port {PORT + 2} is taken"):
            ports.hold_port("10.9.8.7", PORT + 2)
    finally:
        for holder in held:
            holder.close()


def test_a_forked_engine_does_not_keep_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: a server that is started again is not refused for the engine that its predecessor leaves for a moment."""
    held: list[socket.socket] = []
    monkeypatch.setattr(ports, "_held", held)
    ports.hold_port("127.0.0.1", PORT)
    reader, writer = os.pipe()
    ready, begun = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.write(begun, b"x")
        os.read(reader, 1)  # until the test ends
        os._exit(0)
    try:
        os.read(ready, 1)
        held[0].close()
        ports.hold_port("127.0.0.1", PORT)
    finally:
        os.close(writer)
        for descriptor in (reader, ready, begun):
            os.close(descriptor)
        os.waitpid(child, 0)
        for holder in held:
            holder.close()


def test_a_held_port_is_seen_before_anybody_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: the launcher refuses a port whose server is still loading, with its own option; looking takes nothing."""
    held: list[socket.socket] = []
    monkeypatch.setattr(ports, "_held", held)
    for _ in range(2):
        ports.check_unheld("127.0.0.1", PORT, "--x")
    ports.hold_port("127.0.0.1", PORT)
    try:
        with pytest.raises(UserError, match=rf"port {PORT} is taken by another .* --inference.server.port$"):
            checks.check_port("0.0.0.0", PORT)
    finally:
        held[0].close()
