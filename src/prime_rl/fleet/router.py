"""Several servers behind one router (`client.admin_base_url`), as one: they get work together, load together, and are verified together.

Any of them may have sampled what came through the router, so it counts once all of them are verified. Weights,
verifications and logprob checks go to each backend's own address, never through the router.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from loguru import logger

from prime_rl.errors import UserError
from prime_rl.fleet.client import InferenceClient, Served, ServerError
from prime_rl.fleet.logprob_check import LogprobCheckFailed
from prime_rl.transport.weights import WeightsManifest

if TYPE_CHECKING:
    from prime_rl.config.shared import ClientConfig

# Either is enough: environments use the first one that there is.
TOKEN_ROUTES = ("/v1/sample", "/inference/v1/generate")
NO_VERSION = -1  # reported while servers disagree; never a real version
_NO_SUCH_ROUTE = (404, 405, 501)


class RouterClient:
    """One client for a router and the servers behind it.

    Args:
        router: What episodes are sent to.
        backends: All servers that it leads to.
    """

    def __init__(self, router: InferenceClient, backends: Sequence[InferenceClient]) -> None:
        self._router, self._backends = router, backends
        self._updating = asyncio.Lock()  # bounded: held for the requests of an update; backends may differ meanwhile
        self._reported = ""  # the last difference between them
        self._passes_tokens = False

    @property
    def root(self) -> str:
        return self._router.root

    async def wait_ready(self, on_wait: Callable[[str, str, float], None]) -> None:
        """Wait until all backends and the router are healthy.

        Raises:
            UserError: one of them did not come up in time, or the router passes no token route on.
        """
        await _all(each.wait_ready(on_wait) for each in (*self._backends, self._router))
        if not self._passes_tokens:
            try:
                statuses = [await self._router.status(path) for path in TOKEN_ROUTES]
            except ServerError:  # it was healthy just now: asked again when it is waited for again
                return
            if all(status in _NO_SUCH_ROUTE for status in statuses):
                raise UserError(f"the router at {self.root} forwards neither {' nor '.join(TOKEN_ROUTES)}: rollouts need token ids")  # fmt: skip
            self._passes_tokens = True

    async def answers(self) -> bool:
        """Whether all of them are healthy now."""
        return all(await _all(each.answers() for each in (*self._backends, self._router)))

    async def served(self) -> Served:
        """Return what all backends serve; `NO_VERSION` where they serve different weights, which an update ends. `boot` and
        `loads` change with those of any backend.

        Raises:
            UserError: as a single server's.
        """
        answers = await self._ask()
        if _differ(answers) and self._updating.locked():
            async with self._updating:
                answers = await self._ask()
        if not _differ(answers):
            return _joined(answers)
        each = zip(self._backends, answers, strict=True)
        listed = ", ".join(f"{backend.root} version {one.version} ({one.hash[:12]})" for backend, one in each)
        if listed != self._reported:
            self._reported = listed
            logger.warning("the servers behind {} serve different weights: {}", self.root, listed)
        return replace(_joined(answers), version=NO_VERSION, hash="")

    async def update(self, weights: WeightsManifest) -> Served:
        """Have all backends load a committed version and verify it, at the same time.

        Raises:
            LogprobCheckFailed: one of them computes something else.
            UserError: one of them rejected it.
            ServerError: one of them failed; the others may serve it already, which `served` says.
        """
        async with self._updating:
            outcomes = await asyncio.gather(
                *(backend.update(weights) for backend in self._backends), return_exceptions=True
            )
        if errors := [outcome for outcome in outcomes if isinstance(outcome, BaseException)]:
            raise max(errors, key=_severity)
        return _joined([outcome for outcome in outcomes if isinstance(outcome, Served)])

    async def reload(self) -> Served:
        """Have all backends load their base weights again.

        Raises:
            UserError: as a single server's.
        """
        return _joined(await _all(backend.reload() for backend in self._backends))

    async def _ask(self) -> list[Served]:
        return await _all(backend.served() for backend in self._backends)


T = TypeVar("T")
ServerClient = InferenceClient | RouterClient


def connect_all(config: "ClientConfig", connect: Callable[[str], InferenceClient]) -> Sequence[ServerClient]:
    """Clients of all listed servers; of those behind a router one. `connect` makes the client of one address."""
    if not config.admin_roots:
        return [connect(root) for root in config.api_roots]
    return [RouterClient(connect(config.api_roots[0]), [connect(root) for root in config.admin_roots])]


async def _all(requests: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all. Where one fails the others are cancelled, and the most severe error (`_severity`) is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(request) for request in requests]
    except BaseExceptionGroup as errors:
        raise max(errors.exceptions, key=_severity) from errors
    return [task.result() for task in tasks]  # bounded: the group has awaited them


def _differ(answers: Sequence[Served]) -> bool:
    return len({(one.version, one.hash) for one in answers}) > 1


def _joined(answers: Sequence[Served]) -> Served:
    """One answer for all: its times are the slowest's, its models those that each of them knows (None where none says any)."""
    first = answers[0]
    phases = {phase for one in answers for phase in one.seconds}
    models = [one.models for one in answers if one.models is not None]
    return Served(
        first.version,
        first.hash,
        "+".join(one.boot for one in answers),
        any(one.leaving for one in answers),
        sum(one.engines for one in answers),
        {phase: max(one.seconds.get(phase, 0.0) for one in answers) for phase in phases},
        tuple(name for name in models[0] if all(name in one for one in models)) if models else None,
        "+".join(one.loads for one in answers),
    )


def _severity(error: BaseException) -> int:
    """Of several backends' errors the one with the highest is raised: a bug of ours, a failed logprob check, a rejection, a server's error.

    `weight_sync._worst` puts a rejection first, as nothing mends it. Here a failed logprob check precedes it: one error
    stands for all backends, and only that one tells `Replica.load` that reports of this replica prove nothing.
    """
    if not isinstance(error, UserError):
        return 3
    return 2 if isinstance(error, LogprobCheckFailed) else 0 if isinstance(error, ServerError) else 1
