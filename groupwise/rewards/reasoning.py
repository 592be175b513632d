r"""Whether the reasoning is one: at least two different steps that say something, and no false arithmetic.

A step is a line, a sentence or a `;`-separated clause. It says something if it relates two different sides (`=`, `<`,
...) or makes a statement of three different words or numbers, connectives such as "first" or "therefore" not counted.

Arithmetic is read conservatively: a statement is judged only where both sides of an `=` are complete arithmetic on
numbers. What touches an unknown (`2x + 3 = 7`), continues a phrase (`half of 10 = 5`) or goes on behind it
(`17 / 5 = 3 remainder 2`) is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise

from groupwise.chat import split_response
from groupwise.rewards._arithmetic import NotArithmeticError, TooLargeError, evaluate, half_unit
from groupwise.rewards._notation import plain_characters
from groupwise.types import Prompt

MIN_STEPS = 2
MIN_CONTENT = 3
"""So many different words and numbers make a statement; Chinese characters count by the pair."""

CONTEXT = 40
"""Characters before and behind a statement that can say that it is no whole statement."""

_STEP_END = re.compile(r"[\n;]|[.?](?=\s|$)|!(?=\s+[A-Z]|\s*$)|,(?=[^,=\n]*=)")
_STEP_NUMBER = re.compile(
    r"\s*(?:(?:step|步骤)\s*\d*\s*[:.)]?\s*|\(?\d{1,2}[.)](?=\s)|\(\d{1,2}\)|[-*](?=\s))\s*", re.IGNORECASE
)
_RELATION = re.compile(r"<=|>=|!=|[=<>≈≡≠≤≥]")
_CONTENT = re.compile(r"[A-Za-z]+|\d+(?:\.\d+)?|[\u4e00-\u9fff]{2}")
_CONNECTIVES = {
    "a", "an", "and", "answer", "because", "by", "conclude", "conclusion", "finally", "first", "firstly", "hence",
    "hmm", "i", "in", "is", "it", "last", "lastly", "let", "lets", "me", "my", "next", "now", "of", "ok", "okay",
    "reason", "reasoning", "second", "secondly", "since", "so", "solution", "solve", "step", "steps", "that", "the",
    "then", "therefore", "think", "thinking", "third", "thirdly", "this", "thus", "to", "wait", "we", "well", "首先",
    "然后", "因此", "所以", "最后", "接着", "于是", "其次", "因为", "第一", "第二", "第三", "步骤", "思考", "推理",
    "答案", "接下", "从而", "综上", "结论",
}  # fmt: skip

_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,])")
_RUN = re.compile(r"(?:[\d\s.+\-*/^()=%]|\\(?:frac|times|cdot|div)(?![A-Za-z])|[{}])+")
_ATTACHED_BEFORE = re.compile(r"[A-Za-z0-9_\\\]√|°'^:]$")
_ATTACHED_AFTER = re.compile(r"[A-Za-z0-9_\\\[√|°^:…!]")
_OPEN_PHRASE = re.compile(
    r"(?:\b(?:of|by|than|from|to|root|log|ln|sin|cos|tan|mod|half|double|twice|triple|plus|minus|times|over|per|[A-Za-z])"
    r"|[的乘加减除以比倍模])\s*$",
    re.IGNORECASE,
)
_CONTINUES = re.compile(r"\s*(?:(?:remainder|rem|mod|r|plus|minus|times|divided|over)\b|余)", re.IGNORECASE)


def reasoning_reward(prompt: Prompt, response: str) -> float:
    """1.0 for at least two different real steps without a false arithmetic statement in the reasoning; else 0.0.

    >>> question = Prompt.of("27 + 48 = ?")
    >>> reasoning_reward(question, "<think>7+8=15;2+4+1=7;</think><answer>75</answer>")
    1.0
    >>> reasoning_reward(question, "<think>7+8=14;2+4+1=7;</think><answer>74</answer>")
    0.0
    >>> reasoning_reward(question, "<think>First, then, therefore.</think><answer>75</answer>")
    0.0
    """
    reasoning = split_response(response).reasoning
    if reasoning is None:
        return 0.0
    steps = list(_steps(reasoning))
    different = {_essence(step) for step in steps if _is_real(step)}
    return float(len(different) >= MIN_STEPS and not any(map(_has_false_arithmetic, steps)))


def _steps(reasoning: str) -> Iterator[str]:
    text = _THOUSANDS.sub(lambda m: m[0].replace(",", ""), plain_characters(reasoning))
    text = text.replace("$", "").replace("**", "").replace(r"\(", " ").replace(r"\)", " ")
    for piece in _STEP_END.split(text):
        step = _STEP_NUMBER.sub("", piece, count=1) if _STEP_NUMBER.match(piece) else piece
        if step.strip():
            yield step.strip()


def _essence(step: str) -> str:
    """What makes two steps the same one: their letters, digits and signs, without case and spaces."""
    return re.sub(r"[\s.,:]", "", step).casefold()


def _is_real(step: str) -> bool:
    sides = [_essence(side) for side in _RELATION.split(step)]
    if any(a != b and any(map(str.isalnum, a)) and any(map(str.isalnum, b)) for a, b in pairwise(sides)):
        return True
    content = {word.casefold() for word in _CONTENT.findall(step)} - _CONNECTIVES
    return len(content) >= MIN_CONTENT and not all(word[0].isdigit() for word in content)


def _has_false_arithmetic(step: str) -> bool:
    """Whether some `a = b` of the step can be read and is false.

    >>> _has_false_arithmetic("so 3 * 4 = 12 = 2 + 9"), _has_false_arithmetic("10 / 3 = 3.33")
    (True, False)
    """
    for run in _RUN.finditer(step):
        if "=" not in run[0]:
            continue
        before = step[max(0, run.start() - CONTEXT) : run.start()]
        sides = _sides(run[0], before, step[run.end() : run.end() + CONTEXT])
        if any(a and b and not _agree(a, b) for a, b in pairwise(sides)):
            return True
    return False


def _sides(run: str, before: str, after: str) -> list[str | None]:
    """The members of a chain `a = b = c`; `None` for one that is blank or goes on in the text before or after it."""
    sides: list[str | None] = [side.strip() or None for side in run.split("=")]
    first, last = sides[0], sides[-1]
    if first and before:
        starts_with_sign = first[0] in "+*/^%" or (first[0] == "-" and first[1:2].isspace())
        is_attached = not run[0].isspace() and bool(_ATTACHED_BEFORE.search(before))
        is_lone_number = not re.search(r"[+*/^%]|(?<=.)-|\\", first)
        if starts_with_sign or is_attached or is_lone_number or _OPEN_PHRASE.search(before):
            sides[0] = None
    if last and after:
        is_attached = not run[-1].isspace() and bool(_ATTACHED_AFTER.match(after))
        if is_attached or _CONTINUES.match(after):
            sides[-1] = None
    return sides


def _agree(left: str, right: str) -> bool:
    """Equal, or a decimal and the value that it is rounded from; what cannot be read has the benefit of the doubt."""
    try:
        difference = abs(evaluate(left) - evaluate(right))
    except (NotArithmeticError, TooLargeError):
        return True
    return difference <= max(half_unit(left) or Fraction(0), half_unit(right) or Fraction(0))
