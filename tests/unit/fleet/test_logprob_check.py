"""When a server's log-probabilities are its noise and when another model's. (What becomes of it: test_stories.py.)"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from prime_rl.errors import UserError
from prime_rl.fleet.client import Served, ServerError
from prime_rl.fleet.logprob_check import FACTOR, LEAST_MEAN, Difference, LogprobCheck, LogprobCheckFailed
from prime_rl.transport.commit import CommitError, step_dir
from prime_rl.transport.weights import (
    LogprobReference,
    WeightsManifest,
    manifest_extra,
    reference_tokens,
    weights_manifest,
)
from support.committing import commit_empty

LOGPROBS = (-1.0, -2.0, -3.0)
TOKENS = (5, 6, 7, 8)
REFERENCE = LogprobReference(TOKENS, LOGPROBS)
MOVED = LogprobReference(TOKENS, (-1.001, -2.0, -3.001))  # as after one step, which is less than the tolerance


def test_the_prompt_is_the_same_for_ever():
    """Versions of earlier runs, and of other machines, are compared by it."""
    assert reference_tokens(1000)[:4] == [644, 24, 164, 419]
    assert all(0 <= token < 50 for token in reference_tokens(50))


class Scored:
    """A server that is off by `noise`, serves what it is given, and remembers that.

    Attributes:
        answer: Raised instead of scoring.
        unusable: Its weights are, until it is given something.
        stale: What the last of several engines goes on to answer.
    """

    root = "http://engine"

    def __init__(self, served: WeightsManifest) -> None:
        self.noise, self.boot, self.engines, self.scored = 0.0, "first", 1, 0
        self.now = served
        self.gave: list[int] = []
        self.answer: Exception | None = None
        self.unusable = False
        self.stale: list[float] | None = None
        self.load_weights = self.load

    async def served(self) -> Served:
        if self.unusable:
            raise ServerError("scripted")
        return Served(self.now.version, self.now.hash, self.boot, engines=self.engines)

    async def load(self, weights: WeightsManifest) -> Served:
        self.gave.append(weights.version)
        self.unusable, self.now = False, weights
        return await self.served()

    async def score(self, tokens: Sequence[int], engine: int | None = None) -> list[float]:
        assert engine in (range(self.engines) if self.engines > 1 else [None])
        if self.stale is not None and engine == self.engines - 1:
            return self.stale
        if self.answer is not None:
            raise self.answer
        self.scored += 1
        assert self.now.reference is not None
        assert tuple(tokens) == self.now.reference.tokens
        return [logprob + self.noise for logprob in self.now.reference.logprobs]

    async def update(self, check: LogprobCheck, weights: WeightsManifest) -> None:
        """As `InferenceClient.update`."""
        await check.prepare(self, weights)
        await check.check(self, weights, await self.load_weights(weights))


def commit(root: Path, version: int, reference: LogprobReference | None = REFERENCE) -> WeightsManifest:
    place = step_dir(root, version)
    commit_empty(place, version, **manifest_extra(version, 0, {}, reference=reference))
    manifest = weights_manifest(place)
    assert manifest.reference == reference
    return replace(manifest, hash=f"hash {version}")


@pytest.fixture
def server(tmp_path, monkeypatch) -> Scored:
    base = commit(tmp_path, 0)
    monkeypatch.setattr("prime_rl.fleet.logprob_check.weights_manifest", lambda directory: base)
    return Scored(base)


async def test_a_server_is_calibrated_once_an_incarnation_before_it_is_given_anything(server, tmp_path, heard):
    """A quantized server is farther off than others, on every version."""
    check, one, two = LogprobCheck(), commit(tmp_path, 1), commit(tmp_path, 2)
    server.noise = 0.05
    await server.update(check, one)
    assert check.calibrations[server.root].tolerance == Difference(*[pytest.approx(0.05 * FACTOR)] * 2)
    assert server.gave == [1]
    server.noise = 0.79
    await server.update(check, two)
    assert server.scored == 3
    server.noise = 0.81
    says = r"version 2 .* differ from the trainer's by 0.81 nats on average, 0.81 at most; "
    says += r"the tolerance is 0.8 nats on average, 0.8 at most"
    with pytest.raises(LogprobCheckFailed, match=says):
        await server.update(check, two)

    assert not any("rl parity" in message for message in heard.messages)
    server.boot, server.noise = "second", 0.2  # more than rounding makes
    await server.update(check, one)
    assert check.calibrations[server.root].tolerance == Difference(*[pytest.approx(0.2 * FACTOR)] * 2)
    assert any("rl parity" in message for message in heard.messages)

    async def restarted(weights: WeightsManifest) -> Served:
        server.boot = "third"
        return await server.load(weights)

    server.load_weights = restarted
    with pytest.raises(ServerError, match="started again while it loaded version 1"):
        await server.update(check, one)


@pytest.mark.parametrize(
    ("case", "gave"), [("other version", [0, 2]), ("unusable", [0, 2]), ("unusable, known", [1, 2])]
)
async def test_what_a_server_is_given_to_be_calibrated(server, tmp_path, case, gave):
    """Contract: one that serves something else, or has unusable weights, gets the base first; a known one does not."""
    check = LogprobCheck()
    if case == "other version":
        server.now = commit(tmp_path, 7)
    if case == "unusable, known":
        await server.update(check, commit(tmp_path, 1))
    server.unusable = case != "other version"
    await server.update(check, commit(tmp_path, 2))
    assert server.gave == gave
    assert check.calibrations[server.root].tolerance is not None


async def test_versions_without_a_reference_are_checked_by_hashes_and_that_is_said_once(server, tmp_path, heard):
    """Contract: also later, when there is one: a server that samples never goes back to the base for a calibration."""
    check = LogprobCheck()
    for version in (4, 5):
        await server.update(check, commit(tmp_path, version, None))
    server.now = replace(server.now, reference=None)
    await server.update(check, commit(tmp_path, 6))
    assert (server.gave, server.scored) == ([4, 5, 6], 0)
    assert heard.messages == [
        "servers are checked by hashes alone: a version has no log-probabilities of the fixed prompt"
    ]


async def test_a_base_that_cannot_be_read_now_is_trouble_not_a_run_without_one(server, tmp_path, monkeypatch):
    """Contract: a file system that is away fails the load, which is tried again; nothing goes unchecked by it."""

    def away(directory):
        raise CommitError("away")

    five = commit(tmp_path, 5)
    monkeypatch.setattr("prime_rl.fleet.logprob_check.weights_manifest", away)
    with pytest.raises(CommitError, match="away"):
        await server.update(LogprobCheck(), five)


@pytest.mark.parametrize(("noise", "said"), [(1.5, "1.5"), (math.nan, "inf")])
async def test_a_server_that_computes_another_model_is_never_calibrated(server, tmp_path, noise, said):
    server.noise = noise
    one, problem = commit(tmp_path, 1), f"does not compute the trainer's model: on the base weights .* {said} nats"
    for _ in range(2):
        with pytest.raises(LogprobCheckFailed, match=problem):
            await server.update(LogprobCheck(), one)


async def test_a_server_that_keeps_what_it_had_is_found_within_the_tolerance(server, tmp_path):
    """Going back to what it really serves is no failure, nor is loading the same again."""
    check, one, two = LogprobCheck(), commit(tmp_path, 1), commit(tmp_path, 2, MOVED)
    await server.update(check, one)

    async def stale(weights: WeightsManifest) -> Served:
        return await server.load(replace(weights, reference=one.reference))

    server.load_weights = stale
    for version in (two, one, two, one, one):
        if version is two:
            with pytest.raises(LogprobCheckFailed, match="unchanged since the last version"):
                await server.update(check, version)
        else:
            await server.update(check, version)
    server.load_weights = server.load
    await server.update(check, two)


async def test_each_engine_of_a_server_with_several_is_scored(server, tmp_path):
    """Contract: an engine with old weights, or another computation, is found behind others that are right."""
    check, one = LogprobCheck(), commit(tmp_path, 1)
    server.engines = 3
    await server.update(check, one)
    assert server.scored == 6
    for stale, version, says in (
        (LOGPROBS, commit(tmp_path, 2, MOVED), "unchanged since the last version"),
        ([logprob + 2 * LEAST_MEAN for logprob in LOGPROBS], one, r"differ from the trainer's by 0.002 nats"),
    ):
        server.stale = list(stale)
        with pytest.raises(LogprobCheckFailed, match=says):
            await server.update(check, version)


async def test_a_server_that_does_not_score_the_prompt_fails(server, tmp_path):
    """Contract: before it is calibrated, and after it; and so does one that answers with what is no number."""
    check, one, two = LogprobCheck(), commit(tmp_path, 1), commit(tmp_path, 2)
    for answer in (UserError("no such thing"), ServerError("it failed"), None):
        server.answer = answer
        if answer is not None:
            with pytest.raises(LogprobCheckFailed, match=f"does not score the fixed prompt, which .*: {answer}"):
                await server.update(check, one)
    await server.update(check, one)
    server.answer = ServerError("it failed")
    with pytest.raises(LogprobCheckFailed, match="does not score the fixed prompt: it failed"):
        await server.update(check, two)
    server.answer, server.noise = None, math.nan
    with pytest.raises(LogprobCheckFailed, match="does not compute it"):
        await server.update(check, two)
