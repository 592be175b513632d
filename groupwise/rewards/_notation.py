r"""One notation for answers: full-width forms, Unicode mathematics, Markdown and LaTeX layout all written one way.

`tidy` keeps the meaning and drops the dress: `$\dfrac12$.` and `\frac{1}{2}` become the same text. It computes nothing.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

_INVISIBLE = (*range(9), *range(11, 32), 0x7F, *range(0x200B, 0x200E), 0x2060, 0xFEFF)
_CHARACTERS = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | dict.fromkeys(_INVISIBLE, "")
_CHARACTERS |= {ord(c): r for c, r in {"，": ", ", "、": ", ", "。": ". ", "：": ": ", "￥": "¥"}.items()}
_CHARACTERS |= {ord(c): "-" for c in "−–—‐‑﹣"}
_CHARACTERS |= {ord(c): "*" for c in "×·⋅∙✕"} | {ord("÷"): "/"}
_CHARACTERS |= {ord(c): "'" for c in "‘’′"} | {ord(c): '"' for c in "“”"}
_UNICODE_MATHS = {
    ord(c): f"\\{name} "
    for c, name in {
        "π": "pi", "∞": "infty", "≤": "le", "≥": "ge", "≠": "ne", "∪": "cup", "∩": "cap", "∈": "in", "±": "pm",
        "√": "sqrt", "∅": "emptyset", "…": "ldots", "θ": "theta", "α": "alpha", "β": "beta",
    }.items()
}  # fmt: skip
_UNICODE_MATHS |= {
    ord(c): r for c, r in {"²": "^2", "³": "^3", "½": r"\frac12", "¼": r"\frac14", "¾": r"\frac34"}.items()
}

_WRAPPERS = "boxed|fbox|text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|operatorname|bold|bm"
_WRAPPER = re.compile(rf"\\(?:{_WRAPPERS})\s*\{{")
_SYNONYMS = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "leq": "le", "leqslant": "le", "geq": "ge", "geqslant": "ge",
    "neq": "ne", "dots": "ldots", "cdots": "ldots", "varnothing": "emptyset", "lbrace": "{", "rbrace": "}",
    "degree": "circ", "lor": "text{ or }",
}  # fmt: skip
_LAYOUT = re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits|rm|bf|it)(?![A-Za-z])|\\!")
_REWRITES = [
    (re.compile(r"(?<=\d)\{,\}(?=\d{3})"), ","),  # 12{,}345
    (re.compile(r"(?<=\d)(?:\\[,;: ]|[\u2009\u202f\u00a0])(?=\d{3}(?!\d))"), ""),  # 1\,000\,000
    (re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])|~"), " "),
    (re.compile(r"(?<!\\)\\[()\[\]]"), " "),  # \( \) \[ \]
    (re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?"), "°"),
    (re.compile(r"(?<![\w)*])\*\*(?=\S)([^*\n]+)\*\*(?![\w(])"), r"\1"),  # bold, not a power
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\\([%#&])"), r"\1"),
    (re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])"), r"\\pi"),
    (re.compile(r"(?<![A-Za-z\\])(?:infinity|inf|oo)(?![A-Za-z])"), r"\\infty"),
    (re.compile(r"(?<![A-Za-z\\])(sin|cos|tan|ln|log|exp)(?=\s*[(\d\\])"), r"\\\1"),
    (re.compile(r"<="), r"\\le "),
    (re.compile(r">="), r"\\ge "),
    (re.compile(r"!="), r"\\ne "),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*(\d)\s*\{"), r"\\frac{\1}{"),
    (re.compile(r"(\\frac\s*\{[^{}]*\})\s*(\d)"), r"\1{\2}"),
    (re.compile(r"\\sqrt\s*(\[[^\[\]]*\])?\s*(\d+|[A-Za-z])"), r"\\sqrt\1{\2}"),
    (re.compile(r"\\mathbb\s*([A-Z])"), r"\\mathbb{\1}"),
    (re.compile(r"\^(-?\d{2,})"), r"^{\1}"),  # plain x^10, which LaTeX would read as x^1 0
    (re.compile(r"\s*([\^_])\s*"), r"\1"),
    (re.compile(r"\s+"), " "),
]


def plain_characters(text: str) -> str:
    """Full-width and typographic characters as ASCII, control characters left out; commas of lists keep a space.

    >>> plain_characters("１２，３４ − ５ × ６")
    '12, 34 - 5 * 6'
    """
    return text.translate(_CHARACTERS)


def tidy(text: str) -> str:
    r"""Write an answer in the one notation that the comparisons read.

    >>> tidy(r"$\dfrac12$."), tidy("**７３**"), tidy(r"35\,\text{cm}^{2}"), tidy("90^{\\circ}")
    ('\\frac{1}{2}', '73', '35 cm^{2}', '90°')
    """
    text = plain_characters(unicodedata.normalize("NFC", text)).translate(_UNICODE_MATHS)
    text = _LAYOUT.sub("", text)
    text = re.sub(r"\\([A-Za-z]+)", lambda m: "\\" + _SYNONYMS.get(m[1], m[1]), text)
    text = _unwrap(text)
    text = _without_dollars(text)
    text = _call_to_braces(text, re.compile(r"(?:\\sqrt|(?<![A-Za-z\\])sqrt)\s*\("), r"\sqrt{")
    text = _call_to_braces(text, re.compile(r"\^\s*\("), "^{")
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text.strip(' `"').rstrip(".,;: ").strip()


def closing_brace(text: str, start: int) -> int | None:
    r"""Index of the `}` that closes the group whose content begins at `start`; escaped braces do not count.

    >>> closing_brace(r"\frac{1}{2^{3}} }", 9), closing_brace(r"{\{1, 2", 1)
    (14, None)
    """
    depth, i = 1, start
    while i < len(text):
        if text[i] == "\\":
            i += 1
        elif text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if not depth:
                return i
        i += 1
    return None


def split_top(text: str, separator: re.Pattern[str]) -> list[str]:
    r"""Split at the separators that stand outside all brackets.

    >>> split_top(r"(1,2), \{3,4\}", re.compile(","))
    ['(1,2)', ' \\{3,4\\}']
    """
    outside = set(_top_level(text))
    pieces, start = [], 0
    for match in separator.finditer(text):
        if match.start() in outside:
            pieces.append(text[start : match.start()])
            start = match.end()
    return [*pieces, text[start:]]


def _top_level(text: str) -> Iterator[int]:
    """Indices of the characters outside all brackets; brackets of any kind close one another: `[1,3)`."""
    depth = 0
    for i, character in enumerate(text):
        if character in ")]}":
            depth -= 1
        if depth == 0:
            yield i
        if character in "([{":
            depth += 1


def _unwrap(text: str) -> str:
    r"""Open `\text{...}`, `\mathrm{...}`, `\boxed{...}` and their like, innermost last; unclosed ones stay."""
    pieces, position = [], 0
    ends: set[int] = set()
    while match := _WRAPPER.search(text, position):
        pieces.append((position, match.start()))
        position = match.end()
        end = closing_brace(text, position)
        if end is None:
            pieces.append((match.start(), position))
        else:
            ends.add(end)
    pieces.append((position, len(text)))
    kept = "".join("".join(" " if i in ends else text[i] for i in range(a, b)) + " " for a, b in pieces)
    return kept[:-1]


def _without_dollars(text: str) -> str:
    r"""Take out `$` that delimit mathematics; one that stands for money stays."""
    if text.replace(r"\$", "").count("$") % 2 == 0:
        text = re.sub(r"(?<!\\)\$", "", text)
    return text.replace(r"\$", "$")


def _call_to_braces(text: str, opening: re.Pattern[str], replacement: str) -> str:
    """Rewrite `opening ... )` to `replacement ... }`, the bracket matched; unclosed ones stay."""
    while match := opening.search(text):
        depth = 1
        for end in range(match.end(), len(text)):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            if not depth:
                break
        else:
            return text
        text = f"{text[: match.start()]}{replacement}{text[match.end() : end]}}}{text[end + 1 :]}"
    return text
