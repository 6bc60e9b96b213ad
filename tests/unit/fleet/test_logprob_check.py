"""The canary: when a server's numbers are its own noise and when they are another model's, and what becomes of a server that computes the wrong thing."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from prime_rl.errors import UserError
from prime_rl.fleet import weight_sync
from prime_rl.fleet.client import CannotScore, NoWeightsServed, Served, ServerError
from prime_rl.fleet.logprob_check import FACTOR, LEAST_MEAN, Difference, LogprobCheck, LogprobCheckFailed, compare
from prime_rl.transport.commit import CommitError, stage
from prime_rl.transport.weights import (
    LogprobReference,
    WeightsManifest,
    manifest_extra,
    reference_tokens,
    version_dir,
    weights_manifest,
)
from support.fleet import FleetWorld, Server, run
from support.scripted import until

LOGPROBS = (-1.0, -2.0, -3.0)
TOKENS = (5, 6, 7, 8)
REFERENCE = LogprobReference(TOKENS, LOGPROBS)


# -- numbers -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("server", [[], [-1.0], [-1.0, math.nan], [-1.0, -math.inf]])
def test_what_is_no_answer_is_infinitely_far_and_in_no_band(server):
    assert not compare(server, [-1.0, -2.0]).within(Difference(1e9, 1e9))


def test_the_prompt_is_the_same_for_ever():
    """Versions of earlier runs, and of other machines, are compared by it."""
    assert reference_tokens(1000)[:4] == [644, 24, 164, 419]
    assert all(0 <= token < 50 for token in reference_tokens(50))


@pytest.mark.parametrize(
    "found", [{"tokens": [1, 2]}, {"tokens": [1, 2], "logprobs": []}, {"tokens": [1, 2], "logprobs": [math.nan]}, 3]
)
def test_a_spoilt_canary_makes_a_manifest_unreadable(found, tmp_path):
    with stage(tmp_path / "step_1", step=1, producer="trainer", extra=manifest_extra(1, 0, {}) | {"reference": found}):
        pass
    with pytest.raises(CommitError, match="not as a version"):
        weights_manifest(tmp_path / "step_1")


@pytest.mark.parametrize("reference", [LogprobReference(TOKENS, LOGPROBS), None])
def test_a_logprob_reference_comes_back_from_a_manifest(reference, tmp_path):
    with stage(tmp_path / "step_1", step=1, producer="trainer", extra=manifest_extra(1, 0, {}, reference=reference)):
        pass
    assert weights_manifest(tmp_path / "step_1").reference == reference


# -- a server --------------------------------------------------------------------------------------------------------------------


class Scored:
    """A server that is off by `noise`, serves what it is given, and remembers that."""

    root = "http://engine"

    def __init__(self, served: WeightsManifest) -> None:
        self.noise = 0.0
        self.answer: Exception | None = None
        self.boot = "first"
        self.now = served
        self.gave: list[int] = []
        self.scored = 0
        self.engines = 1
        self.unusable = False  # until it is given something
        self.stale: list[float] | None = None  # what the last of several engines goes on to answer

    async def served(self) -> Served:
        if self.unusable:
            raise NoWeightsServed("scripted")
        return Served(self.now.version, self.now.hash, self.boot, engines=self.engines)

    async def give(self, weights: WeightsManifest) -> Served:
        self.gave.append(weights.version)
        self.unusable = False
        self.now = weights
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

    async def update(self, canaries: LogprobCheck, weights: WeightsManifest) -> None:
        """As `InferenceClient.update`."""
        await canaries.prepare(self, weights)
        await canaries.check(self, weights, await self.give(weights))


def commit(root: Path, version: int, reference: LogprobReference | None = REFERENCE) -> WeightsManifest:
    place = version_dir(root, version)
    with stage(place, step=version, producer="trainer", extra=manifest_extra(version, 0, {}, reference=reference)):
        pass
    return replace(weights_manifest(place), hash=f"hash {version}")


def commit_without_reading(root: Path, version: int) -> WeightsManifest:
    return WeightsManifest(version, 0, f"hash {version}", {}, None, version_dir(root, version), REFERENCE)


@pytest.fixture
def server(tmp_path, monkeypatch) -> Scored:
    base = commit(tmp_path, 0)
    monkeypatch.setattr("prime_rl.fleet.logprob_check.weights_manifest", lambda directory: base)
    return Scored(base)


async def test_a_server_is_calibrated_before_it_is_given_anything_and_once(server, tmp_path):
    """A quantized server is farther off than others, on every version."""
    canaries, one, two = LogprobCheck(), commit(tmp_path, 1), commit(tmp_path, 2)
    server.noise = 0.05
    await server.update(canaries, one)
    assert canaries.band(server.root) == Difference(pytest.approx(0.05 * FACTOR), pytest.approx(0.05 * FACTOR))
    assert server.gave == [1]
    server.noise = 0.79
    await server.update(canaries, two)
    assert server.scored == 3
    server.noise = 0.81
    with pytest.raises(
        LogprobCheckFailed,
        match=r"version 2 .* differ from the trainer's by 0.81 nats on average, 0.81 at most; the band is 0.8 nats on average, 0.8 at most",
    ):
        await server.update(canaries, two)


async def test_a_server_that_serves_something_else_is_given_the_base_to_be_calibrated(server, tmp_path):
    """The orchestrator was started again, or the server served another run."""
    server.now = commit(tmp_path, 7)
    canaries = LogprobCheck()
    await server.update(canaries, commit(tmp_path, 8))
    assert server.gave == [0, 8]
    assert canaries.band(server.root) is not None


@pytest.mark.parametrize("any_base", [True, False])
async def test_a_server_of_another_base_model_is_checked_by_hashes_where_that_may_be(server, tmp_path, any_base, heard):
    """Contract: an evaluation may start its server with a relative of the run's base; in a run that is an error."""
    server.now = commit(tmp_path, 7)
    give = server.give

    async def refuse(weights):
        if weights.version == 0:
            raise UserError("describes another base model")
        return await give(weights)

    server.give = refuse
    canaries = LogprobCheck(any_base=any_base)
    if not any_base:
        with pytest.raises(UserError, match="another base model"):
            await server.update(canaries, commit(tmp_path, 8))
        return
    await server.update(canaries, commit(tmp_path, 8))
    assert (server.gave, canaries.band(server.root)) == ([8], None)
    assert "another base model" in heard.messages[0]


