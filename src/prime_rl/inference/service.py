"""The state behind the weight routes: which version is served, its updates, and the checks of a version that a request
names. Imports neither HTTP nor vLLM.

One change at a time, under a lock with a deadline. A change runs as a task of its own, so that a client that hangs up
leaves neither a paused engine nor half-loaded weights behind.
"""

import asyncio
import json
import os
import secrets
import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from loguru import logger

from prime_rl import faults
from prime_rl.inference.compat import ADAPTER, AllEngines
from prime_rl.monitor import Status
from prime_rl.transport.commit import MANIFEST, CommitError, read_manifest, verify
from prime_rl.transport.weights import (
    INDEX,
    TensorEntry,
    WeightsManifest,
    hash_directory,
    version_hash,
    weights_manifest,
)
from prime_rl.wait import in_thread

STALL_SECONDS = 45.0  # of a read, without progress; shorter than a weight change waits for another one
LOCK_SECONDS = 60.0  # to wait for another change
LOAD_SECONDS = 900.0  # for a call that loads weights
PAUSE_SECONDS = 120.0  # for the engine to stop at the end of a step, or to resume
ANSWER_SECONDS = 10.0  # for a call that only asks
POLL_SECONDS = 0.01  # between two calls that ask for the progress of staging
FIRST_STAGING_SECONDS = 0.05  # expected before the first version
INLINE_SECONDS = 0.03  # an adapter whose staging takes less is staged by its load, which waits at most twice as long
EXCHANGE_FAILED = 424  # HTTP's "failed dependency": the exchange with the trainer failed; a retry may succeed
MESSAGE_CHARACTERS = 8192  # it may quote what a request or a manifest says
_PREFERENCE = ("device", "host", "nowhere")  # where workers keep a staged version, the best first

T = TypeVar("T")


