"""The tools of one conversation: the MCP servers that verifiers started for it, and what a model's call comes to.

What a model gets wrong is answered to the model; only a server that is gone is an error of the episode. verifiers polls
three minutes for the port of a local server that died on its first line; `ToolRuntime` ends that wait with its last
lines as the reason.
"""

import asyncio
import functools
import logging
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import httpx2
import verifiers.v1 as vf
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from mcp.shared.exceptions import MCPError
from verifiers.v1 import runtimes
from verifiers.v1.harnesses.utils.mcp import MCPConnection
from verifiers.v1.mcp.launch import log_tail
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.utils.paths import CACHE_DIR

from prime_rl.envs.convert import parsed_json
from prime_rl.wait import WaitTimeout, wait_async

logger = logging.getLogger(__name__)

MALFORMED_CALL = "malformed_call"  # name of what was meant to be a call, its text the arguments
CALL_SECONDS = 60.0
CONNECT_SECONDS = 30.0
ALIVE_SECONDS = 5.0
SERVER_SECONDS = 180.0  # from its start until it listens: as long as verifiers waits
POLL_SECONDS = 0.05
PORT_SECONDS = 1.0  # for one try to connect to a server that starts
LAST_LINES = 3
_PORT_FILE = "MCP_PORT_FILE"  # a variable of servers alone: where they write their port
ANSWER_LIMIT = 100_000  # characters: a longer one is cut, not sent to fill the model's context

# Of a session whose server hung up, is not there, or answers with something else than MCP.
_BROKEN = (MCPError, httpx2.HTTPError, OSError, RuntimeError, ValueError, anyio.ClosedResourceError, anyio.BrokenResourceError)  # fmt: skip


@dataclass(frozen=True)
class ToolAnswer:
    """What a call came to, for the model to read."""

    text: str
    malformed: bool = False  # the model's fault: no such tool, no JSON, wrong arguments
    failed: bool = False  # the tool's: it raised, or took too long


class ToolServer:
    """A session with an MCP server, opened when it is asked for something, and anew after a failure."""

    def __init__(self, name: str, url: str) -> None:
        self._name = name
        self._url = url
        self._connection = MCPConnection({"url": url, "timeout": CALL_SECONDS})

    async def tools(self) -> list[Any]:
        """Its tools, as MCP describes them. Raises vf.ToolsetError."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return list((await self._connection._run(lambda client: client.list_tools())).tools)
        except (*_BROKEN, TimeoutError) as error:
            raise vf.ToolsetError(f"tool server {self._name!r} does not list its tools: {_cause(error)}") from error

    async def call(self, tool: str, arguments: dict[str, Any], seconds: float) -> ToolAnswer:
        """Raises vf.ToolsetError when the server is gone, or so busy that it does not answer at all."""
        try:
            async with asyncio.timeout(seconds):
                # Not its `run`, which would repeat a call that may have done something.
                result = await self._connection._run(lambda client: client.call_tool(tool, arguments))
        except TimeoutError:
            await self.alive("a call took too long")
            return ToolAnswer(f"Error: no result within {seconds:g} seconds", failed=True)
        except _BROKEN as error:
            await self.alive(_cause(error))
            return ToolAnswer(f"Error: {_cause(error)}", failed=True)
        text = "\n".join(block.text if block.type == "text" else f"[{block.type}]" for block in result.content)
        return ToolAnswer(text[:ANSWER_LIMIT], failed=result.is_error)

    async def close(self) -> None:
        await self._connection.aclose(abort=True)

    async def alive(self, failure: str = "") -> None:
        """Whether it answers anything, after a `failure` of something else. Raises vf.ToolsetError."""
        timeout = aiohttp.ClientTimeout(total=ALIVE_SECONDS)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(self._url):
                return
        except (aiohttp.ClientError, TimeoutError) as error:
            after = f", after: {failure}" if failure else ""
            raise vf.ToolsetError(f"tool server {self._name!r} does not answer: {_cause(error)}{after}") from error


@dataclass
class Toolbox:
    """All tools of a conversation. Counts what was called."""

    seconds: float = CALL_SECONDS
    tools: dict[str, tuple[ToolServer, str, Any]] = field(
        default_factory=dict
    )  # server, name there, validator of arguments
    definitions: list[dict[str, Any]] = field(default_factory=list)  # as the model knows them
    servers: list[ToolServer] = field(default_factory=list)
    calls: int = 0
    malformed: int = 0
    failed: int = 0

    async def open(self, urls: dict[str, str]) -> None:
        """List the tools of the servers, by name and address. Raises vf.ToolsetError."""
        for prefix, url in urls.items():
            server = ToolServer(prefix, url)
            self.servers.append(server)
            for tool in await server.tools():
                name = f"{prefix}_{tool.name}" if prefix else tool.name
                if name in self.tools:
                    raise vf.ToolsetError(f"two tools are called {name!r}: give one of their servers a TOOL_PREFIX")
                kind = validator_for(tool.input_schema)
                try:
                    kind.check_schema(tool.input_schema)
                except SchemaError as error:
                    reason = f"the arguments of tool {name!r} have no valid JSON schema: {error.message}"
                    raise vf.ToolsetError(reason) from error
                self.tools[name] = (server, tool.name, kind(tool.input_schema))
                function = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
                self.definitions.append({"type": "function", "function": function})

    @property
    def metrics(self) -> dict[str, float]:
        counts = {"tool_calls": self.calls, "malformed_tool_calls": self.malformed, "failed_tool_calls": self.failed}
        return {name: float(count) for name, count in counts.items()}

    async def call(self, name: str, arguments: str) -> ToolAnswer:
        """Carry out one call of the model, whose arguments are meant to be a JSON object. Raises vf.ToolsetError."""
        answer = await self._call(name, arguments)
        self.calls += 1
        self.malformed += answer.malformed
        self.failed += answer.failed
        return answer

    async def close(self) -> None:
        for server in self.servers:
            await server.close()

    async def _call(self, name: str, arguments: str) -> ToolAnswer:
        try:
            values = parsed_json(arguments)
        except ValueError as error:
            return ToolAnswer(f"Error: the call is not valid JSON: {error}", malformed=True)
        if name == MALFORMED_CALL:
            return ToolAnswer("Error: the call has no name, or no end", malformed=True)
        if name not in self.tools:
            return ToolAnswer(f"Error: there is no tool {name!r} (tools: {', '.join(self.tools)})", malformed=True)
        if not isinstance(values, dict):
            return ToolAnswer("Error: the arguments must be a JSON object", malformed=True)
        server, tool, schema = self.tools[name]
        if wrong := next(iter(schema.iter_errors(values)), None):
            where = f"{'.'.join(map(str, wrong.absolute_path))}: " if wrong.absolute_path else ""
            return ToolAnswer(f"Error: wrong arguments: {where}{wrong.message[:1000]}", malformed=True)
        return await server.call(tool, values, self.seconds)


def _cause(error: BaseException) -> str:
    """The innermost of a group, on one line: a client's task group wraps whatever happened in it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


