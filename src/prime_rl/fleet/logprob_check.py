"""Compare a server's log-probabilities of a version's fixed prompt with the trainer's, which are in the manifest.

Numbers never agree exactly: dtypes, kernels and quantization differ. How far a server is off by these alone is measured
once, on the base weights; a later version may be off a few times as far (the tolerance). A larger difference is a
failed load.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loguru import logger

from prime_rl.errors import UserError
from prime_rl.fleet.client import InferenceClient, Served, ServerError
from prime_rl.transport.commit import list_steps, step_dir
from prime_rl.transport.protocol import BASE
from prime_rl.transport.weights import LogprobReference, WeightsManifest, weights_manifest

# Tolerance = FACTOR × the difference on the base weights. In bfloat16 the noise grows with training: in 30 steps of a
# tiny model on an H200 to 2.8 times the base's on average, 5.1 times at most. A false alarm takes a server out of the
# run, or ends the run where no other server passes, and hashes find most of what this could.
FACTOR = 16.0
LEAST_MEAN, LEAST_LARGEST = 1e-3, 2e-2  # nats: the smallest tolerance; in float32 on both sides the difference is 1e-6
MOVED_MEAN = 1e-4  # nats: where the trainer's numbers change by more between two versions, a server's must change, too
WORST_MEAN = 1.0  # nats: a server with a larger difference on the base weights computes another model
ROUNDED_MEAN = 0.1  # nats: more than bfloat16 has been seen to make (`rl parity`: 0.03 on average, 0.09 at most)


class LogprobCheckFailed(ServerError):
    """The server does not compute what the trainer computed."""


@dataclass(frozen=True)
class Difference:
    """Absolute differences of log-probabilities in nats, mean over all tokens and largest; also a bound on both."""

    mean: float
    largest: float

    def within(self, bound: "Difference") -> bool:
        """Return whether both numbers are within `bound`; NaN is not."""
        return self.mean <= bound.mean and self.largest <= bound.largest

    def __str__(self) -> str:
        return f"{self.mean:.2g} nats on average, {self.largest:.2g} at most"


def compare(server: Sequence[float], trainer: Sequence[float]) -> Difference:
    """Compare log-probabilities; the difference is infinite if their numbers differ or one is not finite."""
    if len(server) != len(trainer) or not server or not all(map(math.isfinite, [*server, *trainer])):
        return Difference(math.inf, math.inf)
    differences = [abs(one - other) for one, other in zip(server, trainer, strict=True)]
    return Difference(sum(differences) / len(differences), max(differences))


# ---- the verdict of `rl parity`

ENGINES, SERVED, TRAINED = "server - trainer", "server - transformers float32", "trainer - transformers float32"
ROUNDED = "transformers rounded - float32"  # in the lower type of server and trainer: what rounding does to this model
ROUNDING_FACTOR = 4.0  # two computations in a low type differ by little more than one of them differs from float32
MOST_DROPPED = 0.01  # of the tokens: what the loss drops before anything is learned it drops at every step


def judge(gaps: Any, dropped: float, loss: str, quantized: bool = False) -> tuple[Difference, list[str]]:
    """Return the tolerance, and why RL is not sound. A quantized server is off by more than rounding."""
    off = {name: Difference(each["mean"], each["largest"]) for name, each in gaps.items()}
    least, most = ROUNDING_FACTOR * off[ROUNDED].mean, FACTOR * off[ROUNDED].largest
    bound, reasons = Difference(max(LEAST_MEAN, least), max(LEAST_LARGEST, most)), list[str]()
    bound = Difference(WORST_MEAN, float("inf")) if quantized else bound
    if not off[ENGINES].within(bound):
        who = "server" if off[SERVED].mean > off[TRAINED].mean else "trainer"
        reasons.append(
            f"server and trainer differ by {off[ENGINES]}; the tolerance is {bound}. From transformers' own forward "
            f"the server is {off[SERVED].mean:.2g} nats off, the trainer {off[TRAINED].mean:.2g}: look at the {who}"
        )
    if not dropped <= MOST_DROPPED:
        reasons.append(f"loss.type {loss} drops or clips {dropped:.2%} of the tokens before anything is learned")
    return bound, reasons


# ---- the check of a run

OFF = "(logprob_check = false switches this off)"
Score = tuple[Sequence[float], Sequence[float]]  # of one engine: the trainer's log-probabilities, the server's


async def score(client: InferenceClient, reference: LogprobReference, engines: int) -> tuple[list[Score], Difference]:
    """Score the prompt on each data-parallel engine; return scores and largest differences. Raises as its `score`."""
    numbers: Sequence[int | None] = range(engines) if engines > 1 else [None]
    scores: list[Score] = [(reference.logprobs, await client.score(reference.tokens, number)) for number in numbers]
    differences = [compare(server, trainer) for trainer, server in scores]
    return scores, Difference(max(each.mean for each in differences), max(each.largest for each in differences))


@dataclass
class Calibration:
    """Of one server process: its boot, its tolerance (None: there is nothing to check it by), and its last scores."""

    boot: str
    tolerance: Difference | None = None
    scores: list[Score] = field(default_factory=list)


class LogprobCheck:
    """Calibrates and checks the servers of a run; a tolerance holds until a server is started again."""

    def __init__(self) -> None:
        self.calibrations: dict[str, Calibration] = {}  # by address
        self._said = False

    async def prepare(self, client: InferenceClient, weights: WeightsManifest) -> None:
        """Calibrate the tolerance of a server before it loads `weights`, once for each server process.

        A server that does not serve the base weights loads them first: never later, when it samples.

        Raises:
            LogprobCheckFailed: it computes something else, or does not score the fixed prompt.
            ServerError: it did not load the base weights.
            CommitError: version 0 is there, and cannot be read now.
            UserError: it holds another base model.
        """
        known = self.calibrations.get(client.root)
        try:
            served: Served | None = await client.served()
        except ServerError:
            if known:
                return  # a load mends it; `check` sees whether it was started again
            served = None
        if known and served is not None and known.boot == served.boot:
            return
        root = weights.directory.parent
        # Version 0 of this run, which is never pruned. Random weights have none.
        base = weights_manifest(step_dir(root, BASE)) if BASE in list_steps(root) else None
        if base is None or weights.reference is None or base.reference is None:
            if not self._said:
                self._said = True
                logger.warning(
                    "servers are checked by hashes alone: a version has no log-probabilities of the fixed prompt"
                )
            if served is not None:
                self.calibrations[client.root] = Calibration(served.boot)
            return
        bare: list[float] = []  # without the adapter that the run began with, if it did
        try:
            if base.adapter is not None:
                await client.reload()
                bare = await client.score(base.reference.tokens)
            if served is None or bare or not served.holds(base):
                served = await client.load_weights(base)
            scores, difference = await score(client, base.reference, served.engines)
        except UserError as error:
            raise LogprobCheckFailed(
                f"{client.root} does not score the fixed prompt, which needs max_model_len "
                f"{len(base.reference.tokens) + 1} {OFF}: {error}"
            ) from error
        if not difference.mean <= WORST_MEAN:
            raise LogprobCheckFailed(
                f"the server at {client.root} does not compute the trainer's model: on the base weights the "
                f"log-probabilities of the fixed prompt differ by {difference}; a mean difference above "
                f"{WORST_MEAN:g} nat cannot be numerical noise {OFF}"
            )
        if difference.mean > LEAST_MEAN and any(list(server) == bare for _, server in scores):
            raise LogprobCheckFailed(f"{client.root} computes the same with and without the run's first adapter {OFF}")
        mean, largest = max(FACTOR * difference.mean, LEAST_MEAN), max(FACTOR * difference.largest, LEAST_LARGEST)
        tolerance = Difference(mean, largest)
        compared = f"differ by {difference} on the base weights; the tolerance is {tolerance}"
        logger.info("{}: log-probabilities {}", client.root, compared)
        if difference.mean > ROUNDED_MEAN:
            logger.warning("rounding seldom makes that much: `rl parity` tells whether both compute the same model")
        self.calibrations[client.root] = Calibration(served.boot, tolerance, scores)

    async def check(self, client: InferenceClient, weights: WeightsManifest, served: Served) -> None:
        """Check a server that has loaded `weights`, and reports what is `served`.

        Raises:
            LogprobCheckFailed: it computes something else, or does not answer any more.
            ServerError: it was started again meanwhile.
        """
        known = self.calibrations.get(client.root)
        if weights.reference is None or known is None:
            return
        if known.boot != served.boot:
            raise ServerError(f"{client.root} was started again while it loaded version {weights.version}")
        if known.tolerance is None:
            return
        claim = f"the server at {client.root} says it serves version {weights.version} ({weights.hash[:12]}) but"
        try:
            scores, difference = await score(client, weights.reference, served.engines)
        except UserError as error:
            raise LogprobCheckFailed(f"{claim} does not score the fixed prompt: {error}") from error
        why = ""
        if not difference.within(known.tolerance):
            why = f"differ from the trainer's by {difference}; the tolerance is {known.tolerance}"
        # One step changes the numbers by less than the tolerance: only this finds weights that were not replaced.
        elif any(
            compare(trainer, trainer_before).mean > MOVED_MEAN and list(server) == list(server_before)
            for (trainer, server), (trainer_before, server_before) in zip(scores, known.scores, strict=False)
        ):
            why = "are unchanged since the last version"
        if why:
            raise LogprobCheckFailed(
                f"{claim} does not compute it: its log-probabilities of the fixed prompt {why} {OFF}"
            )
        known.scores = scores
