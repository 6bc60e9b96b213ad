"""Ask judges in processes of their own whether two mathematical answers are equal: the worker never waits for sympy.

Each thread of a small pool has one judge (`judge_process`). One that exceeds its time or its memory dies, its question
is answered with "not equal", and the next question starts another.
"""

import asyncio
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from benchmark_tasks.answers import plain

SECONDS = 5.0
MIB = 4096
START_SECONDS = 120.0  # importing sympy takes a second, or many on a busy machine
LONGEST = 4096  # characters: a longer answer is not looked at

_judges = threading.local()


async def equal(truth: str, answer: str, seconds: float = SECONDS) -> bool:
    """Return whether a mathematician would take `answer` for `truth`, both in LaTeX; False where `seconds` of processor
    time do not decide it."""
    if plain(truth) == plain(answer):
        return True
    if len(answer) > LONGEST:
        return False
    return await asyncio.get_running_loop().run_in_executor(_pool(), _ask, truth, answer, seconds)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) - 1)), thread_name_prefix="judge")


def _ask(truth: str, answer: str, seconds: float) -> bool:
    judge = _judge(seconds)
    assert judge.stdin is not None
    judge.stdin.write(json.dumps([truth, answer]).encode() + b"\n")
    judge.stdin.flush()
    said = _line(
        judge, 20 * seconds + 10.0
    )  # its own timer is first, unless it is stopped, or gets next to no processor
    return said == b"1\n"


def _judge(seconds: float) -> "subprocess.Popen[bytes]":
    """The judge of this thread, a new one where the last has died or has another time limit."""
    judge: subprocess.Popen[bytes] | None = getattr(_judges, "process", None)
    if judge is not None:
        if judge.poll() is None and _judges.seconds == seconds:
            return judge
        _end(judge)
    command = [sys.executable, "-m", "benchmark_tasks.judge_process", str(seconds), str(MIB)]
    # Its own copy of the path: the worker may have been started from anywhere.
    environment = {"PATH": os.defpath, "PYTHONPATH": str(Path(__file__).parents[1]), "OPENBLAS_NUM_THREADS": "1"}
    judge = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    if _line(judge, START_SECONDS) != b"ready\n":
        raise RuntimeError(f"the judge of answers does not start (exit status {judge.poll()}): its messages are above")
    _judges.process, _judges.seconds = judge, seconds
    return judge


def _line(judge: "subprocess.Popen[bytes]", seconds: float) -> bytes:
    """What a judge says, nothing where it died or is silent for `seconds`: it is ended then."""
    assert judge.stdout is not None
    ready, _, _ = select.select([judge.stdout], [], [], seconds)
    said = judge.stdout.readline() if ready else b""  # bounded: a judge writes its short lines whole
    if not said:
        _end(judge)
    return said


def _end(judge: "subprocess.Popen[bytes]") -> None:
    judge.kill()
    judge.wait(timeout=10)
    for pipe in (judge.stdin, judge.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # what was still to be written
                pipe.close()
