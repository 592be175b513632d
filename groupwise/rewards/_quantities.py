"""Numbers as people write them: with units, currencies, percent signs, thousands marks and number words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from groupwise.rewards._arithmetic import NotArithmeticError, evaluate, half_unit

MIN_SIGNIFICANT_DIGITS = 6
"""A decimal with fewer is not taken for the rounding of another exact value."""
FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "log", "ln", "exp", "sqrt", "min", "max",
    "gcd", "lcm", "mod", "det",
}  # fmt: skip
"""Words that are mathematics."""

_CURRENCIES = {"$": "dollar", "US$": "dollar", "¥": "yuan", "€": "euro", "£": "pound", "₹": "rupee"}
_CURRENCY = re.compile(r"([+-]?)\s*(US\$|[$¥€£₹])\s*")
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALES |= {"百": 10**2, "千": 10**3, "万": 10**4, "亿": 10**8}
_PERCENT = re.compile(r"\s*(?:%|percent(?:age)?|per cent|pct)$", re.IGNORECASE)
_ATTACHED_UNITS = {
    "mm", "cm", "dm", "km", "nm", "mg", "kg", "ml", "mL", "kmh", "mph", "Hz", "kHz", "kW", "kWh", "hr", "hrs",
    "ft", "lb", "lbs", "oz", "usd", "USD",
}  # fmt: skip
_LETTER_UNITS = set("mgshLlNJWVACKF")
_NOT_UNITS = FUNCTIONS - {"min"} | {
    "and", "or", "is", "are", "was", "not", "but", "if", "so", "then", "than", "of", "over", "plus", "minus", "times",
    "to", "by", "from", "pi", "less", "more", "in", "on", "for",
}  # fmt: skip
_UNIT_NAMES = {
    "°": "degree", "deg": "degree", "cm": "centimeter", "m": "meter", "km": "kilometer", "kg": "kilogram", "g": "gram",
    "usd": "dollar", "元": "yuan", "rmb": "yuan", "feet": "foot", "ft": "foot", "inches": "inch", "h": "hour",
    "hr": "hour", "s": "second", "sec": "second", "min": "minute", "米": "meter", "厘米": "centimeter",
}  # fmt: skip
_UNIT = re.compile(
    r"(?<![\\A-Za-z])(?:(?:hundred|thousand|million|billion|trillion) |[百千万亿])?"
    r"(?P<words>°\s*[CF]?|[A-Za-z][A-Za-z ./]{0,40}|[\u4e00-\u9fff]{1,8})(?P<power>\^\{?-?\d\}?)?$"
)
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])|(?<![\d.])\d{1,3}(?: \d{3})+(?![\d ])")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number, how far it may have been rounded (0: exact), and what it counts."""

    value: Fraction
    rounding: Fraction
    is_percent: bool
    unit: str

    def same(self, other: Quantity) -> bool:
        if self.unit and other.unit and self.unit != other.unit:
            return False
        if self.is_percent == other.is_percent:
            return self.near(other)
        percent, number = (self, other) if self.is_percent else (other, self)
        fraction = Quantity(percent.value / 100, percent.rounding / 100, False, percent.unit)
        return percent.near(number) or fraction.near(number)

    def near(self, other: Quantity) -> bool:
        # Two decimals are two exact numbers; only against a fraction can a decimal be meant as its rounding.
        either_is_exact = not (self.rounding and other.rounding)
        slack = max(self.rounding, other.rounding) if either_is_exact else 0
        return abs(self.value - other.value) <= slack


def read_quantity(text: str) -> Quantity | None:
    r"""Read a number in any usual dress: `\$1,250.00`, `28 %`, `11\frac{5}{6}`, `36 cm^{2}`, `3 million`, `12个`.

    Raises:
        TooLargeError: the text is a number too large to compute.

    >>> read_quantity(r"36 cm^{2}")
    Quantity(value=Fraction(36, 1), rounding=Fraction(0, 1), is_percent=False, unit='centimeter^2')
    """
    unit = ""
    if match := _CURRENCY.match(text):
        unit = _CURRENCIES[match[2]]
        text = match[1] + text[match.end() :]
    if text.startswith("百分之"):
        text = text.removeprefix("百分之") + "%"
    text, is_percent = _PERCENT.subn("", text)
    if not is_percent and (match := _UNIT.search(text)) and (name := _unit_name(match, text)):
        unit, text = name, text[: match.start("words")].rstrip()
    scale = 1
    for word, factor in _SCALES.items():
        if text.endswith(word):
            text, scale = text.removesuffix(word).rstrip(), factor
            break
    text = THOUSANDS.sub(lambda m: re.sub("[, ]", "", m[0]), text)
    try:
        return Quantity(evaluate(text) * scale, rounding_of(text), bool(is_percent), unit)
    except NotArithmeticError:
        return None


def _unit_name(match: re.Match[str], text: str) -> str | None:
    """The unit at the end of a text in one spelling (`square cm` as `centimeter^2`), or `None` if it is none."""
    power = re.sub(r"[\^{}]", "", match["power"] or "")
    words = match["words"].strip(" .").split()
    is_spaced = text[: match.start("words")].endswith(" ")
    if words and words[0] in ("square", "sq", "cubic"):
        power = "3" if words.pop(0) == "cubic" else "2"
    is_one_unit = len(words) == 1 or (len(words) == 3 and words[1] == "per")  # more words would be a sentence
    if not is_one_unit or match.start() == 0 or words[0] in _SCALES:
        return None
    if not words[0].isascii() or words[0][0] == "°":
        return _UNIT_NAMES.get(words[0], words[0])
    if any(word.lower() in _NOT_UNITS or (len(word) == 1 and word not in _LETTER_UNITS) for word in words):
        return None
    if not is_spaced and words[0] not in _ATTACHED_UNITS:
        return None
    singular = [_UNIT_NAMES.get(w.lower(), w.lower().removesuffix("s") if len(w) > 2 else w.lower()) for w in words]
    return " ".join(singular) + (f"^{power}" if power else "")


def rounding_of(text: str) -> Fraction:
    """Half a unit in the last place of a decimal with enough digits to stand for another exact value, else 0."""
    slack = half_unit(text)
    significant = len(text.replace(".", "").strip("+- ").lstrip("0"))
    return slack if slack is not None and significant >= MIN_SIGNIFICANT_DIGITS else Fraction(0)
