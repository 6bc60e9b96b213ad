"""One server a port, from its first moment on.

Processes that answer together share a port (SO_REUSEPORT), and a server binds it long before it listens: the kernel then lets a second server of the same user
have it, too, and clients reach now the one, now the other.
"""

import errno
import os
import socket

from prime_rl.errors import UserError
from prime_rl.inference.arguments import ALL_ADDRESSES, is_loopback

_held: list[socket.socket] = []  # for as long as this process lives


def hold_port(host: str, port: int) -> None:
    """Make `port` this server's until this process ends, by a name in the kernel that only one socket of a network namespace has.

    Raises:
        UserError: another server has it.
    """
    holder = _bind(host, port, "--server.port")
    os.register_at_fork(after_in_child=holder.close)  # an engine that outlives its server for a moment does not keep it
    _held.append(holder)


def check_unheld(host: str, port: int, option: str) -> None:
    """Raises UserError where an inference server has that port, also one that is still loading; `option` chooses another."""
    _bind(host, port, option).close()


def _bind(host: str, port: int, option: str) -> socket.socket:
    # Who listens at all addresses and who listens at loopback meet there.
    scope = "" if host in (ALL_ADDRESSES, "::") or is_loopback(host) else f" of {host}"
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        holder.bind(f"\0prime-rl inference: port {port}{scope}")
    except OSError as error:
        holder.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise UserError(
            f"port {port} is taken by another inference server, which may still be loading: stop it, or choose another with {option}"
        ) from error
    return holder
