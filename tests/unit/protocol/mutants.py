"""Deliberate bugs: each is one decision or one order of the protocol done wrong, with bounds within which the check must find it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from prime_rl.transport import protocol
from prime_rl.transport.protocol import Lease

from .state import Bounds, Rules

SMALL = Bounds(steps=2)


class Mutant(NamedTuple):
    """A bug in words, the rules with it, where to look, and a word of the property that it breaks."""

    bug: str
    rules: Rules
    bounds: Bounds
    breaks: str


Steps = Mapping[int, int]


def prune_before_the_new_incarnation_is_taken_up(
    versions: Steps, incarnations: Steps, *, lease: Lease | None, **others: Any
) -> list[int]:
    if lease is not None:
        lease = Lease(protocol.current_incarnation(incarnations).number, lease.version)
    return protocol.prunable(versions, incarnations, lease=lease, **others)


MUTANTS = {
    "lease-ignored": Mutant("pruning ignores the lease",
        Rules(prunable=lambda *of, lease, **others: protocol.prunable(*of, lease=None, **others)), Bounds(steps=2, async_level=0, killed="E"), "pruned"),
    "lease-raised-early": Mutant("the lease is raised before the load ends",
        Rules(lease_waits_for_load=False), Bounds(steps=3, crashes=1, async_level=0, killed="TE"), "pruned"),
    "lease-of-target": Mutant("the lease of a new incarnation covers what is loaded, not what the engines go back to",
        Rules(lease_before_load=lambda held, incarnation, version: Lease(incarnation, version)), Bounds(steps=3, async_level=0, crashes=2, killed="TO"), "pruned"),
    "look-before-lease": Mutant("the orchestrator chooses a version before it holds a lease",
        Rules(lease_before_look=False), Bounds(steps=4, async_level=0, keep_checkpoints=2, drain=False, killed="W"), "pruned"),
    "lease-of-served": Mutant("the lease is raised to what the others serve while an engine that joins reads an older version",
        Rules(lease_after_load=lambda incarnation, served, reading: Lease(incarnation, served)), Bounds(replicas=2, steps=3, crashes=0, interval=3, drain=False), "pruned"),
    "prune-in-a-new-incarnation": Mutant("pruning goes on before the orchestrator has taken the new incarnation up",
        Rules(prunable=prune_before_the_new_incarnation_is_taken_up), Bounds(steps=3, async_level=0, crashes=2, drain=False, killed="TO"), "pruned"),
    "kept-weights-pruned": Mutant("the weights of a kept checkpoint are pruned",
        Rules(prunable=lambda *of, checkpoints, **others: protocol.prunable(*of, checkpoints=[], **others)), Bounds(steps=3, crashes=0, async_level=0), "needs"),
    "saving-not-kept": Mutant("the weights of a checkpoint that is being saved are pruned",
        Rules(saving_counts_as_kept=False), Bounds(steps=3, crashes=0, async_level=0), "needs"),
    "aside-before-incarnation": Mutant("versions are set aside before the new incarnation is committed",
        Rules(incarnation_before_aside=False), SMALL, "pruned"),
    "given-up-version-served": Mutant("the newest version is served, whichever incarnation made it",
        Rules(newest_version=lambda versions, incarnations: max(versions) if incarnations else None), SMALL, "which an engine has to load"),
    "nothing-set-aside": Mutant("a new incarnation leaves the versions of given-up incarnations where they are",
        Rules(superseded_versions=lambda versions, incarnations: []), SMALL, "is committed already"),
    "old-incarnation-goes-on": Mutant("the orchestrator does not notice the trainer's new incarnation",
        Rules(follow_new_incarnation=False, incarnations_read_at_seal=False), SMALL, "given up"),
    "old-incarnation-batched": Mutant("finished episodes of a given-up incarnation are kept",
        Rules(may_batch=lambda first, last, incarnation, incarnations: True), SMALL, "given up"),
    "old-version-kept": Mutant("what is served is gone on with, though the new incarnation gave it up",
        Rules(may_stay=lambda first, last, incarnation, incarnations: True), SMALL, "which an engine has to load"),
    "incarnations-not-read-at-cut": Mutant("a batch is cut by the incarnations that were read before",
        Rules(incarnations_read_at_seal=False), SMALL, "given up"),
    "same-number-not-loaded": Mutant("a version of the new incarnation is not loaded where one of that number is served",
        Rules(load_anew=False), SMALL, "given up"),
    "gate-off-by-one": Mutant("the staleness gate is off by one",
        Rules(may_start=lambda step, version, level: protocol.may_start(step - 1, version, level)), Bounds(steps=3, crashes=0), "async level"),
    "plan-off-by-one": Mutant("the planned step forgets the groups before it",
        Rules(planned_step=lambda step, groups, per_batch: step), Bounds(steps=2, crashes=0, async_level=0), "async level"),
    "too-old-off-by-one": Mutant("the off-policy bound is off by one",
        Rules(too_old=lambda step, first, most: protocol.too_old(step - 1, first, most)), Bounds(steps=3, crashes=0), "sampled by"),
    "reissued-ungated": Mutant("episodes that are issued again do not ask the gate",
        Rules(gate_reissued=False), Bounds(steps=2, async_level=0, crashes=2, killed="TO"), "async level"),
    "engine-without-incarnation": Mutant("the proof compares versions only, so that a restarted engine passes once it was given the next version",
        Rules(engine_has_an_incarnation=False), Bounds(steps=3, killed="R", async_level=1, max_off_policy=2), "something else"),
    "unproven-batch": Mutant("a batch is cut without a proof of what the engines serve",
        Rules(prove_before_batch=False), Bounds(steps=2, killed="R"), "something else"),
    "unproven-load": Mutant("an engine is given a new incarnation's version without a proof of what it served before",
        Rules(prove_before_load=False), Bounds(steps=3, crashes=2, concurrent=1, drain=False, killed="TR"), "something else"),
    "announced-late": Mutant("a new version is announced after the load instead of before",
        Rules(announce_before_load=False), SMALL, "stamped"),
    "read-not-checked": Mutant("an engine does not look again whether the directory is the one it verified",
        Rules(read_is_checked_after=False), SMALL, "read that of incarnation"),
    "leaver-given-work": Mutant("an engine that is to leave, and stays on its version, is given new episodes",
        Rules(leaver_gets_nothing_new=False), Bounds(replicas=2, steps=2, crashes=0, leaves=1, drain=False), "stamped"),
    "left-unproven": Mutant("an engine is let go without a proof of what it served",
        Rules(prove_before_leaving=False), Bounds(replicas=2, steps=2, crashes=1, leaves=1, concurrent=1, drain=False, killed="R"), "something else"),
    "no-reconcile": Mutant("the ledger is not completed from the manifests at start",
        Rules(reconcile=False), SMALL, "accounted for"),
    "issued-lost": Mutant("episodes that the ledger never saw end are forgotten at start",
        Rules(unflushed_is_issued_again=False), SMALL, "accounted for"),
    "collect-again": Mutant("the orchestrator collects the last step again",
        Rules(first_missing_batch=lambda batches, start: max(0, len(batches) - 1)), SMALL, "is committed after"),
    "half-joined": Mutant("the joint manifest is written before both parts stand",
        Rules(join_needs_both=False), SMALL, "only one part"),
    "resumed-from-removed": Mutant("a later checkpoint, which the trainer is about to give up, makes the one that is resumed from expendable",
        Rules(keeps_resumed=False), Bounds(steps=3, async_level=0, interval=1, keep_checkpoints=1, killed="W"), "is removed before"),
    "old-status-believed": Mutant("the trainer's status of the earlier run is believed",
        Rules(fresh_status=False), Bounds(steps=2, interval=1, killed="W"), "no end can be reached"),
    "recovery-removed-first": Mutant("the recovery checkpoint is removed before the newer one is committed",
        Rules(newer_recovery_first=False), Bounds(steps=3, interval=4), "removed before"),
    "part-missing-at-end": Mutant("a trainer that recovers and is asked to stop at once saves nothing",
        Rules(save_if_none_stands=False), Bounds(steps=2, interval=4, killed="T"), "joint checkpoint"),
}  # fmt: skip
