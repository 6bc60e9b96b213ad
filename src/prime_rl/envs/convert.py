"""A verifiers episode → our `EpisodeResult`. Every rule about what may be trained on is here, and nowhere else.

Reads attributes of `verifiers.v1` objects without importing verifiers, so the rules can be tested alone.
"""

import math
import re
from typing import Any

from prime_rl.envs.messages import text_of
from prime_rl.envs.protocol import ROLES, EpisodeResult, Outcome, Part, SampleTokens

LARGEST_REWARD = 1e37  # advantages are a few times as large at most, and sent with 32 bits, which end at 3.4e38
CONTEXT_FULL = "context_full"  # the stop condition of a conversation that ended for want of room
TOO_LONG = re.compile(
    r"maximum (context|model) length|longer than the maximum|max_model_len|context_length_exceeded|prompt is too long",
    re.IGNORECASE,
)


class Misaligned(Exception):
    """Tokens, mask, logprobs or the engine's own counts contradict each other: the sample must not be trained on."""


def convert(
    episode: Any, *, episode_id: str, env: str, task_id: str, tokens: bool = True, branched: bool = False
) -> EpisodeResult:
    """The result of a finished `Episode`; any doubt about tokens or reward makes it untrainable, with the reason.

    Without `tokens`, of an API that gives none, there is nothing to train on in any case. `branched`: every reply is a sample of its own.
    """
    result = EpisodeResult(episode_id, env, task_id, Outcome.OK)
    traces = list(episode.traces)
    players = [trace for trace in traces if trace.agent is None or trace.agent.trainable]
    if players:
        _describe(result, players)
    result.outcome, result.message = _find_outcome(episode, traces, players)
    if result.outcome is Outcome.PROMPT_TOO_LONG:
        result.message = f"task {task_id}: {result.message}"
    if result.ok and tokens:
        try:
            result.samples = [
                sample for number, trace in enumerate(players) for sample in samples_of(trace, number, branched)
            ]
        except Misaligned as error:
            result.outcome, result.message = Outcome.INVALID, str(error)
        else:
            if not result.samples:
                result.outcome, result.message = Outcome.INVALID, "no sampled tokens"
    if not result.ok:
        result.samples = []
    return result


def samples_of(trace: Any, part: int = 0, branched: bool = False) -> list[SampleTokens]:
    """One sample per branch of the conversation tree, or per reply where it is `branched`.

    A turn shared by two samples is trained on once, and so is what the environment said. Raises Misaligned.
    """
    agent = "" if trace.agent is None else trace.agent.name
    calls = {call.node: call for call in trace.calls if call.node is not None and call.error is None}
    numbers = {id(node): number for number, node in enumerate(trace.nodes)}
    said: dict[tuple[Any, ...], int] = {}  # by what it said, the place of the first reply
    for number, node in enumerate(trace.nodes):
        if node.sampled:
            said.setdefault(_words(node.message), number)
    used: set[int] = set()
    samples = []
    for branch in trace.branches:
        if not branch.trainable:
            continue
        for nodes in _cuts(branch.nodes) if branched else [branch.nodes]:
            repeats = _repeated_replies(nodes, numbers, said)
            repeated = {id(node) for node in nodes[: repeats[-1] + 1] if not any(node.mask)} if repeats else set()
            sample = _sample(nodes, numbers, calls, used | repeated, repeats[0] if repeats else len(nodes))
            sample.reward, sample.agent, sample.part = float(trace.reward), agent, part
            if any(sample.loss_mask):
                samples.append(sample)
                used |= {id(node) for node in nodes}
    return samples


def _cuts(nodes: list[Any]) -> list[list[Any]]:
    """The conversation up to each of its replies."""
    return [nodes[: end + 1] for end, node in enumerate(nodes) if any(node.mask)]


def _repeated_replies(nodes: list[Any], numbers: dict[int, int], said: dict[tuple[Any, ...], int]) -> list[int]:
    """Places of earlier replies that were rendered anew: up to the last of them a conversation repeats another one.

    Its tokens may be others than the first time, or its oldest turns left out; what it says is in another sample all the same.
    """
    positions = []
    for place, node in enumerate(nodes):
        first = said.get(_words(node.message))
        if first is not None and not any(node.mask) and first < numbers.get(id(node), -1):
            positions.append(place)
    return positions


