"""The tools of one conversation: the MCP servers that verifiers started for it, and what a model's call comes to.

What a model gets wrong is answered to the model; only a server that is gone is an error of the episode. verifiers polls
three minutes for the port of a local server that died on its first line; `ToolRuntime` ends that wait with its last
lines as the reason.
"""

import asyncio
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import httpx2
import verifiers.v1 as vf
from mcp.shared.exceptions import MCPError
from verifiers.v1.harnesses.utils.mcp import MCPConnection, connect_mcp
from verifiers.v1.mcp.launch import log_tail
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.utils.paths import CACHE_DIR

from prime_rl.envs.convert import parsed_json
from prime_rl.wait import wait_async

MALFORMED_CALL = "malformed_call"  # name of what was meant to be a call, its text the arguments
CALL_SECONDS = 60.0
CONNECT_SECONDS = 30.0
SERVER_SECONDS = 180.0  # from its start until it listens: as long as verifiers waits
POLL_SECONDS = 0.05
PORT_SECONDS = 1.0  # for one try to connect to a server that starts
LAST_LINES = 3
_PORT_FILE = "MCP_PORT_FILE"  # a variable of servers alone: where they write their port
ANSWER_LIMIT = 100_000  # characters: a longer one is cut, not sent to fill the model's context

# Of a session whose server hung up, is not there, or answers with something else than MCP.
_BROKEN = (
    *(MCPError, httpx2.HTTPError, OSError, RuntimeError, ValueError, ExceptionGroup),
    *(anyio.ClosedResourceError, anyio.BrokenResourceError),
)


class Toolbox:
    """All tools of a conversation. Counts what was called."""

    def __init__(self) -> None:
        self.definitions: list[dict[str, Any]] = []  # as the model knows them
        self.metrics = dict.fromkeys(("tool_calls", "malformed_tool_calls", "failed_tool_calls"), 0.0)
        self._dispatch: dict[str, tuple[str, str]] = {}  # of each tool its server, and its name there
        self._servers: dict[str, MCPConnection] = {}
        self._exit_stack = AsyncExitStack()

    async def open(self, urls: Mapping[str, str]) -> None:
        """List the tools of the servers, by name and address. Raises vf.ToolsetError."""
        specs = {name: {"url": url, "timeout": CALL_SECONDS} for name, url in urls.items()}
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                opened = await connect_mcp({"mcpServers": specs}, self._exit_stack)
        except (*_BROKEN, TimeoutError) as error:
            raise vf.ToolsetError(f"tool servers {', '.join(urls)} do not list their tools: {_cause(error)}") from error
        self.definitions, self._dispatch, self._servers = opened

    async def call(self, name: str, arguments: str) -> str:
        """The answer to one call of the model, whose arguments are meant to be a JSON object.
        Raises vf.ToolsetError: the server is gone."""
        self.metrics["tool_calls"] += 1
        try:
            if name == MALFORMED_CALL:
                raise ValueError("it is no JSON, or has no name or no end")
            if name not in self._dispatch:
                raise ValueError(f"there is no tool {name!r} (tools: {', '.join(self._dispatch)})")
            if not isinstance(values := parsed_json(arguments), dict):
                raise ValueError("its arguments are no JSON object")
        except ValueError as error:
            self.metrics["malformed_tool_calls"] += 1
            return f"Error: the call cannot be made: {error}"
        server, tool = self._dispatch[name]
        try:
            async with asyncio.timeout(CALL_SECONDS):
                # Not its `run`, which would repeat a call that may have done something.
                result = await self._servers[server]._run(lambda client: client.call_tool(tool, values))
        except TimeoutError:
            self.metrics["failed_tool_calls"] += 1
            return f"Error: no result within {CALL_SECONDS:g} seconds"
        except _BROKEN as error:
            raise vf.ToolsetError(f"tool server {server!r} does not answer: {_cause(error)}") from error
        self.metrics["failed_tool_calls"] += result.is_error
        text = "\n".join(block.text if block.type == "text" else f"[{block.type}]" for block in result.content)
        return text[:ANSWER_LIMIT]

    async def close(self) -> None:
        for connection in self._servers.values():
            await connection.aclose(abort=True)
        await self._exit_stack.aclose()


def _cause(error: BaseException) -> str:
    """The innermost of a group, on one line: a client's task group wraps whatever happened in it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


async def check(servers: Mapping[str, Any]) -> None:
    """Raises vf.ToolsetError, with the last lines that it printed, when one of a taskset's servers does not answer."""
    for name, server in servers.items():
        toolbox = Toolbox()
        try:
            await toolbox.open({name: server.url})
        except vf.ToolsetError as error:
            lines = await _last_lines(server.runtime, f"vf_tool_{name}.log") if server.runtime is not None else ""
            raise vf.ToolsetError(f"{error}: {lines}") from error
        finally:
            await toolbox.close()


async def _last_lines(runtime: Any, log: str) -> str:
    lines = [line.strip() for line in (await log_tail(runtime, log)).splitlines() if line.strip()]
    return " | ".join(line[-150:] for line in lines[-LAST_LINES:]) or "it printed nothing"


class ToolRuntime(SubprocessRuntime):
    """verifiers' local runtime; a tool server that dies before it listens is an error at once. Its directory is made
    when it is first used: most episodes need none."""

    async def start(self) -> None:
        self.workdir = CACHE_DIR / "runtimes" / "subprocess" / self.name
        self.info.id = str(self.workdir)

    def process_env(self, env: dict[str, str]) -> dict[str, str]:
        assert self.workdir is not None
        self.workdir.mkdir(parents=True, exist_ok=True)
        return super().process_env(env)

    async def teardown(self) -> None:
        if self.workdir is not None and self.workdir.exists():
            await super().teardown()

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        """Raises vf.ToolsetError when a tool server dies, WaitTimeout when it does not listen in time."""
        if _PORT_FILE not in env:
            return await super().run_background(argv, env, log)
        # A server imports what this worker (`python -m`) imports.
        path = os.pathsep.join(filter(None, (sys.path[0], os.environ.get("PYTHONPATH", ""))))
        await super().run_background(argv, {"PYTHONPATH": path, **env}, log)
        process, file, owner = self._background[-1], Path(env[_PORT_FILE]), f"tool server {argv[-1]}"

        def settled() -> bool:
            if process.returncode is not None:
                return True
            try:
                with socket.create_connection(("127.0.0.1", int(file.read_text())), timeout=PORT_SECONDS):
                    return True
            except (OSError, ValueError):  # it has written no port yet, or listens later
                return False

        await wait_async(settled, subject="port", owner=owner, seconds=SERVER_SECONDS, poll=POLL_SECONDS)
        if process.returncode is not None:
            why = f"it exited with status {process.returncode}: {await _last_lines(self, log)}"
            raise vf.ToolsetError(f"{owner}: {why}")
