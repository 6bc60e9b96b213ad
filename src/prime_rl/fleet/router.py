"""Several servers behind one router (`client.admin_base_url`), as one: they get work together, are updated together, and prove themselves together.

Any of them may have sampled what came through the router, so what did counts once all of them have proven what they serve. A part that is gone takes the
others along until it is back. Weights, proofs and canaries go to each part's own address, never through the router.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from loguru import logger

from prime_rl.errors import UserError
from prime_rl.fleet.client import InferenceClient, Served, ServerError
from prime_rl.fleet.logprob_check import LogprobCheckFailed
from prime_rl.transport.weights import WeightsManifest

if TYPE_CHECKING:
    from prime_rl.config.shared import ClientConfig

T = TypeVar("T")
TOKEN_ROUTES = (
    "/v1/sample",
    "/inference/v1/generate",
)  # either is enough: environments use the first one that is there
NO_VERSION = -1  # of servers that do not serve the same: no version that anybody was given
_NO_SUCH_ROUTE = (404, 405, 501)


class RouterClient:
    """One client for a router and the servers behind it.

    Args:
        router: What episodes are sent to.
        parts: All servers that it leads to.
    """

    def __init__(self, router: InferenceClient, parts: Sequence[InferenceClient]) -> None:
        self._router, self._parts = router, parts
        self._update: asyncio.Future[None] | None = None  # under way: parts may differ meanwhile
        self._said_different = ""
        self._passes = False  # it is known to pass token routes on

    @property
    def root(self) -> str:
        return self._router.root

    async def wait_ready(self, on_wait: Callable[[str, str, float], None]) -> None:
        """Wait until all parts and the router are healthy.

        Raises:
            UserError: one of them did not come up in time, or the router passes no token route on.
        """
        await _all(each.wait_ready(on_wait) for each in (*self._parts, self._router))
        if self._passes:
            return
        try:
            statuses = [await self._router.status(path) for path in TOKEN_ROUTES]
        except ServerError:  # it was healthy just now: asked again when it is waited for again
            return
        if all(status in _NO_SUCH_ROUTE for status in statuses):
            raise UserError(
                f"the router at {self.root} passes neither {' nor '.join(TOKEN_ROUTES)} on: rollouts need tokens"
            )
        self._passes = True

    async def answers(self) -> bool:
        """Whether all of them are healthy now."""
        return all(await asyncio.gather(*(each.answers() for each in (*self._parts, self._router))))

    async def served(self) -> Served:
        """What all parts serve, in incarnations of which each counts; `NO_VERSION` where they serve different weights, which an update ends.

        Raises:
            UserError: as a single server's.
        """
        answers = await self._ask()
        if self._update is not None and len(_weights(answers)) > 1:
            await asyncio.wait({self._update})  # bounded: by the requests that an update consists of
            answers = await self._ask()
        joined = _joined(answers)
        if len(_weights(answers)) == 1:
            return joined
        self._say_different(answers)
        return replace(joined, version=NO_VERSION, hash="")

    async def update(self, weights: WeightsManifest) -> Served:
        """Have all parts load a committed version and prove it, at the same time.

        Raises:
            LogprobCheckFailed: one of them computes something else.
            UserError: one of them refused it.
            ServerError: one of them failed; the others may serve it already, which `served` says.
        """
        self._update = asyncio.get_running_loop().create_future()
        try:
            outcomes = await asyncio.gather(*(part.update(weights) for part in self._parts), return_exceptions=True)
        finally:
            self._update.set_result(None)
            self._update = None
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            raise min(errors, key=_weight_of)
        return _joined([outcome for outcome in outcomes if isinstance(outcome, Served)])

    async def reload(self) -> Served:
        """Have all parts load their base weights again.

        Raises:
            UserError: as a single server's.
        """
        return _joined(await _all(part.reload() for part in self._parts))

    def _say_different(self, answers: Sequence[Served]) -> None:
        each = zip(self._parts, answers, strict=True)
        listed = ", ".join(f"{part.root} version {one.version} ({one.hash[:12]})" for part, one in each)
        if listed != self._said_different:
            self._said_different = listed
            logger.warning("the servers behind {} serve different weights: {}", self.root, listed)

    async def _ask(self) -> list[Served]:
        return await _all(part.served() for part in self._parts)


ServerClient = InferenceClient | RouterClient


def connect_all(config: "ClientConfig", connect: Callable[[str], InferenceClient]) -> Sequence[ServerClient]:
    """Clients of all listed servers; of those behind a router one.

    Args:
        connect: Makes the client of one address.
    """
    if not config.admin_roots:
        return [connect(root) for root in config.api_roots]
    return [RouterClient(connect(config.api_roots[0]), [connect(root) for root in config.admin_roots])]


async def _all(questions: Iterable[Awaitable[T]]) -> list[T]:
    """Their answers; with the first that fails the others are given up.

    Raises:
        Exception: the first that one of them raised.
    """
    tasks = [asyncio.ensure_future(question) for question in questions]
    try:
        return list(await asyncio.gather(*tasks))  # bounded: each of them is
    finally:
        for task in tasks:
            task.cancel()


def _weights(answers: Sequence[Served]) -> set[tuple[int, str]]:
    return {(one.version, one.hash) for one in answers}


def _joined(answers: Sequence[Served]) -> Served:
    """One answer for all that serve the same; its incarnation ends with that of any of them, its times are the slowest's."""
    first = answers[0]
    parts = {part for one in answers for part in one.seconds}
    return Served(
        first.version,
        first.hash,
        "+".join(one.boot for one in answers),
        any(one.leaving for one in answers),
        sum(one.engines for one in answers),
        {part: max(one.seconds.get(part, 0.0) for one in answers) for part in parts},
        _common([one.models for one in answers if one.models is not None]),
    )


def _common(models: Sequence[tuple[str, ...]]) -> tuple[str, ...] | None:
    """The names that all of them know; None where none says any."""
    return tuple(name for name in models[0] if all(name in one for one in models)) if models else None


def _weight_of(error: BaseException) -> int:
    """What is to be told first: what is no server's error at all, a wrong computation, a refusal, trouble."""
    if not isinstance(error, UserError):
        return 0
    return 1 if isinstance(error, LogprobCheckFailed) else 3 if isinstance(error, ServerError) else 2
