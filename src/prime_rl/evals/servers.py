"""The servers of an evaluation. They all serve the same, and what they sampled counts once they have proven that they served it all the time."""

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import httpx
from loguru import logger

from prime_rl.config.shared import how_to_start, is_own_host
from prime_rl.errors import UserError
from prime_rl.evals.targets import Target
from prime_rl.fleet.client import InferenceClient, Served, ServerError
from prime_rl.fleet.logprob_check import LogprobCheck
from prime_rl.fleet.replicas import Replica, ReplicaPool
from prime_rl.fleet.router import NO_VERSION, connect_all
from prime_rl.monitor import Status

if TYPE_CHECKING:
    from prime_rl.config import EvalConfig
    from prime_rl.config.shared import ClientConfig

RESTORE_SECONDS = 120.0
_PROBE_SECONDS = 10.0
_LOADS = 3  # tries at one version
_PAUSE_SECONDS = 2.0  # before the second; twice as long before the third

OnWait = Callable[[str, str, float], None]


async def way_of_asking(config: "EvalConfig", on_wait: OnWait) -> Literal["tokens", "chat"]:
    """`client.type`, or what the server tells: one that says what it serves is one of ours. Of an API the key is tried, where it lists its models.

    Raises:
        UserError: nobody answers there, or the key is refused.
    """
    client = config.client
    if client.type == "tokens" or len(client.base_urls) != 1 or client.admin_roots:
        return "tokens"
    root, key = client.api_roots[0], os.environ.get(client.api_key_var, "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    proxies = not is_own_host(urlsplit(root).hostname or "")
    async with httpx.AsyncClient(timeout=_PROBE_SECONDS, headers=headers, trust_env=proxies) as http:
        if client.type == "auto":
            answer = await _first_answer(http, f"{root}/weights", client, on_wait)
            if answer.is_success and {"version", "hash"} <= _keys(answer):
                return "tokens"
        models = await _first_answer(http, f"{client.base_urls[0].rstrip('/')}/models", client, on_wait)
    if models.status_code in (401, 403):
        raise UserError(f"{refused_key(client)}: HTTP {models.status_code} {models.text[:200]}")
    if config.weights_dir is not None:
        raise UserError(f"weights_dir: {root} has no weight routes: is this server started with `inference`?")
    return "chat"


def refused_key(client: "ClientConfig") -> str:
    """Says that the key is not accepted, or that there is none."""
    key = f"the key in ${client.api_key_var}" if os.environ.get(client.api_key_var) else f"a request without a key (${client.api_key_var} is not set; client.api_key_var names it)"  # fmt: skip
    return f"{client.servers} refused {key}"


async def _first_answer(http: httpx.AsyncClient, url: str, client: "ClientConfig", on_wait: OnWait) -> httpx.Response:
    """The first answer that is no server's trouble."""
    answers: list[httpx.Response] = []
    trouble = "it does not answer"

    async def look() -> None:
        nonlocal trouble
        try:
            response = await http.get(url)
        except httpx.TransportError as error:
            trouble = str(error) or type(error).__name__
            return
        if response.status_code in (500, 502, 503, 504):
            trouble = f"HTTP {response.status_code}"
        else:
            answers.append(response)

    await look()
    root = client.api_roots[0]
    if not answers:
        logger.info(
            "waiting for an inference server at {} (at most {:.0f} s); {}",
            root,
            client.ready_timeout,
            how_to_start(root),
        )
    begin = asyncio.get_running_loop().time()
    while not answers:  # bounded: by client.ready_timeout
        if asyncio.get_running_loop().time() - begin > client.ready_timeout:
            raise UserError(
                f"no inference server at {root} after {client.ready_timeout:.0f} s ({client.source}, client.ready_timeout): "
                f"{trouble}; {how_to_start(root)}"
            )
        on_wait("an answer", client.servers, client.ready_timeout)
        await asyncio.sleep(0.25)
        await look()
    return answers[0]


def _keys(answer: httpx.Response) -> set[str]:
    try:
        body = answer.json()
    except ValueError:
        return set()
    return set(body) if isinstance(body, dict) else set()


class Servers:
    """All servers of one evaluation, serving one target at a time."""

    def __init__(self, fleet: ReplicaPool, on_wait: OnWait) -> None:
        self.fleet = fleet
        self._on_wait = on_wait
        self._target: Target | None = None

    @property
    def used(self) -> list[Replica]:
        """Those that were let in."""
        return [replica for replica in self.fleet.replicas if replica.given is not None]

    def as_served(self) -> Target:
        """What they serve now, to be evaluated as it is."""
        (given, *_) = [replica.given for replica in self.used]
        assert given is not None
        self._target = Target(f"step_{given.version}", given.version, given.hash)
        return self._target

    async def serve(self, target: Target) -> Target:
        """Have all of them load and prove it. Returns it with its hash.

        Raises:
            UserError: one of them refused, or failed again and again.
        """
        self._target = target
        await asyncio.gather(*(self._load(replica, target) for replica in self.used))
        served = {(one.version, one.hash) for replica in self.used if (one := replica.given) is not None}
        if len(served) != 1:
            raise UserError(f"the servers say of {target.name} that they serve different weights: {sorted(served)}")
        ((version, found),) = served
        self._target = Target(target.name, version, found, target.weights, target.base)
        return self._target

    async def verify(self) -> bool:
        """Whether what ended before this call counts. A server that is gone is waited for, and given the weights again.

        Raises:
            UserError: one did not come back, or came back with other weights and none to be given.
        """
        used = self.used
        proofs = await asyncio.gather(*(replica.verify() for replica in used))
        lost = [replica for replica, proof in zip(used, proofs, strict=True) if not (proof and replica.serving)]
        for replica in lost:
            self.fleet.lose(replica)
        voids = [await self._bring_back(replica) for replica in lost]
        return not any(voids)

    async def restore(self) -> None:
        """Have all of them serve their base again. What fails is said."""
        await asyncio.gather(*(self._restore(replica) for replica in self.used))

    async def _restore(self, replica: Replica) -> None:
        try:
            async with asyncio.timeout(RESTORE_SECONDS):
                replica.given = await replica.engine.reload()
        except TimeoutError:
            logger.warning("{} does not serve its base again: no answer in {:.0f} s", replica.name, RESTORE_SECONDS)
        except UserError as error:
            logger.warning("{} does not serve its base again: {}", replica.name, error)
        except asyncio.CancelledError:
            logger.warning("{} may not serve its base again: interrupted", replica.name)
            raise

    async def _bring_back(self, replica: Replica) -> bool:
        """Returns whether what it sampled since its last proof is void."""
        assert self._target is not None
        for left in reversed(range(_LOADS)):
            await replica.engine.wait_ready(self._on_wait)
            try:
                served = await replica.engine.served()
                break
            except ServerError:
                if not left:
                    raise
        if served == replica.given:
            self.fleet.admit(replica)
            return False
        logger.warning("{} was started again, or given other weights: what it sampled meanwhile is made again", replica.name)  # fmt: skip
        if self._target.weights is not None or self._target.base:
            await self._load(replica, self._target)
        elif (served.version, served.hash) == (self._target.version, self._target.hash):
            replica.given = served
        else:
            raise UserError(
                f"{replica.name} was started again or given other weights: it serves version {served.version} ({served.hash[:12]}), "
                f"not {self._target.version} ({self._target.hash[:12]}); what is finished is kept"
            )
        self.fleet.admit(replica)
        return True

    async def _load(self, replica: Replica, target: Target) -> None:
        for number in range(1, _LOADS + 1):
            try:
                if target.weights is not None:
                    await replica.load(target.weights)
                else:
                    replica.given = await replica.engine.reload()
                return
            except ServerError as error:
                if number == _LOADS:
                    raise
                logger.warning("{} did not load {}, tried again: {}", replica.name, target.name, error)
                await asyncio.sleep(_PAUSE_SECONDS * number)


async def connect(config: "EvalConfig", stack: AsyncExitStack, status: Status) -> Servers:
    """Wait for the servers and let in those that are there.

    Raises:
        UserError: none came up in time, or they do not serve the same, or another model.
    """
    logprob_check = LogprobCheck(any_base=True) if config.logprob_check and config.weights_dir is not None else None
    fleet = ReplicaPool(connect_all(config.client, partial(_connect, stack, config.client, logprob_check)))
    ready = await fleet.wait_ready(status.waiting, config.client.ready_timeout)
    await admit(fleet, ready, config.model.name, same=config.weights_dir is None)
    return Servers(fleet, status.waiting)


def _connect(
    stack: AsyncExitStack, client: "ClientConfig", logprob_check: LogprobCheck | None, root: str
) -> InferenceClient:
    engine = InferenceClient(client, root, logprob_check)
    stack.push_async_exit(engine)
    return engine


async def admit(fleet: ReplicaPool, ready: Sequence[Replica], model: str, same: bool = True) -> int:
    """Let in all servers that are there. Returns the version that they serve.

    Args:
        same: Whether they have to serve the same already: they need not where they are given other weights anyway.

    Raises:
        UserError: they do not serve the same, or another model.
    """
    served: dict[Replica, Served] = {replica: await replica.engine.served() for replica in ready}
    for replica, one in served.items():
        one.check_name(replica.name, model)
    served = {replica: one for replica, one in served.items() if not one.leaving} or served  # if there is another
    if same and (mixed := next((replica.name for replica, one in served.items() if one.version == NO_VERSION), None)):
        raise UserError(f"the servers behind {mixed} do not serve the same weights")
    if same and len({(one.version, one.hash) for one in served.values()}) > 1:
        listed = ", ".join(f"{replica.name} version {one.version} ({one.hash[:12]})" for replica, one in served.items())
        raise UserError(f"the servers do not serve the same weights: {listed}")
    for replica in fleet.replicas:
        if replica in served:
            replica.given = served[replica]
            fleet.admit(replica)
        else:
            what = "is to leave" if replica in ready else "does not answer"
            logger.warning("{} {}: evaluating without it", replica.name, what)
    return next(iter(served.values())).version
