"""The orchestrator's atomic steps. `ACTIONS` says what may be next, and by which fields of the directory."""

from collections.abc import Callable

from prime_rl.transport import protocol
from prime_rl.transport.protocol import Lease

from .account import cancel, drop, drop_numbers, places, put
from .engines import due, engines, members, notice, prove, proven
from .state import NOTHING, Bounds, Dir, Episode, Orch, Successors, Violation
from .trainer import kept_newest, without_checkpoint

# -- start and new incarnations -------------------------------------------------------------------------------------------------------


def dead(d: Dir, o: Orch, bounds: Bounds) -> Successors:
    """It starts: what it knew is in the ledger and in the manifests of the batches."""
    cursor, finished, dropped = o.ledger
    if bounds.bug != "no-reconcile":
        cursor = max(cursor, o.batched.bit_length())
        finished = tuple(episode for episode in finished if not o.batched >> episode.number & 1)
        dropped &= ~o.batched
    known = o.batched | dropped | sum(1 << episode.number for episode in finished)
    pending = tuple(number for number in range(cursor) if not known >> number & 1)
    if bounds.bug == "issued-lost":
        pending = ()
    step = protocol.first_missing_batch(range(d.batches), 0)
    started = Orch(
        resumed=o.resumed, waits=o.waits,
        phase="start" if bounds.bug != "look-before-lease" else "look", step=step, pending=pending, finished=finished, cursor=cursor,
        batched=o.batched, dropped=dropped, ledger=o.ledger, replicas=o.replicas, joins=o.joins, leaves=o.leaves,
    )  # fmt: skip
    return [(f"orchestrator starts, collecting step {step}", d, started)]


def start(d: Dir, o: Orch, bounds: Bounds) -> Successors:
    lease = protocol.first_lease(d.lease)
    return [(f"orchestrator commits {lease}", d._replace(lease=lease), o._replace(phase="look"))]


def look(d: Dir, o: Orch, bounds: Bounds) -> Successors:
    """Take up the trainer's newest incarnation once the version it began from stands; what is not of its history any more is dropped."""
    if not d.incarnations or (o.waits and not protocol.continues_from(o.resumed, d.history)):
        return []
    if bounds.bug != "unproven-load" and (wrong := prove(o, bounds)):
        return [("orchestrator finds an engine that serves something else", d, notice(o, wrong))]
    o = proven(o)
    target = protocol.newest_version(d.versions, d.history)
    taken = drop_given_up(d, o, bounds)._replace(phase="lease", seen=len(d.incarnations), loading=target)
    return [(f"orchestrator takes up incarnation {len(d.incarnations) - 1} and chooses version {target}", d, taken)]


def drop_given_up(d: Dir, o: Orch, bounds: Bounds) -> Orch:
    if bounds.bug == "old-incarnation-batched":
        return o
    return drop(o, [e for e in o.finished if not protocol.may_batch(e.first, e.last, e.incarnation, d.history)])


def lease(d: Dir, o: Orch, bounds: Bounds) -> Successors:
    """Before a load; then every engine is given the version anew, for what it calls by this number may be of another incarnation."""
    taken = protocol.lease_before_load(protocol.first_lease(d.lease), o.seen - 1, o.loading)
    replicas = tuple(
        r._replace(known=2) if r.known < 2 and (bounds.bug != "same-number-not-loaded" or r.version != o.loading) else r
        for r in o.replicas
    )
    return [(f"orchestrator commits {taken}", d._replace(lease=taken), o._replace(phase="load", replicas=replicas))]


def load(d: Dir, o: Orch, bounds: Bounds) -> Successors:
    """One engine is enough to begin; those that are not there yet load what is served when they come."""
    there = [replica for replica in o.replicas if replica.known < 2]
    reading = any(replica.reading is not None for replica in o.replicas)  # also for an orchestrator that is dead
    if there and not reading and not any(due(o, replica) for replica in there):
        ready = o._replace(phase="run", served=o.loading, announced=o.loading, loading=NOTHING, waits=False)
        return [(f"orchestrator serves version {o.loading}", d, ready)]
    return []


# -- the loop ------------------------------------------------------------------------------------------------------------------


