"""What may be trained on. verifiers calls several failures ok and gives them rewards: none may get through."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from prime_rl.envs.convert import classify, convert
from prime_rl.envs.protocol import ROLES, EpisodeResult, Outcome


def node(role: str, ids: list[int], mask: list[bool], content: str) -> SimpleNamespace:
    logprobs = [-0.5 - i for i in range(sum(mask))]
    message = SimpleNamespace(role=role, content=content)
    streams = {"token_ids": ids, "mask": mask, "logprobs": logprobs, "routed_experts": None}
    return SimpleNamespace(**streams, sampled=any(mask), message=message)


def prompt_node(ids: list[int], role: str = "user", content: str = "hi") -> SimpleNamespace:
    return node(role, ids, [False] * len(ids), content)


def sampled_node(scaffold: list[int], ids: list[int], content: str = "yo") -> SimpleNamespace:
    return node("assistant", scaffold + ids, [False] * len(scaffold) + [True] * len(ids), content)


def call(node: int, prompt: int, completion: int) -> SimpleNamespace:
    usage = SimpleNamespace(prompt_tokens=prompt, completion_tokens=completion, cached_input_tokens=None)
    return SimpleNamespace(node=node, error=None, usage=usage)


def branch(*nodes: SimpleNamespace, trainable: bool = True) -> SimpleNamespace:
    return SimpleNamespace(nodes=list(nodes), trainable=trainable)


def trace(**changes: Any) -> SimpleNamespace:
    """A healthy single-turn trace: prompt 1 2 3, scaffold 4, sampled 5 6."""
    nodes = [prompt_node([1, 2, 3]), sampled_node([4], [5, 6])]
    span = SimpleNamespace(duration=0.5)
    values: dict[str, Any] = {
        "nodes": nodes, "branches": [branch(*nodes)], "calls": [call(1, 4, 2)], "num_turns": 1,
        "agent": SimpleNamespace(trainable=True, name="solver"),
        "rewards": {"lcs": SimpleNamespace(value=0.5)}, "metrics": {"length": 2.0}, "reward": 0.5,
        "ok": True, "is_timeout": False, "is_truncated": False, "stop_condition": "agent_completed", "errors": [],
        "timing": SimpleNamespace(setup=span, agent=span, scoring=span),
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def of_branches(*branches: list[SimpleNamespace]) -> SimpleNamespace:
    """A trace whose nodes are those of its branches, in the order in which they come first."""
    nodes = list({id(each): each for nodes in branches for each in nodes}.values())
    return trace(nodes=nodes, calls=[], branches=[branch(*nodes) for nodes in branches])


def episode(*traces: SimpleNamespace, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"traces": list(traces), "ok": True, "errors": [], "is_timeout": False, **changes})


def run(ep: SimpleNamespace) -> EpisodeResult:
    return convert(EpisodeResult("e", "env", "t", Outcome.OK), ep)


def error(kind: str, text: str = "boom", status: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(type=kind, message=text, status_code=status)


def test_healthy_episode():
    """Joined tokens, mask, logprobs and roles of one length, prompt length, texts, reward; metrics are numbers."""
    result = run(episode(trace(metrics={"length": 2.0, "a": math.nan})))
    assert result.ok
    (sample,) = result.samples
    assert list(sample.input_ids) == [1, 2, 3, 4, 5, 6]
    assert list(sample.loss_mask) == [False] * 4 + [True] * 2
    assert list(sample.logprobs) == [0.0] * 4 + [-0.5, -1.5]
    assert (sample.prompt_len, sample.agent) == (4, "solver")
    assert [ROLES[role] for role in sample.roles] == ["user"] * 3 + ["assistant"] * 3
    assert (result.reward, sample.reward, result.rewards, result.metrics) == (0.5, 0.5, {"lcs": 0.5}, {"length": 2.0})
    assert (result.prompt, result.completion, result.num_turns) == ("user: hi", "yo", 1)


START, REPLY, SAID = prompt_node([1]), sampled_node([2], [3], "ok"), prompt_node([8])
LEFT, RIGHT, NEXT = sampled_node([4], [5]), sampled_node([6], [7]), sampled_node([9], [10], "fine")
ANEW, REPEATED = prompt_node([2, 9], "assistant", "ok"), prompt_node([5], "assistant", "ok")


@pytest.mark.parametrize(
    ("branches", "ids", "masks", "roles", "prompt_lens"),
    [
        # A fork's common turn is trained on only in the first branch; what the environment said after it in each.
        ([[START, REPLY, SAID, LEFT], [START, REPLY, SAID, RIGHT]], [[1, 2, 3, 8, 4, 5], [1, 2, 3, 8, 6, 7]],
         ["001001", "000001"], ["uaauaa", "   uaa"], [2, 2]),
        # A reply rendered anew: what came after it is told, what came before has been.
        ([[START, REPLY], [START, ANEW, SAID, NEXT]], [[1, 2, 3], [1, 2, 9, 8, 9, 10]], ["001", "000001"],
         ["uaa", "   uaa"], [2, 3]),
        # Words that the environment puts into the model's mouth are no reply rendered anew.
        ([[START, REPLY, SAID, REPEATED, SAID, NEXT]], [[1, 2, 3, 8, 5, 8, 9, 10]], ["00100001"], ["uaauauaa"], [2]),
    ],
)  # fmt: skip
def test_samples_of_a_conversation(branches, ids, masks, roles, prompt_lens):
    """A sampled token is trained on in one sample, and context elsewhere."""
    samples = run(episode(of_branches(*branches))).samples
    assert [list(one.input_ids) for one in samples] == ids
    assert ["".join(map(str, one.loss_mask)) for one in samples] == masks
    assert ["".join((ROLES[role] or " ")[0] for role in one.roles) for one in samples] == roles
    assert [one.prompt_len for one in samples] == prompt_lens
    assert all(
        not logprob for one in samples for logprob, on in zip(one.logprobs, one.loss_mask, strict=True) if not on
    )


def test_each_conversation_is_a_part():
    """Two players, or two attempts of one: each has its own reward, and the episode's is their mean."""

    def player(name: str, reward: float) -> SimpleNamespace:
        agent, worth = SimpleNamespace(trainable=True, name=name), {"win": SimpleNamespace(value=reward)}
        return trace(agent=agent, reward=reward, rewards=worth, metrics={"length": reward + 3})

    result = run(episode(player("white", 1.0), player("black", -1.0), player("white", 0.0)))
    assert [(part.agent, part.reward, part.rewards) for part in result.parts] == [
        ("white", 1.0, {"win": 1.0}), ("black", -1.0, {"win": -1.0}), ("white", 0.0, {"win": 0.0}),
    ]  # fmt: skip
    assert [(sample.part, sample.agent, sample.reward) for sample in result.samples] == [
        (0, "white", 1.0), (1, "black", -1.0), (2, "white", 0.0),
    ]  # fmt: skip
    assert (result.reward, result.rewards, result.metrics) == (0.0, {"win": 0.0}, {"length": 3.0})
    assert run(episode(player("white", 1.0))).parts == []


