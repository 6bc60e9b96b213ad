"""The servers of an evaluation. All serve one policy; samples count once the servers are verified to have served it."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from loguru import logger

from prime_rl.config.shared import is_own_host
from prime_rl.errors import UserError
from prime_rl.evals.versions import EvalPolicy, OnWait
from prime_rl.fleet.client import InferenceClient, ServerError
from prime_rl.fleet.logprob_check import LogprobCheck
from prime_rl.fleet.replicas import Replica, ReplicaPool, ReplicaState
from prime_rl.fleet.router import NO_VERSION, connect_all
from prime_rl.wait import within

if TYPE_CHECKING:
    from prime_rl.config import EvalConfig
    from prime_rl.config.shared import ClientConfig

RESTORE_SECONDS = 120.0
_LOADS = 3  # tries to load one version
_PAUSE_SECONDS = 2.0  # before the second; twice as long before the third


async def way_of_asking(config: "EvalConfig", on_wait: OnWait) -> Literal["tokens", "chat"]:
    """Return `client.type`; for "auto" what the server's answer tells: one of ours says what it serves.

    Raises:
        UserError: nobody answers there.
    """
    client = config.client
    if client.type != "auto" or len(client.base_urls) != 1 or client.admin_roots:
        return "chat" if client.type == "chat" else "tokens"
    root = client.api_roots[0]
    async with InferenceClient(client, proxies=not is_own_host(urlsplit(root).hostname or "")) as engine:
        await engine.wait_ready(on_wait, "/weights")
        try:
            await engine.served()
            return "tokens"
        except ServerError:
            raise
        except UserError as error:  # it has no such route, or one of another kind
            if config.weights_dir is not None:
                raise UserError(
                    f"weights_dir: {root} has no weight routes: is this server started with `inference`?"
                ) from error
            return "chat"


class EvalServers:
    """All servers of one evaluation, serving one policy at a time.

    Args:
        gives: Whether they are given weights: the base, or versions of a directory.
    """

    def __init__(self, fleet: ReplicaPool, on_wait: OnWait, gives: bool) -> None:
        self.fleet, self._on_wait, self._gives = fleet, on_wait, gives
        self._used = fleet.ready
        self._policy = EvalPolicy("", NO_VERSION)

    async def serve(self, policy: EvalPolicy | None) -> EvalPolicy:
        """Have all of them load and verify a policy; None: as they are. Returns what they serve, with its hash.

        Raises:
            UserError: one of them rejected it, or failed again and again.
        """
        if policy is not None:
            self._policy = policy
            await asyncio.gather(*(self._load(replica) for replica in self._used))
        served = {(one.version, one.hash) for replica in self._used if (one := replica.loaded) is not None}
        if len(served) != 1:
            raise UserError(f"the servers say that they serve different weights: {sorted(served)}")
        ((version, hash_),) = served
        name = f"step_{version}" if policy is None else policy.name
        self._policy = EvalPolicy(name, version, hash_, None if policy is None else policy.weights)
        return self._policy

    async def restore(self) -> None:
        """Have all of them serve their base again. Failures are logged."""

        async def reload(replica: Replica) -> None:
            try:
                await within(replica.load(None), subject="base model", owner=replica.name, seconds=RESTORE_SECONDS)
            except UserError as error:
                logger.warning("{} does not serve its base again: {}", replica.name, error)

        await asyncio.gather(*map(reload, self._used))

    async def bring_back(self, replica: Replica) -> None:
        """Wait for a server that failed its verification, and give it the weights again.

        Raises:
            UserError: it did not come back, or came back with other weights and none to be given.
        """
        if not replica.ready:
            return  # it is being brought back
        self.fleet.move(replica, ReplicaState.QUARANTINED, "it failed its verification")
        await replica.client.wait_ready(self._on_wait)
        served, policy = await replica.client.served(), self._policy
        if served != replica.loaded:
            logger.warning("{} was restarted, or given other weights: what it sampled is made again", replica.name)
            if self._gives:
                await self._load(replica)
            elif (served.version, served.hash) == (policy.version, policy.hash):
                replica.loaded = served
            else:
                raise UserError(
                    f"{replica.name} was started again or given other weights: it serves version {served.version} "
                    f"({served.hash[:12]}), not {policy.version} ({policy.hash[:12]}); what is finished is kept"
                )
        self.fleet.move(replica, ReplicaState.READY)

    async def _load(self, replica: Replica) -> None:
        policy = self._policy
        for number in range(1, _LOADS + 1):
            try:
                await replica.load(policy.weights)
                return
            except ServerError as error:
                if number == _LOADS:
                    raise
                logger.warning("{} did not load {}, tried again: {}", replica.name, policy.name, error)
                await asyncio.sleep(_PAUSE_SECONDS * number)


async def connect(config: "EvalConfig", stack: AsyncExitStack, on_wait: OnWait) -> EvalServers:
    """Wait for the servers and let in those that are there. `stack` closes the connections.

    Raises:
        UserError: none came up in time, or they do not serve the same, or another model.
    """
    gives = config.weights_dir is not None
    logprob_check = LogprobCheck(any_base=True) if config.logprob_check and gives else None
    fleet = ReplicaPool(connect_all(config.client, partial(_connect, stack, config.client, logprob_check)))
    await admit(fleet, await fleet.wait_ready(on_wait), config.model.name, same=not gives)
    return EvalServers(fleet, on_wait, gives)


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
    served = {replica: await replica.client.served() for replica in ready}
    for replica, one in served.items():
        one.check_name(replica.name, model)
    served = {replica: one for replica, one in served.items() if not one.leaving} or served  # if there is another
    for replica, one in served.items() if same else ():
        if one.version == NO_VERSION:
            raise UserError(f"the servers behind {replica.name} do not serve the same weights")
    if same and len({(one.version, one.hash) for one in served.values()}) > 1:
        listed = ", ".join(f"{replica.name} version {one.version} ({one.hash[:12]})" for replica, one in served.items())
        raise UserError(f"the servers do not serve the same weights: {listed}")
    for replica in fleet.replicas:
        if replica in served:
            replica.loaded = served[replica]
            fleet.move(replica, ReplicaState.READY)
        else:
            what = "is to leave" if replica in ready else "does not answer"
            logger.warning("{} {}: evaluating without it", replica.name, what)
    return next(iter(served.values())).version
