r"""Finds the final answer in a response, and compares it with the gold answer.

    find("<think>6 * 7</think>The answer is $\\boxed{42}$.") -> "42"         equal("1/2", r"\frac{2}{4}") -> True

Conventions where reasonable people differ:

- Exact values must be exact. A decimal stands for another exact value only if it is that value correctly rounded to at
  least six significant digits: 0.333333 is 1/3, 0.33 is not.
- 28 % is the same answer as 28 and as 0.28. A unit, a currency or a base that one side leaves out does not matter; two
  different units do. A ratio of two numbers is their quotient.
- Sets and bare lists are compared in any order, tuples and intervals in theirs. Boxes that stand side by side are one
  list; otherwise the last box counts, and a box that is never closed is no answer, whatever came before it.
- `x = 5` answers 5, and of a chain `a = b = c` the last member counts. Names are compared without regard to case.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from groupwise.chat import ANSWER, split_response
from groupwise.rewards._arithmetic import NotArithmeticError, TooLargeError, evaluate
from groupwise.rewards._notation import closing_brace, plain_characters, split_top, tidy
from groupwise.rewards._quantities import FUNCTIONS, THOUSANDS, read_quantity, rounding_of
from groupwise.rewards._symbolic import Comparer, ComparisonError

TIME_LIMIT = 2.0
"""Seconds that one comparison may take, not counting the start of a worker process."""
MAX_LENGTH = 1_000
"""Longer answers are compared as text only."""
MAX_ITEMS = 50
"""Longer lists are compared as text only."""


# -- finding ---------------------------------------------------------------------------------------------------------


def find(response: str, style: str = "auto") -> str | None:
    r"""The final answer as it is written in the conclusion of a response, or `None`; reasoning is never searched.

    Styles: `boxed` (`\boxed{}`, `\fbox{}`), `answer-tag` (`<answer>`), `hash` (the line after `####`), `answer-line`
    (`Answer: `, `The answer is `, `答案：`, `答案是`), `choice` (a letter A-J), `last-line`, `code` (the last fenced
    block), and `auto`: the first of answer-tag, boxed, hash and answer-line whose mark is there, even if unfinished;
    with no mark at all, a conclusion that is nothing but one value. Boxes inside an answer of any style are opened.

    A made-up next question (a line that begins with `Question:`) and all behind it is ignored once there is an answer.

    Raises:
        ValueError: the style is unknown.

    >>> find(r"It is \boxed{\frac{1}{2}}."), find("<think>\\boxed{4}</think> So it is."), find("#### 1,080", "hash")
    ('\\frac{1}{2}', None, '1,080')
    """
    if style not in _FINDERS:
        raise ValueError(f"answer style must be one of {', '.join(STYLES)}, got {style!r}")
    conclusion = split_response(response).conclusion
    next_question = _NEXT_QUESTION.search(conclusion)
    if next_question and (answer := _FINDERS[style](conclusion[: next_question.start()])) is not None:
        return answer
    return _FINDERS[style](conclusion)


_NEXT_QUESTION = re.compile(
    r"^[ \t#*]*(?:question|problem|q|user|human|问题|问|题目)[ \t\d]*[:：]", re.IGNORECASE | re.MULTILINE
)
_BOX = re.compile(r"\\f?boxed\s*\{|\\fbox\s*\{")
_BETWEEN_BOXES = re.compile(r"(?:[\s$,，、;；]|\\[()\[\]]|and|or|和|或)*")
_HASH = re.compile(r"####(.*)")
_ANSWER_LINE = re.compile(
    r"(?:answer|答案)(?:\s*\*\*)?\s*(?:is\s*[:：]?|(?:应该|应当)?[是为]\s*[:：]?|[:：])|final answer\s*\*\*",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"(?:(?<=[\d)}\]$%*])|(?<=\w{4}))\.(?=\s|$)|。")
_CHOICE = re.compile(r"\s*(?:\(([A-Ja-j])\)\s*.*|([A-J])\s*(?:[.):、]\s*.*)?|([a-j]))\s*", re.DOTALL)
_LETTER = re.compile(r"\(?([A-Ja-d])[.):]?")
_CHOSEN = re.compile(r"\(([A-J])\)|(?:选择?|option|choice)\s*[:：]?\s*([A-J])(?![A-Za-z])", re.IGNORECASE)
_CODE_BLOCK = re.compile(r"^```[^\n`]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _clean(text: str) -> str | None:
    return text.strip() or None


def _find_boxed(text: str) -> str | None:
    boxes: list[tuple[int, int, str]] = []
    position = 0
    while match := _BOX.search(text, position):
        end = closing_brace(text, match.end())
        if end is None:
            return None
        boxes.append((match.start(), end + 1, _opened(text[match.end() : end]) or ""))
        position = end + 1
    if not boxes:
        return None
    start, _, answer = boxes.pop()
    answers = [answer]
    while boxes and _BETWEEN_BOXES.fullmatch(text, boxes[-1][1], start):
        start, _, answer = boxes.pop()
        answers.insert(0, answer)
    return _clean(", ".join(dict.fromkeys(answers)))


def _opened(answer: str) -> str | None:
    """The content of the box in a found answer; the answer itself without one."""
    return _find_boxed(answer) if _BOX.search(answer) else _clean(answer)


def _find_answer_tag(text: str) -> str | None:
    answer = split_response(text).answer
    return None if answer is None else _opened(answer)


def _find_hash(text: str) -> str | None:
    lines = _HASH.findall(text)
    return _opened(lines[-1]) if lines else None


def _find_answer_line(text: str) -> str | None:
    """What follows the last mark: the rest of its line up to the end of the sentence, or else the next line."""
    *_, mark = [None, *_ANSWER_LINE.finditer(text)]
    if mark is None:
        return None
    after = text[mark.end() :]
    if _BOX.search(after):
        return _find_boxed(after)
    line = next((line for line in after.splitlines() if line.strip(" \t*")), "")
    return _opened(_SENTENCE_END.split(line, maxsplit=1)[0].strip(" \t*"))


def _find_choice(text: str) -> str | None:
    answer = _find_auto(text)
    if answer is not None and (letter := _choice(tidy(answer[:MAX_LENGTH]))):
        return letter
    chosen = _CHOSEN.findall(plain_characters(_find_last_line(text) or ""))
    return "".join(chosen[-1]).upper() if chosen else None


def _find_last_line(text: str) -> str | None:
    lines = [line for line in text.splitlines() if line.strip()]
    return _opened(lines[-1]) if lines else None


def _find_code(text: str) -> str | None:
    blocks = _CODE_BLOCK.findall(text)
    return blocks[-1] if blocks else None


def _find_auto(text: str) -> str | None:
    if ANSWER in text:
        return _find_answer_tag(text)
    if _BOX.search(text):
        return _find_boxed(text)
    if _HASH.search(text):
        return _find_hash(text)
    if _ANSWER_LINE.search(text):
        return _find_answer_line(text)
    return _clean(text) if _is_one_value(text.strip()) else None


def _is_one_value(text: str) -> bool:
    """One word, or one number with its unit."""
    if not re.search(r"\s", text):
        return True
    try:
        return len(text) <= MAX_LENGTH and read_quantity(tidy(text)) is not None
    except TooLargeError:
        return True


_FINDERS: dict[str, Callable[[str], str | None]] = {
    "auto": _find_auto,
    "boxed": _find_boxed,
    "answer-tag": _find_answer_tag,
    "hash": _find_hash,
    "answer-line": _find_answer_line,
    "choice": _find_choice,
    "last-line": _find_last_line,
    "code": _find_code,
}
STYLES = tuple(_FINDERS)


# -- comparing -------------------------------------------------------------------------------------------------------


def equal(gold: str, answer: str) -> bool | None:
    r"""Whether an answer equals the gold answer; `None` if the gold cannot be read, or could not be compared in time.

    An answer that cannot be read is `False`, whatever the gold. Never raises, and comes back within `TIME_LIMIT` and
    the time to start a worker process, from any thread.

    >>> equal("1234", "1,234"), equal("1/2", "0.5"), equal("3, -3", r"\pm 3"), equal("7", "8"), equal("", "8")
    (True, True, True, False, None)
    """
    try:
        return _equal(gold, answer)
    except ComparisonError as failure:
        return False if failure.gold_read else None


@lru_cache(maxsize=16_384)
def _equal(gold: str, answer: str) -> bool | None:
    """`equal`, remembered: the samples of a group give the same few answers. Failures are raised, so not remembered."""
    if max(len(gold), len(answer)) > MAX_LENGTH:
        return _text(gold) == _text(answer)
    gold, answer = tidy(gold), tidy(answer)
    if not _is_readable(answer):
        return False
    if not _is_readable(gold):
        return None
    return _same(gold, answer, Comparer(TIME_LIMIT))


def _is_readable(text: str) -> bool:
    """Something is written there, and it is not cut off inside braces."""
    has_content = any(c.isalnum() for c in text)
    return has_content and closing_brace(text + "}", 0) == len(text)


def _same(gold: str, answer: str, comparer: Comparer) -> bool:
    """Tidied texts compared by the first reading that fits both."""
    if _text(gold) == _text(answer):
        return True
    gold, answer = _without_name(gold, answer)
    if match := _LETTER.fullmatch(gold):
        return _choice(answer) == match[1].upper()
    try:
        gold_quantity = read_quantity(gold)
    except TooLargeError as error:
        raise ComparisonError("the gold has more digits than are ever computed") from error
    try:
        answer_quantity = read_quantity(answer)
    except TooLargeError:
        return False
    if gold_quantity and answer_quantity:
        return gold_quantity.same(answer_quantity) or _same_collection(gold, answer, comparer) is True
    for compare in (_same_ratio, _same_base):
        if (verdict := compare(gold, answer)) is not None:
            return verdict
    for read_deeper in (_same_matrix, _same_collection):
        if (deeper := read_deeper(gold, answer, comparer)) is not None:
            return deeper
    if _is_prose(gold) or _is_prose(answer):
        return _text(gold).casefold() == _text(answer).casefold()
    if gold.count("'") != answer.count("'"):  # math-verify drops the primes of f'(x)
        return False
    tolerance = max(rounding_of(gold), rounding_of(answer))
    return comparer.same(gold, answer, float(tolerance))


# Text, names and choices.


def _text(text: str) -> str:
    r"""The text as compared: no spaces but between digits, and no braces round single scripts (`x_{2}` is `x_2`)."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", re.sub(r"([\^_])\{([A-Za-z0-9])\}", r"\1\2", text))