def test_untrainable_parts_are_left_out():
    """Rejected branches and agents that are not trained (a judge) give no samples."""
    nodes = [prompt_node([1, 2, 3]), sampled_node([4], [5, 6])]
    judge = trace(agent=SimpleNamespace(trainable=False, name="judge"), reward=9.0)
    branches = [branch(*nodes, trainable=False), branch(*nodes)]
    result = run(episode(trace(nodes=nodes, branches=branches, calls=[]), judge))
    assert (result.ok, len(result.samples), result.reward) == (True, 1, 0.5)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ({"calls": [call(1, 5, 2)]}, "the engine got 5"),
        ({"calls": [call(1, 4, 3)]}, "sampled 3 tokens"),
        ({"mask": [False, True]}, "3 tokens but 2 mask entries"),
        ({"logprobs": [-0.5]}, "2 sampled tokens but 1 logprobs"),
        ({"mask": [True, False, True]}, "not the end of their message"),  # sampled before the scaffold
        ({"logprobs": [-0.1, -math.inf]}, "log-probability that is none"),
        ({"logprobs": [-0.1, 0.5]}, "log-probability that is none"),
    ],
)
def test_what_does_not_fit_together_is_invalid(damage, reason):
    """Tokens, mask, logprobs and the engine's counts must agree, else there is an outcome with a reason, no sample."""
    base = trace()
    vars(base if "calls" in damage else base.nodes[1]).update(damage)
    result = run(episode(base))
    assert (result.outcome, result.samples) == (Outcome.INVALID, [])
    assert reason in result.message


