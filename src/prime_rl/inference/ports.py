"""One server a port, from its first moment on.

Processes that answer together share a port (SO_REUSEPORT), and a server binds it long before it listens: the kernel then lets a second server of the same user
have it, too, and clients reach now the one, now the other.
"""

import errno
import os
import socket
from pathlib import Path

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
    everywhere = host in (ALL_ADDRESSES, "::")
    name = f"prime-rl inference: port {port} at "
    own = name + ("all" if everywhere else "loopback" if is_loopback(host) else host)
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        holder.bind(f"\0{own}")
        taken = False
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        if not taken:
            holder.close()
            raise
    # A server that listens at all addresses meets every other one. Each binds first and looks then, so that one of two sees the other.
    held = {line.partition("@")[2] for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()} - {own}
    if taken or name + "all" in held or (everywhere and any(each.startswith(name) for each in held)):
        holder.close()
        raise UserError(
            f"port {port} is taken by another inference server, which may still be loading: stop it, or choose another with {option}"
        )
    return holder
