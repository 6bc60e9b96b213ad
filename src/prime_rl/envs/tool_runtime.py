"""The processes of local tool servers: they import what the worker imports, and one that dies ends the wait for it, with its last lines as the reason.

verifiers polls three minutes for the port of a server that died on its first line. Its table of runtimes has no place for another one, so that
`install_runtime` puts ours in that of its local runtime.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from asyncio.subprocess import Process
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import verifiers.v1 as vf
from verifiers.v1 import runtimes
from verifiers.v1.runtimes.subprocess import SubprocessRuntime

from prime_rl.wait import WaitTimeout, wait_async

SERVER_SECONDS = 180.0  # from its start until it listens: as long as verifiers waits
POLL_SECONDS = 0.05
CONNECT_SECONDS = 1.0
EXIT_SECONDS = 1.0  # until a process that closed its connections is known to have exited
LAST_BYTES, LAST_LINES = 4000, 3
_PORT_FILE = "MCP_PORT_FILE"  # a variable of servers alone: where they write their port

logger = logging.getLogger(__name__)


@dataclass
class _Server:
    name: str
    process: Process
    log: Path
    logged: bool = False

    def ending(self) -> str:
        """How it ended, on one line ("": it runs). All its last lines are in the worker's log."""
        if self.process.returncode is None:
            return ""
        lines = self.last_lines()
        if not self.logged:
            logger.warning("tool server %s:\n%s", self.name, "\n".join(lines))
        self.logged = True
        return f"it exited with status {self.process.returncode}: {_on_one_line(lines)}"

    def last_lines(self) -> list[str]:
        try:
            data = self.log.read_bytes()[-LAST_BYTES:]
        except OSError:
            return []
        return [line.strip() for line in data.decode(errors="replace").splitlines() if line.strip()]


_BY_PORT: dict[int, _Server] = {}


class ToolRuntime(SubprocessRuntime):
    """verifiers' local runtime, which waits until a tool server listens."""

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        """Raises vf.ToolsetError when a tool server dies, or does not listen in time."""
        if _PORT_FILE not in env:
            return await super().run_background(argv, env, log)
        path = os.pathsep.join(
            filter(None, (sys.path[0], os.environ.get("PYTHONPATH", "")))
        )  # of `python -m`, as this worker
        await super().run_background(argv, {"PYTHONPATH": path, **env}, log)
        assert self.workdir is not None
        server = _Server(argv[-1], self._background[-1], self.workdir / log)
        look, owner = partial(_port_of, server, Path(env[_PORT_FILE])), f"tool server {server.name}"
        try:
            port = await wait_async(look, subject="port", owner=owner, seconds=SERVER_SECONDS, poll=POLL_SECONDS)
        except WaitTimeout as error:
            raise vf.ToolsetError(f"{error}: {_on_one_line(server.last_lines())}") from error
        assert port is not None
        _BY_PORT[port] = server

    async def teardown(self) -> None:
        for port in [port for port, server in _BY_PORT.items() if server.process in self._background]:
            del _BY_PORT[port]
        await super().teardown()


def install_runtime() -> None:
    """Every local runtime that verifiers makes from now on is ours."""
    runtimes.SubprocessRuntime = ToolRuntime


async def ending_of(url: str) -> str:
    """How the server at an address ended; "" where it runs, or is not one of ours."""
    server = _BY_PORT.get(urlsplit(url).port or 0)
    if server is None:
        return ""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(EXIT_SECONDS):
            await server.process.wait()
    return server.ending()


def _port_of(server: _Server, file: Path) -> int | None:
    """The port that a server wrote into a file, once it listens there. Raises vf.ToolsetError when it died."""
    if ending := server.ending():
        raise vf.ToolsetError(f"tool server {server.name}: {ending}")
    text = file.read_text() if file.exists() else ""
    try:
        with socket.create_connection(("127.0.0.1", int(text)), timeout=CONNECT_SECONDS):
            return int(text)
    except (OSError, ValueError):
        return None


def _on_one_line(lines: list[str]) -> str:
    return " | ".join(line[-150:] for line in lines[-LAST_LINES:]) or "it printed nothing"
