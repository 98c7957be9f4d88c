r"""Read numbers in a text: `$1,234.50`, `1 3/4`, `6 \times 10^6`, "negative 5". No torch."""

import re
import unicodedata
from fractions import Fraction

from dsv4cli.engine.evaluation.formula import quantity
from dsv4cli.engine.evaluation.latex import MAX_DIGITS, SUPERSCRIPTS, power, value

_VULGAR = re.compile("(?<=\\d)(?=[¼-¾⅐-⅞])")
_ASCII = str.maketrans({"\N{MINUS SIGN}": "-", "\N{FRACTION SLASH}": "/", "’": "'"})
_MINUS = re.compile(
    r"(?<![\d)] )\bnegative (?=[$€£]?[\d.])|(?:(?<=\bis )|(?<=\bwas )|(?<=[=:(] )|^)minus (?=[$€£]?[\d.])"
    r"|(?<!正)负 ?(?=\d)"
)
# LaTeX that is written differently in plain text
_LATEX = [
    (re.compile(r"(?<=\d)(?=\\[dtc]?frac)"), lambda m: " "),
    (re.compile(r"\\[dtc]?frac *(?:\{(\d+)\}|(\d)) *(?:\{(\d+)\}|(\d))"), lambda m: f"{m[1] or m[2]}/{m[3] or m[4]}"),
    (re.compile(r"\{,\}|\\[,!]"), lambda m: ""),
    (re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*\{([^{}]*)\}"), lambda m: m[1]),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])"), lambda m: "×"),
    (re.compile(r"\^\s*\{\s*(-?\d+)\s*\}"), lambda m: f"^{m[1]}"),
    (re.compile(r"\\\$"), lambda m: "$"),
    (re.compile(r"\\[A-Za-z]+|\\[ ;:]"), lambda m: " "),
]  # fmt: skip
_EMPHASIS = re.compile(r"(?<!\d)\*\*|\*\*(?!\d)|(?<!\w)__|__(?!\w)")
_NUMBER = re.compile(
    r"""
    (?<![A-Za-z/]) (?<![A-Za-z)}\]][\^_])            # not the digits of CO2, of cm^2 or of a date
    (?P<sign>(?<![A-Za-z0-9_)\]}.%^])-)? [$€£¥]? (?P<inner>(?<=[$€£¥])-)?
    (?P<digits> (?<!\d) \d{1,3} (?:[,']\d{3})+ (?!\d)
      | (?<![\d,.]) \d{1,3} (?:\ \d{3})+ (?![\dA-Za-z-]|[,.]\d)
      | (?<![\d,]) \d{1,2} (?:,\d{2})+ ,\d{3} (?!\d)
      | \d+ (?!\d|(?:st|nd|rd|th)\b) )?
    (?P<decimals> (?(digits)|(?<![A-Za-z0-9_)\]}.])) \.\d+ )?
    (?(digits)|(?(decimals)|(?!)))
    (?: \ (?P<part>\d+)/(?P<parts>\d+) (?![/\d])
      | /(?P<below>\d+) (?![/\d])
      | (?:\ ?[×x*]\ ?10 (?:\^|\*\*) | [eE]\+?(?=-?\d)) (?P<tens>-?\d+)
      | (?:\^|\*\*) (?P<exponent>-?\d+) )?
    """,
    re.VERBOSE,
)


def number_of(text: str) -> Fraction | None:
    r"""Return the value of a text that is a number or begins with one: `3/4`, `\frac{3}{4}`, 18 for `18 apples`."""
    whole = number_alone(text)
    if whole is not None:
        return whole
    numbers = numbers_in(text)
    return numbers[0] if numbers else None


def number_alone(text: str) -> Fraction | None:
    """Return the value of a text that is a number with an optional unit; None if it says anything else."""
    return value(quantity(_ascii(text).strip(" \t\n*_`")).formula)


def numbers_in(text: str) -> list[Fraction]:
    """Return all numbers in a text, in order. Numbers of more than 60 characters are skipped."""
    found = (_value(one) for one in _NUMBER.finditer(plain(text)) if len(one[0]) <= MAX_DIGITS)
    return [one for one in found if one is not None]


def plain(text: str) -> str:
    """Replace LaTeX, emphasis and full-width characters with plain ASCII where possible."""
    text = _ascii(text)
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return _EMPHASIS.sub("", text)


def _ascii(text: str) -> str:
    text = SUPERSCRIPTS.sub(lambda found: f"^{unicodedata.normalize('NFKC', found[0])}", _VULGAR.sub(" ", text))
    text = unicodedata.normalize("NFKC", text).translate(_ASCII)
    return re.sub(r"-([$€£¥])", r"\1-", _MINUS.sub("-", text))


def _value(found: re.Match[str]) -> Fraction | None:
    number = _magnitude(found)
    return None if number is None else -number if found["sign"] or found["inner"] else number


def _magnitude(found: re.Match[str]) -> Fraction | None:
    digits = re.sub("[,' ]", "", found["digits"] or "0")
    number, divisor = Fraction(digits + (found["decimals"] or "")), int(found["below"] or found["parts"] or 1)
    if divisor == 0:
        return None
    if found["part"]:
        return number + Fraction(int(found["part"]), divisor)
    if found["tens"]:
        raised = power(10, int(found["tens"]))
        return None if raised is None else number * raised
    if found["exponent"] and not found["decimals"]:
        return power(int(digits), int(found["exponent"]))
    return number / divisor
