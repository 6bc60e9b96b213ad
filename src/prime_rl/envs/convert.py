"""Turns of a conversation → samples, and a finished episode → our `EpisodeResult`: every rule about what is trained on.

Imports neither verifiers nor renderers: it reads attributes of their objects, so that the rules can be tested alone.
"""

import json
import math
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from prime_rl.envs.protocol import ROLES, EpisodeResult, Outcome, Part, RoutedExperts, SampleTokens

Message = dict[str, Any]  # as the chat route has them: `role`, `content`, `tool_calls`
LARGEST_REWARD = 1e37  # advantages are a few times as large at most, and sent with 32 bits, which end at 3.4e38
CONTEXT_FULL = "context_full"  # the stop condition of a conversation that ended for want of room
TEXT_LIMIT = 8000  # characters of prompt and completion kept for people to read
MOST_LEVELS = 100  # of what a model nests
ASSISTANT = ROLES.index("assistant")
REPLY = bytes([ASSISTANT])
_TOO_LONG = re.compile(
    r"maximum (context|model) length|longer than the maximum|max_model_len|context_length_exceeded|prompt is too long",
    re.IGNORECASE,
)


class Misaligned(Exception):
    """Tokens, mask, logprobs or the engine's own counts contradict each other: the sample must not be trained on."""


@dataclass
class Turn:
    """One exchange with the model: P tokens were sent, C sampled."""

    prompt_ids: list[int] = field(default_factory=list)  # (P,)
    completion_ids: list[int] = field(default_factory=list)  # (C,)
    logprobs: list[float] = field(default_factory=list)  # (C,)
    roles: bytes = b""  # (P,) of the message that each token belongs or leads to: indices of `ROLES`
    history: list[str] = field(default_factory=list)  # the messages sent and the reply, comparable
    message: Message = field(default_factory=dict)  # the reply as the next prompt has it
    tool_calls: list[Any] = field(default_factory=list)  # malformed attempts too, as their `status` says
    is_truncated: bool = False
    # Up to the last token but one. Where the prompt extends an earlier turn, they begin at that one's last token.
    experts: RoutedExperts | None = None
    extended: "Turn | None" = None

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.completion_ids

    def experts_from(self, first: int) -> bytes:
        """The experts of the tokens from `first` to the last but one. Raises Misaligned: it does not have them all."""
        experts, size = self.experts, len(self.prompt_ids) + len(self.completion_ids)
        if experts is None or experts.end != size - 1:
            computed = "none" if experts is None else f"those of {experts.end} tokens"
            raise Misaligned(f"a turn of {size} tokens has {computed} of the experts that the engine chose")
        if experts.start <= first:
            return experts.rows[(first - experts.start) * experts.row_bytes :]
        if self.extended is None:
            raise Misaligned(f"the experts that the engine chose begin at token {experts.start}, not {first}")
        earlier = self.extended.experts_from(first)
        return earlier[: (experts.start - first) * experts.row_bytes] + experts.rows


