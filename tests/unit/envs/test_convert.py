"""What may be trained on. verifiers calls several failures ok and gives them rewards: none may get through."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from prime_rl.envs.convert import classify, convert
from prime_rl.envs.protocol import ROLES, EpisodeResult, Outcome


def message(role: str, content: str) -> SimpleNamespace:
    return SimpleNamespace(role=role, content=content)


def prompt_node(ids: list[int], content: str = "hi") -> SimpleNamespace:
    return SimpleNamespace(
        token_ids=ids, mask=[False] * len(ids), logprobs=[], sampled=False, message=message("user", content)
    )


def sampled_node(scaffold: list[int], ids: list[int], content: str = "yo") -> SimpleNamespace:
    return SimpleNamespace(
        token_ids=scaffold + ids,
        mask=[False] * len(scaffold) + [True] * len(ids),
        logprobs=[-0.5 - i for i in range(len(ids))],
        sampled=True,
        message=message("assistant", content),
    )


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
        "nodes": nodes,
        "branches": [branch(*nodes)],
        "calls": [call(1, 4, 2)],
        "agent": SimpleNamespace(trainable=True, name="solver"),
        "rewards": {"lcs": SimpleNamespace(value=0.5)},
        "metrics": {"length": 2.0},
        "reward": 0.5,
        "ok": True,
        "is_timeout": False,
        "is_truncated": False,
        "stop_condition": "agent_completed",
        "errors": [],
        "num_turns": 1,
        "timing": SimpleNamespace(setup=span, agent=span, scoring=span),
    }
    return SimpleNamespace(**{**values, **changes})


def episode(*traces: SimpleNamespace, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"traces": list(traces), "ok": True, "errors": [], "is_timeout": False, **changes})


def run(ep: SimpleNamespace) -> EpisodeResult:
    return convert(ep, episode_id="e", env="env", task_id="t")


def error(kind: str, text: str = "boom", status: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(type=kind, message=text, status_code=status)


def test_healthy_episode() -> None:
    """Concatenated tokens, mask and logprobs of the same length, prompt length, texts, reward."""
    result = run(episode(trace()))
    assert result.ok
    (sample,) = result.samples
    assert list(sample.input_ids) == [1, 2, 3, 4, 5, 6]
    assert list(sample.loss_mask) == [False] * 4 + [True] * 2
    assert list(sample.logprobs) == [0.0] * 4 + [-0.5, -1.5]
    assert sample.prompt_len == 4
    assert [ROLES[role] for role in sample.roles] == ["user"] * 3 + ["assistant"] * 3
    assert sample.agent == "solver"
    assert (result.reward, sample.reward, result.rewards, result.metrics) == (0.5, 0.5, {"lcs": 0.5}, {"length": 2.0})
    assert (result.prompt, result.completion, result.num_turns) == ("user: hi", "yo", 1)


def test_metrics_that_are_no_number_are_left_out() -> None:
    """An average of nothing costs no episode, and no mean over the batch."""
    result = run(episode(trace(metrics={"a": math.nan, "b": 1.0})))
    assert (result.outcome, result.metrics) == (Outcome.OK, {"b": 1.0})


def test_turn_shared_by_two_branches_is_trained_once() -> None:
    """A fork's common turn carries loss in the first branch only; the tokens stay as context in the second."""
    start, shared = prompt_node([1]), sampled_node([2], [3])
    left, right = sampled_node([4], [5]), sampled_node([6], [7])
    nodes = [start, shared, left, right]
    result = run(
        episode(trace(nodes=nodes, calls=[], branches=[branch(start, shared, left), branch(start, shared, right)]))
    )
    assert [list(s.input_ids) for s in result.samples] == [[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]]
    assert [list(s.loss_mask) for s in result.samples] == [
        [False, False, True, False, True],
        [False, False, False, False, True],
    ]
    assert result.samples[1].logprobs[2] == 0.0


