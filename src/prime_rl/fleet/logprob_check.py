"""Does a server compute what the trainer computed? Its log-probabilities of a version's canary prompt against those in the manifest.

Numbers never agree exactly: dtypes, kernels and quantization differ. How far a server is off by them alone is measured once, on the base weights,
which it has not been given by anybody; a later version may be off a few times as far (`Band`). A canary that is out of its band counts as
a failed load.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from loguru import logger

from prime_rl.errors import UserError
from prime_rl.fleet.client import CannotScore, NoWeightsServed, Served, ServerError
from prime_rl.transport.commit import CommitError, list_steps
from prime_rl.transport.protocol import BASE
from prime_rl.transport.weights import LogprobReference, WeightsManifest, version_dir, weights_manifest

# By which a trained version may be farther off than the base was. In bfloat16 the noise grows with training: in 30 steps of a tiny model on an H200
# to 2.8 times the base's on average and 5.1 times at most. A false alarm ends a run, and hashes find most of what this could.
FACTOR = 16.0
LEAST_MEAN, LEAST_MOST = 1e-3, 2e-2  # nats: the narrowest band; float32 on both sides is off by 1e-6
MOVED_MEAN = 1e-4  # nats: by so much the trainer's own numbers move from one version to another, and a server's cannot stay the very same
WORST_MEAN = 1.0  # nats: a server that is farther off on the base weights does not compute this model


class LogprobCheckFailed(ServerError):
    """The server does not compute what the trainer computed."""


@dataclass(frozen=True)
class Difference:
    """Absolute differences of log-probabilities in nats: over all tokens the mean, and the largest."""

    mean: float
    most: float

    def __str__(self) -> str:
        return f"{self.mean:.2g} nats on average, {self.most:.2g} at most"


@dataclass(frozen=True)
class Band:
    """How far a server may be off, in nats."""

    mean: float
    most: float

    def holds(self, found: Difference, share: float = 1.0) -> bool:
        """Whether both numbers are within it, or within a share of it; what is no number is not."""
        return found.mean <= share * self.mean and found.most <= share * self.most

    def __str__(self) -> str:
        return f"{self.mean:.2g} and {self.most:.2g}"


def compare(server: Sequence[float], trainer: Sequence[float]) -> Difference:
    """How far the server's log-probabilities are from the trainer's. Infinitely far where there are more or fewer, or one is not finite."""
    if len(server) != len(trainer) or not server or not all(map(math.isfinite, [*server, *trainer])):
        return Difference(math.inf, math.inf)
    differences = [abs(one - other) for one, other in zip(server, trainer, strict=True)]
    return Difference(sum(differences) / len(differences), max(differences))


def calibrated(base: Difference) -> Band | None:
    """The band of a server that is so far off on the base weights; None where that is too far to be noise."""
    if not base.mean <= WORST_MEAN:
        return None
    return Band(max(FACTOR * base.mean, LEAST_MEAN), max(FACTOR * base.most, LEAST_MOST))


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of one version's canary: the trainer's and a server's."""

    trainer: Sequence[float]
    server: Sequence[float]

    @property
    def difference(self) -> Difference:
        """How far apart they are."""
        return compare(self.server, self.trainer)


def stayed(before: Scores, now: Scores) -> bool:
    """Whether a server still computes the very same, to the last digit, as before it was given other weights. A step moves the trainer's numbers by less than
    servers are off, so that weights which silently stayed what they were are in the band; but they do not compute something new."""
    moved = compare(now.trainer, before.trainer).mean > MOVED_MEAN
    return moved and list(now.server) == list(before.server)


async def score(engine: "Scoring", canary: LogprobReference, engines: int) -> list[Scores]:
    """What each of the engines behind a server computes: one, or as many as its data parallelism has.

    Raises:
        CannotScore, ServerError: as `InferenceClient.score` does.
    """
    numbers: Sequence[int | None] = range(engines) if engines > 1 else [None]
    return [Scores(canary.logprobs, await engine.score(canary.tokens, number)) for number in numbers]


def farthest(scores: Sequence[Scores]) -> Difference:
    """The largest mean and the largest difference of all."""
    differences = [each.difference for each in scores]
    return Difference(max(each.mean for each in differences), max(each.most for each in differences))


class Scoring(Protocol):
    """What is asked of a server: `client.InferenceClient`."""

    root: str

    async def served(self) -> Served: ...
    async def score(self, tokens: Sequence[int], engine: int | None = None) -> list[float]: ...
    async def give(self, weights: WeightsManifest) -> Served: ...


