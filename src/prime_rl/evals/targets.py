"""What is evaluated: what a server holds as it is, or the base model and the versions of a directory, one after the other."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from loguru import logger

from prime_rl.config import ConfigError, OrchestratorConfig, SFTConfig, parse
from prime_rl.config.eval import EvalEnv
from prime_rl.config.shared import EnvConfig
from prime_rl.errors import UserError
from prime_rl.monitor.status import read_status
from prime_rl.orchestrator.trainer_watch import GONE_SECONDS, TrainerWatch
from prime_rl.transport.commit import CommitError, list_steps
from prime_rl.transport.incarnations import EVAL, drop_lease, read_incarnations, read_lease, write_lease
from prime_rl.transport.protocol import BASE, Lease, current_incarnation
from prime_rl.transport.weights import WeightsManifest, never_written, version_dir, weights_manifest

if TYPE_CHECKING:
    from prime_rl.config import EvalConfig

LOOK_SECONDS = 1.0  # between two looks at the directory
_WRITERS = ("trainer", "sft")  # processes that commit versions, by the names of their status


@dataclass(frozen=True)
class Target:
    """One policy.

    Attributes:
        name: Of its directory: `step_<version>`, or `api`.
        hash: Of its weights; empty where nobody says.
        weights: The committed version that servers are to load; None where they are to serve their base (`base`), or stay as they are.
    """

    name: str
    version: int
    hash: str = ""
    weights: WeightsManifest | None = None
    base: bool = False


API = Target("api", 0)


@dataclass
class Versions:
    """The versions of `weights_dir` that are to be evaluated, and why some were not."""

    directory: Path
    skipped: dict[int, str] = field(default_factory=dict)
    given: dict[int, str] = field(default_factory=dict)  # hash of each that was

    def base(self) -> Target:
        """The model that the servers were started with. It need not be the one that the run started from."""
        return Target(f"step_{BASE}", BASE, base=True)

    def find(self, version: int) -> Target | None:
        """A committed version; None, and the reason in `skipped`, where servers cannot load it."""
        directory = version_dir(self.directory, version)
        try:
            manifest = weights_manifest(directory)
        except CommitError as error:
            self.skip(version, f"{error}" if directory.is_dir() else "it was removed before it was its turn")
            return None
        if manifest.publisher is not None:
            self.skip(version, never_written(directory))
            return None
        if is_lost(manifest):
            self.skip(version, f"its tensors were in memory ({manifest.files}), and are there no more")
            return None
        self.given[version] = manifest.hash
        self.skipped.pop(version, None)  # made again since it was
        return Target(f"step_{version}", version, manifest.hash, manifest)

    def skip(self, version: int, why: str) -> None:
        """Say and remember that `version` is not evaluated."""
        logger.warning("version {} is not evaluated: {}", version, why)
        self.skipped[version] = why


def is_lost(manifest: WeightsManifest) -> bool:
    """Whether a version that was committed is there no more, or its tensors are not."""
    return not manifest.directory.is_dir() or (manifest.tmpfs is not None and manifest.tmpfs.gone)


def check_versions(config: "EvalConfig") -> None:
    """What can be known before anything starts: the directory and the named versions are there.

    Raises:
        UserError: they are not; it lists those that are.
    """
    if config.weights_dir is None or config.follow:
        return
    found = list_steps(config.weights_dir)
    there = ", ".join(map(str, found)) or "none"
    if not found and (config.weights_dir / "weights").is_dir():
        raise UserError(
            f"weights_dir: {config.weights_dir} is a run: its versions are in {config.weights_dir / 'weights'}"
        )
    if not config.weights_dir.is_dir():
        raise UserError(f"weights_dir: {config.weights_dir} is not there")
    if missing := [step for step in config.steps if step not in found and step != BASE]:
        named = ", ".join(map(str, missing))
        raise UserError(f"steps: there is no version {named} in {config.weights_dir} (there: {there})")
    if not config.steps and not _chosen(config, found):
        raise UserError(
            f"weights_dir: there is no version to evaluate in {config.weights_dir} (there: {there}; --follow waits for some)"
        )


def environments_of_run(run_dir: Path) -> tuple[list[EvalEnv], Path | None]:
    """What a run was evaluated on while it trained, else what it was trained on, and the file that says so; nothing where there is no run, or one of
    `sft` without evaluation.

    Raises:
        UserError: the file was written for other settings than today's.
    """
    from prime_rl.orchestrator.evaluation import eval_environments

    environments: Sequence[EnvConfig] = []
    path = None
    try:
        if (path := run_dir / "configs" / "orchestrator.toml").is_file():
            of_run = parse(OrchestratorConfig, ["@", str(path)], {})
            environments = eval_environments(of_run) or of_run.environments
        elif (path := run_dir / "configs" / "sft.toml").is_file():
            evaluation = parse(SFTConfig, ["@", str(path)], {}).eval
            environments = [] if evaluation is None else evaluation.environments
    except ConfigError as error:
        raise UserError(
            f"no environment: give --environment-ids ({path} cannot be read: {error.problems[0]})"
        ) from error
    names = set(EnvConfig.model_fields)
    return [EvalEnv(**env.model_dump(include=names)) for env in environments], path


async def targets(
    config: "EvalConfig", versions: Versions, on_wait: Callable[[str, str, float], None]
) -> AsyncIterator[Target]:
    """The base and the versions to evaluate, in their order; with `follow` those that are committed meanwhile, too, until who writes them has ended."""
    named = sorted(set(config.steps) - {BASE})
    chosen = named if config.steps else _chosen(config, list_steps(versions.directory))
    if config.eval_base or BASE in config.steps:
        yield versions.base()
    if not config.follow:
        for version in chosen:
            if (target := versions.find(version)) is not None:
                yield target
        return
    async for target in _follow(config, versions, on_wait):
        yield target


async def _follow(
    config: "EvalConfig", versions: Versions, on_wait: Callable[[str, str, float], None]
) -> AsyncIterator[Target]:
    run_dir = versions.directory.parent
    writer, hold = Writer(run_dir), partial(_hold, run_dir) if config.hold else None
    while True:  # bounded: by the end of the run that is followed, which says so or gives no sign for long
        ended = writer.ended()  # before the look: what was committed before the last word is seen
        found = list_steps(versions.directory)
        last = {max(found)} - {BASE} if found and ended else set()  # of the run: worth knowing, whatever the interval
        fresh = [version for version in sorted({*_chosen(config, found), *last}) if _is_new(versions, version)]
        if hold is not None:
            hold(min([*fresh, _next_after(versions, found, config.interval or 1)]))
        if fresh:
            if (target := versions.find(fresh[0])) is not None:
                yield target
            continue
        if ended:
            break
        on_wait("the next version", writer.name, GONE_SECONDS)
        await asyncio.sleep(LOOK_SECONDS)
    drop_lease(run_dir, EVAL)
    newest = max([*versions.given, *versions.skipped], default=0)
    for version in range(config.interval or newest + 1, newest, config.interval or 1):
        if version not in versions.given and version not in versions.skipped:
            versions.skip(version, "it was never seen: not exported, or removed again while another one was evaluated")


def _hold(run_dir: Path, version: int) -> None:
    """Tell the run that versions from this one on are still to be evaluated."""
    lease = Lease(current_incarnation(read_incarnations(run_dir)).number, version)
    if read_lease(run_dir, EVAL) != lease:
        write_lease(run_dir, lease, EVAL)


def _next_after(versions: Versions, found: list[int], interval: int) -> int:
    """The version to evaluate after those that were, and that are not given up by a new incarnation of the trainer. The last one of all stays anyway."""
    newest = max(found, default=BASE)
    done = max((version for version in versions.given if version <= newest), default=BASE)
    return (done // interval + 1) * interval


def _is_new(versions: Versions, version: int) -> bool:
    """Not looked at yet, or made again since by another incarnation of the trainer, or written to the disk only since."""
    if version not in versions.given and version not in versions.skipped:
        return True
    try:
        manifest = weights_manifest(version_dir(versions.directory, version))
    except CommitError:  # removed meanwhile, or damaged, which was said
        return False
    return manifest.hash != versions.given.get(version) and manifest.publisher is None and not is_lost(manifest)


def _chosen(config: "EvalConfig", found: list[int]) -> list[int]:
    return [version for version in found if version != BASE and version % (config.interval or 1) == 0]


class Writer:
    """Who commits versions into a run directory: the trainer, or `sft`, whichever gave a sign last."""

    def __init__(self, run_dir: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._run_dir, self._monotonic = run_dir, monotonic
        self._watch: TrainerWatch | None = None
        self._since = monotonic()
        self.name = f"the run in {run_dir}"

    def ended(self) -> bool:
        """Whether no more is to come: it said so, has given no sign for long, or nobody has come at all."""
        statuses = read_status(self._run_dir)
        found = max(
            (name for name in _WRITERS if name in statuses), key=lambda name: statuses[name].heartbeat, default=""
        )
        if found and (self._watch is None or found != self.name):
            self._watch, self.name = TrainerWatch(self._run_dir, self._monotonic, found), found
        if self._watch is None:
            return self._monotonic() - self._since > GONE_SECONDS
        return self._watch.ended(asked_to_stop=False)