@pytest.mark.parametrize("known", [True, False])
async def test_a_server_whose_weights_are_unusable_is_given_others(server, tmp_path, known):
    """Contract: only a load mends it, so that it is not asked first what it serves for ever. One that is not known yet gets the base."""
    canaries = LogprobCheck()
    if known:
        await server.update(canaries, commit(tmp_path, 1))
    server.gave.clear()
    server.unusable = True
    await server.update(canaries, commit(tmp_path, 2))
    assert server.gave == ([2] if known else [0, 2])
    assert canaries.band(server.root) is not None


async def test_a_server_that_samples_is_never_given_the_base(server, tmp_path, heard):
    """Contract: whether a server is checked is decided before it samples. A canary that comes later (the trainer's was switched off meanwhile) does not
    put it back on the base weights under episodes in flight."""
    canaries = LogprobCheck()
    await server.update(canaries, commit(tmp_path, 5, None))
    server.now = replace(server.now, reference=None)
    await server.update(canaries, commit(tmp_path, 6))
    assert server.gave == [5, 6]
    assert "checked by hashes alone" in heard.messages[0]


async def test_a_base_that_cannot_be_read_now_is_trouble_not_a_run_without_one(server, tmp_path, monkeypatch):
    """Contract: a file system that is away for a moment fails the load, which is tried again; nothing goes unchecked by it."""

    def away(directory):
        raise CommitError("away")

    monkeypatch.setattr("prime_rl.fleet.logprob_check.weights_manifest", away)
    with pytest.raises(ServerError, match="the logprob check cannot be calibrated: away"):
        await server.update(LogprobCheck(), commit_without_reading(tmp_path, 5))


