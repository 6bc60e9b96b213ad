"""A model of trainer, orchestrator and servers that decides by the functions of `transport/protocol.py`, and a search
over all interleavings of their durable steps.

A process is a tuple of small numbers. Each function below yields what it may do next: words, the run directory and the
process afterwards. `bug` names a deliberate one (`mutants.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from prime_rl.transport import protocol
from prime_rl.transport.protocol import Lease

NOTHING = -1
FRESH, RECOVER = -1, -2  # how a trainer that is started goes on; N >= 0: from that checkpoint


class Bounds(NamedTuple):
    """How far the search looks."""

    replicas: int = 1
    steps: int = 3  # batches 0 … steps-1, versions 0 … steps
    crashes: int = 1  # kills of any process, and kills of the whole run that is then resumed
    async_level: int = 1
    max_off_policy: int = 1
    concurrent: int = 2  # episodes in flight
    interval: int = 2  # of checkpoints, of which one is kept; recovery checkpoints come between
    keep_checkpoints: int = 1
    drain: bool = True  # the user may ask to stop at any moment
    killed: str = "TOEW"  # Trainer, Orchestrator, Engine, the Whole run
    bug: str = ""


class Dir(NamedTuple):
    """What is committed in the run directory."""

    weights: tuple[int, ...]  # by version: the incarnation that made it, or NOTHING
    incarnations: tuple[int, ...] = ()  # by incarnation: its start
    batches: int = 0  # rollouts/step_0 … step_{batches-1}
    parts: tuple[tuple[int, int], ...] = ()  # (step, incarnation) of the trainer's parts
    orch: tuple[int, ...] = ()  # steps with the orchestrator's part
    joint: tuple[int, ...] = ()  # steps with the joint manifest
    recovery: tuple[tuple[int, int], ...] = ()  # (step, incarnation)
    lease: Lease | None = None
    done: int = NOTHING  # the trainer's status says done, after this many updates
    stop: bool = False  # the user asked to stop

    @property
    def versions(self) -> dict[int, int]:
        return {version: incarnation for version, incarnation in enumerate(self.weights) if incarnation != NOTHING}

    @property
    def history(self) -> dict[int, int]:
        return dict(enumerate(self.incarnations))

    @property
    def joint_steps(self) -> list[int]:
        """Checkpoints that can be resumed."""
        return [step for step in protocol.valid_versions(dict(self.parts), self.history) if step in self.joint]

    @property
    def newest_state(self) -> int:
        """The newest state that the trainer could be started again from."""
        states = (*self.parts, *self.recovery)
        return max((step for step, made_by in states if protocol.valid(step, made_by, self.history)), default=0)

    def with_version(self, version: int, incarnation: int) -> "Dir":
        return self._replace(weights=(*self.weights[:version], incarnation, *self.weights[version + 1 :]))

    def without_checkpoint(self, step: int) -> "Dir":
        parts = tuple(entry for entry in self.parts if entry[0] != step)
        orch, joint = (tuple(other for other in steps if other != step) for steps in (self.orch, self.joint))
        return self._replace(parts=parts, orch=orch, joint=joint)

    def superseded(self, version: int, incarnation: int) -> bool:
        return not protocol.valid(version, incarnation, self.history)


class Trainer(NamedTuple):
    """phase: dead, found, aside, run, committed, prune, save, end, done."""

    phase: str = "dead"
    mode: int = FRESH
    step: int = 0
    todo: tuple[int, ...] = ()  # versions still to prune
    saving: int = 0  # N: part N is written in the background; -N: recovery checkpoint N


class Replica(NamedTuple):
    """One server, and what the orchestrator knows of it."""

    version: int = 0
    incarnation: int = 0
    loaded: bool = False  # it serves what the orchestrator had it load
    reading: tuple[int, int] = (NOTHING, NOTHING)  # version and incarnation of the directory being loaded
    orphaned: bool = False  # it reads for an orchestrator that is dead
    running: tuple[int, ...] = ()  # episodes, by the version that they began on


class Episode(NamedTuple):
    """A finished episode. The stamps are what the orchestrator knows; true_* is what happened."""

    first: int
    last: int
    incarnation: int
    true_last: int
    true_incarnation: int


class Orch(NamedTuple):
    """The orchestrator and the servers. phase: dead, start, look, lease, load, run, end, gone."""

    phase: str = "dead"
    resumed: int = NOTHING  # the checkpoint that the run was resumed from
    waits: bool = False  # for the trainer's incarnation that goes on from there
    seen: int = 0  # incarnations it has taken up
    step: int = 0
    served: int = 0
    announced: int = 0
    loading: int = NOTHING
    finished: tuple[Episode, ...] = ()
    sealed: Episode | None = None  # of the batch that is decided, not yet committed
    ledger: tuple[Episode, ...] = ()  # durable
    replicas: tuple[Replica, ...] = ()


class Violation(Exception):
    """A property does not hold."""


Steps = Iterator[tuple[str, Dir, Any]]

# ---- trainer: each durable thing it does is a step


def trainer_steps(d: Dir, t: Trainer, b: Bounds) -> Steps:
    match t.phase:
        case "dead" if d.done == NOTHING:
            step = {FRESH: 0, RECOVER: d.newest_state}.get(t.mode, t.mode)
            if t.mode >= 0 and step not in dict(d.parts):
                raise Violation(f"the trainer cannot resume: checkpoints/step_{step}/trainer is gone")
            yield f"trainer starts and reads the state of step {step}", d, Trainer("found", t.mode, step)
        case "found":
            yield from _open_incarnation(d, t, b)
        case "aside":
            yield from _set_aside(d, t)
        case "run":
            yield from _train(d, t, b)
        case "committed":  # what to prune is decided once, by the lease of this moment
            saving = [t.saving] if t.saving > 0 and b.bug != "saving-not-kept" else []
            todo = protocol.prunable(
                d.versions, d.history, lease=d.lease, async_level=b.async_level, keep=0,
                checkpoints=[*dict(d.parts), *saving],
            )  # fmt: skip
            yield f"trainer decides to prune {todo or 'nothing'}", d, _pruning(t, todo)
        case "prune":
            version, *rest = t.todo
            for step in [*d.joint_steps, *([t.saving] if t.saving > 0 else [])]:
                if step - b.async_level <= version <= step:
                    raise Violation(f"weights/step_{version} is pruned, which checkpoints/step_{step} needs")
            yield f"trainer prunes weights/step_{version}", d.with_version(version, NOTHING), _pruning(t, rest)
        case "save":
            yield from _save(d, t, b)
        case "end" if not t.saving:
            if t.step and t.step not in dict(d.parts):
                yield f"trainer copies the state for checkpoints/step_{t.step}", d, t._replace(saving=t.step)
            else:
                yield f"trainer is done after {t.step} updates", d._replace(done=t.step), t._replace(phase="done")
    if t.phase in ("run", "committed", "prune", "save", "end"):
        yield from _background(d, t)


def _open_incarnation(d: Dir, t: Trainer, b: Bounds) -> Steps:
    if t.step and t.step not in {*dict(d.parts), *dict(d.recovery)}:
        raise Violation(f"the state of step {t.step} was removed while the trainer read it")
    opened = d._replace(incarnations=(*d.incarnations, t.step))
    if b.bug == "aside-before-incarnation" and (later := protocol.superseded_versions(d.versions, opened.history)):
        yield f"trainer sets weights/step_{later[0]} aside", d.with_version(later[0], NOTHING), t
        return
    yield f"trainer opens incarnation {len(d.incarnations)} at step {t.step}", opened, t._replace(phase="aside")


def _set_aside(d: Dir, t: Trainer) -> Steps:
    """One thing of superseded incarnations after the other is set aside, then the start version is committed."""
    for version in protocol.superseded_versions(d.versions, d.history):
        yield f"trainer sets weights/step_{version} aside", d.with_version(version, NOTHING), t
        return
    for step, _ in d.parts:
        if step > t.step:
            yield f"trainer sets checkpoints/step_{step} aside", d.without_checkpoint(step), t
            return
    for step, made_by in d.recovery:
        if step > t.step:
            left = tuple(entry for entry in d.recovery if entry != (step, made_by))
            yield f"trainer removes recovery/step_{step}", d._replace(recovery=left), t
            return
    if d.weights[t.step] == NOTHING:
        d = d.with_version(t.step, len(d.incarnations) - 1)
    yield f"trainer is ready, with weights/step_{t.step}", d, t._replace(phase="run", mode=RECOVER)


def _train(d: Dir, t: Trainer, b: Bounds) -> Steps:
    if t.step >= b.steps or d.stop:
        yield "trainer has made its last step, or hears the request to stop", d, t._replace(phase="end")
    if t.step < b.steps and d.batches > t.step:
        version = t.step + 1
        if d.weights[version] != NOTHING:
            raise Violation(f"weights/step_{version} is committed already")
        made = d.with_version(version, len(d.incarnations) - 1)
        words = f"trainer trains rollouts/step_{t.step} and commits weights/step_{version}"
        yield words, made, t._replace(phase="committed", step=version)


def _pruning(t: Trainer, todo: list[int]) -> Trainer:
    return t._replace(phase="prune" if todo else "save", todo=tuple(todo))


def _save(d: Dir, t: Trainer, b: Bounds) -> Steps:
    """A save copies the state and is written in the background; the next one waits for it."""
    if t.saving:
        return
    saving = t.step if t.step % b.interval == 0 else -t.step
    if saving < 0 and b.bug == "recovery-removed-first":
        d = kept_newest(d, d._replace(recovery=()))
    yield f"trainer copies the state of step {t.step}", d, t._replace(phase="run", saving=saving)


def _background(d: Dir, t: Trainer) -> Steps:
    """The writer of saved states, beside the loop."""
    saved, after = (abs(t.saving), len(d.incarnations) - 1), t._replace(saving=0)
    if t.saving > 0:
        if t.saving in dict(d.parts):
            raise Violation(f"checkpoints/step_{t.saving}/trainer is committed already")
        parts = tuple(sorted([*d.parts, saved]))
        yield f"trainer commits checkpoints/step_{t.saving}/trainer", d._replace(parts=parts), after
    elif t.saving < 0:
        recovery = tuple(sorted([*d.recovery, saved]))
        yield f"trainer commits recovery/step_{-t.saving}", d._replace(recovery=recovery), after
    elif len(d.recovery) > 1:
        words = f"trainer removes recovery/step_{d.recovery[0][0]}"
        yield words, kept_newest(d, d._replace(recovery=d.recovery[1:])), t


def kept_newest(before: Dir, after: Dir) -> Dir:
    """Return `after`, from which something was removed: never the newest state."""
    if after.newest_state < before.newest_state:
        raise Violation(
            f"the newest saved state, of step {before.newest_state}, is removed before a newer one is committed"
        )
    return after


# ---- orchestrator


def orchestrator_steps(d: Dir, o: Orch, b: Bounds) -> Steps:
    match o.phase:
        case "dead":
            step = protocol.first_missing_batch(range(d.batches), 0)
            phase = "start" if b.bug != "look-before-lease" else "look"
            started = o._replace(phase=phase, step=step, finished=o.ledger)
            yield f"orchestrator starts, collecting step {step}", d, started
        case "start":
            lease = protocol.first_lease(d.lease)
            yield f"orchestrator commits {lease}", d._replace(lease=lease), o._replace(phase="look")
        case "look":
            yield from _look(d, o, b)
        case "lease":  # then every server is given the version anew: its number may be of another incarnation
            lease = protocol.lease_before_load(protocol.first_lease(d.lease), o.seen - 1, o.loading)
            same = b.bug == "same-number-not-loaded"
            replicas = tuple(r._replace(loaded=r.loaded and same and r.version == o.loading) for r in o.replicas)
            after = o._replace(phase="load", replicas=replicas)
            yield f"orchestrator commits {lease}", d._replace(lease=lease), after
        case "load":  # one server is enough to begin
            if any(r.loaded for r in o.replicas) and not any(r.reading[0] != NOTHING for r in o.replicas):
                ready = o._replace(phase="run", served=o.loading, announced=o.loading, loading=NOTHING, waits=False)
                yield f"orchestrator serves version {o.loading}", d, ready
        case "run":
            yield from _episodes(d, o, b)
            yield from _follow(d, o, b)
            yield from _batch(d, o, b)
            yield from _checkpoints(d, o, b)
            if o.sealed is None and (d.stop or o.step >= b.steps):
                yield "orchestrator ends its loop", d, cancelled(o, lambda first: True)._replace(phase="end")
        case "end":
            yield from _follow(d, o, b)
            yield from _checkpoints(d, o, b)
            yield from _end(d, o, b)
    if o.phase != "gone":
        yield from _loads(d, o, b)


def put(o: Orch, index: int, replica: Replica) -> Orch:
    return o._replace(replicas=tuple(sorted((*o.replicas[:index], replica, *o.replicas[index + 1 :]))))


def cancelled(o: Orch, which: Any) -> Orch:
    """Cancel the episodes in flight that began on a version of `which`."""
    left = (r._replace(running=tuple(first for first in r.running if not which(first))) for r in o.replicas)
    return o._replace(replicas=tuple(sorted(left)))


def current(d: Dir, o: Orch, b: Bounds) -> Orch:
    """Drop the finished episodes that are of a superseded incarnation."""
    if b.bug == "old-incarnation-batched":
        return o
    kept = [e for e in o.finished if protocol.may_batch(e.first, e.last, e.incarnation, d.history)]
    return o._replace(finished=tuple(kept))


def _look(d: Dir, o: Orch, b: Bounds) -> Steps:
    """Take up the trainer's newest incarnation once the version it began from stands."""
    if d.incarnations and not (o.waits and not protocol.continues_from(o.resumed, d.history)):
        version = protocol.newest_version(d.versions, d.history)
        taken = current(d, o, b)._replace(phase="lease", seen=len(d.incarnations), loading=version)
        yield f"orchestrator takes up incarnation {len(d.incarnations) - 1} and chooses version {version}", d, taken


