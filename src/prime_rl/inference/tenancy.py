"""The tenants of a shared server: whose a request is, which adapter that means, and when it gets the engine."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from loguru import logger
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prime_rl.inference.fair_share import FairShare
from prime_rl.inference.service import WeightService
from prime_rl.inference.version_files import STALL_SECONDS, Rejected, read
from prime_rl.transport.tenants import joins, key_hashes, owner

KEYS_SECONDS = 0.5  # between two looks for a key that is not known
KNOWN_SECONDS = 10.0  # that a key is known after a look: its tenant's directory may have been removed

CURRENT_TENANT: ContextVar[str | None] = ContextVar("CURRENT_TENANT", default=None)


def current_tenant() -> str | None:
    """Return whose request is being answered; None: no tenant's."""
    return CURRENT_TENANT.get()  # bounded: a variable


class Tenancy:
    """The tenants of a server. Each gets one of the numbers from 1 to `slots` at its first weight request, and keeps it
    until another one needs it and it is no tenant any more.

    Args:
        deployment: Holds the tenants' directories.
        start: Makes the service of a tenant of this name and number.
    """

    def __init__(
        self, deployment: Path, slots: int, share: FairShare[Any], start: Callable[[str, int], WeightService]
    ) -> None:
        self._deployment, self._slots, self._share, self._start = deployment, slots, share, start
        self.services: dict[str, WeightService] = {}  # of the tenants with a number
        self._requests: Counter[str] = Counter()  # that are not answered yet, by tenant
        self._hashes: dict[str, str] = {}  # of the tenants' keys
        self._read_at = -KEYS_SECONDS
        self._reading = asyncio.Lock()  # bounded: `whose` reads with a deadline
        self._numbering = asyncio.Lock()  # bounded: `tenant` reads and calls the engine with deadlines

    async def whose(self, key: str) -> str | None:
        """Return the tenant that a key is of. Rejected (503) if that cannot be read."""
        asked = time.monotonic()
        if asked - self._read_at < KNOWN_SECONDS and (name := owner(key, self._hashes)) is not None:
            return name
        async with self._reading:
            if self._read_at < asked:
                await asyncio.sleep(max(self._read_at + KEYS_SECONDS - time.monotonic(), 0.0))
                self._read_at = time.monotonic()
                self._hashes = await read(lambda: key_hashes(self._deployment), self._deployment, STALL_SECONDS)
        return owner(key, self._hashes)

    async def service(self, name: str) -> WeightService:
        """Return the tenant's service, and give it a number. Rejected (409) if none is left."""
        if name not in self.services:
            async with self._numbering:
                if name not in self.services:
                    service = self._start(name, await self._free_number())
                    await service.clear()
                    self.services[name] = service
                    logger.info("tenant {} has adapter {} of {}", name, service.number, self._slots)
        return self.services[name]

    async def _free_number(self) -> int:
        """Return an unused number; if there is none, take that of a tenant that has left and has no requests."""
        free = {*range(1, self._slots + 1)} - {service.number for service in self.services.values()}
        if free:
            return min(free)
        joined = await read(lambda: joins(self._deployment), self._deployment, STALL_SECONDS)
        for name, service in self.services.items():
            if name not in joined and not self._requests[name] and not service.busy:
                del self.services[name]
                return service.number
        names = ", ".join(self.services)
        raise Rejected(409, f"all {self._slots} adapters of this server (lora.tenants.slots) are taken, by {names}")

    def adapter(self) -> tuple[int, str] | None:
        """Return the adapter of the tenant whose request is answered."""
        service = self.services.get(current_tenant() or "")
        return None if service is None else service.adapter()

    def numbers(self, name: str) -> dict[str, Any]:
        """Return how a tenant uses the engine: its share (0 to 1) of the request-seconds, and its waiting requests."""
        return {"engine_share": self._share.share(name, time.monotonic()), "waiting": self._share.waiting(name)}

    async def answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, *, generates: bool) -> None:
        """Forward the current tenant's request to the application. Raises Rejected."""
        name = current_tenant()
        assert name is not None
        self._requests[name] += 1
        try:
            if generates:
                await self._generate(name, app, scope, receive, send)
            else:
                await app(scope, receive, send)
        finally:
            self._requests[name] -= 1

    async def _generate(self, name: str, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        if name not in self.services:
            raise Rejected(503, f"this server has no adapter of tenant {name} yet: load one (POST /update_weights)")
        service, ticket = self.services[name], asyncio.get_running_loop().create_future()
        self._admit(self._share.ask(name, ticket, time.monotonic()))
        try:
            # Where the client is gone meanwhile the application notices as soon as it has its turn.
            await ticket  # bounded: by the deadlines of the requests before it
            failures = service.failures
            service.check_usable()
            answers = False

            async def forward(message: Message) -> None:
                nonlocal answers
                async with service.loading:  # bounded: a load is
                    usable = service.failures == failures
                if usable:  # else the client must see a broken connection, as if the server had died
                    answers = True
                    await send(message)

            await app(scope, receive, forward)
            if service.failures != failures and not answers:
                raise Rejected(500, "the adapter failed to load while this request was running: its reply is discarded")
        finally:
            self._admit(self._share.leave(name, ticket, time.monotonic()))

    def _admit(self, tickets: list[asyncio.Future[None]]) -> None:
        for ticket in tickets:
            if not ticket.done():
                ticket.set_result(None)