async def test_a_server_that_was_started_again_is_calibrated_again(server, tmp_path):
    canaries, one = LogprobCheck(), commit(tmp_path, 1)
    await server.update(canaries, one)
    server.boot, server.noise = "second", 0.1
    await server.update(canaries, one)
    assert canaries.band(server.root) == Difference(pytest.approx(0.1 * FACTOR), pytest.approx(0.1 * FACTOR))
    give = server.give

    async def restarted(weights: WeightsManifest) -> Served:
        server.boot = "third"
        return await give(weights)

    server.give = restarted
    with pytest.raises(ServerError, match="started again while it loaded version 1"):
        await server.update(canaries, one)


@pytest.mark.parametrize(("noise", "said"), [(1.5, "1.5"), (math.nan, "inf")])
async def test_a_server_that_computes_another_model_is_never_calibrated(server, tmp_path, noise, said):
    server.noise = noise
    one, problem = commit(tmp_path, 1), f"does not compute the trainer's model: on the base weights .* {said} nats"
    for _ in range(2):
        with pytest.raises(LogprobCheckFailed, match=problem):
            await server.update(LogprobCheck(), one)


async def test_a_server_that_keeps_what_it_had_is_found_within_the_band(server, tmp_path):
    """A step moves less than the band; going back to what it really serves is no failure, nor is loading the same again."""
    canaries, one = LogprobCheck(), commit(tmp_path, 1)
    two = commit(tmp_path, 2, LogprobReference(TOKENS, (-1.001, -2.0, -3.001)))
    await server.update(canaries, one)
    give = server.give

    async def stale(weights: WeightsManifest) -> Served:
        await give(replace(weights, reference=one.reference))
        return await server.served()

    server.give = stale
    for version in (two, one, two, one, one):
        if version is two:
            with pytest.raises(LogprobCheckFailed, match="the very same as before"):
                await server.update(canaries, version)
        else:
            await server.update(canaries, version)
    server.give = give
    await server.update(canaries, two)


async def test_each_engine_of_a_server_with_several_is_scored(server, tmp_path):
    """Contract: an engine that keeps what it had, or computes something else, is found behind others that compute what they should."""
    canaries, one = LogprobCheck(), commit(tmp_path, 1)
    server.engines = 3
    await server.update(canaries, one)
    assert server.scored == 6
    server.stale = list(LOGPROBS)
    with pytest.raises(LogprobCheckFailed, match="the very same as before"):
        await server.update(canaries, commit(tmp_path, 2, LogprobReference(TOKENS, (-1.001, -2.0, -3.001))))
    server.stale = [logprob + 2 * LEAST_MEAN for logprob in LOGPROBS]
    with pytest.raises(LogprobCheckFailed, match=r"differ from the trainer's by 0.002 nats"):
        await server.update(canaries, one)


async def test_a_server_that_cannot_answer_is_not_checked_and_says_so(server, tmp_path, heard):
    """One line, not one a version. But one that could answer, and cannot any more, has failed."""
    canaries, one, two = LogprobCheck(), commit(tmp_path, 1), commit(tmp_path, 2)
    server.answer = CannotScore("no such thing")
    for version in (one, two):
        await server.update(canaries, version)
    assert [message for message in heard.messages if "hashes alone" in message] == [
        "http://engine is checked by hashes alone: no such thing"
    ]
    server.boot, server.answer = "second", None
    await server.update(canaries, one)
    for answer in (CannotScore("no such thing"), ServerError("it failed")):
        server.answer = answer
        with pytest.raises(LogprobCheckFailed, match=f"does not score the fixed prompt: {answer}"):
            await server.update(canaries, two)
    server.answer, server.noise = None, math.nan
    with pytest.raises(LogprobCheckFailed, match="does not compute it"):
        await server.update(canaries, two)


async def test_versions_without_a_reference_are_served_by_their_hash(server, tmp_path, heard):
    """A run that was begun before there were any: that is said once."""
    canaries = LogprobCheck()
    for version in (1, 2):
        await server.update(canaries, commit(tmp_path, version, None))
    server.now = replace(server.now, reference=None)
    assert len(heard.messages) == 1
    assert (
        "servers are checked by hashes alone: there are no log-probabilities of the fixed prompt in the version"
        in heard.messages[0]
    )
    assert server.scored == 0


# -- a run -----------------------------------------------------------------------------------------------------------------------

NOTHING_THAT_WAS_COMMITTED = 999


