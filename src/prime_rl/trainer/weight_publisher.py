"""The policy versions of a run: made available to servers beside the loop, and committed under `weights/step_v`.

`filesystem`: a Hugging Face directory that transformers and vLLM load. `memory`: a manifest alone, and the tensors from the trainer's memory
(`transport/exchange.py`); only what must outlive this process is written as well, afterwards.
"""

import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from loguru import logger
from torch import Tensor

from prime_rl import faults
from prime_rl.errors import UserError
from prime_rl.host_memory import available_bytes
from prime_rl.monitor.process import boot_id
from prime_rl.trainer.canary import CanaryScorer, Scored
from prime_rl.trainer.model import Policy, compute_dtype
from prime_rl.trainer.parallel import World, agree, background_world, broadcast, gather, on_main
from prime_rl.trainer.source import Source
from prime_rl.trainer.weight_copy import Copy, GatheredCopy, RowCopies, on_device
from prime_rl.trainer.weight_files import (
    DTYPE_NAMES,
    allocate,
    copy_model_files,
    file_hashes,
    hash_files,
    write_ranges,
)
from prime_rl.transport.addresses import own_address
from prime_rl.transport.canary import Canary
from prime_rl.transport.checksum import checksums
from prime_rl.transport.commit import CommitError, Stage, clean_stages, disk_errors, give_up, list_steps, prune
from prime_rl.transport.exchange import Publisher
from prime_rl.transport.lives import (
    Seen,
    call_for_files,
    lost_versions,
    next_life,
    open_life,
    read_lives,
    read_versions,
    run_id,
    sparing_lives,
    strictest_lease,
)
from prime_rl.transport.protocol import prunable, spared, to_set_aside
from prime_rl.transport.tmpfs import (
    check_room,
    clean_tmpfs,
    in_tmpfs,
    note_tmpfs,
    open_tmpfs,
    remove_in_tmpfs,
    tmpfs_dir,
    tmpfs_of,
)
from prime_rl.transport.weights import (
    INDEX,
    TensorEntry,
    make_durable,
    manifest_extra,
    version_dir,
    weights_manifest,
    write_base_version,
)
from prime_rl.wait import WaitTimeout

if TYPE_CHECKING:
    from prime_rl.config import SFTConfig, TrainerConfig

Times = dict[str, float]
_FILES_POLL_SECONDS = 0.5  # between two looks at whether servers ask for files


def refuse_outlived(output_dir: Path, life: int) -> None:
    """Raise UserError where a later life than `life` was opened: two trainers must not write one history."""
    newest = max(read_lives(output_dir), default=life)
    if newest > life:
        raise UserError(
            f"another trainer has gone on with the run in {output_dir} (life {newest}; this one is {life}): this one ends and commits no more"
        )


@dataclass(frozen=True)
class Tmpfs:
    """Where files lie that need not outlive the host, and how many versions at the same time at most, with what makes so many."""

    root: Path
    versions: int
    arithmetic: str


@dataclass(frozen=True)
class MemoryTransport:
    """Where servers reach the trainer (None: on its default route; port 0: any), the seconds without progress after which a transfer fails, and
    whether versions are written to files as well once servers say that they cannot reach it."""

    host: str | None = None
    port: int = 0
    timeout: float = 30.0
    fallback: bool = False