def _words(message: Any) -> tuple[Any, ...]:
    """What an assistant said, to know it again. Calls by name and id: their arguments are written anew."""
    calls = getattr(message, "tool_calls", None) or []
    return message.role, str(message.content or ""), tuple((call.id, call.name) for call in calls)


def _sample(
    nodes: list[Any], numbers: dict[int, int], calls: dict[int, Any], used: set[int], replied: int
) -> SampleTokens:
    """`used`: nodes that another sample has; `replied`: the place of the first reply that was rendered anew."""
    input_ids: list[int] = []
    loss_mask: list[bool] = []
    logprobs: list[float] = []
    roles: list[int] = []
    prompt_len: int | None = None
    for place, node in enumerate(nodes):
        ids, mask, node_logprobs = list(node.token_ids), list(node.mask), list(node.logprobs)
        count = sum(mask)
        _check_node(ids, mask, node_logprobs, count)
        if count:
            call = calls.get(numbers.get(id(node), -1))
            if call is not None and call.usage is not None:
                _check_engine(call.usage, len(input_ids) + len(ids) - count, count)
        fresh = id(node) not in used
        # `_check_node` made sure that sampled tokens are the node's tail.
        scaffold = len(ids) - count
        if prompt_len is None and (count or place == replied):
            prompt_len = len(input_ids) + (scaffold if count else 0)
        input_ids += ids
        loss_mask += [False] * scaffold + [fresh] * count
        logprobs += [0.0] * scaffold + (node_logprobs if fresh else [0.0] * count)
        roles += [ROLES.index(node.message.role) if fresh and node.message.role in ROLES else 0] * len(ids)
    first = len(input_ids) if prompt_len is None else prompt_len
    return SampleTokens.of(input_ids, loss_mask, logprobs, first, reward=0.0, roles=roles)


def _check_node(ids: list[int], mask: list[bool], logprobs: list[float], count: int) -> None:
    if len(mask) != len(ids):
        raise Misaligned(f"{len(ids)} tokens but {len(mask)} mask entries")
    if len(logprobs) != count:
        raise Misaligned(f"{count} sampled tokens but {len(logprobs)} logprobs")
    if count and not all(mask[-count:]):
        raise Misaligned("sampled tokens are not the end of their message")
    if not all(math.isfinite(logprob) for logprob in logprobs):
        raise Misaligned("a sampled token has no finite logprob")


def _check_engine(usage: Any, prompt: int, completion: int) -> None:
    """The engine's exchange had these lengths; the graph that we train on must concatenate to the same."""
    if usage.prompt_tokens != prompt or usage.completion_tokens != completion:
        raise Misaligned(
            f"the engine got {usage.prompt_tokens} and sampled {usage.completion_tokens} tokens, "
            f"the conversation has {prompt} and {completion}"
        )


def _find_outcome(episode: Any, traces: list[Any], players: list[Any]) -> tuple[Outcome, str]:
    # Order matters: an error explains a missing reward, not the other way round.
    errors = [classify(error, _last_call_error(None)) for error in episode.errors]
    errors += [classify(error, _last_call_error(trace)) for trace in traces for error in trace.errors]
    if errors:
        engine = [error for error in errors if error[0] is not Outcome.ERRORED]
        return (engine or errors)[0]
    if episode.is_timeout or any(trace.is_timeout for trace in traces):
        # verifiers calls these ok, and a reward that was never computed then reads 0.0.
        stage = next((trace.stop_condition for trace in traces if trace.is_timeout), "episode")
        return Outcome.TIMEOUT, f"time limit of the environment: {stage}"
    if not episode.ok or not all(trace.ok for trace in traces):
        return Outcome.ERRORED, "the environment reported a failure without an error"
    if not players:
        return Outcome.INVALID, "no trainable agent"
    for trace in players:
        if missing := [name for name, reward in trace.rewards.items() if reward is None]:
            return Outcome.ERRORED, f"reward {missing[0]!r} was not computed"
        if trace.num_turns == 0:
            return Outcome.INVALID, f"stopped before the first turn ({trace.stop_condition})"
        if not abs(trace.reward) <= LARGEST_REWARD:  # nor one that is no number
            return Outcome.INVALID, f"reward is {trace.reward}"
    return Outcome.OK, ""


