"""The protocol between trainer, orchestrator and engines, as pure functions of what stands in the run directory.

The processes share no memory and no lock; each looks at the committed names and decides by these functions. The model checker in
`tests/unit/protocol` drives the very same ones through all interleavings of commits, updates, prunes, crashes and resumes.

Words: an *incarnation* is one life of the trainer, from a start step on. `versions` maps the number of a committed version to the incarnation that made
it; `incarnations` maps each incarnation to its start step, i.e. to the number of updates it found done.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

BASE = 0  # the version that is the base model: made by no incarnation, never pruned


@dataclass(frozen=True)
class Incarnation:
    """One incarnation of the trainer: its number, and the step it started from. -1 before the first."""

    number: int = -1
    start: int = 0


@dataclass(frozen=True)
class Lease:
    """What the orchestrator and its engines may still read: no version from `version` on, of the incarnations up to `incarnation`, may be removed."""

    incarnation: int
    version: int


def current_incarnation(incarnations: Mapping[int, int]) -> Incarnation:
    """The newest incarnation."""
    return Incarnation(max(incarnations), incarnations[max(incarnations)]) if incarnations else Incarnation()


def valid(version: int, made_by: int, incarnations: Mapping[int, int]) -> bool:
    """Whether a version made by incarnation `made_by` belongs to the history that is being continued: no later incarnation began before it."""
    return version == BASE or all(
        version <= start for incarnation, start in incarnations.items() if incarnation > made_by
    )


def valid_versions(versions: Mapping[int, int], incarnations: Mapping[int, int]) -> list[int]:
    """The versions that may be served, ascending."""
    return sorted(version for version, incarnation in versions.items() if valid(version, incarnation, incarnations))


def newest_version(versions: Mapping[int, int], incarnations: Mapping[int, int]) -> int | None:
    """What the engines should serve: the newest version of the present history; None before the trainer has begun an incarnation."""
    if not incarnations:
        return None
    return max(valid_versions(versions, incarnations), default=None)


def goes_on_from(step: int, incarnations: Mapping[int, int]) -> bool:
    """Whether the present history goes on from `step`: an incarnation began there, and none since began before it."""
    return any(
        start == step and all(later >= step for other, later in incarnations.items() if other > incarnation)
        for incarnation, start in incarnations.items()
    )


def to_set_aside(versions: Mapping[int, int], incarnations: Mapping[int, int]) -> list[int]:
    """Versions that a new incarnation gives up; the trainer renames them aside after it has committed its incarnation and before its first version."""
    return sorted(version for version, incarnation in versions.items() if not valid(version, incarnation, incarnations))


def spared(given_up: Mapping[int, int], sparing: Mapping[int, int]) -> int | None:
    """The newest of the given-up steps (and the incarnations that made them), if an incarnation that spares its likes gave it up; None: nothing is spared.

    Args:
        sparing: Incarnations that were opened by hand or without any state, and their start steps.
    """
    newest = max(given_up, default=None)
    return None if newest is None or valid(newest, given_up[newest], sparing) else newest


def may_batch(first: int, last: int, incarnation: int, incarnations: Mapping[int, int]) -> bool:
    """Whether an episode that the versions `first` … `last` sampled, as they stood in incarnation `incarnation`, may still go into a batch."""
    return first <= last and valid(last, incarnation, incarnations)


def first_to_collect(batches: Collection[int], start: int) -> int:
    """The first step from `start` on without a committed batch. Batches from `start` on are trained (again) as they are."""
    step = start
    while step in batches:
        step += 1
    return step


def serve_floor(step: int, async_level: int) -> int:
    """The oldest version on which an episode for `step` may start."""
    return max(0, step - async_level)


def planned_step(step: int, groups: int, groups_per_batch: int) -> int:
    """The step that the next group will be trained at, as `groups` opened and unbatched ones stand before it while `step` is collected."""
    return step + groups // groups_per_batch


def may_start(step: int, version: int, async_level: int) -> bool:
    """The gate: whether an episode for `step` may start while the engines serve `version`."""
    return version >= serve_floor(step, async_level)


def too_old(step: int, first: int, max_off_policy_steps: int) -> bool:
    """The hard bound: whether a sample whose oldest token is of version `first` may no longer be trained at `step`."""
    return step - first > max_off_policy_steps


def prunable(
    versions: Mapping[int, int],
    incarnations: Mapping[int, int],
    *,
    lease: Lease | None,
    async_level: int,
    keep: int | None,
    checkpoints: Collection[int],
) -> list[int]:
    """Versions that nobody needs any more, ascending.

    Args:
        lease: What the orchestrator reads; None where there is no orchestrator.
        async_level: Steps that sampling may run ahead.
        keep: Versions kept beyond what is needed; None keeps all.
        checkpoints: Kept checkpoints and the one that is being saved; each needs the versions `[N - async_level, N]`.

    Returns:
        Never the base, never the newest, never a version that a reader holds or that a kept checkpoint needs. While the orchestrator has not
        acknowledged the newest incarnation nothing is pruned: it may still have to go back to that incarnation's start.
    """
    incarnation, valid_now = current_incarnation(incarnations), valid_versions(versions, incarnations)
    if keep is None or not valid_now:
        return []
    floor = valid_now[-1] - async_level - keep
    if lease is not None:
        if lease.incarnation < incarnation.number:
            return []
        floor = min(floor, lease.version)
    needed = {version for step in checkpoints for version in range(serve_floor(step, async_level), step + 1)}
    return [version for version in valid_now if BASE < version < floor and version not in needed]


def first_lease(held: Lease | None) -> Lease:
    """What an orchestrator that starts commits before it looks for a version: the lease that a dead one left, else one that holds everything.

    Looking first would be too late: a trainer that saw no lease may be removing the very version that is then chosen.
    """
    return held or Lease(-1, BASE)


def lease_to_load(held: Lease, incarnation: int, version: int) -> Lease:
    """What is committed before any engine reads `version` of `incarnation`: an engine whose load fails reads again what it served before."""
    return Lease(incarnation, min(held.version, version))


def lease_to_hold(incarnation: int, served: int, reading: Collection[int] = ()) -> Lease:
    """What is committed once all engines that are given work serve `served`. Engines that come back meanwhile may still be `reading` older ones."""
    return Lease(incarnation, min([served, *reading]))


def joinable(parts: Mapping[int, int], incarnations: Mapping[int, int]) -> list[int]:
    """Trainer parts (step: incarnation that saved it) that may become joint checkpoints, ascending: those of the present history."""
    return sorted(step for step, incarnation in parts.items() if valid(step, incarnation, incarnations))


def resume_step(complete: Collection[int], asked: int) -> int | None:
    """The checkpoint to go on from: the newest complete one for -1, else the one asked for; None where there is none."""
    if asked == -1:
        return max(complete, default=None)
    return asked if asked in complete else None


def expendable_checkpoints(complete: Collection[int], keep: int | None, keep_interval: int | None) -> list[int]:
    """Complete checkpoints beyond the `keep` newest, without those whose step is a multiple of `keep_interval`, ascending."""
    if keep is None:
        return []
    older = sorted(complete)[:-keep]
    return [step for step in older if keep_interval is None or step % keep_interval]
