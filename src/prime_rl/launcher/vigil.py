"""Who has stalled: judged by what the status files said, and since when they have said the same, by the launcher's own clock.

Clocks of other processes, and of other hosts' file systems, are never compared with ours: a heartbeat is fresh when it has changed since we last
looked. So neither a laptop that slept nor a clock that was set makes anybody look dead.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prime_rl.launcher.clock import Policy
from prime_rl.monitor.process import ProcessId
from prime_rl.monitor.status import ProcessStatus, Waiting

_BEATS_TO_EXIT = 5  # heartbeat timeouts; uploads to W&B may take a while


@dataclass
class _Seen:
    """What one status file said, and when (launcher's clock) it began to say so."""

    heartbeat: float
    beat_at: float
    progress: tuple[float, Waiting | None]
    got_on_at: float
    pulses: bool = False  # a server that reports each answer of its engine as progress


@dataclass
class _Life:
    """One life of a process."""

    began: float
    seen: dict[str, _Seen] = field(default_factory=dict)
    halted: dict[ProcessId, float] = field(default_factory=dict)


class Vigil:
    """Watches lives, by process name. A name with a rank (`trainer.1`) belongs to the process before the dot."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lives: dict[str, _Life] = {}

    def begin(self, process: str, now: float) -> None:
        """A new life: what was seen of the one before counts no more."""
        self._lives[process] = _Life(now)

    def end(self, process: str) -> None:
        """It is not watched any more."""
        self._lives.pop(process, None)

    def forgive(self, now: float) -> None:
        """The launcher was away, and perhaps they all were: everybody's time begins anew."""
        for life in self._lives.values():
            life.began = now
            life.halted.clear()
            life.seen.clear()

    def look(
        self,
        now: float,
        statuses: Mapping[str, ProcessStatus],
        halted: Mapping[str, Iterable[ProcessId]],
        services: Iterable[str] = (),
    ) -> dict[str, str]:
        """Why each stalled process counts as such.

        Args:
            now: Of the launcher's clock, in seconds.
            statuses: Last words, by name.
            halted: Processes that are stopped by a signal at present, by the name of the process they belong to.
            services: These get nowhere without requests, and are right. One that reports its engine's answers as progress must go on doing so.
        """
        faults = {}
        for name, life in self._lives.items():
            own = {key: status for key, status in statuses.items() if key.partition(".")[0] == name}
            fault = self._halted(now, life, halted.get(name, ()))
            for key, status in own.items():
                fault = fault or self._stalled(now, life, key, status, name in services)
            if name not in own and name not in services and now - life.began > self._policy.stall_timeout:
                fault = fault or f"has not reported within {self._policy.stall_timeout:.0f} s"
            if fault:
                faults[name] = fault
        return faults

    def _halted(self, now: float, life: _Life, halted: Iterable[ProcessId]) -> str | None:
        life.halted = {process: life.halted.get(process, now) for process in halted}
        longest = max((now - since for since in life.halted.values()), default=0.0)
        return f"has been stopped (SIGSTOP) for {longest:.0f} s" if longest > self._policy.heartbeat_timeout else None

    def _stalled(self, now: float, life: _Life, key: str, status: ProcessStatus, service: bool) -> str | None:
        signs = (status.progress, status.waiting)
        seen = life.seen.setdefault(key, _Seen(status.heartbeat, now, signs, now))
        if seen.heartbeat != status.heartbeat:
            seen.heartbeat, seen.beat_at = status.heartbeat, now
        if seen.progress != signs:
            seen.pulses = status.ready is not None
            seen.progress, seen.got_on_at = signs, now
        if status.outcome is not None:
            return self._lingers(now - seen.beat_at, key, status.outcome)
        if service and status.ready is None:
            seen.beat_at = now  # ready_timeout bounds its start
        rank = key.partition(".")[2]
        whose = f"rank {rank} " if rank else ""
        if (silent := now - seen.beat_at) > self._policy.heartbeat_timeout:
            return f"{whose}has given no sign of life for {silent:.0f} s"
        if service:
            return self._mute(now - seen.got_on_at) if seen.pulses and status.waiting is None else None
        return None if rank else self._stuck(now - seen.got_on_at, status)  # rank 0 speaks for the others

    def _mute(self, same_for: float) -> str | None:
        """A server's heart beats, but the engine behind it does not answer."""
        return (
            f"has had no answer from its engine for {same_for:.0f} s"
            if same_for > self._policy.heartbeat_timeout
            else None
        )

    def _lingers(self, silent: float, key: str, outcome: str) -> str | None:
        """The last word was said; what is left to do is to exit."""
        if "." in key or silent <= _BEATS_TO_EXIT * self._policy.heartbeat_timeout:
            return None
        return f"said `{outcome}` {silent:.0f} s ago and has not ended"

    def _stuck(self, same_for: float, status: ProcessStatus) -> str | None:
        wait = status.waiting
        if wait is None:
            if same_for <= self._policy.stall_timeout:
                return None
            where = status.phase if status.step is None else f"{status.phase}, step {status.step}"
            return f"has got nowhere for {same_for:.0f} s ({where})"
        late = same_for - (wait.deadline - wait.since)
        if late <= self._policy.heartbeat_timeout:
            return None
        return f"still waits for {wait.subject} from {wait.owner}, {late:.0f} s after its own deadline"
