"""How many workers an environment gets, and when one is replaced: decisions alone, `crew` carries them out.

A crew grows and does not shrink. `max_workers` says what the machine can bear, load comes back with every step and every evaluation, and a
worker that was ended in between would cost its start (seconds of imports) just when episodes wait. What a worker hoards meanwhile is the
business of `recycle_mib`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Staff:
    """An environment's workers at one moment. Those on their way out, and the successors that are to replace one, are not counted."""

    workers: int  # ready or not
    starting: int  # of these, not ready yet: the room that they bring is still to come
    waiting: int  # episodes for which no worker has room


def to_start(staff: Staff, seats: int, most: int, at_once: int) -> int:
    """How many more workers to start now.

    As many as the waiting episodes fill, once those that are starting have taken theirs: a single episode that waits is enough for one.

    Args:
        seats: Episodes that one worker runs at a time.
        most: Workers, at most.
        at_once: Workers that may be starting together; more would only take the processor from each other.
    """
    left = staff.waiting - staff.starting * seats
    needed = -(-left // seats)
    return max(0, min(needed, most - staff.workers, at_once - staff.starting))


def why_replace(finished: int, resident: int, episodes: int | None, mib: int | None) -> str | None:
    """Why a worker is to be replaced, None while it is not.

    Args:
        finished: Episodes that it has finished.
        resident: Bytes of memory of the worker and what it has started.
        episodes, mib: The limits, where there are any.
    """
    if episodes is not None and finished >= episodes:
        return f"has finished {finished} episodes (recycle_episodes {episodes})"
    if mib is not None and resident > mib << 20:
        return f"holds {resident >> 20} MiB (recycle_mib {mib})"
    return None