def _loads(d: Dir, o: Orch, b: Bounds) -> Steps:
    """A load begins and ends in two steps, so that anything may happen while it reads, even the orchestrator's end."""
    for index, r in enumerate(o.replicas):
        if index and r == o.replicas[index - 1]:
            continue  # the same as its neighbour
        version, incarnation = r.reading
        if version != NOTHING:
            stands = d.weights[version] == incarnation
            if not stands and not d.superseded(version, incarnation):
                raise Violation(f"weights/step_{version} was pruned while a server read it")
            if b.bug == "read-not-checked" and not stands and d.weights[version] != NOTHING:
                raise Violation(f"a server says incarnation {incarnation}, and read that of {d.weights[version]}")
            late = r.orphaned or (version < o.served and o.phase != "load")
            done = r._replace(reading=(NOTHING, NOTHING), orphaned=False, loaded=stands and not late)
            if stands:
                done = done._replace(version=version, incarnation=incarnation)
                yield f"a server is verified on version {version}", d, put(o, index, done)
            else:
                failed = put(o, index, done._replace(running=()))
                if not r.orphaned and o.phase in ("load", "run", "end"):
                    failed = failed._replace(phase="look" if o.phase == "load" else o.phase, loading=NOTHING)
                yield f"a server's load of version {version} fails", d, failed
        elif o.phase in ("load", "run", "end"):
            target = o.loading if o.loading != NOTHING else o.served
            if r.loaded and (o.loading == NOTHING or r.version == target):
                continue
            if d.weights[target] == NOTHING:
                if len(d.incarnations) == o.seen:
                    raise Violation(f"weights/step_{target}, which a server has to load, was pruned")
                if o.phase == "load":
                    yield "orchestrator looks again", d, o._replace(phase="look", loading=NOTHING)
                continue  # the new incarnation, which set it aside, is taken up next
            begun = r._replace(reading=(target, d.weights[target]))
            yield f"a server begins to read weights/step_{target}", d, put(o, index, begun)