def write_version(
    copies: RowCopies,
    copied: Copy,
    source: Source,
    world: World,
    final: Path,
    *,
    version: int,
    incarnation: int,
    canary: Canary | None = None,
    tmpfs: Path | None = None,
) -> Times:
    """Commit a copy as `final`, with config and tokenizer of the source. Every rank calls it, perhaps in a thread, and writes its own rows.

    Args:
        world: The ranks, with the group that the calling thread may use.
        tmpfs: Where the files are committed, before `final` which then only names that place (None: they lie in `final`).

    Returns:
        Seconds of writing, hashing and committing.

    Raises:
        UserError: the disk is full (on any rank); nothing is left under the final name.
        CommitError: `final` is committed already.
    """
    copied.finish()
    nonce = broadcast(world, secrets.token_hex(8))
    stage = agree(world, lambda: Stage(final, nonce))
    file_stage = stage if tmpfs is None else agree(world, lambda: Stage(tmpfs, nonce))
    directory, share = file_stage.path, dict(list(copies.slots.items())[world.rank :: world.size])

    def write() -> None:
        with disk_errors(directory):
            write_ranges(copies.bytes_of(copied), directory, copies.files)

    def hash_share() -> dict[str, str]:
        with disk_errors(directory):
            return hash_files(directory, share)

    def commit() -> None:
        copy_model_files(source, stage.path, copies.dtype)
        extra, known = manifest_extra(version, incarnation, tensors, canary=canary), file_hashes(tensors)
        if file_stage is stage:
            stage.commit(step=version, producer="trainer", extra=extra, hashes=known)
            return
        file_stage.commit(step=version, producer="trainer", hashes=known)
        extra["tmpfs"] = asdict(in_tmpfs(file_stage.final, file_stage.nonce))
        try:
            stage.commit(step=version, producer="trainer", extra=extra)
        except BaseException:
            if not stage.final.is_dir():
                prune(file_stage.final)
            raise

    try:
        began = time.perf_counter()
        on_main(world, lambda: allocate(directory, copies.headers, copies.slots))
        agree(world, write)
        wrote = time.perf_counter()
        hashes = {name: one for part in gather(world, agree(world, hash_share)) for name, one in part.items()}
        hashed = time.perf_counter()
        tensors = {
            name: TensorEntry(slot.file, DTYPE_NAMES[copies.dtype], slot.shape, hashes[name])
            for name, slot in copies.slots.items()
        }
        on_main(world, commit)
    except BaseException:
        stage.abort()
        file_stage.abort()
        raise
    return {"write": wrote - began, "hash": hashed - wrote, "commit": time.perf_counter() - hashed}


