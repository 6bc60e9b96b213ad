"""Seeds of single requests, derived from the run's seed."""

import xxhash


def request_seed(seed: int, subject: str, number: int) -> int:
    """A 31-bit seed for attempt `number` at `subject`: the same in every run with the same seed, and unrelated to its neighbours'."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{subject}/{number}".encode()) & 0x7FFFFFFF
