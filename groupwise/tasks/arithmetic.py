"""Sums, differences and products with worked columns: made here, as hard as wanted, with cold-start traces.

A trace is short and every step of it is a true equation, written in the order in which a left-to-right model can find
it. 37+48: `7+8=15;3+4+1=8` and the answer 85.
"""

from __future__ import annotations

import random
from typing import Annotated, Literal

from pydantic import Field, model_validator

from groupwise.chat import render_response
from groupwise.schema import Many, Strict
from groupwise.tasks.base import Seed, Split, assistant, draw_split, user
from groupwise.types import Example, Prompt

Operator = Literal["+", "-", "*"]
_CHINESE = {"+": "加", "-": "减", "*": "乘以"}


class ArithmeticConfig(Strict):
    """Problems over whole numbers of up to `digits` digits."""

    kind: Literal["arithmetic"]
    digits: Annotated[int, Field(ge=1, le=12)] = 2
    """Most digits of an operand."""
    min_digits: Annotated[int, Field(ge=1, le=12)] = 1
    """Fewest digits of an operand; operands are uniform over all whole numbers of that many to `digits` digits."""
    operators: Annotated[Many[Operator], Field(min_length=1)] = ("+",)
    """One is drawn per problem."""
    terms: Annotated[int, Field(ge=2, le=8)] = 2
    """Operands per problem."""
    language: Literal["plain", "en", "zh"] = "plain"
    """`37+48`, `What is 37 + 48?` or `37 加 48 等于多少？`"""

    @model_validator(mode="after")
    def _is_possible(self) -> ArithmeticConfig:
        if self.min_digits > self.digits:
            raise ValueError(f"min_digits must be at most digits {self.digits}, got {self.min_digits}")
        if "*" in self.operators and self.terms > 2:
            raise ValueError(f"terms must be 2 with operator '*', got {self.terms}")
        return self


class Arithmetic:
    """See the module; `verify` is None: answers are compared with the exact result."""

    verify = None

    def __init__(self, config: ArithmeticConfig) -> None:
        self.config = config

    def sample(self, n: int, seed: Seed, split: Split = "train") -> list[Prompt]:
        return draw_split(self._draw, n, seed, split)

    def traces(self, n: int, seed: Seed) -> list[Example]:
        return [
            Example(assistant(p, render_response(reasoning(p), str(p.answer))), {"task": "arithmetic", "prompt": p.id})
            for p in self.sample(n, seed)
        ]

    def _draw(self, rng: random.Random) -> Prompt:
        cfg = self.config
        operator = rng.choice(cfg.operators)
        least = 0 if cfg.min_digits == 1 else 10 ** (cfg.min_digits - 1)
        operands = [rng.randrange(least, 10**cfg.digits) for _ in range(cfg.terms)]
        return Prompt(
            id="arithmetic:" + operator.join(map(str, operands)),
            messages=user(_question(operands, operator, cfg.language)),
            answer=str(_result(operands, operator)),
            data={"operands": operands, "operator": operator},
        )


def reasoning(prompt: Prompt) -> str:
    """The worked steps of a problem, `;` between them; at least two, all true.

    >>> reasoning(Prompt("", (), data={"operands": [52, 37], "operator": "-"}))
    '12-7=5;5-1-3=1'
    """
    first, *rest = prompt.data["operands"]
    work = {"+": _add, "-": _subtract, "*": _multiply}[prompt.data["operator"]]
    steps: list[str] = []
    for operand in rest:
        steps += work(first, operand)
        first = _result([first, operand], prompt.data["operator"])
    return ";".join(steps)


def _question(operands: list[int], operator: Operator, language: str) -> str:
    if language == "en":
        return f"What is {f' {operator} '.join(map(str, operands))}?"
    if language == "zh":
        return f"{f' {_CHINESE[operator]} '.join(map(str, operands))} 等于多少？"
    return operator.join(map(str, operands))


def _result(operands: list[int], operator: Operator) -> int:
    first, *rest = operands
    for x in rest:
        first = first + x if operator == "+" else first - x if operator == "-" else first * x
    return first


def _columns(a: int, b: int) -> list[tuple[int, int]]:
    """Digits of both numbers from the right, the shorter padded with zeros; at least two columns."""
    width = max(len(str(a)), len(str(b)), 2)
    return list(zip(*(map(int, reversed(str(x).zfill(width))) for x in (a, b)), strict=True))


def _add(a: int, b: int) -> list[str]:
    steps, carry = [], 0
    for place, (x, y) in enumerate(_columns(a, b)):
        total = x + y + carry
        steps.append(f"{x}+{y}+{carry}={total}" if place else f"{x}+{y}={total}")
        carry = total // 10
    return steps


def _subtract(a: int, b: int) -> list[str]:
    """Column by column, borrowing ten where needed. Below zero: the other way round, then negated."""
    if a < 0:  # -5 - 3 = -(5 + 3)
        return [*_add(-a, b), f"-({-a}+{b})={a - b}"]
    if a < b:
        return [*_subtract(b, a), f"-({b}-{a})={a - b}"]
    steps, borrow = [], 0
    for place, (x, y) in enumerate(_columns(a, b)):
        lent = 10 if x - borrow - y < 0 else 0
        difference = x + lent - borrow - y
        steps.append(f"{x + lent}-{borrow}-{y}={difference}" if place else f"{x + lent}-{y}={difference}")
        borrow = 1 if lent else 0
    return steps


def _multiply(a: int, b: int) -> list[str]:
    """One product per digit of a factor, then their running sum.

    Of two digits: one time less, then once more, since a step and its mirror (7*7=49 twice) would be a single step.
    """
    if a < 10 and b < 10:
        less = max(b - 1, 0)
        return [f"{a}*{less}={a * less}", f"{a * less}+{a}*{b - less}={a * b}"]
    if b < 10:
        a, b = b, a
    parts = [int(digit) * 10**place for place, digit in enumerate(reversed(str(b)))]
    steps = [f"{a}*{part}={a * part}" for part in parts]
    total = a * parts[0]
    for part in parts[1:]:
        steps.append(f"{total}+{a * part}={total + a * part}")
        total += a * part
    return steps
