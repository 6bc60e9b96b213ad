"""Who is of the fleet: servers join it and leave it while a run goes on.

Servers come from a list, or from a directory that they register in (`transport/members.py`). One that asks to leave is drained: it gets nothing
new, what is in flight there ends there, it proves that, and is let go. One whose registration has come to a stop, and that does not answer, is
let go without: what it had is made again.
"""

import asyncio
import math
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from loguru import logger

from prime_rl.config.shared import is_own_host
from prime_rl.errors import UserError
from prime_rl.fleet.replicas import Replica, ReplicaPool, ServerClient
from prime_rl.transport.members import BEAT_SECONDS, Member, read_members
from prime_rl.wait import WaitTimeout, within

if TYPE_CHECKING:
    from prime_rl.config.shared import ClientConfig
    from prime_rl.fleet.recovery import Recovery

LOOK_SECONDS = 2.0
STALE_SECONDS = 6 * BEAT_SECONDS  # without a beat: nothing to begin with
GONE_SECONDS = 60.0  # without a beat or an answer: not to be hoped for
_READ_SECONDS = 30.0  # for a network file system
_ASK_SECONDS = 5.0  # between two questions whether a server is to leave, and whether one that drains is there
_SILENT_TIMES = 3
_POLL_SECONDS = 0.25


class Roster:
    """What a reader makes of the directory. Times are seconds of the reader's own clock: a server lives while the reader sees its beat change.

    A directory that cannot be read for a while changes nothing but that.
    """

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._changed: dict[str, float] = {}  # when the reader saw each address's beat change last

    def look(self, found: Iterable[Member], now: float) -> None:
        """What the directory holds now."""
        for member in found:
            before = self._members.get(member.address)
            if before is None or (before.boot, before.beat) != (member.boot, member.beat):
                self._changed[member.address] = now
            self._members[member.address] = member

    def silence(self, address: str, now: float) -> float:
        """Seconds since its beat changed; endless where it never was seen."""
        return now - self._changed.get(address, -math.inf)

    def judge(self, now: float, fleet: Collection[str], left: Mapping[str, str]) -> "Verdict":
        """What is to be done.

        Args:
            fleet: Addresses of the fleet.
            left: Addresses that have left, and which incarnation of each it was: a later one is welcome.
        """
        members = self._members.values()
        joining = [
            member
            for member in members
            if member.address not in fleet
            and not member.leaving
            and left.get(member.address) != member.boot
            and self.silence(member.address, now) <= STALE_SECONDS
        ]
        leaving = {member.address: member.boot for member in members if member.leaving and member.address in fleet}
        silent = {address for address in fleet if self.silence(address, now) > GONE_SECONDS}
        return Verdict(joining, leaving, silent)


@dataclass(frozen=True)
class Verdict:
    """`joining`: registered and not of the fleet. `leaving`: incarnations that ask to, by address. `silent`: gone for good unless they answer."""

    joining: list[Member]
    leaving: Mapping[str, str]
    silent: Collection[str]


class Registry:
    """The directory as this process sees it: who may be asked for work, and one line about each trouble, once."""

    def __init__(self, directory: Path, model: str) -> None:
        self.roster = Roster()
        self._directory = directory
        self._model = model
        self._said: set[tuple[str, str]] = set()
        self.trouble = ""  # the last one, for whoever waits

    async def look(self) -> None:
        """Read the directory. Whatever cannot be read is said, and may be readable the next time."""
        try:
            members, troubles = await within(
                asyncio.to_thread(read_members, self._directory),
                subject=f"list of {self._directory}", owner="the file system", seconds=_READ_SECONDS,
            )  # fmt: skip
        except WaitTimeout as error:
            members, troubles = [], {"": str(error)}
        for name, trouble in troubles.items():
            self._say(f"{self._directory / name}", trouble)
        self.roster.look([member for member in members if self._is_ours(member)], time.monotonic())

    def _is_ours(self, member: Member) -> bool:
        if member.model != self._model:
            self._say(member.address, f"is passed over: it serves {member.model}, not {self._model}")
            return False
        if is_own_host(urlsplit(member.address).hostname or "") and member.host != socket.gethostname():
            self._say(
                member.address,
                f"is passed over: only {member.host} itself reaches it there (see server.host and server.advertise)",
            )
            return False
        return True

    def _say(self, subject: str, trouble: str) -> None:
        self.trouble = f"{subject} {trouble}"
        if (subject, trouble) not in self._said:
            self._said.add((subject, trouble))
            logger.warning("{}", self.trouble)