class Rejected(Exception):
    """A request that was not carried out; what was served before is still served. `status` is an HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MESSAGE_CHARACTERS else f"{message[:MESSAGE_CHARACTERS]}…"


class Adapters(NamedTuple):
    """The adapters that a server can hold."""

    max_rank: int
    modules: Collection[str]  # that they may be for, by the last parts of their names


@dataclass
class WeightUpdate:
    """A change of weights: what is served after it, and what it took."""

    served: dict[str, Any] = field(default_factory=dict)  # as `WeightService.served` returns it
    # Of `check` (of the manifest), `stage` (beside generation, with waits for the end of the engine's step), `pause`
    # (nothing is generated), and within it `stop` and `load` (with the staging of a version that is staged there).
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    place: str = "nowhere"  # where the workers kept the staged version: device, host, nowhere; of several the worst

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the time of the block to `phase`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - began


class ServedBase:
    """The base model in `directory`. Its tensors are hashed beside the start of the server, not before it.

    `tied`: the output head shares the embedding; a checkpoint may or may not hold it.
    """

    def __init__(self, directory: Path, tied: bool = False) -> None:
        self.directory, self.tied = directory, tied
        self._hashing = asyncio.create_task(self.read())

    async def read(self) -> dict[str, TensorEntry]:
        return await read(lambda: hash_directory(self.directory), self.directory, LOAD_SECONDS)

    async def hashes(self) -> dict[str, TensorEntry]:
        """The tensors as they were first read. Rejected (500) if they could not be."""
        if self._hashing.done() and self._hashing.exception() is not None:
            self._hashing = asyncio.create_task(self.read())  # the file system may be back
        try:
            return await asyncio.shield(self._hashing)  # bounded: `read` is
        except (CommitError, OSError) as error:
            raise Rejected(500, f"the base model cannot be hashed: {error}") from error


class WeightService:
    """Updates the engine's weights and reports which they are.

    Args:
        engine: Answers for all of the `engines` data-parallel engines behind this server.
        root: Where versions may lie, a real path (None: anywhere).
        status: Shows a change under way, during which the engine does not answer, with its deadline.
        number: Of the adapter in the engine, among several tenants' (None: no tenant's). Where it could not be loaded
            the engine goes on for the others, and this tenant's requests are refused.
        adapters: Versions are adapters, such as these (None: full weights). Their loads do not pause an engine that
            runs.
        on_device: Workers may stage new weights in the GPU's memory, else in the host's, as `servers_on_host` engines
            do at the same time.
    """

    def __init__(
        self, engine: AllEngines, base: ServedBase, root: Path | None, *, number: int | None = None,
        adapters: Adapters | None = None, status: Status | None = None, on_device: bool = True,
        servers_on_host: int = 1, engines: int = 1,
    ) -> None:  # fmt: skip
        self._engine, self.engines = engine, engines
        self._base, self._root, self._adapters = base, root, adapters
        self.number, self._shared = number or ADAPTER, number is not None
        self._status = status
        self._stage_options = servers_on_host, on_device
        self._least_staging: float | None = None  # seconds, of all versions since a load waited in vain for one
        self._inline = False  # one rank stages the next adapter when it loads it
        self._lock = asyncio.Lock()  # bounded: `_run_exclusively` takes it, with a deadline
        self._tasks: set[asyncio.Task[Any]] = set()
        self._boot, self._loads = secrets.token_hex(8), 0
        self._paused_by_client = False
        self._broken: str | None = None  # why the weights are unusable
        self.failures = 0  # how often they became so
        self.loading = asyncio.Lock()  # bounded: held for a load, whose outcome says what replies of that time are
        self._resume_error: str | None = None  # why the engine did not resume

    def adapter(self) -> tuple[int, str]:
        """Number and name of the adapter. No other one, and no other version, has this name."""
        return self.number, f"{self._boot}@{self._loads}"

    @property
    def busy(self) -> bool:
        """Whether weights are being changed."""
        return bool(self._tasks)

    def check_usable(self) -> None:
        """Rejected (500) after a load that failed."""
        if self._broken is not None:
            raise Rejected(500, self._broken)

    async def clear(self) -> None:
        """Have no adapter of an earlier tenant under this number. Rejected (503) if the engine does not answer."""
        async with _engine_call("free an adapter", PAUSE_SECONDS):
            await self._engine.collective_rpc("prime_load", args=(self.number, "", {}))

    async def served(self) -> dict[str, Any]:
        """Ask every worker what it serves. Rejected (5xx) if the engine does not answer or its ranks disagree.

        Returns `version`, its `hash` and `weight_dir` (None for the weights it started with), `base`, `boot`, naming
        the incarnation of the server, and `loads` in it: with equal ones nothing else was served in between.
        """
        self.check_usable()
        if self._resume_error is not None:
            raise Rejected(503, self._resume_error)
        async with _engine_call("say what it serves", ANSWER_SECONDS):
            answers = await self._engine.collective_rpc("prime_served", args=(self.number,))
        self.check_usable()  # a load may have failed on one rank meanwhile
        return await self._describe(answers)

    async def _describe(self, answers: list[dict[str, Any] | None]) -> dict[str, Any]:
        """As `served` returns it, from the workers' answers. Rejected (500) if these disagree."""
        if any(answer != answers[0] for answer in answers):
            raise Rejected(500, f"the workers serve different weights: {answers}")
        identity = answers[0] or {"version": 0, "hash": version_hash(await self._base.hashes()), "weight_dir": None}
        identity.pop("adapter", None)
        return {**identity, "base": str(self._base.directory), "boot": self._boot, "loads": self._loads}

    async def update(self, weight_dir: str, version: int) -> WeightUpdate:
        """Serve the committed directory `weight_dir`, which must hold `version`; requests in flight continue. Rejected:
        with a 4xx the old weights serve on. After a 5xx `served` says what is served, if anything: a load failed
        half-way, or the engine did not resume."""
        return await self._run_exclusively(lambda change: self._update(weight_dir, version, change))

    async def reload(self) -> WeightUpdate:
        """Serve the base weights again; as `update`."""
        return await self._run_exclusively(self._reload)

    async def pause(self, paused: bool) -> None:
        """Stop generating, keeping requests in flight, or resume. An update is possible then and does not resume."""

        async def action(_: WeightUpdate) -> None:
            self.check_usable()
            if paused:
                await self._stop()
            self._paused_by_client = paused
            await self._resume_if_usable()

        await self._run_exclusively(action)

    def stop(self) -> None:
        """Cancel all changes, since the engine is ending; their clients are answered."""
        for task in self._tasks:
            task.cancel()

    async def _update(self, weight_dir: str, version: int, change: WeightUpdate) -> None:
        faults.point(f"update-received:v{version}")
        with change.measure("check"):
            manifest = await read(lambda: check_version(self._root, weight_dir, version), weight_dir, STALL_SECONDS)
            base = await self._base.hashes()
            if manifest.base is None:
                check_adapter(manifest, base, self._adapters)
                if manifest.adapter is None:
                    check_fit(manifest.tensors, base, self._base.tied)
        directory = manifest.directory
        if manifest.base is not None:
            # The path in the manifest of version 0 is not followed; its hash must be that of our base model.
            if manifest.hash != version_hash(base):
                raise Rejected(400, f"{directory} describes another base model than {self._base.directory}")
            await self._reload(change, str(directory))
            return
        identity: dict[str, Any] = {"version": version, "hash": manifest.hash, "weight_dir": str(directory)}
        if manifest.adapter is not None:
            identity["adapter"] = manifest.adapter.config
        answers: list[dict[str, Any]] = []
        try:
            if self._inline and self._broken is None:
                publisher = manifest.publisher
                source = publisher and (version, manifest.incarnation, *astuple(publisher))
                stage = *self._stage_options, 2 * INLINE_SECONDS, source
                answers = await self._swap(directory, identity, change, stage)
            await self._stage(manifest, change, answers)
            if not answers or answers[0]["state"] != "loaded":
                await self._swap(directory, identity, change)
        except BaseException:  # a load that succeeds frees what was staged
            try:
                async with _engine_call("free the memory of a staged version", ANSWER_SECONDS):
                    await self._engine.collective_rpc("prime_unstage", args=(self.number,))
            except Rejected as rejection:  # the outcome of the change itself counts
                logger.warning("{}", rejection.message)
            raise

    async def _reload(self, change: WeightUpdate, weight_dir: str | None = None) -> None:
        expected, directory = await self._base.hashes(), self._base.directory
        try:  # beside adapters it stays loaded
            tensors = expected if self._adapters is not None else await self._base.read()
        except (CommitError, OSError) as error:
            raise Rejected(400, str(error)) from error
        if tensors != expected:
            raise Rejected(400, f"the base model {directory} was changed on disk since the server started")
        identity = {"version": 0, "hash": version_hash(expected), "weight_dir": weight_dir}
        await self._swap(directory, identity, change)

    async def _stage(self, manifest: WeightsManifest, change: WeightUpdate, answers: list[dict[str, Any]]) -> None:
        """Have every worker stage the version while generation goes on. `answers`: of a load that has begun to stage it
        (empty: none has)."""
        directory, publisher = manifest.directory, manifest.publisher
        silence = STALL_SECONDS if publisher is None else LOAD_SECONDS  # an exchange has deadlines of its own
        with change.measure("stage"):
            async with _engine_call(f"read {directory}", LOAD_SECONDS):
                since = time.perf_counter()
                if not answers:
                    args = self.number, str(directory), manifest.hash, *self._stage_options
                    answers = await self._engine.collective_rpc("prime_stage", args=args)
                elif answers[0]["state"] == "reading":
                    self._least_staging, self._inline = None, False
                progress = answers
                # Each call costs the engine a step, since it cannot schedule ahead: none before it may be ready.
                expected = FIRST_STAGING_SECONDS if self._least_staging is None else self._least_staging
                delay = max(min(1.25 * expected, expected + FIRST_STAGING_SECONDS), POLL_SECONDS)
                while "reading" in (states := {answer["state"] for answer in answers}) and "failed" not in states:
                    await asyncio.sleep(delay)  # bounded: by the time-out around it
                    delay = POLL_SECONDS
                    answers = await self._engine.collective_rpc("prime_staged", args=(self.number,))
                    if answers != progress:
                        progress, since = answers, time.perf_counter()
                    elif time.perf_counter() - since > silence:
                        raise Rejected(503, f"{directory} could not be read: no progress for {silence:.0f} s")
        if failed := [answer for answer in answers if answer["state"] == "failed"]:
            worst = min(failed, key=lambda answer: answer["retry"])  # a failure that no retry mends
            status, what = 503 if worst["retry"] else 400, "read"
            if publisher is not None and worst["retry"]:
                status, trainer = EXCHANGE_FAILED, f"{publisher.host}:{publisher.port}"
                what = f"received by {socket.gethostname()} from the trainer at {trainer}"
            raise Rejected(status, f"{directory} could not be {what}, the previous weights go on: {worst['why']}")
        seconds = max(answer["seconds"] for answer in answers)
        self._least_staging = seconds if self._least_staging is None else min(self._least_staging, seconds)
        self._inline = self._adapters is not None and len(answers) == 1 and self._least_staging < INLINE_SECONDS
        change.place = max((answer["place"] for answer in answers), key=_PREFERENCE.index)
        if change.place == "nowhere":
            logger.info("no memory to keep a second copy of the weights: they are read while generation is paused")

    async def _swap(
        self, directory: Path, identity: dict[str, Any], change: WeightUpdate, stage: tuple[Any, ...] = ()
    ) -> list[dict[str, Any]]:
        """Load on every rank. For full weights the engine is paused meanwhile; an adapter is loaded between two of its
        steps, and requests in flight keep their context.

        After a failed load the engine is paused, with its requests, until a load succeeds: half-loaded weights would be
        sampled from. `served` does not vouch for what it has sampled until then. For several tenants it goes on, and
        the requests of this one are refused. `stage`: of `prime_load`, whose answers are returned.
        """
        version = identity["version"]
        stopped = self._broken is not None or self._resume_error is not None  # by a failure before
        pauses = self._adapters is None or (stopped and not self._shared)
        if self._status is not None:
            self._status.waiting(f"version {version} in the engine", "engine", PAUSE_SECONDS + LOAD_SECONDS)
        try:
            with change.measure("pause"):
                # The cache is cleared: requests in flight rebuild their context under the new weights.
                with change.measure("stop"):
                    if pauses:
                        await self._stop()
                began = time.perf_counter()
                try:
                    async with self.loading, asyncio.timeout(LOAD_SECONDS):
                        args = self.number, str(directory), identity, stage
                        answers = await self._engine.collective_rpc("prime_load", args=args)
                except Exception as error:
                    reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
                    self._broken = f"{directory} could not be loaded, nothing is sampled until a version is: {reason}"
                    logger.error("{}", self._broken)
                    self.failures += 1
                    if not pauses and not self._shared:
                        with suppress(Rejected):
                            await self._stop()
                    raise Rejected(500, self._broken) from error
                seconds = time.perf_counter() - began
                beside = 0.0 if pauses else seconds - max(answer["blocked"] for answer in answers)
                change.seconds["stage"] += beside
                change.seconds["load"] += seconds - beside
                change.seconds["pause"] -= beside
                if answers[0]["state"] != "loaded":
                    return answers
                self._broken, self._loads = None, self._loads + 1
                if pauses:
                    await self._resume_if_usable()
        finally:
            if self._status is not None:
                self._status.phase("serving")
        change.served = await self._describe([answer["served"] for answer in answers])
        parts = ", ".join(f"{part} {seconds:.3f} s" for part, seconds in change.seconds.items())
        logger.info("serving version {} ({}): {}", version, identity["hash"][:12], parts)
        faults.point(f"update-loaded:v{version}")
        return answers

    async def _stop(self) -> None:
        try:
            async with _engine_call("pause", PAUSE_SECONDS):
                await self._engine.pause_generation()
        except Rejected:
            # It may still pause later, or cannot clear a cache that another server is filling.
            await self._resume_if_usable()
            raise

    async def _resume_if_usable(self) -> None:
        """Resume, unless a client paused the engine or its weights are unusable: a forward pass would kill it."""
        if self._paused_by_client or self._broken is not None:
            return
        try:
            async with _engine_call("resume", PAUSE_SECONDS):
                await self._engine.resume_generation()  # of several engines none does while one is pausing
        except Rejected as rejection:
            self._resume_error = rejection.message
            raise
        self._resume_error = None

    async def _run_exclusively(self, action: Callable[[WeightUpdate], Coroutine[Any, Any, None]]) -> WeightUpdate:
        change = WeightUpdate()

        async def run() -> None:
            try:
                async with asyncio.timeout(LOCK_SECONDS):
                    await self._lock.acquire()
            except TimeoutError as error:
                raise Rejected(409, f"another weight change is still running after {LOCK_SECONDS:.0f} s") from error
            try:
                await action(change)
            finally:
                self._lock.release()

        task = asyncio.create_task(run())
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.shield(task)  # bounded: every step of a change has a deadline
        except asyncio.CancelledError:
            if task.cancelled():
                raise Rejected(503, "the server is stopping") from None
            raise
        return change


