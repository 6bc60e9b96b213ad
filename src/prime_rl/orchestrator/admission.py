"""What may be trained: filters as episodes end, the gate as groups are complete, and an end where nothing is let through any more."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from loguru import logger

from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.errors import UserError
from prime_rl.orchestrator.algorithms import check_algorithm, unfit
from prime_rl.orchestrator.filters import DIFFICULTY, DYNAMIC_SAMPLING, check_filters, why_episode
from prime_rl.orchestrator.metrics import group_rewards
from prime_rl.orchestrator.samples import attempts, in_order, turned_away
from prime_rl.orchestrator.scheduler import NO_SIGNAL, Batch, Group
from prime_rl.orchestrator.tasks import Curriculum

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig

_MAX_EMPTY_BATCHES = 10
_LEAST_TURNED_AWAY = (
    100  # in a row: of small batches ten are not enough to tell bad luck from a task that teaches nothing
)
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
        self._empty_batches = self._in_a_row = 0
        self._made: dict[int, list[float]] = {}  # rewards of the groups that left since the last batch, by number
        self._discards: Counter[str] = Counter()  # groups since the last batch, by what was wrong with them
        self.curriculum = Curriculum({}, {}, 0)

    def look(self, env: str, result: EpisodeResult) -> None:
        """Mark an episode that a filter leaves out. One that the algorithm can do nothing with is no result any more."""
        if not result.ok:
            return
        algorithm = self._config.algorithm_of(env)
        if why := next(filter(None, (unfit(algorithm, one) for one in attempts(result).values())), ""):
            result.outcome, result.message, result.samples = Outcome.INVALID, why, []
            return
        result.filtered = why_episode(self._config.filters_of(env), result, self._config.seq_len)

    def gate(self, group: Group[EpisodeResult], step: int) -> str | None:
        """Why a complete group is turned away from the batch of `step`, or None.

        Raises:
            UserError: so many in a row were that no batch will come together.
        """
        why = turned_away(group, step, self._config)
        if why is None:
            self._in_a_row = 0
            return None
        self._discards[why] += 1
        self._in_a_row += 1
        self._leave(group)
        if self._in_a_row > max(_MAX_EMPTY_BATCHES * self._groups, _LEAST_TURNED_AWAY):
            reasons = ", ".join(f"{name}: {number}" for name, number in sorted(self._discards.items()))
            by_reward = self._discards.keys() <= {DYNAMIC_SAMPLING, DIFFICULTY, NO_SIGNAL}
            raise UserError(
                f"{self._in_a_row} groups in a row were turned away (since the last batch: {reasons}): "
                + (_HOPELESS if by_reward else "nearly nothing passes the filters")
            )
        return why

    def restore(self, discards: Counter[str], left: Mapping[int, list[float]]) -> None:
        """Go on with what an earlier incarnation did without since the last batch: why groups left, and their rewards by number."""
        self._discards, self._made = Counter(discards), dict(left)
        self._empty_batches = discards[NO_SIGNAL] // self._groups

    def empty_batch(self, batch: Batch[EpisodeResult], why: Collection[str]) -> None:
        """Nothing of `batch` can be trained. `why`: the filters that left episodes of it out.

        Raises:
            UserError: too many in a row were like that.
        """
        for group in batch.groups:
            self._leave(group)
        self._discards[NO_SIGNAL] += self._groups
        equal = "all rewards of each group were equal"
        reasons = f"{', '.join(sorted(why))} left episodes out, of the others {equal}" if why else equal
        logger.warning(
            "step {}: the batch carries no learning signal ({}); collecting another one", batch.step, reasons
        )
        self._empty_batches += 1
        if self._empty_batches >= _MAX_EMPTY_BATCHES:
            raise UserError(
                f"{_MAX_EMPTY_BATCHES} batches in a row carried no learning signal ({reasons}): {_HOPELESS}"
            )

    def take(self, batch: Batch[EpisodeResult]) -> dict[str, float]:
        """`batch` is cut: the pools change by it and by what left since the one before; metrics of all these, and of what was turned away."""
        for group in batch.groups:
            self._leave(group)
        self.curriculum.cut()
        metrics = {"filtered/discarded_batches": float(self._discards.pop(NO_SIGNAL, 0) // self._groups)}
        metrics |= {f"turned_away/{why}": float(count) for why, count in sorted(self._discards.items())}
        made = [rewards for _, rewards in sorted(self._made.items())]
        self._empty_batches, self._discards, self._made = 0, Counter(), {}
        return metrics | group_rewards(made, "made/") | self.curriculum.metrics()

    def _leave(self, group: Group[EpisodeResult]) -> None:
        rewards = [episode.result.reward for episode in in_order(group)]
        self._made[group.number] = rewards
        self.curriculum.leave(group.number, group.task, rewards)