def _follow(d: Dir, o: Orch, b: Bounds) -> Steps:
    """New incarnations, new versions, the lease."""
    reading = [r.reading[0] for r in o.replicas if r.reading[0] != NOTHING]
    if len(d.incarnations) > o.seen and b.bug != "old-incarnation-goes-on":
        if o.sealed is None and not reading:
            yield _take_up(d, o, b)
        return
    loaded = [r for r in o.replicas if r.loaded]
    if o.loading == NOTHING:
        known = {number: start for number, start in d.history.items() if number < o.seen}
        newest = protocol.newest_version(d.versions, known)
        if newest is not None and newest > o.served:
            announced = newest if b.bug != "announced-late" else o.announced
            yield f"orchestrator announces version {newest}", d, o._replace(loading=newest, announced=announced)
        lease = protocol.lease_after_load(o.seen - 1, o.served, reading)
        if loaded and d.lease != lease:
            yield f"orchestrator raises its lease to version {lease.version}", d._replace(lease=lease), o
    elif loaded and all(r.version == o.loading and r.reading[0] == NOTHING for r in loaded):
        served = o._replace(served=o.loading, announced=o.loading, loading=NOTHING)
        served = cancelled(served, lambda first: protocol.too_old(o.step, first, b.max_off_policy))
        yield f"orchestrator serves version {o.loading}", d, served


