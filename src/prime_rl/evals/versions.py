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
from prime_rl.transport.incarnations import EVAL, read_incarnations, read_lease, write_lease
from prime_rl.transport.protocol import BASE, Lease, current_incarnation
from prime_rl.transport.weights import WeightsManifest, never_written_message, version_dir, weights_manifest

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
        missing = ", ".join(str(step) for step in steps if step not in (BASE, *committed))
        if missing or not (steps or self._chosen(committed)):
            listed = ", ".join(map(str, committed)) or "none"
            raise UserError(
                f"weights_dir: there is no version {missing or 'to evaluate'} in {directory} (there: {listed}); those of "
                "a run are in its weights/, and --follow waits for them"
            )

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
            committed = list_steps(self._directory)
            if config.follow:  # the last one is worth knowing, whatever the interval
                versions |= {*self._chosen(committed), *(committed[-1:] if ended else ())}
            manifests = (self._find(version) for version in sorted(versions - {BASE}))
            manifest = next((manifest for manifest in manifests if manifest is not None), None)
            if config.hold:  # keep the run from removing the next one and later ones
                newest = max(committed, default=BASE)
                following = max((version for version in self._hashes if version <= newest), default=BASE) + 1
                first = following if manifest is None else min(manifest.version, following)
                lease = Lease(current_incarnation(read_incarnations(run_dir)).number, first)
                if read_lease(run_dir, EVAL) != lease:
                    write_lease(run_dir, lease, EVAL)
            if manifest is not None:
                self._hashes[manifest.version] = manifest.hash
                self.skipped.pop(manifest.version, None)  # made again since it was
                yield EvalPolicy(f"step_{manifest.version}", manifest.version, manifest.hash, manifest)
            elif ended:
                return
            else:
                on_wait("the next version", "the run that is followed", GONE_SECONDS)
                await asyncio.sleep(LOOK_SECONDS)

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
            elif self._hashes.get(version) != manifest.hash:
                return manifest
        if why and version not in self._hashes and version not in self.skipped:
            self.skip(version, why)
        return None


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
    where = ""
    if config.weights_dir is not None:
        where = f" (there are none in {config.weights_dir.parent / 'configs'})"
        orchestrator, sft = (config.weights_dir.parent / "configs" / f"{name}.toml" for name in ("orchestrator", "sft"))
        try:
            if orchestrator.is_file():
                of_run = parse(OrchestratorConfig, ["@", str(orchestrator)], {})
                environments = eval_environments(of_run) or of_run.environments
            elif sft.is_file() and (section := parse(SFTConfig, ["@", str(sft)], {}).eval) is not None:
                environments = section.environments
        except ConfigError as error:
            where = f" (the run's cannot be read: {error.problems[0]})"
    if not environments:
        raise UserError(f"no environment: give --environment-ids{where}; installed are {', '.join(installed())}")
    logger.info("evaluating the run's environments: {}", ", ".join(env.name for env in environments))
    taken = [EvalEnv(**env.model_dump(include=set(EnvConfig.model_fields))) for env in environments]
    return EvalConfig.model_validate(config.model_dump() | {"environments": taken})
