"""calculator: the same problems everywhere, an evaluator that computes exactly and cannot be made to do more."""

import json
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calculator.arithmetic import ArithmeticRefused, calculate
from calculator.data import parse, problems


def test_splits() -> None:
    """Train and eval are disjoint whatever the seeds, answers are as Python computes them; nonsense is refused."""
    found = [[problem for seed in range(5) for problem in problems(split, 200, seed)] for split in ("train", "eval")]
    ids = [{problem.id for problem in half} for half in found]
    assert not ids[0] & ids[1]
    assert all(problem.answer == eval(problem.expression) >= 0 for half in found for problem in half)
    with pytest.raises(ValueError, match="split must be 'train' or 'eval', not 'test'"):
        problems("test", 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_tasks must be from 1 to 100000"):
        problems("eval", 10**9)


def test_parse() -> None:
    """The number in the last whole pair of tags; anything else is none, never an error."""
    assert parse("So <answer>1</answer>, no: <answer> 1,234 </answer>.") == Fraction(1234)
    assert parse("<answer>-2.50</answer>") == Fraction(-5, 2)
    for inside in ("42 kg", "1e3", "٤٢", "9" * 100, ""):
        assert parse(f"<answer>{inside}</answer>") is None
    assert [parse(reply) for reply in ("42", "<answer>42", "")] == [None] * 3


_NUMBERS = st.integers(0, 999).map(str)
_EXPRESSIONS = st.recursive(
    _NUMBERS, lambda x: st.tuples(x, st.sampled_from(["+", "-", "*", "//", "%"]), x).map("({0[0]}{0[1]}{0[2]})".format),
    max_leaves=8,
)  # fmt: skip


@given(_EXPRESSIONS)
def test_integers_are_pythons(expression: str) -> None:
    try:
        expected = eval(expression)
    except ZeroDivisionError:
        with pytest.raises(ArithmeticRefused, match="division by zero"):
            calculate(expression)
    else:
        assert calculate(expression) == str(expected)


REFUSED = [
    "__import__('os').system('true')", "().__class__", "(1).real", "1 .real", "abs(1)", "1(2)", "x",
    "[1, 2]", "(1, 2)", "()", "1 if 1 else 2", "1 == 1", "1 or 2", "~1", "1 << 1000", "1j", "0x10", "1_000",
    "1e300", "'a' * 5", "lambda: 0", "1; 2", "1\n2", "1\x00", "１+１", "1 2", "((", "", "   ", "2**0.5",
    "1/0", "1//0", "1%0", "0**-1", "10**40",
]  # fmt: skip


def test_refused() -> None:
    """Anything but arithmetic with a value is refused with a reason, never run."""
    for expression in REFUSED:
        with pytest.raises(ArithmeticRefused):
            calculate(expression)


HUGE = [
    "9**9**9**9", "9**999999999", "2**256*2**256*2**256", "(" * 150 + "1", "(" * 99 + "1" + ")" * 99, "-" * 199 + "1",
    "9" * 200, "1." + "9" * 198, "1+" * 99 + "1", "1" + "/9999999" * 13, "9" * 100_000, "1e" + "9" * 20,
    "2**" * 60 + "2", "(99**77)**(99**77)", "0.0000001**256",
]  # fmt: skip


def test_work_is_bounded() -> None:
    """Whatever it is asked, it holds no number beyond its bounds: a child with little time and memory does it."""
    code = (
        "import json, resource, sys; resource.setrlimit(resource.RLIMIT_CPU, (5, 5))\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))\n"
        "from calculator.arithmetic import ArithmeticRefused, calculate\n"
        "for expression in json.load(sys.stdin):\n"
        "  try: calculate(expression)\n"
        "  except ArithmeticRefused: pass\n"
    )
    assert subprocess.run([sys.executable, "-c", code], input=json.dumps(HUGE), text=True, timeout=120).returncode == 0