def samples_of(turns: Sequence[Turn], branched: bool = False) -> list[SampleTokens]:
    """One sample per sequence of turns that extend each other, ordered by their first turns; `branched`: one per turn.

    Every sampled token is trained on once, and so is what the environment said: where conversations fork, in the first
    sample. Rewards are 0. A token keeps the experts that the engine chose when it first computed it. Raises Misaligned.
    """
    samples: list[SampleTokens] = []
    chosen: list[bytearray] = []  # of each sample the rows of its experts
    owners: list[int] = []  # of each turn its sample
    last_turns: list[int] = []  # of each sample
    for number, turn in enumerate(turns):
        if len(turn.logprobs) != len(turn.completion_ids):
            raise Misaligned(f"{len(turn.completion_ids)} sampled tokens but {len(turn.logprobs)} logprobs")
        if not all(-math.inf < logprob <= 0.0 for logprob in turn.logprobs):
            raise Misaligned("a sampled token has a log-probability that is none")
        parent, begin = (None, 0) if branched else _parent(turns[:number], turn)
        repeated = begin  # tokens that other samples have as well
        if parent is not None and last_turns[owners[parent]] == parent:
            owner = owners[parent]
            last_turns[owner] = number
        else:
            if parent is None and number:  # rendered anew: what is new comes last, after a reply
                repeated = turn.roles.rstrip(REPLY).rfind(REPLY) + 1
            prompt_len = (repeated or len(turn.prompt_ids)) if parent is None else samples[owners[parent]].prompt_len
            prefix = array("i", turn.prompt_ids[:begin]), bytes(begin), array("f", bytes(4 * begin))
            owner = len(samples)
            samples.append(SampleTokens(*prefix, prompt_len, reward=0.0, roles=bytes(begin)))
            last_turns.append(number)
            chosen.append(bytearray())
            if parent is not None and turn.experts is not None:
                chosen[owner] += chosen[owners[parent]][: (begin - 1) * turn.experts.row_bytes]
        if turn.experts is not None:
            first = max(begin - 1, 0)  # of the last token of the parent nothing was computed before
            if len(chosen[owner]) != first * turn.experts.row_bytes:
                raise Misaligned("only some turns have the experts that the engine chose")
            chosen[owner] += turn.experts_from(first)
            samples[owner].experts = replace(turn.experts, rows=b"", start=0)
        owners.append(owner)
        sample, context, sampled = samples[owner], len(turn.prompt_ids) - begin, len(turn.completion_ids)
        sample.input_ids += array("i", turn.prompt_ids[begin:] + turn.completion_ids)
        sample.loss_mask += bytes(context) + b"\1" * sampled
        sample.logprobs += array("f", bytes(4 * context)) + array("f", turn.logprobs)
        sample.roles = (sample.roles or b"") + bytes(repeated - begin) + turn.roles[repeated:] + REPLY * sampled
    for sample, rows in zip(samples, chosen, strict=True):
        if sample.experts is not None:
            sample.experts.rows = bytes(rows)
            if sample.experts.end != len(sample.input_ids) - 1:
                raise Misaligned("only some turns have the experts that the engine chose")
    return [sample for sample in samples if any(sample.loss_mask)]


def _parent(earlier: Sequence[Turn], turn: Turn) -> tuple[int | None, int]:
    """The longest earlier turn whose tokens this one's prompt begins with, and how many they are."""
    parent, longest = None, 0
    for number in reversed(range(len(earlier))):  # mostly the last one
        size = len(earlier[number].prompt_ids) + len(earlier[number].completion_ids)
        if longest < size <= len(turn.prompt_ids) and turn.prompt_ids[:size] == earlier[number].ids:
            parent, longest = number, size
    return parent, longest


def finish(result: EpisodeResult, samples: Callable[[], list[SampleTokens]] | None) -> EpisodeResult:
    """The result with its samples (None: of an API), if it went well; a doubt makes it untrainable, with the reason.
    Metrics that are no finite number are left out: an average of nothing costs no episode."""
    if result.outcome is Outcome.PROMPT_TOO_LONG:
        result.message = f"task {result.task_id}: {result.message}"
    every: list[EpisodeResult | Part] = [result, *result.parts]
    for scored in every:
        scored.metrics = {name: value for name, value in scored.metrics.items() if math.isfinite(value)}
        if result.ok and not abs(scored.reward) <= LARGEST_REWARD:  # nor one that is no number
            result.outcome, result.message = Outcome.INVALID, f"reward is {scored.reward}"
    if result.ok and samples is not None:
        try:
            result.samples = samples()
        except Misaligned as error:
            result.outcome, result.message = Outcome.INVALID, str(error)
        else:
            if not result.samples:
                result.outcome, result.message = Outcome.INVALID, "no sampled tokens"
    return result


def classify(kind: str, text: str, status: int | None = None) -> tuple[Outcome, str]:
    """Whose fault an error is, by the name of its class: the engine's, the prompt's, or the environment's."""
    message = " ".join(text.split())[:1000] or kind
    if kind == "ProviderError":
        status = status or 502
        if status == 400 and _TOO_LONG.search(text):
            return Outcome.PROMPT_TOO_LONG, message
        message = f"{message} (status {status})"
        if status in (401, 402, 403):
            return Outcome.ENGINE_DENIED, message
        if status >= 500 or status in (408, 425, 429):
            return Outcome.ENGINE_UNAVAILABLE, message
        return Outcome.ENGINE_REFUSED, message
    return Outcome.TIMEOUT if kind == "TimeoutError" else Outcome.ERRORED, message