def _choice(text: str) -> str | None:
    """The letter of an answer such as `B`, `(B)`, `(B) 12` or `B. twelve`."""
    match = _CHOICE.fullmatch(text)
    return "".join(filter(None, match.groups())).upper() if match else None


def _is_prose(text: str) -> bool:
    """Words rather than mathematics: a letters-only text of two letters or more, or words in it of four or more."""
    if re.fullmatch(r"[^\W\d_]{2,}", text):
        return True
    if any(c.isalpha() and not c.isascii() for c in text):
        return True
    words = re.findall(r"[A-Za-z]{4,}", re.sub(r"\\[A-Za-z]+", " ", text))
    return any(word not in FUNCTIONS for word in words)


def _without_name(gold: str, answer: str) -> tuple[str, str]:
    r"""Drop `x =`, `f(x) =`, `x \in` and earlier members of chains, where what is left can be compared.

    Two equations keep their names, unless they are the same: `x = 5` is not `y = 5`. A gold equation whose left side is
    no name is an equation to be met, not a value. The members of a list are left to be compared one by one.
    """
    if len(_items(gold)) > 1 or len(_items(answer)) > 1:
        return gold, answer
    gold, answer = (re.sub(r"^[A-Za-z]\s*\\in(?![A-Za-z])", "", text).strip() for text in (gold, answer))
    gold_members, answer_members = (split_top(text, _EQUALS) for text in (gold, answer))
    if len(answer_members) > 1 and len(gold_members) == 1:
        return gold, answer_members[-1].strip()
    if len(gold_members) > 1 and len(answer_members) == 1 and _NAME.fullmatch(gold_members[0]):
        return gold_members[-1].strip(), answer
    if len(gold_members) > 1 and _text(gold_members[0]) == _text(answer_members[0]):
        return gold_members[-1].strip(), answer_members[-1].strip()
    return gold, answer


