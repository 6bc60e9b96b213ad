"""Policy versions of a run: published to servers beside the loop, and committed under `weights/step_v`.

`filesystem`: a Hugging Face directory that transformers and vLLM load, or PEFT's of an adapter. `memory`: only a
manifest; the tensors come from the trainer's memory (`transport/exchange.py`), and versions that must be durable are
written to files afterwards.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from loguru import logger
from torch import Tensor

from prime_rl.config.trainer import LoRAConfig, TrainerConfig, WeightsConfig
from prime_rl.errors import UserError
from prime_rl.trainer.model import Policy
from prime_rl.trainer.parallel import Moment, World, agree, background_world, gather, on_main, seconds
from prime_rl.trainer.reference_scorer import ReferenceScorer
from prime_rl.trainer.source import Source
from prime_rl.trainer.weight_copy import DTYPE_NAMES, WeightCopy, on_device
from prime_rl.transport import incarnations
from prime_rl.transport.commit import CommitError, Stage, clean_stages, list_steps, prune, step_dir
from prime_rl.transport.exchange import Publisher, checksums, own_address
from prime_rl.transport.protocol import BASE, prunable, superseded_versions
from prime_rl.transport.weights import (
    AdapterDescription,
    LogprobReference,
    file_hashes,
    make_durable,
    manifest_extra,
    version_hash,
    weights_manifest,
    write_base_version,
)
from prime_rl.wait import TaskThread

Times = dict[str, float]  # seconds
_POLL_SECONDS = 0.02
_REMOVAL = "end of removing old versions"


def write_version(
    copies: WeightCopy,
    source: Source,
    final: Path,
    *,
    version: int,
    incarnation: int,
    reference: LogprobReference | None = None,
    adapter: AdapterDescription | None = None,
) -> Times:
    """Commit a finished copy as `final`, with config and tokenizer of the source. Only rank 0 calls it.

    Returns the seconds of copying to the host, of writing and of committing. Raises UserError if the disk is full, or
    CommitError if `final` is committed already; nothing new is left under the final name.
    """
    began = time.perf_counter()
    host = copies.to_host() if copies.buffer.is_cuda else copies.buffer
    copied = time.perf_counter()
    with Stage(final) as stage:
        tensors = copies.write_files(host, source, stage.path)
        wrote = time.perf_counter()
        extra = manifest_extra(version, incarnation, tensors, reference=reference, adapter=adapter)
        stage.commit(step=version, producer="trainer", extra=extra, hashes=file_hashes(tensors))
    return {"host": copied - began, "write": wrote - copied, "commit": time.perf_counter() - wrote}


class WeightPublisher:
    """Publish the policy versions of one incarnation of the trainer. Every rank calls every method in the same order.

    One thread commits versions, one at a time; a second one, of rank 0, writes the files of durable versions and
    removes versions that no reader, no sampling ahead and no checkpoint needs (`protocol.prunable`). `publish` returns
    at once, `settle` waits. A failure is raised by the next `publish` or `settle`, on every rank.

    Args:
        timeout: Seconds that committing a version may take.
        scorer: Scores the prompt of the logprob check for each version's manifest (None: no logprob check).
        weights: What is kept; with `memory` also how servers reach the publisher.
        memory: Publish from memory (else every version is written to files).
        gpu: The copy of the weights may take memory of the GPU.
        async_level: Versions behind the newest that are still sampled from.
        lora: The adapters that are trained (None: all weights).
        needed: Returns the checkpoints whose versions stay. Called by a thread.
        on_committed: Called in the loop's thread with each committed version and the seconds of its parts
            (`time/export_*`), of the loop's waiting (`time/export`) and of scoring (`time/logprob_check`).
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
        gpu: bool = False,
        async_level: int = 0,
        lora: LoRAConfig | None = None,
        needed: Callable[[], Collection[int]] = lambda: (),
        on_committed: Callable[[int, Times], None] = lambda version, times: None,
    ) -> None:
        self.output_dir, self.root = output_dir, output_dir / "weights"
        self.source, self.world = source, world
        self.config, self.memory, self.async_level = weights or WeightsConfig(), memory, async_level
        self.incarnation, self._start = 0, 0
        self._needed, self._on_committed, self._scorer = needed, on_committed, scorer
        self._copies = WeightCopy(policy, world, dtype, gpu=gpu, lora=lora)
        self._from_adapter = lora is not None and lora.adapter is not None
        self._adapter: AdapterDescription | None = None  # of rank 0
        self._copied: tuple[Moment, Moment] = 0.0, 0.0  # when the copy of `_version` begins and ends
        self._version = 0
        self._publisher: Publisher | None = None  # of rank 0
        self._background = background_world(world, timeout)
        self._committer = TaskThread("weights", "the thread that commits it", timeout)  # has one task at most
        self._disk = TaskThread("disk", "the thread that writes and removes them", timeout)
        self._waited, self._scoring = 0.0, 0.0

    # ---- the loop's side

    def open(self, start: int) -> tuple[int, str | None]:
        """Begin an incarnation at step `start`; for 0 also commit the base model's manifest as version 0.

        The incarnation is committed first: from then on versions beyond `start` of earlier ones do not count. They are
        removed next. A later `start` has its version committed by `ensure`.

        Returns the incarnation's number, and the base model's hash (None: random weights).
        """
        self._start = start
        # Only a policy that is not trained yet is the base model.
        trained = start > 0 or self._from_adapter
        scored = None if self._scorer is None or trained else self._scorer.score(as_exported=False)
        reference = None if scored is None else agree(self.world, scored)
        self.incarnation, base = on_main(self.world, lambda: self._open(start, reference))
        self._committer.submit("memory for the weights", lambda: on_main(self._background, self._prepare))
        if self._from_adapter and start == 0 and base is not None:
            self.ensure(0, durable=True)  # servers begin with it
        return self.incarnation, base

    def ensure(self, version: int, *, durable: bool = False) -> None:
        """Commit the policy's weights as `version`, unless this lineage has files of it already, and wait for it."""
        self.settle()
        if not on_main(self.world, lambda: self._has_files(version)):
            self.publish(version, durable=durable)
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
        self._copied, self._version = self._copies.copy(), version
        durable = durable or self._is_saved(version)
        self._committer.submit(f"weights/step_{version}", lambda: self._commit(version, durable, scored, check))
        self._waited += time.perf_counter() - copying

    @property
    def idle(self) -> bool:
        """Whether this rank commits, writes and removes nothing in the background."""
        return self._committer.idle and self._disk.idle

    def settle(self, *, everything: bool = True, unless: Callable[[], bool] | None = None) -> None:
        """Wait until the version under way is committed; UserError if it fails or is late.

        Args:
            everything: Also until durable versions are written and old ones removed.
            unless: Ends the wait early: the same answer on every rank.
        """

        def results() -> Times | None:
            committed = self._committer.results()
            self._disk.results(wait=everything)
            return next((times for times in committed if times is not None), None)

        began = time.perf_counter()
        while unless is not None:  # bounded: by the time that a version may take
            waited = time.perf_counter() - began
            if all(gather(self.world, waited > self._committer.seconds or self.idle)):
                break
            if unless():
                self._waited += time.perf_counter() - began
                return
            time.sleep(_POLL_SECONDS)
        times = agree(self.world, results)
        self._waited += time.perf_counter() - began
        if times is not None:
            times |= {"time/export": self._waited, "time/logprob_check": self._scoring}
            self._waited = self._scoring = 0.0
            self._on_committed(self._version, times)

    def finish(self) -> None:
        """Remove what is not needed any more at the end of a run, when the last checkpoint is saved."""
        self.settle()
        self._submit_prune()
        self.settle()

    def close(self) -> None:
        """Wait for the threads, for at most `timeout` a task, and log what failed."""
        if self._publisher is not None:
            self._publisher.close()
        for failure in [*self._committer.close(), *self._disk.close()]:
            logger.error("{}", failure)

    # ---- in the thread that commits

    def _prepare(self) -> None:
        copies, config = self._copies, self.config
        copies.allocate()
        if self.memory:
            host, timeout = config.host or own_address(), config.timeout
            self._publisher = Publisher(
                copies.buffer, host=host, port=config.port, timeout=timeout, handle=copies.handle
            )

    def _commit(
        self, version: int, durable: bool, scored: Callable[[], LogprobReference] | None, check: Callable[[], object]
    ) -> Times:
        world = self._background
        try:
            agree(world, check)
            reference = None if scored is None else agree(world, scored)
            on_main(world, lambda: incarnations.refuse_if_superseded(self.output_dir, self.incarnation))
        finally:
            copy_seconds = seconds(*self._copied)
        final = step_dir(self.root, version)
        if self.memory:
            times = on_main(world, lambda: self._offer(final, version, durable, reference))
        else:
            files, own = (self._copies, self.source, final), self.incarnation
            write = partial(write_version, *files, version=version, incarnation=own)
            times = on_main(world, lambda: write(reference=reference, adapter=self._adapter))
        if all(subject != _REMOVAL or future.done() for subject, future in self._disk.tasks):
            self._submit_prune()
        return {f"time/export_{part}": spent for part, spent in {"copy": copy_seconds, **times}.items()}

    def _offer(self, final: Path, version: int, durable: bool, reference: LogprobReference | None) -> Times:
        """Offer a version, and commit a manifest that names the publisher."""
        began, copies, publisher = time.perf_counter(), self._copies, self._publisher
        assert publisher is not None
        module = torch.get_device_module(copies.buffer.device)
        with module.stream(module.Stream(copies.buffer.device)):  # not behind what the training computes
            sums = checksums(copies.buffer, copies.ranges)
        summed = time.perf_counter()
        tensors = {name: replace(entry, checksum=sums[name]) for name, entry in copies.tensors.items()}
        make = partial(manifest_extra, version, self.incarnation, tensors, publisher=publisher.address())
        extra = make(reference=reference, adapter=self._adapter)
        with Stage(final) as stage:
            publisher.offer(version, self.incarnation, extra["hash"], copies.size)
            stage.commit(step=version, producer="trainer", extra=extra)
        if durable:
            host = copies.to_host()  # before the next version is gathered, which waits for this thread
            self._disk.submit("files of a version", lambda: self._write_files(version, host, sums))
        return {"checksum": summed - began, "commit": time.perf_counter() - summed}

    # ---- rank 0's side of the disk

    def _write_files(self, version: int, host: Tensor, sums: dict[str, str]) -> None:
        """Make a version that is published from memory durable, from a copy in host memory."""
        directory = step_dir(self.root, version)
        if checksums(host, self._copies.ranges) != sums:
            raise UserError(f"{directory} was changed on its way to host memory: nothing of it is written")
        try:
            make_durable(directory, lambda stage: self._copies.write_files(host, self.source, stage))
        except (CommitError, FileNotFoundError):
            if directory.is_dir():  # else it was pruned meanwhile: nobody needs it
                raise

    def _is_saved(self, version: int) -> bool:
        return self.config.save_interval is not None and version % self.config.save_interval == 0

    def _submit_prune(self) -> None:
        if self.config.keep is not None and self.world.is_main:
            self._disk.submit(_REMOVAL, self._prune)

    def _prune(self) -> None:
        versions = incarnations.read_versions(self.root)
        starts, lease = incarnations.read_incarnations(self.output_dir), incarnations.read_lease(self.output_dir)
        level, keep, needed = self.async_level, self.config.keep, self._needed()
        for version in prunable(versions, starts, lease=lease, async_level=level, keep=keep, checkpoints=needed):
            if not self._is_saved(version):
                prune(step_dir(self.root, version))

    def _open(self, start: int, reference: LogprobReference | None) -> tuple[int, str | None]:
        self.root.mkdir(parents=True, exist_ok=True)
        clean_stages(self.root)
        directory = self.source.directory
        if directory is None:
            base = None
        elif self._from_adapter:  # which becomes version 0
            if start == 0 and BASE in list_steps(self.root) and weights_manifest(step_dir(self.root, BASE)).base:
                raise UserError(f"{self.root} began without an adapter: leave lora.adapter out, or start with --clean")
            base = version_hash(self.source.tensors)
        else:
            base = write_base_version(self.root, directory, reference, self.source.tensors).hash
        if self._copies.is_adapter:
            self._adapter = AdapterDescription(base or "", self._copies.adapter_config(self.source))
        incarnation = incarnations.open_incarnation(self.output_dir, start)
        versions, opened = incarnations.read_versions(self.root), incarnations.read_incarnations(self.output_dir)
        for version in superseded_versions(versions, opened):
            prune(step_dir(self.root, version))
        return incarnation, base

    def _has_files(self, version: int) -> bool:
        """Whether a version has files. One that was in the memory of an earlier incarnation is removed."""
        directory = step_dir(self.root, version)
        if version not in list_steps(self.root):
            return False
        if weights_manifest(directory).publisher is None:
            return True
        prune(directory)
        return False


# ---- what a config asks for


def export_dtype(config_dtype: str, source: Source) -> torch.dtype:
    """The dtype of exported weights: `auto` is the source checkpoint's."""
    if config_dtype != "auto":
        return getattr(torch, config_dtype)
    return source.config.dtype if source.config.dtype in DTYPE_NAMES else torch.bfloat16


def uses_memory(weights: WeightsConfig, world: World) -> bool:
    """Whether servers get versions from the trainer's memory: `auto` from a GPU."""
    return weights.transport == "memory" or (weights.transport == "auto" and world.device.type == "cuda")


def published_bytes(config: TrainerConfig, source: Source, world: World, parameters: int) -> float:
    """Bytes per parameter of a rank's share that the copy of the weights takes on the trainer's GPU.

    A server that shares the GPU takes twice as much again for its own copy, which it wants to find free
    (`inference.staging`).
    """
    if config.lora is not None and config.lora.serve == "adapter":
        return 0.0  # next to nothing
    itemsize = export_dtype(config.weights.dtype, source).itemsize
    if not on_device(parameters * itemsize, world.device):
        return 0.0
    shared = config.weights.shares_gpu and uses_memory(config.weights, world)
    return (3 if shared else 1) * itemsize * world.shards