class Wrong(Server):
    """It says that it serves what it was given, but of the versions in `wrong` it computes something else; the canary tells after a while."""

    def __init__(self, root: str) -> None:
        self.wrong: set[int] = set()
        self.claim: Served | None = None
        super().__init__(root)

    async def served(self) -> Served:
        served = await super().served()
        return self.claim or served

    async def update(self, weights) -> Served:
        served = await super().update(weights)
        self.claim = None
        if weights.version in self.wrong:
            self.claim, self.now = served, Served(NOTHING_THAT_WAS_COMMITTED, "", served.boot)
            await asyncio.sleep(0.3)
            raise LogprobCheckFailed(f"{self.root} does not compute version {weights.version}: 0.3 nats")
        return served


def wrong_world(directory, servers: int, **settings) -> FleetWorld:
    world = FleetWorld(directory, servers, **settings)
    world.servers[-1] = wrong = Wrong(world.servers[-1].root)
    world.pool.pools[wrong.root].engine = wrong
    return world


async def test_one_of_two_servers_that_computes_something_else_gets_no_work_and_nothing_of_it_is_trained(
    tmp_path, heard
):
    """Contract: not even what ends while the canary is being scored, when the server says the right hash already. It is back with the first
    version that it computes."""
    world = wrong_world(tmp_path, 2, max_steps=6, max_error_rate=1.0, weights_timeout=20)
    wrong = world.servers[1]
    wrong.wrong = {1, 2, 3}
    pool_run = world.pool.pools[wrong.root].run

    async def held(*, episode_id: str, **rest):
        """Those of the second batch end while the first prompt is scored."""
        group, _, issue = map(int, episode_id.split("."))
        if group in range(3, 6) and issue == 0:
            await until(lambda: wrong.claim is not None)
        return await pool_run(episode_id=episode_id, **rest)

    world.pool.pools[wrong.root].run = held
    orchestrator = await run(world, 6, last=lambda: world.all_serve)
    assert all(NOTHING_THAT_WAS_COMMITTED not in world.really_sampled(step) for step in range(6))
    assert NOTHING_THAT_WAS_COMMITTED in world.pool.sampled.values(), (
        "nothing was sampled wrongly: the test shows nothing"
    )
    assert any("the run goes on without it" in message for message in heard.messages)
    assert len(orchestrator.fleet.ready) == 2


async def test_the_only_server_is_given_the_version_a_few_times_and_then_the_run_ends(tmp_path, monkeypatch):
    """Contract: it goes back to the earlier version in between, which it computes well; still the attempts are counted. The error is the canary's
    line."""
    monkeypatch.setattr(weight_sync, "RETRY_SECONDS", 0.01)
    world = wrong_world(tmp_path, 1, max_error_rate=1.0)
    (wrong,) = world.servers
    wrong.wrong = set(range(2, 9))
    with pytest.raises(UserError, match=r"does not compute version \d: 0.3 nats"):
        await run(world)
    given = [version for version, _ in wrong.updates]
    first = next(place for place, version in enumerate(given) if version >= 2)
    assert sum(version >= 2 for version in given) == weight_sync._ATTEMPTS
    assert any(version < 2 for version in given[first:]), "it was not given an earlier version in between"


async def test_a_run_does_not_begin_with_a_server_that_computes_something_else(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_sync, "RETRY_SECONDS", 0.01)
    world = wrong_world(tmp_path, 1)
    world.servers[0].wrong = {0}
    with pytest.raises(UserError, match="does not compute version 0"):
        await run(world)
    assert len(world.servers[0].updates) == weight_sync._ATTEMPTS
    assert not world.pool.sent


async def test_a_failed_canary_takes_back_an_earlier_proof(tmp_path):
    """The same version is loaded again, and computes something else this time: that the server says the same as before proves nothing."""
    world = wrong_world(tmp_path, 1)
    replica = world.orchestrator().fleet.replicas[0]
    manifest = weights_manifest(tmp_path / "weights" / "step_0")
    await replica.load(manifest)
    assert await replica.verify()
    world.servers[0].wrong = {0}
    with pytest.raises(LogprobCheckFailed):
        await replica.load(manifest)
    assert not await replica.verify()
    world.servers[0].wrong = set()
    await replica.load(manifest)
    assert await replica.verify()
