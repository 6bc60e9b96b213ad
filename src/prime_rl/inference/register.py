"""The server makes itself known in a directory, and says there, and on `GET /weights`, that it is to leave."""

import asyncio
import contextlib
import ipaddress
import socket
import threading
from dataclasses import replace
from pathlib import Path

from loguru import logger

from prime_rl.config import InferenceConfig
from prime_rl.errors import UserError
from prime_rl.inference.arguments import guarded_host, is_loopback
from prime_rl.transport.addresses import outward_address
from prime_rl.transport.members import BEAT_SECONDS, Member, publish, withdraw

_WRITE_SECONDS = 30.0  # for a network file system
_LAST_SECONDS = 2.0  # … at the end of the server


class Departure:
    """Whether the server was asked to leave. There is no way back but a new start: others may have let it go already."""

    def __init__(self) -> None:
        self.asked = False
        self._news = asyncio.Event()

    def ask(self) -> None:
        """From now on it is leaving. Asking twice changes nothing."""
        if not self.asked:
            logger.info(
                "asked to leave: no new episodes are wanted; requests are answered on, until this server is stopped"
            )
        self.asked = True
        self._news.set()

    async def within(self, seconds: float) -> None:
        """Return once it is asked to leave, at most after `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()
        self._news.clear()


class Registration:
    """`asyncio.create_task(Registration(…).run())` in the server's event loop, which renews it: a loop that hangs lets it run out."""

    def __init__(self, directory: Path, address: str, model: str, boot: str, departure: Departure) -> None:
        self._directory = directory
        self._member = Member(address, boot, model, socket.gethostname(), 0)
        self._departure = departure
        self._trouble = ""
        self._writing = threading.Lock()  # bounded: whoever takes it has a deadline
        self._ended = False

    async def run(self) -> None:
        """Register, renew until cancelled, and then withdraw."""
        try:
            while True:  # ends with the server's event loop
                await self._renew()
                await self._departure.within(BEAT_SECONDS)
        finally:
            self._withdraw()

    async def _renew(self) -> None:
        """One beat. What keeps it from being written is said once; the next beat may succeed."""
        self._member = replace(self._member, beat=self._member.beat + 1, leaving=self._departure.asked)
        try:
            async with asyncio.timeout(_WRITE_SECONDS):
                await asyncio.to_thread(self._write, self._member)
        except (UserError, OSError) as error:  # TimeoutError is an OSError
            trouble = str(error) or f"no answer of the file system for {_WRITE_SECONDS:.0f} s"
            if trouble != self._trouble:
                logger.warning("not registered in {}: {}", self._directory, trouble)
            self._trouble = trouble
            return
        if self._trouble or self._member.beat == 1:
            logger.info("registered in {} as {}", self._directory, self._member.address)
        self._trouble = ""

    def _write(self, member: Member) -> None:
        if self._writing.acquire(timeout=_WRITE_SECONDS):
            try:
                if not self._ended:
                    publish(self._directory, member)
            finally:
                self._writing.release()

    def _withdraw(self) -> None:
        """After the beat that is being written, if one is. What cannot be removed runs out by itself."""
        self._ended = True
        if self._writing.acquire(timeout=_LAST_SECONDS):
            try:
                with contextlib.suppress(OSError):
                    withdraw(self._directory, self._member.address, self._member.boot)
            finally:
                self._writing.release()


def published_address(config: InferenceConfig) -> str:
    """Where others reach the server: `server.advertise`, else where it listens; for all addresses that of the way out of this host.

    Raises:
        UserError: it listens on all addresses, and this host has none that others could use.
    """
    if config.server.advertise is not None:
        return config.server.advertise.rstrip("/").removesuffix("/v1")
    host = guarded_host(config)
    if _is_wildcard(host):
        host = outward_address(socket.AF_INET6 if ":" in host else socket.AF_INET) or socket.gethostname()
        if is_loopback(host):
            raise UserError(
                "server.register_dir: this host has no address that others could use: say by server.advertise where it is reached"
            )
    return f"http://{f'[{host}]' if ':' in host else host}:{config.server.port}"


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
