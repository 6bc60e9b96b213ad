"""Deliberate bugs: each is one decision or one order of the protocol done wrong, with bounds within which it is found.

One that replaces no function is a branch of the model, which asks `Bounds.bug` for its name.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from prime_rl.transport import protocol
from prime_rl.transport.protocol import Lease, current_incarnation, may_start, prunable, too_old

from .model import Bounds

SMALL = Bounds(steps=2)
SYNCHRONOUS = Bounds(steps=3, async_level=0, crashes=2, drain=False, killed="TO")


class Mutant(NamedTuple):
    """A bug in words, where to look, a word of the property that it breaks, and the functions that it replaces."""

    bug: str
    bounds: Bounds
    breaks: str
    rules: Mapping[str, Callable[..., Any]] = {}  # by their names in transport/protocol.py


@contextmanager
def mutated(name: str) -> Iterator[Bounds]:
    """Put a bug in. Gives the bounds within which the search must find it."""
    with ExitStack() as stack:
        for function, wrong in MUTANTS[name].rules.items():
            stack.enter_context(patch.object(protocol, function, wrong))
        yield MUTANTS[name].bounds._replace(bug=name)


def prune_in_a_new_incarnation(versions: Any, incarnations: Any, *, lease: Lease | None, **others: Any) -> list[int]:
    """As if readers had taken it up."""
    taken_up = lease and Lease(current_incarnation(incarnations).number, lease.version)
    return prunable(versions, incarnations, lease=taken_up, **others)


MUTANTS = {
    "lease-ignored": Mutant("pruning ignores the lease", Bounds(steps=2, async_level=0, killed="E"), "pruned",
        {"prunable": lambda *of, lease, **others: prunable(*of, lease=None, **others)}),
    "lease-of-target": Mutant("the lease of a new incarnation leaves out what is still read for a dead orchestrator",
        SYNCHRONOUS._replace(killed="TOE"), "pruned",
        {"lease_before_load": lambda held, incarnation, version: Lease(incarnation, version)}),
    "look-before-lease": Mutant("the orchestrator chooses a version before it holds a lease",
        Bounds(steps=4, async_level=0, keep_checkpoints=2, drain=False, killed="W"), "pruned"),
    "lease-of-served": Mutant("the lease is raised to what is served while another server reads an older version",
        Bounds(replicas=2, steps=3, async_level=0, interval=3, concurrent=1, drain=False, killed="E"), "pruned",
        {"lease_after_load": lambda incarnation, served, reading: Lease(incarnation, served)}),
    "prune-in-a-new-incarnation": Mutant("pruning goes on before the orchestrator has taken the new incarnation up",
        SYNCHRONOUS, "pruned", {"prunable": prune_in_a_new_incarnation}),
    "kept-weights-pruned": Mutant("the weights of a kept checkpoint are pruned",
        Bounds(steps=3, crashes=0, async_level=0), "needs",
        {"prunable": lambda *of, checkpoints, **others: prunable(*of, checkpoints=[], **others)}),
    "saving-not-kept": Mutant("the weights of a checkpoint that is being saved are pruned",
        Bounds(steps=3, crashes=0, async_level=0), "needs"),
    "aside-before-incarnation": Mutant("versions are set aside before the incarnation is committed", SMALL, "pruned"),
    "superseded-version-served": Mutant("the newest version is served, whichever incarnation made it",
        SMALL, "which a server has to load",
        {"newest_version": lambda versions, incarnations: max(versions) if incarnations else None}),
    "nothing-set-aside": Mutant("a new incarnation leaves the versions of superseded incarnations where they are",
        SMALL, "is committed already", {"superseded_versions": lambda versions, incarnations: []}),
    "old-incarnation-goes-on": Mutant("the orchestrator misses the trainer's new incarnation", SMALL, "given up"),
    "old-incarnation-batched": Mutant("finished episodes of a superseded incarnation are kept", SMALL, "given up"),
    "same-number-not-loaded": Mutant("a new incarnation's version is not loaded where one of that number is served",
        SMALL, "given up"),
    "gate-off-by-one": Mutant("the staleness gate is off by one", Bounds(steps=3, crashes=0), "async level",
        {"may_start": lambda step, version, level: may_start(step - 1, version, level)}),
    "plan-off-by-one": Mutant("the planned step forgets the groups before it",
        Bounds(steps=2, crashes=0, async_level=0), "async level",
        {"planned_step": lambda step, groups, per_batch: step}),
    "too-old-off-by-one": Mutant("the off-policy bound is off by one", Bounds(steps=3, crashes=0), "sampled by",
        {"too_old": lambda step, first, most: too_old(step - 1, first, most)}),
    "announced-late": Mutant("a new version is announced after the load instead of before", SMALL, "stamped"),
    "read-not-checked": Mutant("a server does not look again whether the directory is the one it verified",
        SMALL, "read that of"),
    "collect-again": Mutant("the orchestrator collects the last step again", SMALL, "is committed after",
        {"first_missing_batch": lambda batches, start: max(0, len(batches) - 1)}),
    "half-joined": Mutant("the joint manifest is written before both parts stand", SMALL, "only one part"),
    "resumed-from-removed": Mutant("a later checkpoint, which the trainer is about to supersede, makes the one that is "
        "resumed from expendable",
        Bounds(steps=3, async_level=0, interval=1, keep_checkpoints=1, killed="W"), "is removed before"),
    "old-status-believed": Mutant("the trainer's status of the earlier run is believed",
        Bounds(steps=2, interval=1, killed="W"), "no end can be reached"),
    "recovery-removed-first": Mutant("the recovery checkpoint is removed before the newer one is committed",
        Bounds(steps=3, interval=4), "removed before"),
}  # fmt: skip
