"""What may be trained: filters as episodes end, the gate as groups are complete, and an end where nothing is let through any more."""

from collections import Counter
from typing import TYPE_CHECKING

from prime_rl.envs.protocol import EpisodeResult
from prime_rl.errors import UserError
from prime_rl.monitor import log
from prime_rl.orchestrator.algorithms import check_algorithm
from prime_rl.orchestrator.core import NO_SIGNAL, Group
from prime_rl.orchestrator.curriculum import Curriculum
from prime_rl.orchestrator.filters import check_filters, why_episode
from prime_rl.orchestrator.samples import turned_away

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig

logger = log.get("orchestrator")

_MAX_EMPTY_BATCHES = 10
_HOPELESS = "the task is too easy, too hard, or its reward is broken"


class Admission:
    """Asked of every episode and every group.

    Raises:
        UserError: a function of the user's own is not there, or does not take its arguments.
    """

    def __init__(self, config: "OrchestratorConfig") -> None:
        for algorithm, key in config.algorithms():
            check_algorithm(algorithm, key)
        for filters, key in config.all_filters():
            check_filters(filters, key)
        self._config, self._groups = config, config.batch_size // config.rollouts_per_example
        self._empty_batches = 0
        self._discards: Counter[str] = Counter()  # groups since the last batch, by what was wrong with them
        self.curriculum = Curriculum({}, {}, 0)

    def look(self, env: str, result: EpisodeResult) -> None:
        """Mark an episode that a filter leaves out."""
        result.filtered = why_episode(self._config.filters_of(env), result)

    def gate(self, group: Group[EpisodeResult]) -> str | None:
        """Why a complete group is turned away, or None.

        Raises:
            UserError: so many in a row were that no batch will come together.
        """
        self.curriculum.observe(group.task, [episode.result.reward for episode in group.finished])
        why = turned_away(group, self._config)
        if why is not None:
            self._discards[why] += 1
            if self._discards.total() > _MAX_EMPTY_BATCHES * self._groups:
                reasons = ", ".join(f"{name}: {number}" for name, number in sorted(self._discards.items()))
                raise UserError(
                    f"{self._discards.total()} groups were turned away ({reasons}) before {self._groups} made a batch: {_HOPELESS}"
                )
        return why

    def restore(self, discards: Counter[str]) -> None:
        """Go on with what an earlier life did without since the last batch."""
        self._discards = Counter(discards)
        self._empty_batches = discards[NO_SIGNAL] // self._groups

    def empty_batch(self, step: int) -> None:
        """Nothing of a batch can be trained.

        Raises:
            UserError: too many in a row were like that.
        """
        self._discards[NO_SIGNAL] += self._groups
        logger.warning("step %d: the batch carries no learning signal; collecting another one", step)
        self._empty_batches += 1
        if self._empty_batches >= _MAX_EMPTY_BATCHES:
            raise UserError(
                f"{_MAX_EMPTY_BATCHES} batches in a row carried no learning signal (all rewards of each group were equal): {_HOPELESS}"
            )

    def take(self) -> dict[str, float]:
        """A batch is committed: metrics of what was turned away since the one before, and of the pools."""
        metrics = {"filtered/discarded_batches": float(self._discards.pop(NO_SIGNAL, 0) // self._groups)}
        metrics |= {f"turned_away/{why}": float(count) for why, count in sorted(self._discards.items())}
        self._empty_batches, self._discards = 0, Counter()
        return metrics | self.curriculum.metrics()
