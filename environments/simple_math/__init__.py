"""simple-math: sums, differences and products made here, as a verifiers (v1) environment package. Needs no download.

For a first run of a mathematical environment, and for models too small for real problems. A problem's own hash puts it
in the training or the held-out split, so that no seed mixes them.
"""

import hashlib
from collections.abc import Iterator
from typing import Literal, Self

import verifiers.v1 as vf
from pydantic import Field, PositiveInt, model_validator

from benchmark_tasks.local import LocalEnv
from benchmark_tasks.taskset import BOXED, MathData, MathTask, MathTaskConfig

__all__ = ["LocalEnv", "SimpleMathTaskset"]

SIGNS = {"add": "+", "subtract": "-", "multiply": "*"}
EVAL_SHARE = 5  # one problem in this many is held out


class SimpleMathConfig(vf.TasksetConfig):
    task: MathTaskConfig = MathTaskConfig()
    split: Literal["train", "eval"] = "train"
    num_tasks: PositiveInt = 1000
    seed: int = 0
    operations: list[Literal["add", "subtract", "multiply"]] = Field(
        default=["add", "subtract", "multiply"], min_length=1, description="Of which problems are made."
    )
    terms: int = Field(default=2, ge=2, le=8, description="Numbers in a problem.")
    largest: int = Field(default=99, ge=1, le=10**9, description="Greatest number in a problem; the smallest is 0.")
    instructions: str = Field(default=BOXED, description='System prompt ("": none).')

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if len(set(self.operations)) < len(self.operations):
            raise ValueError("operations names one twice")
        return self


class SimpleMathTaskset(vf.Taskset[MathTask, SimpleMathConfig]):
    def load(self) -> Iterator[MathTask]:
        config = self.config
        for problem in expressions(config):
            answer = str(value(problem))
            text = f"What is {problem.replace('*', chr(215))}?"
            data = MathData(
                id=f"simple-math/{problem}", prompt=text, system_prompt=config.instructions or None, answer=answer
            )
            yield MathTask(data, config.task)


def expressions(config: SimpleMathConfig) -> list[str]:
    """Distinct expressions of the split such as `3 + 4 * 5`; those of a shorter list begin a longer one.

    Raises:
        ValueError: there are not that many.
    """
    found: dict[str, None] = {}
    for index in range(100 * config.num_tasks + 1000):
        if len(found) == config.num_tasks:
            break
        expression = _expression(config, index)
        if split_of(expression) == config.split:
            found.setdefault(expression)
    if len(found) < config.num_tasks:
        raise ValueError(
            f"num_tasks {config.num_tasks}, and only {len(found)} {config.split} problems were found: raise largest or "
            "terms"
        )
    return list(found)


def split_of(expression: str) -> str:
    """Decided by the expression's own hash."""
    return "eval" if _draw("split", expression) % EVAL_SHARE == 0 else "train"


def value(expression: str) -> int:
    """Of numbers, `+`, `-` and `*`, the last before the others."""
    total, sign, product = 0, 1, 1
    for token in expression.split():
        if token in "+-":
            total, sign, product = total + sign * product, 1 if token == "+" else -1, 1
        elif token != "*":
            product *= int(token)
    return total + sign * product


def _expression(config: SimpleMathConfig, index: int) -> str:
    place = (config.seed, index)
    numbers = [_draw(*place, "number", term) % (config.largest + 1) for term in range(config.terms)]
    names = [config.operations[_draw(*place, "sign", term) % len(config.operations)] for term in range(1, config.terms)]
    return " ".join(
        [str(numbers[0]), *(f"{SIGNS[name]} {number}" for name, number in zip(names, numbers[1:], strict=True))]
    )


def _draw(*place: object) -> int:
    """From a hash: the `random` module does not promise the same numbers in every Python version."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, place)).encode()).digest()[:8], "big")
