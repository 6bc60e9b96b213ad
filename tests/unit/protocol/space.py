"""States as numbers, and what may follow each.

What a process may do depends on itself and on a few fields of the directory. So its steps are worked out once for each such pair, by the functions under check,
and the search itself only looks numbers up.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from . import account, orchestrator, trainer
from .engines import engine_killed
from .state import NOTHING, Bounds, Dir, Orch, Replica, Rules, Trainer, Violation

Patch = tuple[tuple[str, Any], ...]  # fields of the directory that a step changes
Row = tuple[str, int, int]  # words, patch, process afterwards
_ANY = Dir(weights=())  # what a step sees of fields that it does not depend on


class Parts(NamedTuple):
    """A state in its parts, each a number: kills left, orchestrator with engines, trainer, directory."""

    kills: int
    o: int
    t: int
    d: int


class Interned:
    """Numbers for values, both ways."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self.values)
            self.values.append(value)
        return number


class Space:
    """The transitions under `rules` within `bounds`. A row raises `Violation` where a step breaks a property."""

    def __init__(self, rules: Rules, bounds: Bounds) -> None:
        self.rules, self.bounds = rules, bounds
        self.dirs, self.trainers, self.orchs, self.patches = Interned(), Interned(), Interned(), Interned()
        self.patches(())
        self._views: dict[tuple[str, ...], tuple[Interned, list[int]]] = {}

    def first(self) -> Parts:
        weights = (0, *[NOTHING] * self.bounds.steps)
        engines = tuple(Replica() for _ in range(self.bounds.replicas))
        return Parts(
            self.bounds.crashes,
            self.orchs(Orch(replicas=engines, joins=self.bounds.joins, leaves=self.bounds.leaves)),
            self.trainers(Trainer()),
            self.dirs(Dir(weights)),
        )

    def view(self, fields: tuple[str, ...], d: int) -> int:
        """The number of what directory `d` holds in `fields`: directories with the same number are the same to whoever looks at these only."""
        if fields not in self._views:
            self._views[fields] = (Interned(), [])
        views, of = self._views[fields]
        while len(of) <= d:
            directory = self.dirs.values[len(of)]
            of.append(views(_ANY._replace(**{name: getattr(directory, name) for name in fields})))
        return of[d]

    def patched(self, patch: int, d: int) -> int:
        return self.dirs(self.dirs.values[d]._replace(**dict(self.patches.values[patch])))

    # -- steps of the processes: (process, view of the directory) -> rows ------------------------------------------------------

    def trainer_groups(self, t: int) -> list[Any]:
        return trainer.ACTIONS[self.trainers.values[t].phase]

    def orch_groups(self, o: int) -> list[Any]:
        return orchestrator.ACTIONS[self.orchs.values[o].phase]

    def trainer_rows(self, group: Any, t: int, view: int) -> list[Row]:
        action, fields = group
        before = self._views[fields][0].values[view]
        found = action(before, self.trainers.values[t], self.rules, self.bounds)
        return [(words, self._patch(before, after), self.trainers(changed)) for words, after, changed in found]

    def orch_rows(self, group: Any, o: int, view: int) -> list[Row]:
        action, fields = group
        before, process = self._views[fields][0].values[view], self.orchs.values[o]
        found = action(before, process, self.rules, self.bounds)
        for _, _, changed in found:
            account.conserved(changed)
        return [
            (words, self._patch(before, after), self.orchs(account.canonical(changed)))
            for words, after, changed in found
        ]

    def checkpoint_rows(self, resumed: int, view: int) -> list[Row]:
        """`orch_rows` of the group `checkpoints`, which leaves the orchestrator as it is and asks it for `resumed` alone (here + 1)."""
        group = (orchestrator.checkpoints, orchestrator.JOIN)
        return self.orch_rows(group, self.orchs(Orch("run", resumed=resumed - 1)), view)

    def resumed_key(self, o: int) -> int:
        return self.orchs.values[o].resumed + 1

    def _patch(self, before: Dir, after: Dir) -> int:
        return self.patches(
            tuple(
                (name, value) for name, value in zip(Dir._fields, after, strict=True) if value != getattr(before, name)
            )
        )

    # -- what the user does, and what goes wrong -------------------------------------------------------------------------------

    def asked_to_stop(self, d: int) -> int | None:
        directory = self.dirs.values[d]
        if not self.bounds.drain or directory.stop or directory.done != NOTHING:
            return None
        return self.dirs(directory._replace(stop=True))

    def trainer_killed(self, t: int) -> int | None:
        process = self.trainers.values[t]
        if "T" not in self.bounds.killed or process.phase in ("dead", "done"):
            return None
        return self.trainers(trainer.killed(process))

    def orch_killed(self, o: int) -> list[tuple[str, int]]:
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

    def resumed(self, d: int) -> list[tuple[int, int, int]]:
        """Everything is killed, or has ended, and the user resumes from -1 or an older checkpoint: (directory, trainer) afterwards, and which."""
        before = self.dirs.values[d]
        if "W" not in self.bounds.killed:
            return []
        usable = [n for n in before.joint if n in self.rules.joinable(dict(before.parts), before.history)]
        steps = {self.rules.resume_step(usable, asked) for asked in (-1, *usable)} - {None}
        return [self._resumed_from(before, step) for step in sorted(steps)]

    def _resumed_from(self, before: Dir, step: int) -> tuple[int, int, int]:
        if step not in before.orch or step not in dict(before.parts):
            raise Violation(f"resume_step chooses checkpoints/step_{step}, of which only one part stands")
        after = before._replace(stop=False, done=NOTHING if self.rules.fresh_status else before.done)
        return self.dirs(after), self.trainers(Trainer(mode=step)), step

    def orch_resumed(self, o: int, step: int) -> int:
        """What is left of the orchestrator when everything is killed and the run resumed from `step`."""
        process = self.orchs.values[o]
        engines = tuple(Replica() for _ in range(self.bounds.replicas))
        left = Orch(resumed=step, waits=True, batched=process.batched, ledger=process.ledger, replicas=engines)
        left = left._replace(joins=process.joins, leaves=process.leaves)
        return self.orchs(account.canonical(left))

    def forget(self, o: int) -> int:
        """The orchestrator where nothing can be killed any more."""
        return self.orchs(account.forget(self.orchs.values[o]))

    def final(self, o: int, t: int, d: int) -> bool:
        """Whether the run has ended; raises if it has not ended well."""
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

    # -- one state at a time, for traces -----------------------------------------------------------------------------------------

    def after(self, state: Parts) -> Iterator[tuple[str, Parts]]:
        """Everything that may follow a state, with its words. May raise `Violation` after it has yielded what holds."""
        kills, o, t, d = state
        settle: Callable[[int], int] = (lambda number: number) if kills else self.forget
        if (stopped := self.asked_to_stop(d)) is not None:
            yield "the user asks the run to stop", Parts(kills, o, t, stopped)
        if kills:
            left = (lambda number: number) if kills > 1 else self.forget
            if (dead := self.trainer_killed(t)) is not None:
                yield f"TRAINER IS KILLED ({self.trainers.values[t].phase})", Parts(kills - 1, left(o), dead, d)
            for words, changed in self.orch_killed(o):
                yield words, Parts(kills - 1, left(changed), t, d)
            for directory, process, step in self.resumed(d):
                words = f"EVERYTHING IS KILLED, and the run started again from checkpoints/step_{step}"
                yield words, Parts(kills - 1, left(self.orch_resumed(o, step)), process, directory)
        for group in self.trainer_groups(t):
            for words, patch, changed in self.trainer_rows(group, t, self.view(group[1], d)):
                yield words, Parts(kills, o, changed, self.patched(patch, d))
        for group in self.orch_groups(o):
            for words, patch, changed in self.orch_rows(group, o, self.view(group[1], d)):
                yield words, Parts(kills, settle(changed), t, self.patched(patch, d))
