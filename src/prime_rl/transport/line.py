"""What a sender of weights and a receiver say to each other: JSON over TCP, with a proof in the beginning, and a deadline for every wait.

The token keeps strangers from asking. What is said is neither encrypted nor signed; what arrives is to be hashed.
"""

import hashlib
import hmac
import json
import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

PROTOCOL = 2
BLOCK_BYTES = 16 << 20  # that are asked for in one go, at most
_LINE_BYTES = 1 << 16
_TCP_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


class PairError(Exception):
    """The other side is gone, silent, or refuses; the message says which, and why."""


class Line:
    """Messages between the two: a JSON object a line."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._read = connection, b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _TCP_KEEPALIVE:  # a host that vanishes says nothing
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    @property
    def here(self) -> str:
        """The address that the other side reaches this one by."""
        return str(self._socket.getsockname()[0])

    def tell(self, seconds: float, **message: object) -> None:
        """Raises PairError where it cannot be sent within so many seconds."""
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(json.dumps(message).encode() + b"\n")  # bounded: by the time-out just set
        except OSError as error:
            raise PairError(f"the other side is gone ({error.strerror or error})") from error

    def hear(self, seconds: float | None) -> dict[str, Any]:
        """The next message. None waits until there is one or the other side is gone, which keep-alive probes find out.

        Raises:
            PairError: there is none in time, or what came is none of ours.
        """
        until = None if seconds is None else time.monotonic() + seconds
        try:
            while b"\n" not in self._read:
                self._socket.settimeout(None if until is None else max(until - time.monotonic(), 1e-3))
                data = self._socket.recv(4096)  # bounded: by the time-out just set, or by the other side's end
                if not data:
                    raise PairError("the other side has closed the connection")
                self._read += data
                if len(self._read) > _LINE_BYTES:
                    raise PairError("the other side does not speak this protocol")
            line, _, self._read = self._read.partition(b"\n")
            message = json.loads(line)
        except TimeoutError as error:
            raise PairError(f"the other side said nothing for {seconds:.0f} s") from error
        except OSError as error:
            raise PairError(f"the other side is gone ({error.strerror or error})") from error
        except (ValueError, RecursionError) as error:
            raise PairError("the other side does not speak this protocol") from error
        if not isinstance(message, dict):
            raise PairError("the other side does not speak this protocol")
        return message

    def expect(self, what: str, seconds: float) -> Any:
        """What the next message says of `what`. Raises PairError where it says an error, or something else."""
        message = self.hear(seconds)
        if "error" in message:
            raise PairError(str(message["error"]))
        if what not in message:
            raise PairError(f"the other side says {message} where {what!r} was expected")
        return message[what]

    def is_open(self) -> bool:
        """Whether the other side is there, as far as can be seen at once. What it said before its end can still be heard after it."""
        look = select.poll()  # not `select`, which knows no descriptors above 1,023
        look.register(self._socket, select.POLLRDHUP)
        return not look.poll(0)

    def close(self) -> None:
        with suppress(OSError):  # the other side was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def welcome(line: Line, *, token: str, backends: Sequence[str], seconds: float, **memory: Mapping[str, object]) -> str:
    """The sender's side of the beginning: who asks has to know the token, and takes one of the backends. `memory` says what is lent, to anybody.

    Returns:
        The backend that the receiver has taken.

    Raises:
        PairError: the other side does not know the token, can use none of the backends, or is silent.
    """
    challenge = secrets.token_hex(16)
    line.tell(seconds, protocol=PROTOCOL, challenge=challenge, backends=list(backends), **memory)
    answer = line.hear(seconds)
    if not hmac.compare_digest(str(answer.get("proof")).encode(errors="replace"), _proof(token, challenge).encode()):
        line.tell(seconds, error="the sender does not know this token")
        raise PairError("somebody asked for weights without knowing the token")
    backend = answer.get("backend")
    if backend not in backends:
        raise PairError(f"a receiver can use none of the backends {', '.join(backends)}")
    return str(backend)


def introduce(line: Line, *, token: str, choose: Callable[[Mapping[str, Any]], str], seconds: float) -> str:
    """The receiver's side of the beginning. `choose` takes one of the backends of the sender's `hello`, or raises PairError."""
    hello = line.hear(seconds)
    if hello.get("protocol") != PROTOCOL:
        raise PairError(f"what answers there speaks another protocol ({hello.get('protocol')}, not {PROTOCOL})")
    backend = choose(hello)
    line.tell(seconds, proof=_proof(token, str(hello.get("challenge"))), backend=backend)
    return backend


def _proof(token: str, challenge: str) -> str:
    return hmac.new(token.encode(), f"receiver {challenge}".encode(), hashlib.sha256).hexdigest()
