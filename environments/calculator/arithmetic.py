"""Exact arithmetic on a model's expressions: no names, no calls, bounds on what costs time. Standard library only."""

import ast
import re
from fractions import Fraction

MAX_LENGTH = 200  # characters of an expression
MAX_BITS = 512  # of numerator and denominator of every number on the way
MAX_DIGITS = 40  # of an answer, before it is rounded
MAX_EXPONENT = 256

_ALLOWED = re.compile(r"[0-9.+\-*/%() ]*")


class ArithmeticRefused(Exception):
    """The expression is not arithmetic, or has no value; the message says why."""


def calculate(expression: str) -> str:
    """The value as text: an integer, or a decimal of at most 12 significant digits.

    Numbers in decimal notation, + - * / // % ** and parentheses, as in Python but exact.

    Raises ArithmeticRefused.
    """
    return text(evaluate(expression))


def evaluate(expression: str) -> Fraction:
    """Raises ArithmeticRefused."""
    if len(expression) > MAX_LENGTH:
        raise ArithmeticRefused(f"the expression is longer than {MAX_LENGTH} characters")
    # Before Python's parser sees it: what it is made of leaves no names, strings or calls by keyword.
    if wrong := _ALLOWED.sub("", expression):
        raise ArithmeticRefused(f"{wrong[0]!r} is not allowed: only numbers, + - * / // % ** and parentheses")
    try:
        source = expression.strip()
        tree = ast.parse(source, mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:  # the last two: of deep nesting
        raise ArithmeticRefused("this is not an expression") from error
    return _value(tree.body, source)


def text(value: Fraction) -> str:
    if value.denominator == 1:
        if abs(value.numerator) >= 10**MAX_DIGITS:
            raise ArithmeticRefused(f"the result has more than {MAX_DIGITS} digits")
        return str(value.numerator)
    return f"{float(value):.12g}"


def _value(node: ast.expr, source: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()):  # as it was written: a float would be the nearest binary number
            return _bounded(Fraction(source[node.col_offset : node.end_col_offset]))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, source)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, source)
        case ast.BinOp(left=left, op=operator, right=right):
            return _bounded(_combine(operator, _value(left, source), _value(right, source)))
    raise ArithmeticRefused("this is not arithmetic")


def _combine(operator: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Pow():
            return _power(left, right)
        case ast.Div() | ast.FloorDiv() | ast.Mod():
            if right == 0:
                raise ArithmeticRefused("division by zero")
            if isinstance(operator, ast.Div):
                return left / right
            quotient = Fraction(left // right)
            return quotient if isinstance(operator, ast.FloorDiv) else left - quotient * right
    raise ArithmeticRefused("this operator is not allowed")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ArithmeticRefused("an exponent must be an integer")
    if base == 0 and exponent < 0:
        raise ArithmeticRefused("division by zero")
    # Bounded before it is computed: the size of a power is the exponent times that of its base.
    if abs(exponent) > MAX_EXPONENT or abs(int(exponent)) * (_bits(base) - 1) > MAX_BITS:
        raise ArithmeticRefused("the power is too large")
    return Fraction(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise ArithmeticRefused("a number is too large")
    return value


def _bits(value: Fraction) -> int:
    return max(abs(value.numerator).bit_length(), value.denominator.bit_length())
