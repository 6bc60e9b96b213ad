"""Whether a worker's result can be what was asked of it. One that cannot is `invalid`, with the reason: nothing of it is trained on.

The wire has made sure of the fields and their types (`protocol.decode`); here it is what is in them.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from prime_rl.envs.convert import LARGEST_REWARD, TEXT_LIMIT
from prime_rl.envs.protocol import EpisodeResult, Outcome, SampleTokens

_MESSAGE_LIMIT = 2000  # characters
_LARGEST = float(np.finfo(np.float32).max)


def vetted(result: EpisodeResult, *, episode_id: str, env: str, task_id: str, tokens: bool) -> EpisodeResult:
    """The result itself, or an `invalid` one that says what is wrong with it. Metrics that are no finite number are left out.

    `tokens`: the model was asked by them, so that there is something to train on.
    """
    got, asked = (result.episode_id, result.env, result.task_id), (episode_id, env, task_id)
    fault = None if got == asked else f"it is of {_named(got)}, asked was {_named(asked)}"
    fault = fault or next(_faults(result, tokens), None)
    if fault is not None and (result.ok or got != asked):
        return EpisodeResult(*asked, Outcome.INVALID, f"the worker's result is unusable: {fault}")
    if fault is not None:
        return EpisodeResult(*asked, result.outcome, result.message[:_MESSAGE_LIMIT])
    for table in (result.metrics, result.timing, *(part.metrics for part in result.parts)):
        for name in [name for name, value in table.items() if not math.isfinite(value)]:
            del table[name]
    if not result.ok:
        result.samples = []
    result.message = result.message[:_MESSAGE_LIMIT]
    result.prompt, result.completion = result.prompt[: 2 * TEXT_LIMIT], result.completion[: 2 * TEXT_LIMIT]
    return result


def _faults(result: EpisodeResult, tokens: bool) -> Iterator[str]:
    if result.ok and tokens and not result.samples:
        yield "it has no samples"
    if result.filtered:
        yield "it claims to be left out by a filter"
    for name in ("num_turns", "input_tokens", "output_tokens"):
        if not 0 <= getattr(result, name) < 1 << 62:
            yield f"{name} is {getattr(result, name)}"
    yield from _number_faults("reward", result.reward, most=LARGEST_REWARD)
    yield from _table_faults("rewards", result.rewards, most=LARGEST_REWARD)
    for part in result.parts:
        yield from _number_faults("a part's reward", part.reward, most=LARGEST_REWARD)
        yield from _table_faults("a part's rewards", part.rewards, most=LARGEST_REWARD)
        yield from _table_faults("a part's metrics", part.metrics, finite=False)
    for name, table in (("metrics", result.metrics), ("timing", result.timing)):
        yield from _table_faults(name, table, finite=False)
    for sample in result.samples if result.ok else ():
        yield from _sample_faults(sample)


def _named(ids: tuple[str, str, str]) -> str:
    episode, env, task = ids
    return f"episode {episode[:100]!r} of {env[:100]!r}, task {task[:100]!r}"


def _number_faults(name: str, value: Any, finite: bool = True, most: float = _LARGEST) -> Iterator[str]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        yield f"{name} is a {type(value).__name__}"
    elif finite and not math.isfinite(value):
        yield f"{name} is {value}"
    elif math.isfinite(value) and abs(value) > most:
        yield f"{name} is beyond 32 bits" if abs(value) > _LARGEST else f"{name} is {value}: beyond {most:g}"


def _table_faults(name: str, values: Mapping[Any, Any], finite: bool = True, most: float = _LARGEST) -> Iterator[str]:
    for key, value in values.items():
        if not isinstance(key, str):
            yield f"{name} has a name that is a {type(key).__name__}"
        yield from _number_faults(f"{name}[{str(key)[:100]!r}]", value, finite, most)


def _sample_faults(sample: SampleTokens) -> Iterator[str]:
    yield from _number_faults("a sample's reward", sample.reward)
    ids, mask = np.frombuffer(sample.input_ids, np.int32), np.frombuffer(sample.loss_mask, np.bool_)
    logprobs = np.frombuffer(sample.logprobs, np.float32)
    if not 0 <= sample.prompt_len <= len(ids):
        yield f"a sample of {len(ids)} tokens has a prompt of {sample.prompt_len}"
    if len(ids) and ids.min() < 0:
        yield f"a sample holds token {ids.min()}"
    if not np.isfinite(logprobs).all() or (logprobs > 0.0).any():
        yield "a sampled token has a log-probability that is none"
    if logprobs[~mask].any():
        yield "a token that was not sampled has a log-probability"
    if sample.hint is not None and min(sample.hint, default=0) < 0:
        yield "a sample's hint holds a token below 0"
    if sample.ref_logprobs is not None and not np.isfinite(np.frombuffer(sample.ref_logprobs, np.float32)).all():
        yield "a sample has a teacher's log-probability that is none"
