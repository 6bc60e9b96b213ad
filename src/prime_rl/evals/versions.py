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
        weights: The committed version that servers load; None where they serve their base (`base`), or stay as they are.
    """

    name: str
    version: int
    hash: str = ""
    weights: WeightsManifest | None = None
    base: bool = False


API = EvalPolicy("api", 0)


class EvalVersions:
    """The versions of `weights_dir` that are to be evaluated.

    Attributes:
        skipped: Versions that are not, and why.
        hashes: Of each that was.
    """

    def __init__(self, config: EvalConfig) -> None:
        self._config, self._directory = config, config.weights_dir or Path()
        self._run_dir = self._directory.parent
        self.skipped: dict[int, str] = {}
        self.hashes: dict[int, str] = {}

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
        config = self._config
        named = sorted(set(config.steps) - {BASE}) if config.steps else self._chosen(self.committed())
        if config.eval_base or BASE in config.steps:
            # The model that the servers were started with; it need not be the one that the run started from.
            yield EvalPolicy(f"step_{BASE}", BASE, base=True)
        if config.follow:
            async for followed in self._follow(on_wait):
                yield followed
            return
        for version in named:
            if (policy := self._find(version)) is not None:
                yield policy

    def committed(self) -> list[int]:
        """The versions in the directory now."""
        return list_steps(self._directory)

    def skip(self, version: int, why: str) -> None:
        """Say and remember that `version` is not evaluated."""
        logger.warning("version {} is not evaluated: {}", version, why)
        self.skipped[version] = why

    def _chosen(self, committed: Sequence[int]) -> list[int]:
        return [version for version in committed if version != BASE and version % (self._config.interval or 1) == 0]

    def _find(self, version: int) -> EvalPolicy | None:
        """A committed version; None, and the reason in `skipped`, where servers cannot load it."""
        outcome = self._loadable(version)
        if isinstance(outcome, str):
            self.skip(version, outcome)
            return None
        self.hashes[version] = outcome.hash
        self.skipped.pop(version, None)  # made again since it was
        return EvalPolicy(f"step_{version}", version, outcome.hash, outcome)

    def _loadable(self, version: int) -> WeightsManifest | str:
        """A committed version, or why servers cannot load it."""
        directory = version_dir(self._directory, version)
        try:
            manifest = weights_manifest(directory)
        except CommitError as error:
            return f"{error}" if directory.is_dir() else "it was removed before it was its turn"
        if manifest.publisher is not None:
            return never_written_message(directory)
        return (
            f"its tensors were in memory ({manifest.files}), and are there no more" if is_gone(manifest) else manifest
        )

    async def _follow(self, on_wait: OnWait) -> AsyncIterator[EvalPolicy]:
        writer = TrainerWatch(self._run_dir, processes=_WRITERS)
        while True:  # bounded: by the end of the run that is followed, which says so or gives no sign for long
            # Before the look: what was committed before the last word is seen.
            ended = writer.ended(asked_to_stop=False)
            committed = self.committed()
            last = {max(committed)} - {BASE} if committed and ended else set()  # worth knowing, whatever the interval
            fresh = [version for version in sorted({*self._chosen(committed), *last}) if self._is_new(version)]
            if self._config.hold:
                self._hold(min([*fresh, self._next(committed)]))
            if fresh:
                if (policy := self._find(fresh[0])) is not None:
                    yield policy
                continue
            if ended:
                break
            on_wait("the next version", "the run that is followed", GONE_SECONDS)
            await asyncio.sleep(LOOK_SECONDS)
        drop_lease(self._run_dir, EVAL)

    def _hold(self, version: int) -> None:
        """Keep the run from removing this version and later ones."""
        lease = Lease(current_incarnation(read_incarnations(self._run_dir)).number, version)
        if read_lease(self._run_dir, EVAL) != lease:
            write_lease(self._run_dir, lease, EVAL)

    def _next(self, committed: Sequence[int]) -> int:
        """Return the next version to evaluate, unless the trainer goes back. The very last one is kept anyway."""
        newest, interval = max(committed, default=BASE), self._config.interval or 1
        last = max((version for version in self.hashes if version <= newest), default=BASE)
        return (last // interval + 1) * interval

    def _is_new(self, version: int) -> bool:
        """Whether it was not looked at yet, or has since been made again by another incarnation, or written to disk."""
        if version not in self.hashes and version not in self.skipped:
            return True
        outcome = self._loadable(version)
        return not isinstance(outcome, str) and outcome.hash != self.hashes.get(version)


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
