"""The policy versions of a run: `weights/step_v`, a Hugging Face directory that transformers and vLLM load, committed beside the loop."""

import shutil
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from loguru import logger

from prime_rl import faults
from prime_rl.config.process_group import ProcessGroupTransport
from prime_rl.errors import UserError
from prime_rl.host_memory import available_bytes
from prime_rl.trainer.canary import CanaryScorer, Scored
from prime_rl.trainer.export import write_staged, write_version
from prime_rl.trainer.model import Policy
from prime_rl.trainer.parallel import World, agree, background_world, gather, on_main
from prime_rl.trainer.source import Source
from prime_rl.trainer.staging import Copy, Staging
from prime_rl.transport.canary import Canary
from prime_rl.transport.commit import CommitError, clean_stages, give_up, list_steps, prune
from prime_rl.transport.lasting import make_lasting
from prime_rl.transport.lives import (
    Seen,
    lost_versions,
    next_life,
    open_life,
    read_foundations,
    read_lives,
    read_versions,
    run_id,
    sparing_lives,
    strictest_lease,
)
from prime_rl.transport.memory import (
    check_room,
    clean_memory,
    memory_dir,
    memory_of,
    note_memory,
    open_memory,
    remove_in_memory,
)
from prime_rl.transport.protocol import prunable, spared, to_set_aside
from prime_rl.transport.shared import CUDA_IPC, host_id
from prime_rl.transport.weights import version_dir, weights_manifest, write_base_version
from prime_rl.wait import WaitTimeout

Times = dict[str, float]


def on_device(transport: ProcessGroupTransport) -> bool:
    """Whether what is exported lies on the trainer's GPU as well."""
    return transport.backend == CUDA_IPC or transport.device_copy


def refuse_outlived(output_dir: Path, life: int) -> None:
    """Raise UserError where a later life than `life` was opened: two trainers must not write one history."""
    newest = max(read_lives(output_dir), default=life)
    if newest > life:
        raise UserError(
            f"another trainer has gone on with the run in {output_dir} (life {newest}; this one is {life}): this one ends and commits no more"
        )


@dataclass(frozen=True)
class InTmpfs:
    """Where versions lie that need not outlive the host, and how many at the same time at most, with what makes so many."""

    tmpfs: Path
    versions: int
    arithmetic: str


