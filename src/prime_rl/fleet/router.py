"""Several servers behind one router (`client.admin_base_url`) as one: they get work, load and are verified together.

Any of them may have sampled what came through the router, so it counts once all of them are verified. Weights,
verifications and logprob checks go to each backend's own address, never through the router.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from prime_rl.errors import UserError
from prime_rl.fleet.client import InferenceClient, Served, ServerError, VersionNotSent
from prime_rl.fleet.logprob_check import LogprobCheck
from prime_rl.transport.weights import WeightsManifest

if TYPE_CHECKING:
    from prime_rl.config.shared import ClientConfig

NO_VERSION = -1  # reported while servers disagree; never a real version


class RouterClient:
    """One client for a router and the servers behind it. Its methods raise what a single server's do.

    Args:
        router: What episodes are sent to.
        backends: All servers that it leads to.
    """

    def __init__(self, router: InferenceClient, backends: Sequence[InferenceClient]) -> None:
        self._router, self._backends, self.root = router, backends, router.root

    async def wait_ready(self, on_wait: Callable[[str, str, float], None]) -> None:
        await asyncio.gather(*(each.wait_ready(on_wait) for each in (*self._backends, self._router)))

    async def answers(self) -> bool:
        return all(await asyncio.gather(*(each.answers() for each in (*self._backends, self._router))))

    async def served(self) -> Served:
        """Return what all backends serve; `NO_VERSION` until the next update where they serve different weights.

        `boot` and `loads` change with those of any backend.
        """
        return _joined(await asyncio.gather(*(backend.served() for backend in self._backends)))

    async def update(self, weights: WeightsManifest) -> Served:
        """Have all backends load a committed version and verify it, at the same time. Of several
        errors a failed logprob check or a rejection is raised before a server's failure."""
        updates = (backend.update(weights) for backend in self._backends)
        outcomes = await asyncio.gather(*updates, return_exceptions=True)  # bounded: by the requests' deadlines
        if errors := [outcome for outcome in outcomes if isinstance(outcome, BaseException)]:
            # A bug first, then what no other attempt mends, then a failed check.
            raise min(
                errors, key=lambda error: (isinstance(error, UserError), type(error) in (ServerError, VersionNotSent))
            )
        return _joined([outcome for outcome in outcomes if isinstance(outcome, Served)])

    async def reload(self) -> Served:
        """Have all backends load their base weights again. Raises UserError where these are not of one model."""
        served = _joined(await asyncio.gather(*(backend.reload() for backend in self._backends)))
        if served.version == NO_VERSION:
            raise UserError(f"the servers behind {self.root} have different base models")
        return served


ServerClient = InferenceClient | RouterClient


def connect_all(config: "ClientConfig", stack: AsyncExitStack, check: LogprobCheck | None) -> Sequence[ServerClient]:
    """Make clients of all listed servers; of those behind a router one. `stack` closes their connections."""
    roots = [config.api_roots[0], *config.admin_roots] if config.admin_roots else config.api_roots
    clients = [InferenceClient(config, root, check) for root in roots]
    for client in clients:
        stack.push_async_exit(client)
    return [RouterClient(clients[0], clients[1:])] if config.admin_roots else clients


def _joined(answers: Sequence[Served]) -> Served:
    """One answer for all: its times are the slowest's, its models those that each of them knows."""
    first, known = answers[0], [one.models for one in answers if one.models is not None]
    agree = all((one.version, one.hash) == (first.version, first.hash) for one in answers)
    return replace(
        first if agree else replace(first, version=NO_VERSION, hash=""),
        boot="+".join(one.boot for one in answers),
        loads="+".join(str(one.loads) for one in answers),
        leaving=any(one.leaving for one in answers),
        engines=sum(one.engines for one in answers),
        seconds={phase: max(one.seconds.get(phase, 0.0) for one in answers) for phase in first.seconds},
        models=tuple(name for name in known[0] if all(name in models for models in known)) if known else None,
    )