def _take_up(d: Dir, o: Orch, b: Bounds) -> tuple[str, Dir, Orch]:
    """If what is served still belongs to the history it is gone on with, else one goes back."""
    number, left = o.seen - 1, current(d, o, b)

    def stays(first: int) -> bool:
        return protocol.may_batch(first, o.announced, number, d.history)

    if not stays(o.served):
        back = cancelled(left, lambda first: True)._replace(phase="look", loading=NOTHING)
        return "orchestrator notices a new incarnation and has to go back", d, back
    lease = Lease(len(d.incarnations) - 1, o.served)
    left = cancelled(left, lambda first: not stays(first))._replace(seen=len(d.incarnations))
    return f"orchestrator takes up incarnation {lease.incarnation}", d._replace(lease=lease), left


def _episodes(d: Dir, o: Orch, b: Bounds) -> Steps:
    """Start one, finish one."""
    running = sum(len(r.running) for r in o.replicas)
    before = running + len(o.finished) + (o.sealed is not None)
    step = protocol.planned_step(o.step, before, 1)
    may = step < b.steps and running < b.concurrent and protocol.may_start(step, o.served, b.async_level)
    for index, r in enumerate(o.replicas):
        if r.reading[0] != NOTHING or (index and r == o.replicas[index - 1]):
            continue
        if may and r.loaded:
            if r.version < o.step + before - b.async_level:
                raise Violation(
                    f"an episode for step {o.step + before} starts on version {r.version}, async level {b.async_level}"
                )
            if not o.served <= r.version <= o.announced:
                raise Violation(f"an episode starts on version {r.version}, stamped {o.served} … {o.announced}")
            begun = put(o, index, r._replace(running=tuple(sorted([*r.running, o.served]))))
            yield f"an episode starts, stamped version {o.served}", d, begun
        for number, first in enumerate(r.running):
            if not r.version <= o.announced:
                raise Violation(f"an episode finishes on version {r.version}, stamped {first} … {o.announced}")
            ended = Episode(first, o.announced, o.seen - 1, r.version, r.incarnation)
            left = put(o, index, r._replace(running=r.running[:number] + r.running[number + 1 :]))
            finished = tuple(sorted([*o.finished, ended]))
            yield f"an episode finishes, stamped versions {first} … {o.announced}", d, left._replace(finished=finished)