class Versions:
    """The policy versions of one life of the trainer, in `output_dir/weights`. Every rank calls every method, at the same point of the run.

    Versions are written by one thread, in their order, and pruned by another: `commit` and `prune` return at once, `settle` waits. As many versions
    are under way as there are staging buffers, at most, and beside them what the one before made superfluous is removed. What has failed is raised
    by a later `commit` or by `settle`, on every rank; nothing is committed after it.

    Args:
        timeout: Seconds that committing one may take.
        overlapping: Versions follow each other so fast that one may be copied while the one before it is still being written, where there is
            host memory for that.
        transport: Versions that need not last are sent from the memory that they are staged in (None: all are written).
        canary: Scores what goes into each version's manifest for those who serve it (None: nobody compares).
        memory: For the tensors of versions that nobody needs after a crash of the host (None: all lie on the disk).
        anchor_every: Versions tell what has changed since the one before, but for one in so many (None: each is there in full).
        on_committed: Told, in the loop's thread, each version that was settled and the seconds that its parts took (`export_*`); `export` is
            what the loop waited for, `canary` what it took to score the canary, or to tell the device to.
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
        memory: InTmpfs | None = None,
        anchor_every: int | None = None,
        transport: ProcessGroupTransport | None = None,
        on_committed: Callable[[int, Times], None] = lambda version, times: None,
    ) -> None:
        self.output_dir, self.root = output_dir, output_dir / "weights"
        self.source, self.world = source, world
        self.life, self._start, self._overlapping = 0, 0, overlapping
        self._seen: Seen = {}
        self._timeout, self._on_committed, self._canary = timeout, on_committed, canary
        there = transport is not None and on_device(transport)
        self._staging = Staging(policy, world, dtype, told=anchor_every is not None, sent=transport is not None, on_device=there)  # fmt: skip
        self._in_tmpfs, self._anchor_every = memory, anchor_every
        self._memory: Path | None = None  # of this run, under the tmpfs
        self._had_memory = True  # some version may lie in memory
        self._transport = transport
        self._sent: int | None = None  # the newest version, if that was sent: what was copied last are its tensors
        self._background = background_world(world, timeout)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._pruner = ThreadPoolExecutor(1, thread_name_prefix="prune")
        self._copied = Copy(0, 0.0)
        self._pending: list[tuple[int, Future[Times | None]]] = []  # None: not committed, as the one before it failed
        self._others: list[Future[object]] = []  # what the first thread does beside
        self._prunes: list[Future[None]] = []  # of rank 0
        self._waited, self._scoring = 0.0, 0.0

    def open(self, start: int, *, spares: bool = False, saved_by: Collection[int] = ()) -> tuple[int, str | None]:
        """Begin a life that starts from step `start`, with that version committed: the base model's manifest for 0.

        The life is committed first: from then on nobody counts versions beyond `start` that earlier lives made. They are removed next.

        Args:
            spares: Keep the newest of them as `given_up_<life>_step_v`.
            saved_by: The lives that saved the training states. Rank 0's counts.

        Returns:
            The life's number, and the base model's hash (None: random weights).
        """
        self._start = start
        # Only a policy that is not trained yet is the base model.
        scored = None if self._canary is None or start > 0 else self._canary.score(as_exported=False)
        base_canary = None if scored is None else agree(self.world, scored.read)
        self._check_hosts()
        self.life, base, memory = on_main(self.world, lambda: self._open(start, spares, saved_by, base_canary))
        self._memory = None if memory is None else Path(memory)
        if self._overlapping and all(gather(self.world, self._staging.affords_two())):
            self._staging.double()
        self._others.append(self._thread.submit(self._prepare))
        if start > 0:
            self.ensure(start)
        return self.life, base

    def _check_hosts(self) -> None:
        hosts = len(set(gather(self.world, host_id())))
        if hosts > 1 and self._in_tmpfs is not None:
            raise UserError(
                f"weights.transport.tmpfs is the memory of one host, and the trainer's ranks are on {hosts}"
            )
        if hosts > 1 and self._staging.assembles:
            kind = "process-group" if self._anchor_every is None else "filesystem-delta"
            raise UserError(
                f"trainer.weights.transport.type {kind} needs all ranks of the trainer on one host, and they are on {hosts}: use filesystem"
            )

    def ensure(self, version: int) -> None:
        """Commit the policy's weights as `version` on the disk, unless this history has that version there already, and wait for it."""
        self.settle()
        if not on_main(self.world, lambda: self._lasts(version)):
            self.commit(version, lasting=True)
            self.settle()

    def leave_memory(self, async_level: int, keep: int | None, checkpoints: Callable[[], Collection[int]]) -> None:
        """Bring what lies in memory and is kept for its own sake (`prune`) to the disk, and remove the rest: nobody is there any more who would."""
        self.settle()
        if self._memory is not None and keep is not None:
            on_main(self.world, lambda: self._leave_memory(async_level, keep, checkpoints))

    def commit(self, version: int, check: Callable[[], object] = lambda: None, *, lasting: bool = False) -> None:
        """Let the policy's weights, as the device has them after what it is told so far, become `version`.

        Args:
            check: Called by the thread before it writes anything. What it raises keeps the version from being committed.
            lasting: It must outlive this process and this host's memory: its tensors are written, to the disk.

        Raises:
            UserError: an earlier one failed, for instance because the disk is full, or another trainer has gone on with the run.
        """
        self._settle(versions=self._staging.own.count - 1, prunes=1)
        scoring = time.perf_counter()
        scored = None if self._canary is None else self._canary.score(compiled=version > self._start)
        began = time.perf_counter()
        self._scoring += began - scoring
        self._staging.retire()
        self._copied = self._staging.copy()
        before = self._pending[-1][1] if self._pending else None
        committed = self._thread.submit(
            self._commit, version, lasting, self._copied, scored, check, before, list(self._prunes)
        )
        self._pending.append((version, committed))
        self._sent = version if self._transport is not None and not lasting else None
        self._waited += time.perf_counter() - began

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
        """Wait until the versions that are under way are committed, and what they make superfluous is gone; for each at most `timeout`.

        Raises:
            UserError: it failed, or takes longer.
        """
        self._settle(versions=0, prunes=0)

    def _settle(self, versions: int, prunes: int) -> None:
        """The same, but let the newest `versions` and `prunes` go on."""
        if not self._pending and not self._others and not on_main(self.world, lambda: bool(self._prunes)):
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

    def close(self) -> None:
        """Let the threads finish what they are at, for at most `timeout` each version, and say what failed."""
        self._thread.shutdown(wait=False)
        self._pruner.shutdown(wait=False)
        for after in self._one_by_one(versions=0):
            if (late := self._late(after, prunes=None if after else 0)) is not None:
                logger.error("{}", late)
                self._staging.abandon()  # a buffer may still be read
                self._staging.close_sender()
                return
        self._staging.close()
        left: list[Future[Any]] = [*self._others, *self._prunes, *(written for _, written in self._pending)]
        for failure in filter(None, (future.exception(timeout=0) for future in left)):
            logger.error("{}", failure)

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
            version, written = self._pending.pop(0)
            if written.exception(timeout=0) is not None:  # the thread gives up those after it at once
                wait_for_futures([after for _, after in self._pending], timeout=self._timeout)
                self._pending = [(after, future) for after, future in self._pending if not future.done()]
            times = written.result(timeout=0)
        while self._old(prunes) or (self._prunes and self._prunes[0].done()):
            self._prunes.pop(0).result(timeout=0)
        return (None, {}) if times is None else (version, times)

    def _late(self, versions: int, prunes: int | None) -> WaitTimeout | None:
        """What the threads have not done in time, but for the newest `versions` and `prunes` (None: all), after waiting for it."""
        owed: list[tuple[str, str, Future[Any]]] = [
            *(("host memory for the weights", "the thread that makes it ready", other) for other in self._others),
            *(
                (f"weights/step_{version}", "the thread that writes it", written)
                for version, written in self._pending[: max(len(self._pending) - versions, 0)]
            ),
            *(("end of removing old versions", "the thread that removes them", one) for one in self._old(prunes)),
        ]
        late = wait_for_futures([future for *_, future in owed], timeout=self._timeout).not_done
        return next((WaitTimeout(what, who, self._timeout) for what, who, future in owed if future in late), None)

    def _old(self, prunes: int | None) -> list[Future[None]]:
        """All but the newest `prunes`."""
        return [] if prunes is None else self._prunes[: max(len(self._prunes) - prunes, 0)]

    def _commit(
        self,
        version: int,
        lasting: bool,
        copied: Copy,
        scored: Scored | None,
        check: Callable[[], object],
        before: "Future[Times | None] | None",
        prunes: Collection["Future[None]"],
    ) -> Times | None:
        """In the thread. `before` is the version before this one, which the thread is done with; `prunes` are under way, on rank 0."""
        world = self._background
        try:
            if before is not None and not _is_committed(before):
                return None
            agree(world, check)
            canary = None if scored is None else agree(world, scored.read)
            on_main(world, lambda: refuse_outlived(self.output_dir, self.life))
            memory = None if lasting or self._memory is None else version_dir(self._memory, version)
            final = version_dir(self.root, version)
            on_main(world, lambda: self._make_room(final if memory is None else memory, prunes))
            times = write_version(
                self._staging,
                copied,
                self.source,
                world,
                final,
                version=version,
                incarnation=self.life,
                canary=canary,
                memory=memory,
                anchor_every=self._anchor_every,
                full=lasting,
                send=self._transport is not None and not lasting,
            )
        finally:
            cast, copy = copied.finish()
        return {f"time/export_{part}": seconds for part, seconds in {"cast": cast, "copy": copy, **times}.items()}

    def _prepare(self) -> None:
        """In the thread, before the first version."""
        agree(self._background, self._staging.allocate)
        self._staging.open_whole(self._background)
        if (transport := self._transport) is not None:
            on_main(self._background, lambda: self._staging.open_sender(transport))

    def _make_room(self, place: Path, prunes: Collection["Future[None]"]) -> None:
        """Where there is none for one version more, let the older ones be gone before it is written."""
        if shutil.disk_usage(place.parent).free < self._staging.file_bytes:
            wait_for_futures(prunes, timeout=self._timeout)

    def _prune(
        self,
        under_way: Future[Times | None] | None,
        async_level: int,
        keep: int,
        checkpoints: Callable[[], Collection[int]],
    ) -> None:
        """In the other thread, on rank 0."""
        if under_way is not None:
            under_way.exception()  # bounded: by whoever waits for this version, and says what has failed
            if not _is_committed(under_way):
                return
        versions, lives = read_versions(self.root, self._seen), read_lives(self.output_dir)
        lease, needed, built = strictest_lease(self.output_dir), checkpoints(), read_foundations(self.root, self._seen)
        for version in prunable(
            versions, lives, lease=lease, async_level=async_level, keep=keep, checkpoints=needed, builds_on=built
        ):
            directory = version_dir(self.root, version)
            try:
                self._remove(version)
            except OSError as error:
                raise UserError(f"{directory} cannot be removed ({error.strerror}); nothing is lost by it") from error

    def _open(
        self, start: int, spares: bool, saved_by: Collection[int], canary: Canary | None
    ) -> tuple[int, str | None, str | None]:
        self.root.mkdir(parents=True, exist_ok=True)
        self._check_room()
        clean_stages(self.root)
        directory = self.source.directory
        base = None if directory is None else write_base_version(self.root, directory, canary).hash
        faults.point(f"life:{next_life(self.output_dir, saved_by)}")
        life = open_life(self.output_dir, start, spares=spares, saved_by=saved_by)
        for version in lost_versions(self.root):  # the host was started again
            prune(version_dir(self.root, version))
        self._set_aside(life)
        memory = self._open_memory()
        held = [memory_of(version_dir(self.root, version)) for version in list_steps(self.root)]
        self._had_memory = memory is not None or any(place is not None for place in held)
        return life, base, None if memory is None else str(memory)

    def _check_room(self) -> None:
        if (place := self._in_tmpfs) is not None:
            root = memory_dir(place.tmpfs, self.output_dir, run_id(self.output_dir) or "none")
            size = self._staging.file_bytes
            check_room(root, place.versions, size, place.arithmetic, available_bytes())

    def _open_memory(self) -> Path | None:
        """This run's place in memory, without what a dead trainer has left there."""
        if self._in_tmpfs is None:
            return None
        run = run_id(self.output_dir)
        assert run is not None, "each life file holds it"
        root = memory_dir(self._in_tmpfs.tmpfs, self.output_dir, run)
        note_memory(root, self.output_dir)
        open_memory(root, self.output_dir)
        held = (memory_of(version_dir(self.root, version)) for version in list_steps(self.root))
        clean_memory(root, {memory.directory for memory in held if memory is not None})
        return root

    def _lasts(self, version: int) -> bool:
        """Whether there is such a version, in full on the disk. One that is damaged is removed: it can be committed anew."""
        if version in list_steps(self.root) and not self._make_lasting(version):
            self._remove(version)
        return version in list_steps(self.root)

    def _make_lasting(self, version: int) -> bool:
        """What is in memory goes once the disk has it. Returns False for a version that is damaged, or was sent in another life."""
        directory = version_dir(self.root, version)
        memory = memory_of(directory)
        write = partial(write_staged, self._staging, self._copied) if version == self._sent else None
        try:
            moved = make_lasting(directory, write)
        except CommitError as error:
            logger.warning("version {} cannot be brought to the disk: {}", version, error)
            return False
        if moved:
            remove_in_memory(memory, self.output_dir, run_id(self.output_dir))
        return True

    def _leave_memory(self, async_level: int, keep: int, checkpoints: Callable[[], Collection[int]]) -> None:
        versions, lives, lease = (
            read_versions(self.root, self._seen),
            read_lives(self.output_dir),
            strictest_lease(self.output_dir),
        )
        needed = checkpoints()
        dropped = prunable(versions, lives, lease=lease, async_level=async_level, keep=keep, checkpoints=needed)
        for version in sorted(set(list_steps(self.root)).difference(dropped), reverse=True):
            if memory_of(version_dir(self.root, version)) is not None:
                self._make_lasting(version)
        self._prune(None, async_level, keep, checkpoints)  # nothing builds on the others any more
        if self._memory is not None and not any(self._memory.iterdir()):
            self._memory.rmdir()

    def _remove(self, version: int) -> None:
        """The tensors first: a version without them counts as not there."""
        directory = version_dir(self.root, version)
        if self._had_memory:  # reading a manifest of many tensors takes the interpreter from the loop
            remove_in_memory(memory_of(directory), self.output_dir, run_id(self.output_dir))
        prune(directory)

    def _set_aside(self, life: int) -> None:
        versions = read_versions(self.root)
        given_up = to_set_aside(versions, read_lives(self.output_dir))
        there = [version for version in given_up if weights_manifest(version_dir(self.root, version)).sender is None]
        kept = spared({version: versions[version] for version in there}, sparing_lives(self.output_dir))
        if kept is not None and not self._make_lasting(kept):  # while what it builds on is there
            kept = None
        for version in given_up:  # ascending, so that after a crash the newest is still there to be kept
            if version != kept:
                self._remove(version)
            elif (aside := give_up(version_dir(self.root, version), life)) is not None:
                logger.warning("version {} is given up; it lies in {} now", version, aside)


def _is_committed(written: "Future[Times | None]") -> bool:
    """Whether a version that the thread is done with was committed."""
    return written.exception(timeout=0) is None and written.result(timeout=0) is not None
