"""Small samples for tests."""

from array import array
from collections.abc import Sequence
from typing import Any

from prime_rl.envs.protocol import SampleTokens


def sample_tokens(
    prompt: Sequence[int], sampled: Sequence[int], logprobs: Sequence[float], reward: float = 0.0, **more: Any
) -> SampleTokens:
    """A prompt, and what was sampled after it."""
    mask = bytes([False] * len(prompt) + [True] * len(sampled))
    values = array("f", [*[0.0] * len(prompt), *logprobs])
    return SampleTokens(array("i", [*prompt, *sampled]), mask, values, len(prompt), reward, **more)
