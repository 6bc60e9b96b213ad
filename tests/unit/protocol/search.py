"""Breadth-first search over all interleavings of the model's processes.

A state is four numbers: kills left, orchestrator with engines, trainer, directory. What a process may do depends on
itself and on a few fields of the directory, so its steps are worked out once for each such pair.
"""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from prime_rl.transport import protocol

from . import account, orchestrator, trainer
from .engines import engine_killed
from .state import NOTHING, Bounds, Dir, Orch, Replica, Trainer, Violation

State = tuple[int, int, int, int]
Row = tuple[str, int, int]  # words, patch, process afterwards
_ANY = Dir(weights=())  # holds what a step does not look at


@dataclass
class Outcome:
    """The result of a search. `trace` is a shortest way to the violation."""

    states: int = 0
    transitions: int = 0
    ends: int = 0
    depth: int = 0
    violation: str | None = None
    trace: list[str] = field(default_factory=list)


class Interned:
    """Numbers for values, both ways."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class Memo(dict[Any, Any]):
    """A function of hashable arguments, worked out when it is first needed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __missing__(self, key: Any) -> Any:
        self[key] = result = self.function(*key)
        return result


class Search:
    """All states reachable within `bounds`."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.dirs, self.trainers, self.orchs, self.patches = Interned(), Interned(), Interned(), Interned()
        self._view, self._patched = Memo(self._view_of), Memo(self._patched_by)
        self._steps = Memo(self._steps_of)
        self._resumed, self._orch_killed = Memo(self._resumed_from), Memo(self._kills_of)
        self._forget = Memo(lambda o: self.orchs(account.forget(self.orchs.values[o])))

    def first(self) -> State:
        engines = tuple(Replica() for _ in range(self.bounds.replicas))
        o = Orch(replicas=engines, joins=self.bounds.joins, leaves=self.bounds.leaves)
        d = Dir((0, *[NOTHING] * self.bounds.steps))
        return self.bounds.crashes, self.orchs(o), self.trainers(Trainer()), self.dirs(d)

    def run(self, limit: int | None = None, on_level: Callable[[int, int], None] | None = None) -> Outcome:
        """Search; then make sure that from every state an end can be reached without further kills.

        Args:
            limit: Most states; beyond it the search ends with a violation that says so.
            on_level: Called with the depth and the number of states after each level.
        """
        outcome, states = Outcome(), [self.first()]
        places, parents, ends = {states[0]: 0}, array("i", [-1]), []
        sources, targets = array("i"), array("i")  # steps without kills
        place = done = 0
        try:
            while done < len(states) and outcome.violation is None:
                for place in range(done, len(states)):
                    state = states[place]
                    if self.is_end(state):
                        ends.append(place)
                    for _, after in self.after(state):
                        outcome.transitions += 1
                        target = places.setdefault(after, len(states))
                        if target == len(states):
                            states.append(after)
                            parents.append(place)
                        if after[0] == state[0]:
                            sources.append(place)
                            targets.append(target)
                    done = place + 1
                outcome.depth += 1
                if on_level is not None:
                    on_level(outcome.depth, len(states))
                if limit is not None and len(states) > limit:
                    outcome.violation = f"more than {limit} states"
            if outcome.violation is None:
                reaches = np.zeros(len(states), dtype=bool)
                reaches[ends] = True
                before, after_ = np.frombuffer(sources, np.int32), np.frombuffer(targets, np.int32)
                count = 0
                while count < (count := int(np.count_nonzero(reaches))):
                    reaches[before[reaches[after_]]] = True
                if not reaches.all():
                    place = int(np.argmin(reaches))
                    raise Violation("from here no end can be reached, though nothing fails any more")
        except Violation as violation:
            outcome.violation = str(violation)
            way = [place]
            while way[-1]:
                way.append(parents[way[-1]])
            outcome.trace = [self._words(states[a], states[b]) for b, a in pairwise(way)][::-1]
        outcome.states, outcome.ends = len(states), len(ends)
        return outcome

    def after(self, state: State) -> Iterator[tuple[str, State]]:
        """Everything that may follow a state, with its words. Raises `Violation` where a step breaks a property."""
        kills, o, t, d = state
        directory = self.dirs.values[d]
        if self.bounds.drain and not directory.stop and directory.done == NOTHING:
            yield "the user asks the run to stop", (kills, o, t, self.dirs(directory._replace(stop=True)))
        if kills:
            yield from self._kills(state)
        for action, fields in trainer.ACTIONS[self.trainers.values[t].phase]:
            for words, patch, changed in self._steps[action, t, self._view[fields, d]]:
                yield words, (kills, o, changed, self._patched[patch, d])
        process = self.orchs.values[o]
        for action, fields in orchestrator.ACTIONS[process.phase]:
            if action is orchestrator.checkpoints:  # the same for every orchestrator that was resumed from there
                same = self.orchs(Orch("run", resumed=process.resumed))
                for words, patch, _ in self._steps[action, same, self._view[fields, d]]:
                    yield words, (kills, o, t, self._patched[patch, d])
                continue
            for words, patch, changed in self._steps[action, o, self._view[fields, d]]:
                yield words, (kills, changed if kills else self._forget[(changed,)], t, self._patched[patch, d])

    def is_end(self, state: State) -> bool:
        """Whether the run has ended; raises `Violation` if it has not ended well."""
        _, o, t, d = state
        process, directory = self.trainers.values[t], self.dirs.values[d]
        if self.orchs.values[o].phase != "gone" or process.phase != "done":
            return False
        if directory.done and directory.done not in trainer.joint_steps(directory):
            raise Violation(f"the run ended after {directory.done} updates without a joint checkpoint of them")
        if not directory.stop and (directory.done != self.bounds.steps or directory.batches != self.bounds.steps):
            raise Violation(f"the run ended after {directory.done} of {self.bounds.steps} updates")
        if directory.lease is not None:
            raise Violation("the run ended and its lease stands")
        return True

    # ---- steps of a process: what it does, which fields of the directory that changes, and the process afterwards

    def _steps_of(self, action: Callable[..., Any], number: int, view: int) -> list[Row]:
        before, of_trainer = self.dirs.values[view], action.__module__ == trainer.__name__
        process = (self.trainers if of_trainer else self.orchs).values[number]
        rows = []
        for words, after, changed in action(before, process, self.bounds):
            fields = zip(Dir._fields, after, before, strict=True)
            patch = self.patches(tuple((name, value) for name, value, old in fields if value != old))
            if of_trainer:
                rows.append((words, patch, self.trainers(changed)))
            else:
                account.conserved(changed)
                rows.append((words, patch, self.orchs(account.canonical(changed))))
        return rows

    def _view_of(self, fields: tuple[str, ...], d: int) -> int:
        """A directory that holds only `fields` of `d`: the same for all that agree in them."""
        return self.dirs(_ANY._replace(**{name: getattr(self.dirs.values[d], name) for name in fields}))

    def _patched_by(self, patch: int, d: int) -> int:
        return self.dirs(self.dirs.values[d]._replace(**dict(self.patches.values[patch])))

    # ---- what goes wrong

    def _kills(self, state: State) -> Iterator[tuple[str, State]]:
        kills, o, t, d = state
        left = kills - 1
        process = self.trainers.values[t]
        if "T" in self.bounds.killed and process.phase not in ("dead", "done"):
            dead = self.trainers(trainer.killed(process))
            yield f"TRAINER IS KILLED ({process.phase})", (left, self._settled(left, o), dead, d)
        for words, changed in self._orch_killed[(o,)]:
            yield words, (left, self._settled(left, changed), t, d)
        for step, directory in self._resumed[(d,)] if "W" in self.bounds.killed else ():
            words = f"EVERYTHING IS KILLED, and the run started again from checkpoints/step_{step}"
            before = self.orchs.values[o]
            engines = tuple(Replica() for _ in range(self.bounds.replicas))
            rest = Orch(resumed=step, waits=True, batched=before.batched, ledger=before.ledger, replicas=engines)
            rest = account.canonical(rest._replace(joins=before.joins, leaves=before.leaves))
            yield words, (left, self._settled(left, self.orchs(rest)), self.trainers(Trainer(mode=step)), directory)

    def _settled(self, kills: int, o: int) -> int:
        return o if kills else self._forget[(o,)]

    def _kills_of(self, o: int) -> list[tuple[str, int]]:
        """Kills of the orchestrator or of one engine."""
        process, rows = self.orchs.values[o], []
        if "O" in self.bounds.killed and process.phase not in ("dead", "gone"):
            rows.append((f"ORCHESTRATOR IS KILLED ({process.phase})", account.killed(process)))
        for index, replica in enumerate(process.replicas):
            if index and replica == process.replicas[index - 1]:
                continue
            name = f"AN ENGINE IS KILLED (serving version {replica.version})"
            if "E" in self.bounds.killed:
                rows.append((f"{name}, requests to it fail", engine_killed(process, index, True)))
            if "R" in self.bounds.killed and replica.known == 1 and replica.reading is None:
                rows.append((f"{name} and back before anyone asks", engine_killed(process, index, False)))
        return [(words, self.orchs(changed)) for words, changed in rows if changed != process]

    def _resumed_from(self, d: int) -> list[tuple[int, int]]:
        """Everything is killed, or has ended, and the user resumes from -1 or an older checkpoint."""
        before, rows = self.dirs.values[d], []
        usable = [n for n in before.joint if n in protocol.joinable(dict(before.parts), before.history)]
        for step in sorted({protocol.resume_step(usable, asked) for asked in (-1, *usable)} - {None}):
            if step not in before.orch or step not in dict(before.parts):
                raise Violation(f"resume_step chooses checkpoints/step_{step}, of which only one part stands")
            after = before._replace(
                stop=False, done=NOTHING if self.bounds.bug != "old-status-believed" else before.done
            )
            rows.append((step, self.dirs(after)))
        return rows

    def _words(self, before: State, after: State) -> str:
        return next(words for words, state in self.after(before) if state == after)