def convert(result: EpisodeResult, episode: Any, tokens: bool = True, branched: bool = False) -> EpisodeResult:
    """Copy what a finished `Episode` of verifiers says into its result; without `tokens` (an API), without samples."""
    players = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
    if players:
        _describe(result, players)
    result.outcome, result.message = _find_outcome(episode, players)

    def samples() -> list[SampleTokens]:
        made = []
        for number, trace in enumerate(players):
            for sample in samples_of(turns_of(trace), branched):
                sample.reward, sample.agent, sample.part = float(trace.reward), _name(trace), number
                made.append(sample)
        return made

    return finish(result, samples if tokens else None)


def turns_of(trace: Any) -> list[Turn]:
    """The turns of all branches of a verifiers trace that may be trained on, as they were made.
    Raises Misaligned: the graph does not concatenate to what the engine was sent and sampled."""
    usages = {call.node: call.usage for call in trace.calls if call.error is None and call.usage is not None}
    numbers = {id(node): number for number, node in enumerate(trace.nodes)}
    turns: dict[int, Turn] = {}
    for nodes in (branch.nodes for branch in trace.branches if branch.trainable):
        ids: list[int] = []
        roles, chosen, last = b"", bytearray(), None  # the turn before
        experts: RoutedExperts | None = None
        for node in nodes:
            sampled, number = sum(node.mask), numbers[id(node)]
            if len(node.mask) != len(node.token_ids):
                raise Misaligned(f"{len(node.token_ids)} tokens but {len(node.mask)} mask entries")
            if sampled and not all(node.mask[-sampled:]):
                raise Misaligned("sampled tokens are not the end of their message")
            ids += node.token_ids
            roles += bytes([role_index(node.message.role)]) * len(node.token_ids)
            if (routed := node.routed_experts) is not None:  # an array [tokens, layers, k]
                experts = RoutedExperts(b"", routed.shape[1], routed.shape[2], routed.itemsize)
                chosen += routed.tobytes()
            if sampled and number not in turns:
                sent, usage = len(ids) - sampled, usages.get(number)
                if usage is not None and (usage.prompt_tokens, usage.completion_tokens) != (sent, sampled):
                    raise Misaligned(
                        f"the engine got {usage.prompt_tokens} and sampled {usage.completion_tokens} tokens, "
                        f"the conversation has {sent} and {sampled}"
                    )
                turns[number] = turn = Turn(ids[:sent], ids[sent:], list(node.logprobs), roles[:sent])
                if experts is not None:
                    if len(chosen) != len(ids) * experts.row_bytes:
                        raise Misaligned("only some turns have the experts that the engine chose")
                    start, row = 0 if last is None else len(last.ids) - 1, experts.row_bytes
                    rows = bytes(chosen[start * row : -row])  # the last token has a copy of those before it
                    turn.experts, turn.extended = replace(experts, rows=rows, start=start), last
            if sampled:
                last = turns[number]
    return [turns[number] for number in sorted(turns)]


def role_index(role: str) -> int:
    """Index of a message's role in `ROLES`; 0 for one that is not there."""
    return ROLES.index(role) if role in ROLES else 0


