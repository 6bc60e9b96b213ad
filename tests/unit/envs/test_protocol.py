"""The wire: every message survives it unchanged, and nothing else gets in."""

from array import array

import msgpack
import pytest

from prime_rl.envs import protocol
from prime_rl.envs.protocol import EpisodeResult, Outcome, Part, ProtocolError, Result, RoutedExperts, decode, encode
from support.samples import sample_tokens

STREAMS = {
    "agent": "solver", "part": 1, "roles": bytes([2, 3, 3]), "hint": array("i", [7]),
    "ref_logprobs": array("f", [0, -2]), "experts": RoutedExperts(bytes(range(12)), 2, 3, 2),
}  # fmt: skip
EPISODE = EpisodeResult(
    episode_id="3.1.0",
    env="reverse-text",
    task_id="reverse-text/otter",
    outcome=Outcome.OK,
    reward=0.25,
    rewards={"lcs": 0.25},
    samples=[
        sample_tokens([1], [2, 70000], [-0.1, -1e-12], 0.25, **STREAMS),
        sample_tokens([], [1], [0.0]),
    ],
    parts=[Part("solver", 0.5, {"lcs": 0.5}, {}, 1, False), Part("", 0.0, {"lcs": 0.0}, {"n": 1.0}, 2, True)],
    timing={"agent": 1.5},
)
MESSAGES: list[protocol.Message] = [
    protocol.Setup("name", "owner/env", {"split": "eval", "deep": {"a": [1, None]}}, "model", "auto", "info"),
    protocol.Ready(["a", "b"], bounded=False),
    protocol.Failed("no"),
    protocol.Run(1, "e", 0, "a", {"temperature": 0.7, "seed": 2**40}, 3, "http://x/v1", 12.5),
    protocol.Cancel(1),
    Result(1, EPISODE),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: protocol.Message) -> None:
    """What is decoded equals what was encoded, floats to the last bit, outcomes as outcomes."""
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "data",
    [
        {"kind": "nonsense"}, {"request": 1}, {"kind": "Cancel"}, {"kind": "Cancel", "request": 1, "more": 2},
        {"kind": "Result", "request": 1, "episode": None}, {"kind": ["Cancel"], "request": 1}, [1, 2], "Cancel",
        {"kind": "Result", "request": 1, "episode": {**vars(EPISODE), "parts": [], "samples": [], "outcome": "great"}},
    ],
)  # fmt: skip
def test_foreign_messages_are_refused(data: object) -> None:
    """Unknown kinds and outcomes, missing or unknown fields (another version's): ProtocolError."""
    for frame in (msgpack.packb(data), msgpack.packb(data)[:-1], b"\xc1\xff"):
        with pytest.raises(ProtocolError):
            decode(frame)
