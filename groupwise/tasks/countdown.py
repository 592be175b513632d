"""Countdown: reach a target with given numbers, each used exactly once, and + - * /."""

from __future__ import annotations

import random
import re
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field

from groupwise.chat import render_response
from groupwise.schema import Strict
from groupwise.tasks.base import Seed, Split, assistant, draw_split, user
from groupwise.types import Example, Prompt


class CountdownConfig(Strict):
    """Every problem is made backwards from a solution, so each can be solved."""

    kind: Literal["countdown"]
    numbers: Annotated[int, Field(ge=3, le=6)] = 3
    """How many numbers are given."""
    largest: Annotated[int, Field(ge=2)] = 20
    """The numbers are drawn from 1 to this."""
    language: Literal["en", "zh"] = "en"


class Countdown:
    """`verify` evaluates the answered expression exactly; `prompt.answer` is one solution of possibly many."""

    def __init__(self, config: CountdownConfig) -> None:
        self.config = config

    def verify(self, prompt: Prompt, answer: str) -> float:
        """1 if the expression uses each number exactly once and equals the target, else 0.

        >>> p = Prompt("", (), data={"numbers": [2, 3, 7], "target": 13})
        >>> Countdown(CountdownConfig(kind="countdown")).verify(p, "2 × 3 + 7 = 13")
        1.0
        """
        expression, _, claimed = answer.partition("=")
        try:
            value, used = evaluate(expression)
            if claimed.strip() and evaluate(claimed)[0] != value:
                return 0.0
        except (ValueError, ZeroDivisionError):
            return 0.0
        return float(value == prompt.data["target"] and sorted(used) == sorted(prompt.data["numbers"]))

    def sample(self, n: int, seed: Seed, split: Split = "train") -> list[Prompt]:
        return draw_split(self._draw, n, seed, split)

    def traces(self, n: int, seed: Seed) -> list[Example]:
        return [
            Example(
                assistant(p, render_response(p.data["steps"], str(p.answer))), {"task": "countdown", "prompt": p.id}
            )
            for p in self.sample(n, seed)
        ]

    def _draw(self, rng: random.Random) -> Prompt | None:
        numbers = [rng.randint(1, self.config.largest) for _ in range(self.config.numbers)]
        pool = [(x, str(x)) for x in numbers]
        steps = []
        while len(pool) > 1:
            (a, text_a), (b, text_b) = pool.pop(rng.randrange(len(pool))), pool.pop(rng.randrange(len(pool)))
            if a < b:
                a, text_a, b, text_b = b, text_b, a, text_a
            operator = rng.choice([o for o in "+-*/" if o != "/" or (b and a % b == 0)])
            value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[operator]
            steps.append(f"{a}{operator}{b}={value}")
            pool.append((value, f"({text_a}{operator}{text_b})"))
        target, solution = pool[0]
        if not 1 <= target <= 10 * self.config.largest or target in numbers:
            return None
        solution = solution[1:-1]
        steps.append(f"{solution}={target}")
        shown = ", ".join(map(str, sorted(numbers)))
        question = (
            f"Use each of the numbers {shown} exactly once, with + - * / and parentheses, to make {target}."
            if self.config.language == "en"
            else f"用 {shown.replace(', ', '、')} 这些数各一次，通过 + - * / 和括号得到 {target}。"
        )
        return Prompt(
            id=f"countdown:{'-'.join(map(str, sorted(numbers)))}={target}",
            messages=user(question),
            answer=solution,
            data={"numbers": sorted(numbers), "target": target, "steps": ";".join(steps)},
        )


# -- a small exact calculator ----------------------------------------------------------------------------------------

_TOKEN = re.compile(r"\s*(?:(\d{1,9})|([-+*/()]))")
_SIGNS = str.maketrans("×·÷−＋－＊／（）", "**/-+-*/()") | {ord("x"): "*"}
MAX_LENGTH = 100
"""Longer answers are none; it also bounds how deep the parser recurses."""


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """(exact value, the numbers written in it) of an expression of whole numbers, + - * / and parentheses.

    Raises:
        ValueError: it is something else. ZeroDivisionError: it divides by zero.

    >>> evaluate("(7 - 3) / 2")
    (Fraction(2, 1), [7, 3, 2])
    """
    text = expression.translate(_SIGNS).replace(r"\times", "*").replace(r"\cdot", "*").replace(r"\div", "/").strip(" $")
    tokens: list[str] = []
    end = 0
    while end < len(text):
        match = _TOKEN.match(text, end)
        if match is None or len(text) > MAX_LENGTH:
            raise ValueError(f"no arithmetic expression: {expression[:40]!r}")
        tokens.append(match.group(1) or match.group(2))
        end = match.end()
    parser = _Parser(tokens)
    value = parser.sum()
    if parser.tokens:
        raise ValueError(f"no arithmetic expression: {expression[:40]!r}")
    return value, [int(t) for t in tokens if t.isdigit()]


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens[::-1]

    def _take(self, wanted: str) -> str | None:
        return self.tokens.pop() if self.tokens and self.tokens[-1] in wanted else None

    def sum(self) -> Fraction:
        value = self._product()
        while operator := self._take("+-"):
            value = value + self._product() if operator == "+" else value - self._product()
        return value

    def _product(self) -> Fraction:
        value = self._atom()
        while operator := self._take("*/"):
            value = value * self._atom() if operator == "*" else value / self._atom()
        return value

    def _atom(self) -> Fraction:
        if self._take("-"):
            return -self._atom()
        if self._take("("):
            value = self.sum()
            if not self._take(")"):
                raise ValueError("a parenthesis is not closed")
            return value
        if self.tokens and self.tokens[-1].isdigit():
            return Fraction(self.tokens.pop())
        raise ValueError("a number is missing")
