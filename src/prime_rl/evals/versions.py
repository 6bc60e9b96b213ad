"""Which policies are evaluated: what a server serves as it is, or the base model and the versions of a directory."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loguru import logger

from prime_rl.config import ConfigError, EvalConfig, OrchestratorConfig, SFTConfig, parse
from prime_rl.config.eval import EvalEnv
from prime_rl.config.shared import EnvConfig
from prime_rl.envs.ids import installed
from prime_rl.errors import UserError
from prime_rl.monitor.status import GONE_SECONDS, TrainerWatch
from prime_rl.transport.commit import CommitError, list_steps
from prime_rl.transport.incarnations import EVAL, drop_lease, read_incarnations, read_lease, write_lease
from prime_rl.transport.protocol import BASE, Lease, current_incarnation
from prime_rl.transport.weights import WeightsManifest, is_lost, never_written_message, version_dir, weights_manifest

LOOK_SECONDS = 1.0  # between two looks at the directory
_WRITERS = ("trainer", "sft")  # processes that commit versions, by the names of their status

OnWait = Callable[[str, str, float], None]


@dataclass(frozen=True)
class EvalPolicy:
    """What is evaluated.

    Attributes:
        name: Of its directory of results: `step_<version>`, or `api`.
        hash: Of its weights; empty where it is not known.
        weights: The committed version that servers load; None where they serve their base, or stay as they are.
    """

    name: str
    version: int
    hash: str = ""
    weights: WeightsManifest | None = None


class EvalVersions:
    """The versions of `weights_dir` that are to be evaluated.

    Attributes:
        skipped: Versions that are not, and why.
    """

    def __init__(self, config: EvalConfig) -> None:
        self._config, self._directory = config, config.weights_dir or Path()
        self.skipped: dict[int, str] = {}
        self._hashes: dict[int, str] = {}  # of the versions that were

    def check(self) -> None:
        """Check what can be known before anything starts: the directory and the named versions exist.

        Raises:
            UserError: they do not; it lists those that do.
        """
        directory, steps = self._directory, self._config.steps
        if self._config.weights_dir is None or self._config.follow:
            return
        committed = list_steps(directory)
        listed = ", ".join(map(str, committed)) or "none"
        if not committed and (directory / "weights").is_dir():
            raise UserError(f"weights_dir: {directory} is a run: its versions are in {directory / 'weights'}")
        if not directory.is_dir():
            raise UserError(f"weights_dir: {directory} is not there")
        if missing := [str(step) for step in steps if step not in (BASE, *committed)]:
            raise UserError(f"steps: there is no version {', '.join(missing)} in {directory} (there: {listed})")
        if not steps and not self._chosen(committed):
            hint = f"there: {listed}; --follow waits for some"
            raise UserError(f"weights_dir: there is no version to evaluate in {directory} ({hint})")

    async def policies(self, on_wait: OnWait) -> AsyncIterator[EvalPolicy]:
        """Yield the base and the versions to evaluate, in order; with `follow` also later ones, until the run has ended."""
        config, run_dir = self._config, self._directory.parent
        versions = set(config.steps or self._chosen(list_steps(self._directory)))
        if config.eval_base or BASE in versions:
            # The model that the servers were started with; it need not be the one that the run started from.
            yield EvalPolicy(f"step_{BASE}", BASE)
        writer = TrainerWatch(run_dir, processes=_WRITERS)
        while True:  # bounded: by the end of the run that is followed, which says so or gives no sign for long
            # Before the look: what was committed before the last word is seen.
            ended = not config.follow or writer.ended(asked_to_stop=False)
            if config.follow:
                committed = list_steps(self._directory)
                last = committed[-1:] if ended else []  # worth knowing, whatever the interval
                versions = {*self._chosen(committed), *last}
            manifests = [
                manifest for version in sorted(versions - {BASE}) if (manifest := self._find(version)) is not None
            ]
            if config.hold:
                self._hold(
                    min([*(manifest.version for manifest in manifests), self._next(max(committed, default=BASE))])
                )
            if manifests:
                manifest = manifests[0]
                self._hashes[manifest.version] = manifest.hash
                self.skipped.pop(manifest.version, None)  # made again since it was
                yield EvalPolicy(f"step_{manifest.version}", manifest.version, manifest.hash, manifest)
            elif ended:
                break
            else:
                on_wait("the next version", "the run that is followed", GONE_SECONDS)
                await asyncio.sleep(LOOK_SECONDS)
        if config.hold:
            drop_lease(run_dir, EVAL)

    def skip(self, version: int, why: str) -> None:
        """Say and remember that `version` is not evaluated, unless it is made again."""
        logger.warning("version {} is not evaluated: {}", version, why)
        self.skipped[version] = why
        self._hashes.pop(version, None)

    def _chosen(self, committed: Sequence[int]) -> list[int]:
        return [version for version in committed if version != BASE and version % (self._config.interval or 1) == 0]

    def _find(self, version: int) -> WeightsManifest | None:
        """A committed version that is still to be evaluated: it was not yet, or has since been made again by another
        incarnation, or written to disk. One that servers cannot load is skipped."""
        directory, why = version_dir(self._directory, version), ""
        try:
            manifest = weights_manifest(directory)
        except CommitError as error:
            why = f"{error}" if directory.is_dir() else "it was removed before it was its turn"
        else:
            if manifest.publisher is not None:
                why = never_written_message(directory)
            elif is_gone(manifest):
                why = f"its tensors were in memory ({manifest.files}), and are there no more"
            elif self._hashes.get(version) != manifest.hash:
                return manifest
        if why and version not in self._hashes and version not in self.skipped:
            self.skip(version, why)
        return None

    def _hold(self, version: int) -> None:
        """Keep the run from removing this version and later ones."""
        run_dir = self._directory.parent
        lease = Lease(current_incarnation(read_incarnations(run_dir)).number, version)
        if read_lease(run_dir, EVAL) != lease:
            write_lease(run_dir, lease, EVAL)

    def _next(self, newest: int) -> int:
        """Return the next version to evaluate, unless the trainer goes back. The very last one is kept anyway."""
        interval = self._config.interval or 1
        last = max((version for version in self._hashes if version <= newest), default=BASE)
        return (last // interval + 1) * interval


def is_gone(manifest: WeightsManifest) -> bool:
    """Whether a version that was committed was removed, or its tensors were."""
    return not manifest.directory.is_dir() or is_lost(manifest.directory)


def with_environments(config: EvalConfig) -> EvalConfig:
    """Return `config`, which without environments takes those of the run that made the versions.

    These are the ones it was evaluated on while it trained, else those it was trained on.

    Raises:
        UserError: there is no such run, or it was written for other settings than today's.
    """
    from prime_rl.orchestrator.evaluation import eval_environments

    if config.environments:
        return config
    environments: Sequence[EnvConfig] = []
    where, path = "", Path()
    if config.weights_dir is not None:
        configs = config.weights_dir.parent / "configs"
        where = f", and {configs} names none"
        try:
            if (path := configs / "orchestrator.toml").is_file():
                of_run = parse(OrchestratorConfig, ["@", str(path)], {})
                environments = eval_environments(of_run) or of_run.environments
            elif (path := configs / "sft.toml").is_file():
                evaluation = parse(SFTConfig, ["@", str(path)], {}).eval
                environments = [] if evaluation is None else evaluation.environments
        except ConfigError as error:
            problem = f"{path} cannot be read: {error.problems[0]}"
            raise UserError(f"no environment: give --environment-ids ({problem})") from error
    if not environments:
        raise UserError(f"no environment: give --environment-ids{where}; installed are {', '.join(installed())}")
    logger.info("evaluating the environments of {}: {}", path, ", ".join(env.name for env in environments))
    taken = [EvalEnv(**env.model_dump(include=set(EnvConfig.model_fields))) for env in environments]
    return EvalConfig.model_validate(config.model_dump() | {"environments": taken})