def batches(d: Dir, o: Orch, bounds: Bounds) -> Successors:
    """Commit the batch that is decided, and the ledger."""
    found: Successors = []
    if o.sealed is not None:
        found.append(rename(d, o))
    if o.due or not all(episode.proven for episode in o.finished):
        found += flush(d, o, bounds)
    return found


def over(d: Dir, o: Orch, bounds: Bounds) -> Successors:
    """The last batch is committed, or the request to stop is heard: what is not finished is cancelled."""
    if o.sealed is not None or o.due or not (d.stop or o.step >= bounds.steps):
        return []
    ended = cancel(o, lambda first: True)._replace(phase="end", pending=())
    words = "has committed its last batch" if o.step >= bounds.steps else "hears the request to stop"
    return [(f"orchestrator {words}", d, drop_numbers(ended, list(o.pending)))]


def end(d: Dir, o: Orch, bounds: Bounds) -> Successors:
    """Nothing is issued; versions are followed and checkpoints joined until the trainer is done."""
    last = d.stop or o.served == bounds.steps
    joined = all(step in d.joint for step in protocol.joinable(dict(d.parts), d.history))
    calm = o.loading == NOTHING and all(replica.reading is None for replica in o.replicas)
    if d.done == NOTHING or not (last and joined and calm) or expendable(d, o, bounds):
        return []
    gone = Orch("gone", batched=o.batched, ledger=(o.cursor, tuple(e for e in o.finished if e.proven), o.dropped))
    return [("orchestrator flushes, gives its lease back and ends", d._replace(lease=None), gone)]


def take_up(d: Dir, o: Orch, bounds: Bounds) -> tuple[str, Dir, Orch]:
    """A newer incarnation: what it gave up is dropped or cancelled. If what is served still belongs to the history it is gone on with, else one goes back."""
    incarnation, incarnations = o.seen - 1, d.history

    def stays(first: int) -> bool:
        kept = bounds.bug == "old-version-kept"
        return kept or protocol.may_batch(first, o.announced, incarnation, incarnations)

    left = drop_given_up(d, o, bounds)
    if stays(o.served):
        words = f"orchestrator takes up incarnation {len(incarnations) - 1} and stays on version {o.served}"
        left = cancel(left, lambda first: not stays(first))
        return words, d._replace(lease=Lease(len(incarnations) - 1, o.served)), left._replace(seen=len(incarnations))
    back = cancel(left, lambda first: True)._replace(phase="look", loading=NOTHING)
    return "orchestrator notices a new incarnation and has to go back", d, back


def follow(d: Dir, o: Orch, bounds: Bounds) -> Successors:
    """New incarnations, new versions, the lease."""
    found: Successors = []
    reading = any(replica.reading is not None for replica in o.replicas)
    quiet = o.sealed is None and not o.due and not reading
    if bounds.bug != "old-incarnation-goes-on" and len(d.incarnations) > o.seen and quiet:
        return [take_up(d, o, bounds)]
    healthy = [r for r in o.replicas if r.known < 2 and not r.leaving]  # as far as the orchestrator knows
    if o.loading == NOTHING:
        incarnations = {incarnation: begun for incarnation, begun in d.history.items() if incarnation < o.seen}
        newest = protocol.newest_version(d.versions, incarnations)
        if newest is not None and newest > o.served:
            announced = newest if bounds.bug != "announced-late" else o.announced
            begun = o._replace(loading=newest, announced=max(o.announced, announced))
            leased = d if bounds.bug != "lease-raised-early" else d._replace(lease=Lease(o.seen - 1, newest))
            found.append((f"orchestrator announces version {newest}", leased, begun))
        held = protocol.lease_after_load(
            o.seen - 1, o.served, [r.reading[0] for r in o.replicas if r.reading is not None]
        )
        if healthy and d.lease != held:
            words = f"orchestrator raises its lease to incarnation {held.incarnation}, version {held.version}"
            found.append((words, d._replace(lease=held), o))
    elif healthy and all(replica.version == o.loading and replica.reading is None for replica in healthy):
        served = o._replace(served=o.loading, announced=max(o.announced, o.loading), loading=NOTHING)
        served = cancel(served, lambda first: protocol.too_old(o.step, first, bounds.max_off_policy))
        found.append((f"orchestrator serves version {o.loading}", d, served))
    return found


