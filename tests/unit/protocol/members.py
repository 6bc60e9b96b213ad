"""Engines that join and leave while the run goes on."""

from .account import canonical, put
from .engines import notice, prove
from .state import NOTHING, Bounds, Dir, Orch, Replica, Rules, Successors


def members(d: Dir, o: Orch, rules: Rules, bounds: Bounds) -> Successors:
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
            found += release(d, o, index, rules)
        elif o.leaves and staying > 1 and o.loading == NOTHING and replica.known < 3:
            asked = put(o._replace(leaves=o.leaves - 1), index, replica._replace(leaving=True))
            found.append(("an engine is to leave", d, asked))
    return found


def release(d: Dir, o: Orch, index: int, rules: Rules) -> Successors:
    """Once nothing is in flight there it proves what it served, and is let go. What it has finished and cannot prove is worth nothing."""
    replica = o.replicas[index]
    if replica.flying or o.sealed is not None:
        return []
    if rules.prove_before_leaving and index in prove(o, rules):
        return [("orchestrator finds an engine that leaves restarted", d, notice(o, [index]))]
    left = o._replace(replicas=o.replicas[:index] + o.replicas[index + 1 :])
    return [("an engine has left", d, left)]
