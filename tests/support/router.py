"""A router as simple as can be: it sends every request on to one of its servers, by turns. As vllm-router does it knows vLLM's token route, and passes
what it does not know on without the client's key.

    python tests/support/router.py --port 5200 http://127.0.0.1:5100 http://127.0.0.1:5101
"""

import argparse
import asyncio
import itertools
from collections.abc import Iterator

import aiohttp
from aiohttp import web

from prime_rl import lifeline

KNOWN = "/inference/v1/generate"


async def route(port: int, urls: list[str]) -> None:
    """Until the process is killed."""
    turns: Iterator[str] = itertools.cycle(urls)
    async with aiohttp.ClientSession() as session:

        async def pass_on(request: web.Request) -> web.Response:
            headers = {"Content-Type": "application/json"}
            if request.path == KNOWN and "Authorization" in request.headers:
                headers["Authorization"] = request.headers["Authorization"]
            url = f"{next(turns)}{request.path}"
            async with session.request(request.method, url, data=await request.read(), headers=headers) as answer:
                return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)

        app = web.Application()
        app.router.add_route("*", "/{rest:.*}", pass_on)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("urls", nargs="+")
    options = parser.parse_args()
    lifeline.watch()
    asyncio.run(route(options.port, options.urls))
