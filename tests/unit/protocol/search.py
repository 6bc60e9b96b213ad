"""Breadth-first search over all interleavings: states are 64-bit numbers, whole levels at a time go through tables."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from . import orchestrator
from .space import Parts, Space
from .state import Bounds, Rules, Violation

Numbers = npt.NDArray[np.int64]
_DIR, _TRAINER, _KILLS = 21, 13, 2  # bits; the orchestrator has the rest
_CHUNK = 1 << 19


@dataclass
class Outcome:
    """What a search found. `trace` is a shortest way to the violation."""

    states: int = 0
    transitions: int = 0
    ends: int = 0
    depth: int = 0
    violation: str | None = None
    trace: list[str] = field(default_factory=list)


class Found(Exception):
    """A violation, and the state (its place in the chunk) from which a step leads to it."""

    def __init__(self, violation: str, where: int) -> None:
        super().__init__(violation)
        self.violation, self.where = violation, where


def pack(kills: Any, o: Any, t: Any, d: Any) -> Any:
    return ((o << _KILLS | kills) << _TRAINER | t) << _DIR | d


def unpack(state: Any) -> Parts:
    rest = state >> _DIR
    kills = rest >> _TRAINER & (1 << _KILLS) - 1
    return Parts(kills, rest >> _TRAINER + _KILLS, rest & (1 << _TRAINER) - 1, state & (1 << _DIR) - 1)


class Lookup:
    """A function of small numbers, worked out when it is first needed, as a table."""

    def __init__(self, function: Callable[[int], int | None]) -> None:
        self.function = function
        self.table = np.full(1024, -2, dtype=np.int64)  # -2: not worked out, -1: None

    def __call__(self, keys: Numbers) -> Numbers:
        if len(keys) and (top := int(keys.max())) >= len(self.table):
            self.table = np.concatenate([self.table, np.full(max(top, len(self.table)), -2, dtype=np.int64)])
        for key in np.unique(keys[self.table[keys] == -2]).tolist():
            found = self.function(key)
            self.table[key] = -1 if found is None else found
        return self.table[keys]


class Table:
    """A function from a pair of numbers to rows of numbers. Pairs are one key: `first << 32 | second`."""

    def __init__(self, rows: Callable[[int, int], list[tuple[int, ...]]], width: int) -> None:
        self.rows, self.width = rows, width
        self._keys = np.zeros(0, dtype=np.int64)
        self._places = np.zeros(0, dtype=np.int64)
        self._begin, self._count, self._flat = (
            np.zeros(0, np.int64),
            np.zeros(0, np.int64),
            np.zeros((0, width), np.int64),
        )

    def __call__(self, first: Numbers, second: Numbers) -> tuple[Numbers, npt.NDArray[np.int64]]:
        """Rows of all pairs: (which pair, rows of shape [found, width])."""
        keys = first << 32 | second
        where = self._find(keys)
        count = self._count[where]
        owner = np.repeat(np.arange(len(keys)), count)
        inside = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
        return owner, self._flat[self._begin[where][owner] + inside]

    def _find(self, keys: Numbers) -> Numbers:
        place = np.searchsorted(self._keys, keys)
        known = place < len(self._keys)
        known[known] = self._keys[place[known]] == keys[known]
        if not known.all():
            self._add(np.unique(keys[~known]), keys)
            place = np.searchsorted(self._keys, keys)
        return self._places[place]

    def _add(self, new: Numbers, keys: Numbers) -> None:
        found = []
        for key in new.tolist():
            try:
                found.append(self.rows(key >> 32, key & 0xFFFFFFFF))
            except Violation as violation:
                raise Found(str(violation), int(np.flatnonzero(keys == key)[0])) from None
        counts = np.array([len(rows) for rows in found], dtype=np.int64)
        flat = np.array([row for rows in found for row in rows], dtype=np.int64).reshape(-1, self.width)
        places = np.arange(len(self._begin), len(self._begin) + len(new))
        self._begin = np.concatenate([self._begin, len(self._flat) + np.cumsum(counts) - counts])
        self._count = np.concatenate([self._count, counts])
        self._flat = np.concatenate([self._flat, flat])
        merged = np.concatenate([self._keys, new])
        order = np.argsort(merged, kind="stable")
        self._keys, self._places = merged[order], np.concatenate([self._places, places])[order]


class StateSet:
    """States met so far, in the order of meeting, with a hash table over them (open addressing)."""

    def __init__(self) -> None:
        self.states = np.zeros(1 << 16, dtype=np.int64)
        self.count = 0
        self._slots = np.zeros(1 << 18, dtype=np.uint32)  # place + 1; 0 is free

    def add(self, batch: Numbers) -> npt.NDArray[np.bool_]:
        """Take in those of `batch` that are new, in order. Returns which."""
        self._room(len(batch))
        base, mask = self.count, len(self._slots) - 1
        self.states[base : base + len(batch)] = batch
        new = np.zeros(len(batch), dtype=bool)
        claimed = np.zeros(len(batch), dtype=np.int64)
        left, at = np.arange(len(batch)), self._hash(batch)
        while len(left):
            slot = self._slots[at]
            free = slot == 0
            self._slots[at[free]] = (base + 1 + left[free]).astype(np.uint32)
            slot = self._slots[at]
            mine = free & (slot == base + 1 + left)
            new[left[mine]], claimed[left[mine]] = True, at[mine]
            same = self.states[slot.astype(np.int64) - 1] == batch[left]
            go_on = ~same
            left, at = left[go_on], at[go_on] + 1 & mask
        fresh = batch[new]
        self._slots[claimed[new]] = np.arange(base + 1, base + 1 + len(fresh), dtype=np.uint32)
        self.states[base : base + len(fresh)] = fresh
        self.count += len(fresh)
        return new

    def find(self, batch: Numbers) -> Numbers:
        """Places of states that were met."""
        mask = len(self._slots) - 1
        result = np.zeros(len(batch), dtype=np.int64)
        left, at = np.arange(len(batch)), self._hash(batch)
        while len(left):
            place = self._slots[at].astype(np.int64) - 1
            same = self.states[place] == batch[left]
            result[left[same]] = place[same]
            left, at = left[~same], at[~same] + 1 & mask
        return result

    def _hash(self, batch: Numbers) -> Numbers:
        mixed = batch.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        return (mixed >> np.uint64(20)).astype(np.int64) & len(self._slots) - 1

    def _room(self, more: int) -> None:
        need = self.count + more
        if need > len(self.states):
            grown = np.zeros(max(need, len(self.states) * 3 // 2), dtype=np.int64)
            grown[: self.count] = self.states[: self.count]
            self.states = grown
        if need * 2 > len(self._slots):
            size = len(self._slots)
            while need * 2 > size:
                size *= 2
            self._slots = np.zeros(size, dtype=np.uint32)
            for begin in range(0, self.count, _CHUNK):
                self._place(begin, self.states[begin : min(begin + _CHUNK, self.count)])

    def _place(self, base: int, batch: Numbers) -> None:
        """Enter states that are all different."""
        mask = len(self._slots) - 1
        left, at = np.arange(len(batch)), self._hash(batch)
        while len(left):
            free = self._slots[at] == 0
            self._slots[at[free]] = (base + 1 + left[free]).astype(np.uint32)
            lost = self._slots[at] != base + 1 + left
            left, at = left[lost], at[lost] + 1 & mask


class Search:
    """All states reachable within `bounds` under `rules`."""

    def __init__(self, rules: Rules, bounds: Bounds) -> None:
        self.space = space = Space(rules, bounds)
        self.met = StateSet()
        self._tables: dict[tuple[str, int], Table] = {}
        self._patched = Table(lambda patch, d: [(space.patched(patch, d),)], 1)
        self._views: dict[tuple[str, ...], Lookup] = {}
        self._phases = {
            "trainer": Lookup(lambda t: self._kind("trainer", space.trainer_groups(t))),
            "orch": Lookup(lambda o: self._kind("orch", space.orch_groups(o))),
        }
        self._kinds: dict[str, list[Any]] = {"trainer": [], "orch": []}
        self._stopped = Lookup(space.asked_to_stop)
        self._trainer_killed = Lookup(space.trainer_killed)
        self._orch_killed = Table(lambda o, _: [(changed,) for _, changed in space.orch_killed(o)], 1)
        self._resumed = Table(lambda d, _: space.resumed(d), 3)
        self._orch_resumed = Table(lambda o, step: [(space.orch_resumed(o, step),)], 1)
        self._resumed_key = Lookup(space.resumed_key)
        self._forget = Lookup(space.forget)
        self._ended = Lookup(lambda o: int(space.orchs.values[o].phase == "gone"))

    def run(self, limit: int | None = None, on_level: Callable[[int, int], None] | None = None) -> Outcome:
        """Search breadth first; then make sure that from every state an end can be reached without further kills.

        Args:
            limit: Most states; beyond it the search ends with a violation that says so.
            on_level: Told the depth and the number of states after each level.
        """
        outcome = Outcome()
        parents = [np.zeros(1, dtype=np.uint32)]
        self.met.add(np.array([pack(*self.space.first())], dtype=np.int64))
        ends: list[Numbers] = []
        begin = 0
        try:
            while begin < self.met.count:
                until = self.met.count
                for first in range(begin, until, _CHUNK):
                    chunk = self.met.states[first : min(first + _CHUNK, until)].copy()
                    ends.append(first + self._finals(chunk, first))
                    for owner, after in self._steps(chunk, first):
                        outcome.transitions += len(after)
                        self._take(first, owner, after, parents)
                    for owner, after in self._kills(chunk, first):
                        outcome.transitions += len(after)
                        self._take(first, owner, after, parents)
                begin = until
                outcome.depth += 1
                if on_level is not None:
                    on_level(outcome.depth, self.met.count)
                if limit is not None and self.met.count > limit:
                    outcome.violation = f"more than {limit} states"
                    break
            outcome.ends = sum(map(len, ends))
            if outcome.violation is None and (stuck := self._stuck(np.concatenate(ends))) is not None:
                raise Found("from here no end can be reached, though nothing fails any more", stuck)
        except Found as found:
            outcome.violation = found.violation
            outcome.trace = self.trace(found.where, np.concatenate(parents))
        outcome.states = self.met.count
        return outcome

    def _take(self, first: int, owner: Numbers, after: Numbers, parents: list[Any]) -> None:
        new = self.met.add(after)
        parents.append((first + owner[new]).astype(np.uint32))

    # -- whole chunks ----------------------------------------------------------------------------------------------------------

    def _steps(self, chunk: Numbers, first: int) -> Iterator[tuple[Numbers, Numbers]]:
        """What the processes and the user may do: (which state of the chunk, state afterwards)."""
        kills, o, t, d = unpack(chunk)
        for which, process in (("trainer", t), ("orch", o)):
            kinds = self._phases[which](process)
            for kind in np.unique(kinds).tolist():
                for number in range(len(self._kinds[which][kind])):
                    of = np.flatnonzero(kinds == kind)
                    yield self._group(which, kind, number, of, (kills, o, t, d), first)
        stopped = self._stopped(d)
        of = np.flatnonzero(stopped >= 0)
        yield of, pack(kills[of], o[of], t[of], stopped[of])

    def _group(
        self, which: str, kind: int, number: int, of: Numbers, parts: Any, first: int
    ) -> tuple[Numbers, Numbers]:
        kills, o, t, d = (part[of] for part in parts)
        group = self._kinds[which][kind][number]
        fields = group[1]
        if fields not in self._views:
            self._views[fields] = Lookup(lambda directory: self.space.view(fields, directory))
        key, process = (f"{which} {kind}", number), t if which == "trainer" else o
        alike = group[0] is orchestrator.checkpoints  # the same for most orchestrators
        if key not in self._tables:
            self._tables[key] = Table(self._rows_of(which, group, alike), 2)
        try:
            owner, found = self._tables[key](self._resumed_key(o) if alike else process, self._views[fields](d))
        except Found as violation:
            raise Found(violation.violation, first + int(of[violation.where])) from None
        _, patched = self._patched(found[:, 0], d[owner])
        changed, kept = o[owner] if alike else found[:, 1], kills[owner]
        if which == "trainer":
            return of[owner], pack(kept, o[owner], changed, patched[:, 0])
        return of[owner], pack(kept, self._settled(kept, changed), t[owner], patched[:, 0])

    def _rows_of(self, which: str, group: Any, alike: bool) -> Callable[[int, int], list[tuple[int, ...]]]:
        if alike:
            return lambda resumed, view: [row[1:] for row in self.space.checkpoint_rows(resumed, view)]
        rows = self.space.trainer_rows if which == "trainer" else self.space.orch_rows
        return lambda process, view: [row[1:] for row in rows(group, process, view)]

    def _kills(self, chunk: Numbers, first: int) -> Iterator[tuple[Numbers, Numbers]]:
        """What may go wrong, while the bound allows it."""
        allowed = np.flatnonzero(unpack(chunk).kills > 0)
        if not len(allowed):
            return
        kills, o, t, d = unpack(chunk[allowed])
        dead = self._trainer_killed(t)
        of = np.flatnonzero(dead >= 0)
        yield allowed[of], pack(kills[of] - 1, self._settled(kills[of] - 1, o[of]), dead[of], d[of])
        owner, changed = self._orch_killed(o, np.zeros_like(o))
        left = kills[owner] - 1
        yield allowed[owner], pack(left, self._settled(left, changed[:, 0]), t[owner], d[owner])
        try:
            owner, back = self._resumed(d, np.zeros_like(d))
        except Found as violation:
            raise Found(violation.violation, first + int(allowed[violation.where])) from None
        left = kills[owner] - 1
        _, changed = self._orch_resumed(o[owner], back[:, 2])
        yield allowed[owner], pack(left, self._settled(left, changed[:, 0]), back[:, 1], back[:, 0])

    def _settled(self, kills: Numbers, o: Numbers) -> Numbers:
        """Where nothing can be killed any more, what only a restart would read is forgotten."""
        last = np.flatnonzero(kills == 0)
        if len(last):
            o = o.copy()
            o[last] = self._forget(o[last])
        return o

    def _kind(self, which: str, groups: list[Any]) -> int:
        kinds = self._kinds[which]
        if groups not in kinds:
            kinds.append(groups)
        return kinds.index(groups)

    def _finals(self, chunk: Numbers, first: int) -> Numbers:
        parts = unpack(chunk)
        found = []
        for place in np.flatnonzero(self._ended(parts.o)).tolist():
            try:
                if self.space.final(int(parts.o[place]), int(parts.t[place]), int(parts.d[place])):
                    found.append(place)
            except Violation as violation:
                raise Found(str(violation), first + place) from None
        return np.array(found, dtype=np.int64)

    def _stuck(self, ends: Numbers) -> int | None:
        """The first state from which no end can be reached by the processes' own steps, found by sweeps from the last state to the first."""
        good = np.zeros(self.met.count, dtype=bool)
        good[ends] = True
        while True:
            left = np.flatnonzero(~good)
            before = len(left)
            for begin in range((before - 1) // _CHUNK * _CHUNK, -1, -_CHUNK):
                places = left[begin : begin + _CHUNK]
                chunk = self.met.states[places]
                for owner, after in self._steps(chunk, 0):
                    good[places[owner[good[self.met.find(after)]]]] = True
            remaining = before - int(good[left].sum())
            if remaining == 0:
                return None
            if remaining == before:
                return int(np.flatnonzero(~good)[0])

    # -- one state ---------------------------------------------------------------------------------------------------------------

    def trace(self, at: int, parents: npt.NDArray[np.uint32]) -> list[str]:
        """The words of a shortest way to a state."""
        path = [at]
        while path[-1]:
            path.append(int(parents[path[-1]]))
        lines = []
        for before, after in itertools.pairwise(reversed(path)):
            target = unpack(int(self.met.states[after]))
            moves = self.space.after(unpack(int(self.met.states[before])))
            lines.append(next(words for words, state in moves if state == target))
        return lines
