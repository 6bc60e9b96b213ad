"""Policy versions of a run: published to servers beside the loop, and committed under `weights/step_v`.

`filesystem`: a Hugging Face directory that transformers and vLLM load. `memory`: only a manifest; the tensors come from
the trainer's memory (`transport/exchange.py`), and versions that must be durable are written to files afterwards.
"""

import secrets
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor

from prime_rl import faults
from prime_rl.config.trainer import TrainerConfig, WeightsConfig
from prime_rl.errors import UserError
from prime_rl.host_memory import available_bytes
from prime_rl.processes import boot_id
from prime_rl.trainer.model import Policy
from prime_rl.trainer.parallel import World, agree, background_world, broadcast, gather, on_main
from prime_rl.trainer.reference_scorer import ReferenceScorer
from prime_rl.trainer.source import Source
from prime_rl.trainer.weight_copy import (
    DTYPE_NAMES,
    Copy,
    GatheredCopy,
    RowCopies,
    allocate_files,
    copy_model_files,
    hash_files,
    on_device,
    write_ranges,
)
from prime_rl.transport import incarnations
from prime_rl.transport.commit import (
    CommitError,
    Stage,
    clean_stages,
    list_steps,
    prune,
    remove,
    supersede,
    tmpfs_dirs,
    tmpfs_prefix,
)
from prime_rl.transport.exchange import Publisher, checksums, own_address
from prime_rl.transport.protocol import prunable, superseded_to_keep, superseded_versions
from prime_rl.transport.weights import (
    LogprobReference,
    TensorEntry,
    check_tmpfs,
    copy_out_of_tmpfs,
    is_lost,
    link_files,
    make_durable,
    manifest_extra,
    version_dir,
    version_hash,
    weights_manifest,
    write_base_version,
)
from prime_rl.wait import WaitTimeout

Times = dict[str, float]  # seconds
_FILES_POLL_SECONDS = 0.5  # between two looks at whether servers ask for files


def write_version(
    copies: RowCopies,
    copied: Copy,
    source: Source,
    world: World,
    final: Path,
    *,
    version: int,
    incarnation: int,
    reference: LogprobReference | None = None,
    tmpfs: Path | None = None,
) -> Times:
    """Commit a copy as `final`, with config and tokenizer of the source. Every rank calls it and writes its own rows.

    With `tmpfs` the tensors' files lie there, and `final` has links to them. Returns the seconds of writing, hashing
    and committing. Raises UserError if a disk is full, on any rank, or `final` is committed already; nothing new is
    left under the final name.
    """
    copied.finish()
    nonce = broadcast(world, secrets.token_hex(8))
    stage = agree(world, lambda: Stage(final, nonce))
    directory, files_of_rank = stage.path, list(copies.headers)[world.rank :: world.size]

    def allocate() -> None:
        if tmpfs is not None:
            link_files(directory, tmpfs, copies.headers)
        allocate_files(directory, copies.headers, copies.slots)

    def commit() -> None:
        hashed = {name: TensorEntry(**entry) for part in hashes for name, entry in part.items()}
        tensors = {name: hashed[name] for name in copies.slots}  # in the order of the files
        by_file = groupby(tensors.items(), key=lambda item: item[1].file)
        known = {file: version_hash(dict(items)) for file, items in by_file}
        copy_model_files(source, directory, copies.dtype)
        extra = manifest_extra(version, incarnation, tensors, reference=reference)
        stage.commit(step=version, producer="trainer", extra=extra, hashes=known)

    try:
        began = time.perf_counter()
        on_main(world, allocate)
        agree(world, lambda: write_ranges(copies.buffer, directory, copies.files))
        wrote = time.perf_counter()
        hashes = gather(world, agree(world, lambda: hash_files(directory, files_of_rank)))
        hashed = time.perf_counter()
        on_main(world, commit)
    except BaseException:
        stage.abort()
        raise
    return {"write": wrote - began, "hash": hashed - wrote, "commit": time.perf_counter() - hashed}


