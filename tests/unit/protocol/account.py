"""The orchestrator's memory: where each episode is, and which states are the same."""

from collections.abc import Callable

from .state import NOTHING, Episode, Orch, Replica, Violation


def drop(o: Orch, gone: list[Episode]) -> Orch:
    left = tuple(episode for episode in o.finished if episode not in gone)
    return drop_numbers(o._replace(finished=left), [episode.number for episode in gone])


def drop_numbers(o: Orch, numbers: list[int]) -> Orch:
    return o._replace(dropped=o.dropped | sum(1 << number for number in numbers))


def cancel(o: Orch, which: Callable[[int], bool]) -> Orch:
    """Drop the episodes in flight that began on a version of `which`."""
    numbers = [number for r in o.replicas for number, first, _ in r.flying if which(first)]
    replicas = tuple(r._replace(flying=tuple(f for f in r.flying if f[0] not in numbers)) for r in o.replicas)
    return drop_numbers(o._replace(replicas=replicas), numbers)


def places(o: Orch) -> list[int]:
    """Episodes that have not ended: to be started, in flight, finished, or in the batch that is decided."""
    found = [*o.pending, *(e.number for e in o.finished), *(n for r in o.replicas for n, _, _ in r.flying)]
    return found + ([o.sealed.number] if o.sealed is not None else [])


def conserved(o: Orch) -> None:
    """Every issued episode is in exactly one place, while the orchestrator lives."""
    if o.phase in ("dead", "gone"):
        return
    found = sorted([*places(o), *(number for number in range(o.cursor) if (o.batched | o.dropped) >> number & 1)])
    if found != list(range(o.cursor)) or o.batched & o.dropped:
        raise Violation(f"{o.cursor} episodes were issued, {found} are accounted for")


def canonical(o: Orch) -> Orch:
    """The same state for all orders of the engines, and without the episodes whose end is durable: they cannot come back."""
    o = o._replace(replicas=tuple(sorted(o.replicas, key=order)))
    cursor, finished, dropped = o.ledger
    gone = dropped & (o.dropped if o.phase != "dead" else dropped)
    gone |= o.batched & (1 << cursor) - 1 & ~sum(1 << e.number for e in finished)
    if not gone:
        return o

    def bits(mask: int) -> int:
        return sum(1 << now(n) for n in range(mask.bit_length()) if mask >> n & 1 and not gone >> n & 1)

    def now(number: int) -> int:
        return number - (gone & (1 << number) - 1).bit_count()

    ledger = now(cursor), tuple(e._replace(number=now(e.number)) for e in finished), bits(dropped)
    return renumbered(o, now)._replace(
        cursor=now(o.cursor), batched=bits(o.batched), dropped=bits(o.dropped), ledger=ledger
    )


def renumbered(o: Orch, now: Callable[[int], int]) -> Orch:
    """The same state with other numbers for the episodes that have not ended."""
    return o._replace(
        pending=tuple(map(now, o.pending)),
        finished=tuple(e._replace(number=now(e.number)) for e in o.finished),
        sealed=o.sealed and o.sealed._replace(number=now(o.sealed.number)),
        replicas=tuple(r._replace(flying=tuple((now(f[0]), *f[1:]) for f in r.flying)) for r in o.replicas),
    )


def forget(o: Orch) -> Orch:
    """The same state where nothing will be killed any more: the ledger is not read again, and ended episodes do not matter."""
    if o.phase == "dead":
        return o
    live = sorted(places(o))
    unproven = any(replica.known == 0 for replica in o.replicas)

    o = renumbered(o, live.index)._replace(
        cursor=len(live),
        batched=sum(1 << live.index(n) for n in set(live) if o.batched >> n & 1),
        dropped=sum(1 << live.index(n) for n in set(live) if o.dropped >> n & 1),
        ledger=(0, (), 0),
    )
    return o._replace(
        finished=tuple(e._replace(proven=e.proven or not unproven) for e in o.finished),
        sealed=o.sealed and o.sealed._replace(proven=True),
    )


def killed(o: Orch) -> Orch:
    """What is left of an orchestrator that is killed: its ledger, the batches, and the engines, of which nothing is known. A load goes on."""
    replicas = tuple(r._replace(known=2 if r.reading is None else 3, flying=()) for r in o.replicas)
    left = Orch(resumed=o.resumed, waits=o.waits, batched=o.batched, ledger=o.ledger, replicas=replicas)
    return canonical(left._replace(joins=o.joins, leaves=o.leaves))


def put(o: Orch, index: int, replica: Replica) -> Orch:
    return o._replace(replicas=(*o.replicas[:index], replica, *o.replicas[index + 1 :]))


def order(replica: Replica) -> tuple[object, ...]:
    return replica._replace(reading=replica.reading or (NOTHING, NOTHING))