async def first_members(
    config: "ClientConfig", model: str, on_wait: Callable[[str, str, float], None]
) -> tuple[Registry, list[Member]]:
    """Wait until servers have registered in `client.discover`, at most `client.ready_timeout`.

    Raises:
        UserError: none has.
    """
    assert config.discover is not None
    registry, seconds = Registry(config.discover, model), config.ready_timeout
    subject, began, said = f"server registered in {config.discover}", time.monotonic(), False
    while True:  # bounded: by the deadline below
        await registry.look()
        if found := registry.roster.judge(time.monotonic(), (), {}).joining:
            return registry, found
        if not said:
            logger.info(
                "waiting for an inference server to register in {} (at most {:.0f} s)", config.discover, seconds
            )
            said = True
        if time.monotonic() - began >= seconds:
            raise UserError(
                f"no inference server has registered in {config.discover} after {seconds:.0f} s (client.discover, "
                f"client.ready_timeout): start one with --server.register-dir {config.discover}"
                + (f"; {registry.trouble}" if registry.trouble else "")
            )
        on_wait(subject, "inference", seconds)
        await asyncio.sleep(_POLL_SECONDS)


class Members:
    """Keeps the fleet up to date. `begin` comes before everything else, `close` before `Recovery.close`.

    Args:
        connect: Makes a client of a server that has registered.
        on_end: Told of tasks that ended: their exception is the run's.
    """

    def __init__(
        self,
        config: "ClientConfig",
        model: str,
        fleet: ReplicaPool,
        recovery: "Recovery",
        connect: Callable[[str], ServerClient],
        on_end: Callable[["asyncio.Task[None]"], None],
    ) -> None:
        self._config, self._model = config, model
        self._fleet, self._recovery = fleet, recovery
        self._connect, self._on_end = connect, on_end
        self._registry: Registry | None = None
        self._left: dict[str, str] = {}  # the incarnation of each server that has left
        self._clients: dict[str, ServerClient] = {replica.name: replica.engine for replica in fleet.replicas}
        self._drains: dict[Replica, asyncio.Task[None]] = {}
        self._following: asyncio.Task[None] | None = None
        self._asked = -math.inf

    async def begin(self, on_wait: Callable[[str, str, float], None]) -> None:
        """Wait for the first server, and follow from then on.

        Raises:
            UserError: none registered in time.
        """
        if self._config.discover is not None:
            self._registry, found = await first_members(self._config, self._model, on_wait)
            for member in found:
                self._join(member.address)
        self._following = asyncio.create_task(self._follow())
        self._following.add_done_callback(self._on_end)

    async def close(self) -> None:
        """Nobody joins or leaves any more. Safe to call twice."""
        tasks = [task for task in (self._following, *self._drains.values()) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_READ_SECONDS)

    async def _follow(self) -> None:
        while True:  # bounded: the run cancels it at its end
            await asyncio.sleep(LOOK_SECONDS)
            if self._registry is not None:
                await self._registry.look()
                await self._follow_registry(self._registry)
            elif self._recovery.begun and time.monotonic() - self._asked >= _ASK_SECONDS:
                self._asked = time.monotonic()
                await self._ask_listed()
            if self._recovery.begun:
                self._recovery.check_hope_of_joining()

    async def _follow_registry(self, registry: Registry) -> None:
        now = time.monotonic()
        verdict = registry.roster.judge(now, {replica.name for replica in self._fleet.replicas}, self._left)
        for member in verdict.joining:
            self._join(member.address)
        if not self._recovery.begun:
            return
        for replica in list(self._fleet.replicas):
            if (boot := verdict.leaving.get(replica.name)) is not None:
                await self._leave(replica, boot)
        silent = [each for each in self._fleet.away if each.name in verdict.silent]
        answers = await asyncio.gather(*(replica.engine.answers() for replica in silent))
        for replica, answer in zip(silent, answers, strict=True):
            if not answer and replica in self._fleet.away:
                await self._give_up(replica)

    async def _ask_listed(self) -> None:
        """Servers of a list say so themselves that they are to leave, and when they are back."""
        here = {replica.name: replica for replica in self._fleet.replicas}
        for address, boot in await _wishes({name: replica.engine for name, replica in here.items() if replica.serving}):
            await self._leave(here[address], boot)
        back = await asyncio.gather(*(self._is_back(address) for address in self._left if address not in here))
        for address in filter(None, back):
            self._join(address)

    async def _is_back(self, address: str) -> str | None:
        try:
            served = await self._clients[address].served()
        except UserError:
            return None
        return address if served.boot != self._left[address] and not served.leaving else None

    def _join(self, address: str) -> None:
        engine = self._clients.get(address) or self._connect(address)
        self._clients[address] = engine
        self._recovery.join(self._fleet.add(engine))
        logger.info("{} joins", address)

    async def _leave(self, replica: Replica, boot: str) -> None:
        """It asked to. One that serves is drained, between two updates: what it has in flight is of the version that it goes on to serve."""
        if replica in self._drains:
            return
        if self._recovery.drain(replica):
            self._left[replica.name] = boot
            logger.info(
                "{} is to leave: it gets nothing new, {} episodes in flight there go on",
                replica.name,
                replica.in_flight,
            )
            self._drains[replica] = task = asyncio.create_task(self._drain(replica))
            task.add_done_callback(self._on_end)
        elif replica in self._fleet.away:
            self._left[replica.name] = boot
            again = await self._recovery.release(replica, ask=await replica.engine.answers())
            self._say_left(replica, again)

    async def _drain(self, replica: Replica) -> None:
        """Until nothing is in flight there, or nobody there any more."""
        silent, asked = 0, time.monotonic()
        while replica.draining and replica.in_flight and silent < _SILENT_TIMES:  # bounded: by the episodes' deadlines
            await asyncio.sleep(_POLL_SECONDS)
            if time.monotonic() - asked >= _ASK_SECONDS:
                silent, asked = 0 if await replica.engine.answers() else silent + 1, time.monotonic()
        again = await self._recovery.release(replica, ask=silent < _SILENT_TIMES)
        del self._drains[replica]
        self._say_left(replica, again)

    async def _give_up(self, replica: Replica) -> None:
        again = await self._recovery.release(replica, ask=False)
        logger.warning(
            "{} is gone for good: no answer, and no sign of it in {} for {:.0f} s; {} episodes are made again ({} servers left to serve)",
            replica.name, self._config.discover, GONE_SECONDS, again, len(self._fleet.serving),
        )  # fmt: skip

    def _say_left(self, replica: Replica, again: int) -> None:
        what = f"{again} episodes that it had are made again" if again else "nothing of it is made again"
        count = len(self._fleet.serving)
        logger.info("{} has left, and may be stopped: {} ({} servers left to serve)", replica.name, what, count)


async def _wishes(engines: Mapping[str, ServerClient]) -> list[tuple[str, str]]:
    """Which of them are to leave, and which incarnation of each."""
    answers = await asyncio.gather(*(engine.served() for engine in engines.values()), return_exceptions=True)
    wishes = []
    for address, answer in zip(engines, answers, strict=True):
        if isinstance(answer, UserError):
            continue  # who proves it or watches over it will find out
        if isinstance(answer, BaseException):
            raise answer
        if answer.leaving:
            wishes.append((address, answer.boot))
    return wishes
