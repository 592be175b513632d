r"""Exact arithmetic on text, plain or LaTeX: a tokenizer and a recursive-descent parser over rationals.

Text is never evaluated as code, and sizes are checked before they are computed, so any input comes back at once:

    sum      = product { ("+" | "-") product }
    product  = signed { ("*" | "/" | \times | \cdot | \div) signed | power }      2(3 + 4) multiplies
    signed   = ("+" | "-") signed | power                                         -2^2 is -4
    power    = primary { "!" | "%" } [ "^" signed ]
    primary  = number | mixed number | "(" sum ")" | \frac group group            braces group like brackets
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction

MAX_BITS = 100_000
"""The largest numerator or denominator that is computed, about 30,000 digits."""
MAX_DIGITS = 4_000
"""The longest literal, and the largest exponent of ten in one; Python itself refuses literals beyond 4,300 digits."""
MAX_FACTORIAL = 5_000
MAX_DEPTH = 40


class NotArithmeticError(ValueError):
    """The text is not arithmetic on numbers, or its value is not defined."""


class TooLargeError(ValueError):
    """The text is arithmetic, but its value is too large to compute."""


_TOKEN = re.compile(r"\s*(?:(?P<number>(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?)|(?P<other>\\[A-Za-z]+|\S))", re.ASCII)
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_TIMES = {"*", r"\times", r"\cdot"}
_DIVIDED_BY = {"/", r"\div"}


def evaluate(text: str) -> Fraction:
    r"""The exact value of arithmetic text.

    Raises:
        NotArithmeticError: the text holds anything but arithmetic, or divides by zero.
        TooLargeError: the value would exceed `MAX_BITS`.

    >>> evaluate("3 * (4 + .5)"), evaluate(r"\frac{1/2}{3}"), evaluate("11 5/6")
    (Fraction(27, 2), Fraction(1, 6), Fraction(71, 6))
    >>> evaluate("10^10^10")
    Traceback (most recent call last):
    groupwise.rewards._arithmetic.TooLargeError: an exponent of 34 bits
    """
    parser = _Parser(text)
    value = parser.sum()
    if parser.next is not None:
        raise NotArithmeticError(f"unexpected {parser.next!r}")
    return value


def half_unit(literal: str) -> Fraction | None:
    """Half a unit in the last place of a decimal literal: how far rounding may have moved it.

    >>> half_unit("3.14"), half_unit("314")
    (Fraction(1, 200), None)
    """
    match = re.fullmatch(r"[+-]?\s*\d*\.(\d{1,1000})", literal.strip(), re.ASCII)
    return Fraction(1, 2 * 10 ** len(match[1])) if match else None


def _literal(text: str) -> Fraction:
    mantissa, _, exponent = text.lower().partition("e")
    if len(mantissa) > MAX_DIGITS or len(exponent) > 6 or abs(int(exponent or 0)) > MAX_DIGITS:
        raise TooLargeError("a number of that many digits")
    return Fraction(text)


def _checked(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise TooLargeError("a number of that many digits")
    return value


class _Parser:
    """Tokens and the position in them; each method reads one rule of the grammar."""

    def __init__(self, text: str) -> None:
        matches = list(_TOKEN.finditer(text.rstrip()))
        self.tokens = [m["number"] or m["other"] for m in matches]
        self.is_number = [m["number"] is not None for m in matches]
        self.position = 0
        self.depth = 0

    @property
    def next(self) -> str | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def take(self) -> str:
        if self.next is None:
            raise NotArithmeticError("unexpected end")
        self.position += 1
        return self.tokens[self.position - 1]

    def integer_at(self, position: int) -> int | None:
        if position < len(self.tokens) and self.tokens[position].isdigit() and len(self.tokens[position]) <= MAX_DIGITS:
            return int(self.tokens[position])
        return None

    def sum(self) -> Fraction:
        value = self.product()
        while self.next in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            value = _checked(value + sign * self.product())
        return value

    def product(self) -> Fraction:
        value = self.signed()
        while self.next is not None:
            if self.next in _TIMES:
                self.take()
                value = _checked(value * self.signed())
            elif self.next in _DIVIDED_BY:
                self.take()
                value = self.divide(value, self.signed())
            elif self.next in ("(", "{", r"\frac"):
                value = _checked(value * self.power())
            else:
                break
        return value

    def signed(self) -> Fraction:
        if self.next not in ("+", "-"):
            return self.power()
        sign = 1 if self.take() == "+" else -1
        return sign * self.nested(self.signed)

    def power(self) -> Fraction:
        base = self.primary()
        while self.next in ("!", "%"):
            base = self.factorial(base) if self.take() == "!" else base / 100
        if self.next != "^":
            return base
        self.take()
        exponent = self.nested(self.signed)
        if exponent.denominator != 1:
            raise NotArithmeticError("a root is not rational arithmetic")
        if base == 0 and exponent < 0:
            raise NotArithmeticError("division by zero")
        if base in (0, 1, -1):  # an exponent of any size is safe; only whether it is 0, or even, matters
            exponent = Fraction(int(exponent != 0) if base == 0 else exponent.numerator % 2)
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent) > MAX_BITS:
            raise TooLargeError(f"an exponent of {exponent.numerator.bit_length()} bits")
        return Fraction(base**exponent.numerator)

    def primary(self) -> Fraction:
        start = self.position
        token = self.take()
        if self.is_number[start]:
            return self.mixed(start) if token.isdigit() else _literal(token)
        if token == r"\frac":
            return self.divide(self.group(), self.group())
        self.position = start
        return self.group()

    def mixed(self, start: int) -> Fraction:
        r"""An integer, with the proper fraction that may stand directly behind it: `11 5/6`, `11\frac{5}{6}`."""
        whole = _literal(self.tokens[start])
        after = self.tokens[start + 1 : start + 8]
        if after[1:2] == ["/"]:
            numerator, denominator, length = self.integer_at(start + 1), self.integer_at(start + 3), 3
        elif after[:2] + after[3:5] + after[6:] == [r"\frac", "{", "}", "{", "}"]:
            numerator, denominator, length = self.integer_at(start + 3), self.integer_at(start + 6), 7
        else:
            return whole
        if numerator is None or denominator is None or not 0 < numerator < denominator:
            return whole
        self.position += length
        return whole + Fraction(numerator, denominator)

    def group(self) -> Fraction:
        closing = _CLOSING.get(opening := self.take())
        if closing is None:
            raise NotArithmeticError(f"unexpected {opening!r}")
        value = self.nested(self.sum)
        if self.take() != closing:
            raise NotArithmeticError(f"{opening!r} is not closed")
        return value

    def nested(self, rule: Callable[[], Fraction]) -> Fraction:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotArithmeticError(f"nested deeper than {MAX_DEPTH}")
        value = rule()
        self.depth -= 1
        return value

    @staticmethod
    def divide(dividend: Fraction, divisor: Fraction) -> Fraction:
        if divisor == 0:
            raise NotArithmeticError("division by zero")
        return _checked(dividend / divisor)

    @staticmethod
    def factorial(value: Fraction) -> Fraction:
        if value.denominator != 1 or value < 0:
            raise NotArithmeticError("a factorial needs a whole number")
        if value > MAX_FACTORIAL:
            raise TooLargeError("a factorial beyond that")
        return Fraction(math.factorial(value.numerator))
