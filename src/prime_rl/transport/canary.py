"""The canary of a version: a fixed prompt, and how likely the trainer holds each of its tokens. It goes along in the version's manifest.

A hash says what was read; the canary says what is computed. Whoever serves the version scores the same prompt and compares.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

LENGTH = 64  # tokens


@dataclass(frozen=True)
class Canary:
    """T token ids, and the log-probability (nats, temperature 1) of every one but the first, given those before it: T - 1 of them."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    def as_extra(self) -> dict[str, Any]:
        """As a manifest holds it."""
        return {"tokens": list(self.tokens), "logprobs": list(self.logprobs)}


def canary_tokens(vocabulary: int) -> list[int]:
    """The prompt for a model with so many token ids: the same everywhere and always. Ids are drawn from all of them, so that no tokenizer is needed."""
    return [xxhash.xxh3_64_intdigest(f"canary/{place}".encode()) % vocabulary for place in range(LENGTH)]


def read_canary(extra: Mapping[str, Any]) -> Canary | None:
    """The canary in a manifest's `extra`; None where its writer scored none.

    Raises:
        KeyError, TypeError, ValueError: there is something else in its place.
    """
    found = extra.get("canary")
    if found is None:
        return None
    canary = Canary(tuple(map(int, found["tokens"])), tuple(map(float, found["logprobs"])))
    if len(canary.logprobs) != len(canary.tokens) - 1 or not all(map(math.isfinite, canary.logprobs)):
        raise ValueError("a canary needs one finite log-probability for every token but the first")
    return canary
