"""The account of episodes in memory: what was recorded, what it adds up to, and what of it is not written yet. No file, no clock.

`Ledger` adds the file. Recording calls come from the event loop; a flush takes what is pending from another thread.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prime_rl.envs.protocol import EpisodeResult
from prime_rl.orchestrator.account import Account, EnvAccount
from prime_rl.orchestrator.episodes import Task
from prime_rl.orchestrator.ledger_file import Changes, EpisodeRow, GroupRow, State, episode_values, group_values
from prime_rl.orchestrator.samples import output_tokens


def episode_id(group: int, number: int, attempt: int) -> str:
    """`group.number.attempt`: an episode's name in the ledger, the logs and the batches' lineage."""
    return f"{group}.{number}.{attempt}"


def parse_id(episode: str) -> tuple[int, int, int]:
    """The inverse of `episode_id`. Raises ValueError for anything else."""
    group, number, attempt = episode.split(".")
    return int(group), int(number), int(attempt)


@dataclass
class Group:
    """A group that is open, with all its episodes."""

    row: GroupRow
    episodes: dict[str, EpisodeRow] = field(default_factory=dict)

    def latest(self) -> dict[int, EpisodeRow]:
        """The latest attempt of each number."""
        return {row.number: row for row in sorted(self.episodes.values(), key=lambda row: (row.number, row.attempt))}


class Book:
    """What is known of every episode that may still change, and counts of the rest.

    Recording calls raise `ValueError` for what cannot happen: an episode that ends without having been issued, one that ends twice.
    """

    def __init__(self) -> None:
        # Held by a recording call, or by a flush that takes what is pending.
        self._recording = threading.Lock()  # bounded: held for microseconds, nothing waits in it
        self._groups: dict[int, Group] = {}  # open ones
        self._counts: dict[
            str, EnvAccount
        ] = {}  # without batched and trained of rows, which follow from `_by_step` and `_version`
        self._by_step: dict[int, Counter[str]] = {}
        self._carried: Counter[tuple[str, str, str]] = (
            Counter()
        )  # (env, state, reason) of episodes that no row tells of
        self._groups_opened = self._version = 0
        self._collecting = 0  # the step after the last committed batch
        self._rewound = self._changed = False
        self.discards: Counter[str] = (
            Counter()
        )  # groups that left without a batch, by what was said of their filtered episodes
        self._dirty_groups: dict[int, GroupRow] = {}
        self._dirty: dict[str, EpisodeRow] = {}
        self._results: dict[str, EpisodeResult] = {}  # of finished episodes, not written yet
        self._forgotten: set[str] = set()  # results that were written and are not needed any more

    # -- recording, in the event loop ------------------------------------------------------------------------------------------

    def opened(self, group: int, env: str, task_index: int, task_id: str) -> None:
        """A group was opened."""
        with self._recording:
            if group in self._groups or group < self._groups_opened:
                raise ValueError(f"group {group} was opened before")
            self._add_group(GroupRow(group, env, task_index, task_id))

    def issued(self, episode: str, version: int, incarnation: int) -> None:
        """An episode of an open group starts. The same one may be issued again if it was in flight when the orchestrator died."""
        with self._recording:
            group = self._group(parse_id(episode)[0])
            row = group.episodes.get(episode)
            if row is None:
                row = EpisodeRow(*parse_id(episode))
                before = group.latest().get(row.number)
                if row.attempt != (0 if before is None else before.attempt + 1) or (before and not before.retried):
                    raise ValueError(f"episode {episode} cannot follow {before}")
                self._add_episode(group, row)
            elif row.state != State.ISSUED:
                raise ValueError(f"episode {episode} is issued again, but it is {row.state}")
            row.version, row.incarnation = version, incarnation
            self._mark(row)

    def finished(self, episode: str, first: int, last: int, incarnation: int, result: EpisodeResult) -> None:
        """An episode ended with a result; versions `first` … `last`, as they stood in incarnation `incarnation`, may have sampled it."""
        with self._recording:
            group, row = self._row_of(episode, State.ISSUED)
            row.first, row.last, row.incarnation = first, last, incarnation
            row.reward, row.is_truncated = float(result.reward), bool(result.is_truncated)
            row.tokens = sum(len(sample.input_ids) for sample in result.samples)
            row.output_tokens = output_tokens(result)
            self._move(group, row, State.FINISHED)
            self._results[episode] = result

    def dropped(self, episode: str, reason: str, detail: str = "", retried: bool = False) -> None:
        """An issued or finished episode will not be trained. With `retried` its next attempt will be issued."""
        with self._recording:
            group, row = self._row_of(episode, State.ISSUED, State.FINISHED)
            self._drop(group, row, reason, detail)
            row.retried = retried

    def batched(
        self,
        step: int,
        trained: Sequence[str],
        filtered: Sequence[str],
        truncated: Sequence[str],
        groups: Sequence[int],
        details: Mapping[str, str] | None = None,
    ) -> None:
        """The batch of `step` was committed (its directory has its final name): `groups` are closed, their tokens are forgotten.

        Args:
            trained: Episodes with samples in it.
            filtered: Episodes left out for want of a learning signal, or by a filter.
            truncated: Episodes left out because none of their sampled tokens fits `seq_len`.
            groups: The groups of the batch. Every finished episode of theirs is in one of the three lists.
            details: Which filter left an episode out.
        """
        with self._recording:
            self._check_complete([*trained, *filtered, *truncated], groups)
            for name in trained:
                group, row = self._row_of(name, State.FINISHED)
                self._move(group, row, State.BATCHED, step=step)
            for reason, names in (("filtered", filtered), ("truncated", truncated)):
                for name in names:
                    self._drop(*self._row_of(name, State.FINISHED), reason, (details or {}).get(name, ""))
            for number in groups:
                self._close(number, "batched", step)
            self._collecting = step + 1

    def discarded(self, groups: Iterable[int], reason: str = "filtered", detail: str = "") -> None:
        """Groups leave without a batch: their finished episodes are dropped for `reason`. Also for groups that lost every episode."""
        with self._recording:
            for number in groups:
                group = self._group(number)
                if flying := [row.id for row in group.episodes.values() if row.state == State.ISSUED]:
                    raise ValueError(f"group {number} is discarded while {', '.join(flying)} are in flight")
                finished = [row for row in group.episodes.values() if row.state == State.FINISHED]
                for row in finished:
                    self._drop(group, row, reason, detail)
                self.discards[detail] += bool(finished) and reason == "filtered"
                self._close(number, "discarded", self._collecting)

    def trained_through(self, version: int) -> None:
        """`version` of the present history is committed: batches of steps below it are trained."""
        with self._recording:
            if version > self._version:
                self._version, self._changed = version, True

    def rewound(self, step: int) -> None:
        """A new incarnation of the trainer began at `step`: batches from there on are trained again, so they are batched, not trained."""
        with self._recording:
            if step < self._version:
                self._version, self._changed, self._rewound = step, True, True

    # -- the account ------------------------------------------------------------------------------------------------------------

    def account(self) -> Account:
        """The account now, with what is not flushed yet. Costs next to nothing: it is counted as things are recorded."""
        with self._recording:
            return self._account()

    def groups_opened(self) -> int:
        """How many groups were drawn from the task stream: one more than the highest group number."""
        return self._groups_opened

    def task_of(self, group: int) -> Task:
        """The task of an open group."""
        with self._recording:
            row = self._group(group).row
        return Task(row.env, row.task_index, row.task_id)

    def batch_extra(
        self,
        step: int,
        trained: Sequence[str],
        filtered: Sequence[str],
        truncated: Sequence[str],
        groups: Sequence[int],
        details: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """What the manifest of the batch of `step` must say (`write_batch(extra=…)`), so that the ledger can be reconciled with it."""
        with self._recording:
            self._check_complete([*trained, *filtered, *truncated], groups)
            account = self._account()
            tasks = [self._groups[number].row for number in groups]
        for names, reason in ((trained, ""), (filtered, "filtered"), (truncated, "truncated")):
            for name in names:
                env = account.envs[self._groups[parse_id(name)[0]].row.env]
                env.finished -= 1
                if reason:
                    env.dropped[reason] = env.dropped.get(reason, 0) + 1
                else:
                    env.batched += 1
        listed: dict[str, Any] = {"trained": list(trained), "filtered": list(filtered), "truncated": list(truncated)}
        listed |= {"details": dict(details)} if details else {}
        rows = [[row.number, row.env, row.task_index, row.task_id] for row in tasks]
        return {
            "groups_opened": self._groups_opened,
            "ledger": {**listed, "groups": rows, "account": account.to_json()},
        }

    # -- what is not written yet ------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether something was recorded since the last flush."""
        return self._changed

    def _take(self) -> tuple[list[EpisodeRow], Changes]:
        """What is pending, as values: recording goes on while they are written."""
        taken = list(self._dirty.values())
        changes = Changes(
            groups=[group_values(row) for row in self._dirty_groups.values()],
            episodes=[episode_values(row) for row in taken],
            results=self._results,
            forgotten=sorted(self._forgotten),
            issued={env: count.issued for env, count in self._counts.items()},
            carried=[(*key, count) for key, count in sorted(self._carried.items())],
            groups_opened=self._groups_opened,
            version=self._version,
            rewound=self._rewound,
        )
        self._dirty, self._dirty_groups, self._results, self._forgotten = {}, {}, {}, set()
        self._rewound = self._changed = False
        return taken, changes

    def _give_back(self, taken: list[EpisodeRow], changes: Changes) -> None:
        """The flush failed: what it took is pending again, as it stands by now."""
        for row in taken:
            self._dirty.setdefault(row.id, row)
            if row.state == State.FINISHED and row.id in changes.results:
                self._results[row.id] = changes.results[row.id]
        for values in changes.groups:
            self._dirty_groups.setdefault(values[0], GroupRow(*values))
        self._forgotten |= set(changes.forgotten)
        self._rewound |= changes.rewound
        self._changed = True

    # -- private: callers hold `_recording` --------------------------------------------------------------------------------------

    def _account(self) -> Account:
        envs = {
            env: replace(count, dropped={reason: number for reason, number in sorted(count.dropped.items()) if number})
            for env, count in self._counts.items()
        }
        for step, counts in self._by_step.items():
            for env, number in counts.items():
                if step < self._version:
                    envs[env].trained += number
                else:
                    envs[env].batched += number
        return Account(dict(sorted(envs.items())))

    def _group(self, number: int) -> Group:
        if number not in self._groups:
            raise ValueError(f"group {number} is not open")
        return self._groups[number]

    def _row_of(self, episode: str, *states: State) -> tuple[Group, EpisodeRow]:
        group = self._group(parse_id(episode)[0])
        row = group.episodes.get(episode)
        if row is None or row.state not in states:
            raise ValueError(f"episode {episode} is {row.state if row else 'unknown'}, not {' or '.join(states)}")
        return group, row

    def _check_complete(self, named: Sequence[str], groups: Sequence[int]) -> None:
        """The episodes named for a batch are exactly the finished ones of its groups, and nothing of these is in flight any more."""
        rows = [row for number in groups for row in self._group(number).episodes.values()]
        finished = {row.id for row in rows if row.state == State.FINISHED}
        if len(named) != len(finished) or set(named) != finished:
            raise ValueError(f"a batch names other episodes than its groups finished: {sorted(finished ^ set(named))}")
        if flying := [row.id for row in rows if row.state == State.ISSUED]:
            raise ValueError(f"a batch holds groups of which {', '.join(flying)} are in flight")

    def _add_group(self, row: GroupRow) -> Group:
        group = self._groups[row.number] = Group(row)
        self._counts.setdefault(row.env, EnvAccount())
        self._dirty_groups[row.number] = row
        self._groups_opened = max(self._groups_opened, row.number + 1)
        self._changed = True
        return group

    def _add_episode(self, group: Group, row: EpisodeRow) -> None:
        group.episodes[row.id] = row
        self._counts[group.row.env].issued += 1
        self._counts[group.row.env].in_flight += 1
        self._mark(row)

    def _drop(self, group: Group, row: EpisodeRow, reason: str, detail: str = "") -> None:
        self._move(group, row, State.DROPPED, reason=reason, detail=detail)

    def _move(
        self,
        group: Group,
        row: EpisodeRow,
        state: State,
        *,
        step: int | None = None,
        reason: str | None = None,
        detail: str = "",
    ) -> None:
        """Change a row's state and the counts with it. What ends needs neither its tokens nor its incarnation any more."""
        self._count(group.row.env, row, -1)
        if row.state == State.FINISHED and self._results.pop(row.id, None) is None:
            self._forgotten.add(row.id)
        row.state, row.step, row.reason, row.detail, row.retried = state, step, reason, detail, False
        if state in (State.BATCHED, State.DROPPED):
            row.incarnation = None
        self._count(group.row.env, row, +1)
        self._mark(row)

    def _count(self, env: str, row: EpisodeRow, by: int) -> None:
        counts = self._counts.setdefault(env, EnvAccount())
        if row.state == State.ISSUED:
            counts.in_flight += by
        elif row.state == State.FINISHED:
            counts.finished += by
        elif row.state == State.DROPPED:
            assert row.reason is not None
            counts.dropped[row.reason] = counts.dropped.get(row.reason, 0) + by
        else:
            assert row.step is not None
            here = self._by_step.setdefault(row.step, Counter())
            here[env] += by
            if not here.total():
                del self._by_step[row.step]

    def _mark(self, row: EpisodeRow) -> None:
        self._dirty[row.id] = row
        self._changed = True

    def _close(self, number: int, state: str, step: int | None = None) -> None:
        row = self._groups.pop(number).row
        row.state, row.step = state, step
        self._dirty_groups[number] = row
        self._changed = True
