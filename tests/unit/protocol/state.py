"""The state of the model: what stands in the run directory, what each process has in memory, and what may differ between runs of the check.

All of it is tuples of small numbers, so that a state can be hashed, compared and interned.
"""

from typing import Any, NamedTuple

from prime_rl.transport import protocol
from prime_rl.transport.protocol import Lease

FRESH, RECOVER = -1, -2  # how a process that is started goes on; a number >= 0: from that checkpoint
NOTHING = -1


class Bounds(NamedTuple):
    """How far the check looks. `crashes` counts kills of any process and kills of the whole run that is then resumed from -1."""

    replicas: int = 1
    steps: int = 3  # batches 0 … steps-1, versions 0 … steps
    crashes: int = 1
    async_level: int = 1
    max_off_policy: int = 1
    concurrent: int = 2  # episodes in flight
    keep: int = 0  # versions kept beyond what is needed
    interval: int = 2  # of checkpoints
    recovery_interval: int = 1
    keep_checkpoints: int = 1
    drain: bool = True  # the user may ask to stop at any moment
    joins: int = 0  # engines that are added
    leaves: int = 0  # engines that ask to leave
    # What may be killed: Trainer, Orchestrator, Engine (requests fail), an engine's Restart unnoticed, the Whole run.
    killed: str = "TOERW"
    bug: str = ""  # of `mutants.MUTANTS`


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

    def given_up(self, version: int, incarnation: int) -> bool:
        return not protocol.valid(version, incarnation, self.history)


class Trainer(NamedTuple):
    """phase: dead, found, aside, run, committed, prune, save, end, done."""

    phase: str = "dead"
    mode: int = FRESH
    step: int = 0
    todo: tuple[int, ...] = ()  # versions still to prune
    saving: int = 0  # N: part N is written in the background; -N: recovery checkpoint N


class Replica(NamedTuple):
    """One engine, as it is and as the orchestrator knows it."""

    version: int = 0
    incarnation: int = 0
    known: int = 2  # 1: its last load was proven; 0: restarted since, unnoticed; 2: it must load; 3: it loads for an orchestrator that is dead
    reading: tuple[int, int] | None = None  # (version, incarnation) of the directory being loaded
    broken: bool = False  # a load failed and so did going back: paused
    leaving: bool = False  # it ends what is in flight there, on the version that it has
    flying: tuple[tuple[int, int, bool], ...] = ()  # (episode, first, sampled by something else than it says)


class Episode(NamedTuple):
    """A finished episode. The stamps are what the process knows; true_* is what happened."""

    number: int
    first: int
    last: int
    incarnation: int
    true_last: int
    true_incarnation: int
    proven: bool
    bad: bool


Ledger = tuple[int, tuple[Episode, ...], int]  # cursor, finished episodes, bits of dropped ones


class Orch(NamedTuple):
    """The orchestrator, its ledger and the engines. phase: dead, start, look, lease, load, run, end, gone."""

    phase: str = "dead"
    resumed: int = NOTHING  # the checkpoint that the run was resumed from
    waits: bool = False  # for the trainer's incarnation that goes on from there
    seen: int = 0  # incarnations it has taken up
    step: int = 0
    served: int = 0
    announced: int = 0
    loading: int = NOTHING
    sealed: Episode | None = None  # decided, not yet renamed
    due: bool = False  # renamed, not yet in the ledger
    pending: tuple[int, ...] = ()  # issued, to be started (again)
    finished: tuple[Episode, ...] = ()
    cursor: int = 0  # episodes issued so far
    batched: int = 0  # bits; durable: the manifests
    dropped: int = 0  # bits
    ledger: Ledger = (0, (), 0)  # durable
    replicas: tuple[Replica, ...] = ()
    joins: int = 0  # how many engines may still do so
    leaves: int = 0


class Violation(Exception):
    """A property does not hold."""


Successors = list[tuple[str, Any, Any]]