_EQUALS = re.compile(r"(?<![<>!:])=")
_NAME = re.compile(r"\s*\\?[A-Za-z]+(?:_\w|_\{\w+\})?'?\s*(?:\([\w,\s]+\))?\s*")


# Ratios, clock times, numerals in other bases.

_CLOCK = re.compile(r"(?P<hour>\d{1,2}):(?P<rest>[0-5]\d(?::[0-5]\d)?)(?:\s*(?P<half>[ap])\.?\s*m\.?)?", re.IGNORECASE)
_BASE = re.compile(r"(?:\(?([0-9A-Fa-f]+)\)?_(?:\{(\d+)\}|(\d+))|([0-9A-Fa-f]+))")


def _same_ratio(gold: str, answer: str) -> bool | None:
    """`3:30` as a time of day, `2:3` as a quotient, `1:2:3` as proportions; `None` if neither side has a colon."""
    if ":" not in gold + answer:
        return None
    gold_clock, answer_clock = _CLOCK.fullmatch(gold), _CLOCK.fullmatch(answer)
    if gold_clock and answer_clock:
        halves = {clock["half"].lower() for clock in (gold_clock, answer_clock) if clock["half"]}
        same_hour = int(gold_clock["hour"]) == int(answer_clock["hour"])
        return same_hour and gold_clock["rest"] == answer_clock["rest"] and len(halves) <= 1
    gold_terms, answer_terms = _terms(gold), _terms(answer)
    if gold_terms is None or answer_terms is None or len(gold_terms) != len(answer_terms):
        return False
    return all(g * answer_terms[0] == a * gold_terms[0] for g, a in zip(gold_terms, answer_terms, strict=True))


