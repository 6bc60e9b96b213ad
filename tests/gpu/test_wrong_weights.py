"""Mutations of the weights on their way into a bfloat16 engine on a GPU: what its wider tolerance finds, and what not.

On a CPU, with the loader's code removed too: tests/integration/test_wrong_weights.py. One server, a minute on an H200.
"""

import pytest
import torch

from prime_rl.inference import compat
from support import trainer as support
from support import wrong_weights
from support.wrong_weights import DRIFTED, Mutation, Run, flip, skip_a_tensor, stay, swap_layers

ENGINE = compat.installed_engine()
if not torch.cuda.is_available() or ENGINE is None or ENGINE.device != "cuda":
    pytest.skip("no GPU, or no vLLM for it", allow_module_level=True)

world, make_policy, run = support.world, support.make_policy, wrong_weights.run
FAR = 20 * DRIFTED  # there one tensor that stayed behind shows beside the noise of bfloat16; at 5 it does not


async def test_right_weights_are_within_the_tolerance(run: Run) -> None:
    """Contract: the noise of the base calibrates a tolerance that versions far from it stay in, there and back."""
    await run.load(run.base)
    drifted = run.commit(run.changed(DRIFTED))
    for version in (drifted, run.base, drifted):
        assert run.hides(await run.load(version))


@pytest.mark.parametrize(
    ("mutate", "by"),
    [(skip_a_tensor, FAR), (swap_layers, DRIFTED), (stay, DRIFTED), (flip(30), DRIFTED)],
    ids=["skipped", "swapped", "stale", "exponent bit"],
)
async def test_the_logprob_check_finds_what_a_loader_did_wrong(run: Run, mutate: Mutation, by: float) -> None:
    """Contract: found though the server says, by its hash, that it serves the version."""
    await run.assert_caught(mutate, by)
