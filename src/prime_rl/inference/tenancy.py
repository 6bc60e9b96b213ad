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
from prime_rl.inference.service import STALL_SECONDS, Rejected, WeightService, read
from prime_rl.transport.tenants import joins, key_hashes, owner

KEYS_SECONDS = 0.5  # unknown keys cause at most one read of the directory in this time
KNOWN_SECONDS = 10.0  # known keys are read again after this time: a tenant's directory may have been removed

CURRENT_TENANT: ContextVar[str | None] = ContextVar("CURRENT_TENANT", default=None)
"""The tenant whose request is being answered; None: no tenant's."""


class Tenancy:
    """The tenants of a server. Each gets an adapter number from 1 to `slots` on its first weight request. The number is
    reused only when none is free and its tenant has left, has no request in progress and no weight change under way.

    Args:
        deployment: Holds the tenants' directories.
        make_service: Makes the service of a tenant of this name and number.
    """

    def __init__(
        self, deployment: Path, slots: int, share: FairShare[Any], make_service: Callable[[str, int], WeightService]
    ) -> None:
        self._deployment, self._slots, self._share, self._make_service = deployment, slots, share, make_service
        self.services: dict[str, WeightService] = {}  # of the tenants with a number
        self._requests: Counter[str] = Counter()  # in progress, by tenant
        self._hashes: dict[str, str] = {}  # of the tenants' keys
        self._read_at = -KEYS_SECONDS
        self._keys_lock = asyncio.Lock()  # bounded: `tenant_of` reads with a deadline
        self._slots_lock = asyncio.Lock()  # bounded: `service` reads and calls the engine with deadlines

    async def tenant_of(self, key: str) -> str | None:
        """Return the tenant whose key this is; None: nobody's. Rejected (503) if the directory cannot be read."""
        asked = time.monotonic()
        if asked - self._read_at < KNOWN_SECONDS and (name := owner(key, self._hashes)) is not None:
            return name
        async with self._keys_lock:
            if self._read_at < asked:
                await asyncio.sleep(max(self._read_at + KEYS_SECONDS - time.monotonic(), 0.0))
                self._read_at = time.monotonic()
                self._hashes = await read(lambda: key_hashes(self._deployment), self._deployment, STALL_SECONDS)
        return owner(key, self._hashes)

    async def service(self, name: str) -> WeightService:
        """Return a tenant's service, and give it a number if it has none. Rejected (409) if none is left."""
        if name not in self.services:
            async with self._slots_lock:
                if name not in self.services:
                    service = self._make_service(name, await self._free_number())
                    await service.clear()
                    self.services[name] = service
                    logger.info("tenant {} has adapter {} of {}", name, service.number, self._slots)
        return self.services[name]

    async def _free_number(self) -> int:
        """Return a free number; if there is none, take that of a tenant that has left and is idle."""
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
        """Return the current tenant's adapter."""
        service = self.services.get(CURRENT_TENANT.get() or "")  # bounded: ContextVar.get does not block
        return None if service is None else service.adapter()

    def usage(self, name: str) -> dict[str, Any]:
        """Return a tenant's share (0 to 1) of the engine's request-seconds, and the number of its waiting requests."""
        return {"engine_share": self._share.share(name, time.monotonic()), "waiting": self._share.waiting(name)}

    async def forward(
        self, name: str, app: ASGIApp, scope: Scope, receive: Receive, send: Send, *, generates: bool
    ) -> None:
        """Forward a tenant's request to `app`; if it `generates`, wait for a fair-share ticket first. Raises Rejected:
        503 without an adapter, 500 if its weights are unusable or a load failed before the reply."""
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
            # A client that disconnects while queued is detected only once the application runs.
            await ticket  # bounded: by the deadlines of the requests before it
            failures = service.failures
            service.check_usable()
            has_answered = False

            async def send_if_usable(message: Message) -> None:
                nonlocal has_answered
                async with service.loading:  # bounded: a load holds it, with a deadline
                    usable = service.failures == failures
                if usable:  # else the client must see a broken connection, as if the server had died
                    has_answered = True
                    await send(message)

            await app(scope, receive, send_if_usable)
            if service.failures != failures and not has_answered:
                raise Rejected(500, "the adapter failed to load while this request was running: its reply is discarded")
        finally:
            self._admit(self._share.leave(name, ticket, time.monotonic()))

    def _admit(self, tickets: list[asyncio.Future[None]]) -> None:
        for ticket in tickets:
            if not ticket.done():
                ticket.set_result(None)