class _Thread:
    """A background thread that does one task at a time, and the tasks whose results nobody has taken yet."""

    def __init__(self, name: str, owner: str, timeout: float) -> None:
        self.owner, self.timeout = owner, timeout
        self.tasks: list[tuple[str, Future[Any]]] = []  # what each makes, and its result
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    def submit(self, subject: str, work: Callable[[], object]) -> None:
        self.tasks.append((subject, self._pool.submit(work)))

    def results(self, *, leave: int = 0) -> list[Any]:
        """Wait for all tasks but the newest `leave`, and take the results of those that have ended.

        Raises WaitTimeout if a task takes longer than `timeout`, and what the first of them failed with.
        """
        for subject, future in self.tasks[: max(len(self.tasks) - leave, 0)]:
            if wait_for_futures([future], timeout=self.timeout).not_done:
                raise WaitTimeout(subject, self.owner, self.timeout)
        results = []
        for task in [task for task in self.tasks if task[1].done()]:
            self.tasks.remove(task)
            results.append(task[1].result(timeout=0))
        return results

    def close(self) -> bool:
        """Wait for the tasks that are left, and log what failed or is late. Returns False if one is late."""
        self._pool.shutdown(wait=False)
        for subject, future in self.tasks:
            if wait_for_futures([future], timeout=self.timeout).not_done:
                logger.error("{}", WaitTimeout(subject, self.owner, self.timeout))
                return False
            if (failure := future.exception(timeout=0)) is not None:
                logger.error("{}", failure)
        return True


