"""The wire between the orchestrator and an environment worker: msgpack maps over ZeroMQ (ROUTER here, DEALER there).

    worker                       orchestrator
                                  Setup            a file: which environment, model, engine
    Ready ───────────────────▶                     with its tasks
                              ◀── Run | Cancel     any number in flight
    Result ──────────────────▶
    Failed ──────────────────▶                     it cannot load the environment, or run further episodes

Beside it they share a `Page` of memory. Standard library and msgpack only: workers import this from Python environments
of their own.
"""

import ctypes
import mmap
from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

import msgpack

MOST_BYTES = 1 << 30  # of a result: eighty million tokens, or two million with the experts of a model of 48 layers
ROLES = ("", "system", "user", "assistant", "tool")
"""Whose message a token belongs to, as `SampleTokens.roles` counts them; the first: another one's."""
# The engine's key. The name holds API_KEY so that verifiers keeps it from the programs it starts.
API_KEY_VAR = "PRIMERL_ENV_API_KEY"


class ProtocolError(Exception):
    """A message that is not ours: unknown kind, missing or unknown field, broken msgpack."""


class Outcome(StrEnum):
    """How an episode ended. Everything but `OK` is untrainable and counted under this name."""

    OK = "ok"
    ERRORED = "errored"  # the environment raised: setup, reward, tools
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    PROMPT_TOO_LONG = "prompt_too_long"  # longer than the model's context
    ENGINE_UNAVAILABLE = "engine_unavailable"  # connection refused, 5xx, 429: worth another attempt
    TEACHER_UNAVAILABLE = "teacher_unavailable"  # what it was to be scored by does not answer
    ENGINE_REFUSED = "engine_refused"  # 4xx or an unusable answer: another attempt gives the same
    ENGINE_DENIED = "engine_denied"  # 401, 402, 403 of an API: key or budget, which fails every other episode too
    INVALID = "invalid"  # ran to its end but gave nothing to train on: no tokens, no finite reward, misaligned
    WORKER_DIED = "worker_died"


class FirstTasks(list[str]):
    """Ids of the first tasks of an endless environment: not all there are."""


@dataclass
class RoutedExperts:
    """The engine's experts for N tokens from token `start`: `rows` [N, layers, k] little-endian ids of 1 or 2 bytes."""

    rows: bytes
    layers: int  # all of the model's: those without experts have zeros
    k: int
    itemsize: int
    start: int = 0

    @property
    def row_bytes(self) -> int:
        return self.layers * self.k * self.itemsize

    @property
    def end(self) -> int:
        """The token after the last one that has experts."""
        return self.start + len(self.rows) // self.row_bytes


@dataclass
class SampleTokens:
    """One trainable sequence of T tokens, exactly as sent to and sampled by the engine.

    Packed, because an orchestrator holds hundreds of thousands: nine bytes a token where lists take seventy, and no
    token for the garbage collector to walk over.
    """

    input_ids: "array[int]"  # (T,) 32 bits
    loss_mask: bytes  # (T,) 1 on sampled tokens, else 0
    logprobs: "array[float]"  # (T,) 32 bits, of the sampler, 0.0 off-mask
    prompt_len: int  # tokens before the first reply; of a prompt rendered anew those that other sequences have
    reward: float
    agent: str = ""  # which of the environment's agents it is of
    part: int = 0  # which of the episode's parts it is of
    # (T,) whose message a token belongs to: index into `ROLES`; 0: an earlier sequence has it.
    roles: bytes | None = None
    hint: "array[int] | None" = None  # tokens that a teacher reads before these
    # Of a teacher: 32 bits, 0.0 for the first token; for all T tokens or the leading ones that it scored.
    ref_logprobs: "array[float] | None" = None
    experts: RoutedExperts | None = None  # of the first T - 1 tokens: nothing was computed of the last one


@dataclass
class Part:
    """One conversation of one agent within an episode, and what it alone was worth."""

    agent: str
    reward: float
    rewards: dict[str, float]
    metrics: dict[str, float]
    num_turns: int
    is_truncated: bool


@dataclass
class EpisodeResult:
    """One finished attempt at one task. Unless `outcome` is OK there are no samples and `message` says why."""

    episode_id: str
    env: str
    task_id: str
    outcome: Outcome
    message: str = ""
    reward: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)  # where there are several; what is said above is their mean
    samples: list[SampleTokens] = field(default_factory=list)
    is_truncated: bool = False
    num_turns: int = 0
    prompt: str = ""  # for people to read, shortened
    completion: str = ""
    timing: dict[str, float] = field(default_factory=dict)  # seconds by stage
    filtered: str = ""  # the filter that leaves it out, by the orchestrator
    input_tokens: int = 0  # of all prompts that the model was sent
    output_tokens: int = 0  # of all its replies

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK


