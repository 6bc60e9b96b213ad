"""Algorithms: from episodes to advantages, one file each. The trainer executes per-token streams and knows no algorithm.

An algorithm of your own needs none of this: `algorithm = { type = "custom", path = "mine.py:advantages" }` names a function that gets the
attempts of a group (`attempt.Attempt`) and gives an advantage for each.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from prime_rl.config.orchestrator import ByReward
from prime_rl.errors import UserError
from prime_rl.importing import load_function
from prime_rl.orchestrator.algorithms.estimators import (
    Attempt,
    gdpo,
    grpo,
    lacks,
    max_rl,
    opo,
    penalized,
    rae,
    reinforce_pp,
    rloo,
)

if TYPE_CHECKING:
    from prime_rl.config.orchestrator import AlgorithmConfig, CustomAlgorithm, RewardAlgorithm

__all__ = ["Attempt", "advantages", "carries_signal", "check_algorithm", "unfit"]

_OF_A_GROUP: dict[str, Callable[..., list[float]]] = {
    "grpo": grpo,
    "echo": grpo,
    "rloo": rloo,
    "opo": opo,
    "max_rl": max_rl,
}
_LARGEST = 3e38  # they are sent with 32 bits
_OF_A_BATCH: dict[str, Callable[..., list[list[float]]]] = {"reinforce_pp": reinforce_pp, "gdpo": gdpo}


def advantages(
    config: "AlgorithmConfig", groups: Sequence[Sequence[Attempt]], state: Mapping[str, Any]
) -> tuple[list[list[float]], dict[str, Any]]:
    """One advantage for each attempt of a batch's groups, all of one environment.

    A group whose episodes have several agents is a group for each of them.

    Args:
        state: What the algorithm remembers of earlier batches, empty in a fresh run.

    Returns:
        The advantages, and the state after this batch.

    Raises:
        UserError: an algorithm of the user's own gives something else than a finite number for each.
    """
    if not isinstance(config, ByReward):
        return [[0.0] * len(group) for group in groups], dict(state)
    by_agent = [_by_agent(group, config) for group in groups]
    parts = [[attempt for _, attempt in part] for group in by_agent for part in group]
    after = dict(state)
    if config.type == "rae":
        advantages_of_parts, after = rae(parts, config, state)
    elif config.type in _OF_A_BATCH:
        advantages_of_parts = _OF_A_BATCH[config.type](parts, config)
    else:
        advantages_of_parts = [_group(config, part) for part in parts]
    values = iter(advantages_of_parts)
    result = [[0.0] * len(group) for group in groups]
    for row, group in zip(result, by_agent, strict=True):
        for part in group:
            for (place, _), value in zip(part, next(values), strict=True):
                row[place] = value
    return result, after


def carries_signal(config: "AlgorithmConfig", group: Sequence[Attempt]) -> bool:
    """Whether a complete group, whatever else the batch will hold, may have an advantage other than zero."""
    if not isinstance(config, ByReward) or not (config.group_relative or config.type == "custom"):
        return bool(group)
    parts = [[attempt for _, attempt in part] for part in _by_agent(group, config)]
    if config.type in _OF_A_BATCH:  # normalizing over a batch leaves zeros zero
        values = _OF_A_BATCH[config.type](parts, config)
    else:
        values = [_group(config, part) for part in parts]
    return any(value != 0 for part in values for value in part)


def unfit(config: "AlgorithmConfig", attempt: Attempt) -> str:
    """Why the algorithm can do nothing with an attempt, "" where it can."""
    return lacks(attempt, config) if config.type == "gdpo" else ""


def check_algorithm(config: "AlgorithmConfig", key: str) -> None:
    """Raise UserError where a function of the user's own is not there, or does not take its arguments. `key`: the setting, for messages."""
    if config.type == "custom":
        load_function(config.path, config.args, given=1, key=f"{key}.path")


def _group(config: "RewardAlgorithm", group: Sequence[Attempt]) -> list[float]:
    function = _custom(config) if config.type == "custom" else partial(_OF_A_GROUP[config.type], config=config)
    return function(group)


def _custom(config: "CustomAlgorithm") -> Callable[[Sequence[Attempt]], list[float]]:
    function = _loaded(config.path, tuple(sorted(config.args)))

    def checked(group: Sequence[Attempt]) -> list[float]:
        try:
            values = [float(value) for value in function(list(group), **config.args)]
        except Exception as error:  # whatever the user's function raises
            raise UserError(f"algorithm {config.path} raised {error!r} of {len(group)} attempts") from error
        if len(values) != len(group) or not all(abs(value) <= _LARGEST for value in values):
            raise UserError(
                f"algorithm {config.path} gave {values} for {len(group)} attempts: one finite number for each is needed"
            )
        return values

    return checked


@cache
def _loaded(path: str, names: tuple[str, ...]) -> Callable[..., Any]:
    return load_function(path, dict.fromkeys(names), given=1, key="algorithm.path")


def _by_agent(group: Sequence[Attempt], config: "RewardAlgorithm") -> list[list[tuple[int, Attempt]]]:
    """(place in the group, attempt) of each agent, in the order in which agents come, with what penalties leave of their rewards."""
    by_agent: dict[str, list[int]] = {}
    for place, attempt in enumerate(group):
        by_agent.setdefault(attempt.agent, []).append(place)
    return [
        list(zip(its, penalized([group[place] for place in its], config.length_penalty), strict=True))
        for its in by_agent.values()
    ]