def _batch(d: Dir, o: Orch, b: Bounds) -> Steps:
    """Cut the batch of this step, of one episode; then commit it, and the ledger with it."""
    if o.sealed is not None:
        if d.batches != o.step:
            raise Violation(f"rollouts/step_{o.step} is committed after step_{d.batches - 1}")
        after = o._replace(sealed=None, step=o.step + 1, ledger=o.finished)
        yield f"orchestrator commits rollouts/step_{o.step}", d._replace(batches=d.batches + 1), after
        return
    blind = b.bug == "old-incarnation-goes-on"
    if o.step >= b.steps or not o.finished or (len(d.incarnations) > o.seen and not blind):
        return  # that incarnation is taken up first
    chosen, *others = o.finished
    if protocol.too_old(o.step, chosen.first, b.max_off_policy):
        yield "orchestrator drops a stale episode", d, o._replace(finished=tuple(others))
        return
    if o.step - chosen.first > b.max_off_policy:
        raise Violation(f"an episode sampled by version {chosen.first} goes into step {o.step}")
    if d.superseded(chosen.true_last, chosen.true_incarnation):
        raise Violation(f"an episode of version {chosen.true_last}, which is given up, goes into step {o.step}")
    yield f"orchestrator decides step {o.step}", d, o._replace(sealed=chosen, finished=tuple(others))