class WeightPublisher:
    """Publish the policy versions of one incarnation of the trainer. Every rank calls every method in the same order.

    One thread commits versions, one at a time; a second makes them durable, a third prunes. `publish` and `prune`
    return at once, `settle` waits. A failure is raised by the next `publish` or `settle`, on every rank.

    Args:
        timeout: Seconds that committing a version may take.
        scorer: Scores the prompt of the logprob check for each version's manifest (None: no logprob check).
        weights: What is kept and where; with `memory` also how servers reach the publisher.
        memory: Publish from memory (else every version is written to files).
        async_level: Versions behind the newest that are still sampled from.
        on_committed: Called in the loop's thread with each committed version and the seconds of its parts
            (`time/export_*`), of the loop's waiting (`time/export`) and of scoring (`time/canary`).
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
        scorer: ReferenceScorer | None = None,
        weights: WeightsConfig | None = None,
        memory: bool = False,
        async_level: int = 0,
        on_committed: Callable[[int, Times], None] = lambda version, times: None,
    ) -> None:
        self.output_dir, self.root = output_dir, output_dir / "weights"
        self.source, self.world, self.dtype = source, world, dtype
        self.config, self.async_level = weights or WeightsConfig(), async_level
        self.incarnation, self._start = 0, 0
        self._on_committed, self._scorer = on_committed, scorer
        self._copies: RowCopies | GatheredCopy = (GatheredCopy if memory else RowCopies)(policy, world, dtype)
        self._copied, self._held = Copy(), 0  # the copy, and its version
        self._publisher: Publisher | None = None  # of rank 0
        self._files_wanted, self._closed = False, threading.Event()
        self._seen: incarnations.Seen = {}
        self._background = background_world(world, timeout)
        self._committer = _Thread("weights", "the thread that commits it", timeout)  # has one task at most
        self._writer = _Thread("durable", "the thread that writes them", timeout)  # of rank 0: versions from memory
        self._pruner = _Thread("prune", "the thread that removes them", timeout)  # of rank 0
        self._waited, self._scoring = 0.0, 0.0

    # ---- the loop's side

    def open(
        self, start: int, *, keep_superseded: bool = False, saved_by: Collection[int] = ()
    ) -> tuple[int, str | None]:
        """Begin an incarnation at step `start` and have that version committed: the base model's manifest for 0.

        The incarnation is committed first: from then on versions beyond `start` of earlier ones do not count. They are
        removed next.

        Args:
            keep_superseded: Keep the newest of them as `given_up_<incarnation>_step_v`.
            saved_by: The incarnations that saved the training states. Rank 0's counts.

        Returns the incarnation's number, and the base model's hash (None: random weights).
        """
        self._start = start
        # Only a policy that is not trained yet is the base model.
        scored = None if self._scorer is None or start > 0 else self._scorer.score(as_exported=False)
        reference = None if scored is None else agree(self.world, scored)
        if self.config.tmpfs is not None and (hosts := len(set(gather(self.world, boot_id())))) > 1:
            raise UserError(f"weights.tmpfs is the memory of one host, and the trainer's ranks are on {hosts}")
        self.incarnation, base = on_main(self.world, lambda: self._open(start, keep_superseded, saved_by, reference))
        self._committer.submit("memory for the weights", self._prepare)
        if start > 0:
            self.ensure(start)
        return self.incarnation, base

    def ensure(self, version: int, *, durable: bool = False) -> None:
        """Commit the policy's weights as `version`, unless this history has files of it already, and wait for it."""
        self.settle()
        if not on_main(self.world, lambda: self._has_files(version)):
            self.publish(version, durable=durable or isinstance(self._copies, RowCopies))
            self.settle()

    def publish(self, version: int, check: Callable[[], object] = lambda: None, *, durable: bool = False) -> None:
        """Make the policy's weights `version`, as they are on the device after the work enqueued so far.

        Args:
            check: Called by the thread before it commits anything. The version is not committed if it raises.
            durable: The version must survive this process and this host.

        Raises UserError if the version before it failed, e.g. since the disk is full or another trainer has gone on.
        """
        self.settle(everything=False)
        began = time.perf_counter()
        scored = None if self._scorer is None else self._scorer.score(compiled=version > self._start)
        copying = time.perf_counter()
        self._scoring += copying - began
        if self._publisher is not None:
            self._publisher.withdraw()
        self._copied, self._held = self._copies.copy(), version
        durable = durable or self._is_saved(version)
        self._committer.submit(f"weights/step_{version}", lambda: self._commit(version, durable, scored, check))
        self._waited += time.perf_counter() - copying

    def before_update(self) -> None:
        """Have the device change the weights only after they are copied. The host does not wait."""
        self._copied.before_update()

    def prune(self, checkpoints: Callable[[], Collection[int]]) -> None:
        """Remove versions that no reader, no sampling ahead and no checkpoint needs (`protocol.prunable`).

        It begins once the version under way is committed. `checkpoints` is called by the thread.
        """
        if self.config.keep is not None and self.world.is_main:
            committing = self._committer.tasks[-1][1] if self._committer.tasks else None
            self._pruner.submit("end of removing old versions", lambda: self._prune(committing, checkpoints))

    def settle(self, *, everything: bool = True) -> None:
        """Wait until versions are committed, durable if they must be, and pruned; UserError if one fails or is late.

        Without `everything`: only for the version under way, and for all removals but the newest (in a tmpfs for all).
        """

        def results() -> Times | None:
            committed = self._committer.results()
            # A tmpfs has no room for what is still being removed.
            self._pruner.results(leave=0 if everything or self.config.tmpfs is not None else 1)
            self._writer.results(leave=0 if everything else len(self._writer.tasks))
            return next((times for times in committed if times is not None), None)

        began = time.perf_counter()
        times = agree(self.world, results)
        self._waited += time.perf_counter() - began
        if times is not None:
            times |= {"time/export": self._waited, "time/canary": self._scoring}
            self._waited = self._scoring = 0.0
            self._on_committed(self._held, times)

    def finish(self, checkpoints: Callable[[], Collection[int]]) -> None:
        """At the end of a run, `prune`, and bring the versions that are left to the disk."""
        self.prune(checkpoints)
        self.settle()
        if self.config.tmpfs is not None:
            on_main(self.world, lambda: [self._bring_to_disk(v) for v in list_steps(self.root)])

    def close(self) -> None:
        """Wait for the threads, for at most `timeout` a task, and log what failed."""
        self._closed.set()
        if self._publisher is not None:
            self._publisher.close()
        all(thread.close() for thread in (self._committer, self._writer, self._pruner))  # up to the first late one

    # ---- in the thread that commits

    def _prepare(self) -> None:
        agree(self._background, self._copies.allocate)
        on_main(self._background, self._open_publisher)

    def _open_publisher(self) -> None:
        copies, config = self._copies, self.config
        if isinstance(copies, GatheredCopy):
            host, timeout = config.host or own_address(), config.timeout
            self._publisher = Publisher(
                copies.buffer, host=host, port=config.port, timeout=timeout, handle=copies.handle
            )
            if config.transport == "auto":
                threading.Thread(target=self._await_files_request, args=(copies,), name="files", daemon=True).start()

    def _commit(
        self,
        version: int,
        durable: bool,
        scored: Callable[[], LogprobReference] | None,
        check: Callable[[], object],
    ) -> Times:
        world, copies, copied = self._background, self._copies, self._copied
        try:
            agree(world, check)
            reference = None if scored is None else agree(world, scored)
            on_main(world, lambda: incarnations.refuse_if_superseded(self.output_dir, self.incarnation))
        finally:
            copy_seconds = copied.finish()
        if isinstance(copies, GatheredCopy):
            times = on_main(world, lambda: self._commit_in_memory(copies, version, durable, reference))
        else:
            times = write_version(
                copies, copied, self.source, world, version_dir(self.root, version),
                version=version, incarnation=self.incarnation, reference=reference,
                tmpfs=None if durable else self.config.tmpfs,
            )  # fmt: skip
        return {f"time/export_{part}": seconds for part, seconds in {"copy": copy_seconds, **times}.items()}

    def _commit_in_memory(
        self, copies: GatheredCopy, version: int, durable: bool, reference: LogprobReference | None
    ) -> Times:
        """Offer a version, and commit a manifest that names the publisher, on rank 0."""
        publisher = self._publisher
        assert publisher is not None
        began = time.perf_counter()
        stream = torch.cuda.Stream(copies.buffer.device) if copies.buffer.is_cuda else None
        with nullcontext() if stream is None else torch.cuda.stream(stream):  # not behind what the training computes
            sums = checksums(copies.buffer, copies.ranges)
        summed = time.perf_counter()
        tensors = {name: replace(entry, checksum=sums[name]) for name, entry in copies.tensors.items()}
        address = publisher.address(fallback=self.config.transport == "auto")
        extra = manifest_extra(version, self.incarnation, tensors, reference=reference, publisher=address)
        stage = Stage(version_dir(self.root, version))
        try:
            publisher.offer(version, self.incarnation, extra["hash"], copies.size)
            stage.commit(step=version, producer="trainer", extra=extra)
        except BaseException:
            stage.abort()
            raise
        if durable or self._files_wanted:
            host = copies.to_host()  # before the next version is gathered, which waits for this thread
            self._writer.submit("files of a version", lambda: self._write_files(copies, version, host, tensors))
        return {"checksum": summed - began, "commit": time.perf_counter() - summed}

    # ---- files of versions that are published from memory, on rank 0

    def _write_files(self, copies: GatheredCopy, version: int, host: Tensor, tensors: dict[str, TensorEntry]) -> None:
        """Make a version durable from a copy in host memory."""
        directory = version_dir(self.root, version)
        sums = checksums(host, copies.ranges)
        if any(sums[name] != entry.checksum for name, entry in tensors.items()):
            raise UserError(f"{directory} was changed on its way to host memory: nothing of it is written")

        def write(stage: Path) -> None:
            copy_model_files(self.source, stage, self.dtype)
            allocate_files(stage, copies.headers, copies.slots)
            write_ranges(host, stage, copies.files)

        try:
            make_durable(directory, write)
        except (CommitError, FileNotFoundError):
            if directory.is_dir():  # else it was pruned meanwhile: nobody needs it
                raise

    def _await_files_request(self, copies: GatheredCopy) -> None:
        """Write versions to files once servers ask for it, from the present one on (`transport = "auto"`)."""
        while not self._closed.wait(_FILES_POLL_SECONDS):  # bounded: it ends with `close`
            reason = incarnations.read_files_request(self.output_dir, self.incarnation)
            if reason is None:
                continue
            logger.warning("weights are written to files from now on: {}", reason)
            self._files_wanted = True
            version, host = self._held, copies.to_host()
            try:
                self._write_files(copies, version, host, weights_manifest(version_dir(self.root, version)).tensors)
            except (UserError, CommitError) as error:  # superseded: the next one is written anyway
                logger.info("version {} is not written: {}", version, error)
            return

    # ---- rank 0's side of the disk

    def _is_saved(self, version: int) -> bool:
        return self.config.save_interval is not None and version % self.config.save_interval == 0

    def _prune(self, committing: Future[Any] | None, checkpoints: Callable[[], Collection[int]]) -> None:
        if committing is not None and committing.exception() is not None:  # bounded: by whoever settles that version
            return
        versions = incarnations.read_versions(self.root, self._seen)
        starts = incarnations.read_incarnations(self.output_dir)
        lease, needed = incarnations.combined_lease(self.output_dir), checkpoints()
        level, keep = self.async_level, self.config.keep
        for version in prunable(versions, starts, lease=lease, async_level=level, keep=keep, checkpoints=needed):
            if not self._is_saved(version):
                prune(version_dir(self.root, version))

    def _open(
        self, start: int, keep_superseded: bool, saved_by: Collection[int], reference: LogprobReference | None
    ) -> tuple[int, str | None]:
        self.root.mkdir(parents=True, exist_ok=True)
        if (tmpfs := self.config.tmpfs) is not None and (keep := self.config.keep) is not None:
            # One version more than is kept (`protocol.prunable`), while that is being written.
            count, size = self.async_level + keep + 2, sum(slot.size for slot in self._copies.slots.values())
            versions = f"the newest, async_level {self.async_level}, keep {keep}, and one that is being written"
            arithmetic = f"{count} versions ({versions}) of {size / 2**30:.2f} GiB"
            check_tmpfs(tmpfs, self.root, count * size, available_bytes(), arithmetic)
        clean_stages(self.root)
        directory = self.source.directory
        base = None if directory is None else write_base_version(self.root, directory, reference).hash
        faults.point(f"incarnation:{incarnations.next_incarnation(self.output_dir, saved_by)}")
        incarnation = incarnations.open_incarnation(
            self.output_dir, start, keep_superseded=keep_superseded, saved_by=saved_by
        )
        for version in list_steps(self.root):
            if is_lost(version_dir(self.root, version)):  # the host was started again
                prune(version_dir(self.root, version))
        self._remove_superseded(incarnation)
        if tmpfs is not None:  # what a killed trainer had just brought to the disk
            used = {path for version in list_steps(self.root) for path in tmpfs_dirs(version_dir(self.root, version))}
            for unused in set(tmpfs.resolve().glob(f"{tmpfs_prefix(self.root)}*")) - used:
                remove(unused)
        return incarnation, base

    def _has_files(self, version: int) -> bool:
        """Whether the disk holds a version, after bringing it there from tmpfs.

        One that is damaged, or was in the memory of an earlier incarnation, is removed: it can be made again.
        """
        if version not in list_steps(self.root):
            return False
        if not (whole := self._bring_to_disk(version)):
            prune(version_dir(self.root, version))
        return whole

    def _bring_to_disk(self, version: int) -> bool:
        """Copy a version from tmpfs to the disk. Returns False for a version that is damaged, or has no files."""
        directory = version_dir(self.root, version)
        try:
            copy_out_of_tmpfs(directory)
            return weights_manifest(directory).publisher is None
        except (CommitError, FileNotFoundError) as error:
            logger.warning("version {} cannot be brought to the disk: {}", version, error)
            return False

    def _remove_superseded(self, incarnation: int) -> None:
        """Remove the versions that the new incarnation supersedes, or keep the newest with files under another name."""
        versions = incarnations.read_versions(self.root)
        superseded = superseded_versions(versions, incarnations.read_incarnations(self.output_dir))
        with_files = [v for v in superseded if weights_manifest(version_dir(self.root, v)).publisher is None]
        kept = superseded_to_keep(
            {v: versions[v] for v in with_files}, incarnations.keeping_incarnations(self.output_dir)
        )
        if kept is not None and not self._bring_to_disk(kept):
            kept = None
        for version in superseded:  # ascending, so that after a crash the newest is still there to be kept
            directory = version_dir(self.root, version)
            if version != kept:
                prune(directory)
            elif (renamed := supersede(directory, incarnation)) is not None:
                logger.warning("version {} is given up; it lies in {} now", version, renamed)


# ---- what a config asks for


def export_dtype(config_dtype: str, source: Source) -> torch.dtype:
    """The dtype of exported weights: `auto` is the source checkpoint's."""
    if config_dtype != "auto":
        return getattr(torch, config_dtype)
    return source.config.dtype if source.config.dtype in DTYPE_NAMES else torch.bfloat16


def uses_memory(weights: WeightsConfig, world: World) -> bool:
    """Whether servers get versions from the trainer's memory: `auto` from a GPU without a tmpfs."""
    auto = world.device.type == "cuda" and weights.tmpfs is None
    return weights.transport == "memory" or (weights.transport == "auto" and auto)


def published_bytes(config: TrainerConfig, source: Source, world: World, parameters: int) -> float:
    """Bytes per parameter of a rank's share that published weights take on the trainer's GPU.

    A server that shares the GPU takes twice as much again for its own copy, which it wants to find free
    (`inference.staging`).
    """
    itemsize = export_dtype(config.weights.dtype, source).itemsize
    if not uses_memory(config.weights, world) or not on_device(parameters * itemsize, world.device):
        return 0.0
    return (3 if config.weights.shares_gpu else 1) * itemsize * world.shards