async def check(servers: Mapping[str, Any]) -> None:
    """Raises vf.ToolsetError when one of a taskset's servers does not answer, or its tools are not usable."""
    toolbox = Toolbox()
    try:
        await toolbox.open({name: server.url for name, server in servers.items()})
    finally:
        await toolbox.close()


async def gone(servers: Mapping[str, Any]) -> str:
    """Why one of a taskset's servers does not answer, of those that verifiers started for this worker, once ("": all answer)."""
    for name, server in servers.items():
        try:
            await ToolServer(name, server.url).alive()
        except vf.ToolsetError as error:
            if server.runtime is not None:
                return f"{error}: {await _last_lines(server.runtime, f'vf_tool_{name}.log')}"
    return ""


async def _last_lines(runtime: Any, log: str) -> str:
    lines = [line.strip() for line in (await log_tail(runtime, log)).splitlines() if line.strip()]
    return " | ".join(line[-150:] for line in lines[-LAST_LINES:]) or "it printed nothing"


class ToolRuntime(SubprocessRuntime):
    """verifiers' local runtime; a tool server that dies before it listens is an error at once.

    Its directory is made when it is first used: most episodes need none.
    """

    async def start(self) -> None:
        self.info.id = str(CACHE_DIR / "runtimes" / "subprocess" / self.name)
        self.__dict__.pop("workdir", None)  # else its None, set by verifiers, hides the property

    @functools.cached_property
    def workdir(self) -> Path:  # type: ignore[override]
        path = Path(str(self.info.id))
        path.mkdir(parents=True, exist_ok=True)
        return path

    async def teardown(self) -> None:
        self._forget_unused_directory()
        await super().teardown()

    def cleanup(self) -> None:
        self._forget_unused_directory()
        super().cleanup()

    def _forget_unused_directory(self) -> None:
        # Looked for on disk: a view of this runtime (`with_env`) may have made it.
        if self.info.id is None or not os.path.isdir(self.info.id):
            self.__dict__["workdir"] = None

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        """Raises vf.ToolsetError when a tool server dies, or does not listen in time."""
        if _PORT_FILE not in env:
            return await super().run_background(argv, env, log)
        # A server imports what this worker (`python -m`) imports.
        path = os.pathsep.join(filter(None, (sys.path[0], os.environ.get("PYTHONPATH", ""))))
        await super().run_background(argv, {"PYTHONPATH": path, **env}, log)
        process, file, owner = self._background[-1], Path(env[_PORT_FILE]), f"tool server {argv[-1]}"

        def listens_or_dead() -> bool:
            if process.returncode is not None:
                return True
            try:
                with socket.create_connection(("127.0.0.1", int(file.read_text())), timeout=PORT_SECONDS):
                    return True
            except (OSError, ValueError):  # it has written no port yet, or listens later
                return False

        try:
            await wait_async(listens_or_dead, subject="port", owner=owner, seconds=SERVER_SECONDS, poll=POLL_SECONDS)
        except WaitTimeout as error:
            raise vf.ToolsetError(f"{error}: {await _last_lines(self, log)}") from error
        if process.returncode is not None:
            why = f"it exited with status {process.returncode}: {await _last_lines(self, log)}"
            raise vf.ToolsetError(f"{owner}: {why}")


def install_runtime() -> None:
    """Have verifiers make `ToolRuntime`s: its table of runtimes has no place for another one."""
    runtimes.SubprocessRuntime = ToolRuntime