def _checkpoints(d: Dir, o: Orch, b: Bounds) -> Steps:
    """The orchestrator's part, the joint manifest, and what is expendable: one durable thing a step."""
    for step in set(protocol.valid_versions(dict(d.parts), d.history)).difference(d.joint):
        if step not in d.orch:
            orch = tuple(sorted([*d.orch, step]))
            yield f"orchestrator commits checkpoints/step_{step}/orchestrator", d._replace(orch=orch), o
        if step in d.orch or b.bug == "half-joined":
            joint = tuple(sorted([*d.joint, step]))
            yield f"orchestrator joins checkpoints/step_{step}", d._replace(joint=joint), o
    for step in expendable(d, o, b):
        yield f"orchestrator removes checkpoints/step_{step}", kept_newest(d, d.without_checkpoint(step)), o


def expendable(d: Dir, o: Orch, b: Bounds) -> list[int]:
    """Complete checkpoints beyond those kept, and parts older than the newest complete one without a partner."""
    gone = protocol.expendable_checkpoints(d.joint, b.keep_checkpoints, None)
    alone = [step for step, _ in d.parts if d.joint and step < d.joint[-1] and step not in d.joint]
    return [step for step in [*gone, *alone] if step != o.resumed or b.bug == "resumed-from-removed"]


def _end(d: Dir, o: Orch, b: Bounds) -> Steps:
    """Versions are followed and checkpoints joined until the trainer is done."""
    calm = o.loading == NOTHING and all(r.reading[0] == NOTHING for r in o.replicas)
    joined = set(protocol.valid_versions(dict(d.parts), d.history)) <= {*d.joint}
    if d.done != NOTHING and (d.stop or o.served == b.steps) and joined and calm and not expendable(d, o, b):
        yield "orchestrator gives its lease back and ends", d._replace(lease=None), Orch("gone")


# ---- search

State = tuple[int, Orch, Trainer, Dir]  # kills left, and the processes


@dataclass
class Outcome:
    """The result of a search. `trace` is a shortest way to the violation."""

    states: int = 0
    ends: int = 0
    violation: str | None = None
    trace: list[str] = field(default_factory=list)


