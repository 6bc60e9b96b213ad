"""Mutations of the weights on their way into a real engine, which the check of logprobs finds. What happens to files,
the hash finds: test_inference.py.

A version is committed whose hashes are those of wrong tensors and whose fixed prompt has the log-probabilities of the
right ones, as the trainer would have scored it: hashes have nothing to find. That a reload really packs heads and
experts again: test_inference.py. In bfloat16 on a GPU: tests/gpu/test_wrong_weights.py.
"""

import pytest

from prime_rl.fleet.logprob_check import LEAST_LARGEST, LEAST_MEAN, LogprobCheck, LogprobCheckFailed
from support import trainer as support
from support import wrong_weights
from support.wrong_weights import DRIFTED, STEPPED, Mutation, Run, flip, skip_a_tensor, stay, swap_layers

world, make_policy, run = support.world, support.make_policy, wrong_weights.run


async def test_right_weights_are_in_a_narrow_tolerance(run: Run) -> None:
    """Contract: float32 servers compute the trainer's numbers to 1e-4 nats, on the base and far from it; also one that
    serves something else when first met, and a prompt that was asked before is computed anew."""
    assert (await run.load(run.base)).largest < 1e-4
    drifted = run.commit(run.changed(DRIFTED))
    for version in (drifted, run.base, drifted):
        assert (await run.load(version)).largest < 1e-4
    tolerance = run.check.calibrations[run.server.root].tolerance
    assert tolerance is not None
    assert (tolerance.mean, tolerance.largest) == (LEAST_MEAN, LEAST_LARGEST)

    run.check = LogprobCheck()  # another orchestrator goes on: the server serves the drifted weights
    assert (await run.load(drifted)).largest < 1e-4
    assert run.check.calibrations[run.server.root].tolerance == tolerance


CAUGHT = [skip_a_tensor, swap_layers, stay, flip(30)]


@pytest.mark.parametrize("mutate", CAUGHT, ids=["skipped", "swapped", "stale", "exponent bit"])
async def test_the_logprob_check_finds_what_a_loader_did_wrong(run: Run, mutate: Mutation) -> None:
    """Contract: far from the base one tensor that was not loaded, two swapped layers, weights that stayed as they were,
    and one flipped bit of an exponent are found, though the server reports the version's hash."""
    await run.assert_caught(mutate, DRIFTED)


async def test_the_logprob_check_finds_weights_that_stay_what_they_were_though_the_band_hides_it(run: Run) -> None:
    """Contract: a server that keeps weights a step old is within the tolerance, but its numbers are the very same."""
    await run.load(run.base)
    version = run.commit(run.changed(STEPPED), run.changed(0.0))
    with pytest.raises(LogprobCheckFailed, match="unchanged since the last version"):
        await run.load(version)
    assert run.hides(await run.difference(version))