class WeightPublisher:
    """The policy versions of one incarnation of the trainer. Every rank calls every method, at the same point of the run.

    Versions are committed by one thread, in their order, made durable by a second and pruned by a third: `publish` and `prune` return at once, `settle`
    waits. What has failed is raised by a later `publish` or by `settle`, on every rank; nothing is committed after it.

    Args:
        timeout: Seconds that committing one may take.
        overlapping: Versions follow each other so fast that one may be copied while the one before it is still being written, where there is
            host memory for that.
        memory: Publish from memory (None: every version is written to files).
        canary: Scores what goes into each version's manifest for those who serve it (None: nobody compares).
        tmpfs: For the files of versions that nobody needs after a crash of the host (None: all lie on the disk).
        save_interval: Versions whose number is a multiple are durable, and never pruned.
        on_committed: Gets, in the loop's thread, each version that was settled and the seconds that its parts took (`time/export_*`); `time/export` is
            what the loop waited for, `time/canary` what it took to score the canary, or to hand that to the device.
    """

    def __init__(
        self,
        output_dir: Path,
        policy: Policy,
        source: Source,
        world: World,
        dtype: torch.dtype,
        *,
        timeout: float = 600.0,
        overlapping: bool = True,
        canary: CanaryScorer | None = None,
        memory: MemoryTransport | None = None,
        tmpfs: Tmpfs | None = None,
        save_interval: int | None = None,
        on_committed: Callable[[int, Times], None] = lambda version, times: None,
    ) -> None:
        self.output_dir, self.root = output_dir, output_dir / "weights"
        self.source, self.world, self.dtype = source, world, dtype
        self.life, self._start, self._overlapping = 0, 0, overlapping
        self._timeout, self._on_committed, self._canary = timeout, on_committed, canary
        self._save_interval = save_interval
        self._memory = memory
        self._copies: RowCopies | GatheredCopy
        self._copies = RowCopies(policy, world, dtype) if memory is None else GatheredCopy(policy, world, dtype)
        self._publisher: Publisher | None = None  # of rank 0
        self._held = 0  # the version in the gathered copy
        self._files_wanted = False
        self._closed = threading.Event()
        self._tmpfs = tmpfs
        self._tmpfs_dir: Path | None = None  # of this run
        self._had_tmpfs = True  # the files of some version may lie there
        self._seen: Seen = {}
        self._background = background_world(world, timeout)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="durable")
        self._pruner = ThreadPoolExecutor(1, thread_name_prefix="prune")
        self._copied = Copy(0)
        self._pending: list[tuple[int, Future[Times | None]]] = []  # None: not committed, as the one before it failed
        self._others: list[Future[Any]] = []  # what the first thread does beside
        self._writes: list[Future[None]] = []  # of rank 0: versions from memory that become durable
        self._prunes: list[Future[None]] = []  # of rank 0
        self._waited, self._scoring = 0.0, 0.0

    # ---- the loop's side

    def open(self, start: int, *, spares: bool = False, saved_by: Collection[int] = ()) -> tuple[int, str | None]:
        """Begin an incarnation that starts from step `start`, with that version committed: the base model's manifest for 0.

        The incarnation is committed first: from then on nobody counts versions beyond `start` that earlier ones made. They are removed next.

        Args:
            spares: Keep the newest of them as `given_up_<life>_step_v`.
            saved_by: The incarnations that saved the training states. Rank 0's counts.

        Returns:
            The incarnation's number, and the base model's hash (None: random weights).
        """
        self._start = start
        # Only a policy that is not trained yet is the base model.
        scored = None if self._canary is None or start > 0 else self._canary.score(as_exported=False)
        base_canary = None if scored is None else agree(self.world, scored.read)
        if self._tmpfs is not None and (hosts := len(set(gather(self.world, boot_id())))) > 1:
            raise UserError(f"weights.tmpfs is the memory of one host, and the trainer's ranks are on {hosts}")
        self.life, base, place = on_main(self.world, lambda: self._open(start, spares, saved_by, base_canary))
        self._tmpfs_dir = None if place is None else Path(place)
        if isinstance(self._copies, RowCopies) and self._overlapping and all(gather(self.world, self._copies.affords_two())):  # fmt: skip
            self._copies.count = 2
        self._others.append(self._thread.submit(self._prepare))
        if start > 0:
            self.ensure(start)
        return self.life, base

    def ensure(self, version: int, *, durable: bool = False) -> None:
        """Have the policy's weights committed as `version`, where this history has no files of it already, and wait for it."""
        self.settle()
        if not on_main(self.world, lambda: self._has_files(version)):
            self.publish(version, durable=durable or self._memory is None)
            self.settle()

    def publish(self, version: int, check: Callable[[], object] = lambda: None, *, durable: bool = False) -> None:
        """Let the policy's weights, as the device has them after what it was given so far, become `version`.

        Args:
            check: Called by the thread before it commits anything. What it raises keeps the version from being committed.
            durable: It must outlive this process and this host's memory.

        Raises:
            UserError: an earlier one failed, for instance because the disk is full, or another trainer has gone on with the run.
        """
        self._settle(versions=self._copies.count - 1 if isinstance(self._copies, RowCopies) else 0, prunes=1)
        began = time.perf_counter()
        scored = None if self._canary is None else self._canary.score(compiled=version > self._start)
        copying = time.perf_counter()
        self._scoring += copying - began
        if self._publisher is not None:
            self._publisher.withdraw()
        self._copied, self._held = self._copies.copy(), version
        before = self._pending[-1][1] if self._pending else None
        durable = durable or (self._save_interval is not None and version % self._save_interval == 0)
        committed = self._thread.submit(
            self._commit, version, durable, self._copied, scored, check, before, list(self._prunes)
        )
        self._pending.append((version, committed))
        self._waited += time.perf_counter() - copying

    def before_update(self) -> None:
        """To be called before the weights change: the device changes them after they are copied. The host does not wait."""
        self._copied.before_update()

    def prune(self, async_level: int, keep: int | None, checkpoints: Callable[[], Collection[int]]) -> None:
        """Remove the versions that no reader, no sampling ahead and none of the `checkpoints` needs any more (`protocol.prunable`), after the
        version that is under way. `checkpoints` is called by the thread."""
        if keep is not None and self.world.is_main:
            under_way = self._pending[-1][1] if self._pending else None
            self._prunes.append(self._pruner.submit(self._prune, under_way, async_level, keep, checkpoints))

    def settle(self) -> None:
        """Wait until the versions that are under way are committed, durable where they must be, and what they make superfluous is gone; for each at
        most `timeout`.

        Raises:
            UserError: it failed, or takes longer.
        """
        self._settle(versions=0, prunes=0)
        if self._memory is not None:  # by now each that must be durable is being written
            agree(self.world, self._take_writes)

    def leave_tmpfs(self, async_level: int, keep: int | None, checkpoints: Callable[[], Collection[int]]) -> None:
        """Bring what lies in tmpfs and is kept for its own sake (`prune`) to the disk, and remove the rest: nobody is there any more who would."""
        self.settle()
        if self._tmpfs_dir is not None and keep is not None:
            on_main(self.world, lambda: self._leave_tmpfs(async_level, keep, checkpoints))

    def close(self) -> None:
        """Let the threads finish what they are at, for at most `timeout` each version, and say what failed."""
        self._closed.set()
        for thread in (self._thread, self._writer, self._pruner):
            thread.shutdown(wait=False)
        if self._publisher is not None:
            self._publisher.close()
        for left in self._one_by_one(versions=0):
            if (late := self._late(left, prunes=None if left else 0)) is not None:
                logger.error("{}", late)
                return  # a buffer may still be read
        if wait_for_futures(self._writes, timeout=self._timeout).not_done:
            logger.error("a version was not written within {:.0f} s", self._timeout)
            return
        if isinstance(self._copies, RowCopies):
            self._copies.close()
        futures: list[Future[Any]] = [*self._others, *self._writes, *self._prunes, *(done for _, done in self._pending)]
        for failure in filter(None, (future.exception(timeout=0) for future in futures)):
            logger.error("{}", failure)

    def _settle(self, versions: int, prunes: int) -> None:
        """Wait for commits and removals, but let the newest `versions` and `prunes` go on."""
        if not self._pending and not self._others and not on_main(self.world, lambda: bool(self._prunes or self._writes)):  # fmt: skip
            return
        for left in self._one_by_one(versions):
            began = time.perf_counter()
            version, times = agree(self.world, partial(self._take_results, left, prunes if left == versions else None))
            self._waited += time.perf_counter() - began
            if version is not None:
                times["time/export"], self._waited = self._waited, 0.0
                times["time/canary"], self._scoring = self._scoring, 0.0
                self._on_committed(version, times)

    def _one_by_one(self, versions: int) -> range:
        """How many versions are left to go on after each that is waited for: every one has the time-out for itself."""
        return range(max(len(self._pending) - 1, versions), versions - 1, -1)

    def _take_writes(self) -> None:
        writes, self._writes = self._writes, []
        late = wait_for_futures(writes, timeout=self._timeout).not_done
        if late:
            raise WaitTimeout("files of a version", "the thread that writes them", self._timeout)
        for done in writes:
            done.result(timeout=0)

    def _take_results(self, versions: int, prunes: int | None) -> tuple[int | None, Times]:
        """Those of one version at most."""
        if (late := self._late(versions, prunes)) is not None:
            raise late
        others, self._others = self._others, []
        for other in others:
            other.result(timeout=0)
        version: int | None = None
        times: Times | None = None
        if len(self._pending) > versions:
            version, committed = self._pending.pop(0)
            if committed.exception(timeout=0) is not None:  # the thread gives up those after it at once
                wait_for_futures([after for _, after in self._pending], timeout=self._timeout)
                self._pending = [(after, future) for after, future in self._pending if not future.done()]
            times = committed.result(timeout=0)
        for futures in (self._writes, self._prunes):
            for done in [future for future in futures if future.done()]:
                futures.remove(done)
                done.result(timeout=0)
        return (None, {}) if times is None else (version, times)

    def _late(self, versions: int, prunes: int | None) -> WaitTimeout | None:
        """What the threads have not done in time, but for the newest `versions` and `prunes` (None: all), after waiting for it."""
        removals = [] if prunes is None else self._prunes[: max(len(self._prunes) - prunes, 0)]
        owed: list[tuple[str, str, Future[Any]]] = [
            *(("memory for the weights", "the thread that makes it ready", other) for other in self._others),
            *(
                (f"weights/step_{version}", "the thread that commits it", committed)
                for version, committed in self._pending[: max(len(self._pending) - versions, 0)]
            ),
            *(("end of removing old versions", "the thread that removes them", one) for one in removals),
        ]
        late = wait_for_futures([future for *_, future in owed], timeout=self._timeout).not_done
        return next((WaitTimeout(what, who, self._timeout) for what, who, future in owed if future in late), None)

    # ---- in the thread that commits

    def _prepare(self) -> None:
        """Before the first version."""
        agree(self._background, self._copies.allocate)
        if self._memory is not None:
            on_main(self._background, self._open_publisher)

    def _open_publisher(self) -> None:
        assert isinstance(self._copies, GatheredCopy)
        assert self._copies.buffer is not None
        assert self._memory is not None
        memory = self._memory
        self._publisher = Publisher(
            self._copies.buffer,
            host=memory.host or own_address(),
            port=memory.port,
            timeout=memory.timeout,
            handle=self._copies.handle,
        )
        if memory.fallback:
            threading.Thread(target=self._await_call_for_files, name="files", daemon=True).start()

    def _commit(
        self,
        version: int,
        durable: bool,
        copied: Copy,
        scored: Scored | None,
        check: Callable[[], object],
        before: "Future[Times | None] | None",
        prunes: Collection["Future[None]"],
    ) -> Times | None:
        """`before` is the version before this one, which the thread is done with; `prunes` are under way, on rank 0."""
        world = self._background
        try:
            if before is not None and not _is_committed(before):
                return None
            agree(world, check)
            canary = None if scored is None else agree(world, scored.read)
            on_main(world, lambda: refuse_outlived(self.output_dir, self.life))
        finally:
            copy_seconds = copied.finish()
        if isinstance(self._copies, GatheredCopy):
            times = on_main(world, lambda: self._commit_in_memory(version, durable, canary))
        else:
            place = None if durable or self._tmpfs_dir is None else version_dir(self._tmpfs_dir, version)
            final, copies = version_dir(self.root, version), self._copies
            on_main(world, lambda: self._make_room(final if place is None else place, prunes))
            times = write_version(
                copies, copied, self.source, world, final, version=version, incarnation=self.life, canary=canary, tmpfs=place
            )  # fmt: skip
        return {f"time/export_{part}": seconds for part, seconds in {"copy": copy_seconds, **times}.items()}

    def _commit_in_memory(self, version: int, durable: bool, canary: Canary | None) -> Times:
        """Rank 0: a manifest that names the publisher, which has the version before anybody knows of it."""
        copies, publisher, memory = self._copies, self._publisher, self._memory
        assert isinstance(copies, GatheredCopy)
        assert copies.buffer is not None
        assert publisher is not None
        assert memory is not None
        began = time.perf_counter()
        sums = _aside(copies.buffer, lambda buffer: checksums(buffer, copies.places))
        summed = time.perf_counter()
        tensors = {name: replace(entry, checksum=sums[name]) for name, entry in copies.tensors.items()}
        address = publisher.address(fallback=memory.fallback)
        extra = manifest_extra(version, self.life, tensors, canary=canary, publisher=address)
        stage = Stage(version_dir(self.root, version), secrets.token_hex(8))
        try:
            copy_model_files(self.source, stage.path, self.dtype)
            publisher.offer(version, self.life, extra["hash"], copies.size)
            stage.commit(step=version, producer="trainer", extra=extra)
        except BaseException:
            stage.abort()
            raise
        if durable or self._files_wanted:
            # Before the next version is gathered, which waits for this thread.
            host = copies.to_host()
            self._writes.append(self._writer.submit(self._write_files, version, host, tensors))
        return {"checksum": summed - began, "commit": time.perf_counter() - summed}

    def _make_room(self, place: Path, prunes: Collection["Future[None]"]) -> None:
        """Where there is none for one version more, let the older ones be gone before it is written."""
        assert isinstance(self._copies, RowCopies)
        if shutil.disk_usage(place.parent).free < self._copies.file_bytes:
            wait_for_futures(prunes, timeout=self._timeout)

    # ---- files of versions that are published from memory, on rank 0

    def _write_files(self, version: int, host: Tensor, tensors: "dict[str, TensorEntry]") -> None:
        """In the writer's thread, from a copy on the host."""
        copies, directory = self._copies, version_dir(self.root, version)
        assert isinstance(copies, GatheredCopy)
        sums = checksums(host, copies.places)
        if any(sums[name] != entry.checksum for name, entry in tensors.items()):
            raise UserError(f"{directory} was changed on its way to host memory: nothing of it is written")

        def write(stage: Path) -> None:
            allocate(stage, copies.headers, copies.slots)
            write_ranges(host.numpy().data, stage, copies.ranges())

        try:
            make_durable(directory, write)
        except (CommitError, FileNotFoundError):
            if directory.is_dir():  # else it was pruned meanwhile: nobody needs it
                raise

    def _await_call_for_files(self) -> None:
        """In a thread of its own, under `transport = "auto"`: once servers that cannot reach the publisher ask for files, write the version that waits
        for them, and every later one."""
        while not self._closed.wait(_FILES_POLL_SECONDS):  # bounded: it ends with `close`
            reason = call_for_files(self.output_dir, self.life)
            if reason is None:
                continue
            logger.warning("weights are written to files from now on: {}", reason)
            self._files_wanted = True
            copies = self._copies
            assert isinstance(copies, GatheredCopy)
            version, host = self._held, copies.to_host()
            try:
                manifest = weights_manifest(version_dir(self.root, version))
                self._write_files(version, host, manifest.tensors)
            except (UserError, CommitError) as error:  # superseded: the next one is written anyway
                logger.info("version {} is not written: {}", version, error)
            return

    # ---- rank 0's side of the disk

    def _prune(
        self,
        under_way: Future[Times | None] | None,
        async_level: int,
        keep: int,
        checkpoints: Callable[[], Collection[int]],
    ) -> None:
        if under_way is not None:
            under_way.exception()  # bounded: by whoever waits for this version, and says what has failed
            if not _is_committed(under_way):
                return
        versions, lives = read_versions(self.root, self._seen), read_lives(self.output_dir)
        lease, needed = strictest_lease(self.output_dir), checkpoints()
        for version in prunable(versions, lives, lease=lease, async_level=async_level, keep=keep, checkpoints=needed):
            if self._save_interval is not None and version % self._save_interval == 0:
                continue
            try:
                self._remove(version)
            except OSError as error:
                directory = version_dir(self.root, version)
                raise UserError(f"{directory} cannot be removed ({error.strerror}); nothing is lost by it") from error

    def _open(
        self, start: int, spares: bool, saved_by: Collection[int], canary: Canary | None
    ) -> tuple[int, str | None, str | None]:
        self.root.mkdir(parents=True, exist_ok=True)
        if (place := self._tmpfs) is not None:
            assert isinstance(self._copies, RowCopies)
            root = tmpfs_dir(place.root, self.output_dir, run_id(self.output_dir) or "none")
            check_room(root, place.versions, self._copies.file_bytes, place.arithmetic, available_bytes())
        clean_stages(self.root)
        directory = self.source.directory
        base = None if directory is None else write_base_version(self.root, directory, canary).hash
        faults.point(f"life:{next_life(self.output_dir, saved_by)}")
        life = open_life(self.output_dir, start, spares=spares, saved_by=saved_by)
        for version in lost_versions(self.root):  # the host was started again
            prune(version_dir(self.root, version))
        self._set_aside(life)
        tmpfs = self._open_tmpfs()
        held = [tmpfs_of(version_dir(self.root, version)) for version in list_steps(self.root)]
        self._had_tmpfs = tmpfs is not None or any(place is not None for place in held)
        return life, base, None if tmpfs is None else str(tmpfs)

    def _open_tmpfs(self) -> Path | None:
        """This run's place there, without what a dead trainer has left."""
        if self._tmpfs is None:
            return None
        run = run_id(self.output_dir)
        assert run is not None, "each life file holds it"
        root = tmpfs_dir(self._tmpfs.root, self.output_dir, run)
        note_tmpfs(root, self.output_dir)
        open_tmpfs(root, self.output_dir)
        held = (tmpfs_of(version_dir(self.root, version)) for version in list_steps(self.root))
        clean_tmpfs(root, {place.directory for place in held if place is not None})
        return root

    def _has_files(self, version: int) -> bool:
        """Whether the disk holds such a version. One that is damaged, or went with the memory of an earlier incarnation, is removed: it can be
        committed anew."""
        if version in list_steps(self.root) and not self._bring_to_disk(version):
            self._remove(version)
        return version in list_steps(self.root)

    def _bring_to_disk(self, version: int) -> bool:
        """What is in tmpfs goes once the disk has it. Returns False for a version that is damaged, or has no files."""
        directory = version_dir(self.root, version)
        place = tmpfs_of(directory)
        try:
            manifest = weights_manifest(directory)
            if manifest.publisher is not None:
                return False
            if place is None:
                return True

            def write(stage: Path) -> None:
                for file in {*(entry.file for entry in manifest.tensors.values()), INDEX}:
                    if file != INDEX or (manifest.files / INDEX).exists():
                        shutil.copyfile(manifest.files / file, stage / file)

            make_durable(directory, write)
        except (CommitError, FileNotFoundError) as error:
            logger.warning("version {} cannot be brought to the disk: {}", version, error)
            return False
        remove_in_tmpfs(place, self.output_dir, run_id(self.output_dir))
        return True

    def _leave_tmpfs(self, async_level: int, keep: int, checkpoints: Callable[[], Collection[int]]) -> None:
        versions, lives = read_versions(self.root, self._seen), read_lives(self.output_dir)
        lease, needed = strictest_lease(self.output_dir), checkpoints()
        dropped = prunable(versions, lives, lease=lease, async_level=async_level, keep=keep, checkpoints=needed)
        for version in sorted(set(list_steps(self.root)).difference(dropped), reverse=True):
            if tmpfs_of(version_dir(self.root, version)) is not None:
                self._bring_to_disk(version)
        self._prune(None, async_level, keep, checkpoints)
        if self._tmpfs_dir is not None and not any(self._tmpfs_dir.iterdir()):
            self._tmpfs_dir.rmdir()

    def _remove(self, version: int) -> None:
        """The tensors first: a version without them counts as not there."""
        directory = version_dir(self.root, version)
        if self._had_tmpfs:  # reading a manifest of many tensors takes the interpreter from the loop
            remove_in_tmpfs(tmpfs_of(directory), self.output_dir, run_id(self.output_dir))
        prune(directory)

    def _set_aside(self, life: int) -> None:
        versions = read_versions(self.root)
        superseded = to_set_aside(versions, read_lives(self.output_dir))
        on_disk = [version for version in superseded if weights_manifest(version_dir(self.root, version)).publisher is None]  # fmt: skip
        kept = spared({version: versions[version] for version in on_disk}, sparing_lives(self.output_dir))
        if kept is not None and not self._bring_to_disk(kept):
            kept = None
        for version in superseded:  # ascending, so that after a crash the newest is still there to be kept
            if version != kept:
                self._remove(version)
            elif (aside := give_up(version_dir(self.root, version), life)) is not None:
                logger.warning("version {} is given up; it lies in {} now", version, aside)