@asynccontextmanager
async def _engine_call(what: str, seconds: float) -> AsyncIterator[None]:
    """Reject (503) if the engine fails, or takes longer than `seconds`, in the block."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except Rejected:
        raise
    except TimeoutError as error:
        raise Rejected(503, f"the engine did not {what} within {seconds:.0f} s") from error
    except Exception as error:  # whatever vLLM raises
        raise Rejected(503, f"the engine did not {what}: {error!r}") from error


async def read(function: Callable[[], T], subject: Path | str, seconds: float) -> T:
    """Return `function()` from a daemon thread, since a file system may hang. Rejected (503) after `seconds`."""
    future = asyncio.wrap_future(in_thread(function, "read"))
    done, _ = await asyncio.wait({future}, timeout=seconds)
    if not done:
        raise Rejected(503, f"{subject} could not be read within {seconds:.0f} s")
    return await future  # bounded: it is done


def check_version(root: Path | None, weight_dir: str, version: int) -> WeightsManifest:
    """Check everything of a version except the tensors' bytes. Rejected if it lies outside `root` (403; None: any place
    that this host sees), or is not `version`, or not whole (400)."""
    directory = resolve(root, weight_dir)
    faults.point(f"update-read:v{version}")
    try:
        _check_files(root, directory, [MANIFEST])
        committed = read_manifest(directory)
        _check_files(root, directory, committed.files)
        manifest = weights_manifest(directory, committed)
        if manifest.version != version:
            raise Rejected(400, f"{directory} holds version {manifest.version}, not {version}")
        if manifest.base is None:
            listed = {name: entry.file for name, entry in manifest.tensors.items()}
            verify(directory, unhashed=set(listed.values()), manifest=committed)
            # vLLM reads only the files that an index names, and silently keeps the old weights of others.
            index = directory / INDEX
            if index.exists() and json.loads(index.read_bytes())["weight_map"] != listed:
                raise CommitError(f"{index} does not list the tensors of the files beside it")
    except (CommitError, OSError, TypeError, ValueError, KeyError, RecursionError) as error:
        raise Rejected(400, str(error)) from error  # manifest and index may say anything
    return manifest


def resolve(root: Path | None, weight_dir: str) -> Path:
    """The committed directory that `weight_dir` names, symbolic links resolved; raises as `check_version`. `root` is a
    real path: where a link in it leads is outside."""
    try:
        path = Path(weight_dir).expanduser().resolve()
    except (ValueError, RuntimeError, OSError) as error:  # a NUL byte, a loop of links, an unknown user
        raise Rejected(400, f"weight_dir {weight_dir!r} is no path: {error}") from error
    if root is not None and not path.is_relative_to(root):
        where = f"is outside the weights root {root}: start the server with another --weights-root, or without"
        raise Rejected(403, f"weight_dir {weight_dir} {where}; a tenant's versions lie in its own run directory")
    if not os.path.isfile(path / MANIFEST):  # False where it may not even look
        both = "trainer and server need one file system, under the same path"
        raise Rejected(400, f"the server's host sees no committed version in {weight_dir}: {both}")
    return path


def _check_files(root: Path | None, directory: Path, names: Iterable[str]) -> None:
    """Check that these files, and those that are read for their names, lie in `directory`. A link may lead anywhere
    below the root, or, without a root, into `directory`."""
    allowed = root or directory
    for name in {*names, INDEX, *(path.name for path in directory.glob("*.safetensors"))}:
        path = directory / name
        real_path = Path(os.path.realpath(path))  # no error where links lead in a circle: opening it is one
        inside = path.parent == directory and name not in ("", "..")
        if not inside or not real_path.is_relative_to(allowed):
            raise Rejected(403, f"{path} is outside {directory if root is None else f'the weights root {root}'}")


def check_adapter(manifest: WeightsManifest, base: dict[str, TensorEntry], served: Adapters | None) -> None:
    """Reject full weights where adapters are served and adapters elsewhere, one that is too large, one of another base
    model, and one for layers that the model has not."""
    if manifest.adapter is None and served is None:
        return
    if manifest.adapter is None:
        raise Rejected(400, "the version is full weights, and this server serves adapters: start it without [lora]")
    rank = manifest.adapter.config["r"]
    if served is None or rank > served.max_rank:
        raise Rejected(400, f"the version is an adapter of rank {rank}: start the server with --lora.max-rank {rank}")
    if manifest.adapter.base != version_hash(base):
        raise Rejected(400, f"{manifest.directory} is an adapter of another base model than this server's")
    for name, entry in manifest.tensors.items():
        layer, _, letter = name.removesuffix(".weight").removeprefix("base_model.model.").rpartition(".lora_")
        weight, side = base.get(f"{layer}.weight"), "BA".find(letter)
        if weight is None or side < 0 or (entry.shape[side], entry.shape[1 - side]) != (weight.shape[side], rank):
            raise Rejected(400, f"tensor {name} with shape {entry.shape} fits no layer of the model")
        module = "experts" if ".experts." in layer else layer.rpartition(".")[2]
        if module not in served.modules:
            raise Rejected(400, f"vLLM serves no adapters for {module} here: train with --lora.serve merged")


def check_fit(tensors: dict[str, TensorEntry], base: dict[str, TensorEntry], tied: bool) -> None:
    """Reject a version whose tensors have other names or shapes than the base model's; dtypes may differ."""
    optional = {"lm_head.weight"} if tied else set()
    for name in sorted((base.keys() ^ tensors.keys()) - optional):
        raise Rejected(400, f"tensor {name} is {'missing' if name in base else 'not part of the model'}")
    for name in sorted(base.keys() & tensors.keys()):
        if tensors[name].shape != base[name].shape:
            raise Rejected(400, f"tensor {name} has shape {tensors[name].shape}, the model's is {base[name].shape}")