class LogprobCheck:
    """The bands of all servers of a run, each for one incarnation of the server.

    Args:
        any_base: Servers may have been started with another base model than the run's: those are checked by hashes alone.
    """

    def __init__(self, any_base: bool = False) -> None:
        self._any_base = any_base
        self._bands: dict[
            str, tuple[str, Band | None]
        ] = {}  # by address: the server's boot, and its band (None: it cannot be checked)
        self._scores: dict[str, list[Scores]] = {}  # of what each computed last, engine by engine
        self._said: set[str] = set()

    async def prepare(self, engine: Scoring, weights: WeightsManifest) -> None:
        """Before a server is given `weights`: calibrate its band, or decide that it has none, if that was not done since it was started. One that
        does not serve the base weights is given them first: never later, when it samples.

        Raises:
            LogprobCheckFailed: it computes something else.
            ServerError: it did not answer, or version 0 cannot be read.
        """
        known = engine.root in self._bands
        try:
            served: Served | None = await engine.served()
        except NoWeightsServed:
            if known:
                return  # a load mends it; `check` sees whether it was started again
            served = None
        if known and served is not None and self._bands[engine.root][0] == served.boot:
            return
        self._bands.pop(engine.root, None)
        base = _base_of(weights)
        if weights.canary is None or base is None or base.canary is None:
            which = "version 0, on which they would be calibrated" if weights.canary else "the version that is loaded"
            self._say_once(f"servers are checked by hashes alone: there is no canary in {which}")
            if served is not None:
                self._bands[engine.root] = served.boot, None
            return
        if served is None or not served.holds(base):
            try:
                served = await engine.give(base)
            except ServerError:
                raise
            except UserError as error:
                if not self._any_base or served is None:
                    raise
                self._say_once("servers are checked by hashes alone", str(error))
                self._bands[engine.root] = served.boot, None
                return
        try:
            scores = await score(engine, base.canary, served.engines)
        except CannotScore as error:
            logger.warning("{} is not checked by a canary, only by hashes: {}", engine.root, error)
            self._bands[engine.root] = served.boot, None
            return
        found = farthest(scores)
        band = calibrated(found)
        if band is None:
            raise LogprobCheckFailed(
                f"the server at {engine.root} does not compute the trainer's model: on the base weights the log-probabilities of the canary "
                f"prompt differ by {found}; {WORST_MEAN:g} on average is the most that can be noise (logprob_check = false switches this off)"
            )
        logger.info("{}: the canary differs by {} on the base weights; the band is {}", engine.root, found, band)
        self._bands[engine.root], self._scores[engine.root] = (served.boot, band), scores

    async def check(self, engine: Scoring, weights: WeightsManifest, served: Served) -> None:
        """After the server, which says what is `served`, has loaded `weights`.

        Raises:
            LogprobCheckFailed: it computes something else, or does not answer any more.
            ServerError: it was started again meanwhile.
        """
        if weights.canary is None or engine.root not in self._bands:
            return
        boot, band = self._bands[engine.root]
        if boot != served.boot:
            raise ServerError(
                f"the server at {engine.root} was started again while it loaded version {weights.version}"
            )
        if band is None:
            return
        claim = f"the server at {engine.root} says it serves version {weights.version} ({weights.hash[:12]}) but"
        try:
            scores = await score(engine, weights.canary, served.engines)
        except (CannotScore, ServerError) as error:  # it could answer when it was calibrated
            raise LogprobCheckFailed(f"{claim} does not score the canary prompt: {error}") from error
        found = farthest(scores)
        if not band.holds(found):
            raise LogprobCheckFailed(
                f"{claim} does not compute it: its log-probabilities of the canary prompt differ from the trainer's by {found}; "
                f"the band is {band} (logprob_check = false switches this off)"
            )
        if not band.holds(found, share=0.5):
            self._say_once(
                f"{engine.root} is farther off than half its band, beyond which a server gets no work",
                f"{found} at version {weights.version}, the band is {band}",
            )
        before = self._scores[engine.root]
        if any(stayed(one, other) for one, other in zip(before, scores, strict=True)):
            raise LogprobCheckFailed(
                f"{claim} does not compute it: its log-probabilities of the canary prompt are the very same as before (logprob_check = false switches "
                f"this off)"
            )
        self._scores[engine.root] = scores

    def band(self, root: str) -> Band | None:
        """That of the server at this address; None where there is none."""
        return self._bands.get(root, ("", None))[1]

    def _say_once(self, what: str, details: str = "") -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning("{}", f"{what}: {details}" if details else what)


def _base_of(weights: WeightsManifest) -> WeightsManifest | None:
    """Version 0 of the same run, which is never removed. None: this run has none (random weights).

    Raises:
        ServerError: it is there, and cannot be read now.
    """
    root = weights.directory.parent
    try:
        return weights_manifest(version_dir(root, BASE)) if BASE in list_steps(root) else None
    except CommitError as error:
        raise ServerError(f"no canary can be calibrated: {error}") from error