# -- episodes ------------------------------------------------------------------------------------------------------------------


def episodes(d: Dir, o: Orch, bounds: Bounds) -> Successors:
    """Start one, finish one."""
    if o.step >= bounds.steps:
        return []
    found: Successors = []
    flying = sum(len(replica.flying) for replica in o.replicas)
    opened = sorted(places(o))
    number = o.pending[0] if o.pending else o.cursor
    before = opened.index(number) if o.pending else len(opened)
    plan = protocol.planned_step(o.step, before, 1)
    gate = plan < bounds.steps and protocol.may_start(plan, o.served, bounds.async_level)
    if o.pending and bounds.bug == "reissued-ungated":
        gate = True
    if flying < bounds.concurrent and gate:
        for index, replica in enumerate(o.replicas):
            if index and replica == o.replicas[index - 1]:
                continue
            if replica.known == 2 or replica.reading is not None or replica.broken:
                continue
            if replica.leaving and bounds.bug != "leaver-given-work":
                continue
            found.append(begin_episode(d, o, index, number, bounds, o.step + before))
    for index, replica in enumerate(o.replicas):
        if replica.reading is None and not (index and replica == o.replicas[index - 1]):
            found += [finish(d, o, index, which) for which in range(len(replica.flying))]
    return found


def begin_episode(d: Dir, o: Orch, index: int, number: int, bounds: Bounds, step: int) -> tuple[str, Dir, Orch]:
    replica = o.replicas[index]
    bad = replica.known == 0 and replica.version != o.served
    if not bad and replica.version < step - bounds.async_level:
        where = f"version {replica.version}, async level {bounds.async_level}"
        raise Violation(f"episode {number} for step {step} starts on {where}")
    if not bad and not o.served <= replica.version <= o.announced:
        raise Violation(f"episode {number} starts on version {replica.version}, stamped {o.served} … {o.announced}")
    changed = put(o, index, replica._replace(flying=tuple(sorted([*replica.flying, (number, o.served, bad)]))))
    changed = changed._replace(pending=o.pending[1:]) if o.pending else changed._replace(cursor=o.cursor + 1)
    where = ", on an engine that was restarted" if bad else ""
    return f"episode {number} starts, stamped version {o.served}{where}", d, changed


def finish(d: Dir, o: Orch, index: int, which: int) -> tuple[str, Dir, Orch]:
    replica = o.replicas[index]
    number, first, bad = replica.flying[which]
    bad = bad or not replica.version <= o.announced
    ended = Episode(number, first, o.announced, o.seen - 1, replica.version, replica.incarnation, False, bad)
    landed = put(o, index, replica._replace(flying=replica.flying[:which] + replica.flying[which + 1 :]))
    finished = tuple(sorted([*o.finished, ended]))
    return f"episode {number} finishes, stamped versions {first} … {o.announced}", d, landed._replace(finished=finished)


def seal(d: Dir, o: Orch, bounds: Bounds) -> Successors:
    """Cut the batch of this step: what is too old is dropped, what is left has been proven."""
    if o.sealed is not None or o.due or o.step >= bounds.steps:
        return []
    if bounds.bug not in ("incarnations-not-read-at-cut", "old-incarnation-goes-on") and len(d.incarnations) > o.seen:
        return []  # that incarnation is taken up first
    gone = [episode for episode in o.finished if protocol.too_old(o.step, episode.first, bounds.max_off_policy)]
    if gone:
        return [(f"orchestrator drops stale episodes {[episode.number for episode in gone]}", d, drop(o, gone))]
    if not o.finished:
        return []
    if bounds.bug != "unproven-batch":
        if wrong := prove(o, bounds):
            return [("orchestrator finds an engine that serves something else", d, notice(o, wrong))]
        o = proven(o)
    chosen = o.finished[0]
    if o.step - chosen.first > bounds.max_off_policy:
        raise Violation(f"episode {chosen.number}, sampled by version {chosen.first}, goes into step {o.step}")
    into = f"episode {chosen.number} goes into step {o.step}, but"
    if chosen.bad:
        raise Violation(f"{into} an engine that served something else sampled it")
    if d.given_up(chosen.true_last, chosen.true_incarnation):
        raise Violation(f"{into} version {chosen.true_last} of incarnation {chosen.true_incarnation} is given up")
    words = f"orchestrator proves the engines and takes episode {chosen.number} for step {o.step}"
    return [(words, d, o._replace(sealed=chosen, finished=o.finished[1:]))]


