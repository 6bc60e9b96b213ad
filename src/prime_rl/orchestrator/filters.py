"""What is left out of training: rules about the tokens of one episode, and about the rewards of a group. Pure functions.

Rules about an episode are asked once, when it ends. The episode keeps its place in its group, and what its reward is compared with is the same
as without a filter; it is not trained, and counted by the filter's name. A group in which nothing is left to train is
turned away, and another one takes its place.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from prime_rl.envs.protocol import EpisodeResult, SampleTokens
from prime_rl.errors import UserError
from prime_rl.importing import load_function
from prime_rl.orchestrator.algorithms import Attempt, carries_signal
from prime_rl.transport.rollouts import as_array

if TYPE_CHECKING:
    from prime_rl.config.orchestrator import (
        AlgorithmConfig,
        CustomFilter,
        FilterConfig,
        GibberishFilter,
        RepetitionFilter,
    )

_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, and without a pattern (2^64 divided by the golden ratio)
DYNAMIC_SAMPLING, DIFFICULTY, OFF_POLICY = "dynamic_sampling", "difficulty", "off_policy"


def why_episode(config: "FilterConfig", result: EpisodeResult, seq_len: int) -> str:
    """The name of the first filter that leaves the episode out, "" where none does.

    Args:
        seq_len: Tokens that a longer sequence is cut to.

    Raises:
        UserError: a filter of the user's own raises, or gives something else than yes or no.
    """
    if config.truncated is not None and (result.is_truncated or _longest(result) > seq_len):
        return "truncated"
    if config.overlong is not None and _sampled(result) > config.overlong.max_tokens:
        return "overlong"
    if config.repetition is not None and any(_repeats(one, config.repetition) for one in result.samples):
        return "repetition"
    if config.gibberish is not None and _improbable(result, config.gibberish) > config.gibberish.max_tokens:
        return "gibberish"
    if config.custom is not None and _custom(config.custom, result):
        return "custom"
    return ""


def why_group(
    config: "FilterConfig",
    algorithm: "AlgorithmConfig",
    rewards: Sequence[float],
    left_out: Sequence[str],
    attempts: Sequence[Attempt],
) -> str | None:
    """Why a complete group is turned away, or None: the filters of its episodes, if nothing is left, or one of its own.

    Args:
        rewards: Of its finished episodes.
        left_out: Which filter leaves each of them out, "" where none does.
        attempts: What the algorithm sees of all of them.
    """
    if all(left_out):
        return "+".join(sorted(set(left_out)))
    if config.dynamic_sampling and not carries_signal(algorithm, attempts):
        return DYNAMIC_SAMPLING
    if config.difficulty is not None:
        mean = sum(rewards) / len(rewards)
        if not config.difficulty.low < mean < config.difficulty.high:
            return DIFFICULTY
    return None


def check_filters(config: "FilterConfig", key: str) -> None:
    """Raise UserError where a function of the user's own is not there, or does not take its arguments. `key`: the setting, for messages."""
    if config.custom is not None:
        load_function(config.custom.path, config.custom.args, given=1, key=f"{key}.custom.path")


def _longest(result: EpisodeResult) -> int:
    return max((len(sequence.input_ids) for sequence in result.samples), default=0)


def _sampled(result: EpisodeResult) -> int:
    return sum(sequence.loss_mask.count(1) for sequence in result.samples)


def _repeats(sequence: SampleTokens, rule: "RepetitionFilter") -> bool:
    """Whether more than `max_share` of the n-grams of the sampled tokens occurred before in them."""
    tokens = as_array(sequence.input_ids, np.int32)[as_array(sequence.loss_mask, np.bool_)]
    if len(tokens) < max(rule.min_tokens, rule.ngram):
        return False
    # Of 64 bits, so that two different ones are taken for the same once in 10^9 replies of 100,000 tokens. Numbers are sorted faster than rows of them.
    names = np.zeros(len(tokens) - rule.ngram + 1, dtype=np.uint64)
    for place in range(rule.ngram):
        names = names * _FACTOR + tokens[place : place + len(names)].astype(np.uint64)
    return 1 - len(np.unique(names)) / len(names) > rule.max_share


def _improbable(result: EpisodeResult, rule: "GibberishFilter") -> int:
    """Sampled tokens with a rare id and a low log-probability."""
    count = 0
    for sequence in result.samples:
        ids, mask = as_array(sequence.input_ids, np.int32), as_array(sequence.loss_mask, np.bool_)
        low = as_array(sequence.logprobs, np.float32) < rule.max_logprob
        count += int((mask & low & (ids >= rule.min_token_id)).sum())
    return count


def _custom(rule: "CustomFilter", result: EpisodeResult) -> bool:
    function = _loaded(rule.path, tuple(sorted(rule.args)))
    try:
        count = function(result, **rule.args)
    except Exception as error:  # whatever the user's function raises
        raise UserError(f"filter {rule.path} raised {error!r} of episode {result.episode_id}") from error
    if not isinstance(count, bool | np.bool_):
        raise UserError(f"filter {rule.path} gave {count!r}: True (leave the episode out) or False is needed")
    return bool(count)


@cache
def _loaded(path: str, names: tuple[str, ...]) -> Callable[..., Any]:
    return load_function(path, dict.fromkeys(names), given=1, key="filters.custom.path")
