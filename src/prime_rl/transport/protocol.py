"""The protocol between trainer, orchestrator and engines, as pure functions of what stands in the run directory.

The processes share no memory and no lock; each looks at the committed names and decides by these functions. The model checker in
`tests/unit/protocol` drives the very same ones through all interleavings of commits, updates, prunes, crashes and resumes.

Words: a *life* (incarnation) is one run of the trainer from a start step. `versions` maps the number of a committed version to the life that made
it; `lives` maps each life to its start step, i.e. to the number of updates it found done.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

BASE = 0  # the version that is the base model: made by no life, never pruned


@dataclass(frozen=True)
class Life:
    """One life of the trainer: its number, and the step it started from. -1 before the first."""

    number: int = -1
    start: int = 0


@dataclass(frozen=True)
class Lease:
    """What the orchestrator and its engines may still read: no version from `version` on, of the lives up to `life`, may be removed."""

    life: int
    version: int


def current_life(lives: Mapping[int, int]) -> Life:
    """The newest life."""
    return Life(max(lives), lives[max(lives)]) if lives else Life()


def valid(version: int, made_by: int, lives: Mapping[int, int]) -> bool:
    """Whether a version made by life `made_by` belongs to the history that is being continued: no later life began before it."""
    return version == BASE or all(version <= start for life, start in lives.items() if life > made_by)


def valid_versions(versions: Mapping[int, int], lives: Mapping[int, int]) -> list[int]:
    """The versions that may be served, ascending."""
    return sorted(version for version, life in versions.items() if valid(version, life, lives))


def newest_version(versions: Mapping[int, int], lives: Mapping[int, int]) -> int | None:
    """What the engines should serve: the newest version of the present history; None before the trainer has begun a life."""
    if not lives:
        return None
    return max(valid_versions(versions, lives), default=None)


def goes_on_from(step: int, lives: Mapping[int, int]) -> bool:
    """Whether the present history goes on from `step`: a life began there, and none since began before it."""
    return any(
        start == step and all(later >= step for other, later in lives.items() if other > life)
        for life, start in lives.items()
    )


def to_set_aside(versions: Mapping[int, int], lives: Mapping[int, int]) -> list[int]:
    """Versions that a new life gives up; the trainer renames them aside after it has committed its life and before its first version."""
    return sorted(version for version, life in versions.items() if not valid(version, life, lives))


def spared(given_up: Mapping[int, int], sparing: Mapping[int, int]) -> int | None:
    """The newest of the given-up steps (and the lives that made them), if a life that spares its likes gave it up; None: nothing is spared.

    Args:
        sparing: Lives that were opened by hand or without any state, and their start steps.
    """
    newest = max(given_up, default=None)
    return None if newest is None or valid(newest, given_up[newest], sparing) else newest


def may_batch(first: int, last: int, life: int, lives: Mapping[int, int]) -> bool:
    """Whether an episode that the versions `first` … `last` sampled, as they stood in life `life`, may still go into a batch."""
    return first <= last and valid(last, life, lives)


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
    lives: Mapping[int, int],
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
        acknowledged the newest life nothing is pruned: it may still have to go back to that life's start.
    """
    life, valid_now = current_life(lives), valid_versions(versions, lives)
    if keep is None or not valid_now:
        return []
    floor = valid_now[-1] - async_level - keep
    if lease is not None:
        if lease.life < life.number:
            return []
        floor = min(floor, lease.version)
    needed = {version for step in checkpoints for version in range(serve_floor(step, async_level), step + 1)}
    return [version for version in valid_now if BASE < version < floor and version not in needed]


def first_lease(held: Lease | None) -> Lease:
    """What an orchestrator that starts commits before it looks for a version: the lease that a dead one left, else one that holds everything.

    Looking first would be too late: a trainer that saw no lease may be removing the very version that is then chosen.
    """
    return held or Lease(-1, BASE)


def lease_to_load(held: Lease, life: int, version: int) -> Lease:
    """What is committed before any engine reads `version` of `life`: an engine whose load fails reads again what it served before."""
    return Lease(life, min(held.version, version))


def lease_to_hold(life: int, served: int, reading: Collection[int] = ()) -> Lease:
    """What is committed once all engines that are given work serve `served`. Engines that come back meanwhile may still be `reading` older ones."""
    return Lease(life, min([served, *reading]))


def joinable(parts: Mapping[int, int], lives: Mapping[int, int]) -> list[int]:
    """Trainer parts (step: life that saved it) that may become joint checkpoints, ascending: those of the present history."""
    return sorted(step for step, life in parts.items() if valid(step, life, lives))


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