def _terms(text: str) -> list[Fraction] | None:
    """The terms of a ratio; those of a plain number are itself and 1."""
    try:
        terms = [evaluate(part) for part in (text if ":" in text else f"{text}:1").split(":")]
    except (NotArithmeticError, TooLargeError):
        return None
    return terms if all(terms) else None


def _same_base(gold: str, answer: str) -> bool | None:
    """`1101_2`: the numeral is the answer, not its value; the base may be left out. `None` if neither side has one."""
    gold_match, answer_match = _BASE.fullmatch(gold), _BASE.fullmatch(answer)
    if not gold_match or not answer_match or not (gold_match[1] or answer_match[1]):
        return None
    digits = [(m[1] or m[4]).upper() for m in (gold_match, answer_match)]
    bases = {int(m[2] or m[3]) for m in (gold_match, answer_match) if m[1]}
    if not all(2 <= base <= 16 and int(max(numeral), 16) < base for base in bases for numeral in digits):
        return None  # an index, as in A_1
    return digits[0] == digits[1] and len(bases) == 1


# Matrices, lists, sets, tuples, intervals and unions.

_MATRIX = re.compile(
    r"\\begin\{[pbvBV]?(?:matrix|array)\}(?:\{[clr|]+\})?(.*)\\end\{[pbvBV]?(?:matrix|array)\}", re.DOTALL
)
_ITEM_SEPARATOR = re.compile(
    r"[,;]?\s*(?:(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|或者|或|和|以及|及)\s*|\s*[,;]\s*|\\cup(?![A-Za-z])"
)
_SET_BY_RELATION = re.compile(r"[<>]|\\(?:le|ge|in|lt|gt|mathbb)(?![A-Za-z])")


