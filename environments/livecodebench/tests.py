"""The hidden and the shown tests of a problem, as the dataset stores them, and whether a program passes one.

`public_test_cases` is JSON: `[{"input", "output", "testtype": "stdin" | "functional"}, …]`. `private_test_cases` is
that, or base64 of zlib of a pickled string of that. A pickle may run code when it is read; ours yields a string or is
refused.
"""

import base64
import io
import json
import pickle
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from benchmark_tasks.rows import DataError
from benchmark_tasks.sandbox import Ended, Limits, run

STDIN, FUNCTIONAL = "stdin", "functional"
LARGEST = 1 << 30  # bytes of unpacked tests

# LeetCode's solutions count on these.
PRELUDE = """
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *; from collections import *; from functools import *; from heapq import *; from itertools import *
from math import comb, gcd, inf, lcm, log2, perm, sqrt
from typing import *
sys.setrecursionlimit(50000)
"""
# What it prints itself goes to stderr: stdout is for what it returns.
CALL = """
import json, sys
given = [json.loads(line) for line in sys.stdin.read().split("\\n") if line.strip()]
answers, sys.stdout = sys.stdout, sys.stderr
space = {{"__name__": "solution"}}
exec({prelude!r}, space)
exec(compile({program!r}, "solution.py", "exec"), space)
owner = space.get("Solution")
target = getattr(owner(), {name!r}) if owner is not None else space[{name!r}]
json.dump(target(*given), answers)
"""


@dataclass(frozen=True)
class Test:
    __test__ = False  # for pytest

    given: str
    expected: str
    kind: str


class _StringsOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise DataError(f"private_test_cases: the pickle wants {module}.{name}; only a string is accepted")


def read_tests(public: str, private: str, where: str) -> list[Test]:
    """All tests of a problem, the shown ones first.

    Raises:
        DataError: they are not what the dataset should hold, or there are none.
    """
    tests = [
        *_cases(public, where, "public_test_cases"),
        *_cases(_unpacked(private, where), where, "private_test_cases"),
    ]
    if not tests:
        raise DataError(f"{where}: no tests")
    return tests


def _unpacked(private: str, where: str) -> str:
    if private.lstrip().startswith("[") or not private.strip():
        return private
    try:
        unzip = zlib.decompressobj()
        data = unzip.decompress(base64.b64decode(private, validate=True), LARGEST)
        if unzip.unconsumed_tail:
            raise DataError(f"{where}: private_test_cases are larger than {LARGEST >> 20} MiB")
        text = _StringsOnly(io.BytesIO(data)).load()
    except (
        ValueError,
        zlib.error,
        pickle.UnpicklingError,
        EOFError,
        IndexError,
        KeyError,
        AttributeError,
        TypeError,
    ) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{where}: private_test_cases is neither JSON nor base64 of zlib of a pickle: {error}"
        ) from error
    if not isinstance(text, str):
        raise DataError(f"{where}: private_test_cases unpacks to a {type(text).__name__}, not a string")
    return text


def _cases(text: str, where: str, column: str) -> Iterator[Test]:
    try:
        cases = json.loads(text) if text.strip() else []
    except ValueError as error:
        raise DataError(f"{where}: {column} is not JSON: {error}") from error
    for case in cases:
        if not isinstance(case, dict) or not {"input", "output", "testtype"} <= set(case):
            raise DataError(f"{where}: a test in {column} has not input, output and testtype: {str(case)[:100]}")
        if case["testtype"] not in (STDIN, FUNCTIONAL):
            raise DataError(
                f"{where}: {column} has a test of testtype {case['testtype']!r}; known are {STDIN} and {FUNCTIONAL}"
            )
        yield Test(case["input"], case["output"], case["testtype"])


def passes(program: str, test: Test, function: str, limits: Limits, unsafe: bool) -> bool:
    """Return whether the program, or its function of that name, gives what the test expects (never shown to it)."""
    calls = test.kind == FUNCTIONAL
    source = CALL.format(prelude=PRELUDE, program=program, name=function) if calls else program
    ran = run(source, test.given, limits, unsafe)
    if ran.ended is not Ended.OK:
        return False
    return same_value(ran.output, test.expected) if calls else same_lines(ran.output, test.expected)


def same_value(output: str, expected: str) -> bool:
    """Of two JSON texts."""
    try:
        return bool(json.loads(output) == json.loads(expected))
    except (ValueError, RecursionError):  # a program prints what it likes
        return False


def same_lines(output: str, expected: str) -> bool:
    """Line by line, but for space around lines and empty lines at the ends; numbers may be written differently."""
    ours, theirs = (text.strip().split("\n") for text in (output, expected))
    return len(ours) == len(theirs) and all(
        _same_line(one.strip(), other.strip()) for one, other in zip(ours, theirs, strict=True)
    )


def _same_line(one: str, other: str) -> bool:
    if one == other:
        return True
    try:
        ours, theirs = ([Decimal(word) for word in line.split()] for line in (one, other))
        return ours == theirs
    except InvalidOperation:  # no numbers, or one such as sNaN that equals nothing
        return False