@dataclass
class Setup:
    name: str
    env_id: str
    args: dict[str, Any]
    model: str
    renderer: str
    log_level: str
    sampled_by: str = ""  # the model's name where it is sampled ("": `model`)
    demonstration: str = ""  # field of a task that is shown to who scores its episodes ("": none)
    template: str = ""  # of the message that shows it
    adapter: str = "auto"
    max_turns: int = 0  # replies in one conversation (0: any number)
    trajectories: str = "interleaved"
    # Seconds without a byte of an answer, of an OpenAI-compatible API that is asked by its chat route: no tokens,
    # nothing to train on (0: the model is asked by tokens).
    chat_timeout: float = 0.0


@dataclass
class Ready:
    task_ids: list[str]
    bounded: bool = True  # these are all there are


@dataclass
class Failed:
    message: str


@dataclass
class Run:
    request: int
    episode_id: str
    task_index: int
    task_id: str  # must be what the worker has at `task_index`: two workers may load different lists
    sampling: dict[str, Any]
    policy_version: int
    base_url: str  # of the server that samples; ends in /v1
    timeout: float  # seconds from receipt

    @property
    def replays(self) -> bool:
        """Whether its samples are to have the experts that the engine chooses."""
        return self.sampling.get("routed_experts_prompt_start") is not None

    def failed(self, env: str, outcome: Outcome, message: str) -> EpisodeResult:
        return EpisodeResult(self.episode_id, env, self.task_id, outcome, message)


@dataclass
class Cancel:
    request: int


@dataclass
class Result:
    request: int
    episode: EpisodeResult


class Page(ctypes.Structure):
    """A file that both sides map. The worker writes, the pool reads, also when the worker is dead."""

    _fields_ = [
        ("request", ctypes.c_uint64),  # the one whose code runs in the event loop, 0 for none
        ("use", ctypes.c_double),  # of a core, a moving average: the process computed, or its event loop was late
    ]

    @classmethod
    def of(cls, path: Path) -> "Page":
        """Map a file, which is made if there is none."""
        with path.open("a+b") as file:
            file.truncate(ctypes.sizeof(cls))
            return cls.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(cls)))


Message = Setup | Ready | Failed | Run | Cancel | Result
_KINDS: dict[str, type[Any]] = {cls.__name__: cls for cls in get_args(Message)}
_ARRAYS = {"input_ids": "i", "logprobs": "f", "hint": "i", "ref_logprobs": "f"}  # of a sample: bytes on the wire


def encode(message: Message) -> bytes:
    """Make one frame. Raises TypeError, ValueError, OverflowError: an environment put into it what cannot be sent."""
    return msgpack.packb({"kind": type(message).__name__, **vars(message)}, default=_plain)


def pack_episode(episode: EpisodeResult) -> bytes:
    """Make bytes of an episode. Not with `dataclasses.asdict`: that would copy every token."""
    return msgpack.packb(vars(episode), default=_plain)


def _plain(value: Any) -> Any:
    """What msgpack does not know: streams as bytes, little-endian as all machines are that we run on."""
    if isinstance(value, array):
        return value.tobytes()
    if isinstance(value, EpisodeResult | SampleTokens | Part | RoutedExperts):
        return vars(value)
    raise TypeError(f"it holds a {type(value).__name__}")


def decode(frame: bytes) -> Message:
    """Read one frame. What is in its fields is not checked: both sides are ours, of one version.
    Raises ProtocolError: not msgpack, an unknown kind, a missing or unknown field."""
    try:
        data = msgpack.unpackb(frame)
        kind = _KINDS[data.pop("kind")]
        if kind is Result:
            data["episode"] = unpack_episode(data["episode"])
        message: Message = kind(**data)
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolError(f"{type(error).__name__}: {error}") from error
    return message


def unpack_episode(data: dict[str, Any]) -> EpisodeResult:
    """The episode of a map that msgpack has read. Raises ValueError, TypeError, KeyError: it is none."""
    for sample in data["samples"]:
        for name, kind in _ARRAYS.items():
            if (packed := sample[name]) is not None:
                sample[name] = array(kind)
                sample[name].frombytes(packed)
        if (experts := sample.get("experts")) is not None:
            sample["experts"] = RoutedExperts(**experts)
    parts, samples = [Part(**part) for part in data["parts"]], [SampleTokens(**sample) for sample in data["samples"]]
    return EpisodeResult(**{**data, "outcome": Outcome(data["outcome"]), "parts": parts, "samples": samples})
