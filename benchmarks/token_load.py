"""Requests that keep an inference server busy, and when each of their tokens arrived, in a process of its own.

    python benchmarks/token_load.py URL MODEL --in-flight 64 --tokens 256 --into arrivals.npz < /dev/tty

Runs until its standard input ends, or a line comes. Times are of the monotonic clock, which all processes of a machine
share. Only a few requests are watched token by token: an answer for every token of every request is more than the
server's process can give, which would be measured then. The others go by the route that rollouts are sampled by.
"""

import argparse
import asyncio
import random
import sys
from array import array
from pathlib import Path

import aiohttp
import numpy as np

PROMPT = 64  # tokens
VOCABULARY = 250  # prompts are of these ids


class Load:
    """`in_flight` requests at a time, each followed by the next. `times[i]` is when stream `streams[i]`, one of the
    first `watched`, gave `counts[i]` tokens."""

    def __init__(self, url: str, model: str, tokens: int, watched: int) -> None:
        self.times, self.streams, self.counts = array("d"), array("i"), array("i")
        self.failed = 0
        self._url, self._model, self._tokens, self._watched = url, model, tokens, watched

    async def run(self, in_flight: int) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
            streams = [asyncio.create_task(self._stream(session, number)) for number in range(in_flight)]
            await asyncio.to_thread(sys.stdin.readline)
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)

    async def _stream(self, session: aiohttp.ClientSession, number: int) -> None:
        chance = random.Random(number)
        while True:
            try:
                await self._request(session, number, chance)
            except aiohttp.ClientError:
                self.failed += 1
                await asyncio.sleep(0.5)

    async def _request(self, session: aiohttp.ClientSession, number: int, chance: random.Random) -> None:
        prompt = [chance.randrange(VOCABULARY) for _ in range(PROMPT)]
        length = chance.randint(self._tokens // 2, self._tokens)  # not all at once at their end
        params = {"max_tokens": length, "temperature": 1.0, "ignore_eos": True, "logprobs": 0}
        body = {"model": self._model, "token_ids": prompt, "sampling_params": params}
        watched = number < self._watched
        route, more = ("generate", {"stream": True}) if watched else ("sample", {})
        now = asyncio.get_running_loop().time
        async with session.post(f"{self._url}/v1/{route}", json=body | more) as response:
            response.raise_for_status()
            if not watched:
                await response.read()
                return
            async for chunk in response.content.iter_any():
                if count := chunk.count(b'"token_ids"'):
                    self.times.append(now())
                    self.streams.append(number)
                    self.counts.append(count)

    def save(self, into: Path) -> None:
        np.savez(
            into,
            times=np.array(self.times),
            streams=np.array(self.streams),
            counts=np.array(self.counts),
            failed=self.failed,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of the server, without /v1")
    parser.add_argument("model")
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--watched", type=int, default=4, help="requests of which every token is waited for (4)")
    parser.add_argument("--tokens", type=int, default=256, help="at most, of a request (256)")
    parser.add_argument("--into", type=Path, required=True, help="file for the arrivals")
    options = parser.parse_args()
    load = Load(options.url, options.model, options.tokens, options.watched)
    asyncio.run(load.run(options.in_flight))
    load.save(options.into)


if __name__ == "__main__":
    main()