def _is_committed(committed: "Future[Times | None]") -> bool:
    """Whether a version that the thread is done with was committed."""
    return committed.exception(timeout=0) is None and committed.result(timeout=0) is not None


# ---- what a config asks for


def export_dtype(config_dtype: str, source: Source) -> torch.dtype:
    """The dtype of exported weights: `auto` is the source checkpoint's."""
    if config_dtype != "auto":
        return getattr(torch, config_dtype)
    return source.config.dtype if source.config.dtype in DTYPE_NAMES else torch.bfloat16


def transport_of(config: "TrainerConfig", world: World) -> MemoryTransport | None:
    """What `weights.transport` comes to here; None for files."""
    weights = config.weights
    if weights.transport == "filesystem" or config.data.fake is not None:
        return None
    if weights.transport == "auto" and (world.device.type != "cuda" or weights.tmpfs is not None):
        return None
    return MemoryTransport(weights.host, weights.port, weights.timeout, fallback=weights.transport == "auto")


def published_bytes(config: "TrainerConfig", source: Source, world: World, parameters: int) -> float:
    """Bytes per parameter of a rank's share that published weights take on the trainer's GPU, and, where a server shares it, twice as much again for its
    own copy, which it wants to find free (`inference.staging`)."""
    if transport_of(config, world) is None:
        return 0.0
    itemsize = export_dtype(config.weights.dtype, source).itemsize
    if not on_device(parameters * itemsize, world.device):
        return 0.0
    return (3 if config.weights.shares_gpu else 1) * itemsize * world.shards


