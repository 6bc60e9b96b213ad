"""What may be trained: filters of episodes, the gate of complete groups, and the end of a run in which nothing passes.

A filter looks at an episode once, when it ends. An episode that it leaves out is not trained, and counted by the
filter's name, but the others of its group are still compared with it. A group in which nothing is left to train is
turned away, and another one takes its place.
"""

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
from loguru import logger

from prime_rl.envs.protocol import EpisodeResult, SampleTokens
from prime_rl.errors import UserError
from prime_rl.orchestrator.algorithms import attempts, carries_signal, own_function
from prime_rl.orchestrator.scheduler import Group
from prime_rl.transport.rollouts import as_array

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig
    from prime_rl.config.orchestrator import CustomFilter, FilterConfig, GibberishFilter, RepetitionFilter

DYNAMIC_SAMPLING, DIFFICULTY = "dynamic_sampling", "difficulty"
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, and without a pattern (2^64 divided by the golden ratio)
_MAX_EMPTY_BATCHES = 10  # in a row
_LEAST_TURNED_AWAY = 100  # in a row: ten small batches are not enough to tell bad luck from a task that teaches nothing
_HOPELESS = "the task is too easy, too hard, or its reward is broken"


class Admission:
    """Decides about every finished episode and every complete group.

    Raises:
        UserError: a function of the user's own is not there, or does not take its arguments.
    """

    def __init__(self, config: "OrchestratorConfig") -> None:
        for algorithm, key in config.in_use("algorithm"):
            if algorithm.type == "custom":
                own_function(algorithm, key)
        for filters, key in config.in_use("filters"):
            if filters.custom is not None:
                own_function(filters.custom, f"{key}.custom")
        self._config, self._groups = config, config.batch_size // config.rollouts_per_example
        self.empty_batches = 0  # in a row; reset by the loop when a batch with samples is cut
        self._turned_away: Counter[str] = Counter()  # groups in a row, by reason

    def apply_filters(self, env: str, result: EpisodeResult) -> None:
        """Mark an episode that a filter leaves out."""
        if result.ok:
            result.filtered = filter_reason(self._config.filters_of(env), result, self._config.seq_len)

    def gate(self, group: Group[EpisodeResult]) -> str | None:
        """Return why a complete group is turned away, or None.

        Raises:
            UserError: so many in a row were that no batch will come together.
        """
        why = turned_away(group, self._config)
        if why is None:
            self._turned_away.clear()
            return None
        self._turned_away[why] += 1
        count = self._turned_away.total()
        if count > max(_MAX_EMPTY_BATCHES * self._groups, _LEAST_TURNED_AWAY):
            reasons = ", ".join(f"{name}: {number}" for name, number in sorted(self._turned_away.items()))
            by_reward = self._turned_away.keys() <= {DYNAMIC_SAMPLING, DIFFICULTY}
            raise UserError(
                f"{count} groups in a row were turned away ({reasons}): "
                + (_HOPELESS if by_reward else "nearly nothing passes the filters")
            )
        return why

    def note_empty_batch(self, step: int, why: Collection[str]) -> None:
        """A batch without samples was discarded. `why`: the filters that left episodes of it out.

        Raises:
            UserError: too many in a row were like that.
        """
        reasons = ", ".join(sorted(why) or ["all rewards of each group were equal"])
        logger.warning("step {}: the batch carries no learning signal ({}); collecting another one", step, reasons)
        self.empty_batches += 1
        if self.empty_batches >= _MAX_EMPTY_BATCHES:
            count = f"{_MAX_EMPTY_BATCHES} batches in a row"
            raise UserError(f"{count} carried no learning signal ({reasons}): {_HOPELESS}")


def turned_away(group: Group[EpisodeResult], config: "OrchestratorConfig") -> str | None:
    """Return why a complete group is turned away, or None: its episodes' filters if none is left, or a filter of groups."""
    env, results = group.task.env, [episode.result for episode in group.finished]
    filters = config.filters_of(env)
    if all(result.filtered for result in results):
        return "+".join(sorted({result.filtered for result in results}))
    counted = [one for result in results for one in attempts(result).values()]
    if filters.dynamic_sampling and not carries_signal(config.algorithm_of(env), counted):
        return DYNAMIC_SAMPLING
    if filters.difficulty is not None:
        mean = sum(result.reward for result in results) / len(results)
        if not filters.difficulty.low < mean < filters.difficulty.high:
            return DIFFICULTY
    return None


def filter_reason(config: "FilterConfig", result: EpisodeResult, seq_len: int) -> str:
    """Return the name of the first filter that leaves the episode out, "" where none does.

    Args:
        seq_len: Tokens that a longer sequence is cut to.

    Raises:
        UserError: a filter of the user's own raises, or gives something else than yes or no.
    """
    longest = max((len(sequence.input_ids) for sequence in result.samples), default=0)
    if config.truncated is not None and (result.is_truncated or longest > seq_len):
        return "truncated"
    if config.overlong is not None and output_tokens(result) > config.overlong.max_tokens:
        return "overlong"
    if config.repetition is not None and any(_repeats(one, config.repetition) for one in result.samples):
        return "repetition"
    if config.gibberish is not None and _improbable(result, config.gibberish):
        return "gibberish"
    if config.custom is not None and _custom(config.custom, result):
        return "custom"
    return ""


def output_tokens(result: EpisodeResult) -> int:
    """Count the sampled tokens of an episode's samples."""
    return sum(sequence.loss_mask.count(1) for sequence in result.samples)


def _repeats(sequence: SampleTokens, rule: "RepetitionFilter") -> bool:
    """Whether more than `max_share` of the n-grams of the sampled tokens occurred before in them."""
    tokens = as_array(sequence.input_ids, np.int32)[as_array(sequence.loss_mask, np.bool_)]
    if len(tokens) < max(rule.min_tokens, rule.ngram):
        return False
    # 64-bit hashes: two different n-grams are taken for the same once in 10^9 replies of 100,000 tokens.
    names = np.zeros(len(tokens) - rule.ngram + 1, dtype=np.uint64)
    for place in range(rule.ngram):
        names = names * _FACTOR + tokens[place : place + len(names)].astype(np.uint64)
    return 1 - len(np.unique(names)) / len(names) > rule.max_share


def _improbable(result: EpisodeResult, rule: "GibberishFilter") -> bool:
    """Whether a token with a rare id and a low log-probability was sampled."""
    for sequence in result.samples:
        ids, mask = as_array(sequence.input_ids, np.int32), as_array(sequence.loss_mask, np.bool_)
        low = as_array(sequence.logprobs, np.float32) < rule.max_logprob
        if (mask & low & (ids >= rule.min_token_id)).any():
            return True
    return False


def _custom(rule: "CustomFilter", result: EpisodeResult) -> bool:
    function = own_function(rule, "filters.custom")
    try:
        count = function(result, **rule.args)
    except Exception as error:  # whatever the user's function raises
        raise UserError(f"filter {rule.path} raised {error!r} of episode {result.episode_id}") from error
    if not isinstance(count, bool | np.bool_):
        raise UserError(f"filter {rule.path} gave {count!r}: True (leave the episode out) or False is needed")
    return bool(count)
