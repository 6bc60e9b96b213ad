"""What is being served, and how it changes: the state behind the weight routes. Knows neither HTTP nor vLLM.

One change at a time, under a lock with a deadline. A change runs as a task of its own, so that a client that hangs up leaves
neither a paused engine nor half-loaded weights behind.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from loguru import logger

from prime_rl import faults
from prime_rl.inference.places import PATH_BYTES, Places, Refused, check_fit, read_stamp
from prime_rl.inference.reads import STALL_SECONDS, read
from prime_rl.monitor import Status
from prime_rl.transport.commit import CommitError
from prime_rl.transport.weights import (
    TensorEntry,
    WeightsManifest,
    hash_directory,
    version_hash,
    weights_manifest,
)

LOCK_SECONDS = 60.0  # to wait for another change
LOAD_SECONDS = 900.0  # for a call that loads weights
PAUSE_SECONDS = 120.0  # for the engine to stop at the end of a step, or to go on
DRAIN_SECONDS = 3600.0  # for a client's pause that lets the requests in flight finish
UNSENT = 424  # HTTP's "failed dependency": the trainer's sender did not give what was asked for
ANSWER_SECONDS = 10.0  # for a call that only asks
_PLACES = ("device", "host", "nowhere")  # where workers keep what they read, the best first
STAGED_POLL_SECONDS = (
    0.02  # between two looks at what the workers read, at most: each takes the engine a millisecond or so
)
_POLL_SHARE = 0.05  # of the time that they have read so far: what takes longer may be heard of later

PauseMode = Literal["abort", "wait", "keep"]
T = TypeVar("T")


class EngineClient(Protocol):
    """The part of vLLM's client that is used here."""

    async def pause_generation(self, *, mode: PauseMode, clear_cache: bool) -> None: ...

    async def resume_generation(self) -> None: ...

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> list[Any]: ...


@dataclass(frozen=True)
class Served:
    """The policy version in the engine. `hash` is the manifest's; `weight_dir` is None for the weights it started with.

    `boot` names this life of the server: one that was started again between two questions, and was given the same version again, served its
    base in between.
    """

    version: int
    hash: str
    base: str
    weight_dir: str | None
    boot: str


