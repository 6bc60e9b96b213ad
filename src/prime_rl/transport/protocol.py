"""The protocol between trainer, orchestrator and servers, as pure functions of what is committed in the run directory.

The processes share no memory and no lock; each reads the committed names and decides by these functions. The model
check in `tests/unit/protocol` calls them in all interleavings of commits, updates, prunes, crashes and resumes.

`versions` maps a committed version's number to the incarnation that made it; `incarnations` maps each incarnation of
the trainer to its start step, the number of updates that it began with.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

BASE = 0  # the base model: its manifest says incarnation 0, but it is valid in every one, and never pruned


@dataclass(frozen=True)
class Incarnation:
    """One incarnation of the trainer: its number, and the step it started from. `number` is -1 before the first."""

    number: int = -1
    start: int = 0


@dataclass(frozen=True)
class Lease:
    """What a reader may still read."""

    incarnation: int  # the newest it has seen; nothing is pruned until that is the current one
    version: int  # the oldest it may read


def current_incarnation(incarnations: Mapping[int, int]) -> Incarnation:
    return Incarnation(max(incarnations), incarnations[max(incarnations)]) if incarnations else Incarnation()


def valid(version: int, made_by: int, incarnations: Mapping[int, int]) -> bool:
    """Whether a version made by incarnation `made_by` counts: no later incarnation restarted from an earlier step."""
    return version == BASE or all(version <= start for number, start in incarnations.items() if number > made_by)


def valid_versions(versions: Mapping[int, int], incarnations: Mapping[int, int]) -> list[int]:
    """Return the versions that may be served, or the trainer's parts that may become joint checkpoints, ascending.
    `versions` gives the incarnation that made each version, or saved each part."""
    return sorted(version for version, incarnation in versions.items() if valid(version, incarnation, incarnations))


def newest_version(versions: Mapping[int, int], incarnations: Mapping[int, int]) -> int | None:
    """Return the version that servers should serve; None before the trainer has opened an incarnation."""
    return max(valid_versions(versions, incarnations), default=None) if incarnations else None


def continues_from(step: int, incarnations: Mapping[int, int]) -> bool:
    """Whether the lineage continues from `step`: an incarnation started there, and none since at an earlier step."""
    return any(start == step and valid(step, number, incarnations) for number, start in incarnations.items())


def superseded_versions(versions: Mapping[int, int], incarnations: Mapping[int, int]) -> list[int]:
    """Return the versions that the newest incarnation supersedes. The trainer renames or removes them after it has
    committed its incarnation and before its first version."""
    return sorted(versions.keys() - set(valid_versions(versions, incarnations)))


def may_batch(first: int, last: int, incarnation: int, incarnations: Mapping[int, int]) -> bool:
    """Return whether an episode sampled by versions `first` … `last` of `incarnation` may still be in a batch."""
    # `first > last`: servers went back while it ran. The scheduler cancels such episodes, so none should come here.
    return first <= last and valid(last, incarnation, incarnations)


def first_missing_batch(batches: Collection[int], start: int) -> int:
    """Return the first step from `start` on without a committed batch. Those before are trained (again) as they are."""
    step = start
    while step in batches:
        step += 1
    return step


def oldest_start_version(step: int, async_level: int) -> int:
    """Return the oldest version on which an episode for `step` may start."""
    return max(0, step - async_level)


def planned_step(step: int, groups: int, groups_per_batch: int) -> int:
    """Return the step the next group will be trained in: `groups` are not yet batched while `step` is collected."""
    return step + groups // groups_per_batch


def may_start(step: int, version: int, async_level: int) -> bool:
    """Whether an episode for `step` may start while servers serve `version`."""
    return version >= oldest_start_version(step, async_level)


def too_old(step: int, first: int, max_off_policy_steps: int) -> bool:
    """Whether a sample whose oldest token is of version `first` may no longer be trained at `step`."""
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
    """Return the versions that nobody needs any more, ascending.

    Never the base, never the newest, never a version that a reader holds or that a kept checkpoint needs. Nothing while
    a reader has not acknowledged the newest incarnation: it may still have to go back to its start.

    Args:
        lease: What readers hold; None if there are none.
        keep: Versions kept beyond what is needed; None keeps all.
        checkpoints: Kept checkpoints and the one that is being saved; each needs the versions `[N - async_level, N]`.
    """
    incarnation, valid_now = current_incarnation(incarnations), valid_versions(versions, incarnations)
    if keep is None or not valid_now:
        return []
    floor = valid_now[-1] - async_level - keep
    if lease is not None:
        if lease.incarnation < incarnation.number:
            return []
        floor = min(floor, lease.version)
    needed = {version for step in checkpoints for version in range(oldest_start_version(step, async_level), step + 1)}
    return [version for version in valid_now if BASE < version < floor and version not in needed]


def first_lease(held: Lease | None) -> Lease:
    """Return what an orchestrator that starts commits: the lease left by a dead orchestrator, else one on everything.

    It does so before it looks for a version: a trainer that saw no lease may be removing the one that is then chosen.
    """
    return held or Lease(-1, BASE)


def lease_before_load(held: Lease, incarnation: int, version: int) -> Lease:
    """Return what is committed before any server reads `version`: one whose load fails restores what it served."""
    return Lease(incarnation, min(held.version, version))


def lease_after_load(incarnation: int, served: int, reading: Collection[int] = ()) -> Lease:
    """Return what is committed once all servers in use serve `served`. Others may still be `reading` older versions."""
    return Lease(incarnation, min([served, *reading]))


def expendable_checkpoints(complete: Collection[int], keep: int | None, keep_interval: int | None) -> list[int]:
    """Return complete checkpoints beyond the `keep` newest, except at multiples of `keep_interval`, ascending."""
    if keep is None:
        return []
    older = sorted(complete)[:-keep]
    return [step for step in older if keep_interval is None or step % keep_interval]
