"""The engines, as the orchestrator drives them: loads, verification, joining and leaving."""

from .account import canonical, drop, drop_numbers, put
from .state import NOTHING, Bounds, Dir, Orch, Replica, Successors, Violation


def engines(d: Dir, o: Orch, bounds: Bounds) -> Successors:
    """Loads, replica by replica. A load begins and ends in two steps, so that anything may happen while it reads, even the orchestrator's end."""
    found: Successors = []
    for index, replica in enumerate(o.replicas):
        if index and replica == o.replicas[index - 1]:
            continue  # the same as its neighbour
        if replica.reading is not None:
            found.append(end_read(d, o, index, bounds))
        elif o.phase in ("load", "run", "end") and due(o, replica):
            found += begin_read(d, o, index, bounds)
    return found


def due(o: Orch, replica: Replica) -> bool:
    """Whether the orchestrator has this engine load what is to be served."""
    if replica.leaving:
        return False
    return replica.known == 2 or (o.loading != NOTHING and replica.version != o.loading)


def begin_read(d: Dir, o: Orch, index: int, bounds: Bounds) -> Successors:
    replica, target = o.replicas[index], o.loading if o.loading != NOTHING else o.served
    if replica.known == 0 and bounds.bug != "engine-without-incarnation":
        # The proof before the load tells that this engine is another one than the one that was given the weights.
        return [("orchestrator finds an engine restarted", d, notice(o, [index]))]
    incarnation = d.weights[target]
    if incarnation == NOTHING:
        if len(d.incarnations) == o.seen:
            raise Violation(f"weights/step_{target}, which an engine has to load, was pruned")
        if o.phase == "load":
            again = o._replace(phase="look", loading=NOTHING)
            return [(f"orchestrator finds weights/step_{target} set aside and looks again", d, again)]
        return []  # the new incarnation, which set it aside, is taken up next
    changed = replica._replace(reading=(target, incarnation))
    return [(f"an engine begins to read weights/step_{target}", d, put(o, index, changed))]


def end_read(d: Dir, o: Orch, index: int, bounds: Bounds) -> tuple[str, Dir, Orch]:
    """The load succeeded if the directory is still the one that was begun with; else the engine goes back to what it served."""
    replica = o.replicas[index]
    assert replica.reading is not None
    version, incarnation = replica.reading
    stands = d.weights[version] == incarnation
    if not stands and not d.given_up(version, incarnation):
        raise Violation(f"weights/step_{version} was pruned while an engine read it")
    if bounds.bug == "read-not-checked" and not stands and d.weights[version] != NOTHING:
        served = f"version {version} of incarnation {incarnation}"
        raise Violation(f"an engine says that it serves {served}, and read that of incarnation {d.weights[version]}")
    if stands:
        late = replica.known == 3 or (version < o.served and o.phase != "load")  # what is served has changed meanwhile
        known = 2 if late else 1
        done = replica._replace(version=version, incarnation=incarnation, known=known, reading=None, broken=False)
        return f"an engine proves that it serves version {version}", d, put(o, index, done)
    back = replica.version == 0 or d.weights[replica.version] == replica.incarnation
    spare = replica.known == 2 and o.phase in ("run", "end")  # it serves nobody: broken, it is given the next version
    if not back and not spare and not d.given_up(replica.version, replica.incarnation):
        raise Violation(f"weights/step_{replica.version} was pruned, to which an engine goes back after a failed load")
    done = replica._replace(reading=None, broken=not back, known=2, flying=())
    words = "goes back" if back else "cannot go back and stays paused"
    failed = put(o, index, done)
    if o.phase in ("load", "run", "end") and replica.known != 3:
        failed = failed._replace(phase="look" if o.phase == "load" else o.phase, loading=NOTHING)
    failed = drop_numbers(failed, [number for number, _, _ in replica.flying])
    return f"an engine's load of version {version} fails, it {words}", d, failed


def prove(o: Orch, bounds: Bounds) -> list[int]:
    """Replicas that do not serve what they were given, as far as the proof can tell."""
    wanted, tells = {o.served, o.loading}, bounds.bug != "engine-without-incarnation"  # from one that was restarted
    return [
        index
        for index, r in enumerate(o.replicas)
        if r.known == 0 and (tells or (r.reading is None and r.version not in wanted))
    ]


def notice(o: Orch, which: list[int]) -> Orch:
    """These engines do not serve what they should: what they sample, and what finished since the last proof, is dropped."""
    flying = [number for index in which for number, _, _ in o.replicas[index].flying]
    replicas = tuple(
        replica._replace(known=2, flying=()) if index in which else replica for index, replica in enumerate(o.replicas)
    )
    unproven = [episode for episode in o.finished if not episode.proven]
    return drop(drop_numbers(o._replace(replicas=replicas), flying), unproven)


def proven(o: Orch) -> Orch:
    return o._replace(finished=tuple(episode._replace(proven=True) for episode in o.finished))


def engine_killed(o: Orch, index: int, noticed: bool) -> Orch:
    """An engine comes back with its base. Requests in flight fail, or their clients try again without a word."""
    replica = o.replicas[index]
    if o.phase in ("dead", "start", "look", "lease", "load") or replica.known > 1 or replica.reading is not None:
        noticed = True  # a load is due, or fails
    if not noticed:
        flying = tuple((number, first, bad or first != 0) for number, first, bad in replica.flying)
        return canonical(put(o, index, Replica(known=0, leaving=replica.leaving, flying=flying)))
    failed = tuple(sorted([*o.pending, *(number for number, _, _ in replica.flying)]))
    alive = put(o._replace(pending=failed), index, Replica(known=2, leaving=replica.leaving))
    return canonical(notice(alive, [index]))


def members(d: Dir, o: Orch, bounds: Bounds) -> Successors:
    """One registers, one asks to leave, or one that was asked for nothing more is let go. Somebody who may serve always stays: where all have left
    the run ends by a deadline, and there is no time here."""
    found: Successors = []
    if o.joins:
        joined = o._replace(replicas=(*o.replicas, Replica(known=2)), joins=o.joins - 1)
        found.append(("an engine joins", d, canonical(joined)))
    if o.phase not in ("run", "end"):
        return found
    staying = sum(not replica.leaving for replica in o.replicas)
    for index, replica in enumerate(o.replicas):
        if replica.reading is not None or (index and replica == o.replicas[index - 1]):
            continue
        if replica.leaving:
            found += release(d, o, index, bounds)
        elif o.leaves and staying > 1 and o.loading == NOTHING and replica.known < 3:
            asked = put(o._replace(leaves=o.leaves - 1), index, replica._replace(leaving=True))
            found.append(("an engine is to leave", d, asked))
    return found


def release(d: Dir, o: Orch, index: int, bounds: Bounds) -> Successors:
    """Once nothing is in flight on it, it is verified and released. Finished episodes that cannot be verified are dropped."""
    replica = o.replicas[index]
    if replica.flying or o.sealed is not None:
        return []
    if bounds.bug != "left-unproven" and index in prove(o, bounds):
        return [("orchestrator finds an engine that leaves restarted", d, notice(o, [index]))]
    left = o._replace(replicas=o.replicas[:index] + o.replicas[index + 1 :])
    return [("an engine has left", d, left)]