def _find_outcome(episode: Any, players: list[Any]) -> tuple[Outcome, str]:
    # Order matters: an error explains a missing reward, not the other way round.
    errors = [(error, None) for error in episode.errors]
    for trace in episode.traces:
        errors += [(error, trace.calls[-1].error if trace.calls else None) for error in trace.errors]
    outcomes = []
    for error, of_call in errors:
        # A harness only sees that its model call failed: the error recorded with the call is the cause.
        cause = of_call if error.type == "HarnessError" and of_call is not None else error
        outcomes.append(classify(cause.type, cause.message, cause.status_code))
    if outcomes:
        return next((one for one in outcomes if one[0] is not Outcome.ERRORED), outcomes[0])
    if episode.is_timeout or any(trace.is_timeout for trace in episode.traces):
        # verifiers calls these ok, and a reward that was never computed then reads 0.0.
        stage = next((trace.stop_condition for trace in episode.traces if trace.is_timeout), "episode")
        return Outcome.TIMEOUT, f"time limit of the environment: {stage}"
    if not episode.ok or not all(trace.ok for trace in episode.traces):
        return Outcome.ERRORED, "the environment reported a failure without an error"
    if not players:
        return Outcome.INVALID, "no trainable agent"
    for trace in players:
        if missing := [name for name, reward in trace.rewards.items() if reward is None]:
            return Outcome.ERRORED, f"reward {missing[0]!r} was not computed"
        if trace.num_turns == 0:
            return Outcome.INVALID, f"stopped before the first turn ({trace.stop_condition})"
    return Outcome.OK, ""


def _describe(result: EpisodeResult, traces: list[Any]) -> None:
    parts = [
        Part(
            agent=_name(trace),
            reward=float(trace.reward),
            rewards={name: float(reward.value) for name, reward in trace.rewards.items() if reward is not None},
            metrics={name: float(value) for name, value in trace.metrics.items() if value is not None},
            num_turns=trace.num_turns,
            is_truncated=trace.is_truncated or trace.stop_condition == CONTEXT_FULL,
        )
        for trace in traces
    ]
    result.reward = sum(part.reward for part in parts) / len(parts)
    result.rewards = _means([part.rewards for part in parts])
    result.metrics = _means([part.metrics for part in parts])
    result.parts = parts if len(parts) > 1 else []
    result.is_truncated = any(part.is_truncated for part in parts)
    result.num_turns = sum(part.num_turns for part in parts)
    usages = [call.usage for trace in traces for call in trace.calls if call.usage is not None]
    result.input_tokens = sum(usage.prompt_tokens + (usage.cached_input_tokens or 0) for usage in usages)
    result.output_tokens = sum(usage.completion_tokens for usage in usages)
    result.timing = {
        stage: sum(float(getattr(trace.timing, stage).duration) for trace in traces)
        for stage in ("setup", "agent", "scoring")
    }
    nodes = traces[0].branches[-1].nodes if traces[0].branches else []
    first = next((i for i, node in enumerate(nodes) if node.sampled), len(nodes))
    messages = [{"tool_calls": None, **vars(node.message)} for node in nodes]
    result.prompt, result.completion = text_of(messages[:first]), text_of(messages[first:])


def _name(trace: Any) -> str:
    return "" if trace.agent is None else trace.agent.name


def _means(tables: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for table in tables for name in table)
    values_by_name = {name: [table[name] for table in tables if name in table] for name in names}
    return {name: sum(values) / len(values) for name, values in values_by_name.items()}


def text_of(messages: Sequence[Message]) -> str:
    """`role: content` lines for people; a lone reply without its role. Calls are dicts, or objects of verifiers."""
    lines = []
    for message in messages:
        calls = [call if isinstance(call, dict) else vars(call) for call in message.get("tool_calls") or []]
        calls = [call.get("function", call) for call in calls]
        said = [str(message.get("content") or ""), *(f"{one['name']}({one['arguments']})" for one in calls)]
        lines.append("\n".join(filter(None, said)))
    if len(messages) == 1 and messages[0]["role"] == "assistant":
        return lines[0][:TEXT_LIMIT]
    return "\n".join(f"{message['role']}: {line}" for message, line in zip(messages, lines, strict=True))[:TEXT_LIMIT]


def opening(system: str | None, prompt: str | list[Message] | None) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*messages, *([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or [])]


def parsed_json(text: str) -> Any:
    """What a model wrote, read as JSON. Raises ValueError: it is none, or nested too deep."""
    if max(accumulate((char in "[{") - (char in "]}") for char in text), default=0) > MOST_LEVELS:
        raise ValueError(f"nested deeper than {MOST_LEVELS} levels")
    return json.loads(text)
