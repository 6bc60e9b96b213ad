"""The account of a run's episodes: what was issued, and where each one is now."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class EnvAccount:
    """Counts of one environment's episodes (attempts, so one that was retried counts once for every attempt)."""

    issued: int = 0
    in_flight: int = 0  # issued, not ended
    finished: int = 0  # ended with a result, not in a batch yet
    batched: int = 0  # in a committed batch that is not trained yet
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # by reason; reasons that never occurred are left out

    @property
    def difference(self) -> int:
        """Episodes that were issued and are nowhere now; 0 when the account is conserved."""
        return self.issued - (self.trained + sum(self.dropped.values()) + self.in_flight + self.finished + self.batched)


@dataclass
class Account:
    """Counts per environment. Conserved: issued = trained + dropped + in flight, finished or batched."""

    envs: dict[str, EnvAccount] = field(default_factory=dict)

    @property
    def total(self) -> EnvAccount:
        """All environments together."""
        total = EnvAccount()
        for env in self.envs.values():
            total.issued += env.issued
            total.in_flight += env.in_flight
            total.finished += env.finished
            total.batched += env.batched
            total.trained += env.trained
            for reason, count in env.dropped.items():
                total.dropped[reason] = total.dropped.get(reason, 0) + count
        return total

    def check(self) -> None:
        """Raises `AssertionError` naming each environment whose episodes do not add up, with the difference."""
        wrong = [f"{name}: {env.difference:+d} of {env}" for name, env in sorted(self.envs.items()) if env.difference]
        if wrong:
            raise AssertionError(f"issued = trained + dropped + in flight does not hold: {'; '.join(wrong)}")

    def to_json(self) -> dict[str, Any]:
        """Plain data for a manifest."""
        return {name: asdict(env) for name, env in sorted(self.envs.items())}

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Account":
        """The inverse of `to_json`. Raises TypeError for other data."""
        return Account({name: EnvAccount(**env) for name, env in data.items()})