@dataclass(frozen=True, slots=True)
class _Collection:
    """`brackets` is one of `()`, `[]`, `[)`, `(]`, `{}` (a set), `cup` (a union), or nothing: a bare list."""

    brackets: str
    items: tuple[str, ...]

    @property
    def is_ordered(self) -> bool:
        return self.brackets[:1] in ("(", "[")


def _same_matrix(gold: str, answer: str, comparer: Comparer) -> bool | None:
    """Matrices entry by entry, whatever their brackets; `None` if neither side is one."""
    matches = [_MATRIX.fullmatch(text) for text in (gold, answer)]
    if not any(matches):
        return None
    if not all(matches):
        return False
    rows = [[row.split("&") for row in re.split(r"\\\\", m[1].strip().removesuffix("\\\\"))] for m in matches if m]
    if [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
        return False
    entries = [[entry.strip() for row in matrix for entry in row] for matrix in rows]
    return all(_same(g, a, comparer) for g, a in zip(*entries, strict=True))


def _same_collection(gold: str, answer: str, comparer: Comparer) -> bool | None:
    """Lists, sets, tuples, intervals and unions item by item; `None` where only the symbolic comparison can tell."""
    gold_items, answer_items = _read_collection(gold), _read_collection(answer)
    if gold_items is None and answer_items is None:
        return None
    if gold_items is None or answer_items is None:
        return None if _SET_BY_RELATION.search(answer if answer_items is None else gold) else False
    brackets = {gold_items.brackets, answer_items.brackets}
    if len(brackets) == 2 and not (brackets & {""} and brackets & {"()", "[]", "{}", "cup"}):
        return False
    if len(gold_items.items) != len(answer_items.items) or len(gold_items.items) > MAX_ITEMS:
        return False
    if gold_items.is_ordered or answer_items.is_ordered:
        pairs = zip(gold_items.items, answer_items.items, strict=True)
        return all(_same(g, a, comparer) for g, a in pairs)
    unmatched = list(answer_items.items)
    for item in gold_items.items:
        found = next((i for i, other in enumerate(unmatched) if _same(item, other, comparer)), None)
        if found is None:
            return False
        del unmatched[found]
    return True


def _read_collection(text: str) -> _Collection | None:
    r"""Read a list of two items or more, a set, a tuple, an interval or a union; `\pm a` is the list `a, -a`."""
    if (match := re.fullmatch(r"([^,;]*)\\pm\s*([^,;]+)", text)) and not _SET_BY_RELATION.search(text):
        return _Collection("", (f"{match[1]}+{match[2]}".lstrip("+"), f"{match[1]}-{match[2]}"))
    unions = split_top(text, re.compile(r"\\cup(?![A-Za-z])"))
    if len(unions) > 1:
        return _Collection("cup", tuple(part.strip() for part in unions))
    if len(items := _items(text)) > 1:
        return _Collection("", items)
    if (match := re.fullmatch(r"\\\{(.*)\\\}", text)) is not None:
        return _Collection("{}", _items(match[1]))
    if (match := re.fullmatch(r"([(\[])(.*)([)\]])", text)) and len(items := _items(match[2])) > 1:
        return _Collection(match[1] + match[3], items)
    return None


def _items(text: str) -> tuple[str, ...]:
    """Items at top level. A comma that may group thousands separates only if no other comma plainly does."""
    if re.search(r",\s", text):
        text = THOUSANDS.sub(lambda m: m[0].replace(",", ""), text)
    return tuple(item for part in split_top(text, _ITEM_SEPARATOR) if (item := part.strip()))