def test_what_the_environment_said_before_a_fork_is_told_once() -> None:
    """The second branch knows the roles of its own tokens only, and that the first reply came before them."""
    start, reply, said = prompt_node([1]), sampled_node([2], [3]), prompt_node([8])
    left, right = sampled_node([4], [5]), sampled_node([6], [7])
    branches = [branch(start, reply, said, left), branch(start, reply, said, right)]
    first, second = run(episode(trace(nodes=[start, reply, said, left, right], calls=[], branches=branches))).samples
    assert [ROLES[role] for role in first.roles] == ["user", "assistant", "assistant", "user", "assistant", "assistant"]
    assert [ROLES[role] for role in second.roles] == ["", "", "", "", "assistant", "assistant"]
    assert first.prompt_len == second.prompt_len == 2


def test_a_reply_that_the_environment_repeats_is_trained_on() -> None:
    """Words of its own that an environment puts into the model's mouth are no reply rendered anew: what was sampled before them stays."""
    ours = [prompt_node([1]), sampled_node([2], [3], "ok"), prompt_node([4])]
    repeated = SimpleNamespace(**{**vars(prompt_node([5])), "message": message("assistant", "ok")})
    nodes = [*ours, repeated, prompt_node([6]), sampled_node([7], [8], "fine")]
    (sample,) = run(episode(trace(nodes=nodes, calls=[], branches=[branch(*nodes)]))).samples
    assert [token for token, on in zip(sample.input_ids, sample.loss_mask, strict=True) if on] == [3, 8]


def test_after_a_reply_that_is_rendered_anew_the_environment_is_told() -> None:
    """Once: what came after it, as what came after a reply; what came before has been told."""
    first = [prompt_node([1]), sampled_node([2], [3], "ok")]
    anew = SimpleNamespace(**{**vars(prompt_node([2, 9])), "message": message("assistant", "ok")})
    second = [prompt_node([1]), anew, prompt_node([4]), sampled_node([5], [6], "fine")]
    nodes = [*first, *second]
    one, two = run(episode(trace(nodes=nodes, calls=[], branches=[branch(*first), branch(*second)]))).samples
    assert (one.prompt_len, two.prompt_len) == (2, 3)
    assert [ROLES[role] for role in two.roles] == ["", "", "", "user", "assistant", "assistant"]
    assert list(two.loss_mask) == [0, 0, 0, 0, 0, 1]


def test_each_conversation_is_a_part() -> None:
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


def test_untrainable_parts_are_left_out() -> None:
    """Rejected branches and agents that are not trained (a judge) give no samples."""
    nodes = [prompt_node([1, 2, 3]), sampled_node([4], [5, 6])]
    judge = trace(agent=SimpleNamespace(trainable=False, name="judge"), reward=9.0)
    branches = [branch(*nodes, trainable=False), branch(*nodes)]
    result = run(episode(trace(nodes=nodes, branches=branches, calls=[]), judge))
    assert result.ok
    assert len(result.samples) == 1
    assert result.reward == 0.5


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ({"calls": [call(1, 5, 2)]}, "the engine got 5"),
        ({"calls": [call(1, 4, 3)]}, "sampled 3 tokens"),
        ({"mask": [False, True]}, "3 tokens but 2 mask entries"),
        ({"logprobs": [-0.5]}, "2 sampled tokens but 1 logprobs"),
        ({"logprobs": [-0.5, -1.5, -1.0]}, "2 sampled tokens but 3 logprobs"),
        ({"mask": [True, False, True]}, "not the end of their message"),  # sampled before the scaffold
        ({"logprobs": [-0.1, -math.inf]}, "log-probability that is none"),
        ({"logprobs": [-0.1, math.nan]}, "log-probability that is none"),
        ({"logprobs": [-0.1, 0.5]}, "log-probability that is none"),
    ],
)
def test_what_does_not_fit_together_is_invalid(damage: dict[str, Any], reason: str) -> None:
    """Tokens, mask, logprobs and the engine's own counts must agree, else the episode is an outcome with a reason, never a sample."""
    base = trace()
    vars(base if "calls" in damage else base.nodes[1]).update(damage)
    result = run(episode(base))
    assert (result.outcome, result.samples) == (Outcome.INVALID, [])
    assert reason in result.message