def rename(d: Dir, o: Orch) -> tuple[str, Dir, Orch]:
    assert o.sealed is not None
    if d.batches != o.step:
        raise Violation(f"rollouts/step_{o.step} is committed after step_{d.batches - 1}")
    if o.batched >> o.sealed.number & 1:
        raise Violation(f"episode {o.sealed.number} is in two batches")
    changed = o._replace(sealed=None, due=True, step=o.step + 1, batched=o.batched | 1 << o.sealed.number)
    return f"orchestrator commits rollouts/step_{o.step}", d._replace(batches=d.batches + 1), changed


def flush(d: Dir, o: Orch, bounds: Bounds) -> Successors:
    if wrong := prove(o, bounds):
        return [("orchestrator finds an engine that serves something else", d, notice(o, wrong))]
    flushed = proven(o)
    flushed = flushed._replace(ledger=(flushed.cursor, flushed.finished, flushed.dropped), due=False)
    return [("orchestrator proves the engines and commits the ledger", d, flushed)]


# -- checkpoints ---------------------------------------------------------------------------------------------------------------


def checkpoints(d: Dir, o: Orch, bounds: Bounds) -> Successors:
    """The orchestrator's part, the joint manifest, and what is expendable: one durable thing a step."""
    found: Successors = []
    for step in protocol.joinable(dict(d.parts), d.history):
        if step in d.joint:
            continue
        if step not in d.orch:
            saved = d._replace(orch=tuple(sorted([*d.orch, step])))
            found.append((f"orchestrator commits checkpoints/step_{step}/orchestrator", saved, o))
        if step in d.orch or bounds.bug == "half-joined":
            joined = d._replace(joint=tuple(sorted([*d.joint, step])))
            found.append((f"orchestrator joins checkpoints/step_{step}", joined, o))
    for step in expendable(d, o, bounds):
        found.append((f"orchestrator removes checkpoints/step_{step}", kept_newest(d, without_checkpoint(d, step)), o))
    return found


def expendable(d: Dir, o: Orch, bounds: Bounds) -> list[int]:
    """Complete checkpoints beyond those kept, and parts older than the newest complete one that never found their partner."""
    gone = protocol.expendable_checkpoints(d.joint, bounds.keep_checkpoints, None)
    alone = [step for step, _ in d.parts if d.joint and step < d.joint[-1] and step not in d.joint]
    return [step for step in [*gone, *alone] if step != o.resumed or bounds.bug == "resumed-from-removed"]


# Which fields of the directory each kind of action looks at or changes, by phase.
JOIN = ("parts", "orch", "joint", "incarnations", "recovery")
_INCARNATIONS, _FOLLOW = ("weights", "incarnations"), ("weights", "incarnations", "lease")
_END = (*JOIN, "done", "stop", "lease")
ACTIONS: dict[str, list[tuple[Callable[..., Successors], tuple[str, ...]]]] = {
    "dead": [(dead, ("batches",)), (engines, _INCARNATIONS)],
    "start": [(start, ("lease",)), (engines, _INCARNATIONS)],
    "look": [(look, _INCARNATIONS), (engines, _INCARNATIONS), (members, ())],
    "lease": [(lease, ("lease",)), (engines, _INCARNATIONS)],
    "load": [(load, ()), (engines, _INCARNATIONS), (members, ())],
    "run": [
        (episodes, ()), (engines, _INCARNATIONS), (follow, _FOLLOW), (seal, ("incarnations",)), (batches, ("batches",)), (over, ("stop",)), (members, ()),
        (checkpoints, JOIN),
    ],
    "end": [(engines, _INCARNATIONS), (members, ()), (follow, _FOLLOW), (checkpoints, JOIN), (end, _END)],
    "gone": [],
}  # fmt: skip