def classify(error: Any, call_error: Any = None) -> tuple[Outcome, str]:
    """Who is to blame for a recorded error: the engine (and is it worth another try), the prompt, or the environment.

    A harness only sees that its model call failed: then the error recorded with the call is the cause.
    """
    if error.type == "HarnessError" and call_error is not None:
        error = call_error
    message = _one_line(error.message) or error.type
    if error.type == "ProviderError":
        status = error.status_code or 502
        if status == 400 and TOO_LONG.search(error.message):
            return Outcome.PROMPT_TOO_LONG, message
        if status in (401, 402, 403):
            return Outcome.ENGINE_DENIED, f"{message} (status {status})"
        if status >= 500 or status in (408, 425, 429):
            return Outcome.ENGINE_UNAVAILABLE, f"{message} (status {status})"
        return Outcome.ENGINE_REFUSED, f"{message} (status {status})"
    if error.type == "MalformedGenerateResponseError":
        return Outcome.ENGINE_REFUSED, message
    if error.type in ("TimeoutError", "TurnTimeoutError"):
        return Outcome.TIMEOUT, message
    return Outcome.ERRORED, message


def _last_call_error(trace: Any) -> Any:
    return trace.calls[-1].error if trace is not None and trace.calls else None


def _describe(result: EpisodeResult, traces: list[Any]) -> None:
    parts = [_part(trace) for trace in traces]
    result.reward = sum(part.reward for part in parts) / len(parts)
    result.rewards = _means([part.rewards for part in parts])
    result.metrics = _means([part.metrics for part in parts])
    result.parts = parts if len(parts) > 1 else []
    result.is_truncated = any(_truncated(trace) for trace in traces)
    result.num_turns = sum(trace.num_turns for trace in traces)
    usages = [call.usage for trace in traces for call in trace.calls if call.usage is not None]
    result.input_tokens = sum(usage.prompt_tokens + (usage.cached_input_tokens or 0) for usage in usages)
    result.output_tokens = sum(usage.completion_tokens for usage in usages)
    result.timing = {
        stage: sum(float(span.duration) for span in spans)
        for stage, spans in {
            "setup": [trace.timing.setup for trace in traces],
            "agent": [trace.timing.agent for trace in traces],
            "scoring": [trace.timing.scoring for trace in traces],
        }.items()
    }
    nodes = traces[0].branches[-1].nodes if traces[0].branches else []
    first = next((i for i, node in enumerate(nodes) if node.sampled), len(nodes))
    result.prompt, result.completion = _text(nodes[:first]), _text(nodes[first:])


def _part(trace: Any) -> Part:
    return Part(
        agent="" if trace.agent is None else trace.agent.name,
        reward=float(trace.reward),
        rewards={name: float(r.value) for name, r in trace.rewards.items() if r is not None},
        metrics={name: float(value) for name, value in trace.metrics.items() if value is not None},
        num_turns=trace.num_turns,
        is_truncated=_truncated(trace),
    )


def _truncated(trace: Any) -> bool:
    return trace.is_truncated or trace.stop_condition == CONTEXT_FULL


def _means(tables: list[dict[str, float]]) -> dict[str, float]:
    """Of each name, over the tables that have it."""
    names = dict.fromkeys(name for table in tables for name in table)
    values_by_name = {name: [table[name] for table in tables if name in table] for name in names}
    return {name: sum(values) / len(values) for name, values in values_by_name.items()}


def _text(nodes: list[Any]) -> str:
    """See `text_of`."""
    messages = [node.message for node in nodes]
    calls = [getattr(message, "tool_calls", None) or [] for message in messages]
    return text_of(
        [
            {
                "role": message.role,
                "content": message.content,
                "tool_calls": [{"name": call.name, "arguments": call.arguments} for call in made],
            }
            for message, made in zip(messages, calls, strict=True)
        ]
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())[:1000]