@pytest.mark.parametrize(
    ("ep", "outcome"),
    [
        (episode(trace(is_timeout=True, stop_condition="scoring_timeout", rewards={"lcs": None})), Outcome.TIMEOUT),
        (episode(trace(is_timeout=True, stop_condition="agent_timeout")), Outcome.TIMEOUT),
        (episode(is_timeout=True, ok=False, errors=[error("TimeoutError")]), Outcome.TIMEOUT),
        (episode(trace(rewards={"lcs": None})), Outcome.ERRORED),
        (episode(trace(ok=False, errors=[error("TaskError")]), ok=False), Outcome.ERRORED),
        (episode(trace(ok=False), ok=False), Outcome.ERRORED),
        (episode(trace(reward=math.nan)), Outcome.INVALID),
        (episode(trace(reward=math.inf)), Outcome.INVALID),
        (episode(trace(reward=-1e39)), Outcome.INVALID),  # finite here, and not in the 32 bits that the trainer gets
        (episode(trace(num_turns=0, stop_condition="max_turns")), Outcome.INVALID),
        (episode(trace(branches=[])), Outcome.INVALID),
        (episode(), Outcome.INVALID),
        (episode(trace(agent=SimpleNamespace(trainable=False, name="judge"))), Outcome.INVALID),
    ],
)
def test_what_is_not_trainable(ep: SimpleNamespace, outcome: Outcome) -> None:
    """Timeouts that verifiers calls ok, unscored or non-finite rewards, no turns, no tokens: no sample, and a reason."""
    result = run(ep)
    assert (result.outcome, result.samples) == (outcome, [])
    assert result.message


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        (error("ProviderError", "Connection error.", 503), Outcome.ENGINE_UNAVAILABLE),
        (error("ProviderError", "busy", 429), Outcome.ENGINE_UNAVAILABLE),
        (error("ProviderError", "died", 500), Outcome.ENGINE_UNAVAILABLE),
        (error("ProviderError", "Scale-out endpoints are disabled", 403), Outcome.ENGINE_DENIED),
        (error("ProviderError", "no such model", 404), Outcome.ENGINE_REFUSED),
        (
            error("ProviderError", "Prompt length (9) exceeds maximum context length (8).", 400),
            Outcome.PROMPT_TOO_LONG,
        ),
        (
            error("ProviderError", "The decoder prompt (length 9) is longer than the maximum model length of 8.", 400),
            Outcome.PROMPT_TOO_LONG,
        ),
        (error("ProviderError", "upstream 400: {'code': 'context_length_exceeded'}", 400), Outcome.PROMPT_TOO_LONG),
        (error("ProviderError", "prompt is too long: 9 tokens > 8 maximum", 400), Outcome.PROMPT_TOO_LONG),
        (error("ProviderError", "Incorrect API key provided", 401), Outcome.ENGINE_DENIED),
        (error("ProviderError", "n must be 1", 400), Outcome.ENGINE_REFUSED),
        (error("TaskError", "reward: ZeroDivisionError"), Outcome.ERRORED),
        (error("EnvError"), Outcome.ERRORED),
    ],
)
def test_who_is_to_blame(fault: SimpleNamespace, outcome: Outcome) -> None:
    """An engine that is down, one that refuses, an overlong prompt and an environment's bug are told apart."""
    assert classify(fault.type, fault.message, fault.status_code)[0] is outcome


def test_harness_failure_is_explained_by_its_model_call() -> None:
    """A harness only knows that its call failed: the call's own error names the cause."""
    failed = trace(ok=False, errors=[error("HarnessError", "harness exited 1")])
    assert run(episode(failed, ok=False)).outcome is Outcome.ERRORED
    failed.calls.append(
        SimpleNamespace(node=None, usage=None, error=error("MalformedGenerateResponseError", "no logprobs"))
    )
    result = run(episode(failed, ok=False))
    assert (result.outcome, result.message) == (Outcome.ENGINE_REFUSED, "no logprobs")


def test_engine_error_wins_over_what_it_caused() -> None:
    """When the engine failed, the environment's follow-up error is not the reason given."""
    faults = [error("TaskError", "no reply"), error("ProviderError", "down", 503)]
    assert run(episode(trace(ok=False, errors=faults), ok=False)).outcome is Outcome.ENGINE_UNAVAILABLE