def successors(state: State, b: Bounds) -> Iterator[tuple[str, State]]:
    """Yield everything that may follow a state. Raises Violation where a step breaks a property."""
    kills, o, t, d = state
    if b.drain and not d.stop and d.done == NOTHING:
        yield "the user asks the run to stop", (kills, o, t, d._replace(stop=True))
    for words, after, trainer in trainer_steps(d, t, b):
        yield words, (kills, o, trainer, after)
    for words, after, orch in orchestrator_steps(d, o, b):
        yield words, (kills, orch, t, after)
    if kills:
        for words, *rest in _kills(o, t, d, b):
            yield words, (kills - 1, *rest)


def _kills(o: Orch, t: Trainer, d: Dir, b: Bounds) -> Iterator[tuple[str, Orch, Trainer, Dir]]:
    if "T" in b.killed and t.phase not in ("dead", "done"):
        yield f"TRAINER IS KILLED ({t.phase})", o, Trainer(mode=t.mode), d
    if "O" in b.killed and o.phase not in ("dead", "gone"):
        orphans = (r._replace(loaded=False, running=(), orphaned=r.reading[0] != NOTHING) for r in o.replicas)
        left = Orch(resumed=o.resumed, waits=o.waits, ledger=o.ledger, replicas=tuple(sorted(orphans)))
        yield f"ORCHESTRATOR IS KILLED ({o.phase})", left, t, d
    for index, r in enumerate(o.replicas if "E" in b.killed else ()):
        yield f"A SERVER IS KILLED (version {r.version})", put(o, index, Replica()), t, d
    usable = d.joint_steps if "W" in b.killed else []
    for step in usable:
        if step not in d.orch or step not in dict(d.parts):
            raise Violation(f"a resume chooses checkpoints/step_{step}, of which only one part stands")
        done = d.done if b.bug == "old-status-believed" else NOTHING
        orch = Orch(resumed=step, waits=True, ledger=o.ledger, replicas=(Replica(),) * b.replicas)
        words = f"EVERYTHING IS KILLED, and the run started again from checkpoints/step_{step}"
        yield words, orch, Trainer(mode=step), d._replace(stop=False, done=done)


def is_end(state: State, b: Bounds) -> bool:
    """Whether the run has ended; raises Violation if it has not ended well."""
    _, o, t, d = state
    if o.phase != "gone" or t.phase != "done":
        return False
    if d.done and d.done not in d.joint_steps:
        raise Violation(f"the run ended after {d.done} updates without a joint checkpoint of them")
    if not d.stop and (d.done != b.steps or d.batches != b.steps):
        raise Violation(f"the run ended after {d.done} of {b.steps} updates")
    return True


def search(b: Bounds, limit: int = 2_000_000) -> Outcome:
    """Visit every state, breadth first; then check that from each an end can be reached without further kills."""
    states: list[State] = [
        (b.crashes, Orch(replicas=(Replica(),) * b.replicas), Trainer(), Dir((0, *[NOTHING] * b.steps)))
    ]
    places, parents, ends = {states[0]: 0}, [-1], []
    before: list[list[int]] = [[]]  # from which each can be reached without a kill
    place = 0
    try:
        while place < len(states):
            state = states[place]
            if is_end(state, b):
                ends.append(place)
            for _, after in successors(state, b):
                target = places.setdefault(after, len(states))
                if target == len(states):
                    states.append(after)
                    parents.append(place)
                    before.append([])
                if after[0] == state[0]:
                    before[target].append(place)
            place += 1
            if len(states) > limit:
                return Outcome(len(states), violation=f"more than {limit} states")
        reaching = set(ends)
        todo = [*ends]
        while todo:
            for place in before[todo.pop()]:
                if place not in reaching:
                    reaching.add(place)
                    todo.append(place)
        if len(reaching) < len(states):
            place = next(place for place in range(len(states)) if place not in reaching)
            raise Violation("from here no end can be reached, though nothing fails any more")
    except Violation as violation:
        way = [place]
        while way[-1]:
            way.append(parents[way[-1]])
        trace = [
            next(words for words, after in successors(states[first], b) if after == states[then])
            for then, first in pairwise(way)
        ]
        return Outcome(len(states), len(ends), str(violation), trace[::-1])
    return Outcome(len(states), len(ends))