FAULTS = [error("TaskError", "no reply"), error("ProviderError", "down", 503)]
MALFORMED = SimpleNamespace(node=None, usage=None, error=error("ProviderError", "no logprobs", 422))


@pytest.mark.parametrize(
    ("ep", "outcome"),
    [
        (episode(trace(is_timeout=True, stop_condition="scoring_timeout", rewards={"lcs": None})), Outcome.TIMEOUT),
        (episode(is_timeout=True, ok=False, errors=[error("TimeoutError")]), Outcome.TIMEOUT),
        (episode(trace(rewards={"lcs": None})), Outcome.ERRORED),
        (episode(trace(ok=False, errors=[error("TaskError")]), ok=False), Outcome.ERRORED),
        (episode(trace(ok=False), ok=False), Outcome.ERRORED),
        (episode(trace(reward=math.nan)), Outcome.INVALID),
        (episode(trace(reward=-1e39)), Outcome.INVALID),  # finite here, and not in the 32 bits that the trainer gets
        (episode(trace(num_turns=0, stop_condition="max_turns")), Outcome.INVALID),
        (episode(trace(branches=[])), Outcome.INVALID),
        (episode(), Outcome.INVALID),
        (episode(trace(agent=SimpleNamespace(trainable=False, name="judge"))), Outcome.INVALID),
        # The engine's error is the reason, not what it caused; a harness only knows that its call failed.
        (episode(trace(ok=False, errors=FAULTS), ok=False), Outcome.ENGINE_UNAVAILABLE),
        (episode(trace(ok=False, errors=[error("HarnessError")], calls=[MALFORMED]), ok=False), Outcome.ENGINE_REFUSED),
    ],
)
def test_what_is_not_trainable(ep, outcome):
    """Timeouts that verifiers calls ok, unscored or non-finite rewards, no turns or tokens, errors: no sample."""
    result = run(ep)
    assert (result.outcome, result.samples) == (outcome, [])
    assert result.message


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        (("ProviderError", "Connection error.", 503), Outcome.ENGINE_UNAVAILABLE),
        (("ProviderError", "scripted failure", 500), Outcome.ENGINE_UNAVAILABLE),
        (("ProviderError", "scripted failure", 404), Outcome.ENGINE_REFUSED),
        (("ProviderError", "Incorrect API key provided", 401), Outcome.ENGINE_DENIED),
        (("ProviderError", "n must be 1", 400), Outcome.ENGINE_REFUSED),
        (("ProviderError", "Prompt length (9) exceeds maximum context length (8).", 400), Outcome.PROMPT_TOO_LONG),
        (("ProviderError", "The prompt (length 9) is longer than the maximum model length of 8.", 400),
         Outcome.PROMPT_TOO_LONG),
        (("ProviderError", "upstream 400: {'code': 'context_length_exceeded'}", 400), Outcome.PROMPT_TOO_LONG),
        (("ProviderError", "prompt is too long: 9 tokens > 8 maximum", 400), Outcome.PROMPT_TOO_LONG),
        (("TaskError", "reward: ZeroDivisionError"), Outcome.ERRORED),
    ],
)  # fmt: skip
def test_whose_fault(fault, outcome):
    """An engine that is down, one that refuses, an overlong prompt and an environment's bug are told apart."""
    assert classify(*fault)[0] is outcome
