"""Which part of a reply is its answer, and when two answers are equal."""

import asyncio
import os
import subprocess
import sys

import pytest

from benchmark_tasks import judge
from benchmark_tasks.answers import boxed_answer, last_boxed
from prime_rl.wait import wait


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1}, no: \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{7} \boxed 9", "9"),
        (r"\boxed{3} and then \boxed{4 without an end", "3"),
        (r"<think>\boxed{1}</think> It is \boxed{2}", "2"),
        (r"no opening, \boxed{1}</think>\boxed{2}", "2"),
        (r"<think> \boxed{1} and the tokens ran out", None),
        (r"\boxed{}", None),
        (r"\boxed", None),
        ("42", None),
    ],
)
def test_the_answer_of_a_reply(reply, answer):
    """Contract: the last complete box after the thinking; thinking that does not end answers nothing."""
    assert boxed_answer(reply) == answer


def test_a_reply_of_nothing_but_boxes():
    """Contract: the worker's loop looks at it once, not once for every box. (Quadratic, this took minutes.)"""
    assert last_boxed("\\boxed{" * 50_000) is None
    assert last_boxed("\\boxed{7}" + "\\boxed{" * 50_000) == "7"
    assert last_boxed("\\boxed{" * 50_000 + "7" + "}" * 50_000) == "7"


EQUAL = [
    (r"\frac{1}{2}", "0.5"), (r"\frac12", r"\dfrac{1}{2}"), ("1000", "1,000"), (r"10\%", "10"), ("(1,2)", "(1, 2)"),
    ("5", "x=5"), (r"3\sqrt{2}", r"\sqrt{18}"), (r"\{1,2\}", r"\{2,1\}"), ("x^2+2x+1", "(x+1)^2"), ("33", "033"),
    (r"\$5", "5"), (r"x \in [1,3]", "[1,3]"),
]  # fmt: skip
UNEQUAL = [
    ("3 1/2", "31/2"), (r"\leftarrow", r"\rightarrow"), ("2", "3"), ("(1,2)", "(2,1)"), ("[1,2)", "[1,2]"),
    (r"\frac13", "0.333"), ("6", "}{"), ("6", "\\frac{"), ("1", "1" * 5000),
]  # fmt: skip


async def test_equality():
    """Contract: spelling does not decide; near is not equal; what is no mathematics is wrong, not an error."""
    for pairs, equal in ((EQUAL, True), (UNEQUAL, False)):
        for truth, answer in pairs:
            assert (await judge.equal(truth, answer)) == equal, (truth, answer)


async def test_an_answer_that_takes_for_ever():
    """Contract: it is wrong after the time for it, nobody's loop waits, and the next answer is judged."""
    assert await judge.equal("2+2", "4", 0.5)
    asked = asyncio.ensure_future(judge.equal("9", "9^{9^{9^{9^9}}}", 0.5))
    turns = 0
    while not asked.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert not asked.result()
    assert turns > 10  # the loop went on
    assert await judge.equal(r"\frac{2}{4}", "0.5", 0.5)


def test_no_judge_outlives_its_process():
    """Contract: a judge ends when its asker is killed; any thread's loop can ask: it needs no signal handlers."""
    code = (
        "import asyncio, os, threading\nfrom benchmark_tasks import judge\n"
        "def ask(): print(asyncio.run(judge.equal('a+b', 'b+a')))\n"
        "thread = threading.Thread(target=ask)\nthread.start()\nthread.join()\n"
        "threads = [open(f'/proc/self/task/{one}/children').read() for one in os.listdir('/proc/self/task')]\n"
        "print(' '.join(threads), flush=True)\nos._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    said, _, pids = done.stdout.partition("\n")
    assert said == "True", done.stderr
    assert pids.split()
    gone = lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids.split())  # noqa: E731
    wait(gone, subject="end", owner="judges", seconds=30.0)