def tmpfs_of_config(config: "TrainerConfig") -> Tmpfs | None:
    """One version more than is kept (`protocol.prunable`) is there while it is being written."""
    root, keep = config.weights.tmpfs, config.weights.keep
    if root is None or keep is None:
        return None
    arithmetic = f"the newest, async_level {config.async_level}, keep {keep}, and one that is being written"
    return Tmpfs(root, config.async_level + keep + 2, arithmetic)


def make_publisher(
    config: "TrainerConfig | SFTConfig",
    policy: Policy,
    source: Source,
    world: World,
    on_times: Callable[[int, Times], None],
    *,
    overlapping: bool,
    canary: bool = False,
    memory: MemoryTransport | None = None,
    tmpfs: Tmpfs | None = None,
    save_interval: int | None = None,
) -> WeightPublisher:
    """The publisher of a run. `on_times` gets the step that made a version, and the times that committing it took. With `canary` each carries one."""
    dtype = export_dtype(config.weights.dtype, source)
    scorer = None
    if canary:
        vocabulary = source.config.get_text_config().vocab_size
        scorer = CanaryScorer(policy, world, vocabulary, compute_dtype(config.model.dtype, world.device), dtype)
    return WeightPublisher(
        config.output_dir,
        policy,
        source,
        world,
        dtype,
        timeout=config.dist_timeout,
        overlapping=overlapping,
        canary=scorer,
        memory=memory,
        tmpfs=tmpfs,
        save_interval=save_interval,
        on_committed=lambda version, times: on_times(version - 1, times),
    )


def _aside(buffer: Tensor, work: "Callable[[Tensor], dict[str, str]]") -> dict[str, str]:
    """Do this on a stream of its own where the buffer is on a GPU: not behind what the training computes."""
    if not buffer.is_cuda:
        return work(buffer)
    with torch.cuda.device(buffer.device), torch.cuda.stream(torch.cuda.Stream(buffer.device)):
        return work(buffer)
