"""A classic environment: reverse a word, in one turn, in two, with a tool, or going wrong."""

import asyncio
import json
from difflib import SequenceMatcher
from typing import Any

import verifiers as vf
from datasets import Dataset

WORDS = ["hello", "world", "prime"]


class TwoTurns(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: Any, **_: Any) -> list[dict[str, str]]:
        return [{"role": "user", "content": "Again."}]


class Forgetful(TwoTurns):
    """Its second prompt does not go on from the first reply."""

    async def get_prompt_messages(self, state: Any) -> Any:
        asked = state["prompt"]
        return [asked[0], {"role": "user", "content": "Something else."}] if state["trajectory"] else asked


class Slow(vf.SingleTurnEnv):
    async def setup_state(self, state: Any, **_: Any) -> Any:
        await asyncio.sleep(600)
        return state


class Finite(vf.MultiTurnEnv):
    """Its second turn is for replies that are not right."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> list[dict[str, str]]:
        raise NotImplementedError("a reply without tags")


class Silent(vf.SingleTurnEnv):
    """It is over before the model is asked anything."""

    @vf.stop(priority=200)
    async def at_once(self, state: Any) -> bool:
        return True


def load_environment(
    kind: str = "one", ranked: bool = False, reward: str = "good", metric: str = "good"
) -> vf.Environment:
    def likeness(completion: Any, answer: str, **_: Any) -> float:
        if reward == "raises":
            raise ValueError("no reward today")
        if not completion:
            return 0.0
        return (
            float("nan") if reward == "nan" else SequenceMatcher(None, completion[-1]["content"] or "", answer).ratio()
        )

    async def label(completion: Any, info: Any, **_: Any) -> float:
        text = completion[-1]["content"]
        return float(text == info["label"])

    async def name(completion: Any, **_: Any) -> float:
        return similarity(completion)  # type: ignore[name-defined]  # noqa: F821

    async def module(completion: Any, **_: Any) -> float:
        import not_installed

        return not_installed.score(completion)

    async def parser(completion: Any, **_: Any) -> float:
        return json.loads(completion[-1]["content"])["score"]

    async def length(completion: Any, **_: Any) -> float:
        if metric == "raises":
            raise ValueError("no length today")
        return float(len(completion))

    async def rank(states: list[Any], **_: Any) -> list[float]:
        return [float(place) for place, _ in enumerate(states)]

    graded = {"label": label, "name": name, "module": module, "parser": parser}.get(reward, likeness)
    rubric = vf.Rubric(funcs=[graded, length, *([rank] if ranked else [])], weights=[2.0, 0.0, *[0.0] * ranked])
    rows = [{"question": f"Reverse: {word}", "answer": word[::-1], "info": {"word": word}} for word in WORDS]
    shared: dict[str, Any] = {
        "dataset": Dataset.from_list(rows),
        "eval_dataset": Dataset.from_list([{"question": "Reverse: reward", "answer": "drawer"}]),
        "system_prompt": "Reverse the text.",
        "rubric": rubric,
    }
    if kind == "no-eval":
        del shared["eval_dataset"]
    if kind == "silent":
        return Silent(**shared)
    if kind in ("one", "no-eval"):
        return vf.SingleTurnEnv(**shared)
    if kind == "slow":
        return Slow(**shared)
    return {"two": TwoTurns, "forgetful": Forgetful, "finite": Finite}[kind](max_turns=2, **shared)
