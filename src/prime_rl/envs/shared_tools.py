"""The tool servers that all episodes of a worker share: looked at when they start, and started again when they are gone."""

import asyncio
import contextlib
import logging
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.mcp import serve_shared

from prime_rl.envs.tool_runtime import SERVER_SECONDS
from prime_rl.envs.tools import Toolbox, ToolServer

logger = logging.getLogger(__name__)


class SharedTools:
    """verifiers starts the servers of a taskset once and never looks again: one that died would cost every later episode."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._again = contextlib.AsyncExitStack()  # of those that were started again
        self._lock = asyncio.Lock()

    async def check(self) -> None:
        """Raises vf.ToolsetError when a server does not answer, or its tools are not usable."""
        toolbox = Toolbox()
        try:
            await toolbox.open({name: server.url for name, server in self._env._shared_tools.items()})
        finally:
            await toolbox.close()

    async def ready(self) -> None:
        """Wait while servers are being started again."""
        if self._lock.locked():
            async with self._lock:  # bounded: whoever holds it takes `SERVER_SECONDS` at most for each step
                return

    async def revive(self) -> None:
        """Start the servers again if one of them is gone. Episodes that use the old ones end with their error."""
        async with self._lock:  # bounded: as above
            if not await self._gone():
                return
            for server in self._env._shared_tools.values():
                if server.runtime is not None:
                    await server.runtime.stop()  # one that hangs would go on for as long as the worker
            await self._again.aclose()
            taskset = self._env.taskset
            try:
                async with asyncio.timeout(SERVER_SECONDS):
                    started = await self._again.enter_async_context(serve_shared(taskset.toolsets(taskset.config)))
            except (vf.ToolsetError, TimeoutError) as error:
                logger.warning("tool servers did not start again: %r", error)
                return
            interception = self._env._interception
            interception.state_service_secrets |= {one.state_secret for one in started.values() if one.state_secret}
            self._env._shared_tools = started

    async def close(self) -> None:
        await self._again.aclose()

    async def _gone(self) -> bool:
        for name, server in self._env._shared_tools.items():
            try:
                await ToolServer(name, server.url).alive()
            except vf.ToolsetError:
                return not server.external
        return False