@dataclass
class Parts:
    """What a change took.

    Attributes:
        seconds: Of `check` (what the server itself reads), `stage` (reading and hashing beside generation), `pause` (from telling the engine to
            stop until it goes on), and within the pause `stop` and `load`.
        place: Where the workers kept what they read: device, host, nowhere; of several the worst.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    place: str = "nowhere"

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Count what happens in the block as `part`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - began

    def __str__(self) -> str:
        return ", ".join(f"{part} {seconds:.3f} s" for part, seconds in self.seconds.items())


class WeightService:
    """Updates the engine's weights and says what they are.

    Args:
        engine: vLLM's engine client.
        base: The directory of the base model.
        places: Where updates may come from.
        label: Called with the version after a change, before generation goes on.
        tied: Whether the model's output head shares the embedding: a checkpoint may then hold it or not.
        status: Told of a change under way, which keeps the engine from answering, and of its deadline.
        stage: Whether the workers may keep new weights in memory before the engine pauses.
        on_device: Whether that may be the device's.
        servers_on_host: How many servers do so on this host, at the same time; of one with several engines each of these counts.
        engines: Data-parallel engines behind this server. `engine` answers for all of them.
        fixed: Why this server keeps the weights that it started with; None for one that can be given others.
    """

    def __init__(
        self,
        engine: EngineClient,
        base: Path,
        places: Places,
        label: Callable[[int], Awaitable[None]],
        tied: bool = False,
        status: Status | None = None,
        stage: bool = True,
        on_device: bool = True,
        servers_on_host: int = 1,
        engines: int = 1,
        fixed: str | None = None,
    ) -> None:
        self._engine, self.engines, self._fixed = engine, engines, fixed
        self._base = base
        self._places = places
        self._label = label
        self._tied = tied
        self._status = status
        self._stage_weights, self._stage_on_device, self._servers_on_host = stage, on_device, servers_on_host
        self._staged = False  # the workers may hold something
        self._said_no_room = False
        self._lock = asyncio.Lock()  # bounded: `_turn` takes it, with a deadline
        self._tasks: set[asyncio.Task[Any]] = set()
        self._boot = secrets.token_hex(8)
        self._paused_by_client = False
        self._broken: str | None = None
        self._standing: str | None = None  # why the engine, which is to go on, may not do so
        # Hashed beside the start of the server, not before it.
        self._base_tensors = asyncio.create_task(self._hash_base())

    @property
    def boot(self) -> str:
        """Names this life of the server."""
        return self._boot

    async def served(self) -> Served:
        """Ask every worker what it serves.

        Raises:
            Refused: the engine does not answer or go on, its ranks disagree, or a failed update left it unusable (5xx).
        """
        self._check_usable()
        if self._standing is not None:
            raise Refused(503, self._standing)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answers = await self._engine.collective_rpc("prime_served")
        except TimeoutError as error:
            raise Refused(503, f"the engine did not say what it serves within {ANSWER_SECONDS:.0f} s") from error
        if any(answer != answers[0] for answer in answers):
            raise Refused(500, f"the workers serve different weights: {answers}")
        if answers[0] is None:
            return Served(0, version_hash(await self._base_hashes()), str(self._base), None, self._boot)
        return Served(base=str(self._base), boot=self._boot, **answers[0])

    async def update(self, weight_dir: str, version: int, parts: Parts | None = None) -> Served:
        """Serve the committed directory `weight_dir`, which must hold `version`. Requests in flight go on with it.

        Args:
            parts: Where what it took is put down.

        Raises:
            Refused: 4xx and the old weights go on; 500 if they could not be restored.
        """
        self._check_not_fixed()
        taken = Parts() if parts is None else parts
        return await self._alone(lambda: self._update(weight_dir, version, taken))

    async def reload(self, parts: Parts | None = None) -> Served:
        """Serve the base weights again.

        Raises:
            Refused: as for `update`.
        """
        self._check_not_fixed()
        taken = Parts() if parts is None else parts
        return await self._alone(lambda: self._reload(taken))

    def _check_not_fixed(self) -> None:
        if self._fixed is not None:
            raise Refused(400, f"this server's weights cannot be changed: {self._fixed}")

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """Stop generating; requests wait. Weight updates are still possible and do not end the pause."""
        await self._alone(lambda: self._pause(mode, clear_cache))

    async def resume(self) -> None:
        """Go on generating.

        Raises:
            Refused: the weights are unusable (500): the first forward pass would kill the engine.
        """
        await self._alone(self._resume)

    def stop(self) -> None:
        """End all changes under way: the engine ends, too, and whoever waits for them is answered."""
        for task in self._tasks:
            task.cancel()

    async def _update(self, weight_dir: str, version: int, parts: Parts) -> Served:
        if faults.point(f"update-received:v{version}") == "error":
            raise Refused(500, "fault injection")
        with parts.measure("check"):
            directory = await read(lambda _: self._places.confine(weight_dir), weight_dir[:PATH_BYTES])
            manifest, stamp = await self._check(directory, version)
        if manifest.base is not None:
            return await self._update_to_base(manifest.hash, directory, parts)
        target = Served(version, manifest.hash, str(self._base), str(directory), self._boot)
        try:
            await self._stage(directory, manifest.hash, parts, LOAD_SECONDS if manifest.sender else STALL_SECONDS)
            return await self._swap(directory, target, parts, stamp)
        except Refused as refusal:
            if refusal.status == 400 and await _changed(directory, stamp):
                raise Refused(503, f"{refusal.message} (its place was changed meanwhile)") from refusal
            raise
        finally:
            await self._unstage()

    async def _check(self, directory: Path, version: int) -> tuple[WeightsManifest, bytes]:
        """What can be known without the tensors' bytes. Returns also the manifest as it lies there.

        Raises:
            Refused: the directory is not `version`, or not of this model.
        """
        try:
            manifest, stamp = await read(lambda _: self._places.look(directory, version), directory)
        except (CommitError, OSError, TypeError, ValueError) as error:  # the manifest may say anything
            raise Refused(400, str(error)) from error
        if manifest.base is not None:
            return manifest, stamp
        check_fit(manifest.tensors, await self._base_hashes(), self._tied)
        return manifest, stamp

    async def _update_to_base(self, wanted: str, directory: Path, parts: Parts) -> Served:
        """Version 0 has no tensors of its own; its path is not followed, its hash must be that of our base model."""
        if wanted != version_hash(await self._base_hashes()):
            raise Refused(400, f"{directory} describes another base model than {self._base}")
        return await self._reload(parts, str(directory))

    async def _reload(self, parts: Parts, weight_dir: str | None = None) -> Served:
        expected = await self._base_hashes()
        try:
            found = await self._hash_base()
        except (CommitError, OSError) as error:
            raise Refused(400, str(error)) from error
        if found != expected:
            raise Refused(400, f"the base model {self._base} was changed on disk since the server started")
        target = Served(0, version_hash(expected), str(self._base), weight_dir, self._boot)
        return await self._swap(self._base, target, parts)

    async def _stage(self, directory: Path, digest: str, parts: Parts, silence: float) -> None:
        """Have every worker read and hash the version while generation goes on. `silence`: seconds without progress; a sender has deadlines of its own.

        Raises:
            Refused: it is not what its manifest says (400), is not read in time (503), or its sender does not give it (424).
        """
        with parts.measure("stage"):
            self._staged = True
            began = time.perf_counter()
            try:
                async with asyncio.timeout(LOAD_SECONDS):
                    options = (self._stage_weights, self._servers_on_host, self._stage_on_device)
                    answers = await self._engine.collective_rpc("prime_stage", args=(str(directory), digest, *options))
                    progress, since = answers, began
                    while _reading(answers):
                        poll = min(_POLL_SHARE * (time.perf_counter() - began), STAGED_POLL_SECONDS)
                        await asyncio.sleep(poll)  # bounded: by the time-out around it
                        answers = await self._engine.collective_rpc("prime_staged")
                        if answers != progress:
                            progress, since = answers, time.perf_counter()
                        elif time.perf_counter() - since > silence:
                            raise TimeoutError
            except TimeoutError as error:
                raise Refused(
                    503, f"{directory} could not be read: no progress, or not done within {LOAD_SECONDS:.0f} s"
                ) from error
            except Exception as error:  # whatever vLLM raises for an engine that fails
                raise Refused(503, f"the engine did not read {directory}: {error!r}") from error
        if failed := [answer for answer in answers if answer["state"] == "failed"]:
            worst = min(failed, key=lambda answer: answer["unsent"])  # what another attempt will not mend
            status, how = (UNSENT, "received") if worst["unsent"] else (400, "read")
            raise Refused(status, f"{directory} could not be {how}, the previous weights go on: {worst['why']}")
        parts.place = max((answer["place"] for answer in answers), key=_PLACES.index)
        if self._stage_weights and parts.place == "nowhere" and not self._said_no_room:
            self._said_no_room = True
            logger.warning("no memory to keep a second copy of the weights: they are read while generation is paused")

    async def _unstage(self) -> None:
        """The workers give back what they hold."""
        if self._staged:
            self._staged = False
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    await self._engine.collective_rpc("prime_unstage")
            except Exception as error:  # noqa: BLE001 - whatever vLLM raises: what the change itself came to is what counts
                logger.warning("the engine did not give back the memory of what it read ahead: {!r}", error)

    async def _swap(self, directory: Path, target: Served, parts: Parts, stamp: bytes | None = None) -> Served:
        """Pause, load on every rank, commit or restore, resume. With a `stamp`, only while the directory's manifest is the same."""
        try:
            self._tell_of(f"version {target.version}")
            with parts.measure("pause"):
                await self._exchange(directory, target, parts, stamp)
        finally:
            if self._status is not None:
                self._status.phase("serving")
        logger.info("serving version {} ({}): {}", target.version, target.hash[:12], parts)
        if faults.point(f"update-loaded:v{target.version}") == "error":
            raise Refused(500, "fault injection")
        return target

    def _tell_of(self, change: str) -> None:
        if self._status is not None:
            self._status.waiting(f"{change} in the engine", "engine", PAUSE_SECONDS + LOAD_SECONDS)

    async def _exchange(self, directory: Path, target: Served, parts: Parts, stamp: bytes | None) -> None:
        identity = {key: value for key, value in asdict(target).items() if key not in ("base", "boot")}
        # The cache is cleared: requests in flight rebuild their context under the new weights.
        with parts.measure("stop"):
            await self._stop("keep", clear_cache=True, seconds=PAUSE_SECONDS)
        try:
            with parts.measure("load"):
                await self._load(directory, identity, stamp)
        except Exception as error:
            await self._restore(error)
            await self._go_on()
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            raise Refused(400, f"{directory} could not be loaded, the previous weights go on: {reason}") from error
        self._broken = None
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._label(target.version)
        except TimeoutError:
            logger.warning("the engine did not take the label of version {}", target.version)
        finally:
            await self._go_on()

    async def _load(self, directory: Path, identity: dict[str, Any], stamp: bytes | None) -> None:
        async with asyncio.timeout(LOAD_SECONDS):
            await self._engine.collective_rpc("prime_load", args=(str(directory), identity, str(self._base)))
            # A new life of the trainer may have set the directory aside, or made it again, since its tensors were hashed.
            committed_anew = stamp is not None and await read(lambda _: read_stamp(directory), directory) != stamp
            if (
                committed_anew
                and (await read(lambda _: weights_manifest(directory), directory)).hash != identity["hash"]
            ):
                raise CommitError(f"{directory} was committed anew while it was loaded")
            await self._engine.collective_rpc("prime_commit")
            self._staged = False  # given back with it: a call of its own would wait for the first step, the longest

    async def _restore(self, cause: Exception) -> None:
        """Undo a failed load on every rank; on failure generation stays paused, since a forward pass would kill the engine."""
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                await self._engine.collective_rpc("prime_restore")
        except Exception as error:
            self._broken = f"weights unusable: the update failed ({cause}), and so did going back ({error!r})"
            logger.error("{}", self._broken)
            raise Refused(500, self._broken) from error
        self._broken = None  # a load before this one may have left it so

    async def _pause(self, mode: PauseMode, clear_cache: bool) -> None:
        self._check_usable()  # one that lets requests end would have them go on
        await self._stop(mode, clear_cache, DRAIN_SECONDS if mode == "wait" else PAUSE_SECONDS)
        self._paused_by_client = True

    async def _resume(self) -> None:
        self._check_usable()
        self._paused_by_client = False
        await self._go_on()

    async def _stop(self, mode: PauseMode, clear_cache: bool, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._engine.pause_generation(mode=mode, clear_cache=clear_cache)
        except TimeoutError as error:
            await self._go_on()  # it may still stop later; let nothing wait for that
            raise Refused(503, f"the engine did not pause within {seconds:.0f} s") from error
        except Exception as error:  # whatever vLLM raises
            await self._go_on()  # for one, it cannot clear a cache that another server is filling
            raise Refused(503, f"the engine did not pause: {error!r}") from error

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise Refused(500, self._broken)

    async def _go_on(self) -> None:
        """Unless a client has paused it, or its weights are unusable. One that does not go on is not said to serve, until it does."""
        if self._paused_by_client or self._broken is not None:
            return
        try:
            async with asyncio.timeout(PAUSE_SECONDS):
                await self._engine.resume_generation()
        except TimeoutError as error:
            self._standing = f"the engine did not resume within {PAUSE_SECONDS:.0f} s"
            raise Refused(503, self._standing) from error
        except Exception as error:  # whatever vLLM raises: several engines do not resume while one is still pausing
            self._standing = f"the engine did not resume: {error!r}"
            raise Refused(503, self._standing) from error
        self._standing = None

    async def _hash_base(self) -> dict[str, TensorEntry]:
        return await read(partial(hash_directory, self._base), self._base)

    async def _base_hashes(self) -> dict[str, TensorEntry]:
        if self._base_tensors.done() and self._base_tensors.exception() is not None:
            self._base_tensors = asyncio.create_task(self._hash_base())  # the file system may be back
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                return await asyncio.shield(self._base_tensors)
        except TimeoutError as error:
            raise Refused(503, f"the base model was not hashed within {LOAD_SECONDS:.0f} s") from error
        except (CommitError, OSError) as error:
            raise Refused(500, f"the base model cannot be hashed: {error}") from error

    async def _alone(self, action: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async def run() -> T:
            async with _turn(self._lock):
                return await action()

        task = asyncio.create_task(run())
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)  # bounded: every step of a change has a deadline
        except asyncio.CancelledError:
            if task.cancelled():
                raise Refused(503, "the server is stopping") from None
            raise


async def _changed(directory: Path, stamp: bytes) -> bool:
    """Whether the version stands there otherwise than it did: the trainer brings what lies in memory to the disk."""
    try:
        return await read(lambda _: read_stamp(directory), directory) != stamp
    except (CommitError, OSError):  # gone: whoever asked for it sees that, too
        return False


def _reading(answers: list[dict[str, Any]]) -> bool:
    """Whether a worker still reads; where one has failed nobody is waited for."""
    states = {answer["state"] for answer in answers}
    return "reading" in states and "failed" not in states


@asynccontextmanager
async def _turn(lock: asyncio.Lock) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(LOCK_SECONDS):
            await lock.acquire()
    except TimeoutError as error:
        raise Refused(409, f"another weight change is still running after {LOCK_SECONDS:.0f} s") from error
    try:
        yield
    finally:
        lock.release()
